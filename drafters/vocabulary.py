"""The draft vocabulary: which target tokens a drafter can propose, and the two maps engines read.

`d2t` holds *offsets* (target id = i + d2t[i]), `t2d` membership, as vLLM and SGLang expect.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class DraftVocabulary:
    """Sorted target ids that the drafter's head scores.

    ids [W] int64, ascending and distinct, all < target_size. Raises ValueError otherwise.
    """

    ids: Tensor
    target_size: int

    def __post_init__(self) -> None:
        ids = self.ids
        if ids.ndim != 1 or ids.dtype != torch.int64 or len(ids) == 0:
            raise ValueError(f"draft vocabulary needs a non-empty int64 vector, got {ids.dtype} {tuple(ids.shape)}")
        if bool((ids[1:] <= ids[:-1]).any()) or int(ids[0]) < 0 or int(ids[-1]) >= self.target_size:
            raise ValueError(f"draft vocabulary ids must be ascending, distinct and in 0..{self.target_size - 1}")

    @classmethod
    def full(cls, target_size: int) -> "DraftVocabulary":
        """Every target token: d2t is zero."""
        return cls(torch.arange(target_size), target_size)

    @classmethod
    def from_counts(cls, counts: Tensor, size: int) -> "DraftVocabulary":
        """The `size` most frequent tokens; ties go to the smaller id, and unused ids fill up when the corpus is small.

        counts [V] int64: how often each token occurs in training answers. Raises ValueError unless 1 <= size <= V.
        """
        if not isinstance(size, int) or not 1 <= size <= len(counts):
            raise ValueError(f"draft vocabulary size must be an integer in 1..{len(counts)}, got {size}")
        order = torch.sort(counts, descending=True, stable=True).indices
        return cls(order[:size].sort().values, len(counts))

    @classmethod
    def from_offsets(cls, d2t: Tensor, target_size: int) -> "DraftVocabulary":
        """From an exported d2t (offsets). ValueError when the mapped ids are out of range or not ascending."""
        return cls(torch.arange(len(d2t)) + d2t.to(torch.int64).cpu(), target_size)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def is_full(self) -> bool:
        return len(self.ids) == self.target_size

    def ids_on(self, device: torch.device) -> Tensor:
        """`ids` on a device, moved there once."""
        return self._on("ids", device)

    def inverse_on(self, device: torch.device) -> Tensor:
        """`inverse` on a device, moved there once."""
        return self._on("inverse", device)

    def _on(self, name: str, device: torch.device) -> Tensor:
        if (name, device) not in self._moved:
            self._moved[name, device] = getattr(self, name).to(device)
        return self._moved[name, device]

    @cached_property
    def _moved(self) -> dict[tuple[str, torch.device], Tensor]:
        return {}

    @cached_property
    def d2t(self) -> Tensor:
        """[W] int64 offsets: target id of draft id i is i + d2t[i]."""
        return self.ids - torch.arange(len(self.ids))

    @cached_property
    def t2d(self) -> Tensor:
        """[V] bool: whether a target id can be drafted."""
        return torch.zeros(self.target_size, dtype=torch.bool).index_fill_(0, self.ids, True)

    @cached_property
    def inverse(self) -> Tensor:
        """[V] int64: draft id of a target id, -1 when it cannot be drafted."""
        return torch.full((self.target_size,), -1).index_copy_(0, self.ids, torch.arange(len(self.ids)))

    @cached_property
    def fingerprint(self) -> str:
        """Short hash of the ids and the target's size."""
        return hashlib.sha256(self.ids.numpy().tobytes() + str(self.target_size).encode()).hexdigest()[:16]

    def coverage(self, counts: Tensor) -> float:
        """Share of counted tokens that can be drafted. counts [V]."""
        total = int(counts.sum())
        return float(counts[self.ids].sum()) / total if total else 0.0


def coverage_curve(counts: Tensor, sizes: list[int]) -> list[tuple[int, float]]:
    """(size, share of answer tokens covered by the `size` most frequent) for each size up to V. counts [V]."""
    cumulative = torch.sort(counts, descending=True).values.cumsum(0)
    total = max(int(cumulative[-1]), 1)
    return [(size, float(cumulative[min(size, len(counts)) - 1]) / total) for size in sizes if size >= 1]


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """16 hex digits over what turns text into ids; padding and truncation, which change with use, are left out."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state: Any = [sorted(tokenizer.get_vocab().items()), str(tokenizer.special_tokens_map)]
    if backend is not None:
        state = json.loads(backend.to_str())
        state.pop("padding", None)
        state.pop("truncation", None)
    return hashlib.sha256(json.dumps(state, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]
