"""The feature store: what the target showed of every conversation, on disk, in shards.

    header.json          which target, layers, precisions and conversations; written first
    shard-00000.safetensors  whole conversations, one after the other, trimmed to their true length (data.layout)
    shard-00000.json     its sha256, ids and lengths; written after it, so a shard without it is unfinished

A killed capture goes on at the first unfinished shard. Shards hold conversations in their given order, and each is
computed from its own conversations alone, so the finished files do not depend on where the capture was killed.

Letters in shapes: N rows of a shard or batch, T tokens, L captured layers, D hidden width, V target vocabulary.
"""

import fcntl
import json
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from checkpoints.files import atomic, fingerprint, fingerprint_rows, read_json, sha256_file, write_json, write_tensors
from data.collate import production_order
from data.conversations import Conversation
from data.identity import identity_difference
from data.layout import Layout, Sample, ShardReader, ShardWriter, StoreSettings, checksums, plan_of, shard_size
from data.target import DTYPES, LOGITS_AT_ONCE, TRUTH_SHARE, Target, feature_truth
from drafters.contract import TargetParts, check_layers

# 1: plain dtypes, the last hidden state everywhere. 2: all of data.layout. A store is written as 1 where 1 can say it.
VERSIONS = (1, 2)
SHARD_BYTES = 1 << 28
BATCH_TOKENS = 4096
PROBE_TOKENS = 256
LOAD_SAMPLE = 1024
CONVENTION = "0 = the first decoder layer's output"
OPEN_SHARDS = 1024  # at once in one process; a system maps 65,530 files at most, a store may have more
SUMS = "crc32"  # in a sidecar: the checksum of each conversation
FREED = "freed"  # in the sidecar of a shard that a queue deleted once all had read it


def conversations_fingerprint(conversations: Sequence[Conversation]) -> str:
    """16 hex digits over ids, tokens and turns, in order."""
    return fingerprint_rows([one.id, one.tokens, one.turns] for one in conversations)


@torch.inference_mode()
def observe(
    target: Target,
    conversations: Sequence[Conversation],
    layers: Sequence[int],
    batch_tokens: int = BATCH_TOKENS,
    dtype: str | StoreSettings = "auto",
) -> Iterator[tuple[int, Sample]]:
    """Yield (index, Sample on the CPU) of each conversation, shortest first: the one way features are made.

    A batch holds conversations of similar length, at most batch_tokens positions with padding (or one conversation).
    Logits exist for a few positions at a time. dtype: of the samples; with settings of a store: what that rounds to
    first, and with its topk the target's most likely tokens in place of the last hidden state. ValueError when a
    feature is not finite or overflows the dtype.
    """
    layout = StoreSettings.of(dtype).layout(len(layers), target.identity["hidden_size"], target.dtype)
    for indices in length_batches([len(one.tokens) for one in conversations], batch_tokens):
        chosen = [conversations[i] for i in indices]
        tokens, mask = _padded([one.tokens for one in chosen])
        features = target.forward(tokens, layers, mask)
        for row, (index, one) in enumerate(zip(indices, chosen, strict=True)):
            length = len(one.tokens)
            yield index, sample_of(target, one, features.aux[row, :length], features.last[row, :length], layers, layout)


def sample_of(
    target: Target, one: Conversation, aux: Tensor, last: Tensor, layers: Sequence[int], layout: Layout
) -> Sample:
    """A conversation's Sample, on the CPU, from what its target showed: aux [T, L, D] of these layers, last [T, D]
    after the final norm. ValueError when a feature is not finite or overflows the layout's dtypes."""
    check_ranges(one.id, aux, last, layers, layout)
    top1, lse = readout(target, last)
    made = Sample(
        id=one.id,
        tokens=torch.tensor(one.tokens),
        turns=torch.tensor(one.turns),
        aux=aux.to(layout.aux_dtype).cpu(),
        last=last.to(layout.last_dtype).cpu(),
        top1=top1.cpu(),
        lse=lse.cpu(),
    )
    return with_top(made, target.parts, layout.topk)


