"""A feature store that trainers read while producers still write it, over one shared folder.

    header.json, shard-*            as in a finished store; the conversations stand in the order of a first epoch
    claim-00003.json                who is writing shard 3; made exclusively, so no two write one. claim-00003-1.json:
                                    who took it over from a silent one, and so on
    producer-NAME.json, reader-NAME.json  who is there: each touches its file while it lives; a reader's says how many
                                    shards it no longer needs

Producers take the first shard that nobody has, and wait when they are `ahead` shards beyond the slowest reader. With
`free`, a shard that all readers have passed is deleted: the folder then never holds more than about `ahead` shards,
and serves one run, from its start, for one epoch. A producer that dies is noticed by its silence: another takes its
shard, and a trainer that finds none alive ends with its name. One that was only slow finds itself overtaken before it
gives its shard a name, and leaves it. Ages are read off the folder's own clock, not the
machines'.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from checkpoints.files import fingerprint, read_json, write_json, write_text
from data.collate import Plan, production_order
from data.conversations import Conversation
from data.features import (
    FREED,
    FeatureStore,
    Overtaken,
    conversations_fingerprint,
    same_header,
    shard_finished,
    shard_path,
    sidecar_of,
    write_shard,
)
from data.identity import identity_difference
from data.layout import Layout, Sample, plan_of
from drafters.contract import TargetParts


@dataclass(frozen=True)
class QueueSettings:
    """active: several producers fill one folder, and trainers may read it meanwhile (batch.features=queue). seed:
    of the order, batch.seed of the trainer. ahead: shards beyond the slowest reader (null: no limit). free: delete
    shards that all readers have passed. readers: to wait for before a shard is deleted; every process that reads
    counts: a rank, or with batch.workers above 0 each of its loader processes. silent_s: seconds without a sign of life
    after which one counts as dead; the header tells it to the trainers."""

    active: bool = False
    seed: int = 0
    ahead: int | None = None
    free: bool = False
    readers: int = 1
    silent_s: float = 60.0

    def __post_init__(self) -> None:
        if self.ahead is not None and self.ahead < 1:
            raise ValueError(f"features.queue.ahead must be at least 1, or null, got {self.ahead}")
        if self.free and self.ahead is None:
            raise ValueError("features.queue.free needs features.queue.ahead: how many shards may wait")
        if self.silent_s <= 0 or self.readers < 1:
            raise ValueError(f"features.queue: silent_s above 0 and readers >= 1, got {self.silent_s}, {self.readers}")


def who() -> str:
    """This process, for files and messages."""
    return f"{socket.gethostname()}-{os.getpid()}"


def now(folder: Path) -> float:
    """The time by the folder's own clock."""
    probe = folder / f".clock-{who()}-{threading.get_ident()}"
    probe.touch()
    return probe.stat().st_mtime


def age(path: Path, folder: Path) -> float | None:
    """Seconds since a file was touched, by the folder's clock; None when it is gone."""
    try:
        return now(folder) - path.stat().st_mtime
    except FileNotFoundError:
        return None


def touch(path: Path) -> bool:
    """Set a file's time; whether it is still there."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


@contextmanager
def alive(paths: list[Path], every: float) -> Iterator[None]:
    """Touch the files in the list (which may change) until the block ends."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(every):
            for path in list(paths):
                touch(path)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def living(folder: Path, kind: str, silent_s: float) -> tuple[dict[str, Any], dict[str, float]]:
    """Of producer or reader files: name -> content of those alive, and name -> age of those silent."""
    there, silent = {}, {}
    for path in sorted(folder.glob(f"{kind}-*.json")):
        name, old = path.stem.removeprefix(f"{kind}-"), age(path, folder)
        if old is None:
            continue
        if old <= silent_s:
            try:
                there[name] = read_json(path)
            except ValueError as error:
                if not isinstance(error.__cause__, FileNotFoundError):  # it ended after our look
                    raise
        else:
            silent[name] = old
    return there, silent


