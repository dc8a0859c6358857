"""Token trees of one round: flat tensors of a fixed shape, and how they are grown from a drafter's branches.

    node       0        1    2    3    4         node 0 is the anchor; parents stand before their children
    token      a        b1   b2   c1   c2
    parent     0        0    0    1    1
    depth      0        1    1    2    2

static     the same shape every round, a list of paths: path (1, 0) is the first child of the anchor's second child.
           Children are the drafter's likeliest tokens, or drawn from it with or without replacement.
dynamic    arXiv 2406.16858: `width` nodes a level, those of the largest product of draft probabilities from
           the anchor on, get `width` children each; the best `nodes` of all that were made are verified.
ddtree     the best `nodes` prefixes under the product of the slots' own distributions, for drafters whose slots do not
           read drafted tokens: exact best-first, level by level, since a prefix is never better than its parent.

Letters in shapes: R requests, N drafted nodes, C children of a node at most, V target vocabulary, W draft vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, cast, get_args

import torch
from torch import Tensor

from drafters.branches import Branches
from drafters.contract import Drafter
from drafters.sampling import DRAFT_STREAM, Sampling, counter_uniform, draw
from drafters.vocabulary import DraftVocabulary

Kind = Literal["static", "dynamic", "ddtree"]
Children = Literal["top", "without_replacement", "with_replacement"]
# Numbers of one position that belong to different nodes lie this far apart.
NODE_STRIDE = 1 << 32


@dataclass(frozen=True)
class TreeSettings:
    """Which tree a round drafts.

    kind: static, dynamic, ddtree, or none for chains. nodes: drafted tokens (dynamic, ddtree). width: nodes of a level
    that get children, and children of each (dynamic). paths: nodes as their children's places from the anchor on
    (static); a node's parent and earlier siblings must be there. children: how those of a static tree are chosen when
    decoding samples; greedy decoding takes the likeliest. ValueError on values out of range.
    """

    kind: Kind | Literal["none"] = "none"
    nodes: int = 32
    width: int = 8
    paths: Sequence[Sequence[int]] = ()
    children: Children = "top"

    def __post_init__(self) -> None:
        if self.kind not in ("none", *get_args(Kind)):
            raise ValueError(f"tree.kind must be none, {', '.join(get_args(Kind))}, got {self.kind!r}")
        if self.children not in get_args(Children):
            raise ValueError(f"tree.children must be {', '.join(get_args(Children))}, got {self.children!r}")
        if self.nodes < 1 or self.width < 1:
            raise ValueError(f"tree.nodes and tree.width must be at least 1, got {self.nodes} and {self.width}")
        if self.kind == "static":
            shape_of(self.paths)
        elif self.children != "top":
            raise ValueError(f"tree.kind {self.kind} chooses its nodes by what they are: tree.children must be top")

    def check(self, drafter: Drafter, num_slots: int) -> None:
        """ValueError when the drafter cannot draft this tree, num_slots deep."""
        name = type(drafter).__name__
        if drafter.branching is None:
            raise ValueError(f"{name} drafts chains only: tree.kind must be none, got {self.kind}")
        if self.kind == "ddtree" and drafter.branching != "slots":
            raise ValueError(
                f"tree.kind ddtree: the slots of {name} read drafted tokens; dynamic takes them in account"
            )
        if self.kind == "static" and num_slots != self.depth(num_slots):
            raise ValueError(f"num_slots is the depth of tree.paths, {self.depth(num_slots)}, or null; got {num_slots}")

    def depth(self, num_slots: int) -> int:
        """Levels of the tree; num_slots but for static trees, whose paths say it."""
        return shape_of(self.paths).depth if self.kind == "static" else num_slots

    def size(self, num_slots: int) -> int:
        """Drafted tokens N of each tree."""
        if self.kind == "static":
            return len(self.paths)
        most = self.width + (num_slots - 1) * self.width**2
        return min(self.nodes, most) if self.kind == "dynamic" else self.nodes

    def columns(self, num_slots: int) -> int:
        """Nodes that a drafter reads at most to draft it."""
        return len(self.paths) if self.kind == "static" else self.width * num_slots


@dataclass
class Tree:
    """Trees of R requests, node 0 the anchor.

    tokens, parents, depths [R, N+1] int64; the anchor's parent is itself. children [R, N+1, C] int64: nodes in the
    order in which they are tried, 0 for none. depth: levels below the anchor. given [R, N+1, V]: the distribution that
    each node's children were drawn from (zero for leaves); None when they were chosen. replaced: whether a drawn child
    could come again.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    children: Tensor
    depth: int
    given: Tensor | None = None
    replaced: bool = False

    def rows(self, index: Tensor) -> Self:
        """The trees of some requests. index [R'] int64."""
        return self._map(lambda tensor: tensor[index.to(tensor.device)])

    def to(self, device: torch.device) -> Self:
        return self._map(lambda tensor: tensor.to(device))

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        names = ("tokens", "parents", "depths", "children", "given")
        held = {name: getattr(self, name) for name in names}
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in held.items() if tensor is not None}
        return replace(self, **changed)

    def ancestors(self) -> Tensor:
        """[R, N+1, N+1] bool: which nodes (second index) a node sees: itself and those it comes from."""
        rows, count = self.parents.shape
        at = torch.arange(count, device=self.parents.device).expand(rows, -1)
        seen = torch.eye(count, dtype=torch.bool, device=at.device).expand(rows, -1, -1).clone()
        for _ in range(self.depth):
            at = self.parents.gather(1, at)
            seen.scatter_(2, at[..., None], True)
        return seen


