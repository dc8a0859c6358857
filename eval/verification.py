"""Lossless verification of chain proposals: how many drafted tokens survive, and which token follows them.

Chain rejection sampling (Leviathan et al. 2211.17192, Chen et al. 2302.01318): accept x ~ q with chance
min(1, p(x) / q(x)); at the first rejection draw from the residual (p - q)+; after K acceptances draw the bonus token
from p. q * min(1, p / q) = min(p, q) and the rejected mass is exactly sum (p - q)+, so the emitted token follows p.
p and q must have gone through the same temperature, top-k and top-p.

Same-noise verification (PTP, arXiv 2512.21323): the target draws the token at every drafted position by inverse CDF
from that position's one noise, and drafts are kept while they equal its picks. The output is the target's own sample
for these noises whatever is proposed, so long as a position's noise is never drawn anew.

Shapes are fixed and nothing waits for the device, so the same code can live in a captured graph.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.noise import pick
from drafters.sampling import ACCEPT_STREAM, NOISE_STREAM, RESIDUAL_STREAM, counter_uniform, draw


@dataclass
class Verdict:
    """accepted [R] int64 in 0..K. tokens [R, K+1]: accepted drafts, then the corrected or bonus token, then -1."""

    accepted: Tensor
    tokens: Tensor


def acceptance(p_drafted: Tensor, q_drafted: Tensor | None) -> Tensor:
    """Chance that a drafted token is accepted: min(1, p / q), or p itself when the token was chosen deterministically.

    p_drafted, q_drafted [...]: probabilities of the drafted token under target and drafter. Returns [...] in [0, 1].
    """
    if q_drafted is None:
        return p_drafted
    return torch.where(q_drafted > p_drafted, p_drafted / q_drafted, torch.ones_like(p_drafted))


def residual(p: Tensor, q: Tensor | None, drafted: Tensor) -> Tensor:
    """Weights of the corrected token after `drafted` was rejected: (p - q)+, or p without the drafted token.

    p, q [..., V]; drafted [...] int64. Not normalised. Where rounding leaves no weight at all (p = q to the last bit),
    returns p.
    """
    weights = p.scatter(-1, drafted[..., None], 0.0) if q is None else (p - q).clamp_min(0)
    return torch.where(weights.sum(-1, keepdim=True) > 0, weights, p)


def verify(p: Tensor, tokens: Tensor, q: Tensor | None, seeds: Tensor, positions: Tensor) -> Verdict:
    """Rejection sampling of one proposal per request.

    p [R, K+1, V] target distributions after the anchor and after each drafted token. tokens [R, K] drafted ids.
    q [R, K, V] the distributions they were drawn from; None for a deterministic proposal. seeds [R] int64.
    positions [R] int64: the anchor's position in its text, so that slot k lies at positions + k. One uniform per
    (seed, position) and purpose: a request draws the same tokens alone and in any batch.
    """
    num_slots = tokens.shape[1]
    steps = torch.arange(1, num_slots + 1, device=tokens.device)
    p_drafted = p[:, :num_slots].gather(-1, tokens[..., None]).squeeze(-1)
    q_drafted = None if q is None else q.gather(-1, tokens[..., None]).squeeze(-1)
    uniforms = counter_uniform(seeds[:, None], positions[:, None] + steps, ACCEPT_STREAM)
    accepted = (uniforms < acceptance(p_drafted, q_drafted)).long().cumprod(1).sum(1)
    weights = row_of(p, accepted)
    if num_slots:
        at = accepted.clamp_max(num_slots - 1)
        drafted = tokens.gather(1, at[:, None]).squeeze(1)
        corrected = residual(weights, None if q is None else row_of(q, at), drafted)
        weights = torch.where((accepted < num_slots)[:, None], corrected, weights)
    last = draw(weights, counter_uniform(seeds, positions + accepted + 1, RESIDUAL_STREAM))
    return Verdict(accepted, emitted(tokens, accepted, last))


def verify_greedy(best: Tensor, tokens: Tensor) -> Verdict:
    """Greedy verification: a drafted token is accepted while it equals the target's argmax.

    best [R, K+1] int64 argmax after the anchor and after each drafted token; tokens [R, K]. Any proposal is lossless.
    """
    num_slots = tokens.shape[1]
    accepted = (best[:, :num_slots] == tokens).long().cumprod(1).sum(1)
    return Verdict(accepted, emitted(tokens, accepted, best.gather(1, accepted[:, None]).squeeze(1)))


def verify_same_noise(p: Tensor, tokens: Tensor, seeds: Tensor, positions: Tensor, ranked: bool = False) -> Verdict:
    """Keep drafted tokens while they are what the target draws from the same noise; then the target's own token.

    Shapes as in `verify`. Slot k's noise is counter_uniform(seeds, positions + k, NOISE_STREAM), which is also what
    decoding without a drafter draws that token from: the output is equal to it, token by token. ranked: inverse CDF
    over tokens in order of falling probability instead of token ids.
    """
    steps = torch.arange(1, p.shape[1] + 1, device=tokens.device)
    noise = counter_uniform(seeds[:, None], positions[:, None] + steps, NOISE_STREAM)
    return verify_greedy(pick(p, noise, ranked), tokens)


def take_all(tokens: Tensor) -> Verdict:
    """LOSSY: every drafted token stands, unseen by the target; the last one is the next anchor. tokens [R, K]."""
    return Verdict(
        tokens.new_full(tokens.shape[:1], tokens.shape[1] - 1), torch.nn.functional.pad(tokens, (0, 1), value=-1)
    )


def row_of(values: Tensor, index: Tensor) -> Tensor:
    """values [R, N, V], index [R] -> [R, V]."""
    return values.gather(1, index[:, None, None].expand(-1, 1, values.shape[-1])).squeeze(1)


def emitted(tokens: Tensor, accepted: Tensor, last: Tensor) -> Tensor:
    """Tokens [R, K+1] of a Verdict: drafts [R, K] up to accepted [R], then last [R], then -1."""
    padded = torch.cat([tokens, last[:, None]], 1)
    steps = torch.arange(padded.shape[1], device=tokens.device)
    kept = torch.where(steps < accepted[:, None], padded, -1)
    return torch.where(steps == accepted[:, None], last[:, None], kept)
