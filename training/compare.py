"""headstart compare: several drafters on one budget, measured side by side.

    headstart compare prepared=outputs/prepare/... budget.minutes=60 hydra.run.dir=outputs/compare/mine
    python -m training.compare ...

All runs share target, data and budget; each is an ordinary training run in runs/NAME and goes on where it was stopped.
Then one target measures every head: tau by replay of greedy answers that are recorded once, and the decoding loop at
each temperature, against a baseline that is decoded once. Leaves compare.json, compare.md and pictures.
"""

import gc
import os
import shutil
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from checkpoints.errors import run_module
from checkpoints.files import fingerprint, read_json, sha256_file, write_json
from checkpoints.folder import load_drafter
from checkpoints.run import known_groups, machine, record, settings
from data.conversations import Conversation, Prompt, read_conversations
from data.features import conversations_fingerprint
from data.target import Target, TargetSettings
from eval.calibration import save_calibration
from eval.comparison import Comparison, Entry, harness_figures, replay_figures
from eval.evaluate import EvalSettings, baselines, checked, drafter_words, evaluate, load_prompts, questions
from eval.passes import Pass
from eval.progress import Watch
from eval.recording import Recording, kept
from eval.replayed import measure_replay
from training.marks import difference, plain
from training.train import read_prepared, settings_of_init
from training.train import run as train

# What the comparison sets itself, the same for all runs.
OWN = ("target", "prepared", "seed", "resume", "trainer.max_steps", "trainer.max_tokens", "trainer.max_minutes")
PROBE_STEPS, PROBE_EVERY = 8, 3
# A time budget becomes steps before the run; should the machine slow down, it ends after this many times the budget,
# measurements included.
SLACK = 2


@dataclass(frozen=True)
class Budget:
    """Exactly one of optimizer steps, answer tokens seen, minutes of training, and minutes of the training process's
    CPU time (fair beside other jobs, which slow the wall clock). ValueError otherwise."""

    steps: int | None = None
    tokens: int | None = None
    minutes: float | None = None
    core_minutes: float | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in asdict(self).items() if value is not None}
        if len(given) != 1 or min(given.values()) <= 0:
            said = ", ".join(f"{name}={value}" for name, value in given.items()) or "none"
            raise ValueError(f"budget takes exactly one of {', '.join(asdict(self))}, above 0; got {said}")

    @property
    def time(self) -> tuple[str, float] | None:
        """The clock (of the learning curve) and the seconds on it, of a budget of time."""
        if self.minutes is not None:
            return "seconds", 60 * self.minutes
        return None if self.core_minutes is None else ("cpu_seconds", 60 * self.core_minutes)


@dataclass(frozen=True)
class CompareSettings:
    """drafters: overrides of the training config by run name. only: names to run (None: all). train: overrides for all
    runs. budget: see Budget. heldout: JSONL of prompts on which tau is measured while training (None: what `train`
    says, else the shipped ones). temperatures: of the decoding loop. harness: run that loop, or replay alone. The
    rest as in eval.evaluate.EvalSettings. ValueError on names or values that are not allowed."""

    prepared: str
    drafters: dict[str, list[str]]
    budget: dict[str, Any]
    prompts: str = "builtin"
    only: list[str] | None = None
    train: list[str] = field(default_factory=list)
    heldout: str | None = None
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    num_slots: int | None = None
    max_new_tokens: int = 128
    batch_size: int = 1
    harness: bool = True
    baseline: bool = True
    limit: int | None = None
    thinking: bool | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.drafters:
            raise ValueError("drafters must name at least one run, as in +drafters.mine=['drafter=NAME']")
        for where, overrides in {"train": self.train, **{f"drafters.{n}": o for n, o in self.drafters.items()}}.items():
            if not isinstance(overrides, list) or not all(isinstance(one, str) and "=" in one for one in overrides):
                raise ValueError(f"{where} must be a list of overrides (key=value), got {overrides!r}")
            for one in overrides:
                key = one.lstrip("+~").split("=")[0]
                if key in OWN or key.startswith("target."):
                    raise ValueError(f"{where} sets {key}, which the comparison sets for all runs alike")
        if unknown := sorted(set(self.only or []) - set(self.drafters)):
            raise ValueError(f"only names unknown run(s) {', '.join(unknown)}; drafters has {', '.join(self.drafters)}")
        if self.harness and not self.temperatures:
            raise ValueError("temperatures must not be empty when harness=true")

    def measuring(self, temperature: float) -> EvalSettings:
        """How the decoding loop is measured at a temperature."""
        return EvalSettings(
            num_slots=self.num_slots,
            max_new_tokens=self.max_new_tokens,
            batch_size=self.batch_size,
            temperature=float(temperature),
            baseline=self.baseline,
            seed=self.seed,
            limit=self.limit,
            thinking=self.thinking,
        )


