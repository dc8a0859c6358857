"""Lossless verification of token trees: a walk from the anchor down, a node's children tried one after another.

own token     The target has its own token after every node: its argmax (greedy), or what it draws from the position's
              noise (PTP, arXiv 2512.21323). The walk goes to the child that is this token and ends where there is none.
              The text is the target's own, whatever the tree: exact for every tree of a drafter that does not read the
              noise.
chosen        children that were picked without chance (top-k): each stands with the target's probability of it; once
              refused, it is taken out of p (arXiv 2401.15077). min(1, p / q) is wrong here: such children were not
              drawn from q.
drawn without replacement (recursive rejection: Sequoia, arXiv 2402.12374; RSD, arXiv 2402.14160)
              each child stands with min(1, p / q); refused, p <- (p - q)+ and q <- q without it, both made whole again.
drawn with replacement (SpecInfer's multi-round rule, arXiv 2305.09781)
              the same, but q stays as it is.

After the last child, or at a leaf, the next token is drawn from what is left of p. Shapes are fixed and nothing waits
for the device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafters.sampling import ACCEPT_STREAM, NOISE_STREAM, RESIDUAL_STREAM, Sampling, counter_uniform, draw
from eval.trees import NODE_STRIDE, Tree


@dataclass
class TreeVerdict:
    """accepted [R] int64: depth reached. tokens [R, D+1]: accepted drafts, then the corrected or bonus token, then -1.
    nodes [R, D+1]: the anchor (0) and the accepted nodes, then the last of them again."""

    accepted: Tensor
    tokens: Tensor
    nodes: Tensor


def whole(weights: Tensor) -> Tensor:
    """Weights [..., V] made to sum to 1; all zero where there are none."""
    return weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)


def chance(p: Tensor, q: Tensor | None, child: Tensor) -> Tensor:
    """Chance [...] that a child stands. p [..., V]: what is left of the target's distribution. q [..., V]: what the
    child was drawn from; None when it was chosen. child [...] int64."""
    wanted = p.gather(-1, child[..., None])[..., 0]
    if q is None:
        return wanted
    given = q.gather(-1, child[..., None])[..., 0]
    return torch.where(given > wanted, wanted / given, torch.ones_like(wanted))


def refuse(p: Tensor, q: Tensor | None, child: Tensor, replaced: bool) -> tuple[Tensor, Tensor | None]:
    """What is left of p and q after a child was refused; shapes as in `chance`. Where rounding leaves nothing of p, p
    stays."""
    without = p.scatter(-1, child[..., None], 0.0) if q is None else (p - q).clamp_min(0)
    left = torch.where(without.sum(-1, keepdim=True) > 0, whole(without), p)
    if q is None or replaced:
        return left, q
    return left, whole(q.scatter(-1, child[..., None], 0.0))


class _Walk:
    """Where the requests stand in their trees. at, alive, accepted [R]."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.at = torch.zeros_like(tree.tokens[:, 0])
        self.alive = torch.ones_like(self.at, dtype=torch.bool)
        self.accepted = torch.zeros_like(self.at)
        self.path = [self.at]

    def options(self) -> tuple[Tensor, Tensor]:
        """Children [R, C] of the nodes, 0 for none, and their tokens."""
        at = self.at[:, None, None].expand(-1, 1, self.tree.children.shape[2])
        nodes = self.tree.children.gather(1, at)[:, 0]
        return nodes, self.tree.tokens.gather(1, nodes)

    def go(self, found: Tensor, child: Tensor) -> None:
        """Down to child [R] where it was found; the others have ended."""
        self.alive = self.alive & found
        self.at = torch.where(self.alive, child, self.at)
        self.accepted = self.accepted + self.alive
        self.path.append(self.at)

    def verdict(self, last: Tensor) -> TreeVerdict:
        nodes = torch.stack(self.path, 1)
        steps = torch.arange(nodes.shape[1], device=nodes.device)
        drafts = torch.nn.functional.pad(self.tree.tokens.gather(1, nodes)[:, 1:], (0, 1))
        kept = torch.where(steps < self.accepted[:, None], drafts, -1)
        return TreeVerdict(self.accepted, torch.where(steps == self.accepted[:, None], last[:, None], kept), nodes)


