"""One training step of EAGLE-3 here beside a plain dense one, in one run: tokens/s and their ratio.

    python benchmarks/train_step.py PREPARED_FOLDER TARGET [--conversations 8] [--repeats 3]

The plain one is what the paper's repository does, written straight: a padded batch of conversations, every position a
query at every step, T x T attention, float32 teacher and draft logits of all positions at all steps, 16,384 draft
words. Ours: packed rows, queries at anchors only, chains thinned by `keep`, gradients made chunk by chunk, a small
draft vocabulary. Both read the same conversations; tokens are answer tokens. Steps are timed in turn, the fastest of
each counts.
"""

import argparse
import itertools
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from checkpoints.run import machine
from data.collate import Collate, pack
from data.conversations import read_conversations, token_counts
from data.features import FeatureStore, Sample
from data.target import Target
from drafters.contract import Batch
from drafters.eagle3 import Eagle3
from drafters.vocabulary import DraftVocabulary
from training.objectives import Objective, slot_terms


def plain_loss(drafter: Eagle3, target: Target, batch: Batch) -> Tensor:
    """The dense loss: soft cross entropy 0.8^k over all rows, positions and steps. batch holds one conversation a
    row."""
    ids, parts = drafter.vocabulary.ids, target.parts
    layer = drafter.midlayer
    rows, length = batch.tokens.shape
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    teacher = parts.logits(batch.last).float().softmax(-1)
    inside = drafter.vocabulary.t2d[teacher.argmax(-1)] & (batch.turns > 0)
    hidden, keys, values, total = drafter.fuse(batch.aux), [], [], 0.0
    for k in range(drafter.num_slots):
        tokens = batch.tokens.roll(-1 - k, 1)
        joined, residual = layer.join(hidden, drafter.embedding(tokens))
        positions = batch.positions + k
        key, value = layer.self_attn.keys_values(joined, drafter.rotary, positions)
        keys.append(key)
        values.append(value)
        query = layer.self_attn.query(joined, drafter.rotary, positions)
        group = query.shape[1] // key.shape[1]
        scores = query @ keys[0].repeat_interleave(group, 1).transpose(-1, -2) / query.shape[-1] ** 0.5
        scores = scores.masked_fill(~causal, torch.finfo(scores.dtype).min)
        own = [
            (query * other.repeat_interleave(group, 1)).sum(-1, keepdim=True) / query.shape[-1] ** 0.5
            for other in keys[1:]
        ]
        weights = torch.cat([scores, *own], -1).softmax(-1)
        attended = weights[..., :length] @ values[0].repeat_interleave(group, 1)
        for j, other in enumerate(values[1:]):
            attended = attended + weights[..., length + j, None] * other.repeat_interleave(group, 1)
        hidden = layer.finish(residual, attended)
        wanted, mask = teacher.roll(-1 - k, 1)[..., ids], inside.roll(-1 - k, 1)
        wanted = wanted / wanted.sum(-1, keepdim=True)
        logq = drafter.logits(drafter.norm(hidden), tokens).float().log_softmax(-1)
        total = total - 0.8**k * ((wanted * logq).sum(-1) * mask).sum() / (rows * length)
    return total


def fast_loss(drafter: Eagle3, target: Target, batch: Batch, objective: Objective) -> Tensor:
    """The toolkit's step, as the Lightning module runs it."""
    terms = slot_terms(drafter, drafter.slots(batch), batch, target.parts, objective)
    return terms.loss / terms.denominator


def step(loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> float:
    """Seconds of one optimizer step."""
    started = time.perf_counter()
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()
    return time.perf_counter() - started


def batches(samples: list[Sample]) -> tuple[Batch, Batch]:
    """The same conversations padded one a row, and packed."""
    longest = max(len(one.tokens) for one in samples)
    width = -(-longest // 64) * 64
    rows = pack([len(one.tokens) for one in samples], width, range(len(samples)))
    return Collate(longest)([[one] for one in samples]), Collate(width)([[samples[i] for i in row] for row in rows])


def main() -> None:
    """Time both steps in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("prepared", type=Path)
    parser.add_argument("target")
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--slots", type=int, default=5)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--keep", type=float, default=0.7)
    chosen = parser.parse_args()
    target = Target.load(chosen.target)
    store = FeatureStore.open(chosen.prepared / "features", target.identity, None, "lazy")
    counts = token_counts(read_conversations(chosen.prepared / "conversations.jsonl"), target.identity["vocab_size"])
    samples = [store[i] for i in itertools.islice(range(len(store)), chosen.conversations)]
    padded, packed = batches(samples)
    tokens = int((padded.turns > 0).sum())
    layers = list(store.layers)
    plain = Eagle3(target.parts, DraftVocabulary.from_counts(counts, 16384), num_slots=chosen.slots, layers=layers)
    fast = Eagle3(
        target.parts,
        DraftVocabulary.from_counts(counts, chosen.vocabulary),
        num_slots=chosen.slots,
        layers=layers,
        keep=chosen.keep,
    )
    optimizers = [torch.optim.AdamW(d.parameters(), lr=1e-4) for d in (plain, fast)]
    objective = Objective({"soft_ce": 1.0})
    losses = (lambda: plain_loss(plain, target, padded), lambda: fast_loss(fast, target, packed, objective))
    seconds: list[list[float]] = [[], []]
    for _ in range(chosen.repeats + 1):
        for which in (0, 1):
            seconds[which].append(step(losses[which], optimizers[which]))
    best = [min(times[1:]) for times in seconds]
    table = Table("step", "seconds", "answer tokens/s", "ratio", title=f"{tokens} answer tokens, {machine()}")
    for name, time_s in zip(("plain dense", "headstart"), best, strict=True):
        table.add_row(name, f"{time_s:.2f}", f"{tokens / time_s:.0f}", f"{best[0] / time_s:.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
