"""What a shard of the feature store holds, and how: precisions, the teacher, prefixes kept once.

    tokens, turns, offsets      every position of every conversation, and where each begins
    rows                        with shared prefixes: the feature row of each position
    top1, lse, aux...           one entry a feature row
    last... or top_ids, top_logp  one entry a teacher row: a feature row, or with teacher_at=answers one in an answer
    teacher_rows                with teacher_at=answers: the teacher row of each feature row, -1 where there is none

A target reads from left to right, so what it shows of a prefix does not depend on what follows: conversations that
begin with the same tokens share those feature rows, within a shard, so that a shard stands alone.

Letters in shapes: N positions, M feature rows, T tokens of a conversation, L captured layers, D hidden width.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Self

import torch
from torch import Tensor

from data.conversations import Conversation
from data.precision import CHANNELS, LARGEST, PLAIN, Precision

ENCODED_AT_ONCE = 4096  # rows; encoding works in float32
NO_TEACHER = -1


@dataclass
class Sample:
    """One conversation with its features.

    tokens, turns int64 [T]; aux [T, L, D]; last [T, D] after the final norm; top1 int64 [T] and lse float32 [T]: argmax
    and log-sum-exp of the target's logits at each position. top_ids int64, top_logp float32 [T, k]: the target's k most
    likely tokens, where a store keeps those in place of `last`, which then has no width [T, 0].
    """

    id: str
    tokens: Tensor
    turns: Tensor
    aux: Tensor
    last: Tensor
    top1: Tensor
    lse: Tensor
    top_ids: Tensor | None = None
    top_logp: Tensor | None = None


def feature_dtype(name: str) -> torch.dtype:
    """What layers' outputs are computed to: bfloat16 with auto and with fewer bits (they have outliers), else as
    named."""
    return PLAIN.get(name, torch.bfloat16)


def last_dtype(name: str, target_dtype: torch.dtype) -> torch.dtype:
    """What the last hidden state is computed to. With auto: the target's own dtype where that has 16 bits, else
    float16.

    The teacher's logits come from it, so it needs precision, and after a norm it has no outliers: float16 rounds a
    float32 one eight times finer than bfloat16, which moves the argmax on 0.14% of positions with SmolLM2-135M and on
    over 1% with a random model.
    """
    if name in PLAIN:
        return PLAIN[name]
    return target_dtype if target_dtype.itemsize == 2 else torch.float16


@dataclass(frozen=True)
class StoreSettings:
    """How features are kept.

    precision: of layers' outputs: auto (bfloat16), or one of data.precision, e.g. "int8:64". last: precision of the
    last hidden state; auto: as `precision` where that is a plain dtype, 16 bits with auto, int12 with fewer bits.
    topk: keep the target's k most likely tokens in place of the last hidden state (0: keep that). teacher_at: all, or
    answers: only where a drafter is taught. share_prefixes: what several conversations begin with is kept once a shard.
    """

    precision: str = "auto"
    last: str = "auto"
    topk: int = 0
    teacher_at: str = "all"
    share_prefixes: bool = False

    def __post_init__(self) -> None:
        for text in (self.precision, self.last):
            if text != "auto" and text.partition(":")[0] not in (*PLAIN, *LARGEST):
                allowed = ", ".join(("auto", *PLAIN, *LARGEST))
                raise ValueError(f"a precision of features must be one of {allowed}, or NAME:GROUP, got {text!r}")
        if self.teacher_at not in ("all", "answers"):
            raise ValueError(f"features teacher_at must be all or answers, got {self.teacher_at!r}")
        if not isinstance(self.topk, int) or self.topk < 0:
            raise ValueError(f"features topk must be a whole number, 0 for the last hidden state, got {self.topk!r}")
        if self.topk and self.last != "auto":
            raise ValueError(f"with topk={self.topk} no last hidden state is kept: last={self.last!r} has no use")

    @classmethod
    def of(cls, asked: "str | StoreSettings") -> "StoreSettings":
        """A precision's name alone, or settings."""
        return cls(asked) if isinstance(asked, str) else asked

    def layout(self, layers: int, width: int, target_dtype: torch.dtype) -> "Layout":
        """The resolved form for a target. ValueError when a group does not fit the width."""
        kept = self.precision if self.precision in PLAIN else "auto"
        aux_dtype, own_last = feature_dtype(kept), last_dtype(kept, target_dtype)
        plain = self.precision in ("auto", *PLAIN)
        names = {dtype: name for name, dtype in PLAIN.items()}
        aux = Precision.parse(names[aux_dtype] if plain else self.precision, width)
        usual = names[own_last] if plain else "int12"
        last = None if self.topk else Precision.parse(usual if self.last == "auto" else self.last, width)
        if last is not None and last.is_plain:
            own_last = last.dtype
        return Layout(layers, width, aux, last, aux_dtype, own_last, self.topk, self.teacher_at, self.share_prefixes)


