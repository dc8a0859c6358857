"""The feature store: what the target showed of every conversation, on disk, in shards.

    header.json          which target, layers, dtype and conversations; written first
    shard-00000.safetensors  rows of whole conversations, one after the other, trimmed to their true length
    shard-00000.json     its sha256, ids and lengths; written after it, so a shard without it is unfinished

A killed capture goes on at the first unfinished shard. Shards hold conversations in their given order, and each is
computed from its own conversations alone, so the finished files do not depend on where the capture was killed.

Letters in shapes: N rows of a shard or batch, T tokens, L captured layers, D hidden width, V target vocabulary.
"""

import fcntl
import json
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor

from checkpoints.files import fingerprint, read_json, sha256_file, write_json, write_tensors
from data.conversations import Conversation
from data.identity import identity_difference
from data.target import DTYPES, LOGITS_AT_ONCE, Target, feature_truth
from drafters.contract import TargetParts, check_layers

VERSION = 1
SHARD_BYTES = 1 << 28
BATCH_TOKENS = 4096
PROBE_TOKENS = 256
LOAD_SAMPLE = 1024
CONVENTION = "0 = the first decoder layer's output"


@dataclass
class Sample:
    """One conversation with its features.

    tokens, turns int64 [T]; aux [T, L, D]; last [T, D] after the final norm; top1 int64 [T] and lse float32 [T]: argmax
    and log-sum-exp of the target's logits at each position.
    """

    id: str
    tokens: Tensor
    turns: Tensor
    aux: Tensor
    last: Tensor
    top1: Tensor
    lse: Tensor


def feature_dtype(name: str) -> torch.dtype:
    """What layers' outputs are stored in: bfloat16 with auto (they have outliers), else as named."""
    if name not in ("auto", *DTYPES):
        raise ValueError(f"feature dtype must be auto, {', '.join(DTYPES)}, got {name!r}")
    return torch.bfloat16 if name == "auto" else DTYPES[name]


def last_dtype(name: str, target_dtype: torch.dtype) -> torch.dtype:
    """What the last hidden state is stored in. With auto: the target's own dtype where that has 16 bits, else float16.

    The teacher's logits come from it, so it needs precision, and after a norm it has no outliers: float16 rounds a
    float32 one eight times finer than bfloat16, which moves the argmax on 0.14% of positions with SmolLM2-135M and on
    over 1% with a random model.
    """
    if name != "auto":
        return feature_dtype(name)
    return target_dtype if target_dtype.itemsize == 2 else torch.float16


def conversations_fingerprint(conversations: Sequence[Conversation]) -> str:
    """16 hex digits over ids, tokens and turns, in order."""
    return fingerprint([[one.id, one.tokens, one.turns] for one in conversations])


@torch.inference_mode()
def observe(
    target: Target,
    conversations: Sequence[Conversation],
    layers: Sequence[int],
    batch_tokens: int = BATCH_TOKENS,
    dtype: str = "auto",
) -> Iterator[tuple[int, Sample]]:
    """Yield (index, Sample on the CPU) of each conversation, shortest first: the one way features are made.

    A batch holds conversations of similar length, at most batch_tokens positions with padding (or one conversation).
    Logits exist for a few positions at a time. ValueError when a feature is not finite or overflows the dtype.
    """
    kept, kept_last = feature_dtype(dtype), last_dtype(dtype, target.dtype)
    for indices in length_batches([len(one.tokens) for one in conversations], batch_tokens):
        chosen = [conversations[i] for i in indices]
        tokens, mask = _padded([one.tokens for one in chosen])
        features = target.forward(tokens, layers, mask)
        for row, (index, one) in enumerate(zip(indices, chosen, strict=True)):
            length = len(one.tokens)
            last, aux = features.last[row, :length], features.aux[row, :length]
            top1, lse = readout(target, last)
            for place, layer in enumerate(layers):
                _check_range(aux[:, place], kept, f"{one.id}: output of layer {layer}")
            _check_range(last, kept_last, f"{one.id}: last hidden state")
            yield (
                index,
                Sample(
                    id=one.id,
                    tokens=tokens[row, :length].clone(),
                    turns=torch.tensor(one.turns, dtype=torch.int64),
                    aux=aux.to(kept).cpu(),
                    last=last.to(kept_last).cpu(),
                    top1=top1.cpu(),
                    lse=lse.cpu(),
                ),
            )


