"""Attention of drafters. Two equal forms of each kind: dense everywhere, flex where FlexAttention is compiled.

Chains (unrolled drafters): at step k the query of anchor a sees the step-1 keys of rows <= a - 1 of its document, and
the keys that its own chain made at steps 2..k (the "diagonals").

Blocks (parallel drafters): the rows of anchor a see context keys of positions < a of its document, and the rows of
their own block.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

GRAPHS = 1024  # that compiled attention may have: numbers of anchors times steps times gradient modes
NARROWEST = 16  # head width that FlexAttention's kernels have
TILE = 128  # queries and keys of a tile, which FlexAttention visits or leaves out
CELLS_AT_ONCE = 1 << 24  # of a mask, while its tiles are counted


def fused(query: Tensor) -> bool:
    """Whether a query [..., d] goes through FlexAttention: on a GPU, and not inside a dispatch mode (one that counts
    products, say), which is to see every operator and cannot look into a compiled kernel."""
    return query.is_cuda and query.shape[-1] >= NARROWEST and not is_in_torch_dispatch_mode()


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


def block_mask(
    allowed: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    shape: tuple[int, int, int],
    device: torch.device,
    cells: int = CELLS_AT_ONCE,
) -> BlockMask:
    """What torch's create_block_mask gives for all heads alike, without ever holding the whole mask: its tiles are
    counted by groups of about `cells` cells. Whole, at 2,048 tokens and 512 anchors of 16 rows, it takes 0.9 GiB a row.

    allowed: whether query q of row b sees key kv; takes index tensors (b, head, q, kv) whose shapes broadcast. shape:
    rows, queries, keys.
    """
    rows, queries, keys = shape
    row, key = torch.arange(rows, device=device)[:, None, None], torch.arange(keys, device=device)
    head, group = torch.zeros((), dtype=torch.int64, device=device), TILE * max(1, cells // (TILE * rows * keys))
    counted = []
    for query in torch.arange(queries, device=device).split(group):
        seen = allowed(row, head, query[:, None], key).expand(rows, len(query), keys)
        seen = torch.nn.functional.pad(seen, (0, -keys % TILE, 0, -len(query) % TILE))
        counted.append(seen.unflatten(2, (-1, TILE)).unflatten(1, (-1, TILE)).sum((2, 4)))
    counts = torch.cat(counted, 1)[:, None]
    some, whole = (counts > 0) & (counts < TILE * TILE), counts == TILE * TILE
    partial_tiles, whole_tiles = _visited(some), _visited(whole)
    return BlockMask.from_kv_blocks(*partial_tiles, *whole_tiles, TILE, allowed, (queries, keys))


def _visited(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Number of tiles [B, 1, Q] that are true in each row of [B, 1, Q, K], and their columns, those first, in order."""
    columns = tiles.int().argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(-1).int(), columns.int().contiguous()


def chain_block_mask(visible: Tensor, steps: int) -> BlockMask:
    """Block mask of `flex_chain` at a step with `steps` chain keys. visible [B, A, T] bool."""
    rows, anchors, length = visible.shape

    def allowed(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        own = (kv >= length) & ((kv - length) % anchors == q)
        return own | ((kv < length) & visible[b, q, kv.clamp_max(length - 1)])

    return block_mask(allowed, (rows, anchors, length + steps * anchors), visible.device)


@lru_cache(maxsize=1)
def _compiled_flex() -> Callable[..., Any]:
    """FlexAttention, compiled for each shape: a number of anchors (few, see data.module) at a step of the chain.

    Past torch's limit on graphs, 8 by itself, it would run the unfused form, which materialises all scores."""
    limits = torch._dynamo.config
    limits.recompile_limit = max(GRAPHS, limits.recompile_limit)
    limits.accumulated_recompile_limit = max(GRAPHS, limits.accumulated_recompile_limit)
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


def dense_block(
    query: Tensor, context: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor], visible: Tensor, inside: Tensor
) -> Tensor:
    """Exact attention of blocks.

    query [B, H, A, S, d]: S rows of each of A anchors. context: keys and values [B, G, T, d]. block: keys and values
    [B, G, A, S, d] of the rows themselves. visible [B, A, S or 1, T] bool: context positions a row may see. inside [S,
    S] bool: which rows of its own block a row (first index) may see. Returns [B, H, A, S, d]. Softmax in float32.
    """
    rows, heads, anchors, slots, width = query.shape
    (keys, values), (own_keys, own_values) = context, block
    groups, length = keys.shape[1:3]
    grouped = query.reshape(rows, groups, heads // groups, anchors, slots, width) * (1.0 / math.sqrt(width))
    scores = (grouped.flatten(2, 4) @ keys.transpose(-1, -2)).view(*grouped.shape[:-1], length)
    floor = torch.finfo(scores.dtype).min
    scores = scores + torch.where(visible, 0.0, floor).to(scores.dtype)[:, None, None]
    own = grouped @ own_keys[:, :, None].transpose(-1, -2)
    own = own + torch.where(inside, 0.0, floor).to(scores.dtype)
    weights = torch.cat([scores, own], -1).softmax(-1, dtype=torch.float32).to(query.dtype)
    seen = weights[..., :length].reshape(rows, groups, -1, length) @ values
    out = seen.view_as(grouped) + weights[..., length:] @ own_values[:, :, None]
    return out.reshape(query.shape)


def block_block_mask(documents: Tensor, anchors: Tensor, slots: int, window: int | None, causal: bool) -> BlockMask:
    """Block mask of `flex_block`. documents [B, T], anchors [B, A] positions in the row (padding -1 sees nothing but
    its own block); window: what a row sees reaches this far back, itself included."""
    rows, count, length = *anchors.shape, documents.shape[1]

    def allowed(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        anchor, row, column = anchors[b, q // slots], q % slots, kv.clamp_max(length - 1)
        seen = (kv < length) & (kv < anchor) & (documents[b, column] == documents[b, anchor.clamp_min(0)])
        own = (kv >= length) & ((kv - length) // slots == q // slots)
        if window is not None:
            seen = seen & (kv > anchor + row - window)
            own = own & ((kv - length) % slots > row - window)
        if causal:
            own = own & ((kv - length) % slots <= row)
        return seen | own

    return block_mask(allowed, (rows, count * slots, length + count * slots), documents.device)


def flex_block(
    query: Tensor,
    context: tuple[Tensor, Tensor],
    block: tuple[Tensor, Tensor],
    mask: BlockMask,
    compiled: bool = True,
) -> Tensor:
    """As `dense_block`, through FlexAttention; `mask` from `block_block_mask`. compiled=False runs the eager
    reference."""
    values = torch.cat([context[1], block[1].flatten(2, 3)], 2)
    # Under autocast norms give queries and keys 32 bits beside values of 16, and FlexAttention takes one dtype.
    keys = torch.cat([context[0], block[0].flatten(2, 3)], 2).to(values.dtype)
    flat = query.flatten(2, 3).to(values.dtype)
    attend = _compiled_flex() if compiled else cast(Callable[..., Any], flex_attention)
    return attend(flat, keys, values, block_mask=mask, enable_gqa=flat.shape[1] != keys.shape[1]).view_as(query)