@dataclass(frozen=True)
class Layout:
    """What every shard of one store holds. aux_dtype, last_dtype: what features are rounded to first, so that a store
    converted from a plain one has the same bytes as one captured so. last: None with topk."""

    layers: int
    width: int
    aux: Precision
    last: Precision | None
    aux_dtype: torch.dtype
    last_dtype: torch.dtype
    topk: int = 0
    teacher_at: str = "all"
    share_prefixes: bool = False

    @classmethod
    def read(cls, header: dict[str, Any]) -> Self:
        """The layout of a store, of either version."""
        said = {"aux": header["dtype"], "last": header["last_dtype"]} | header.get("store", {})
        width = header["hidden_size"]
        return cls(
            layers=len(header["layers"]),
            width=width,
            aux=Precision.parse(said["aux"], width),
            last=None if said["last"] is None else Precision.parse(said["last"], width),
            aux_dtype=PLAIN[header["dtype"]],
            last_dtype=PLAIN[header["last_dtype"]],
            topk=said.get("topk", 0),
            teacher_at=said.get("teacher_at", "all"),
            share_prefixes=said.get("share_prefixes", False),
        )

    @property
    def is_first(self) -> bool:
        """Whether the first version of the format says it all."""
        plain = self.aux.is_plain and self.last is not None and self.last.is_plain
        return plain and not self.topk and self.teacher_at == "all" and not self.share_prefixes

    def header(self) -> dict[str, Any]:
        """The header's entry of the second version."""
        return {
            "aux": str(self.aux),
            "last": None if self.last is None else str(self.last),
            "topk": self.topk,
            "teacher_at": self.teacher_at,
            "share_prefixes": self.share_prefixes,
        }

    def describe(self) -> str:
        """One line for the screen and a drafter's record."""
        teacher = f"top {self.topk} of the target" if self.last is None else f"last hidden state {self.last}"
        parts = [f"layers {self.aux}", teacher + (" in answers" if self.teacher_at == "answers" else "")]
        return ", ".join(parts + (["shared prefixes once"] if self.share_prefixes else []))

    @property
    def feature_bytes(self) -> int:
        """Bytes of one feature row without its teacher: top1 4, lse 4 and L hidden states."""
        return 8 + self.layers * self.aux.row_bytes(self.width) + 4 * (self.teacher_at == "answers")

    @property
    def teacher_bytes(self) -> int:
        """Bytes of one teacher row."""
        return 6 * self.topk if self.last is None else self.last.row_bytes(self.width)

    @property
    def position_bytes(self) -> int:
        """Bytes of one position that no sharing spares: tokens 4, turns 2, and its row's number."""
        return 6 + 4 * self.share_prefixes

    @property
    def row_bytes(self) -> int:
        """Bytes of one position with everything."""
        return self.position_bytes + self.feature_bytes + self.teacher_bytes

    @property
    def tensors(self) -> int:
        """Tensors in a shard's file."""
        kept = [one for one in (self.aux, self.last) if one is not None]
        codes = sum(len(one.tensors(2)) + one.has_channels for one in kept)
        return 5 + codes + 2 * (self.last is None) + self.share_prefixes + (self.teacher_at == "answers")

    @property
    def channel_bytes(self) -> int:
        """Bytes of a shard's channel sizes."""
        last = self.last is not None and self.last.has_channels
        return 2 * self.width * (self.layers * self.aux.has_channels + last)


