"""Measure step times on the running machine: the target's passes, the drafter's proposals, the rest of a round.

    headstart bench profile target=smollm2 drafter_dir=... rows=[1,4,16] slots=[1,3,5,7] context=256
    headstart bench profile ... hardware=h200 hardware_engine=transformers     prints the error of that roofline
    headstart bench rounds ... rows=[8] loops=[waiting,steady]                 the host's share of a round (eval.rounds)
    headstart bench speedup ... prompts=builtin seconds=8                      predicted and measured (eval.speedups)

The target reads K + 1 tokens of every row through the cache of the decoding loop (eval.cache), captured layers, head
and verdict included, and takes the rejected ones back; the drafter observes verified positions and proposes. Each time
is the median of `repeats` after one warm-up. Writes steps.json (eval.hardware_measured.Measured).
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, ListConfig
from rich.console import Console
from rich.table import Table

from checkpoints.errors import run_module
from checkpoints.files import write_json
from checkpoints.folder import load_drafter
from checkpoints.run import known_groups, machine, record, settings
from data.chat import Template
from data.suites import load_prompts
from data.target import Target, TargetSettings
from drafters.contract import Drafter
from drafters.sampling import Sampling
from eval.cache import RowCache, check_cacheable
from eval.decoder import DecodeSettings
from eval.hardware import HardwareSettings, Roofline
from eval.hardware_measured import Measured, Miss, StepTable, misses
from eval.hardware_shapes import DrafterShape, from_config
from eval.plots import draw_plots, write_plots
from eval.rounds import RoundTimes, profile_rounds, random_prompts, show_rounds
from eval.speedups import Measuring, measure_speedups, show_speedups
from eval.steady import LOOPS, Loop
from eval.verification import verify_greedy

FILE = "steps.json"
ROUNDS_FILE = "rounds.json"
SPEEDUPS_FILE, PREDICTED_FILE = "speedups.json", "predicted.json"
ACTIONS = ("profile", "rounds", "speedup")
GROUPS = ("action", "target", "drafter_dir", "hardware", "hardware_engine", "train")
SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 30,
    "vocab_size": 49152,
}


@dataclass(frozen=True)
class ProfileSettings:
    """rows: requests at once. slots: K at which drafting and verification are measured. context: positions in the cache
    before the pass. repeats: timed runs of each. seed: of the random tokens. loops: of `rounds`, which decodes with the
    last of slots. new_tokens: of `rounds` and `speedup`. prompts (a suite or file), seconds (of measured rounds, for
    each number of rows and slots): of `speedup`."""

    rows: list[int] = field(default_factory=lambda: [1, 4, 16])
    slots: list[int] = field(default_factory=lambda: [1, 2, 3, 4, 5, 6, 7])
    context: int = 256
    repeats: int = 5
    seed: int = 0
    loops: list[str] = field(default_factory=lambda: ["waiting", "steady"])
    new_tokens: int = 32
    prompts: str = "builtin"
    seconds: float = 8.0

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.loops) - set(LOOPS)):
            raise ValueError(f"loops must be of {', '.join(LOOPS)}, got {', '.join(unknown)}")
        for name in ("rows", "slots"):
            values = list(getattr(self, name))
            if not values or values != sorted(set(values)) or values[0] < 1:
                raise ValueError(f"{name} must be ascending numbers from 1 on, got {values}")
        if self.repeats < 1 or self.context <= max(self.slots):
            raise ValueError(f"repeats must be at least 1 and context above {max(self.slots)}, got {self}")


@dataclass(frozen=True)
class StepSettings:
    """The train group, which training.bench reads. drafters: names in conf/drafter, null for all. num_slots: K of each.
    rows, tokens: of the batch. repeats: timed steps, the fastest counts. naive: measure the naive twin too. shape: the
    target's sizes (a Llama's config keys), which decide everything; its values decide nothing."""

    drafters: list[str] | None = None
    num_slots: int = 5
    rows: int = 1
    tokens: int = 128
    repeats: int = 2
    naive: bool = True
    shape: dict[str, int] = field(default_factory=lambda: dict(SHAPE))

    def __post_init__(self) -> None:
        for name, least in (("num_slots", 2), ("rows", 1), ("tokens", 16), ("repeats", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"train.{name} must be at least {least}, got {getattr(self, name)}")
        if set(self.shape) != set(SHAPE) or any(value < 1 for value in self.shape.values()):
            raise ValueError(f"train.shape must give {', '.join(SHAPE)}, each at least 1, got {self.shape}")


@torch.no_grad()
def profile(target: Target, drafter: Drafter | None, how: ProfileSettings) -> Measured:
    """Measure as configured. ValueError when the drafter has fewer slots than asked, or the target fewer positions."""
    check_cacheable(target.model)
    if drafter is not None and max(how.slots) > drafter.num_slots:
        raise ValueError(f"slots up to {max(how.slots)} asked, the drafter has {drafter.num_slots}")
    limit = getattr(target.parts.config, "max_position_embeddings", None)
    needed = how.context + max(how.slots) + 1
    if limit is not None and needed > limit:
        raise ValueError(f"context {how.context} and {max(how.slots)} slots need {needed} positions, there are {limit}")
    counts = [1, *(k + 1 for k in how.slots)]
    seconds, drafts, rests = [], [], []
    if drafter is not None:
        drafter.eval()
    for rows in how.rows:
        bench = _Bench(target, drafter, rows, how)
        seconds.append(bench.medians(bench.target_seconds, counts))
        rests.append([bench.rest_seconds()])
        if drafter is not None:
            drafts.append(bench.medians(bench.draft_seconds, how.slots))
    about = {
        "machine": machine(),
        "target": dict(target.identity),
        "dtype": str(target.dtype).removeprefix("torch."),
        "drafter": None if drafter is None else drafter.settings(),
        "settings": asdict(how),
    }
    draft = StepTable(list(how.rows), list(how.slots), drafts) if drafts else None
    rest = StepTable(list(how.rows), [1], rests) if drafts else None
    return Measured(StepTable(list(how.rows), counts, seconds), draft, rest, how.context, about)


class _Bench:
    """One number of rows, their context read once: of `context` tokens, every second of one fewer."""

    def __init__(self, target: Target, drafter: Drafter | None, rows: int, how: ProfileSettings) -> None:
        self.target, self.drafter, self.rows, self.how = target, drafter, rows, how
        self.layers = drafter.needs.layers if drafter is not None else ()
        made = torch.Generator().manual_seed(how.seed)
        size = target.identity["vocab_size"]
        self.tokens = torch.randint(0, size, (rows, how.context + 16 + max(how.slots)), generator=made).to(
            target.device
        )
        # Requests that are served together differ in length; equal ones need no mask, and get other kernels.
        mask = torch.ones(rows, how.context, dtype=torch.int64, device=target.device)
        mask[1::2, 0] = 0
        self.lengths, positions = mask.sum(1), (mask.cumsum(1) - 1).clamp_min(0)
        self.cache = RowCache(target.model, mask)
        prompt = self.tokens[:, : how.context]
        self.features = target.forward(prompt, self.layers, mask, positions, self.cache.cache)
        self.state: Any = None
        if drafter is not None:
            like = next(drafter.parameters(), self.features.last)
            aux, last = self.features.aux.to(like), self.features.last.to(like)
            longest = max(how.slots) + 1
            self.state = drafter.begin(rows, how.context + (how.repeats + 1) * len(how.slots) * longest + longest)
            drafter.start(self.state, self.tokens[:, 0].to(like.device))
            following = self.tokens[:, 1 : how.context + 1].to(like.device)
            lengths = torch.full((rows,), how.context, device=like.device)
            drafter.observe(self.state, following, aux, last, lengths)
            self.read = (following, aux, last)
            self.seeds = torch.arange(rows, device=like.device)

    def target_seconds(self, count: int) -> float:
        """A pass over `count` tokens a row, with features, logits and greedy verdict; plain decoding's for one."""
        layers = self.layers if count > 1 else ()
        device, block = self.target.device, self.tokens[:, self.how.context : self.how.context + count]

        def run() -> None:
            positions = self.cache.lengths[:, None] + torch.arange(count, device=device)
            found = self.target.forward(block, layers, self.cache.mask(count), positions, self.cache.cache)
            best = self.target.logits(found.last).argmax(-1)
            verify_greedy(best, block[:, 1:].to(best.device)).accepted.tolist()

        seconds = timed(run, device)
        self._take_back()
        return seconds

    def draft_seconds(self, num_slots: int) -> float:
        """Reading what a verification left (half the slots accepted, shapes of all) and proposing num_slots."""
        drafter = self.drafter
        assert drafter is not None
        following, aux, last = (part[:, : num_slots + 1] for part in self.read)
        lengths = torch.full_like(self.seeds, num_slots // 2 + 1)

        def run() -> None:
            drafter.observe(self.state, following, aux, last, lengths)
            drafter.propose(self.state, num_slots, Sampling(0.0), self.seeds)

        return timed(run, self.target.device)

    def rest_seconds(self) -> float:
        """Bookkeeping of a round: the cache keeps what was accepted, features stay where they are."""
        width = max(self.how.slots) + 1
        block = self.tokens[:, self.how.context : self.how.context + width]
        positions = self.cache.lengths[:, None] + torch.arange(width, device=self.target.device)

        def read() -> None:
            self._take_back()
            self.target.forward(block, self.layers, self.cache.mask(width), positions, self.cache.cache)

        def run() -> None:
            self.cache.keep([1] * self.rows, width)

        times = []
        for _ in range(min(self.how.repeats, 3)):
            read()
            times.append(timed(run, self.target.device))
        self._take_back()
        return max(statistics.median(times), 1e-7)

    def _take_back(self) -> None:
        """Forget all tokens behind the context."""
        self.cache.visible = self.cache.visible[:, : self.how.context]
        self.cache.lengths = self.lengths
        self.cache.host_lengths = self.lengths.tolist()
        for layer in self.cache.layers:
            layer.narrow(self.how.context)

    def medians(self, seconds: Callable[[int], float], counts: Sequence[int]) -> list[float]:
        """The median for each count over `repeats` passes through all of them (after one that warms up): a machine that
        grows slower for a while does so for all counts, whose ratios are what is asked."""
        passes = [[seconds(count) for count in counts] for _ in range(self.how.repeats + 1)]
        return [statistics.median(column) for column in zip(*passes[1:], strict=True)]


def timed(run: Callable[[], Any], where: torch.device) -> float:
    """Seconds that a call takes, a GPU's work included."""
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    started = time.perf_counter()
    run()
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    return time.perf_counter() - started


def show(measured: Measured, found: list[Miss], console: Console) -> None:
    """Print the times, and the roofline's error beside each when there is one."""
    errors = {(one.kind, one.rows, one.count): one.error for one in found}
    for kind, table in (("target", measured.target), ("draft", measured.draft)):
        if table is None:
            continue
        word = "tokens a row" if kind == "target" else "slots"
        shown = Table(title=f"{kind}, ms by {word} (roofline's error)", title_justify="left")
        for name in ("rows", *map(str, table.counts)):
            shown.add_column(name, justify="right")
        for rows, line in zip(table.rows, table.seconds, strict=True):
            cells = []
            for count, value in zip(table.counts, line, strict=True):
                error = errors.get((kind, rows, count))
                cells.append(f"{1000 * value:.1f}" + (f" ({error:+.0%})" if error is not None else ""))
            shown.add_row(str(rows), *cells)
        console.print(shown)


def run(config: DictConfig, folder: Path) -> Path:
    """Profile as configured; writes steps.json or rounds.json, and run.json, into folder; returns the file's path."""
    own = list(ProfileSettings.__dataclass_fields__)
    known_groups(config, *GROUPS, *own)
    settings(StepSettings, config.train, "train")
    if config.action == "train":
        raise ValueError("action=train is `headstart bench train`, or python -m training.bench")
    if config.action not in ACTIONS:
        raise ValueError(f"action must be one of {', '.join(ACTIONS)}, got {config.action!r}")
    if config.action == "speedup" and config.drafter_dir is None:
        raise ValueError("bench speedup needs drafter_dir")
    given = {name: config[name] for name in own if name in config}
    how = settings(ProfileSettings, {k: list(v) if isinstance(v, ListConfig) else v for k, v in given.items()}, "bench")
    hardware = settings(HardwareSettings, config.hardware, "hardware")
    target = Target.load(**asdict(settings(TargetSettings, config.target, "target")))
    drafter_dir = None if config.drafter_dir is None else Path(config.drafter_dir).expanduser().resolve()
    drafter = None if drafter_dir is None else load_drafter(drafter_dir, target.parts)
    console = Console()
    if config.action == "rounds":
        found = rounds(target, drafter, how)
        record(folder, config, target=target.identity)
        path = folder / ROUNDS_FILE
        write_json(path, [one.as_dict() for one in found])
        show_rounds(found, console)
        console.print(f"times          {path}", soft_wrap=True)
        return path
    measured = profile(target, drafter, how)
    record(folder, config, target=target.identity)
    path = measured.save(folder / FILE)
    show(measured, misses(measured, roofline_of(target, drafter_dir, hardware, config.hardware_engine)), console)
    console.print(f"times          {path}", soft_wrap=True)
    if config.action == "speedup" and drafter is not None:
        path = speedups(target, drafter, measured, how, folder, console)
    return path


def speedups(
    target: Target, drafter: Drafter, cost: Measured, how: ProfileSettings, folder: Path, console: Console
) -> Path:
    """Measure speedups beside those that the step times predict; writes speedups.json, predicted.json (which
    `headstart eval predicted=` reads) and a plot."""
    template = Template(target.tokenizer, None, target.eos_ids)
    prompts = [template.prompt(prompt.messages) for prompt in load_prompts(how.prompts)]
    measuring = Measuring(how.rows, how.slots, how.new_tokens, how.seconds, how.context)
    points = measure_speedups(target, drafter, cost, prompts, measuring)
    rows = [one.as_dict() for one in points]
    path = folder / SPEEDUPS_FILE
    write_json(path, rows)
    write_json(folder / PREDICTED_FILE, {row["name"]: {k: row[k] for k in ("predicted", "measured")} for row in rows})
    write_plots(folder, draw_plots({"predicted": rows, "num_slots": 0, "domains": {}}))
    show_speedups(points, console)
    console.print(f"speedups       {path}", soft_wrap=True)
    return path


def rounds(target: Target, drafter: Drafter | None, how: ProfileSettings) -> list[RoundTimes]:
    """Times of a round for each loop and number of rows."""
    found = []
    for rows in how.rows:
        prompts = random_prompts(target, rows, how.context, how.seed)
        settings = DecodeSettings(how.slots[-1], how.new_tokens, rows)
        found += [profile_rounds(target, drafter, prompts, settings, Loop(kind)) for kind in how.loops]
    return found


def roofline_of(target: Target, drafter_dir: Path | None, hardware: HardwareSettings, engine: str) -> Roofline:
    """The roofline of a loaded target and a drafter folder. ValueError for a mixture (see eval.hardware_shapes)."""
    precision = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "bf16"}[target.dtype]
    stack = from_config(target.parts.config.to_dict(), precision)
    shape = None if drafter_dir is None else DrafterShape.from_folder(drafter_dir, stack)
    return hardware.roofline(engine, stack, shape)


@hydra.main(version_base="1.3", config_path="pkg://conf", config_name="bench")
def main(config: DictConfig) -> None:
    """`headstart bench`: measure step times."""
    run(config, Path(HydraConfig.get().runtime.output_dir))


if __name__ == "__main__":
    run_module("bench", "eval.bench")