def capture(
    target: Target,
    conversations: Sequence[Conversation],
    layers: Sequence[int],
    folder: Path,
    batch_tokens: int = BATCH_TOKENS,
    dtype: str | StoreSettings = "auto",
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int], None] | None = None,
) -> "FeatureStore":
    """Write the features of all conversations, or what is still missing of them, and open the store.

    dtype: of the store, or all that StoreSettings say. progress is called with the number of tokens just finished (or
    found finished). ValueError when the folder holds features of something else, when a finished shard is damaged, when
    the features fail check 4, and when another process is capturing into the folder.
    """
    folder = Path(folder)
    layers = check_layers(tuple(layers), target.identity["num_layers"], least=0)
    if not conversations or any(len(one.tokens) == 0 for one in conversations):
        raise ValueError("features need at least one conversation, and each at least one token")
    asked = StoreSettings.of(dtype)
    layout = asked.layout(len(layers), target.identity["hidden_size"], target.dtype)
    header = new_header(target.identity, target.dtype, conversations, layers, layout)
    header |= {"batch_tokens": batch_tokens, "shard_bytes": shard_bytes}

    def make(start: int, stop: int) -> Iterator[tuple[int, Sample]]:
        return observe(target, conversations[start:stop], layers, batch_tokens, asked)

    write_store(folder, header, conversations, make, progress, lambda: probe(target, conversations, layout))
    return FeatureStore.open(folder, target.identity, None, verify="lazy", parts=target.parts)


def write_store(
    folder: Path,
    header: dict[str, Any],
    conversations: Sequence[Conversation],
    make: Callable[[int, int], Iterable[tuple[int, Sample]]],
    progress: Callable[[int], None] | None = None,
    check: Callable[[], Any] | None = None,
) -> None:
    """Fill a folder that nobody else writes, or go on with one of the same header. make, progress: as in `fill`. check:
    called before the first shard. ValueError as only_writer and same_header."""
    plan = plan_of(conversations, Layout.read(header), header["shard_bytes"])
    header["shards"] = len(plan)
    folder.mkdir(parents=True, exist_ok=True)
    with only_writer(folder):
        same_header(folder, header)
        if check is not None:
            check()
        fill(folder, header, conversations, plan, make, progress)


def fill(
    folder: Path,
    header: dict[str, Any],
    conversations: Sequence[Conversation],
    plan: Sequence[tuple[int, int]],
    make: Callable[[int, int], Iterable[tuple[int, Sample]]],
    progress: Callable[[int], None] | None,
) -> None:
    """Write the header and every shard that is not finished: one is made while the one before is written, which may
    take as long. make(start, stop): the samples of conversations start..stop, with their index from start on."""
    write_json(folder / "header.json", header)
    mark, waiting = fingerprint(header), list[tuple[Future[Any], int]]()

    def settle() -> None:
        """The shard that is being written is there."""
        while waiting:
            written, tokens = waiting.pop()
            written.result()
            if progress is not None:
                progress(tokens)

    with ThreadPoolExecutor(1) as writing:
        for number, (start, stop) in enumerate(plan):
            chosen = conversations[start:stop]
            work: Callable[[], Any] = partial(_check_shard, folder, number, mark, whole=True)
            if not shard_finished(folder, number):
                writer = collected(chosen, make(start, stop), header)
                work = partial(finish_shard, folder, number, chosen, writer, header)
            settle()
            waiting.append((writing.submit(work), sum(len(one.tokens) for one in chosen)))
        settle()


def stored_order(header: dict[str, Any], count: int) -> Sequence[int]:
    """Conversations in the order in which a store's shards hold them; a queue's hold them as they are trained on."""
    return production_order(count, header["queue"]["seed"]) if "queue" in header else range(count)