@dataclass
class Prefixes:
    """A prefix tree: which row holds what a target shows after each beginning."""

    rows: dict[tuple[int, int], int] = field(default_factory=dict)

    def known(self, tokens: Sequence[int]) -> int:
        """How many of these tokens begin an earlier conversation."""
        row, count = -1, 0
        for token in tokens:
            found = self.rows.get((row, token))
            if found is None:
                break
            row, count = found, count + 1
        return count

    def add(self, tokens: Sequence[int]) -> list[int]:
        """The row of each token; new rows are counted on."""
        row, found = -1, []
        for token in tokens:
            row = self.rows.setdefault((row, token), len(self.rows))
            found.append(row)
        return found


@dataclass
class Places:
    """Where a shard's features lie: rows int64 [N] feature row of each position; owner int64 [M] the conversation that
    fills it; teacher int64 [M] its teacher row or -1; teachers: how many."""

    rows: Tensor
    owner: Tensor
    teacher: Tensor
    teachers: int

    @classmethod
    def of(cls, conversations: Sequence[Conversation], layout: Layout) -> Self:
        """For the conversations of one shard."""
        whose = torch.cat([torch.full((len(one.tokens),), i) for i, one in enumerate(conversations)])
        if layout.share_prefixes:
            tree = Prefixes()
            rows = torch.tensor([row for one in conversations for row in tree.add(one.tokens)])
        else:
            rows = torch.arange(len(whose))
        count = int(rows.max()) + 1
        owner = torch.full((count,), len(conversations)).scatter_reduce_(0, rows, whose, "amin")
        kept = torch.ones(count, dtype=torch.bool)
        if layout.teacher_at == "answers":
            taught = torch.cat([torch.tensor(one.turns) for one in conversations]) > 0
            kept = torch.zeros(count, dtype=torch.bool).index_put_((rows[taught],), torch.tensor(True))
        teacher = torch.where(kept, kept.long().cumsum(0) - 1, NO_TEACHER)
        return cls(rows, owner, teacher, int(kept.sum()))


def shard_plan(lengths: Sequence[int], row: int, shard_bytes: int) -> list[tuple[int, int]]:
    """(start, stop) of each shard: whole conversations in order, at most shard_bytes (or one conversation)."""
    plan, start, size = [], 0, 0
    for index, length in enumerate(lengths):
        if index > start and size + length * row > shard_bytes:
            plan.append((start, index))
            start, size = index, 0
        size += length * row
    return [*plan, (start, len(lengths))]


def plan_of(conversations: Sequence[Conversation], layout: Layout, shard_bytes: int) -> list[tuple[int, int]]:
    """shard_plan with prefixes counted once where they are kept once."""
    if not layout.share_prefixes:
        return shard_plan([len(one.tokens) for one in conversations], layout.row_bytes, shard_bytes)
    plan, start, size, tree = [], 0, 0, Prefixes()
    once, each = layout.feature_bytes + layout.teacher_bytes, layout.position_bytes
    for index, one in enumerate(conversations):
        length = len(one.tokens)
        if index > start and size + (length - tree.known(one.tokens)) * once + length * each > shard_bytes:
            plan.append((start, index))
            start, size, tree = index, 0, Prefixes()
        size += (length - tree.known(one.tokens)) * once + length * each
        tree.add(one.tokens)
    return [*plan, (start, len(conversations))]


def shard_size(conversations: Sequence[Conversation], layout: Layout) -> int:
    """Bytes of a shard's tensors."""
    places = Places.of(conversations, layout)
    features, teachers = len(places.owner) * layout.feature_bytes, places.teachers * layout.teacher_bytes
    fixed = 8 * (len(conversations) + 1) + layout.channel_bytes
    return len(places.rows) * layout.position_bytes + features + teachers + fixed


