"""Domino (arXiv 2605.29707): a block drafter whose later slots are corrected by a GRU over the tokens before them.

Slot 1 keeps its base logits. Slot k >= 2 adds MLP([h_k ; g_k]), g_k the GRU's state after the anchor and the k - 1
tokens drafted before the slot. Training is anchored at the base: (1 - lambda) CE(final) + lambda CE(base), lambda from
1 to 0 over the first `base_share` of the run.
"""

from typing import Any

import torch
from torch import Tensor, nn

from drafters.block import BlockDrafter
from drafters.contract import TargetParts
from drafters.layers import check_counts, complete
from drafters.vocabulary import DraftVocabulary

HEAD: dict[str, Any] = {"state": 1024, "rank": 256, "base_share": 0.5}


class Domino(BlockDrafter):
    """Domino drafter. head: state (GRU width), rank (of the correction), base_share (of training in which the base
    logits are trained too). The rest as in BlockDrafter."""

    sequential, branching = True, "steps"

    def __init__(
        self,
        target: TargetParts,
        vocabulary: DraftVocabulary | None = None,
        *,
        head: dict[str, Any] | None = None,
        **block: Any,
    ) -> None:
        super().__init__(target, vocabulary, **block)
        self.head = complete("head", HEAD, head)
        share = self.head["base_share"]
        if not isinstance(share, int | float) or not 0 < share <= 1:
            raise ValueError(f"head.base_share must be in (0, 1], got {share!r}")
        check_counts("head.", state=self.head["state"], rank=self.head["rank"])
        self.width, state, rank = self.layer_config.hidden_size, self.head["state"], self.head["rank"]
        self.prefix_gru = nn.GRU(self.width, state, bias=False, batch_first=True)
        last = nn.Linear(rank, len(self.vocabulary), bias=False)
        nn.init.zeros_(last.weight)
        self.embed_proj = nn.Sequential(nn.Linear(self.width + state, rank, bias=False), nn.SiLU(), last)

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"head": dict(self.head)}

    def step(self, hidden: Tensor, prev_ids: Tensor, carry: Any) -> tuple[Tensor, Any]:
        """The head reads [h ; g ; 1 from slot 2 on]."""
        made, state = self._walked(prev_ids[:, None], carry)
        later = hidden.new_full((len(hidden), 1), float(carry is not None))
        return torch.cat([hidden, made[:, 0], later], -1), state

    def _walked(self, ids: Tensor, carry: Any) -> tuple[Tensor, Tensor]:
        """The GRU over the target's rows of ids [N, K] -> [N, K, state], next carry. In its weights' own dtype: under
        autocast cuDNN's would run in float16 whatever dtype was asked for, where sums of gradients overflow."""
        embedded = self.embedding(ids).to(self.prefix_gru.weight_ih_l0.dtype)
        with torch.autocast(embedded.device.type, enabled=False):
            return self.prefix_gru(embedded, carry)

    def pick_carry(self, carry: Any, rows: Tensor) -> Any:
        """The GRU's state has its layers first."""
        return carry[:, rows]

    def head_inputs(self, hidden: Tensor, prev_ids: Tensor) -> Tensor:
        """The same for all slots at once."""
        made = self._walked(prev_ids, None)[0]
        later = torch.ones_like(hidden[..., :1])
        later[:, 0] = 0.0
        return torch.cat([hidden, made, later], -1)

    def logits(self, hidden: Tensor, prev_ids: Tensor) -> Tensor:
        """hidden [N, D + state + 1] -> [N, W]."""
        base = self.lm_head(hidden[..., : self.width])
        return base + self.embed_proj(hidden[..., :-1]) * hidden[..., -1:]

    def measures(self) -> dict[str, Any]:
        """anchored_data_ce: (1 - lambda) CE(final) + lambda CE(base) of the data's tokens (Domino, section 3)."""

        def anchored_data_ce(scored: Any) -> Tensor:
            wanted = scored.data[:, None]
            final = -scored.logq.gather(-1, wanted)[:, 0]
            share = max(0.0, 1.0 - scored.progress / self.head["base_share"])
            if share == 0.0:
                return final
            base = self.lm_head(scored.hidden[..., : self.width]).float().log_softmax(-1)
            return (1 - share) * final - share * base.gather(-1, wanted)[:, 0]

        return {"anchored_data_ce": anchored_data_ce}