class FeatureStore:
    """A finished store. store[i] reads conversation i from memory-mapped shards; safe to copy into worker processes.

    ids, domains, lengths: in the conversations' own order, whatever the order in the shards.
    """

    def __init__(self, folder: Path, header: dict[str, Any], sidecars: list[dict[str, Any]], places: list[int]) -> None:
        """Use FeatureStore.open. places: which of the stored layers a Sample's aux holds."""
        self.folder, self.header, self.layout = folder, header, Layout.read(header)
        self.truth: float | None = None  # check 4's share, once it has run
        self.layers: tuple[int, ...] = tuple(header["layers"][place] for place in places)
        rows = [row for one in sidecars for row in zip(one["ids"], one["domains"], one["lengths"], strict=True)]
        order = stored_order(header, len(rows))
        self._place: list[int] = sorted(range(len(rows)), key=order.__getitem__)  # of each conversation in the shards
        self.ids: list[str] = [rows[place][0] for place in self._place]
        self.domains: list[str] = [rows[place][1] for place in self._place]
        self.lengths: list[int] = [rows[place][2] for place in self._place]
        whole = places == list(range(self.layout.layers))
        self._places = None if whole else places
        self._starts = [0, *accumulate(len(one["ids"]) for one in sidecars)]
        self._offsets = [[0, *accumulate(one["lengths"])] for one in sidecars]
        self._checked = bytearray(len(self.ids))  # 1 where a conversation was compared with what was written
        self._hashed: set[int] = set()  # shards, of those without checksums of their conversations
        self._readers: dict[int, ShardReader] = {}  # the last used one last

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
        all). verify: full hashes every shard now, lazy compares each conversation when it is first read, so that no
        process reads more than it uses; sizes are always checked. parts: run check 4 on a sample with this target's
        head. ValueError names the shard that is missing, torn, changed or foreign.
        """
        folder = Path(path)
        if verify not in ("full", "lazy"):
            raise ValueError(f"verify must be full or lazy, got {verify!r}")
        header = read_json(folder / "header.json")
        if header.get("version") not in VERSIONS:
            raise ValueError(f"{folder}: header.json has version {header.get('version')!r}, this code reads {VERSIONS}")
        if identity is not None and (lines := identity_difference(header["identity"], identity)):
            names = f"target {header['identity'].get('name')!r}, asked for {identity.get('name')!r}"
            raise ValueError(f"{folder} holds features of {names}: {'; '.join(lines)}")
        stored = header["layers"]
        wanted = stored if layers is None else list(layers)
        if missing := [layer for layer in wanted if layer not in stored]:
            raise ValueError(f"{folder} holds layers {stored}, not {missing}: capture again with the layers wanted")
        mark = fingerprint(header)
        whole = verify == "full"
        sidecars = [_check_shard(folder, number, mark, whole) for number in range(header["shards"])]
        store = cls(folder, header, sidecars, [stored.index(layer) for layer in wanted])
        if len(store) != header["conversations"] or sum(store.lengths) != header["tokens"]:
            raise ValueError(f"{folder} holds {len(store)} conversations, its header says {header['conversations']}")
        if whole:
            store._checked = bytearray(b"\1") * len(store)
        if parts is not None:
            store.check_truth(parts)
        return store

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Sample:
        """Sample of conversation `index`. Raises IndexError beyond the end."""
        shard, start, stop = self._where(index)
        return shard.sample(self.ids[index], start, stop, self._places)

    def holds(self, conversations: Sequence[Conversation]) -> bool:
        """Whether these are the store's conversations: all of them, in their own order."""
        if len(conversations) != len(self):
            return False
        placed = [conversations[index] for index in stored_order(self.header, len(self))]
        return bool(self.header["data"] == conversations_fingerprint(placed))

    def shard_of(self, index: int) -> int:
        """Number of the shard that holds conversation `index`."""
        return bisect_right(self._starts, self._place[index]) - 1

    def text(self, index: int) -> tuple[Tensor, Tensor]:
        """tokens, turns of conversation `index` without its features, int64 [T]."""
        shard, start, stop = self._where(index)
        return shard.text(start, stop)

    def check_truth(self, parts: TargetParts) -> float:
        """Check 4 on a sample, as it is read back: conversations spread over the store. Returns the share.

        A store of top-k tokens has no hidden state to put through the head: there the most likely token must be top1
        and its probabilities those of a distribution, which shows damage but not another target's head.
        """
        step = max(1, len(self) // (LOAD_SAMPLE // 64))
        return self.check_truth_of(range(0, len(self), step), parts)

    def check_truth_of(self, indices: Iterable[int], parts: TargetParts) -> float:
        """Check 4 on these conversations, until LOAD_SAMPLE positions are read."""
        found, read = [], 0
        for index in indices:
            shard, start, stop = self._where(index)
            found.append(shard.taught(start, stop))
            read += len(found[-1]["top1"])
            if read >= LOAD_SAMPLE:
                break
        taught = {name: torch.cat([one[name] for one in found]) for name in found[0]}
        dtype = DTYPES[self.header["target_dtype"]]
        if self.layout.last is None:
            self.truth = top_truth(taught, str(self.folder), dtype)
        else:
            self.truth = feature_truth(parts, taught["last"], taught["top1"], str(self.folder), dtype)
        return self.truth

    def _where(self, index: int) -> tuple[ShardReader, int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"conversation {index} of {len(self)}")
        number = self.shard_of(index)
        place = self._place[index] - self._starts[number]
        start, stop = self._offsets[number][place], self._offsets[number][place + 1]
        shard = self._shard(number)
        if not self._checked[index]:
            self._compare(index, shard, place)
        return shard, start, stop

    def _compare(self, index: int, shard: ShardReader, place: int) -> None:
        """Let a conversation be read once it is found as it was written; of a shard without checksums of its
        conversations, the whole shard. ValueError names the shard."""
        number = self.shard_of(index)
        if shard.sums is not None:
            start, stop = self._offsets[number][place], self._offsets[number][place + 1]
            try:
                same = shard.checksum(start, stop) == shard.sums[place]
            except SafetensorError:  # a flipped bit in a tensor's name
                same = False
            if not same:
                what = f"the checksum of {self.ids[index]} is not the one written"
                raise ValueError(_damaged(self.folder, number, what))
        elif number not in self._hashed:
            _check_shard(self.folder, number, fingerprint(self.header), whole=True)
            self._hashed.add(number)
        self._checked[index] = 1

    def _shard(self, number: int) -> ShardReader:
        if number in self._readers:
            self._readers[number] = self._readers.pop(number)
            return self._readers[number]
        sidecar = _check_shard(self.folder, number, fingerprint(self.header), whole=False)
        try:
            reader = ShardReader(
                safe_open(shard_path(self.folder, number), framework="pt"), self.layout, sidecar.get(SUMS)
            )
        except SafetensorError as error:
            raise ValueError(_damaged(self.folder, number, str(error))) from error
        while len(self._readers) >= OPEN_SHARDS:
            del self._readers[next(iter(self._readers))]
        self._readers[number] = reader
        return reader

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_readers": {}}


def estimate_bytes(
    conversations: Sequence[Conversation],
    num_layers: int,
    hidden_size: int,
    dtype: str | StoreSettings = "auto",
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Bytes that `capture` will write for num_layers captured layers, within 2%; nothing is computed or written."""
    # A target of 16 bits or of 32: the last hidden state has 16 either way.
    layout, total = StoreSettings.of(dtype).layout(num_layers, hidden_size, torch.float32), 850
    for number, (start, stop) in enumerate(plan_of(conversations, layout, shard_bytes)):
        chosen = conversations[start:stop]
        total += shard_size(chosen, layout) + 40 + 75 * layout.tensors
        sidecar = sidecar_of(chosen, number, "0" * 16, "0" * 64, total, [1 << 31] * len(chosen))
        total += len(json.dumps(sidecar, indent=2, ensure_ascii=False).encode())
    return total


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's own name: bfloat16 of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


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


def with_top(sample: Sample, parts: TargetParts, count: int) -> Sample:
    """The sample with the target's `count` most likely tokens in place of its last hidden state; as it is for 0."""
    if count == 0:
        return sample
    if count > len(parts.head):
        raise ValueError(f"features topk {count} is beyond the target's vocabulary of {len(parts.head)}")
    ids, logp = [], []
    step = max(1, LOGITS_AT_ONCE // len(parts.head))
    for last, lse in zip(sample.last.split(step), sample.lse.split(step), strict=True):
        values, places = parts.logits(last.to(parts.head.device)).float().topk(count)
        ids.append(places.cpu())
        logp.append(values.cpu() - lse[:, None])
    return replace(sample, last=sample.last[:, :0], top_ids=torch.cat(ids), top_logp=torch.cat(logp))


def top_truth(taught: dict[str, Tensor], where: str, target_dtype: torch.dtype = torch.float32) -> float:
    """Share of positions whose most likely kept token is the target's argmax; in a 16-bit dtype, any kept token whose
    logit that dtype cannot tell from the largest. taught: top_ids, top_logp [n, k], top1, lse [n]. ValueError
    below 99%, or when the k probabilities are not descending parts of a whole."""
    ids, logp, top1 = taught["top_ids"], taught["top_logp"].float(), taught["top1"]
    logits = logp + taught["lse"].float()[:, None]
    eps = torch.finfo(target_dtype).eps
    near = logits >= logits[:, :1] - eps * logits[:, :1].abs()
    share = float(((ids == top1[:, None]) & near).any(-1).float().mean()) if len(top1) else 0.0
    descending = bool((logp[:, 1:] <= logp[:, :-1]).all())
    largest = float(logp.exp().sum(-1).max()) if len(top1) else 0.0
    if share < TRUTH_SHARE or not descending or not largest < 1.01:
        raise ValueError(
            f"{where}: the most likely kept token is the target's argmax on {share:.1%} of {len(top1)} positions (>= "
            f"{TRUTH_SHARE:.0%} needed), descending: {descending}, sum of probabilities up to {largest:.3f}"
        )
    return share


def check_ranges(name: str, aux: Tensor, last: Tensor, layers: Sequence[int], layout: Layout) -> None:
    """feature_range of a conversation's layers' outputs [T, L, D] and last hidden states [T, D]."""
    for place, layer in enumerate(layers):
        feature_range(aux[:, place], layout.aux_dtype, f"{name}: output of layer {layer}")
    feature_range(last, layout.last_dtype, f"{name}: last hidden state")


def feature_range(values: Tensor, dtype: torch.dtype, what: str) -> None:
    """ValueError when values are not finite or beyond a dtype's range; `what` names them."""
    largest = float(values.abs().max())
    if not largest <= torch.finfo(dtype).max:
        raise ValueError(
            f"{what} reaches {largest:g}, beyond {dtype_name(dtype)} ({torch.finfo(dtype).max:g}): use "
            f"features.precision (features.last) bfloat16 or float32"
        )


def probe(target: Target, conversations: Sequence[Conversation], layout: Layout) -> float:
    """Check 4 against the whole model's own logits, on the first conversations, as they will be read back. Returns the
    share."""
    rows, room = [], PROBE_TOKENS
    for one in conversations[:8]:
        rows.append(one.tokens[:room])
        room -= len(rows[-1])
        if room <= 0:
            break
    tokens, mask = _padded(rows)
    own = target.own_top1(tokens, mask)
    with torch.inference_mode():
        last = target.forward(tokens, (), mask).last.to(layout.last_dtype)
    real = mask.bool()
    last = last[real.to(last.device)]
    if layout.last is not None:
        last = layout.last.rounded(last.cpu())
    return feature_truth(target.parts, last, own[real.to(own.device)], "capture", target.dtype)


def new_header(
    identity: dict[str, Any],
    target_dtype: torch.dtype,
    conversations: Sequence[Conversation],
    layers: Sequence[int],
    layout: Layout,
) -> dict[str, Any]:
    """header.json without what the capture's own settings add."""
    return {
        "version": 1 if layout.is_first else 2,
        "layers": list(layers),
        "layer_convention": CONVENTION,
        "last": "after the final norm",
        "dtype": dtype_name(layout.aux_dtype),
        "last_dtype": dtype_name(layout.last_dtype),
        **({} if layout.is_first else {"store": layout.header()}),
        "target_dtype": dtype_name(target_dtype),
        "hidden_size": identity["hidden_size"],
        "identity": identity,
        "data": conversations_fingerprint(conversations),
        "conversations": len(conversations),
        "tokens": sum(len(one.tokens) for one in conversations),
    }


def same_header(folder: Path, header: dict[str, Any]) -> None:
    """A folder that was begun must have been begun with the same header (target names and revisions may differ)."""
    path = folder / "header.json"
    if not path.exists():
        if any(folder.glob("shard-*")):
            raise ValueError(f"{folder} holds shards but no header.json: not a store that this capture began")
        return
    found = read_json(path)
    lines = identity_difference(header["identity"], found.get("identity", {}))
    keys = [key for key in (*header, *(key for key in found if key not in header)) if key != "identity"]
    lines += [
        f"{key} {found.get(key)!r} instead of {header.get(key)!r}" for key in keys if found.get(key) != header.get(key)
    ]
    if lines:
        raise ValueError(f"{folder} holds other features: {'; '.join(lines)}")
    header["identity"] = found["identity"]


def write_shard(
    folder: Path,
    number: int,
    conversations: Sequence[Conversation],
    samples: Iterable[tuple[int, Sample]],
    header: dict[str, Any],
    still: Callable[[], bool] | None = None,
) -> None:
    """Write shard `number` and its sidecar. samples: (index, Sample) of each conversation, in any order. still: asked
    when all is done but the names; Overtaken, and nothing written, when it says no."""
    finish_shard(folder, number, conversations, collected(conversations, samples, header), header, still)


def collected(
    conversations: Sequence[Conversation], samples: Iterable[tuple[int, Sample]], header: dict[str, Any]
) -> ShardWriter:
    """A shard in memory. samples: (index, Sample) of each conversation, in any order."""
    writer = ShardWriter(conversations, Layout.read(header))
    for index, sample in samples:
        writer.put(index, sample)
    return writer


def finish_shard(
    folder: Path,
    number: int,
    conversations: Sequence[Conversation],
    writer: ShardWriter,
    header: dict[str, Any],
    still: Callable[[], bool] | None = None,
) -> None:
    """Write what was collected of shard `number`, and its sidecar. still: as in write_shard."""
    layout, tensors = writer.layout, writer.tensors()
    mark, path = fingerprint(header), shard_path(folder, number)
    # One key alone: safetensors writes several in random order, and the bytes must not depend on it.
    # Hashed before it has its name: another writer's file of that name is not this one.
    with atomic(path) as temporary:
        write_tensors(temporary, tensors, {"place": f"{mark}/{number}"})
        whole, size = sha256_file(temporary), temporary.stat().st_size
        sidecar = sidecar_of(conversations, number, mark, whole, size, checksums(tensors, layout))
        if still is not None and not still():
            raise Overtaken(f"{path.name} in {folder} is another's by now")
    write_json(_sidecar_path(folder, number), sidecar)


class Overtaken(Exception):
    """A shard's writer was silent for so long that another has taken its place."""


def sidecar_of(
    conversations: Sequence[Conversation], number: int, mark: str, sha256: str, size: int, sums: Sequence[int] = ()
) -> dict[str, Any]:
    """What stands beside a finished shard. sums: the checksum of each conversation."""
    return {
        "shard": number,
        "header": mark,
        "sha256": sha256,
        "bytes": size,
        "ids": [one.id for one in conversations],
        "domains": [one.domain for one in conversations],
        "lengths": [len(one.tokens) for one in conversations],
        SUMS: list(sums),
    }


def _damaged(folder: Path, number: int, what: str) -> str:
    path = shard_path(folder, number)
    return f"{path.name} in {folder} is damaged: {what}; {_remedy(folder, number)}"


def _remedy(folder: Path, number: int) -> str:
    beside = _sidecar_path(folder, number)
    return f"delete it and {beside.name}, then run prepare again to capture it anew"


def _check_shard(folder: Path, number: int, mark: str, whole: bool) -> dict[str, Any]:
    """The sidecar of a good shard. whole: hash the file too. ValueError names the shard and what is wrong with it."""
    path, beside = shard_path(folder, number), _sidecar_path(folder, number)
    if not beside.exists():
        raise ValueError(f"{path.name} in {folder} is unfinished: the capture was stopped; run prepare again to resume")
    sidecar: dict[str, Any] = read_json(beside)
    remedy = _remedy(folder, number)
    if sidecar["header"] != mark or sidecar["shard"] != number:
        raise ValueError(f"{path.name} in {folder} is foreign: it belongs to another store or place; {remedy}")
    if sidecar.get(FREED):
        raise ValueError(
            f"{path.name} in {folder} was freed once it had been read: a queue with free=true serves one run, for one "
            f"epoch; prepare again, with features.queue.free=false to keep the store"
        )
    if not path.exists() or path.stat().st_size != sidecar["bytes"]:
        size = path.stat().st_size if path.exists() else 0
        raise ValueError(f"{path.name} in {folder} is torn: {size} bytes of {sidecar['bytes']}; {remedy}")
    if whole and sha256_file(path) != sidecar["sha256"]:
        raise ValueError(_damaged(folder, number, "its sha256 is not the one written"))
    return sidecar


def shard_finished(folder: Path, number: int) -> bool:
    """Whether shard `number` was written to its end."""
    return _sidecar_path(folder, number).exists()


def shard_path(folder: Path, number: int) -> Path:
    """Where shard `number` lies."""
    return folder / f"shard-{number:05d}.safetensors"


def _sidecar_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.json"


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
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
