"""Memory and speed of a block drafter's training step beside the naive one, each in a process of its own, in one run.

    python benchmarks/block_step.py [--tokens 2048] [--anchors 512] [--slots 15] [--vocabulary 152064] [--width 64]

The naive step projects every slot onto the whole vocabulary at once and lets autograd keep it (the peers' plain form);
ours walks supervised slots in chunks and makes their gradient there. Same random tiny-width target, same blocks, same
hard cross entropy; the losses must agree. Peak memory is the process's high-water mark less that before the first step
(on a GPU: the allocator's).
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from checkpoints.run import machine
from drafters.block import BlockDrafter
from drafters.contract import Batch, TargetParts, grid
from training.objectives import Objective, slot_terms

GAMMA = 7.0


def setting(chosen: argparse.Namespace, device: torch.device) -> tuple[BlockDrafter, TargetParts, Batch]:
    """A random target's parts, a two-layer block drafter, and one row of one long answer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=chosen.vocabulary,
        hidden_size=chosen.width,
        intermediate_size=2 * chosen.width,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    table = torch.randn(chosen.vocabulary, chosen.width, device=device) * 0.05
    norm = LlamaRMSNorm(chosen.width).to(device)
    parts = TargetParts(config, table, norm, table, mask_token=chosen.vocabulary - 1)
    drafter = BlockDrafter(parts, None, num_slots=chosen.slots, block={"depth": 2}).to(device)
    length = chosen.tokens
    tokens = torch.randint(0, chosen.vocabulary - 1, (1, length), device=device)
    positions = torch.arange(length, device=device)[None]
    last = torch.randn(1, length, chosen.width, device=device)
    anchors = torch.randperm(length - chosen.slots - 2, device=device)[: chosen.anchors].sort().values[None] + 1
    one = torch.ones_like(tokens)
    aux = torch.randn(1, length, 5, chosen.width, device=device)
    lse = torch.zeros(1, length, device=device)
    return drafter, parts, Batch(tokens, positions, one * 0, one, aux, last, tokens.roll(-1, 1), lse, anchors)


def naive(drafter: BlockDrafter, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, denominator): all logits of all slots at once."""
    made, labels = drafter.slots(batch), grid(batch, drafter.num_slots)
    logits = drafter.logits(made.hidden.flatten(0, 2), made.prev_ids.flatten()).float()
    losses = torch.nn.functional.cross_entropy(logits, labels.target_ids.flatten(), reduction="none")
    weights = torch.exp(-torch.arange(drafter.num_slots, device=logits.device) / GAMMA) * labels.mask
    return (losses * weights.flatten()).sum(), weights.sum()


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    """Seconds (the fastest of the repeats), peak bytes above the start, loss and supervised slots of one form."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    drafter, parts, batch = setting(chosen, device)
    objective = Objective({"hard_ce": 1.0}, {"kind": "exponential", "gamma": GAMMA})
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = peak(device) if device.type == "cpu" else torch.cuda.memory_allocated()
    seconds, value = [], 0.0
    for _ in range(chosen.repeats + 1):
        start = time.perf_counter()
        if chosen.form == "naive":
            loss, denominator = naive(drafter, batch)
        else:
            terms = slot_terms(drafter, drafter.slots(batch), batch, parts, objective)
            loss, denominator = terms.loss, terms.denominator
        loss.backward()
        drafter.zero_grad()
        value = float(loss.detach() / denominator)
        seconds.append(time.perf_counter() - start)
    slots = int(grid(batch, drafter.num_slots).mask.sum())
    return {"seconds": min(seconds[1:]), "bytes": peak(device) - before, "loss": value, "slots": slots}


def peak(device: torch.device) -> int:
    """High-water mark of memory in bytes."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Measure both forms, each in its own process, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"tokens": 2048, "anchors": 512, "slots": 15, "vocabulary": 152064, "width": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--form", choices=("both", "naive", "chunked"), default="both")
    chosen = parser.parse_args()
    if chosen.form != "both":
        print(json.dumps(measure(chosen)))
        return
    found = {}
    for form in ("naive", "chunked"):
        done = subprocess.run([sys.executable, *sys.argv, "--form", form], capture_output=True, text=True, check=True)
        found[form] = json.loads(done.stdout.splitlines()[-1])
    table = Table(title=f"one step, {found['naive']['slots']} supervised slots, {machine()['device']}")
    for column in ("form", "seconds", "slots/s", "peak GB", "loss"):
        table.add_column(column)
    for form, row in found.items():
        rate = f"{row['slots'] / row['seconds']:.0f}"
        table.add_row(form, f"{row['seconds']:.2f}", rate, f"{row['bytes'] / 1e9:.2f}", f"{row['loss']:.5f}")
    Console().print(table)
    memory = found["naive"]["bytes"] / found["chunked"]["bytes"]
    speed = found["naive"]["seconds"] / found["chunked"]["seconds"]
    Console().print(f"naive over chunked: {memory:.1f}x memory, {speed:.2f}x time")


if __name__ == "__main__":
    main()
