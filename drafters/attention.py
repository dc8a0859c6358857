"""Attention of unrolled drafters while training: a causal prefix plus each chain's own later keys.

At step k the query of anchor a sees the step-1 keys of rows <= a - 1 of its document, and the keys that its own chain
made at steps 2..k (the "diagonals"). Two equal forms: `dense_chain` everywhere, `flex_chain` where FlexAttention is
compiled.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


def dense_chain(
    query: Tensor, prefix: tuple[Tensor, Tensor], chain: list[tuple[Tensor, Tensor]], visible: Tensor
) -> Tensor:
    """Exact attention of chain queries.

    query [B, H, A, d]. prefix: keys and values [B, G, T, d] of step 1 (G key-value heads). chain: keys and values
    [B, G, A, d] of steps 2..k. visible [B, A, T] bool: which prefix rows each anchor may see (at least one, or the
    row is a padding anchor whose output is not used). Returns [B, H, A, d]. Softmax in float32.
    """
    rows, heads, anchors, width = query.shape
    keys, values = prefix
    groups = keys.shape[1]
    grouped = query.view(rows, groups, heads // groups, anchors, width) * (1.0 / math.sqrt(width))
    flat = grouped.reshape(rows, groups, -1, width)
    scores = (flat @ keys.transpose(-1, -2)).view(rows, groups, heads // groups, anchors, -1)
    floor = torch.finfo(scores.dtype).min
    scores = scores + torch.where(visible, 0.0, floor).to(scores.dtype)[:, None, None]
    own = [(grouped * key[:, :, None]).sum(-1, keepdim=True) for key, _ in chain]
    weights = torch.cat([scores, *own], -1).softmax(-1, dtype=torch.float32).to(query.dtype)
    length = keys.shape[2]
    out = (weights[..., :length].reshape(rows, groups, -1, length) @ values).view_as(grouped)
    for j, (_, value) in enumerate(chain):
        out = out + weights[..., length + j, None] * value[:, :, None]
    return out.reshape(rows, heads, anchors, width)


def chain_block_mask(visible: Tensor, steps: int) -> BlockMask:
    """Block mask of `flex_chain` at a step with `steps` chain keys. visible [B, A, T] bool."""
    rows, anchors, length = visible.shape

    def allowed(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        own = (kv >= length) & ((kv - length) % anchors == q)
        return own | ((kv < length) & visible[b, q, kv.clamp_max(length - 1)])

    return create_block_mask(allowed, rows, None, anchors, length + steps * anchors, device=visible.device)


@lru_cache(maxsize=1)
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


def flex_chain(
    query: Tensor,
    prefix: tuple[Tensor, Tensor],
    chain: list[tuple[Tensor, Tensor]],
    mask: BlockMask,
    compiled: bool = True,
) -> Tensor:
    """As `dense_chain`, through FlexAttention; `mask` from `chain_block_mask`. compiled=False runs the eager
    reference."""
    keys = torch.cat([prefix[0], *(key for key, _ in chain)], 2)
    values = torch.cat([prefix[1], *(value for _, value in chain)], 2)
    attend = _compiled_flex() if compiled else cast(Callable[..., Any], flex_attention)
    return attend(query, keys, values, block_mask=mask, enable_gqa=query.shape[1] != keys.shape[1])