class ShardWriter:
    """Collects samples of one shard in 16 (or 32) bits; `tensors` encodes them."""

    def __init__(self, conversations: Sequence[Conversation], layout: Layout) -> None:
        self.layout, self.places = layout, Places.of(conversations, layout)
        self.offsets = [0, *accumulate(len(one.tokens) for one in conversations)]
        positions, rows, teachers = self.offsets[-1], len(self.places.owner), self.places.teachers
        self.plain = {
            "tokens": torch.empty(positions, dtype=torch.int32),
            "turns": torch.empty(positions, dtype=torch.int16),
            "aux": torch.empty(rows, layout.layers, layout.width, dtype=layout.aux_dtype),
            "last": torch.empty(teachers, layout.width, dtype=layout.last_dtype),
            "top1": torch.empty(rows, dtype=torch.int32),
            "lse": torch.empty(rows, dtype=torch.float32),
        }
        if layout.topk:
            del self.plain["last"]
            self.plain["top_ids"] = torch.empty(teachers, layout.topk, dtype=torch.int32)
            self.plain["top_logp"] = torch.empty(teachers, layout.topk, dtype=torch.float16)

    def put(self, index: int, sample: Sample) -> None:
        """The features of the shard's conversation `index`. Rows that an earlier one has are left to that one."""
        place = slice(self.offsets[index], self.offsets[index + 1])
        rows = self.places.rows[place]
        mine = self.places.owner[rows] == index
        teacher = self.places.teacher[rows]
        taught = mine & (teacher != NO_TEACHER)
        for name, values in self.plain.items():
            own = getattr(sample, name)
            if name in ("tokens", "turns"):
                values[place] = own
            elif name in ("last", "top_ids", "top_logp"):
                values[teacher[taught]] = own[taught].to(values.dtype)
            else:
                values[rows[mine]] = own[mine].to(values.dtype)

    def tensors(self) -> dict[str, Tensor]:
        """What the shard's file holds."""
        found: dict[str, Tensor] = {}
        for name, values in self.plain.items():
            precision = {"aux": self.layout.aux, "last": self.layout.last}.get(name)
            found |= {name: values} if precision is None else _encoded(name, values, precision)
        if self.layout.share_prefixes:
            found["rows"] = self.places.rows.to(torch.int32)
        if self.layout.teacher_at == "answers":
            found["teacher_rows"] = self.places.teacher.to(torch.int32)
        return found | {"offsets": torch.tensor(self.offsets)}


def _encoded(name: str, values: Tensor, precision: Precision) -> dict[str, Tensor]:
    """values [M, ..., D] by the names of their tensors, a few rows at a time."""
    channels = precision.channels(values)
    pieces = [precision.encode(some, channels) for some in values.split(ENCODED_AT_ONCE)]
    found = {name + suffix: torch.cat([piece[suffix] for piece in pieces]) for suffix in pieces[0]}
    return found if channels is None else found | {name + CHANNELS: channels}


@dataclass(frozen=True)
class Held:
    """Tensors in memory, read as an open safetensors file is."""

    tensors: dict[str, Tensor]

    def get_tensor(self, name: str) -> Tensor:
        return self.tensors[name]

    get_slice = get_tensor


def checksums(tensors: dict[str, Tensor], layout: Layout) -> list[int]:
    """The checksum of each conversation of a shard. tensors: what its file will hold."""
    reader = ShardReader(Held(tensors), layout)
    return [reader.checksum(start, stop) for start, stop in pairwise(tensors["offsets"].tolist())]


