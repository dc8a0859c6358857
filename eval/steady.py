"""Decoding whose rounds never wait for the host: the loop of eval.decoder with its state on the device.

    commit     the drafter observes what the round before kept
    draft      proposes after every request's anchor; a schedule says how many of those slots are verified
    verify     the target reads anchor and drafts, keeps what verification keeps, and moves anchors and positions on

Shapes are fixed: a request that has ended stands still at its last position until the group is made smaller (when half
of it has ended). Results leave for the host at the end of a round and are read while the next one runs, so the host
learns of an end one round late and the last round of a group is thrown away. Where CUDA is, the three parts are CUDA
graphs, and with `halves` two half batches take turns on two streams: one drafts while the other is verified. On a CPU
the same parts run in the same order, without either.

Letters in shapes: R requests of the group now, S at its start, N = K + 1.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from data.target import Features, Target
from drafters.contract import Proposal
from drafters.sampling import round_seeds
from eval.captured import Parts, Pinned, T
from eval.decoder import Clock, Decoding, Generation, Group
from eval.drafted import draft, stored_bytes
from eval.placed import PlacedCache
from eval.scheduled import Scheduled, cut_short
from eval.scheduler import Load, Outcome, Scheduler
from eval.sentinel import no_waits
from eval.streams import Mark, Streams, on_device

LOOPS = ("waiting", "steady", "halves")
COLUMNS = 64  # a CPU looks at as many columns as are in use, rounded up to this


@dataclass
class Loop:
    """How groups are decoded. kind: waiting (the host waits for every round), steady, or halves (steady, in two half
    batches). schedule: makes a scheduler for each half; kept from group to group. checked: refuse whatever would wait
    for the device inside a round (eval.sentinel). captured: seconds that making CUDA graphs took so far, which are no
    round's. ValueError on another kind, or a schedule with the waiting loop."""

    kind: str = "steady"
    schedule: Callable[[], Scheduler] | None = None
    checked: bool = False

    def __post_init__(self) -> None:
        if self.kind not in LOOPS:
            raise ValueError(f"loop must be one of {', '.join(LOOPS)}, got {self.kind!r}")
        if self.schedule is not None and self.kind == "waiting":
            raise ValueError("a schedule needs loop=steady or loop=halves")
        self.made: dict[int, Scheduler] = {}
        self.captured = 0.0

    def fresh(self) -> "Loop":
        """The same loop, whose schedulers have learnt nothing."""
        return Loop(self.kind, self.schedule, self.checked)

    def scheduler(self, half: int) -> Scheduler | None:
        """The scheduler of a half batch; None without a schedule."""
        if self.schedule is not None and half not in self.made:
            self.made[half] = self.schedule()
        return self.made.get(half)

    @property
    def group(self) -> Callable[..., Any]:
        """What eval.decoder.generate makes groups by."""
        if self.kind == "waiting":
            return Group
        return partial(SteadyGroup if self.kind == "steady" else HalvesGroup, self)


def check_one_device(target: Target, kind: str) -> None:
    """ValueError for a loop whose events, streams and graphs are one device's, and a target that lies on several."""
    places = sorted({str(parameter.device) for parameter in target.model.parameters()})
    if target.device.type == "cuda" and len(places) > 1:
        raise ValueError(f"loop={kind} needs the target on one device, it lies on {', '.join(places)}: loop=waiting")


@dataclass
class Track:
    """Where each request stands, on the device. anchors [R]; positions [R] of the anchors; room [R]: tokens still to be
    written; alive [R] bool; seeds [R]; limits [R]: slots to verify."""

    anchors: Tensor
    positions: Tensor
    room: Tensor
    alive: Tensor
    seeds: Tensor
    limits: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]

    def select(self, rows: Tensor) -> "Track":
        return Track(*(tensor[rows] for tensor in self.tensors))

    def advance(self, tokens: Tensor, accepted: Tensor, ends: Tensor) -> Tensor:
        """Move on by a verdict: tokens [R, N], accepted [R]. ends [E]: end-of-turn ids. Returns how many positions each
        request has read [R]: none where it has ended, now or before."""
        emitted = torch.arange(tokens.shape[1], device=tokens.device) <= accepted[:, None]
        stopped = ((tokens[..., None] == ends).any(-1) & emitted).any(1)
        alive = self.alive & ~stopped & (accepted + 1 < self.room)
        read = torch.where(alive, accepted + 1, 0)
        newest = tokens.gather(1, accepted[:, None])[:, 0]
        self.anchors.copy_(torch.where(alive, newest, self.anchors))
        self.positions.add_(read)
        self.room.sub_(read)
        self.alive.copy_(alive)
        return read


