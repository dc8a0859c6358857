"""LOSSY: K tokens for each pass of the target, none of them verified (K-Forcing, arXiv 2606.10820), and the price.

    python -m eval.pushforward drafter_dir=... temperature=1 prompts=builtin

The target only reads what the drafter wrote, so that the next block has features; the text is the drafter's. Its
quality stands beside text that the target wrote from the same noises: mean log-likelihood under the target at
temperature 1, as perplexity, and the share of tokens that are the target's own picks for their noise, by slot.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console
from torch import Tensor

from checkpoints.files import write_json
from checkpoints.folder import load_drafter
from checkpoints.run import known_groups, machine, record, settings
from data.conversations import Prompt
from data.target import Target, TargetSettings
from drafters.contract import Drafter
from drafters.noise import pick
from drafters.sampling import NOISE_STREAM, Sampling, counter_uniform
from eval.decoder import Clock, DecodeSettings, Generation, generate
from eval.eval_settings import OPTIONS, EvalSettings, checked
from eval.evaluate import drafter_words, load_prompts, render
from eval.passes import WARM_UP_TOKENS, prompt_seed

FILE = "pushforward.json"
UNUSED = ("replay", "recording", "calibrate", "predicted", "pareto", "traces")  # what `headstart eval` has besides
WORDS = "LOSSY: no token is verified; this text is the drafter's, not the target's"


@dataclass(frozen=True)
class Quality:
    """Of a set of answers. tokens: how many. log_likelihood: mean over them under the target at temperature 1, in nats;
    perplexity: exp of its negative. distinct_bigrams: share of different pairs of neighbours, mean over answers."""

    tokens: int
    log_likelihood: float
    perplexity: float
    distinct_bigrams: float
    tokens_per_s: float


@dataclass(frozen=True)
class PushForward:
    """A lossy run beside the target's own. tokens_per_call: drafted tokens for each pass of the target that reads them.

    agreement, agreement_prefix [K]: share of blocks whose slot k (whose slots 1..k) are what the target picks with the
    same noise after the text before; None for a drafter that reads other noise.
    """

    drafted: Quality
    sampled: Quality
    tokens_per_call: float
    agreement: list[float] | None
    agreement_prefix: list[float] | None
    settings: dict[str, Any]
    drafter: dict[str, Any]
    target: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """The keys of pushforward.json; the first one says that it is lossy."""
        return {"lossy": True, "warning": WORDS} | asdict(self) | {"machine": machine()}

    def show(self, console: Console) -> None:
        """A few lines, LOSSY first."""
        console.print(WORDS, style="bold red")
        for name, one in (("drafted", self.drafted), ("target's own", self.sampled)):
            console.print(
                f"{name:13} {one.tokens} tokens, perplexity {one.perplexity:.2f} under the target, distinct bigrams "
                f"{one.distinct_bigrams:.2f}, {one.tokens_per_s:.1f} tokens/s",
                highlight=False,
            )
        console.print(f"tokens a call {self.tokens_per_call:.2f}", highlight=False)
        for name, values in (("one by one", self.agreement), ("whole prefix", self.agreement_prefix)):
            if values is not None:
                shown = " ".join(f"{value:.3f}" for value in values)
                console.print(f"same-noise agreement by slot, {name}: {shown}", highlight=False)


def push_forward(target: Target, drafter: Drafter, prompts: Sequence[Prompt], chosen: EvalSettings) -> PushForward:
    """Decode all prompts without verification and, from the same noises, by the target alone; score both.

    Seeds and rendering as in eval.evaluate. ValueError without prompts, or on equal ids.
    """
    prompts = checked(prompts, chosen)
    rendered = render(target, prompts, chosen)
    texts = [rendered[prompt.id] for prompt in prompts]
    seeds = [prompt_seed(prompt.id, chosen.seed) for prompt in prompts]
    lossy = replace(chosen.decoding(drafter), verification="none")
    _warm_up(target, drafter, texts[0], (lossy, chosen.plain_decoding()))
    drafted, sampled = Clock(target.device), Clock(target.device)
    made = generate(target, drafter, texts, lossy, drafted, seeds)
    own = generate(target, None, texts, chosen.plain_decoding(), sampled, seeds)
    ranked = drafter.coupling == "same_noise_ranked"
    scores = [score(target, *one, lossy.sampling, ranked) for one in zip(texts, made, seeds, strict=True)]
    plain = [score(target, *one, lossy.sampling, False) for one in zip(texts, own, seeds, strict=True)]
    agreement = prefix = None
    if drafter.coupling != "rejection" or lossy.sampling.greedy:
        agreement, prefix = agreements(made, [same for _, same in scores], lossy.num_slots)
    rounds = sum(len(one.emitted) for one in made)
    return PushForward(
        drafted=quality(made, [likely for likely, _ in scores], drafted),
        sampled=quality(own, [likely for likely, _ in plain], sampled),
        tokens_per_call=sum(sum(one.emitted) for one in made) / max(rounds, 1),
        agreement=agreement,
        agreement_prefix=prefix,
        settings=asdict(chosen) | {"num_slots": lossy.num_slots, "verification": "none"},
        drafter=drafter_words(drafter),
        target=dict(target.identity),
    )


def _warm_up(
    target: Target, drafter: Drafter, prompt: list[int], settings: tuple[DecodeSettings, DecodeSettings]
) -> None:
    """A few untimed tokens with the drafter and without, so that first-call costs fall on neither side. settings: of
    the two."""
    for one, how in zip((drafter, None), settings, strict=True):
        generate(target, one, [prompt], replace(how, max_new_tokens=min(WARM_UP_TOKENS, how.max_new_tokens)))


@torch.no_grad()
def score(
    target: Target, prompt: list[int], answer: Generation, seed: int, sampling: Sampling, ranked: bool
) -> tuple[Tensor, Tensor]:
    """Of each new token, in one pass over the text: log-likelihood under the target at temperature 1, float32 [n], and
    whether it is what the target picks for the position's noise after the text before it, bool [n]."""
    text = torch.tensor([prompt + answer.tokens], device=target.device)
    last = target.forward(text[:, :-1], ()).last[0, len(prompt) - 1 :]
    logits = target.logits(last).float()
    tokens = text[0, len(prompt) :].to(logits.device)
    likely = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    if sampling.greedy:
        return likely.cpu(), (logits.argmax(-1) == tokens).cpu()
    positions = torch.arange(len(prompt), text.shape[1], device=logits.device)
    noise = counter_uniform(torch.full_like(positions, seed), positions, NOISE_STREAM)
    return likely.cpu(), (pick(sampling.probs(logits), noise, ranked) == tokens).cpu()


