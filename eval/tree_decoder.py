"""Decoding by token trees: one pass of the target reads a whole tree, each node seeing its ancestors alone.

    drafter    grows N nodes after the anchor                                   eval.trees
    target     reads anchor and nodes, node n at position a + depth(n)          one forward, ancestor mask
    verify     walks down from the anchor to the last node that stands          eval.verification_trees
    cache      the path's columns move together, the other nodes are dropped    RowCache.keep_nodes
    observe    the path's features

All requests of a batch go together and the shapes are fixed. Everything else is as in eval.decoder.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data.target import Features, Target
from drafters.contract import Drafter
from eval.cache import check_cacheable
from eval.decoder import Clock, DecodeSettings, Decoding, Generation, Group, generate
from eval.trees import Source, Tree, TreeSettings, grow
from eval.verification_trees import TreeVerdict, verify

ATTENTION = ("eager", "sdpa")


@dataclass(frozen=True)
class TreeDecodeSettings(DecodeSettings):
    """tree: what to draft each round. num_slots is its depth; the rest as in DecodeSettings, whose verification is
    rejection or same_noise. ValueError for what trees have no rule for."""

    tree: TreeSettings = TreeSettings()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tree.kind == "none":
            raise ValueError("tree.kind none drafts chains: use DecodeSettings")
        if self.verification not in (None, "rejection", "same_noise"):
            raise ValueError(f"trees are verified by rejection or same_noise, got verification={self.verification}")
        if self.lossy is not None or self.peaks:
            raise ValueError("lossy verification and q_max by slot are for chains: tree.kind must be none")


def decode(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[list[int]],
    settings: DecodeSettings,
    clock: Clock | None = None,
    seeds: Sequence[int] | None = None,
    watch: Callable[[int, int], None] | None = None,
    group: Callable[..., Group] | None = None,
) -> list[Generation]:
    """`eval.decoder.generate`, by trees where the settings are TreeDecodeSettings and there is a drafter, else by
    `group`. ValueError for a drafter or a target that cannot, and for trees in another group than the default's."""
    if drafter is None or not isinstance(settings, TreeDecodeSettings):
        return generate(target, drafter, prompts, settings, clock, seeds, watch, group)
    if group not in (None, Group):
        raise ValueError("trees are decoded by the loop that waits for every round: another loop drafts chains only")
    settings.tree.check(drafter, settings.num_slots)
    kind = target.model.config._attn_implementation
    if kind not in ATTENTION:
        raise ValueError(f"tree attention needs a target with attention {' or '.join(ATTENTION)}, this one has {kind}")
    return generate(target, drafter, prompts, settings, clock, seeds, watch, _TreeGroup)