def begin(folder: Path, header: dict[str, Any], name: str) -> None:
    """Write the header, or find that the same was written. ValueError when the folder holds something else."""
    folder.mkdir(parents=True, exist_ok=True)
    path, mine = folder / "header.json", folder / f".header-{name}"
    write_json(mine, header)
    try:
        os.link(mine, path)
    except FileExistsError:
        same_header(folder, header)
    finally:
        mine.unlink()


@dataclass
class Producer:
    """One process that fills the folder. make(start, stop): the samples of the queue's conversations start..stop, with
    their index from start on."""

    folder: Path
    header: dict[str, Any]
    conversations: Sequence[Conversation]
    plan: Sequence[tuple[int, int]]
    make: Callable[[int, int], Iterable[tuple[int, Sample]]]
    settings: QueueSettings
    tell: Callable[[str], None] = print
    progress: Callable[[int], None] | None = None
    name: str = field(default_factory=who)
    _touched: list[Path] = field(default_factory=list)
    _first: int = 0  # all shards before it are finished
    _freed: int = 0  # all shards before it are deleted
    _turn: int = 0  # of our claim: how many producers had the shard before

    def run(self) -> int:
        """Write shards until all are there; returns how many this one wrote."""
        begin(self.folder, self.header, self.name)
        presence, wrote = self.folder / f"producer-{self.name}.json", 0
        write_json(presence, {"process": self.name})
        self._touched.append(presence)
        try:
            with alive(self._touched, self.settings.silent_s / 4):
                while (number := self._next()) is not None:
                    start, stop = self.plan[number]
                    chosen = self.conversations[start:stop]
                    holds = partial(self._holds, number)
                    with suppress(Overtaken):
                        write_shard(self.folder, number, chosen, self.make(start, stop), self.header, holds)
                        wrote += 1
                        if self.progress is not None:
                            self.progress(sum(len(one.tokens) for one in chosen))
                    self._release(number)
        finally:
            presence.unlink(missing_ok=True)
        return wrote

    def _claim(self, number: int, turn: int) -> Path:
        return self.folder / (f"claim-{number:05d}-{turn}.json" if turn else f"claim-{number:05d}.json")

    def _next(self) -> int | None:
        """The next shard that is ours alone, waiting for readers or for other producers' last shards; None at the
        end."""
        said = False
        while True:
            if self.settings.free:
                self._free()
            while self._first < len(self.plan) and shard_finished(self.folder, self._first):
                self._first += 1
            if self._first == len(self.plan):
                return None
            limit = self._limit()
            for number in range(self._first, min(limit, len(self.plan))):
                if not shard_finished(self.folder, number) and self._take(number):
                    return number
            if self._first >= limit and not said:
                self.tell(f"{self.folder}: {limit} shards are ready; producing goes on when readers pass some")
                said = True
            time.sleep(min(0.5, self.settings.silent_s / 8))

    def _take(self, number: int) -> bool:
        """Claim a shard, by its first claim or by the one behind a silent producer's. A name is made exclusively, and
        none is removed before the shard is there: however many try, each claim is one producer's."""
        turn = 0
        while self._claim(number, turn + 1).exists():
            turn += 1
        old = age(self._claim(number, turn), self.folder)
        if old is not None and old <= self.settings.silent_s:
            return False
        turn += old is not None
        path = self._claim(number, turn)
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(handle, "w") as file:
            json.dump({"process": self.name}, file)
        if shard_finished(self.folder, number):  # between our look and our claim
            path.unlink(missing_ok=True)
            return False
        if old is not None:
            with suppress(FileNotFoundError):  # it may end after all, at this moment
                dead = json.loads(self._claim(number, turn - 1).read_text() or "{}").get("process", "an unknown one")
                silent = f"{self.folder}: producer {dead} was silent for {old:.0f} s"
                self.tell(f"{silent}; its shard {number} is taken over")
        self._turn = turn
        self._touched.append(path)
        return True

    def _holds(self, number: int) -> bool:
        """Whether the shard is still ours to write: we may have been silent, too."""
        return not shard_finished(self.folder, number) and not self._claim(number, self._turn + 1).exists()

    def _release(self, number: int) -> None:
        """Let go of a shard. Its claims go when it is there; before, they keep others from making them anew."""
        self._touched.remove(self._claim(number, self._turn))
        if shard_finished(self.folder, number):
            for path in self.folder.glob(f"claim-{number:05d}*.json"):
                path.unlink(missing_ok=True)

    def _limit(self) -> int:
        """Shards that may be written: `ahead` beyond the slowest reader, and what a reader waits for."""
        if self.settings.ahead is None:
            return len(self.plan)
        there, _ = living(self.folder, "reader", self.settings.silent_s)
        wanted = max((one["wants"] + 1 for one in there.values()), default=0)
        return max(self._passed() + self.settings.ahead, wanted)

    def _passed(self) -> int:
        """Shards that every reader has passed; 0 without readers."""
        there, _ = living(self.folder, "reader", self.settings.silent_s)
        return min((one["passed"] for one in there.values()), default=0)

    def _free(self) -> None:
        there, _ = living(self.folder, "reader", self.settings.silent_s)
        if len(there) < self.settings.readers:
            return
        for number in range(self._freed, self._passed()):
            if not shard_finished(self.folder, number):
                return
            path = shard_path(self.folder, number)
            if path.exists():
                sidecar = path.with_suffix(".json")
                write_json(sidecar, read_json(sidecar) | {FREED: True})
                path.unlink(missing_ok=True)  # other producers free, too
            self._freed = number + 1