def child_table(parents: Tensor, most: int, real: Tensor | None = None) -> Tensor:
    """[R, N+1, most] children of every node in ascending order, 0 for none. parents [R, N+1], a node's before itself.
    real [R, N+1] bool: nodes that are there at all."""
    rows, count = parents.shape
    nodes = torch.arange(1, count, device=parents.device)
    own = parents[:, 1:]
    before = (own[:, :, None] == own[:, None]) & (nodes[:, None] > nodes)
    place = own * most + before.sum(-1)
    shown = nodes.expand(rows, -1) if real is None else torch.where(real[:, 1:], nodes, 0)
    return parents.new_zeros(rows, count * most).scatter_(1, place, shown).unflatten(1, (count, most))


# Shapes that are known before drafting
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A tree's shape without tokens, nodes level by level. parents, ranks, depths: of node 1 ..; counts: children of
    node 0 .."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    depths: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def depth(self) -> int:
        return self.depths[-1]

    def inner(self, depth: int) -> list[int]:
        """Nodes of a level that have children; the anchor is level 0."""
        return [node for node, (level, count) in enumerate(zip((0, *self.depths), self.counts, strict=True))
                if level == depth and count]  # fmt: skip


def shape_of(paths: Sequence[Sequence[int]]) -> Shape:
    """The shape that paths describe. ValueError when there is none, or a parent or an earlier sibling is missing."""
    nodes = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
    if not nodes or len(nodes) != len(paths):
        raise ValueError(f"tree.paths must name one or more nodes, each once, got {[list(path) for path in paths]}")
    index = {(): 0} | {path: i for i, path in enumerate(nodes, 1)}
    for path in nodes:
        elder = (*path[:-1], path[-1] - 1) if path and path[-1] > 0 else path[:-1]
        if not path or min(path) < 0 or path[:-1] not in index or elder not in index:
            raise ValueError(f"tree.paths: {list(path)} needs its parent and its earlier siblings")
    parents = tuple(index[path[:-1]] for path in nodes)
    counts = tuple(parents.count(node) for node in range(len(nodes) + 1))
    return Shape(parents, tuple(path[-1] for path in nodes), tuple(map(len, nodes)), counts)


@dataclass(frozen=True)
class Source:
    """What trees are grown from. branches: of one round, for R requests with seeds [R], whose anchors are tokens [R]
    at positions [R]."""

    branches: Branches
    vocabulary: DraftVocabulary
    sampling: Sampling
    anchors: Tensor
    positions: Tensor
    seeds: Tensor

    def scores(self, logits: Tensor) -> Tensor:
        """log q, float32, at the temperature that decoding samples at (greedy: 1). Never above 0."""
        heat = 1.0 if self.sampling.greedy else self.sampling.temperature
        return (logits.float() / heat).log_softmax(-1).clamp_max(0.0)


