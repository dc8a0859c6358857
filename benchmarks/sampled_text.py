"""Sampled text of a real target with a trained head, held to the target's exact probabilities by chi-square.

    python benchmarks/sampled_text.py TARGET HEAD [--samples 1250] [--verification block] [--fault residual]

Continuations of four fixed prefixes are drawn with the drafter, as `headstart eval` draws them. Exact chances come from
the target alone: a prefix tree is grown from likely tokens, every node keeps one more cell for all others, and
neighbouring cells are counted together until they expect five. One test a prefix, Holm's correction over the prefixes.
A planted fault shows that as many continuations would have told: `residual` draws the corrected token from p in place
of (p - q)+, `ratio` accepts with p / q of a q that went through another temperature.
"""

import argparse
import functools
from collections import Counter
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from checkpoints.folder import load_drafter
from data.target import Target
from drafters.contract import Drafter
from drafters.sampling import Sampling
from eval import decoder as loop
from eval import verification
from eval.decoder import DecodeSettings, generate

PREFIXES = ("The capital of France is", "Once upon a time there was", "def add(a, b):\n", "Thank you very")
LEAST = 5.0  # expected count of a cell
Text = tuple[int, ...]


@dataclass(frozen=True)
class Result:
    """One prefix: cells and p value of its test, tau (as engines count it) of the rounds that drew its samples."""

    cells: int
    p: float
    tau: float


@torch.no_grad()
def exact_cells(
    target: Target, prompt: list[int], length: int, sampling: Sampling, least: float, rows: int = 64
) -> dict[Text, float]:
    """Chances of all continuations of up to `length` tokens, as a partition: a key that ends in -1 stands for every
    other token there. A text that ends its turn is complete. least: chance under which a token gets no cell."""
    cells: dict[Text, float] = {}
    grown: dict[Text, float] = {(): 1.0}
    for step in range(length):
        texts, following = list(grown), {}
        for start in range(0, len(texts), rows):
            some = texts[start : start + rows]
            ids = torch.tensor([prompt + list(text) for text in some], device=target.device)
            p = sampling.probs(target.logits(target.forward(ids, ()).last[:, -1])).double().cpu()
            for text, line in zip(some, p, strict=True):
                likely = (grown[text] * line >= least).nonzero().flatten().tolist()
                cells[*text, -1] = grown[text] * float(1 - line[likely].sum())
                following |= {(*text, token): grown[text] * float(line[token]) for token in likely}
        ended = {t: mass for t, mass in following.items() if t[-1] in target.eos_ids or step == length - 1}
        cells |= ended
        grown = {t: mass for t, mass in following.items() if t not in ended}
    return cells


def count(texts: list[Text], cells: dict[Text, float]) -> Counter[Text]:
    """How many continuations fall into each cell."""
    nodes = {cell[:n] for cell in cells for n in range(1, len(cell) + 1) if cell[n - 1] != -1}
    seen: Counter[Text] = Counter()
    for text in texts:
        left = next((n for n in range(len(text)) if text[: n + 1] not in nodes), None)
        seen[text if left is None else (*text[:left], -1)] += 1
    return seen


def chi_square(seen: Counter[Text], cells: dict[Text, float]) -> tuple[int, float]:
    """(cells, p value). Neighbours in the tree are counted together until they expect LEAST. ValueError for a
    continuation outside all cells, and for too few continuations to tell anything."""
    if unknown := set(seen) - set(cells):
        raise ValueError(f"continuations outside all cells: {sorted(unknown)[:3]}")
    total, want, got = seen.total(), [0.0], [0]
    for cell in sorted(cells):
        if want[-1] >= LEAST:
            want.append(0.0)
            got.append(0)
        want[-1] += cells[cell] * total
        got[-1] += seen[cell]
    if want[-1] < LEAST and len(want) > 1:
        want[-2:], got[-2:] = [sum(want[-2:])], [sum(got[-2:])]
    if len(want) < 2:
        raise ValueError(f"{total} continuations fill one cell of {LEAST:g}: draw more samples")
    statistic = sum((g - w) ** 2 / w for g, w in zip(got, want, strict=True))
    half = torch.tensor([(len(want) - 1) / 2, statistic / 2]).double()
    return len(want), float(torch.special.gammaincc(half[0], half[1]))


def measure(
    target: Target, drafter: Drafter | None, prompt: list[int], settings: DecodeSettings, samples: int, first_seed: int
) -> Result:
    """Draw `samples` continuations of settings.max_new_tokens and test them."""
    seeds = range(first_seed, first_seed + samples)
    made = generate(target, drafter, [prompt] * samples, settings, seeds=list(seeds))
    cells = exact_cells(target, prompt, settings.max_new_tokens, settings.sampling, LEAST / samples)
    kept, p = chi_square(count([tuple(one.tokens) for one in made], cells), cells)
    rounds = sum(len(one.verified) for one in made)
    return Result(kept, p, 1 + sum(sum(one.verified) for one in made) / max(1, rounds))


def holm(values: list[float]) -> list[float]:
    """Corrected p values, in the order given (Holm 1979)."""
    order = sorted(range(len(values)), key=values.__getitem__)
    corrected, highest = [0.0] * len(values), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(values) - rank) * values[index]))
        corrected[index] = highest
    return corrected


def plant(fault: str | None) -> None:
    """Break verification in this process; None leaves it whole."""
    if fault == "residual":
        verification.residual = lambda p, q, drafted: p
    elif fault == "ratio":
        loop.verify = functools.partial(_cooler, loop.verify)


def _cooler(verify, p, tokens, q, seeds, positions):  # type: ignore[no-untyped-def]
    cooler = q**2
    return verify(p, tokens, cooler / cooler.sum(-1, keepdim=True), seeds, positions)


def main() -> None:
    """Test every prefix and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("head")
    for name, value in {"samples": 1250, "new-tokens": 4, "slots": 4, "batch": 64, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--verification", choices=("rejection", "block"))
    parser.add_argument("--fault", choices=("residual", "ratio"))
    chosen = parser.parse_args()
    plant(chosen.fault)
    target = Target.load(chosen.target, "float32")
    drafter = load_drafter(chosen.head, target.parts)
    sampling = Sampling(chosen.temperature)
    settings = DecodeSettings(chosen.slots, chosen.new_tokens, chosen.batch, sampling, verification=chosen.verification)
    found = [
        measure(target, drafter, prompt, settings, chosen.samples, chosen.seed + 10**6 * index)
        for index, prompt in enumerate(target.tokenizer(list(PREFIXES), add_special_tokens=False)["input_ids"])
    ]
    table = Table(
        title=f"{len(PREFIXES) * chosen.samples} continuations of {chosen.new_tokens} tokens", title_justify="left"
    )
    for name in ("prefix", "tau of engines", "cells", "p", "p, Holm"):
        table.add_column(name)
    for prefix, one, corrected in zip(PREFIXES, found, holm([one.p for one in found]), strict=True):
        table.add_row(repr(prefix), f"{one.tau:.2f}", str(one.cells), f"{one.p:.4f}", f"{corrected:.4f}")
    Console().print(table)


if __name__ == "__main__":
    main()