class ShardReader:
    """Reads single conversations of one open shard; handle: an open safetensors file. sums: the checksum of each of its
    conversations, None where they were not written."""

    def __init__(self, handle: Any, layout: Layout, sums: Sequence[int] | None = None) -> None:
        self.handle, self.layout, self.sums = handle, layout, sums
        named = (("aux", layout.aux), ("last", layout.last))
        self.channels = {
            name: handle.get_tensor(name + CHANNELS)
            for name, precision in named
            if precision is not None and precision.has_channels
        }

    def checksum(self, start: int, stop: int) -> int:
        """crc32 of all that the file holds of the conversation at positions start..stop, and of the channels' sizes."""
        rows = self._rows(start, stop)
        teachers = self._teacher_rows(rows)
        teachers = teachers[teachers != NO_TEACHER]
        width, places = self.layout.width, torch.arange(start, stop)
        names = {"tokens": places, "turns": places, "top1": rows, "lse": rows}
        names |= {"rows": places} if self.layout.share_prefixes else {}
        names |= {"teacher_rows": rows} if self.layout.teacher_at == "answers" else {}
        names |= {"aux" + suffix: rows for suffix in self.layout.aux.tensors(width)}
        last = self.layout.last
        kept = ["top_ids", "top_logp"] if last is None else ["last" + suffix for suffix in last.tensors(width)]
        names |= dict.fromkeys(kept, teachers)
        pieces = [*self.channels.values(), *(self._read(name, at) for name, at in names.items())]
        found = 0
        for piece in pieces:
            found = zlib.crc32(piece.contiguous().flatten().view(torch.uint8).numpy(), found)
        return found

    def text(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """tokens, turns of positions start..stop, int64."""
        tokens, turns = (self.handle.get_slice(name)[start:stop].long() for name in ("tokens", "turns"))
        return tokens, turns

    def sample(self, name: str, start: int, stop: int, layers: list[int] | None) -> Sample:
        """The conversation at positions start..stop. layers: which of the stored ones, None for all."""
        tokens, turns = self.text(start, stop)
        rows = self._rows(start, stop)
        top1, lse = self._read("top1", rows).long(), self._read("lse", rows)
        aux = self._aux(rows, layers)
        if self.layout.last is not None:
            return Sample(name, tokens, turns, aux, self._teacher("last", rows), top1, lse)
        last = torch.empty(len(tokens), 0, dtype=self.layout.last_dtype)
        top_ids, top_logp = self._teacher("top_ids", rows), self._teacher("top_logp", rows)
        return Sample(name, tokens, turns, aux, last, top1, lse, top_ids.long(), top_logp.float())

    def taught(self, start: int, stop: int) -> dict[str, Tensor]:
        """What check 4 looks at, of positions start..stop that have a teacher: top1 int64 [n], lse [n] and last [n, D]
        or top_ids [n, k], top_logp [n, k]."""
        rows = self._rows(start, stop)
        kept = self._teacher_rows(rows) != NO_TEACHER
        found = {"top1": self._read("top1", rows).long()[kept], "lse": self._read("lse", rows)[kept]}
        names = ("last",) if self.layout.last is not None else ("top_ids", "top_logp")
        return found | {name: self._teacher(name, rows)[kept] for name in names}

    def _rows(self, start: int, stop: int) -> Tensor:
        if not self.layout.share_prefixes:
            return torch.arange(start, stop)
        rows: Tensor = self.handle.get_slice("rows")[start:stop]
        return rows.long()

    def _teacher_rows(self, rows: Tensor) -> Tensor:
        return self._read("teacher_rows", rows).long() if self.layout.teacher_at == "answers" else rows

    def _aux(self, rows: Tensor, layers: list[int] | None) -> Tensor:
        if layers == []:
            return torch.empty(len(rows), 0, self.layout.width, dtype=self.layout.aux.dtype)
        return self._decoded("aux", self.layout.aux, rows, layers)

    def _teacher(self, name: str, rows: Tensor) -> Tensor:
        """Teacher tensors of feature rows; zeros where a row has no teacher."""
        wanted = self._teacher_rows(rows)
        kept = wanted != NO_TEACHER
        precision = self.layout.last if name == "last" else None
        found = self._decoded(name, precision, wanted[kept]) if precision else self._read(name, wanted[kept])
        if bool(kept.all()):
            return found
        return found.new_zeros(len(rows), *found.shape[1:]).masked_scatter_(kept[:, None], found)

    def _decoded(self, name: str, precision: Precision, rows: Tensor, layers: list[int] | None = None) -> Tensor:
        suffixes = precision.tensors(self.layout.width)
        parts = {suffix: self._read(name + suffix, rows) for suffix in suffixes}
        channels = self.channels.get(name)
        if layers is not None:
            parts = {suffix: part[:, layers] for suffix, part in parts.items()}
            channels = None if channels is None else channels[layers]
        return precision.decode(parts, channels)

    def _read(self, name: str, rows: Tensor) -> Tensor:
        """Rows of a tensor, each run of neighbours with one read."""
        part = self.handle.get_slice(name)
        if len(rows) == 0:
            return part[0:0]
        breaks = (rows[1:] != rows[:-1] + 1).nonzero()[:, 0] + 1
        runs = rows.tensor_split(breaks)
        pieces = [part[int(run[0]) : int(run[-1]) + 1] for run in runs]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
