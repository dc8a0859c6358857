"""Products of a few rows with a small target's matrices on a CPU: plain, and from weights laid out once.

    python benchmarks/packed_linear.py [--width 576] [--inner 1536] [--layers 60] [--vocabulary 49152]

Milliseconds of all products of one forward (the fastest of eight), both forms in one run.
"""

import argparse
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from checkpoints.run import machine
from data.packed import PackedLinear


def milliseconds(work: Callable[[], object]) -> float:
    """The fastest of eight."""
    found = []
    for _ in range(8):
        start = time.perf_counter()
        work()
        found.append(1e3 * (time.perf_counter() - start))
    return min(found)


@torch.inference_mode()
def main() -> None:
    """Time both forms for several row counts and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"width": 576, "inner": 1536, "layers": 60, "vocabulary": 49152}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    chosen = parser.parse_args()
    shapes = [(chosen.inner, chosen.width)] * chosen.layers + [(chosen.vocabulary, chosen.width)]
    weights = [torch.randn(shape) for shape in shapes]
    packed = [PackedLinear(weight) for weight in weights]
    table = Table(title=f"ms of {len(weights)} products, {machine()['threads']} threads")
    for column in ("rows", "plain", "packed", "ratio"):
        table.add_column(column)
    for rows in (1, 2, 4, 6, 8, 16, 48, 256):
        states = torch.randn(rows, chosen.width)
        plain = milliseconds(lambda x=states: [torch.nn.functional.linear(x, weight) for weight in weights])
        ours = milliseconds(lambda x=states: [one(x) for one in packed])
        table.add_row(str(rows), f"{plain:.1f}", f"{ours:.1f}", f"{plain / ours:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
