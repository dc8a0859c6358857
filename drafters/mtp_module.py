"""One MTP module: what it fuses, its decoder layer, and its warm start. Parameters: enorm, hnorm, eh_proj, block, norm.

Letters in shapes: B rows, N queries, S keys, D hidden width.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from drafters.contract import TargetParts
from drafters.decoder import PlainLayer, take_block, take_norm
from drafters.mtp_block import Keys, LayerKind, through

START = 0.1  # of a normed state's size is what a warm start lets the embedding add


class MtpModule(nn.Module):
    """kind: of its decoder layer; dense: without experts. state: the keys recycles and concat of mtp.STATE."""

    def __init__(self, kind: LayerKind, dense: bool, state: dict[str, Any]) -> None:
        super().__init__()
        size, eps = kind.config.hidden_size, getattr(kind.config, "rms_norm_eps", 1e-6)
        self.state = state
        self.enorm, self.hnorm, self.norm = (LlamaRMSNorm(size, eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.block, self.rotary = kind.build(dense), kind.build_rotary()

    def fuse(self, states: Tensor, embedded: Tensor) -> Tensor:
        """states, embedded [..., D] -> the block's input [..., D]."""
        parts = [self.enorm(embedded), self.hnorm(states)]
        if self.state["concat"] == "hidden_first":
            parts.reverse()
        return self.eh_proj(torch.cat(parts, -1))

    def through(self, fused: Tensor, positions: Tensor, mask: Tensor, keys: Keys) -> Tensor:
        """The block's output [B, N, D]; see mtp_block.through."""
        return through(self.block, self.rotary, fused, positions, mask, keys)

    def recycle(self, output: Tensor) -> Tensor:
        """What a later slot reads of the block's output [..., D]."""
        return self.norm(output) if self.state["recycles"] == "post_norm" else output

    @torch.no_grad()
    def start_from(self, target: TargetParts, own: bool) -> list[str]:
        """Begin as the target's last block on the normed state; the embedding enters small. Returns what was taken."""
        size = len(self.norm.weight)
        halves = [self.eh_proj.weight[:, :size], self.eh_proj.weight[:, size:]]
        if self.state["concat"] == "hidden_first":
            halves.reverse()
        halves[0].normal_(0, START * size**-0.5)
        halves[1].copy_(torch.eye(size))
        taken, shift = ["eh_proj <- identity on the state"], take_norm(self.norm, target)
        if shift is not None:
            taken.append("norm <- target's final norm")
        source = {} if target.last_block is None else target.last_block()
        if own:
            mine = {n: t for n, t in self.block.state_dict().items() if n in source and source[n].shape == t.shape}
            for name, tensor in mine.items():
                tensor.copy_(source[name])
        else:
            mine = dict.fromkeys([] if shift is None else take_block(cast(PlainLayer, self.block), source, shift))
        return taken + [f"block.{name} <- target's last block" for name in mine]
