"""Drafting a tree level by level: draft logits along the branches of one round, and what the kinds of drafters share.

    level        0 (anchor)      1                2
    nodes        a               b1  b2           c1  c2  c3        a level's nodes name their parents in the one before
    logits       after a         after b1, b2     after c1, c2, c3

A drafter declares what it can (`Drafter.branching`) and opens a round's branches (`Drafter.branch`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# The carry of rows [N] of the level before, for rows [N'] int64.
Pick = Callable[[Any, Tensor], Any]


class Branches(ABC):
    """One round's branches of R requests. Nodes may be left unread: only nodes that have children are read.

    first [R, W]: draft logits after the anchor.
    """

    first: Tensor

    @abstractmethod
    def read(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Go one level deeper, to nodes with tokens [R, M] behind the nodes parents [R, M] among those read in the
        level before (all 0 in level 1). Returns the draft logits [R, M, W] of what follows each."""


class SlotBranches(Branches):
    """Slots that do not read drafted tokens: every node of a level has the same logits. slots [R, K, W]."""

    def __init__(self, slots: Tensor) -> None:
        self.slots, self.first, self.level = slots, slots[:, 0], 0

    def read(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self.level += 1
        return self.slots[:, self.level, None].expand(-1, tokens.shape[1], -1)


class CarriedBranches(Branches):
    """Slots whose states are known at once and whose head goes from left to right with a carry.

    hidden [R, K, D]. anchor [R]. step(hidden [N, D], tokens [N], carry) -> logits [N, W], next carry. pick: see Pick.
    """

    def __init__(self, hidden: Tensor, anchor: Tensor, step: Callable[..., tuple[Tensor, Any]], pick: Pick) -> None:
        self.hidden, self.step, self.pick, self.level, self.width = hidden, step, pick, 0, 1
        self.first, self.carry = step(hidden[:, 0], anchor, None)

    def read(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self.level += 1
        rows = torch.arange(len(tokens), device=tokens.device)[:, None] * self.width + parents
        carry = None if self.carry is None else self.pick(self.carry, rows.flatten())
        hidden = self.hidden[:, self.level, None].expand(-1, tokens.shape[1], -1)
        logits, self.carry = self.step(hidden.flatten(0, 1), tokens.flatten(), carry)
        self.width = tokens.shape[1]
        return logits.unflatten(0, tokens.shape)


class NodeColumns:
    """Places for the rows of a tree's nodes in a cache whose column is the position: node after node from the first
    free column on, whatever the node's own position.

    start [R]: first free column. width: columns of the cache, enough for all nodes that are read. visible [R, width]:
    columns that every node may see, null for all before start.
    """

    def __init__(self, start: Tensor, width: int, visible: Tensor | None = None) -> None:
        self.start, self.taken = start, 0
        before = torch.arange(width, device=start.device) < start[:, None]
        self.visible = (before if visible is None else visible)[:, None]

    def place(self, parents: Tensor) -> tuple[Tensor, Tensor]:
        """Columns [R, M] of a level's rows behind parents [R, M], and the columns [R, M, C] each may see: what was
        there before the tree, its ancestors, itself."""
        count, width = parents.shape[1], self.visible.shape[2]
        columns = self.start[:, None] + self.taken + torch.arange(count, device=parents.device)
        self.taken += count
        above = self.visible.expand(len(parents), -1, -1).gather(1, parents[..., None].expand(-1, -1, width))
        self.visible = above.scatter(2, columns[..., None], True)
        return columns, self.visible