def agreements(made: Sequence[Generation], same: Sequence[Tensor], num_slots: int) -> tuple[list[float], list[float]]:
    """Shares by slot of blocks that have the slot: the slot agrees; it and all before it in the block do. same: by
    answer, by new token, the first of which belongs to no block."""
    counts, hits, prefixes = ([0] * num_slots for _ in range(3))
    for one, flags in zip(made, same, strict=True):
        start = 1
        for emitted in one.emitted:
            block = flags[start : start + emitted].tolist()
            for k, hit in enumerate(block):
                counts[k] += 1
                hits[k] += hit
                prefixes[k] += all(block[: k + 1])
            start += emitted
    return [h / max(n, 1) for h, n in zip(hits, counts, strict=True)], [
        h / max(n, 1) for h, n in zip(prefixes, counts, strict=True)
    ]


def quality(answers: Sequence[Generation], likely: Sequence[Tensor], clock: Clock) -> Quality:
    """Quality of answers whose tokens have these log-likelihoods."""
    tokens = sum(len(one.tokens) for one in answers)
    mean = float(torch.cat(list(likely)).double().mean())
    pairs = [list(zip(one.tokens, one.tokens[1:], strict=False)) for one in answers if len(one.tokens) > 1]
    distinct = [len(set(one)) / len(one) for one in pairs]
    return Quality(
        tokens=tokens,
        log_likelihood=mean,
        perplexity=math.exp(min(-mean, 700.0)),
        distinct_bigrams=sum(distinct) / max(len(distinct), 1),
        tokens_per_s=tokens / max(sum(clock.seconds.values()), 1e-9),
    )


def run(config: DictConfig, folder: Path) -> PushForward:
    """Measure as configured; writes pushforward.json and run.json into folder."""
    own = [key.name for key in fields(EvalSettings) if key.name != "tree"]
    known_groups(config, "drafter_dir", "prompts", "target", "tree", *OPTIONS, *own)
    if config.tree.kind != "none":
        raise ValueError(f"pushed text is a chain: tree must be none, got {config.tree.kind}")
    if config.schedule.name is not None or config.loop is not None:
        raise ValueError("pushed text is not verified: schedule must be none and loop null")
    if beside := [name for name in UNUSED if config.get(name)]:
        raise ValueError(f"pushed text is decoded and scored, and no more: leave out {', '.join(beside)}")
    chosen = settings(EvalSettings, {name: config[name] for name in own if name in config}, "eval")
    target = Target.load(**asdict(settings(TargetSettings, config.target, "target")))
    drafter = load_drafter(Path(config.drafter_dir).expanduser().resolve(), target.parts, weights=chosen.weights)
    found = push_forward(target, drafter, load_prompts(config.prompts), chosen)
    record(folder, config, target=target.identity)
    write_json(folder / FILE, found.as_dict())
    return found


@hydra.main(version_base="1.3", config_path="pkg://conf", config_name="eval")
def main(config: DictConfig) -> None:
    """Decode without verification and print what that costs."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    run(config, folder).show(Console())
    Console().print(f"report        {folder / FILE}", soft_wrap=True)


if __name__ == "__main__":
    main()
