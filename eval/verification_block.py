"""Block verification (Sun et al., arXiv 2403.10444): lossless, and keeps at least as many drafts as the chain rule.

The chain rule forgets, at each slot, how much of p the slots before left over; this one carries it along:

    p_0 = 1                     p_i = min(p_{i-1} p(x_i) / q(x_i), 1)
    s_i = sum_x (p_i p(x) - q(x))+           of what follows x_1 .. x_i, i < K
    h_i = s_i / (s_i + 1 - p_i)              h_K = p_K
    kept = the largest i with u_i < h_i, 0 when there is none: a failure at one slot does not end the search
    next token: from p after K kept drafts, else from (p_kept p - q)+

What is kept depends on every drafted token and every u, also behind the place where the round ends. So no number of a
round may serve another one: drafts, u and corrections are drawn with `drafters.sampling.round_seeds`.
"""

import torch
from torch import Tensor

from drafters.sampling import ACCEPT_STREAM, RESIDUAL_STREAM, counter_uniform, draw
from eval.verification import Verdict, acceptance, emitted, row_of


def running(p: Tensor, tokens: Tensor, q: Tensor | None) -> Tensor:
    """p_0 .. p_K [R, K+1]. p [R, K+1, V], tokens [R, K], q [R, K, V] or None for chosen tokens (then q(x) = 1)."""
    drafted = p[:, :-1].gather(-1, tokens[..., None]).squeeze(-1)
    given = torch.ones_like(drafted) if q is None else q.gather(-1, tokens[..., None]).squeeze(-1)
    found = [torch.ones_like(p[:, 0, 0])]
    for k in range(tokens.shape[1]):
        raw = found[-1] * drafted[:, k]
        found.append(torch.where(raw < given[:, k], raw / given[:, k], torch.ones_like(raw)))
    return torch.stack(found, 1)


def left_over(p: Tensor, kept: Tensor, q: Tensor | None, tokens: Tensor) -> Tensor:
    """Weights [..., V] of the token after a kept prefix: (kept * p - q)+. p, q [..., V], kept, tokens (the draft that
    follows) [...]; q None: all of it lies on that draft."""
    given = torch.zeros_like(p).scatter(-1, tokens[..., None], 1.0) if q is None else q
    return (kept[..., None] * p - given).clamp_min(0)


def chances(p: Tensor, tokens: Tensor, q: Tensor | None) -> tuple[Tensor, Tensor]:
    """h_1 .. h_K [R, K] and p_0 .. p_K [R, K+1]; shapes as in `running`."""
    kept = running(p, tokens, q)
    inner = kept[:, 1:-1]
    rest = left_over(p[:, 1:-1], inner, None if q is None else q[:, 1:], tokens[:, 1:]).sum(-1)
    # 0 / 0 where all of p is kept and q = p: nothing is left to correct, so the search may end there or go on.
    total = rest + 1 - inner
    share = torch.where(total > 0, rest / total.clamp_min(torch.finfo(total.dtype).tiny), torch.ones_like(total))
    return torch.cat([share, kept[:, -1:]], 1), kept


def expected(p: Tensor, tokens: Tensor, q: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean drafts kept [R] of proposals that were made, over u alone: by the chain rule and by this one. Shapes as in
    `running`."""
    at = tokens[..., None]
    given = None if q is None else q.gather(-1, at)[..., 0]
    chain = acceptance(p[:, :-1].gather(-1, at)[..., 0], given).cumprod(-1).sum(-1)
    missed = 1 - chances(p, tokens, q)[0]
    return chain, (1 - missed.flip(-1).cumprod(-1)).sum(-1)  # the chance that slot k or a later one passes, over k


def verify_block(p: Tensor, tokens: Tensor, q: Tensor | None, seeds: Tensor, positions: Tensor) -> Verdict:
    """Block verification of one proposal per request; arguments as in `eval.verification.verify`, but for seeds [R],
    which are this round's own. K may be 0."""
    count = tokens.shape[1]
    if not count:
        last = draw(p[:, 0], counter_uniform(seeds, positions + 1, RESIDUAL_STREAM))
        return Verdict(torch.zeros_like(positions), last[:, None])
    steps = torch.arange(1, count + 1, device=tokens.device)
    share, kept = chances(p, tokens, q)
    passed = counter_uniform(seeds[:, None], positions[:, None] + steps, ACCEPT_STREAM) < share
    accepted = torch.where(passed, steps, 0).amax(1)
    at = accepted.clamp_max(count - 1)
    weights, ratio = row_of(p, accepted), kept.gather(1, accepted[:, None]).squeeze(1)
    drafted = tokens.gather(1, at[:, None]).squeeze(1)
    rest = left_over(weights, ratio, None if q is None else row_of(q, at), drafted)
    corrected = (accepted < count) & (rest.sum(-1) > 0)  # rounding may leave nothing where q = p
    weights = torch.where(corrected[:, None], rest, weights)
    last = draw(weights, counter_uniform(seeds, positions + accepted + 1, RESIDUAL_STREAM))
    return Verdict(accepted, emitted(tokens, accepted, last))
