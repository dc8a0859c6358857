"""`headstart simulate`: schedulers against loads on a machine that need not be here (eval.simulate explains the model).

    headstart simulate traces=report.json hardware=h200 hardware_engine=sglang target_shape=llama-3.1-8b
    headstart simulate alpha=[0.8,0.7,0.6] hardware=b200 target_shape=qwen3-8b drafter_kind=block loads=[1,8,32]

Leaves simulate.json (every run), hints.json (num_speculative_tokens by concurrency for vLLM and SGLang), pareto.png and
depth.png. hardware.table names measured step times (`headstart bench profile`), which replace the roofline; its error
against them is printed.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from checkpoints.files import write_json
from checkpoints.run import known_groups, record, settings
from eval.hardware import Cost, HardwareSettings, Parallel, Surroundings, break_even_tau
from eval.hardware_measured import Measured, measured_times, misses
from eval.hardware_shapes import DrafterShape, Stack, block_drafter, layer_drafter, one_layer_drafter, target_shape
from eval.plots import png, write_plots
from eval.scheduler import build
from eval.simulate import Served, Simulation, Traffic, best_by_concurrency, engine_hints, pareto
from eval.traces import Traces

KINDS = ("chain", "block", "native")


@dataclass(frozen=True)
class SimulateSettings:
    """What to simulate.

    traces: a file of eval.traces or an evaluation's report.json; alpha: acceptance by slot in its place.
    hardware_engine: of hardware.engines. target_shape: a known target or a folder with a config.json; precision: of its
    weights, null for its own. drafter_dir: our drafter folder, or null for a shape by drafter_kind (chain: one layer;
    block: five layers, one pass; native: a layer of the target's). parallel: tensor and experts. num_slots: most slots
    drafted, null for the traces' own. loads: requests/s or requests in flight, as traffic.kind says. schedulers: names
    of eval.scheduler. network_ms: added to each pass of the target. other_tokens: of other work in each pass.
    """

    hardware_engine: str
    target_shape: str
    loads: list[float]
    schedulers: list[str]
    traces: str | None = None
    alpha: list[float] | None = None
    precision: str | None = None
    drafter_dir: str | None = None
    drafter_kind: str = "chain"
    parallel: dict[str, int] = field(default_factory=dict)
    num_slots: int | None = None
    traffic: dict[str, Any] = field(default_factory=dict)
    network_ms: float = 0.0
    other_tokens: float = 0.0

    def __post_init__(self) -> None:
        if (self.traces is None) == (self.alpha is None):
            raise ValueError("simulate needs traces or alpha, one of the two")
        if self.drafter_kind not in KINDS:
            raise ValueError(f"drafter_kind must be one of {', '.join(KINDS)}, got {self.drafter_kind!r}")
        if not self.loads or not self.schedulers:
            raise ValueError("simulate needs at least one scheduler and one load")
        settings(Parallel, self.parallel, "parallel")
        traffic = settings(Traffic, self.traffic, "traffic")
        for load in self.loads:
            traffic.check(load)

    def rounds(self) -> Traces:
        """The traces, cut to num_slots. ValueError when they have fewer."""
        found = Traces.synthetic(self.alpha) if self.alpha else Traces.load(Path(str(self.traces)).expanduser())
        if self.num_slots is None:
            return found
        if not 1 <= self.num_slots <= found.num_slots:
            raise ValueError(
                f"num_slots must lie in 1..{found.num_slots}, the slots of the traces; got {self.num_slots}"
            )
        return Traces(found.kept.clamp_max(self.num_slots), found.confidences[:, : self.num_slots], found.answers)


@dataclass(frozen=True)
class Machine:
    """A cost model in words. model: the roofline, where measured times stand in cost."""

    cost: Cost
    name: str
    model: Cost
    measured: Measured | None


def guessed_drafter(kind: str, target: Stack, num_slots: int) -> DrafterShape:
    """A drafter of the usual size for a target: heads of 128, an MLP of 3.5 widths, 32000 draft tokens for a chain."""
    heads = (max(1, target.width // 128), max(1, target.width // 512), 128)
    if kind == "native":
        return layer_drafter(target, num_slots)
    if kind == "block":
        return block_drafter(target, 7 * target.width // 2, heads, 5, 5, num_slots)
    return one_layer_drafter(target, 7 * target.width // 2, heads, 32000)


def machine_of(hardware: HardwareSettings, how: SimulateSettings, num_slots: int) -> Machine:
    """The cost model that the settings describe: a roofline, or measured times when hardware.table names them."""
    stack = target_shape(how.target_shape, how.precision)
    folder = None if how.drafter_dir is None else Path(how.drafter_dir).expanduser()
    shape = DrafterShape.from_folder(folder, stack) if folder else guessed_drafter(how.drafter_kind, stack, num_slots)
    model = hardware.roofline(how.hardware_engine, stack, shape, settings(Parallel, how.parallel, "parallel"))
    measured = None if hardware.table is None else measured_times(hardware.table)
    cost: Cost = model if measured is None else measured
    if how.network_ms or how.other_tokens:
        cost = Surroundings(cost, how.network_ms / 1000, how.other_tokens)
    words = f"{how.target_shape} on {model.device.name}, {how.hardware_engine}" + (", measured" if measured else "")
    return Machine(cost, words, model, measured)


def simulate(cost: Cost, traces: Traces, how: SimulateSettings) -> list[Served]:
    """Every scheduler at every load."""
    traffic = settings(Traffic, how.traffic, "traffic")
    return [
        Simulation(cost, build(name, cost, traces.num_slots), traces, traffic, load).run(name)
        for name in how.schedulers
        for load in how.loads
    ]


def plot_pareto(axes: Any, points: Sequence[Served], title: str) -> None:
    """Throughput against per-user speed, a line a scheduler; the undominated points ringed."""
    for name in dict.fromkeys(one.scheduler for one in points):
        own = [one for one in points if one.scheduler == name]
        axes.plot([p.user_speed for p in own], [p.throughput for p in own], marker="o", linewidth=1, label=name)
    best = pareto(points)
    ringed = {"facecolors": "none", "edgecolors": "black", "s": 90, "label": "Pareto"}
    axes.scatter([p.user_speed for p in best], [p.throughput for p in best], **ringed)
    axes.set(xlabel="tokens/s of the median request", ylabel="tokens/s of all requests", title=title)
    axes.legend(fontsize="small")


def plot_depth(axes: Any, points: Sequence[Served], title: str) -> None:
    """Slots verified a round against load, a line a scheduler."""
    for name in dict.fromkeys(one.scheduler for one in points):
        own = sorted((one.load, one.mean_length) for one in points if one.scheduler == name)
        axes.plot([load for load, _ in own], [length for _, length in own], marker="o", linewidth=1, label=name)
    axes.set(xscale="log", xlabel="load", ylabel="slots verified in a round", title=title)
    axes.legend(fontsize="small")


def show(points: Sequence[Served], title: str, console: Console) -> None:
    """Print one row a run."""
    table = Table(title=title, title_justify="left")
    for name in ("scheduler", "load", "tokens/s", "user tokens/s", "P50 ms", "P99 ms", "K drafted", "verified", "rows"):
        table.add_column(name, justify="left" if name == "scheduler" else "right")
    for one in points:
        latency = [f"{1000 * one.latency[name]:.1f}" for name in ("p50", "p99")]
        means = [f"{value:.1f}" for value in (one.mean_depth, one.mean_length, one.mean_rows)]
        speeds = [f"{one.throughput:.0f}", f"{one.user_speed:.1f}"]
        table.add_row(one.scheduler, f"{one.load:g}", *speeds, *latency, *means)
    console.print(table)


def run(config: DictConfig, folder: Path) -> dict[str, Any]:
    """Simulate as configured; writes simulate.json, hints.json, plots and run.json into folder."""
    own = list(SimulateSettings.__dataclass_fields__)
    known_groups(config, "hardware", *own)
    plain: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    how = settings(SimulateSettings, {name: plain[name] for name in own if name in plain}, "simulate")
    hardware = settings(HardwareSettings, plain["hardware"], "hardware")
    traces = how.rounds()
    machine = machine_of(hardware, how, traces.num_slots)
    console = Console()
    if machine.measured is not None:
        errors = sorted(abs(one.error) for one in misses(machine.measured, machine.model))
        console.print(f"roofline       off by {errors[len(errors) // 2]:.0%} (median), {errors[-1]:.0%} at most")
    points = simulate(machine.cost, traces, how)
    traffic = settings(Traffic, how.traffic, "traffic")
    counts = [count for count in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256) if count <= traffic.max_rows]
    context = traffic.prompt + traffic.answer / 2
    best = best_by_concurrency(machine.cost, traces.alpha, counts, context)
    report = {
        "machine": machine.name,
        "tau": traces.tau,
        "alpha": traces.alpha,
        "best_slots": {str(count): k for count, k in best.items()},
        "break_even_tau": {str(c): break_even_tau(machine.cost, c, max(k, 1), context) for c, k in best.items()},
        "runs": [asdict(one) for one in points],
        "pareto": [[one.scheduler, one.load] for one in pareto(points)],
    }
    write_json(folder / "hints.json", engine_hints(best, traffic.max_rows))
    drawing = {"pareto.png": plot_pareto, "depth.png": plot_depth}
    write_plots(folder, {name: png(draw, points, machine.name) for name, draw in drawing.items()})
    record(folder, config)
    write_json(folder / "simulate.json", report)
    show(points, machine.name, console)
    console.print("best K         " + "  ".join(f"{count}:{k}" for count, k in best.items()) + "  (requests:K)")
    console.print(f"report         {folder / 'simulate.json'}", soft_wrap=True)
    return report


@hydra.main(version_base="1.3", config_path="pkg://conf", config_name="simulate")
def main(config: DictConfig) -> None:
    """`headstart simulate`: schedulers against loads."""
    run(config, Path(HydraConfig.get().runtime.output_dir))


if __name__ == "__main__":
    main()
