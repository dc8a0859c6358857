"""Serving, simulated: requests arrive, share a machine, and a scheduler decides every round (`headstart simulate`).

Continuous batching in discrete events: a round takes what the cost model says; requests join between rounds when there
is room (their prompts are read first), and leave when their answer is whole. Acceptance and confidences come from
recorded evaluation (eval.traces). Loads are Poisson arrival rates (requests/s) or numbers of requests kept in flight.

Per-user speed is an answer's tokens after the first over the seconds from its first token to its last, the median of
requests; throughput is all tokens of the measured span over its seconds. Requests that arrive in the first fifth warm
the machine up and are not measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from checkpoints.engine_entry import sglang_chain
from eval.hardware import Cost, best_slots
from eval.scheduler import Load, Outcome, Scheduler
from eval.traces import Traces


@dataclass(frozen=True)
class Traffic:
    """kind: "rate", Poisson arrivals, or "concurrency", a new request for each that ends. requests: how many in all.

    prompt, answer: mean tokens; each request's own are drawn from half to one and a half of that. max_rows: requests
    that the machine holds at once; others wait. seed: of arrivals and lengths.
    """

    kind: str = "rate"
    requests: int = 64
    prompt: int = 512
    answer: int = 256
    max_rows: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("rate", "concurrency"):
            raise ValueError(f"traffic.kind must be rate or concurrency, got {self.kind!r}")
        for name in ("requests", "prompt", "answer", "max_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"traffic.{name} must be at least 1, got {getattr(self, name)}")

    def check(self, load: float) -> None:
        """ValueError for a load that this kind cannot have: a rate above 0, or a whole number of requests in flight."""
        if load <= 0:
            raise ValueError(f"load must be positive, got {load}")
        if self.kind == "concurrency" and (load < 1 or load != int(load)):
            raise ValueError(
                f"load counts requests in flight with traffic.kind=concurrency: a whole number from 1 on, got {load}"
            )


@dataclass
class _Request:
    """A request's life. at: rounds of its trace used; times: of its tokens."""

    arrives: float
    prompt: int
    answer: int
    kept: Tensor
    confidences: Tensor
    at: int = 0
    times: list[tuple[float, int]] = field(default_factory=list)
    written: int = 0

    def write(self, now: float, tokens: int) -> int:
        """Note tokens at a time, no more than the answer lacks; returns how many."""
        taken = min(tokens, self.answer - self.written)
        self.written += taken
        self.times.append((now, taken))
        return taken

    @property
    def done(self) -> bool:
        return self.written >= self.answer


@dataclass(frozen=True)
class Served:
    """One simulated run.

    throughput: tokens/s of all requests. user_speed: tokens/s of the median request. latency: P50, P90 and P99 of
    seconds between a request's tokens (tokens of one round share its seconds). first_token: the same of seconds from
    arrival to first token. mean_rows, mean_depth, mean_length: requests running, slots drafted and slots verified, by
    round. efficiency: tokens emitted / tokens read by the target in rounds. seconds: simulated.
    """

    load: float
    scheduler: str
    throughput: float
    user_speed: float
    latency: dict[str, float]
    first_token: dict[str, float]
    mean_rows: float
    mean_depth: float
    mean_length: float
    efficiency: float
    seconds: float


@dataclass
class _Tally:
    """Sums over rounds."""

    rounds: int = 0
    rows: int = 0
    depth: int = 0
    verified: int = 0
    read: int = 0
    emitted: int = 0

    def add(self, rows: int, depth: int, verified: int, emitted: int) -> None:
        self.rounds += 1
        self.rows += rows
        self.depth += depth
        self.verified += verified
        self.read += rows + verified
        self.emitted += emitted