def capture(
    target: Target,
    conversations: Sequence[Conversation],
    layers: Sequence[int],
    folder: Path,
    batch_tokens: int = BATCH_TOKENS,
    dtype: str = "auto",
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int], None] | None = None,
) -> "FeatureStore":
    """Write the features of all conversations, or what is still missing of them, and open the store.

    progress is called with the number of tokens just finished (or found finished). ValueError when the folder holds
    features of something else, when a finished shard is damaged, when the features fail check 4, and when another
    process is capturing into the folder.
    """
    folder = Path(folder)
    layers = check_layers(tuple(layers), target.identity["num_layers"], least=0)
    if not conversations or any(len(one.tokens) == 0 for one in conversations):
        raise ValueError("features need at least one conversation, and each at least one token")
    header = _header(target, conversations, layers, dtype) | {"batch_tokens": batch_tokens, "shard_bytes": shard_bytes}
    plan = _plan(conversations, header)
    header["shards"] = len(plan)
    folder.mkdir(parents=True, exist_ok=True)
    with _only_writer(folder):
        _same_header(folder, header)
        _probe(target, conversations, dtype)
        write_json(folder / "header.json", header)
        mark = fingerprint(header)
        for number, (start, stop) in enumerate(plan):
            chosen = conversations[start:stop]
            if _sidecar_path(folder, number).exists():
                _check_shard(folder, number, mark, whole=True)
            else:
                _write_shard(target, chosen, header, dtype, _shard_path(folder, number))
            if progress is not None:
                progress(sum(len(one.tokens) for one in chosen))
    return FeatureStore.open(folder, target.identity, None, verify="lazy", parts=target.parts)