def queue_header(
    header: dict[str, Any], conversations: Sequence[Conversation], settings: QueueSettings
) -> list[tuple[int, int]]:
    """Complete a header for the queue's conversations, in their order; returns the plan of its shards."""
    plan = plan_of(conversations, Layout.read(header), header["shard_bytes"])
    header["shards"] = len(plan)
    # A float always: 60 and 60.0 are equal but have different fingerprints.
    header["queue"] = {"seed": settings.seed, "free": settings.free, "silent_s": float(settings.silent_s)}
    return plan


class QueueSource:
    """Samples of a queue's folder for a trainer (data.module.SampleSource): waits for what is not there yet.

    conversations: in the trainer's order. layers: those wanted. parts: run check 4 with this target's head on the first
    samples. ValueError when the folder is no queue's, is of another target, of other conversations or the same in
    another order, or has not the layers.
    """

    def __init__(
        self,
        folder: Path,
        conversations: Sequence[Conversation],
        identity: dict[str, Any],
        layers: Sequence[int],
        parts: TargetParts | None = None,
    ) -> None:
        self.folder = Path(folder).resolve()
        header = read_json(self.folder / "header.json")
        if "queue" not in header:
            raise ValueError(f"{folder} is no queue's store: train with batch.features=store")
        self.silent_s: float = header["queue"].get("silent_s", QueueSettings.silent_s)  # the producers' own
        self.free = bool(header["queue"]["free"])
        if lines := identity_difference(header["identity"], identity):
            raise ValueError(f"{folder} holds features of another target: {'; '.join(lines)}")
        if missing := [layer for layer in layers if layer not in header["layers"]]:
            raise ValueError(f"{folder} holds layers {header['layers']}, not {missing}")
        self.lengths = [len(one.tokens) for one in conversations]
        self.ids = [one.id for one in conversations]
        order = production_order(len(conversations), header["queue"]["seed"])
        queued = [conversations[i] for i in order]
        plan = plan_of(queued, Layout.read(header), header["shard_bytes"])
        mark = fingerprint(header)
        sidecars = [sidecar_of(queued[a:b], number, mark, "", 0) for number, (a, b) in enumerate(plan)]
        if len(plan) != header["shards"] or conversations_fingerprint(queued) != header["data"]:
            raise ValueError(f"{folder} holds features of other conversations: prepare and train on the same")
        self.store = FeatureStore(self.folder, header, sidecars, [header["layers"].index(one) for one in layers])
        self._needed: dict[int, int] = {}
        self._process, self._said, self._parts = 0, (-1, -1), parts

    def follow(self, plan: Plan, total: int) -> None:
        """Prepare for `total` micro-steps of a plan: know which shards each conversation's step and later ones of the
        first epoch need, for freeing, and run check 4 on the first batch, once it is there. ValueError when shards are
        freed and the run needs more than one epoch.

        Call it before loader processes start: they must not run the target's head, and this process, which reads
        nothing more where they do, must not stay a reader that passes nothing.
        """
        if self.free and total > plan.steps(1):
            raise ValueError(
                f"features.queue.free keeps one epoch, {plan.steps(1)} micro-steps, the run takes {total}: set "
                f"trainer.max_steps so that max_steps x accumulate is not more"
            )
        rows = [index for step in range(plan.steps(1)) for row in plan.batch(step) for index in row]
        least = self.store.header["shards"]
        for index in reversed(rows):
            least = min(least, self.store.shard_of(index))
            self._needed[index] = least
        self.samples([index for row in plan.batch(0) for index in row])
        self._parts = None
        self.close()

    def samples(self, indices: Sequence[int]) -> list[Sample]:
        """The samples, once their shards are there. RuntimeError when no producer that could write them lives."""
        self._present()
        shards = [self.store.shard_of(index) for index in indices]
        passed = min((self._needed.get(index, 0) for index in indices), default=0)
        for number in sorted(set(shards)):
            self._say(passed, number)
            self._wait(number)
        found = [self.store[index] for index in indices]
        if self._parts is not None and self.store.truth is None:
            self.store.check_truth_of(indices, self._parts)
        if self.free:  # a deleted file's space comes back only when nobody maps it
            for number in [one for one in self.store._readers if one < passed]:
                del self.store._readers[number]
        return found

    def _present(self) -> None:
        """Be seen as a reader; loader processes are readers of their own."""
        if self._process == os.getpid():
            return
        self._process, self._said = os.getpid(), (-1, -1)
        self._say(0, 0)
        path, every = self.folder / f"reader-{who()}.json", self.silent_s / 4

        def beat() -> None:
            while touch(path):
                time.sleep(every)

        threading.Thread(target=beat, daemon=True).start()

    def _say(self, passed: int, wants: int) -> None:
        """Tell producers how many shards are no longer needed and which one is."""
        said = (max(passed, self._said[0]), wants)
        if said != self._said:
            self._said = said
            content = json.dumps(dict(zip(("passed", "wants"), said, strict=True)))
            write_text(self.folder / f"reader-{who()}.json", content)

    def _wait(self, number: int) -> None:
        alone_since: float | None = None
        while not shard_finished(self.folder, number):
            there, silent = living(self.folder, "producer", self.silent_s)
            alone_since = None if there else alone_since or time.monotonic()
            # Producers may start after us, so their absence counts only after a while.
            if alone_since is not None and time.monotonic() - alone_since > self.silent_s:
                dead = ", ".join(f"{name} (silent for {old:.0f} s)" for name, old in silent.items()) or "none ever came"
                raise RuntimeError(f"{self.folder}: shard {number} is missing and no producer lives: {dead}")
            time.sleep(min(0.2, self.silent_s / 10))
        if not shard_path(self.folder, number).exists():
            raise ValueError(
                f"{self.folder}: shard {number} was freed: a queue with free=true serves one run, from its start, for "
                f"one epoch; it cannot be resumed"
            )

    def close(self) -> None:
        """No longer be a reader, until samples are read again."""
        self._process = 0
        (self.folder / f"reader-{who()}.json").unlink(missing_ok=True)
