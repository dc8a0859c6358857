"""How long a step takes where the target will run: a roofline for verification and drafting, dense or mixture.

    bytes   = dense weights + head + distinct experts + rows * context * cache bytes
    flops   = 2 * active parameters * tokens + attention
    seconds = norm4(bytes / (bandwidth * eta_m), flops / (peak * eta_c)) + layers * layer_us + step_us + communication

A pass reads `rows` requests that hold `context` positions each, with `tokens` new tokens in all: rows for plain
decoding, rows * (K + 1) for verification. Efficiencies and fixed times belong to an engine on a device (conf/hardware),
never to one measurement. Eagerly launched kernels (launch_us > 0) wait for the host: the pass takes the longer of both.

Experts: n unrelated tokens touch N(n) = E (1 - (1 - k/E)^n) of E (arXiv 2505.19645, Eq. 6); consecutive tokens of one
request repeat themselves, so m of them count as m ** kappa. Expert parallelism over G ranks adds, for each layer of
experts, dispatch and combine of alpha_0 + bytes / bandwidth, and the busiest rank waits for nobody:
1 + sqrt(2 ln G * G / (n k)) times the mean.

    speedup = tau * plain round / (draft + verify + rest)        break-even tau = (draft + verify + rest) / plain round

Times are in seconds unless a name says otherwise (_us, _ms).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from omegaconf import OmegaConf

from checkpoints.run import settings
from eval.hardware_shapes import PRECISION_BYTES, DrafterShape, Experts, Stack

DISPATCH_BYTES, COMBINE_BYTES = 1.0, 2.0  # fp8 out, bf16 back
HALF = {"mxfp4": "bf16"}  # weights that are multiplied in another precision
MICRO = 1e-6


@dataclass(frozen=True)
class Device:
    """One accelerator, dense peaks. memory_gb: GB. bandwidth_gbs: GB/s of memory. tflops: by precision, 1e12/s.

    link_gbs: GB/s each way between devices of a node; network_gbs: between nodes; node: devices in a node.
    """

    name: str
    memory_gb: float
    bandwidth_gbs: float
    tflops: dict[str, float]
    link_gbs: float = 0.0
    network_gbs: float = 0.0
    node: int = 8

    def __post_init__(self) -> None:
        if self.bandwidth_gbs <= 0 or not self.tflops or min(self.tflops.values()) <= 0:
            raise ValueError(f"device {self.name}: bandwidth_gbs and tflops must be positive")

    def peak(self, precision: str) -> float:
        """flop/s; a precision that the device does not list runs at the fastest that is no narrower."""
        precision = HALF.get(precision, precision)
        wide = [v for name, v in self.tflops.items() if PRECISION_BYTES[name] >= PRECISION_BYTES[precision]]
        if not wide:
            raise ValueError(f"device {self.name} has no arithmetic for {precision}: {', '.join(self.tflops)}")
        return 1e12 * self.tflops.get(precision, max(wide))


@dataclass(frozen=True)
class Engine:
    """What an engine makes of a device. All times in microseconds.

    memory_efficiency, compute_efficiency: share of the peaks that is reached. layer_us: gaps between a layer's kernels
    on the device. step_us: of each pass of the target, sampling and scheduling. launch_us: host time to launch one
    layer without graphs, 0 with. draft_us: of each pass of the drafter. round_us, row_us: of a round with a drafter,
    and of each request in it (verification's sampling, host work that the plain loop hides). alltoall_us: alpha_0 of
    one all-to-all. allreduce_us: of one all-reduce.
    """

    memory_efficiency: float
    compute_efficiency: float
    layer_us: float
    step_us: float
    launch_us: float = 0.0
    draft_us: float = 0.0
    round_us: float = 0.0
    row_us: float = 0.0
    alltoall_us: float = 20.0
    allreduce_us: float = 10.0

    def __post_init__(self) -> None:
        for name in ("memory_efficiency", "compute_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"engine.{name} must lie in (0, 1], got {getattr(self, name)}")


@dataclass(frozen=True)
class Parallel:
    """tensor: devices that share every layer. experts: devices that share the experts (a multiple of tensor; each group
    of `tensor` of them serves its own rows)."""

    tensor: int = 1
    experts: int = 1

    def __post_init__(self) -> None:
        if self.tensor < 1 or self.experts < 1 or (self.experts > 1 and self.experts % self.tensor):
            raise ValueError(f"parallel.experts must be 1 or a multiple of tensor, got {self.experts}, {self.tensor}")

    @property
    def groups(self) -> int:
        """Groups that serve rows of their own."""
        return max(1, self.experts // self.tensor)


class Cost(Protocol):
    """What schedulers and the simulation ask of a cost model. All in seconds."""

    def target_seconds(self, rows: float, tokens: float, context: float) -> float:
        """One pass of the target: `tokens` new tokens over all rows, each with `context` positions in the cache."""

    def draft_seconds(self, rows: float, num_slots: int, context: float) -> float:
        """Drafting num_slots slots for every row; 0 for none."""

    def rest_seconds(self, rows: float, num_slots: int) -> float:
        """Everything else of a round; 0 without drafting (a plain step's own overhead is in target_seconds)."""


def distinct_experts(tokens: float, experts: Experts, rows: float | None = None) -> float:
    """Mean number of experts of one layer that a pass touches. tokens: in all; rows: of how many requests (None: every
    token of its own)."""
    rows = tokens if rows is None else min(rows, tokens)
    if tokens <= 0:
        return 0.0
    unrelated = rows * (tokens / rows) ** experts.kappa
    return experts.count * (1 - (1 - experts.chosen / experts.count) ** unrelated)


def straggler(picks: float, ranks: int) -> float:
    """Busiest rank over the mean when `picks` expert choices fall on `ranks` ranks; 1 for a single one."""
    return 1.0 if ranks <= 1 or picks <= 0 else 1 + math.sqrt(2 * math.log(ranks) * ranks / picks)


def all_to_all_seconds(
    payload: float, ranks: int, device: Device, alpha_us: float, over_network: bool = False
) -> float:
    """One all-to-all: alpha_0 + the slower of what stays in the node and what leaves it.

    payload: bytes that each rank sends. over_network: everything goes over the network, links unused.
    """
    if ranks <= 1:
        return 0.0
    if not device.link_gbs or (ranks > device.node and not device.network_gbs):
        raise ValueError(f"device {device.name} has no link_gbs or network_gbs for {ranks} ranks")
    outside = 1.0 if over_network else max(0.0, 1 - device.node / ranks)
    inside = (1 - outside) * payload / (1e9 * device.link_gbs)
    away = outside * payload / (1e9 * device.network_gbs) if outside else 0.0
    return alpha_us * MICRO + max(inside, away)


@dataclass(frozen=True)
class Roofline:
    """The cost model of a device, an engine, a target and a drafter. Satisfies Cost.

    drafter None: drafting costs nothing (a cached n-gram). Rows are those of the whole deployment.
    """

    device: Device
    engine: Engine
    target: Stack
    drafter: DrafterShape | None = None
    parallel: Parallel = field(default_factory=Parallel)

    def target_seconds(self, rows: float, tokens: float, context: float) -> float:
        return self._pass(self.target, rows, tokens, context) + self.engine.step_us * MICRO

    def draft_seconds(self, rows: float, num_slots: int, context: float) -> float:
        shape = self.drafter
        if shape is None or num_slots == 0:
            return 0.0
        once = self.engine.draft_us * MICRO
        if shape.family == "chain":
            return num_slots * (self._pass(shape.body, rows, rows, context) + once)
        if shape.family == "heads":
            return self._slot(rows, shape, num_slots) + self._pass(shape.body, rows, rows * num_slots, 0) + once
        seconds = self._pass(shape.body, rows, rows * (num_slots + 1), context) + once
        if shape.family == "sequential":
            seconds += num_slots * (self._slot(rows, shape, 1) + once)
        return seconds

    def rest_seconds(self, rows: float, num_slots: int) -> float:
        if num_slots == 0:
            return 0.0
        return (self.engine.round_us + self.engine.row_us * rows / self.parallel.groups) * MICRO

    def _slot(self, rows: float, shape: DrafterShape, slots: int) -> float:
        """Small steps' or slots' own weights, read together."""
        flat = Stack(1, shape.body.width, slots * shape.slot_parameters, 0, 0, 0, None, shape.body.precision)
        return self._pass(flat, rows, rows, 0)

    def _pass(self, stack: Stack, rows: float, tokens: float, context: float) -> float:
        """One forward pass, without the engine's overhead beside it."""
        engine, device = self.engine, self.device
        shards, groups = self.parallel.tensor, self.parallel.groups
        own_rows, own_tokens = rows / groups, tokens / groups
        cached = own_rows * context * stack.kv_bytes
        bytes_, flops = (
            stack.dense_bytes + stack.head_bytes + cached,
            2.0 * own_tokens * (stack.parameters + stack.head),
        )
        flops += own_tokens * context * stack.attention_flops
        bytes_, flops = bytes_ / shards, flops / shards
        if stack.experts is not None:
            more_bytes, more_flops = self._experts(stack, rows, tokens)
            bytes_, flops = bytes_ + more_bytes, flops + more_flops
        memory = bytes_ / (1e9 * device.bandwidth_gbs * engine.memory_efficiency)
        compute = flops / (device.peak(stack.precision) * engine.compute_efficiency)
        seconds = (memory**4 + compute**4) ** 0.25 + stack.layers * engine.layer_us * MICRO
        return max(seconds, stack.layers * engine.launch_us * MICRO) + self._communication(stack, own_tokens, tokens)

    def _experts(self, stack: Stack, rows: float, tokens: float) -> tuple[float, float]:
        """(bytes, flops) of the routed experts on the busiest rank."""
        own = stack.experts
        assert own is not None
        touched = distinct_experts(tokens, own, rows)
        work = 2.0 * tokens * own.chosen * own.parameters * own.layers
        ranks = self.parallel.experts
        if ranks == 1:
            return touched * stack.expert_bytes / self.parallel.tensor, work / self.parallel.tensor
        busiest = straggler(tokens * own.chosen, ranks)
        held = own.count / ranks
        there = min(max(touched / ranks * busiest, min(1.0, held)), max(held, 1.0))
        return there * stack.expert_bytes, work / ranks * busiest

    def _communication(self, stack: Stack, own_tokens: float, tokens: float) -> float:
        """All-reduces of tensor parallelism and all-to-alls of expert parallelism. own_tokens: of one group."""
        engine, device, shards = self.engine, self.device, self.parallel.tensor
        seconds = 0.0
        if shards > 1:
            if not device.link_gbs:
                raise ValueError(f"device {device.name} has no link_gbs for tensor parallelism")
            moved = 2 * own_tokens * stack.width * 2.0 * (shards - 1) / shards
            seconds += 2 * stack.layers * (engine.allreduce_us * MICRO + moved / (1e9 * device.link_gbs))
        own, ranks = stack.experts, self.parallel.experts
        if own is not None and ranks > 1:
            busiest = straggler(tokens * own.chosen, ranks)
            sent = own_tokens / shards * own.chosen * stack.width * busiest
            pair = sum(
                all_to_all_seconds(sent * size, ranks, device, engine.alltoall_us)
                for size in (DISPATCH_BYTES, COMBINE_BYTES)
            )
            seconds += own.layers * pair
        return seconds


@dataclass(frozen=True)
class Surroundings:
    """A cost model with what lies around the machine. Satisfies Cost.

    network_seconds: added to every pass of the target, verification or plain (a drafter that sits elsewhere, a slow
    link between parts of the target). other_tokens: tokens of other work (prefill chunks, neighbours) that share every
    pass, plain or not, and are paid for in full.
    """

    cost: Cost
    network_seconds: float = 0.0
    other_tokens: float = 0.0

    def target_seconds(self, rows: float, tokens: float, context: float) -> float:
        return self.cost.target_seconds(rows, tokens + self.other_tokens, context) + self.network_seconds

    def draft_seconds(self, rows: float, num_slots: int, context: float) -> float:
        return self.cost.draft_seconds(rows, num_slots, context)

    def rest_seconds(self, rows: float, num_slots: int) -> float:
        return self.cost.rest_seconds(rows, num_slots)


def round_seconds(cost: Cost, rows: float, num_slots: int, context: float) -> float:
    """A whole round that drafts and verifies num_slots slots for every row; plain decoding for 0."""
    verify = cost.target_seconds(rows, rows * (num_slots + 1), context)
    return cost.draft_seconds(rows, num_slots, context) + verify + cost.rest_seconds(rows, num_slots)


def break_even_tau(cost: Cost, rows: float, num_slots: int, context: float) -> float:
    """The tau below which drafting makes decoding slower."""
    return round_seconds(cost, rows, num_slots, context) / round_seconds(cost, rows, 0, context)


def speedup(cost: Cost, tau: float, rows: float, num_slots: int, context: float) -> float:
    """Tokens per second with a drafter of this tau over those without, at equal rows."""
    return tau / break_even_tau(cost, rows, num_slots, context)


def expected_tau(alpha: Sequence[float], num_slots: int) -> float:
    """tau of num_slots slots: 1 + sum over k of alpha_1 * .. * alpha_k. ValueError when alpha has fewer slots."""
    if num_slots > len(alpha):
        raise ValueError(f"alpha of {len(alpha)} slots cannot tell tau of {num_slots}")
    tau, survival = 1.0, 1.0
    for k in range(num_slots):
        survival *= alpha[k]
        tau += survival
    return tau


def best_slots(cost: Cost, alpha: Sequence[float], rows: float, context: float) -> int:
    """K in 0..len(alpha) with the most tokens per second; the smaller of equals."""
    rates = [expected_tau(alpha, k) / round_seconds(cost, rows, k, context) for k in range(len(alpha) + 1)]
    return rates.index(max(rates))


@dataclass(frozen=True)
class HardwareSettings:
    """A file of conf/hardware. device: keys of Device; engines: keys of Engine, by name. table: file of measured step
    times that replaces the roofline, or null."""

    device: dict[str, Any]
    engines: dict[str, dict[str, Any]]
    table: str | None = None

    def roofline(
        self, engine: str, target: Stack, drafter: DrafterShape | None = None, parallel: Parallel | None = None
    ) -> Roofline:
        """The cost model of an engine on this device; ValueError names the engines there are."""
        if engine not in self.engines:
            raise ValueError(f"hardware has no engine {engine!r}; there are {', '.join(self.engines)}")
        device = settings(Device, self.device, "hardware.device")
        chosen = settings(Engine, self.engines[engine], f"hardware.engines.{engine}")
        return Roofline(device, chosen, target, drafter, parallel or Parallel())


def load_hardware(path: Path) -> HardwareSettings:
    """A hardware yaml by itself, without Hydra. ValueError on unknown or missing keys."""
    return settings(HardwareSettings, OmegaConf.load(path), f"{Path(path).name}")  # type: ignore[arg-type]