class FeatureStore:
    """A finished store. store[i] reads conversation i from memory-mapped shards; safe to copy into worker processes."""

    def __init__(self, folder: Path, header: dict[str, Any], sidecars: list[dict[str, Any]], places: list[int]) -> None:
        """Use FeatureStore.open. places: which of the stored layers a Sample's aux holds."""
        self.folder, self.header = folder, header
        self.layers: tuple[int, ...] = tuple(header["layers"][place] for place in places)
        self.ids: list[str] = [name for one in sidecars for name in one["ids"]]
        self.domains: list[str] = [name for one in sidecars for name in one["domains"]]
        self.lengths: list[int] = [length for one in sidecars for length in one["lengths"]]
        self._places = places
        self._starts = [0, *accumulate(len(one["ids"]) for one in sidecars)]
        self._offsets = [[0, *accumulate(one["lengths"])] for one in sidecars]
        self._unverified = set(range(len(sidecars)))
        self._handles: dict[int, Any] = {}

    @classmethod
    def open(
        cls,
        path: Path,
        identity: dict[str, Any] | None = None,
        layers: Sequence[int] | None = None,
        verify: str = "full",
        parts: TargetParts | None = None,
    ) -> Self:
        """Open a finished store.

        identity: the target it must come from (None: any). layers: the stored layers that samples shall hold (None:
        all). verify: full hashes every shard now, lazy each when first read; sizes are always checked. parts: run check
        4 on a sample with this target's head. ValueError names the shard that is missing, torn, changed or foreign.
        """
        folder = Path(path)
        if verify not in ("full", "lazy"):
            raise ValueError(f"verify must be full or lazy, got {verify!r}")
        header = read_json(folder / "header.json")
        if header.get("version") != VERSION:
            raise ValueError(f"{folder}: header.json has version {header.get('version')!r}, this code reads {VERSION}")
        if identity is not None and (lines := identity_difference(header["identity"], identity)):
            names = f"target {header['identity'].get('name')!r}, asked for {identity.get('name')!r}"
            raise ValueError(f"{folder} holds features of {names}: {'; '.join(lines)}")
        stored = header["layers"]
        wanted = stored if layers is None else list(layers)
        if missing := [layer for layer in wanted if layer not in stored]:
            raise ValueError(f"{folder} holds layers {stored}, not {missing}: capture again with the layers wanted")
        mark = fingerprint(header)
        sidecars = [_check_shard(folder, number, mark, whole=False) for number in range(header["shards"])]
        store = cls(folder, header, sidecars, [stored.index(layer) for layer in wanted])
        if len(store) != header["conversations"] or sum(store.lengths) != header["tokens"]:
            raise ValueError(f"{folder} holds {len(store)} conversations, its header says {header['conversations']}")
        if verify == "full":
            for number in range(header["shards"]):
                store._shard(number)
        if parts is not None:
            store.check_truth(parts)
        return store

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Sample:
        """Sample of conversation `index`. Raises IndexError beyond the end."""
        shard, start, stop = self._where(index)
        tokens, turns, top1 = (shard.get_slice(name)[start:stop].long() for name in ("tokens", "turns", "top1"))
        aux = self._aux(shard, start, stop)
        last, lse = (shard.get_slice(name)[start:stop] for name in ("last", "lse"))
        return Sample(self.ids[index], tokens, turns, aux, last, top1, lse)

    def _aux(self, shard: Any, start: int, stop: int) -> Tensor:
        """The wanted layers' outputs of rows start..stop; none are read when none are wanted."""
        if not self._places:
            return torch.empty(stop - start, 0, self.header["hidden_size"], dtype=DTYPES[self.header["dtype"]])
        aux: Tensor = shard.get_slice("aux")[start:stop]
        return aux if self._places == list(range(len(self.header["layers"]))) else aux[:, self._places]

    def text(self, index: int) -> tuple[Tensor, Tensor]:
        """tokens, turns of conversation `index` without its features, int64 [T]."""
        shard, start, stop = self._where(index)
        tokens, turns = (shard.get_slice(name)[start:stop].long() for name in ("tokens", "turns"))
        return tokens, turns

    def check_truth(self, parts: TargetParts, positions: int = LOAD_SAMPLE) -> float:
        """Check 4 on a sample: conversations spread over the store, until `positions` are read. Returns the share."""
        last, top1, read = [], [], 0
        step = max(1, len(self) // max(1, positions // 64))
        for index in range(0, len(self), step):
            shard, start, stop = self._where(index)
            last.append(shard.get_slice("last")[start:stop])
            top1.append(shard.get_slice("top1")[start:stop].long())
            read += stop - start
            if read >= positions:
                break
        dtype = DTYPES[self.header["target_dtype"]]
        return feature_truth(parts, torch.cat(last), torch.cat(top1), str(self.folder), dtype)

    def _where(self, index: int) -> tuple[Any, int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"conversation {index} of {len(self)}")
        number = bisect_right(self._starts, index) - 1
        place = index - self._starts[number]
        return self._shard(number), self._offsets[number][place], self._offsets[number][place + 1]

    def _shard(self, number: int) -> Any:
        if number in self._unverified:
            _check_shard(self.folder, number, fingerprint(self.header), whole=True)
            self._unverified.discard(number)
        if number not in self._handles:
            self._handles[number] = safe_open(_shard_path(self.folder, number), framework="pt")
        return self._handles[number]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_handles": {}}


def estimate_bytes(
    conversations: Sequence[Conversation],
    num_layers: int,
    hidden_size: int,
    dtype: str = "auto",
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Bytes that `capture` will write for num_layers captured layers, within 2%; nothing is computed or written."""
    row = row_bytes(num_layers, hidden_size, dtype)
    total = 1200
    for number, (start, stop) in enumerate(shard_plan([len(one.tokens) for one in conversations], row, shard_bytes)):
        chosen = conversations[start:stop]
        total += row * sum(len(one.tokens) for one in chosen) + 8 * (len(chosen) + 1) + 700
        sidecar = _sidecar(chosen, number, "0" * 16, "0" * 64, total)
        total += len(json.dumps(sidecar, indent=2, ensure_ascii=False).encode())
    return total


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's own name: bfloat16 of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def row_bytes(num_layers: int, hidden_size: int, dtype: str = "auto") -> int:
    """Bytes of one position: tokens 4, turns 2, top1 4, lse 4, and num_layers + 1 hidden states."""
    return 14 + (num_layers + 1) * hidden_size * feature_dtype(dtype).itemsize


def shard_plan(lengths: Sequence[int], row: int, shard_bytes: int) -> list[tuple[int, int]]:
    """(start, stop) of each shard: whole conversations in order, at most shard_bytes (or one conversation)."""
    plan, start, size = [], 0, 0
    for index, length in enumerate(lengths):
        if index > start and size + length * row > shard_bytes:
            plan.append((start, index))
            start, size = index, 0
        size += length * row
    return [*plan, (start, len(lengths))]


def length_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Indices in batches of similar length, shortest first: rows x longest <= batch_tokens, or one row.

    ValueError when batch_tokens < 1.
    """
    if batch_tokens < 1:
        raise ValueError(f"batch_tokens must be >= 1, got {batch_tokens}")
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if not batches or (len(batches[-1]) + 1) * lengths[index] > batch_tokens:
            batches.append([])
        batches[-1].append(index)
    return batches


def _padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """tokens and attention mask, int64 [B, T], padded on the right with token 0."""
    longest = max(map(len, rows))
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return tokens, mask


def readout(target: Target, last: Tensor) -> tuple[Tensor, Tensor]:
    """top1 int64 [N] and lse float32 [N] of last hidden states [N, D], a few positions at a time."""
    step = max(1, LOGITS_AT_ONCE // target.identity["vocab_size"])
    logits = (target.logits(rows) for rows in last.split(step))
    pairs = [(chunk.argmax(-1), chunk.float().logsumexp(-1)) for chunk in logits]
    return torch.cat([top1 for top1, _ in pairs]), torch.cat([lse for _, lse in pairs])


def _check_range(values: Tensor, dtype: torch.dtype, what: str) -> None:
    largest = float(values.abs().max())
    if not largest <= torch.finfo(dtype).max:
        raise ValueError(
            f"{what} reaches {largest:g}, beyond {dtype_name(dtype)} ({torch.finfo(dtype).max:g}): use "
            f"features dtype bfloat16 or float32"
        )


def _probe(target: Target, conversations: Sequence[Conversation], dtype: str) -> None:
    """Check 4 against the whole model's own logits, on the first conversations, in the dtype that will be stored."""
    rows, room = [], PROBE_TOKENS
    for one in conversations[:8]:
        rows.append(one.tokens[:room])
        room -= len(rows[-1])
        if room <= 0:
            break
    tokens, mask = _padded(rows)
    own = target.own_top1(tokens, mask)
    with torch.inference_mode():
        last = target.forward(tokens, (), mask).last.to(last_dtype(dtype, target.dtype))
    real = mask.bool()
    feature_truth(target.parts, last[real.to(last.device)], own[real.to(own.device)], "capture", target.dtype)


def _header(
    target: Target, conversations: Sequence[Conversation], layers: tuple[int, ...], dtype: str
) -> dict[str, Any]:
    return {
        "version": VERSION,
        "layers": list(layers),
        "layer_convention": CONVENTION,
        "last": "after the final norm",
        "dtype": dtype_name(feature_dtype(dtype)),
        "last_dtype": dtype_name(last_dtype(dtype, target.dtype)),
        "target_dtype": dtype_name(target.dtype),
        "hidden_size": target.identity["hidden_size"],
        "identity": target.identity,
        "data": conversations_fingerprint(conversations),
        "conversations": len(conversations),
        "tokens": sum(len(one.tokens) for one in conversations),
    }


def _plan(conversations: Sequence[Conversation], header: dict[str, Any]) -> list[tuple[int, int]]:
    row = row_bytes(len(header["layers"]), header["hidden_size"], header["dtype"])
    return shard_plan([len(one.tokens) for one in conversations], row, header["shard_bytes"])


def _same_header(folder: Path, header: dict[str, Any]) -> None:
    """A folder that was begun must have been begun with the same header (target names and revisions may differ)."""
    path = folder / "header.json"
    if not path.exists():
        if any(folder.glob("shard-*")):
            raise ValueError(f"{folder} holds shards but no header.json: not a store that this capture began")
        return
    found = read_json(path)
    lines = identity_difference(header["identity"], found.get("identity", {}))
    lines += [
        f"{key} {found.get(key)!r} instead of {value!r}"
        for key, value in header.items()
        if key != "identity" and found.get(key) != value
    ]
    if lines:
        raise ValueError(f"{folder} holds other features: {'; '.join(lines)}")
    header["identity"] = found["identity"]


def _write_shard(
    target: Target, conversations: Sequence[Conversation], header: dict[str, Any], dtype: str, path: Path
) -> None:
    lengths = [len(one.tokens) for one in conversations]
    offsets = [0, *accumulate(lengths)]
    rows, width = offsets[-1], header["hidden_size"]
    tensors = {
        "tokens": torch.empty(rows, dtype=torch.int32),
        "turns": torch.empty(rows, dtype=torch.int16),
        "aux": torch.empty(rows, len(header["layers"]), width, dtype=DTYPES[header["dtype"]]),
        "last": torch.empty(rows, width, dtype=DTYPES[header["last_dtype"]]),
        "top1": torch.empty(rows, dtype=torch.int32),
        "lse": torch.empty(rows, dtype=torch.float32),
        "offsets": torch.tensor(offsets),
    }
    for index, sample in observe(target, conversations, header["layers"], header["batch_tokens"], dtype):
        for name, values in tensors.items():
            if name != "offsets":
                values[offsets[index] : offsets[index + 1]] = getattr(sample, name)
    mark, number = fingerprint(header), int(path.stem.removeprefix("shard-"))
    # One key alone: safetensors writes several in random order, and the bytes must not depend on it.
    write_tensors(path, tensors, {"place": f"{mark}/{number}"})
    write_json(path.with_suffix(".json"), _sidecar(conversations, number, mark, sha256_file(path), path.stat().st_size))


def _sidecar(conversations: Sequence[Conversation], number: int, mark: str, sha256: str, size: int) -> dict[str, Any]:
    return {
        "shard": number,
        "header": mark,
        "sha256": sha256,
        "bytes": size,
        "ids": [one.id for one in conversations],
        "domains": [one.domain for one in conversations],
        "lengths": [len(one.tokens) for one in conversations],
    }


def _check_shard(folder: Path, number: int, mark: str, whole: bool) -> dict[str, Any]:
    """The sidecar of a good shard. whole: hash the file too. ValueError names the shard and what is wrong with it."""
    path, beside = _shard_path(folder, number), _sidecar_path(folder, number)
    if not beside.exists():
        raise ValueError(f"{path.name} in {folder} is unfinished: the capture was stopped; run prepare again to resume")
    sidecar: dict[str, Any] = read_json(beside)
    remedy = f"delete it and {beside.name}, then run prepare again to capture it anew"
    if sidecar["header"] != mark or sidecar["shard"] != number:
        raise ValueError(f"{path.name} in {folder} is foreign: it belongs to another store or place; {remedy}")
    if not path.exists() or path.stat().st_size != sidecar["bytes"]:
        size = path.stat().st_size if path.exists() else 0
        raise ValueError(f"{path.name} in {folder} is torn: {size} bytes of {sidecar['bytes']}; {remedy}")
    if whole and sha256_file(path) != sidecar["sha256"]:
        raise ValueError(f"{path.name} in {folder} is damaged: its sha256 is not the one written; {remedy}")
    return sidecar


def _shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.safetensors"


def _sidecar_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.json"


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """Hold the folder against other captures, and clear what a killed one left half written."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"another process is capturing into {folder}") from error
        for left in folder.glob(".tmp-*"):
            left.unlink()
        yield
    finally:
        os.close(handle)
