"""Chain rejection and block verification on the very same rounds of a real target with a trained head.

    python benchmarks/verification_rules.py TARGET HEAD [--prompts builtin] [--limit 4] [--slots 1 3 5]

Prompts are sampled with chain rejection, as `headstart eval temperature=1` does, and every round's p, drafts and q are
judged by both rules with their random numbers integrated out (eval.verification_block.expected): no rule sees an easier
text. A depth's drafts are also the deeper ones' first, so depths below --slots' largest are read from the same rounds.
"""

import argparse

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from checkpoints.folder import load_drafter
from data.suites import load_prompts
from data.target import Target
from drafters.contract import Drafter
from drafters.sampling import Sampling
from eval import decoder as loop
from eval.decoder import DecodeSettings, generate
from eval.evaluate import EvalSettings, checked, render
from eval.verification import Verdict
from eval.verification_block import expected


def judged(
    target: Target, drafter: Drafter, prompts: list[list[int]], settings: DecodeSettings, depths: list[int]
) -> dict[int, Tensor]:
    """Drafts kept by the chain rule and by block verification, [rounds, 2] float64, at every depth."""
    found: dict[int, list[Tensor]] = {depth: [] for depth in depths}
    verify = loop.verify

    def both(p: Tensor, tokens: Tensor, q: Tensor | None, seeds: Tensor, positions: Tensor) -> Verdict:
        for depth, seen in found.items():
            given = None if q is None else q[:, :depth].double()
            seen.append(torch.stack(expected(p[:, : depth + 1].double(), tokens[:, :depth], given), 1))
        return verify(p, tokens, q, seeds, positions)

    loop.verify = both
    try:
        generate(target, drafter, prompts, settings)
    finally:
        loop.verify = verify
    return {depth: torch.cat(seen) for depth, seen in found.items()}


def main() -> None:
    """Judge every round and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("head")
    parser.add_argument("--prompts", default="builtin")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 3, 5])
    parser.add_argument("--temperature", type=float, default=1.0)
    for name, value in {"limit": 4, "new-tokens": 64, "batch": 16}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    chosen = parser.parse_args()
    target = Target.load(chosen.target, "float32")
    drafter = load_drafter(chosen.head, target.parts)
    asked = EvalSettings(limit=chosen.limit)
    prompts = render(target, checked(load_prompts(chosen.prompts), asked), asked)
    settings = DecodeSettings(max(chosen.slots), chosen.new_tokens, chosen.batch, Sampling(chosen.temperature))
    found = judged(target, drafter, list(prompts.values()), settings, chosen.slots)
    table = Table(title=f"{len(prompts)} prompts, temperature {chosen.temperature}", title_justify="left")
    for name in ("depth", "rounds", "chain keeps", "block keeps", "gain", "standard error of the gain"):
        table.add_column(name)
    for depth, kept in found.items():
        chain, block = kept.mean(0).tolist()
        error = float((kept[:, 1] - kept[:, 0]).std() / len(kept) ** 0.5)
        gain = f"{block - chain:+.3f} ({block / chain - 1:+.1%})"
        table.add_row(str(depth), str(len(kept)), f"{chain:.3f}", f"{block:.3f}", gain, f"{error:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
