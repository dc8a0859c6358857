"""EAGLE-3 (arXiv 2503.01840, section 3), with the two switches of EAGLE-3.1 (arXiv 2605.09992).

One decoder layer reads, at row t, the fused features of position t and the embedding of the token at t + 1, and
predicts the token at t + 2. In the words of the grid: the anchor is at a = t + 1 and slot 1 predicts a + 1. Slot k >=
2 recycles the layer's own output of slot k - 1 in place of features ("training-time test"), at rotary position t + k
- 1, and sees the step-1 keys of rows <= t plus its own chain's keys.

    row          t = a - 1        a              a + 1
    hidden       fc(features t)   own output 1   own output 2
    token        x_a              x_{a+1}        x_{a+2}        data in training, drafted when drafting
    slot         1 -> a + 1       2 -> a + 2     3 -> a + 3

Deviations from the paper are choices in yaml and off by default: `fc_norm` (a norm on each captured layer before the
fusion, 3.1), `norm_output` (recycle the normed output, 3.1), `norm_before_residual` (residual starts after the norm).
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from drafters.contract import TargetParts
from drafters.decoder import FusedLayer, PlainLayer, captured, draft_head, take_block, take_head, take_norm
from drafters.layers import Rotary, SharedEmbedding, layer_config, layer_settings
from drafters.unrolled import Unrolled
from drafters.vocabulary import DraftVocabulary


class Eagle3(Unrolled):
    """EAGLE-3 drafter.

    target: frozen parts of the target (embedding, and the head when head="target"). vocabulary: None means all target
    tokens. num_slots: K, steps of the training-time test and tokens drafted. layers: captured target layers, null for
    the default three. head: "own" trains a head over the draft vocabulary, "target" shares the frozen one. layer:
    overrides of the decoder layer's sizes (drafters.layers.LAYER_KEYS). keep: share of the chains of the
    fullest row that training takes one slot deeper, drawn anew each step and nested (emptier rows keep more: the room
    is there). It stands in for the paper's 0.8^k loss weights at a fraction of the work.
    """

    training_only = ("keep",)

    def __init__(
        self,
        target: TargetParts,
        vocabulary: DraftVocabulary | None = None,
        *,
        num_slots: int = 7,
        layers: list[int] | None = None,
        head: Literal["own", "target"] = "own",
        switches: dict[str, bool] | None = None,
        layer: dict[str, Any] | None = None,
        keep: float = 1.0,
    ) -> None:
        super().__init__()
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, got {num_slots}")
        if not 0 < keep <= 1:
            raise ValueError(f"keep must be in (0, 1], got {keep}")
        self.num_slots, self.keep = num_slots, keep
        self.needs = captured(target, layers)
        self.vocabulary = vocabulary or DraftVocabulary.full(target.config.vocab_size)
        self.head = head
        self.switches = {"fc_norm": False, "norm_output": False, "norm_before_residual": False}
        unknown = sorted(set(switches or {}) - set(self.switches))
        if unknown:
            raise ValueError(f"unknown switch(es) {', '.join(unknown)}; allowed: {', '.join(self.switches)}")
        self.switches |= switches or {}
        self.layer_config = config = layer_config(target.config, layer)
        size, count = config.hidden_size, len(self.needs.layers)
        if self.switches["fc_norm"]:
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(size, config.rms_norm_eps) for _ in range(count))
        self.fc = nn.Linear(count * size, size, bias=False)
        self.midlayer = FusedLayer(config, self.switches["norm_before_residual"])
        self.norm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.lm_head = draft_head(head, target, self.vocabulary)
        self.embedding = SharedEmbedding(target)
        self.rotary = Rotary(config)

    def settings(self) -> dict[str, Any]:
        return {
            "num_slots": self.num_slots,
            "layers": list(self.needs.layers),
            "head": self.head,
            "switches": dict(self.switches),
            "layer": layer_settings(self.layer_config),
            "keep": self.keep,
        }

    def fuse(self, aux: Tensor) -> Tensor:
        """aux [..., L, D] -> fused features [..., D]."""
        if self.switches["fc_norm"]:
            aux = torch.stack([norm(aux[..., i, :]) for i, norm in enumerate(self.fc_norm)], -2)
        return self.fc(aux.flatten(-2))

    def read(self, aux: Tensor, last: Tensor) -> Tensor:
        return self.fuse(aux)

    def enter(self, hidden: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        return self.midlayer.join(hidden, embedded)

    @property
    def body(self) -> Sequence[PlainLayer]:
        return (self.midlayer,)

    def leave(self, output: Tensor) -> Tensor:
        return self.norm(output)

    def _recycle(self, output: Tensor) -> Tensor:
        return self.norm(output) if self.switches["norm_output"] else output

    def logits(self, hidden: Tensor, prev_ids: Tensor) -> Tensor:
        """hidden [N, D] (already normed) -> [N, W]; an EAGLE-3 head does not read prev_ids."""
        return self.lm_head(hidden)

    @torch.no_grad()
    def warm_start(self, target: TargetParts) -> list[str]:
        """Fusion from the last captured layer, layer from the target's last block, norm and head from the target's.

        The embedding halves of q, k, v start small and random, so step 1 begins as the target's last block reading
        the last captured layer.
        """
        size = self.layer_config.hidden_size
        self.fc.weight.zero_()[:, -size:].copy_(torch.eye(size))
        taken, norm_shift = [f"fc <- identity on layer {self.needs.layers[-1]}"], take_norm(self.norm, target)
        if norm_shift is not None:
            taken.append("norm <- target's final norm")
        taken += take_head(self.lm_head, self.vocabulary, target)
        if norm_shift is None or target.last_block is None:
            return taken
        names = take_block(self.midlayer, target.last_block(), norm_shift)
        return taken + [f"midlayer.{name} <- target's last block" for name in names]
