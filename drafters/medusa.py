"""Medusa (arXiv 2401.10774, section 2.1): one small head a slot on the target's last hidden state, no attention.

    position     a - 1                                    a
    token        .                                        x_a (the anchor, already chosen by the target)
    reads        h = last hidden state of a - 1           -
    head k       x <- x + SiLU(W_kj x) from x = h, layer after layer; logits = lm_head(x)      predicts a + k

All W start at zero, so every head starts as the target's own head, which predicts the anchor itself; training moves
head k to a + k. Heads do not see the anchor nor each other, which is what makes Medusa the cheap yardstick.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from drafters.branches import SlotBranches
from drafters.contract import Batch, Drafter, Needs, Proposal, SlotBatch, TargetParts, grid
from drafters.decoder import take_head
from drafters.drafting import at_once, take_rows
from drafters.layers import SharedHead, check_counts
from drafters.sampling import Sampling
from drafters.vocabulary import DraftVocabulary


class ResidualBlocks(nn.Module):
    """The body of one head: x + SiLU(W x), `num_layers` times; W and bias start at zero."""

    def __init__(self, size: int, num_layers: int, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size, bias=bias) for _ in range(num_layers))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., D] -> [..., D]."""
        for layer in self.layers:
            hidden = hidden + nn.functional.silu(layer(hidden))
        return hidden


@dataclass
class DraftState:
    """Drafting state: positions read [R], and the last hidden state of the newest of them [R, D]."""

    length: Tensor
    last: Tensor


class Medusa(Drafter):
    """Medusa drafter.

    num_slots: K, the number of heads. num_layers: residual layers of each head. bias: whether those layers have one.
    head: "own" trains one output projection for all heads, over the draft vocabulary; "target" shares the target's
    frozen one. The paper trains one a head: K times the parameters, which few targets leave room for.
    """

    branching = "slots"

    def __init__(
        self,
        target: TargetParts,
        vocabulary: DraftVocabulary | None = None,
        *,
        num_slots: int = 5,
        num_layers: int = 1,
        bias: bool = False,
        head: Literal["own", "target"] = "own",
    ) -> None:
        super().__init__()
        check_counts("", num_slots=num_slots, num_layers=num_layers)
        if head not in ("own", "target"):
            raise ValueError(f'head must be "own" or "target", got {head!r}')
        size = target.config.hidden_size
        self.num_slots, self.num_layers, self.bias, self.head = num_slots, num_layers, bias, head
        self.needs = Needs((), last_hidden=True)
        self.vocabulary = vocabulary or DraftVocabulary.full(target.config.vocab_size)
        self.blocks = nn.ModuleList(ResidualBlocks(size, num_layers, bias) for _ in range(num_slots))
        self.lm_head: nn.Module = (
            nn.Linear(size, len(self.vocabulary), bias=False)
            if head == "own"
            else SharedHead(target, self.vocabulary.ids.to(target.head.device))
        )

    def settings(self) -> dict[str, Any]:
        return {"num_slots": self.num_slots, "num_layers": self.num_layers, "bias": self.bias, "head": self.head}

    def heads(self, last: Tensor, num_slots: int) -> Tensor:
        """The first num_slots heads' states of last hidden states [..., D]: [..., K, D]."""
        return torch.stack([block(last) for block in self.blocks[:num_slots]], -2)

    def slots(self, batch: Batch) -> SlotBatch:
        """All heads at every anchor, from the last hidden state of the position before it."""
        labels = grid(batch, self.num_slots)
        before = take_rows(batch.last, (batch.anchors - 1).clamp_min(0))
        hidden = self.heads(before, self.num_slots)
        return SlotBatch(hidden, labels.prev_ids, labels.target_ids, labels.mask, labels.teacher)

    def logits(self, hidden: Tensor, prev_ids: Tensor) -> Tensor:
        """hidden [N, D] of any heads -> [N, W]; heads do not read prev_ids."""
        return self.lm_head(hidden)

    def warm_start(self, target: TargetParts) -> list[str]:
        """The own head from the target's rows; the residual layers stay zero, as the paper starts them."""
        return take_head(self.lm_head, self.vocabulary, target)

    def begin(self, requests: int, capacity: int) -> DraftState:
        like = next(self.blocks.parameters())
        length = torch.zeros(requests, dtype=torch.int64, device=like.device)
        return DraftState(length, like.new_zeros(requests, like.shape[-1]))

    def observe(self, state: DraftState, next_ids: Tensor, aux: Tensor, last: Tensor, lengths: Tensor) -> None:
        newest = take_rows(last.to(state.last.dtype), (lengths - 1).clamp_min(0)[:, None])[:, 0]
        state.last = torch.where((lengths > 0)[:, None], newest, state.last)
        state.length = state.length + lengths

    def propose(self, state: DraftState, num_slots: int, sampling: Sampling, seeds: Tensor) -> Proposal:
        """ValueError when more slots are asked for than there are heads."""
        return at_once(self._slot_logits(state, num_slots), self.vocabulary, sampling, seeds, state.length)

    def branch(self, state: DraftState, num_slots: int) -> SlotBranches:
        return SlotBranches(self._slot_logits(state, num_slots))

    def _slot_logits(self, state: DraftState, num_slots: int) -> Tensor:
        """[R, K, W]."""
        if num_slots > self.num_slots:
            raise ValueError(f"this drafter has {self.num_slots} heads, {num_slots} slots were asked for")
        return self.lm_head(self.heads(state.last, num_slots))