@dataclass
class Verified:
    """What a round's verification leaves on the device. found [R, N + 3]: whether the request still ran, slots
    verified, drafts accepted, tokens. next_ids [R, N], features, read [R]: what the drafter is to observe."""

    found: Tensor
    next_ids: Tensor
    features: Features
    read: Tensor


@dataclass
class Flight:
    """A round whose results are on their way: rows of the results, host tensors by name, how many slots were drafted
    under which load, when it ended, and how long capturing had taken by then."""

    held: list[int]
    sent: dict[str, Tensor]
    depth: int
    load: Load
    end: Mark
    captured: float


class SteadyGroup(Group):
    """Requests that are decoded together, as in eval.decoder, by rounds that do not wait."""

    def __init__(self, loop: Loop, shared: Decoding, half: int = 0, streams: Streams | None = None) -> None:
        check_one_device(shared.target, loop.kind)
        super().__init__(shared)
        self.loop, self.streams = loop, streams or Streams(self.target.device)
        self.captured_before = loop.captured
        scheduler = loop.scheduler(half) if self.drafter is not None else None
        self.schedule = None if scheduler is None else Scheduled(scheduler, self.num_slots)
        if self.schedule is not None:
            self.schedule.check(self.verification, self.settings)
        self.on_gpu = self.target.device.type == "cuda"
        self.started = False
        self.paired = False  # one of two halves, whose times are settled together

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Rounds on a GPU are timed by events, read at the end: the clock's own stages would wait."""
        if self.clock is None or not self.started or not self.on_gpu:
            with super().timed(name):
                yield
            return
        start = Mark(self.target.device)
        yield
        self.spans.append((name, start, Mark(self.target.device)))

    @property
    def capturing(self) -> float:
        """Seconds that graphs were captured since the group was made, its other half's too: nobody's time."""
        return self.loop.captured - self.captured_before

    def _part(self, stage: str, key: tuple[Any, ...], run: Callable[[], T]) -> T:
        """Run a part of the round inside a stage's time; capturing it before counts in none."""
        self.loop.captured += self.parts.ready(key, run)
        with self._checked(), self.timed(stage):
            return self.parts.call(key, run)

    def run(self, prompts: list[list[int]], seeds: list[int], results: list[Generation]) -> None:
        with on_device(self.target.device):
            super().run(prompts, seeds, results)

    def rounds(self) -> None:
        while self.step():
            pass

    def step(self) -> bool:
        """One round, and the results of the one before; False when all requests have ended."""
        if not self.alive:
            return False
        if not self.started:
            self._begin()
        self.issue_draft()
        self.issue_verify()
        self.collect()
        return bool(self.alive)

    # The state on the device
    # ------------------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        device, settings = self.target.device, self.settings
        lengths = [self.cache.host_lengths[i] for i in range(len(self.alive))]
        self.held, self.starts = list(self.alive), dict(zip(self.alive, lengths, strict=True))
        width = max(lengths) + settings.max_new_tokens + self.num_slots + 1
        self.placed = PlacedCache(self.target.model, self.cache, width)
        self.track = Track(
            anchors=self.anchors.clone(),
            positions=self.cache.lengths.to(device).clone(),
            room=torch.full((len(lengths),), settings.max_new_tokens - 1, device=device),
            alive=torch.ones(len(lengths), dtype=torch.bool, device=device),
            seeds=self.seeds.to(device).clone(),
            limits=torch.zeros(len(lengths), dtype=torch.int64, device=device),
        )
        del self.cache
        self.end_ids = torch.tensor(sorted(self.ends), device=device)
        self.pinned = None if self.drafter is None else Pinned(self.state)
        self.waits: list[Flight] = []
        self.kept: tuple[Verified, int] | None = None
        self.spans: list[tuple[str, Mark, Mark]] = []
        self.started, self.before, self.reach = True, Mark(device), max(lengths)
        self.heard = self.loop.captured
        self.began_rounds = time.perf_counter()
        self._regroup(None)

    def _regroup(self, keep: list[int] | None) -> None:
        """Go on with these rows of the group alone (None: all of them)."""
        with self.streams.alone():
            if keep is not None:
                if self.drafter is not None and self.kept is not None:
                    self._commit(self.kept[0])
                    self.kept = None
                index = torch.tensor(keep, device=self.target.device)
                self.held = [self.held[i] for i in keep]
                self.placed.select(index)
                self.track = self.track.select(index)
            whole = len(self.held) == len(self.all_seeds)
            self.rows = None if whole else torch.tensor(self.held, device=self.like.device)
            changed = [*self.track.tensors, *(self.pinned.tensors if self.pinned else ())]
            self.parts = Parts(self.on_gpu, changed)

    # A round
    # ------------------------------------------------------------------------------------------------------------------

    def issue_draft(self) -> None:
        """Commit the round before, propose, and let the schedule choose."""
        with self.streams.draft():
            # On this stream: a schedule's depth may read confidences that it left behind here.
            schedule = self.schedule
            self.depth = self.num_slots if schedule is None else schedule.depth(self.held, self.alive, self.known)
            if self.kept is not None and self.drafter is not None:
                verified, depth = self.kept
                self._part("draft", ("commit", depth), partial(self._commit, verified))
            run = partial(self._draft, self.depth)
            drafts = self.drafter is not None and self.depth > 0  # else no kernel runs, and there is nothing to capture
            self.proposal = self._part("draft", ("draft", self.depth), run) if drafts else run()
            if schedule is not None:
                with self._checked(), self.timed("draft"):
                    self.track.limits.copy_(schedule.limits(self.proposal, self.track.alive))

    def issue_verify(self) -> None:
        """Verify, and send the results on their way."""
        room = self.reach + self.depth + 1
        shown = self.placed.width if self.on_gpu else min(self.placed.width, -(-room // COLUMNS) * COLUMNS)
        with self.streams.verify():
            run = partial(self._verify_round, self.depth, shown)
            verified = self._part("verify", ("verify", self.depth, shown), run)
            sent = {"found": verified.found}
            if self.schedule is None:
                named = (("confidences", self.proposal.confidences), ("peaks", self.proposal.peaks))
                sent |= {name: values for name, values in named if values is not None}
            # To pinned memory, behind the round's own work: nothing waits here.
            with self._checked():
                host = {name: values.to("cpu", non_blocking=True) for name, values in sent.items()}
            load = Load(0, 0.0) if self.schedule is None else self.schedule.load
            end = Mark(self.target.device)
            self.waits.append(Flight(self.held, host, self.depth, load, end, self.loop.captured))
        # Kept until the next verification of this group: the other stream may still be reading it.
        self.kept = (verified, self.depth)
        self.reach = room

    def _commit(self, verified: Verified) -> None:
        self._observe(verified.next_ids, verified.features, verified.read)
        assert self.pinned is not None
        self.pinned.settle()

    def _observe(self, next_ids: Tensor, features: Features, lengths: Tensor) -> None:
        if not self.started:
            return super()._observe(next_ids, features, lengths)
        drafter, device = self.drafter, self.like.device
        assert drafter is not None
        values = [next_ids.to(device), features.aux.to(self.like), features.last.to(self.like), lengths.to(device)]
        if (rows := self.rows) is not None:
            count = len(self.all_seeds)
            values = [v.new_zeros(count, *v.shape[1:]).index_copy_(0, rows, v) for v in values]
        drafter.observe(self.state, *values)

    def _draft(self, depth: int) -> Proposal:
        """A proposal for the group: tokens [R, depth]."""
        if self.drafter is None or depth == 0:
            return Proposal(self.track.anchors.new_empty(len(self.held), 0))
        settings, schedule = self.settings, self.schedule
        noted = settings.peaks or (schedule is not None and schedule.reads_confidences)
        made = draft(self.drafter, self.state, depth, settings.sampling, self._draft_seeds(), noted)
        assert self.pinned is not None
        self.pinned.settle()
        parts = [made.tokens, made.probs, made.confidences, made.peaks]
        if (rows := self.rows) is not None:
            parts = [None if part is None else part[rows.to(part.device)] for part in parts]
        tokens, *others = parts
        assert tokens is not None
        return Proposal(tokens.to(self.target.device), *others)

    def _draft_seeds(self) -> Tensor:
        """Seeds [S] of this round's drafts. Where a round's outcome has read numbers behind its end, the next round
        must not draft from those again (eval.scheduled): the anchor's position goes into the seed."""
        seeds = self.all_seeds.to(self.like.device)
        if self.verification != "block" and (self.schedule is None or self.verification != "rejection"):
            return seeds
        anchors = self.track.positions.to(seeds.device)
        if self.rows is not None:
            anchors = torch.zeros_like(seeds).index_copy_(0, self.rows, anchors)
        return round_seeds(seeds, anchors)

    def _verify_round(self, depth: int, shown: int) -> Verified:
        track, proposal, device = self.track, self.proposal, self.target.device
        block = torch.cat([track.anchors[:, None], proposal.tokens], 1)
        positions = track.positions[:, None] + torch.arange(depth + 1, device=device)
        self.placed.place(positions, shown)
        masks = self.placed.masks(positions, shown, self.target.dtype)
        features = self.target.forward(block, self.layers, masks, positions, self.placed.cache)
        self.seeds = track.seeds
        verdict = self._verify(features.last, proposal, track.positions)
        if self.schedule is not None and depth:
            limits = track.limits.to(verdict.tokens.device)
            own = self._own(features.last, limits)
            verdict = cut_short(verdict, limits, own)
        accepted, tokens = verdict.accepted.to(device), verdict.tokens.to(device)
        limits = track.limits if self.schedule is not None else torch.full_like(accepted, depth)
        was = track.alive.long()
        read = track.advance(tokens, accepted, self.end_ids)
        found = torch.cat([was[:, None], limits[:, None], accepted[:, None], tokens], 1)
        return Verified(found, tokens.clamp_min(0), features, read)

    def _own(self, last: Tensor, limits: Tensor) -> Tensor:
        """The target's own token after `limits` drafts [R], from the noise of its position."""
        at = limits.to(last.device)[:, None, None].expand(-1, 1, last.shape[-1])
        none = Proposal(limits.new_empty(len(limits), 0))
        positions = self.track.positions + limits.to(self.track.positions.device)
        return self._verify(last.gather(1, at), none, positions).tokens[:, 0]

    def _checked(self) -> Any:
        return no_waits() if self.loop.checked else nullcontext()

    # The host, a round late
    # ------------------------------------------------------------------------------------------------------------------

    @property
    def known(self) -> dict[int, int]:
        """Positions in the target's cache of each request, as far as the host has heard."""
        return {row: self.starts[row] + len(self.results[row].tokens) - 1 for row in self.held}

    def collect(self, late: int = 1) -> None:
        """Read the results of all rounds but the newest `late`; make the group smaller when half of it has ended."""
        while len(self.waits) > late:
            flight = self.waits.pop(0)
            flight.end.wait()
            with self.timed("rest"):
                self._read(flight)
            self._report()
        if not self.alive:
            self._finish()
            return
        self.reach = max(self.known.values()) + sum(flight.depth + 1 for flight in self.waits)
        if 2 * len(self.alive) <= len(self.held):
            running = set(self.alive)
            with self.timed("rest"):
                self._regroup([i for i, row in enumerate(self.held) if row in running])

    def _read(self, flight: Flight) -> None:
        arrived = time.perf_counter() - self.began - self.capturing
        lengths, kept = [], []
        rows = flight.sent["found"].tolist()
        others = {name: values.tolist() for name, values in flight.sent.items() if name != "found"}
        for i, (row, (was, limit, accepted, *tokens)) in enumerate(zip(flight.held, rows, strict=True)):
            if not was:
                continue
            result = self.results[row]
            self._record(result, tokens[: accepted + 1], accepted, limit)
            result.arrivals.append(arrived)
            if self.schedule is not None:
                result.lengths.append(limit)
            for name, values in others.items():
                getattr(result, name).append(values[i])
            lengths.append(limit)
            kept.append(accepted)
        if self.schedule is not None and lengths:
            seconds = flight.end.since(self.before) - (flight.captured - self.heard)
            self.schedule.scheduler.learn(Outcome(flight.depth, lengths, kept, max(seconds, 1e-9)), flight.load)
        self.before, self.heard = flight.end, flight.captured
        self.alive = [row for row in self.alive if not self._ended(self.results[row])]

    def _finish(self) -> None:
        """Drop what is still under way, and settle the clock."""
        self.streams.join()
        if self.clock is None:
            return
        self.clock.hold("target_cache", self.placed.nbytes)
        if self.spans and not self.paired:
            if self.on_gpu:
                torch.cuda.synchronize(self.target.device)
            settle(self.clock, self.spans, time.perf_counter() - self.began_rounds - self.capturing)


def settle(clock: Clock, spans: Sequence[tuple[str, Mark, Mark]], whole: float) -> None:
    """Add spans (stage, start, end) of the `whole` seconds that passed to a clock: what overlaps counts once, by
    shares, and what no span covers is rest."""
    found = dict.fromkeys(("draft", "verify", "rest"), 0.0)
    for name, start, end in spans:
        found[name] += end.since(start)
    scale = min(1.0, whole / max(sum(found.values()), 1e-9))
    for name, seconds in found.items():
        clock.seconds[name] += scale * seconds
    clock.seconds["rest"] += max(0.0, whole - sum(found.values()))


class HalvesGroup:
    """Two half batches that take turns: one drafts while the other is verified. Each is a SteadyGroup of its own, so
    outputs are those of the steady loop."""

    def __init__(self, loop: Loop, shared: Decoding) -> None:
        check_one_device(shared.target, loop.kind)
        streams = Streams(shared.target.device, apart=True)
        self.halves = [SteadyGroup(loop, shared, half, streams.half()) for half in range(2)]
        for half in self.halves:
            half.paired = True

    def run(self, prompts: list[list[int]], seeds: list[int], results: list[Generation]) -> None:
        """Decode prompts into results, every second prompt in each half."""
        running, began = [], time.perf_counter()
        with on_device(self.halves[0].target.device):
            for half, group in enumerate(self.halves):
                if prompts[half::2]:
                    # The second half waits while the first one's prompts are read: both began to at once.
                    group.open(prompts[half::2], seeds[half::2], results[half::2], began)
                    running.append(group)
            while any([group.step() for group in running]):
                pass
            for group in running:
                group.close()
        self._settle(running)

    def _settle(self, running: list[SteadyGroup]) -> None:
        """Fill the clock with what both halves took and held."""
        clock, device = self.halves[0].clock, self.halves[0].target.device
        timed = [group for group in running if group.started and group.spans]
        if clock is not None and timed:  # the halves' spans overlap each other: settled as one
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            whole = time.perf_counter() - min(group.began_rounds for group in timed) - timed[0].capturing
            settle(clock, [span for group in timed for span in group.spans], whole)
        if clock is not None and all(group.started for group in running):
            clock.hold("target_cache", sum(group.placed.nbytes for group in running))
            if self.halves[0].drafter is not None:
                clock.hold("drafter_state", sum(stored_bytes(group.state) for group in running))
