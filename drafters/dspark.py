"""DSpark (arXiv 2607.05147): a block drafter with a low-rank Markov head, drafted left to right, and a confidence head.

Slot k's logits are base_k + W2 m_k, where m_k reads the token before the slot:

    vanilla   m = W1[x]
    gated     m = sigmoid(G [h ; W1[x]]) * W1[x]
    rnn       z = [s ; W1[x] ; h];  g, c, o = J z;  s <- sigmoid(g) s + (1 - sigmoid(g)) tanh(c);  m = tanh(o)

The confidence head estimates the chance that verification keeps the slot's token: sigmoid(w [h ; W1[x]]), trained on
1 - TV(q, p), detached. W2 starts at zero, so training starts from the backbone alone.
"""

from typing import Any

import torch
from torch import Tensor, nn

from drafters.block import BlockDrafter
from drafters.contract import TargetParts
from drafters.layers import check_counts, complete
from drafters.vocabulary import DraftVocabulary

KINDS = ("vanilla", "gated", "rnn")
HEAD: dict[str, Any] = {"kind": "vanilla", "rank": 256, "confidence": True, "confidence_reads_token": True}


class MarkovHead(nn.Module):
    """Low-rank logit bias from the token before a slot."""

    def __init__(self, kind: str, rank: int, width: int, sizes: tuple[int, int]) -> None:
        """sizes: target vocabulary V and draft vocabulary W. width: D."""
        super().__init__()
        self.kind = kind
        self.markov_w1 = nn.Embedding(sizes[0], rank)
        self.markov_w2 = nn.Linear(rank, sizes[1], bias=False)
        nn.init.normal_(self.markov_w1.weight, std=rank**-0.5)
        nn.init.zeros_(self.markov_w2.weight)
        if kind == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        if kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def recur(self, hidden: Tensor, prev_ids: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """rnn only: hidden [N, D], prev_ids [N], state [N, r] or None (zeros) -> m [N, r], next state."""
        seen = self.markov_w1(prev_ids)
        state = torch.zeros_like(seen) if state is None else state
        gate, fresh, out = self.joint_proj(torch.cat([state, seen, hidden], -1)).chunk(3, -1)
        gate = gate.sigmoid()
        return out.tanh(), gate * state + (1 - gate) * fresh.tanh()

    def forward(self, hidden: Tensor, prev_ids: Tensor) -> Tensor:
        """vanilla and gated: m [N, r]."""
        seen = self.markov_w1(prev_ids)
        if self.kind == "vanilla":
            return seen
        return torch.sigmoid(self.gate_proj(torch.cat([hidden, seen], -1))) * seen


class ConfidenceHead(nn.Module):
    """A linear layer to one logit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, states: Tensor) -> Tensor:
        """[N, width] -> [N]."""
        return self.proj(states)[..., 0]


class DSpark(BlockDrafter):
    """DSpark drafter. head: kind (vanilla, gated, rnn), rank, confidence (whether there is such a head),
    confidence_reads_token (whether it reads W1[x] beside the slot's state). The rest as in BlockDrafter."""

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
        if self.head["kind"] not in KINDS:
            raise ValueError(f"head.kind must be one of {', '.join(KINDS)}, got {self.head['kind']!r}")
        check_counts("head.", rank=self.head["rank"])
        self.width, rank = self.layer_config.hidden_size, self.head["rank"]
        sizes = (self.vocabulary.target_size, len(self.vocabulary))
        self.markov_head = MarkovHead(self.head["kind"], rank, self.width, sizes)
        if self.head["confidence"]:
            self.confidence_head = ConfidenceHead(self.width + rank * self.head["confidence_reads_token"])

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"head": dict(self.head)}

    def step(self, hidden: Tensor, prev_ids: Tensor, carry: Any) -> tuple[Tensor, Any]:
        if self.head["kind"] != "rnn":
            return hidden, None
        markov, carry = self.markov_head.recur(hidden, prev_ids, carry)
        return torch.cat([hidden, markov], -1), carry

    def head_inputs(self, hidden: Tensor, prev_ids: Tensor) -> Tensor:
        return super().head_inputs(hidden, prev_ids) if self.head["kind"] == "rnn" else hidden

    def logits(self, hidden: Tensor, prev_ids: Tensor) -> Tensor:
        """hidden [N, D] (rnn: [N, D + r], the recurrent output beside it), prev_ids [N] -> [N, W]."""
        states = hidden[..., : self.width]
        recurrent = self.head["kind"] == "rnn"
        markov = hidden[..., self.width :] if recurrent else self.markov_head(states, prev_ids)
        return self.lm_head(states) + self.markov_head.markov_w2(markov)

    def confidence_logit(self, hidden: Tensor, prev_ids: Tensor) -> Tensor:
        """Logit [N] of the estimated conditional acceptance of slots [N, H]."""
        states = hidden[..., : self.width]
        if self.head["confidence_reads_token"]:
            states = torch.cat([states, self.markov_head.markov_w1(prev_ids)], -1)
        return self.confidence_head(states)

    def confidence(self, hidden: Tensor, prev_ids: Tensor) -> Tensor | None:
        return self.confidence_logit(hidden, prev_ids).float().sigmoid() if self.head["confidence"] else None

    def measures(self) -> dict[str, Any]:
        """confidence: binary cross entropy against 1 - TV(q, p), detached (DSpark, section 3.3)."""

        def confidence(scored: Any) -> Tensor:
            kept = scored.overlap.detach().clamp(0.0, 1.0)
            logit = self.confidence_logit(scored.hidden, scored.prev).float()
            return nn.functional.binary_cross_entropy_with_logits(logit, kept, reduction="none")

        return {"confidence": confidence} if self.head["confidence"] else {}
