"""DFlash 2 (2026-08): a block drafter that picks a path through each slot's best tokens and convolves in its layers.

Path selector: slot k offers its top tokens; choosing c after p scores logit_k[c] + <A[p] * (H h_k), B[c]>. The walk
goes left to right; when sampling, the distribution over a slot's candidates is the exact q. B starts at zero.

Grouped dynamic convolution: before and after attention and MLP, out_i = sum_t (base_t + delta_t(x_i)) * x_{i-t} over
two taps inside the block; base starts at the identity, delta at zero, one value a group of 16 channels.

While training, tokens outside the candidates keep their base logits, so that every objective stays finite; drafting and
evaluation cut them off.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from drafters.block import BlockDrafter, BlockLayer, View
from drafters.contract import TargetParts
from drafters.layers import check_counts, complete
from drafters.vocabulary import DraftVocabulary

HEAD: dict[str, Any] = {"candidates": 16, "rank": 256, "taps": 2, "group": 16}


class GroupedConv(nn.Module):
    """Dynamic depthwise convolutions before (side 0) and after (side 1) a sublayer, over the rows of a block."""

    def __init__(self, size: int, taps: int, group: int) -> None:
        super().__init__()
        if size % group:
            raise ValueError(f"head.group must divide {size}, got {group}")
        self.taps, self.group = taps, group
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, size))
        self.kernel_projection = nn.Linear(size, 2 * taps * (size // group), bias=False)
        with torch.no_grad():
            self.base_kernel[:, 0] = 1.0
            self.kernel_projection.weight.zero_()

    def kernels(self, states: Tensor) -> Tensor:
        """states [..., S, D] -> kernels [2, taps, ..., S, D] of both sides."""
        delta = self.kernel_projection(states).unflatten(-1, (2, self.taps, -1)).repeat_interleave(self.group, -1)
        return (delta + self.base_kernel).movedim((-3, -2), (0, 1))

    def forward(self, states: Tensor, kernels: Tensor) -> Tensor:
        """states [..., S, D], kernels [taps, ..., S, D] of one side; rows before the block's first are zero."""
        out = kernels[0] * states
        for tap in range(1, self.taps):
            earlier = nn.functional.pad(states[..., :-tap, :], (0, 0, tap, 0))
            out = out + kernels[tap] * earlier
        return out


class ConvLayer(BlockLayer):
    """A draft layer with convolutions around attention and MLP."""

    def __init__(self, config: LlamaConfig, window: int | None, taps: int, group: int) -> None:
        super().__init__(config, window)
        self.attention_conv = GroupedConv(config.hidden_size, taps, group)
        self.mlp_conv = GroupedConv(config.hidden_size, taps, group)

    def attend(self, states: Tensor, view: View, context: tuple[Tensor, Tensor]) -> Tensor:
        before, after = self.attention_conv.kernels(states)
        return self.attention_conv(super().attend(self.attention_conv(states, before), view, context), after)

    def feed(self, states: Tensor) -> Tensor:
        before, after = self.mlp_conv.kernels(states)
        return self.mlp_conv(super().feed(self.mlp_conv(states, before)), after)


class CandidateSelector(nn.Module):
    """Scores of choosing a token after another, given a slot's state."""

    def __init__(self, width: int, rank: int, sizes: tuple[int, int]) -> None:
        """sizes: target vocabulary V (tokens before) and draft vocabulary W (tokens chosen). width: D."""
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.randn(sizes[0], rank) * rank**-0.5)
        self.successor_codebook = nn.Parameter(torch.zeros(sizes[1], rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)

    def forward(self, hidden: Tensor, prev_ids: Tensor, candidates: Tensor) -> Tensor:
        """hidden [N, D], prev_ids [N], candidates [N, C] draft ids -> edge scores [N, C]."""
        read = self.predecessor_codebook[prev_ids] * self.hidden_projection(hidden)
        return (self.successor_codebook[candidates] @ read[..., None])[..., 0]


class DFlash2(BlockDrafter):
    """DFlash 2 drafter. head: candidates (top tokens of a slot), rank (of the selector), taps and group (of the
    convolutions). The rest as in BlockDrafter."""

    sequential, branching = True, "steps"

    def __init__(
        self,
        target: TargetParts,
        vocabulary: DraftVocabulary | None = None,
        *,
        head: dict[str, Any] | None = None,
        **block: Any,
    ) -> None:
        self._head = complete("head", HEAD, head)
        check_counts("head.", **self._head)
        super().__init__(target, vocabulary, **block)
        if not 1 <= self._head["candidates"] <= len(self.vocabulary):
            raise ValueError(
                f"head.candidates must be in 1..{len(self.vocabulary)} (draft words), got {self._head['candidates']}"
            )
        sizes = (self.vocabulary.target_size, len(self.vocabulary))
        self.candidate_selector = CandidateSelector(self.layer_config.hidden_size, self._head["rank"], sizes)

    def make_layer(self, config: LlamaConfig, window: int | None) -> BlockLayer:
        return ConvLayer(config, window, self._head["taps"], self._head["group"])

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"head": dict(self._head)}

    def head_inputs(self, hidden: Tensor, prev_ids: Tensor) -> Tensor:
        return hidden

    def logits(self, hidden: Tensor, prev_ids: Tensor) -> Tensor:
        """hidden [N, D], prev_ids [N] -> [N, W]: candidates by base logit and edge; the others -inf, or while training
        their base logits."""
        base = self.lm_head(hidden)
        unary, candidates = base.topk(self._head["candidates"], -1)
        scores = unary + self.candidate_selector(hidden, prev_ids, candidates)
        rest = base if self.training else torch.full_like(base, -torch.inf)
        return rest.scatter(-1, candidates, scores)

    def measures(self) -> dict[str, Any]:
        """base_data_ce: cross entropy of the base logits. path_data_ce: of the choice among a slot's candidates after
        the data's token; a data token that is no candidate takes the last one's place."""

        def base_data_ce(scored: Any) -> Tensor:
            base = self.lm_head(scored.hidden).float().log_softmax(-1)
            return -base.gather(-1, scored.data[:, None])[:, 0]

        def path_data_ce(scored: Any) -> Tensor:
            wanted, base = scored.data[:, None], self.lm_head(scored.hidden)
            with torch.no_grad():
                candidates = base.topk(self._head["candidates"], -1).indices
                missing = ~(candidates == wanted).any(-1, keepdim=True)
                candidates[:, -1:] = torch.where(missing, wanted, candidates[:, -1:])
            edges = self.candidate_selector(scored.hidden, scored.prev, candidates)
            path = (base.gather(-1, candidates) + edges).float().log_softmax(-1)
            return -(path * (candidates == wanted)).sum(-1)

        return {"base_data_ce": base_data_ce, "path_data_ce": path_data_ce}