def verify_own(own: Callable[[Tensor, int], Tensor], tree: Tree) -> TreeVerdict:
    """Walk along the target's own tokens. own(nodes [R], depth) -> its tokens [R] after nodes of that depth."""
    walk = _Walk(tree)
    last = own(walk.at, 0)
    for depth in range(tree.depth):
        nodes, tokens = walk.options()
        hits = (nodes > 0) & (tokens == last[:, None])
        walk.go(hits.any(1), nodes.gather(1, hits.long().argmax(1, keepdim=True))[:, 0])
        last = torch.where(walk.alive, own(walk.at, depth + 1), last)
    return walk.verdict(last)


def verify_tree(
    p: Callable[[Tensor], Tensor],
    tree: Tree,
    seeds: Tensor,
    positions: Tensor,
    rules: tuple[Any, Any] = (chance, refuse),
) -> TreeVerdict:
    """Walk by rejection, as the tree's children were made. p(nodes [R]) -> the target's distributions [R, V] after
    them. seeds [R] of the requests: what ends a round depends on no number of a position behind. positions [R]: the
    anchors'. rules: `chance` and
    `refuse`."""
    stands, refused_by = rules
    walk, most = _Walk(tree), tree.children.shape[2]
    ranks = torch.arange(most, device=positions.device) * NODE_STRIDE
    rest = p(walk.at)
    for depth in range(tree.depth):
        left = rest
        given = None if tree.given is None else _at(tree.given, walk.at)
        nodes, tokens = walk.options()
        places = (positions + depth + 1)[:, None] + ranks
        uniforms = counter_uniform(seeds[:, None], places, ACCEPT_STREAM)
        found, child = torch.zeros_like(walk.alive), walk.at
        for rank in range(most):
            tried = (nodes[:, rank] > 0) & walk.alive & ~found
            kept = tried & (uniforms[:, rank] < stands(left, given, tokens[:, rank]))
            child, found = torch.where(kept, nodes[:, rank], child), found | kept
            fewer, other = refused_by(left, given, tokens[:, rank], tree.replaced)
            gone = (tried & ~kept)[:, None]
            left = torch.where(gone, fewer, left)
            given = None if given is None else torch.where(gone, other, given)
        walk.go(found, child)
        rest = torch.where(walk.alive[:, None], p(walk.at), left)
    return walk.verdict(draw(rest, counter_uniform(seeds, positions + walk.accepted + 1, RESIDUAL_STREAM)))


def _at(values: Tensor, nodes: Tensor) -> Tensor:
    """values [R, N, V] at nodes [R] -> [R, V]."""
    return values.gather(1, nodes[:, None, None].expand(-1, 1, values.shape[-1]))[:, 0]


def verify(logits: Tensor, tree: Tree, sampling: Sampling, seeds: Tensor, positions: Tensor, own: bool) -> TreeVerdict:
    """Verify trees by the target's logits [R, N+1, V]. seeds [R] of the requests, positions [R] of their anchors. own:
    by the noise of the target's own sampler; greedy always goes by its argmax."""
    if sampling.greedy:
        best = logits.argmax(-1)
        return verify_own(lambda nodes, depth: best.gather(1, nodes[:, None])[:, 0], tree)

    def p(nodes: Tensor) -> Tensor:
        return sampling.probs(_at(logits, nodes))

    if not own:
        return verify_tree(p, tree, seeds, positions)

    def token(nodes: Tensor, depth: int) -> Tensor:
        return draw(p(nodes), counter_uniform(seeds, positions + depth + 1, NOISE_STREAM))

    return verify_own(token, tree)