@dataclass(frozen=True)
class Run:
    """One drafter's training run. config: of `headstart train`, the budget in it. marks: what a resumed run must share.

    Its mark, run_plan.json, says what was started, how many steps the budget is, and what the finished run found.
    """

    name: str
    overrides: list[str]
    folder: Path
    config: DictConfig
    marks: dict[str, Any]
    budget: Budget

    @property
    def mark(self) -> Path:
        return self.folder / "run_plan.json"

    @property
    def head(self) -> Path:
        return self.folder / "drafter"

    def changes(self) -> list[str]:
        """What differs from the run that this folder holds, one line each."""
        return difference(read_json(self.mark)["marks"], self.marks) if self.mark.exists() else []

    def train(self, console: Console) -> None:
        """Train, or go on; a finished run is left as it is."""
        state = read_json(self.mark) if self.mark.exists() else {"marks": self.marks, "steps": None, "best": None}
        if state["best"] is not None and self.head.exists():
            console.print(f"[dim]{self.name}: trained before, not again[/dim]")
            return
        if self.budget.time is not None:
            clock, seconds = self.budget.time
            state["steps"] = state["steps"] or max(1, int(seconds / self._seconds_per_step(clock)))
            self.config.trainer.max_steps = state["steps"]
            if self.budget.minutes is not None:
                self.config.trainer.max_minutes = SLACK * self.budget.minutes
            console.print(f"{self.name}: {state['steps']} steps for {seconds:g} {clock.replace('_', ' ')}")
        write_json(self.mark, state)
        write_json(self.mark, state | {"best": train(self.config, self.folder)})

    def _seconds_per_step(self, clock: str) -> float:
        """Time a few steps of this very run, by a clock of the learning curve, in a folder that is removed again."""
        folder, config = self.folder / "probe", self.config.copy()
        config.trainer.update({"max_steps": PROBE_STEPS, "progress": False})
        config.acceptance.update({"every": PROBE_EVERY, "prompts": 1, "max_new_tokens": 2})
        config.logger, config.resume = None, None
        shutil.rmtree(folder, ignore_errors=True)
        train(config, folder)
        first, *_, last = read_json(folder / "learning_curve.json")
        shutil.rmtree(folder)
        return (last[clock] - first[clock]) / (last["step"] - first["step"])


def plan(chosen: CompareSettings, config: DictConfig, out: Path) -> list[Run]:
    """The runs, composed and checked before the first one starts. ValueError names runs whose settings changed."""
    budget = settings(Budget, chosen.budget, "budget")
    conversations = read_conversations(Path(chosen.prepared) / "conversations.jsonl")
    heldout = [] if chosen.heldout is None else ["data@heldout=jsonl", f"heldout.path={chosen.heldout}"]
    runs = []
    for name in chosen.only or list(chosen.drafters):
        words = [*chosen.train, *chosen.drafters[name]]
        composed = compose_train([*heldout, *words])
        settings_of_init(composed, words)
        composed.target, composed.prepared, composed.seed = config.target, chosen.prepared, chosen.seed
        composed.resume = "auto"
        composed.trainer.update({"max_steps": budget.steps or 0, "max_tokens": budget.tokens, "max_minutes": None})
        marks = plain(composed) | _marks(conversations, composed.limit, budget)
        runs.append(Run(name, chosen.drafters[name], out / "runs" / name, composed, marks, budget))
    changed = [f"{run.name}: {'; '.join(lines)}" for run in runs if (lines := run.changes())]
    if changed:
        raise ValueError(f"run(s) of other settings in {out / 'runs'}: {' | '.join(changed)}; use another folder")
    return runs


