"""A key-value cache layer of fixed size: every row writes at columns that it is told, its positions."""

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from drafters.drafting import write_at


class PlacedLayer(DynamicLayer):
    """Keys and values [R, G, C, d] of one layer, written at given columns: a row's column is its position.

    columns [R, N]: where the next keys go. width: C, of the buffers that the first keys make. shown: how many columns
    are handed out (None: all); nothing beyond the newest position needs to be looked at.
    """

    def __init__(self, **_: object) -> None:
        super().__init__()
        self.columns = torch.empty(0)
        self.width = 0
        self.shown: int | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write [R, G, N, d] at `columns` [R, N]; returns all columns that are shown."""
        if self.keys is None or self.values is None:
            shape = (*key_states.shape[:2], self.width)
            self.keys = key_states.new_zeros(*shape, key_states.shape[3])
            self.values = value_states.new_zeros(*shape, value_states.shape[3])
            self.is_initialized, self.device = True, key_states.device
        columns = self.columns.to(key_states.device)
        write_at(self.keys, columns, key_states)
        write_at(self.values, columns, value_states)
        return self.keys[:, :, : self.shown], self.values[:, :, : self.shown]