def grow_static(source: Source, shape: Shape, children: Children) -> Tree:
    """A tree of a known shape. children: `top` also when decoding is greedy."""
    drawn = children != "top" and not source.sampling.greedy
    rows, device = len(source.anchors), source.anchors.device
    tokens = source.anchors[:, None].expand(-1, len(shape.counts)).clone()
    real = torch.ones_like(tokens, dtype=torch.bool)
    given = None
    if drawn:
        given = torch.zeros(rows, len(shape.counts), source.vocabulary.target_size, device=device)
    logits = source.branches.first[:, None]
    for depth in range(shape.depth):
        inner = shape.inner(depth)
        if depth:
            above = shape.inner(depth - 1)
            places = torch.tensor([above.index(shape.parents[node - 1]) for node in inner], device=device)
            logits = source.branches.read(tokens[:, inner], places.expand(rows, -1))
        below = [node for node, level in enumerate(shape.depths, 1) if level == depth + 1]
        owners = [inner.index(shape.parents[node - 1]) for node in below]
        ranks = [shape.ranks[node - 1] for node in below]
        most = max(shape.counts[node] for node in inner)
        if given is None:
            found, there = _likeliest(source, logits, most)
        else:
            found, there, wide = _drawn(source, logits, depth, inner, (most, children == "with_replacement"))
            given[:, inner] = wide
        tokens[:, below], real[:, below] = found[:, owners, ranks], there[:, owners, ranks]
    parents = torch.tensor((0, *shape.parents), device=device).expand(rows, -1)
    depths = torch.tensor((0, *shape.depths), device=device).expand(rows, -1)
    table = child_table(parents, max(shape.counts), real)
    return Tree(tokens, parents, depths, table, shape.depth, given, children == "with_replacement")