def compose_train(overrides: Sequence[str]) -> DictConfig:
    """The training config with overrides, open for the comparison's own settings."""
    search = HydraConfig.get().searchpath if HydraConfig.initialized() else []
    words = [*overrides, *([f"hydra.searchpath=[{','.join(map(str, search))}]"] if search else [])]
    if GlobalHydra.instance().is_initialized():
        config = compose("train", words)
    else:
        with initialize_config_module("conf", version_base="1.3"):
            config = compose("train", words)
    OmegaConf.set_struct(config, False)
    return config


def _marks(conversations: Sequence[Conversation], limit: int | None, budget: Budget) -> dict[str, Any]:
    """Training's own settings leave these free, a comparison does not."""
    times = {f"budget.{name}": getattr(budget, name) for name in ("minutes", "core_minutes")}
    return {"fingerprint.data": conversations_fingerprint(conversations[:limit])} | times


class Measurer:
    """Measures heads with one target: the recording and the baselines are made once, when they are first needed."""

    def __init__(self, target: Target, prompts: Sequence[Prompt], chosen: CompareSettings, out: Path) -> None:
        self.target, self.prompts, self.chosen, self.out = target, prompts, chosen, out
        self.questions = questions(target, prompts, chosen.measuring(0.0))
        self.layers: tuple[int, ...] = ()
        self._recording: Recording | None = None
        self._plain: dict[float, dict[str, Pass]] = {}

    def entry(self, run: Run) -> Entry:
        """A run's figures: those measured before when head and settings are the same, else new ones."""
        path = run.folder / "measured.json"
        key = self._key(run)
        if path.exists() and read_json(path)["key"] == key:
            return Entry(**read_json(path)["entry"])
        found = self._measure(run)
        write_json(path, {"key": key, "entry": asdict(found)})
        return found

    def _key(self, run: Run) -> str:
        ways = [asdict(self.chosen.measuring(heat)) for heat in self.chosen.temperatures]
        head = sha256_file(run.head / "model.safetensors")
        asked = [[question.domain, question.ids] for question in self.questions]
        return fingerprint([ways, self.chosen.harness, head, asked, str(self.target.dtype), self.target.identity])

    def _measure(self, run: Run) -> Entry:
        drafter = load_drafter(run.head, self.target.parts)
        slots = self.chosen.num_slots or drafter.num_slots
        replayed = measure_replay(drafter, self.recording(), slots)
        harness: dict[str, dict[str, Any]] = {}
        for heat in self.chosen.temperatures if self.chosen.harness else []:
            way = self.chosen.measuring(heat)
            report = evaluate(self.target, drafter, self.prompts, way, plain=self.plain(heat))
            replace(report, drafter_dir=str(run.head)).write(run.folder / f"eval-T{heat:g}")
            harness[f"{heat:g}"] = harness_figures(report)
            if report.calibration is not None:
                save_calibration(run.head, report.calibration, asdict(way.sampling))
        curve = read_json(run.folder / "learning_curve.json")
        trained = {
            "steps": curve[-1]["step"],
            "tokens": curve[-1]["tokens"],
            "minutes": round(curve[-1]["seconds"] / 60, 3),
            "core_minutes": round(curve[-1]["cpu_seconds"] / 60, 3),
            "best_step": read_json(run.mark)["best"]["step"],
        }
        words = drafter_words(drafter) | {
            "parameters": sum(p.numel() for p in drafter.parameters() if p.requires_grad),
            "num_slots": slots,
            "layers": list(drafter.needs.layers),
        }
        return Entry(run.overrides, words, trained, curve, replay_figures(replayed), harness)

    def recording(self) -> Recording:
        """The target's greedy answers with features of all layers that the heads read."""
        if self._recording is None:
            with Watch(len(self.questions)) as watch:
                watch.pass_ = "recording answers"
                path, length, rows = self.out / "answers.safetensors", self.chosen.max_new_tokens, 16
                self._recording = kept(path, self.target, self.questions, self.layers, length, rows, watch)
        return self._recording

    def plain(self, heat: float) -> dict[str, Pass] | None:
        """The baseline at a temperature, decoded once in this process; None when it is not wanted."""
        if self.chosen.baseline and heat not in self._plain:
            self._plain[heat] = baselines(self.target, self.prompts, self.chosen.measuring(heat))
        return self._plain.get(heat)


