"""The target's cache in buffers of fixed size: a token's column is its position.

Every round writes K + 1 columns from a row's own position on; what a rejection left there is overwritten by the next
round before anything may look at it. Nothing is moved, counted or grown, so a round needs no word from the host.
"""

from typing import cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from drafters.placed import PlacedLayer
from eval.cache import RowCache, check_cacheable

ATTENTION = ("eager", "sdpa")


class PlacedCache:
    """Cache of R requests, `width` columns wide. cache: what the target writes into."""

    def __init__(self, model: PreTrainedModel, read: RowCache, width: int) -> None:
        """Takes over the prompts that `read` holds. ValueError for an attention that takes no mask of its own."""
        self.kinds = sorted(check_cacheable(model))
        config = model.config.get_text_config(decoder=True)
        used = getattr(config, "_attn_implementation", "eager")
        if used not in ATTENTION:
            raise ValueError(f"a cache by position needs attn_implementation {' or '.join(ATTENTION)}, got {used!r}")
        self.width = width
        self.window: int = getattr(config, "sliding_window", None) or 0
        self.chunk: int = getattr(config, "attention_chunk_size", None) or 0
        self.cache = DynamicCache()
        held = read.visible.shape[1]
        # Columns that no remaining row needs may be left from rows that have ended.
        columns = torch.arange(min(held, width), device=read.lengths.device) + (held - read.lengths)[:, None]
        self.cache.layers = [_moved(layer.keys, layer.values, columns, width) for layer in read.layers]

    @property
    def layers(self) -> list[PlacedLayer]:
        return cast(list[PlacedLayer], self.cache.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers of all layers."""
        return sum(part.nbytes for layer in self.layers for part in (layer.keys, layer.values) if part is not None)

    def place(self, positions: Tensor, shown: int) -> None:
        """Where the target's next keys go, positions [R, N]; the first `shown` columns are looked at."""
        for layer in self.layers:
            layer.columns, layer.shown = positions, shown

    def masks(self, positions: Tensor, shown: int, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
        """Additive masks [R, 1, N, shown] of tokens at positions [R, N]; by kind where the target's layers differ."""
        found = {kind: self._mask(kind, positions, shown, dtype) for kind in self.kinds}
        return found if len(found) > 1 else next(iter(found.values()))

    def select(self, rows: Tensor) -> None:
        """Keep these rows. rows [R'] int64."""
        for layer in self.layers:
            assert layer.keys is not None
            assert layer.values is not None
            index = rows.to(layer.keys.device)
            layer.keys, layer.values = layer.keys[index], layer.values[index]

    def _mask(self, kind: str, positions: Tensor, shown: int, dtype: torch.dtype) -> Tensor:
        columns, own = torch.arange(shown, device=positions.device), positions[..., None]
        seen = columns <= own
        if kind == "sliding_attention":
            seen = seen & (columns > own - self.window)
        elif kind == "chunked_attention":
            seen = seen & (columns // self.chunk == own // self.chunk)
        return torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)[:, None]


def _moved(keys: Tensor | None, values: Tensor | None, columns: Tensor, width: int) -> PlacedLayer:
    """A layer that holds, from column 0 on, the columns [R, T] of keys and values [R, G, T, d]; those past a row's
    length hold copies that nothing sees before they are overwritten."""
    assert keys is not None
    assert values is not None
    layer = PlacedLayer()
    index = columns.clamp_max(keys.shape[2] - 1).to(keys.device)[:, None, :, None]
    made = []
    for part in (keys, values):
        buffer = part.new_zeros(*part.shape[:2], width, part.shape[3])
        buffer[:, :, : columns.shape[1]] = part.gather(2, index.expand(-1, part.shape[1], -1, part.shape[3]))
        made.append(buffer)
    layer.keys, layer.values = made
    layer.width, layer.is_initialized, layer.device = width, True, keys.device
    return layer