def _likeliest(source: Source, logits: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The likeliest tokens [R, M, most] after nodes with logits [R, M, W], and whether there are so many."""
    count = min(most, logits.shape[-1])
    found = source.vocabulary.ids_on(logits.device)[logits.topk(count, -1).indices]
    padded = torch.nn.functional.pad(found, (0, most - count))
    return padded, (torch.arange(most, device=found.device) < count).expand_as(padded)


def _drawn(
    source: Source, logits: Tensor, depth: int, nodes: list[int], how: tuple[int, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """how: (most, with replacement). Tokens [R, M, most] drawn one after another from q of nodes with logits
    [R, M, W]; whether q had any left [R, M, most]; q over the target's vocabulary [R, M, V]."""
    most, replaced = how
    narrow, ids = source.sampling.probs(logits), source.vocabulary.ids_on(logits.device)
    wide = narrow.new_zeros(*narrow.shape[:-1], source.vocabulary.target_size)
    wide[..., ids] = narrow
    numbers = torch.tensor(nodes, device=ids.device)
    places = source.positions[:, None] + depth + 1
    found, there, left = [], [], narrow
    for rank in range(most):
        at = places + (numbers * most + rank + 1) * NODE_STRIDE
        chosen = draw(left, counter_uniform(source.seeds[:, None], at, DRAFT_STREAM))
        found.append(ids[chosen])
        there.append(left.sum(-1) > 0)
        if not replaced:
            left = left.scatter(-1, chosen[..., None], 0.0)
    return torch.stack(found, 2), torch.stack(there, 2), wide


# Shapes that follow the drafter's probabilities
# ----------------------------------------------------------------------------------------------------------------------


@dataclass
class _Level:
    """Candidates [R, M] of one level: sums of log q from the anchor on, tokens, and their parents among all candidates
    before (0: the anchor, i: the i-th)."""

    scores: Tensor
    tokens: Tensor
    parents: Tensor


def grow_dynamic(source: Source, depth: int, width: int, nodes: int) -> Tree:
    """The dynamic tree: see the module."""
    fan = min(width, source.branches.first.shape[-1])
    ids = source.vocabulary.ids_on(source.anchors.device)
    best = source.scores(source.branches.first).topk(fan, -1)
    levels = [_Level(best.values, ids[best.indices], torch.zeros_like(best.indices))]
    owners, offset = torch.zeros_like(best.indices), 1
    for _ in range(1, depth):
        last = levels[-1]
        beam = _top(last.scores, width)
        logits = source.branches.read(last.tokens.gather(1, beam), owners.gather(1, beam))
        best = source.scores(logits).topk(fan, -1)
        owners = torch.arange(beam.shape[1], device=beam.device).repeat_interleave(fan).expand(len(beam), -1)
        sums = last.scores.gather(1, beam)[..., None] + best.values
        parents = (offset + beam)[..., None].expand_as(sums)
        offset += last.tokens.shape[1]
        levels.append(_Level(sums.flatten(1), ids[best.indices].flatten(1), parents.flatten(1)))
    return _best(source, levels, nodes, fan)


def grow_ddtree(source: Source, slots: Tensor, nodes: int) -> Tree:
    """The best `nodes` prefixes under the product of slots [R, K, W] of logits."""
    fan = min(nodes, slots.shape[-1])
    best = source.scores(slots).topk(fan, -1)
    tokens = source.vocabulary.ids_on(slots.device)[best.indices]
    levels, offset = [_Level(best.values[:, 0], tokens[:, 0], torch.zeros_like(tokens[:, 0]))], 1
    for k in range(1, slots.shape[1]):
        last = levels[-1]
        beam = _top(last.scores, nodes)
        sums = last.scores.gather(1, beam)[..., None] + best.values[:, k, None]
        parents = (offset + beam)[..., None].expand_as(sums)
        offset += last.tokens.shape[1]
        levels.append(_Level(sums.flatten(1), tokens[:, k, None].expand_as(sums).flatten(1), parents.flatten(1)))
    return _best(source, levels, nodes, fan)


def _top(scores: Tensor, count: int) -> Tensor:
    """Places [R, count] of the best scores [R, M], equal ones in their order."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _best(source: Source, levels: list[_Level], nodes: int, fan: int) -> Tree:
    """The best nodes of all levels. A node's score is never above its parent's and equal ones keep their order, so
    parents come along."""
    scores, tokens, parents = (torch.cat([getattr(one, name) for one in levels], 1)
                               for name in ("scores", "tokens", "parents"))  # fmt: skip
    depths = torch.cat([torch.full_like(one.tokens, depth) for depth, one in enumerate(levels, 1)], 1)
    chosen = _top(scores, nodes).sort(1).values
    count = torch.arange(1, chosen.shape[1] + 1, device=chosen.device).expand_as(chosen)
    renamed = torch.zeros_like(torch.nn.functional.pad(tokens, (1, 0))).scatter_(1, chosen + 1, count)
    new_parents = renamed.gather(1, parents.gather(1, chosen))
    tokens, depths = tokens.gather(1, chosen), depths.gather(1, chosen)
    new_parents = torch.nn.functional.pad(new_parents, (1, 0))
    return Tree(
        tokens=torch.cat([source.anchors[:, None], tokens], 1),
        parents=new_parents,
        depths=torch.nn.functional.pad(depths, (1, 0)),
        children=child_table(new_parents, min(fan, nodes)),
        depth=len(levels),
    )


def grow(source: Source, settings: TreeSettings, num_slots: int) -> Tree:
    """The tree that settings describe. ValueError for kind none, or a drafter that cannot draft it."""
    if settings.kind == "static":
        return grow_static(source, shape_of(settings.paths), settings.children)
    if settings.kind == "dynamic":
        return grow_dynamic(source, num_slots, settings.width, settings.nodes)
    slots = getattr(source.branches, "slots", None)
    if settings.kind != "ddtree" or slots is None:
        raise ValueError(f"no tree of kind {settings.kind} grows from {type(source.branches).__name__}")
    return grow_ddtree(source, cast(Tensor, slots), settings.nodes)