def run(config: DictConfig, out: Path) -> Comparison:
    """Train and measure as configured; everything goes under `out`. A drafter that fails is named and the others go
    on."""
    names = list(CompareSettings.__dataclass_fields__)
    known_groups(config, "target", *names)
    chosen = settings(CompareSettings, OmegaConf.masked_copy(config, names), "compare")
    target_settings = settings(TargetSettings, config.target, "target")
    if chosen.thinking is None:  # ask as the training data were asked
        chosen = replace(chosen, thinking=read_prepared(Path(chosen.prepared)).get("thinking"))
    prompts, console = load_prompts(chosen.prompts), Console()
    runs = plan(chosen, config, out)
    failures: dict[str, str] = {}
    record(out, config)
    for one in runs:
        console.rule(one.name)
        failures |= attempt(one.name, partial(one.train, console))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    about: dict[str, Any] = {
        "budget": chosen.budget,
        "settings": asdict(chosen) | {"dtype": target_settings.dtype},
        "prompts": len(checked(prompts, chosen.measuring(0.0))),
        "target": {"name": target_settings.name},
        "machine": machine(),
    }
    comparison = Comparison(about, failures=failures)
    if int(os.environ.get("LOCAL_RANK", "0")):  # further ranks help with training alone
        return comparison
    if len(failures) < len(runs):
        target = Target.load(**asdict(target_settings))
        about["settings"]["dtype"] = str(target.dtype).removeprefix("torch.")
        about["target"] = dict(target.identity)
        record(out, config, target=target.identity)
        measure(Measurer(target, prompts, chosen, out), runs, comparison)
    comparison.write(out)
    comparison.show(console)
    console.print(f"comparison     {out / 'compare.md'}", soft_wrap=True)
    return comparison


def measure(measurer: Measurer, runs: Sequence[Run], comparison: Comparison) -> None:
    """Fill the comparison, run by run; it is written after each, so that a kill loses one measurement at most."""
    trained = [run for run in runs if run.name not in comparison.failures]
    measurer.layers = tuple(sorted({i for run in trained for i in read_json(run.head / "config.json")["layers"]}))
    for run in trained:
        comparison.failures |= attempt(run.name, partial(_enter, comparison, run, measurer))
        comparison.write(measurer.out)


def _enter(comparison: Comparison, run: Run, measurer: Measurer) -> None:
    """Add a run's figures; RuntimeError when its greedy output is not the target's own."""
    comparison.entries[run.name] = entry = measurer.entry(run)
    if any(figures["greedy_identical"] is False for figures in entry.harness.values()):
        raise RuntimeError(f"greedy output differs from the target's own: {run.folder / 'eval-T0' / 'report.json'}")


def attempt(name: str, work: Callable[[], None]) -> dict[str, str]:
    """Do it; {name: what went wrong} when it fails, {} otherwise. The trace is printed, so nothing is hidden."""
    try:
        work()
    except Exception as error:
        traceback.print_exc()
        return {name: f"{type(error).__name__}: {error}"}
    return {}


@hydra.main(version_base="1.3", config_path="pkg://conf", config_name="compare")
def main(config: DictConfig) -> None:
    """`headstart compare`: exit status 1 when a drafter failed."""
    if run(config, Path(HydraConfig.get().runtime.output_dir)).failures:
        raise SystemExit(1)


if __name__ == "__main__":
    run_module("compare", "training.compare")
