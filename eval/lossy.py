"""LOSSY acceptance: drafts stand although the target would not have written them, and how far the text moved by it.

typical    (arXiv 2401.10774) p(x) > min(epsilon, delta * exp(-H(p)))
threshold  p(x) >= threshold

p is the target's distribution, at temperature 1 where decoding is greedy. A draft that equals the target's own pick
always stands, so the strictest rule gives the target's own text. Every report that comes of this is labelled LOSSY and
scored: share of answers equal to the target's greedy ones, and the target's own log-probability of the text beside that
of text it wrote itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data.target import Target
from drafters.sampling import RESIDUAL_STREAM, Sampling, counter_uniform, draw
from eval.verification import Verdict, verify_greedy

RULES = ("typical", "threshold")
ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class Lossy:
    """Which drafts stand. rule: typical or threshold. epsilon, delta: of typical (the paper's code has these).
    threshold: least probability. ValueError on other rules and on negative values."""

    rule: str
    epsilon: float = 0.09
    delta: float = 0.3
    threshold: float = 0.3

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"a lossy verification must be one of {', '.join(RULES)}, got {self.rule!r}")
        for name in ("epsilon", "delta", "threshold"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} of a lossy verification must be >= 0, got {getattr(self, name)}")

    @property
    def words(self) -> str:
        """The rule with its values."""
        if self.rule == "threshold":
            return f"a draft stands where p(x) >= {self.threshold:g}"
        return f"a draft stands where p(x) > min({self.epsilon:g}, {self.delta:g} * exp(-H(p)))"

    def stands(self, p: Tensor, drafted: Tensor) -> Tensor:
        """Which drafts stand. p [..., V]; drafted [...] int64. Returns bool [...]."""
        chance = p.gather(-1, drafted[..., None]).squeeze(-1)
        if self.rule == "threshold":
            return chance >= self.threshold
        entropy = -torch.special.xlogy(p, p).sum(-1)
        return chance > (self.delta * torch.exp(-entropy)).clamp_max(self.epsilon)


def verify_lossy(
    logits: Tensor, tokens: Tensor, rule: Lossy, sampling: Sampling, seeds: Tensor, positions: Tensor
) -> Verdict:
    """Keep drafts while they stand or equal the target's own pick; then the target's own pick.

    logits [R, K+1, V] of the target; the rest as in eval.verification.verify. Slot k's pick is drawn with the noise
    that decoding without a drafter draws that token with.
    """
    if sampling.greedy:
        p, picks = logits.float().softmax(-1), logits.argmax(-1)
    else:
        p = sampling.probs(logits)
        steps = torch.arange(1, p.shape[1] + 1, device=p.device)
        picks = draw(p, counter_uniform(seeds[:, None], positions[:, None] + steps, RESIDUAL_STREAM))
    own = torch.where(rule.stands(p[:, :-1], tokens), tokens, picks[:, :-1])
    return verify_greedy(torch.cat([own, picks[:, -1:]], 1), tokens)


@dataclass(frozen=True)
class Agreement:
    """How near lossy text is to the target's.

    same_answers: share of answers equal to the target's greedy ones; None when decoding was sampled. log_prob,
    target_log_prob: mean over tokens of the target's log-probability at temperature 1, in nats, of the text that was
    kept and of text that the target wrote alone under the same settings.
    """

    same_answers: float | None
    log_prob: float
    target_log_prob: float


def agreement(
    target: Target,
    prompts: Sequence[list[int]],
    kept: Sequence[list[int]],
    own: Sequence[list[int]],
    greedy: bool,
) -> Agreement:
    """Score answers (new tokens) to prompts against the target's own answers to the same prompts."""
    same = sum(one == other for one, other in zip(kept, own, strict=True)) / len(kept) if greedy else None
    return Agreement(same, _mean(target, prompts, kept), _mean(target, prompts, own))


def _mean(target: Target, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> float:
    values = [log_probs(target, prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    return float(torch.cat(values).double().mean())


@torch.no_grad()
def log_probs(target: Target, prompt: list[int], answer: list[int]) -> Tensor:
    """The target's log-probability of each new token at temperature 1, in one pass. float32 [n] on the CPU."""
    text = torch.tensor([prompt + answer], device=target.device)
    last = target.forward(text[:, :-1], ()).last[0, len(prompt) - 1 :]
    found = []
    for start in range(0, len(answer), ROWS_AT_ONCE):
        logits = target.logits(last[start : start + ROWS_AT_ONCE]).float()
        wanted = text[0, len(prompt) + start :][: len(logits)].to(logits.device)
        found.append(logits.log_softmax(-1).gather(-1, wanted[:, None])[:, 0].cpu())
    return torch.cat(found)