class Simulation:
    """A machine, a scheduler, traffic. Run once."""

    def __init__(self, cost: Cost, scheduler: Scheduler, traces: Traces, traffic: Traffic, load: float) -> None:
        """load: requests/s, or requests in flight. ValueError for one that the traffic's kind cannot have."""
        traffic.check(load)
        self.cost, self.scheduler, self.traffic, self.load = cost, scheduler, traffic, load
        self.drawn = torch.Generator().manual_seed(traffic.seed)
        self.waiting = self._requests(traces)
        self.running: list[_Request] = []
        self.ended: list[_Request] = []
        self.now, self.tally = 0.0, _Tally()

    def _requests(self, traces: Traces) -> list[_Request]:
        traffic = self.traffic
        gaps = -torch.rand(traffic.requests, generator=self.drawn).clamp_min(1e-9).log() / self.load
        arrivals = gaps.cumsum(0).tolist() if traffic.kind == "rate" else [0.0] * traffic.requests
        around = 0.5 + torch.rand(traffic.requests, 2, generator=self.drawn)
        found = []
        for i, arrives in enumerate(arrivals):
            kept, confidences = traces.rounds_of(i)
            start = int(torch.randint(0, len(kept), (1,), generator=self.drawn))
            prompt, answer = (
                max(2, round(float(x))) for x in around[i] * torch.tensor([traffic.prompt, traffic.answer])
            )
            found.append(_Request(arrives, prompt, answer, kept, confidences, start))
        return found

    def run(self, name: str = "") -> Served:
        """Serve every request; figures of the measured ones."""
        while self.waiting or self.running:
            self._admit()
            if self.running:
                self._round()
            else:
                self.now = max(self.now, self.waiting[0].arrives)
        return self._served(name)

    def _admit(self) -> None:
        """Let in who has come, while there is room; their prompts are read in one pass that gives the first tokens."""
        room = self.traffic.max_rows - len(self.running)
        if self.traffic.kind == "concurrency":
            room = min(room, int(self.load) - len(self.running))
        fresh: list[_Request] = []
        while self.waiting and len(fresh) < room and self.waiting[0].arrives <= self.now:
            fresh.append(self.waiting.pop(0))
            if self.traffic.kind == "concurrency":
                fresh[-1].arrives = self.now
        if not fresh:
            return
        tokens = sum(one.prompt for one in fresh)
        self.now += self.cost.target_seconds(len(fresh), tokens, tokens / len(fresh) / 2)
        for one in fresh:
            one.write(self.now, 1)
        self.running += fresh
        self._leave()

    def _round(self) -> None:
        """One proposal and verification for everyone, or a plain step."""
        rows = len(self.running)
        context = sum(one.prompt + one.written for one in self.running) / rows
        load = Load(rows, context)
        depth = min(self.scheduler.depth(load), self.running[0].confidences.shape[1])
        lengths = [0] * rows
        if depth:
            places = [one.at % len(one.kept) for one in self.running]
            given = torch.stack(
                [one.confidences[place, :depth] for one, place in zip(self.running, places, strict=True)]
            )
            lengths = self.scheduler.decide(given, load).tolist()
        accepted = []
        for one, length in zip(self.running, lengths, strict=True):
            accepted.append(min(int(one.kept[one.at % len(one.kept)]), length) if length else 0)
            one.at += 1
        seconds = self.cost.draft_seconds(rows, depth, context) + self.cost.rest_seconds(rows, depth)
        seconds += self.cost.target_seconds(rows, rows + sum(lengths), context)
        self.now += seconds
        emitted = sum(one.write(self.now, count + 1) for one, count in zip(self.running, accepted, strict=True))
        self.tally.add(rows, depth, sum(lengths), emitted)
        self.scheduler.learn(Outcome(depth, lengths, accepted, seconds), load)
        self._leave()

    def _leave(self) -> None:
        self.ended += [one for one in self.running if one.done]
        self.running = [one for one in self.running if not one.done]

    def _served(self, name: str) -> Served:
        order = sorted(self.ended, key=lambda one: one.arrives)
        measured = order[len(order) // 5 :]
        start = measured[0].arrives
        # The tail in which requests only leave would count an emptying machine; it ends with the last arrival unless
        # everything was there from the start.
        stop = max(order[-1].arrives, order[-1].times[0][0]) if order[-1].arrives > start else self.now
        tokens = sum(count for one in self.ended for when, count in one.times if start < when <= stop)
        gaps, speeds, firsts = [], [], []
        for one in measured:
            first, last = one.times[0][0], one.times[-1][0]
            firsts.append(first - one.arrives)
            if one.written > 1 and last > first:
                speeds.append((one.written - 1) / (last - first))
            for (before, _), (when, count) in zip(one.times, one.times[1:], strict=False):
                gaps += [(when - before) / max(count, 1)] * count
        tally = self.tally
        rounds = max(tally.rounds, 1)
        return Served(
            load=self.load,
            scheduler=name,
            throughput=tokens / max(stop - start, 1e-12),
            user_speed=percentile(speeds, 0.5),
            latency=percentiles(gaps),
            first_token=percentiles(firsts),
            mean_rows=tally.rows / rounds,
            mean_depth=tally.depth / rounds,
            mean_length=tally.verified / max(tally.rows, 1),
            efficiency=tally.emitted / max(tally.read, 1),
            seconds=self.now,
        )


def percentile(values: Sequence[float], share: float) -> float:
    """The value at a share of the sorted ones, straight between neighbours; 0 without values."""
    if not values:
        return 0.0
    return float(torch.tensor(list(values), dtype=torch.float64).quantile(share))


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """P50, P90 and P99."""
    return {name: percentile(values, share) for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))}


def pareto(points: Sequence[Served]) -> list[Served]:
    """Those that no other beats in both per-user speed and throughput, by rising per-user speed."""
    kept: list[Served] = []
    for one in sorted(points, key=lambda p: (-p.user_speed, -p.throughput)):
        if not kept or one.throughput > kept[-1].throughput:
            kept.append(one)
    return kept[::-1]


def best_by_concurrency(cost: Cost, alpha: Sequence[float], rows: Sequence[int], context: float) -> dict[int, int]:
    """The K with the most tokens/s for each number of running requests."""
    return {count: best_slots(cost, alpha, count, context) for count in rows}


def ranges(best: dict[int, int], last: int) -> list[tuple[int, int, int]]:
    """(first, last, K) of equal neighbours, from 1 to `last` running requests; between two counts the smaller one's K
    holds. ValueError unless the counts begin at 1."""
    counts = sorted(best)
    if not counts or counts[0] != 1 or last < counts[-1]:
        raise ValueError(f"counts must begin at 1 and end by {last}, got {counts}")
    found: list[tuple[int, int, int]] = []
    for count, following in zip(counts, [*counts[1:], last + 1], strict=True):
        if found and found[-1][2] == best[count]:
            found[-1] = (found[-1][0], following - 1, best[count])
        else:
            found.append((count, following - 1, best[count]))
    return found


def engine_hints(best: dict[int, int], last: int) -> dict[str, object]:
    """Config fragments. vllm: keys of --speculative-config (0 switches drafting off). sglang: the file of
    --speculative-adaptive-config, by smallest batch size (chains only), and the steps to start with."""
    spans, most = ranges(best, last), max(best.values())
    if most == 0:
        return {"vllm": None, "sglang": None, "why": "drafting does not pay at any of these loads"}
    sglang = {str(first): {"candidate_steps": [k]} for first, _, k in spans}
    return {
        "vllm": {"num_speculative_tokens": most, "num_speculative_tokens_per_batch_size": [list(one) for one in spans]},
        "sglang": {
            "arguments": sglang_chain(most),
            "adaptive_config": sglang,
        },
    }