def tree_masks(target: Target, visible: Tensor, tree: Tree, positions: Tensor) -> Tensor | dict[str, Tensor]:
    """What is added to the target's attention scores [R, 1, N+1, width + N+1]: one tensor, or one for each kind of
    attention. visible [R, width]: the cache's columns. positions [R, N+1] of the nodes."""
    before = visible.bool()[:, None].expand(-1, positions.shape[1], -1)
    seen = torch.cat([before, tree.ancestors()], 2)
    places = torch.cat([visible.cumsum(1) - 1, positions], 1)[:, None]
    config = target.model.config.get_text_config(decoder=True)
    masks = {}
    for kind in check_cacheable(target.model):
        near = seen
        if kind == "sliding_attention":
            near = seen & (places > positions[..., None] - config.sliding_window)
        if kind == "chunked_attention":
            near = seen & (places // config.attention_chunk_size == positions[..., None] // config.attention_chunk_size)
        mask = torch.zeros(near.shape, dtype=target.dtype, device=near.device)
        masks[kind] = mask.masked_fill_(~near, torch.finfo(target.dtype).min)[:, None]
    return masks if len(masks) > 1 else next(iter(masks.values()))


def has_child(tree: Tree, verdict: TreeVerdict) -> Tensor:
    """Whether the node that each walk ended at has a child, [R] int64."""
    last = verdict.nodes[:, -1].to(tree.children.device)[:, None, None]
    children = tree.children.gather(1, last.expand(-1, 1, tree.children.shape[2]))
    return (children > 0).any(-1)[:, 0].long()


class _TreeGroup(Group):
    """Requests that are decoded together by trees."""

    settings: TreeDecodeSettings

    def __init__(self, shared: Decoding) -> None:
        super().__init__(shared)
        self.room += self.settings.tree.columns(self.num_slots)

    def _round(self) -> None:
        with self.timed("draft"):
            tree = self._grow()
        with self.timed("verify"):
            lengths = self.cache.lengths
            positions = lengths[:, None] + tree.depths
            masks = tree_masks(self.target, self.cache.visible, tree, positions)
            features = self.target.forward(tree.tokens, self.layers, masks, positions, self.cache.cache)
            verdict = self._verify_tree(features.last, tree, lengths)
            # The round's one wait for the device: what was emitted, and how much of it was drafted.
            more = has_child(tree, verdict).to(verdict.tokens.device)
            found = torch.cat([verdict.accepted[:, None], verdict.tokens, more[:, None]], 1).tolist()
        with self.timed("rest"):
            arrived = time.perf_counter() - self.began
            if self.clock is not None:
                self.clock.hold("target_cache", self.cache.nbytes)
            for row, result_row in zip(found, self.alive, strict=True):
                # Below a leaf nobody proposed anything: a walk that ended there says nothing of the next slot.
                slots = self.num_slots if row[-1] else row[0]
                self._record(self.results[result_row], row[1 : row[0] + 2], row[0], slots)
                self.results[result_row].arrivals.append(arrived)
            nodes = verdict.nodes.to(lengths.device)
            self.cache.keep_nodes(nodes, [row[0] + 1 for row in found])
            self.anchors = verdict.tokens.gather(1, verdict.accepted[:, None]).squeeze(1).to(self.target.device)
            running = any(not self._ended(self.results[row]) for row in self.alive)
        if running:
            with self.timed("draft"):
                self._observe(verdict.tokens.clamp_min(0), _path(features, verdict.nodes), verdict.accepted + 1)
        with self.timed("rest"):
            self._drop_ended()

    def _grow(self) -> Tree:
        """The running requests' trees, on the target's device."""
        assert self.drafter is not None
        device = self.like.device
        positions, anchors = torch.zeros_like(self.all_seeds), torch.zeros_like(self.all_seeds)
        alive = torch.tensor(self.alive, device=positions.device)
        positions[alive], anchors[alive] = self.cache.lengths.to(alive.device), self.anchors.to(alive.device)
        source = Source(
            branches=self.drafter.branch(self.state, self.num_slots),
            vocabulary=self.drafter.vocabulary,
            sampling=self.settings.sampling,
            anchors=anchors.to(device),
            positions=positions.to(device),
            seeds=self.all_seeds.to(device),
        )
        tree = grow(source, self.settings.tree, self.num_slots)
        return (tree if len(alive) == len(positions) else tree.rows(alive)).to(self.target.device)

    def _verify_tree(self, last: Tensor, tree: Tree, positions: Tensor) -> TreeVerdict:
        """last [R, N+1, D] of the nodes, anchors at positions [R]."""
        logits = self.target.logits(last)
        seeds, positions = self.seeds.to(logits.device), positions.to(logits.device)
        own = self.verification == "same_noise"
        return verify(logits, tree.to(logits.device), self.settings.sampling, seeds, positions, own)


def _path(features: Features, nodes: Tensor) -> Features:
    """Features of the nodes [R, D+1] of every request."""
    nodes = nodes.to(features.last.device)
    rows = torch.arange(len(nodes), device=nodes.device)[:, None]
    return Features(features.aux[rows, nodes], features.last[rows, nodes])
