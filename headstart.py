"""headstart: one command for every entry, and the demo that walks the whole road.

    headstart prepare | train | eval | export | doctor | compare | bench | simulate | demo  [hydra overrides]

The first word picks the entry; the rest goes to Hydra untouched (`headstart train --help` lists the keys, `-m` sweeps).
Each entry also runs as a module: `python -m training.train ...`.
"""

import importlib
import importlib.util
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from checkpoints.errors import FULL, ROOMS, start
from checkpoints.files import fingerprint, read_json, sha256_file, write_json
from checkpoints.folder import read_drafter
from checkpoints.run import ROOT, known_groups, record, settings

ENTRIES = {
    "prepare": ("data.prepare", "prompts, the target's own answers, and its features"),
    "train": ("training.train", "train a drafter on a frozen target"),
    "eval": ("eval.evaluate", "tau, acceptance by slot, speed and losslessness of a head"),
    "export": ("checkpoints.export", "write, lint, verify or import what engines load; extract, stitch"),
    "doctor": ("eval.doctor", "my acceptance is low: which convention of a head is wrong, by measurement"),
    "compare": ("training.compare", "train several drafters on one budget and measure them side by side"),
    "bench": ("eval.bench", "step times on this machine, what they predict, whole rounds, or a training step"),
    "simulate": ("eval.serving", "serving under load on a described machine: schedulers, Pareto curve, best K"),
    "demo": ("headstart", "the whole road on the embedded target, in minutes"),
}
FIRST_WORDS = {
    "export": ("lint", "verify", "import", "extract", "stitch", "push"),
    "bench": ("profile", "rounds", "speedup", "train"),
}
SOURCES = (".py", ".yaml", ".jsonl")


def main() -> None:
    """Pick the entry by the first argument and hand the rest to its Hydra app."""
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command in ("-h", "--help", "help"):
        print(usage())
        return
    if command == "completion":
        # Imported here: composing every config is for this command alone.
        from checkpoints.completion import completion

        print(completion(sys.argv[2] if len(sys.argv) > 2 else "bash", list(ENTRIES), FIRST_WORDS), end="")
        return
    if command not in ENTRIES:
        sys.exit(f"headstart: no command {command!r}\n\n{usage()}")
    words = action_words(sys.argv[2:]) if command in FIRST_WORDS else sys.argv[2:]
    sys.argv = [f"headstart {command}", *words]
    if command in ("demo", "export"):
        sys.argv.append(f"hydra.job.name={command}")
        start(command, {"demo": demo, "export": export}[command])
    else:
        # Training's room measures training steps; everything else of `bench` is eval's.
        module = "training.bench" if command == "bench" and "action=train" in words else ENTRIES[command][0]
        # Lightning starts further ranks by what __main__ says it is: `python -m MODULE` with the words that are left.
        sys.modules["__main__"].__spec__ = importlib.util.find_spec(module)
        start(command, importlib.import_module(module).main)


def action_words(words: Sequence[str]) -> list[str]:
    """`export verify --engine vllm` is short for `export action=verify engine=vllm`, `bench profile` for
    `bench action=profile`."""
    words = list(words)
    if words and words[0].isidentifier():
        words[0] = f"action={words[0]}"
    if "--engine" in words[:-1]:
        at = words.index("--engine")
        words[at : at + 2] = [f"engine={words[at + 1]}"]
    return words


def usage() -> str:
    """The commands, one line each."""
    lines = [f"  {name:8} {what}" for name, (_, what) in ENTRIES.items()]
    return "\n".join(
        [
            "usage: headstart COMMAND [key=value ...]",
            "",
            *lines,
            "",
            "headstart COMMAND --help lists the command's keys; source <(headstart completion bash) completes them.",
            f"Errors of what was given are one line, exit status 2; {FULL}=1 shows where they come from.",
        ]
    )


@hydra.main(version_base="1.3", config_path="pkg://conf", config_name="export")
def export(config: DictConfig) -> None:
    """checkpoints.export with what only the target's room can give: weights, folder, and our own measurement."""
    # Imported here: the target's room imports transformers, and `headstart --help` should not wait for it.
    from checkpoints.export import execute
    from data.embedded import EMBEDDED, embedded_folder
    from data.target import Target

    out = Path(HydraConfig.get().runtime.output_dir)
    target_words(config)
    named = None if OmegaConf.is_missing(config.target, "name") else config.target.name
    if config.target_path is None and named is None and config.action in ("export", "verify", "stitch"):
        named = read_drafter(Path(config.drafter_dir)).declared.target["name"]
    if config.target_path is None and named == EMBEDDED:
        config.target_path = str(embedded_folder())
    execute(
        config,
        out,
        lambda path: Target.load(**target_words(config, path)).parts,
        lambda: measure_reference(config, out),
    )


def target_words(config: DictConfig, otherwise: str = "") -> dict[str, Any]:
    """Arguments of Target.load: the group target, its name target_path's where it has none. otherwise: folder or hub id
    where neither names a target. ValueError for keys that are not the group's."""
    from data.target import TargetSettings

    group = OmegaConf.merge({"name": config.target_path or otherwise}, config.target)
    return asdict(settings(TargetSettings, cast(DictConfig, group), "target"))


def measure_reference(config: DictConfig, out: Path) -> Path:
    """Draft greedily on the configured prompts, in float32 unless target.dtype says otherwise: what `export verify`
    compares with."""
    from checkpoints.folder import load_drafter
    from data.chat import Template
    from data.suites import load_prompts
    from data.target import Target
    from eval.decoder import DecodeSettings, generate
    from eval.eval_settings import limited
    from eval.metrics import acceptance
    from eval.patient import declared_thinking

    declared = read_drafter(Path(config.drafter_dir)).declared
    words = target_words(config, declared.target["name"])
    target = Target.load(**words | {"dtype": "float32" if words["dtype"] == "auto" else words["dtype"]})
    drafter = load_drafter(Path(config.drafter_dir), target.parts, weights=config.weights)
    num_slots = config.num_slots or drafter.num_slots
    template = Template(target.tokenizer, declared_thinking(declared.data), target.eos_ids)
    prompts = [template.prompt(prompt.messages) for prompt in limited(load_prompts(config.prompts), config.limit)]
    decoding = DecodeSettings(num_slots, config.max_new_tokens, 4)
    answers = generate(target, drafter, prompts, decoding)
    reference = {
        "prompts": prompts,
        "max_tokens": config.max_new_tokens,
        "num_slots": num_slots,
        "tau": acceptance(answers, num_slots).tau_verified,
        "stop_token_ids": list(target.eos_ids),
        "outputs": [answer.tokens for answer in answers],
        "dtype": str(target.dtype).removeprefix("torch."),
    }
    write_json(out / "reference.json", reference)
    return out / "reference.json"


@dataclass(frozen=True)
class DemoSettings:
    """out: folder of everything the demo leaves. stages: overrides of each command, in order; `{out}` is the folder.

    A stage is named after its command; a second one of the same command is COMMAND-NAME.
    """

    out: str
    stages: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = [name for name in self.stages if name.split("-")[0] not in ENTRIES]
        if unknown:
            allowed = ", ".join(ENTRIES)
            raise ValueError(
                f"unknown stage(s) in demo.stages: {', '.join(unknown)}; allowed: {allowed}, or COMMAND-NAME"
            )


@dataclass(frozen=True)
class Stage:
    """One command of the demo. Its mark, stage.json, says what was started and whether it ended."""

    name: str
    command: list[str]
    folder: Path
    fingerprint: str

    @property
    def mark(self) -> Path:
        return self.folder / "stage.json"

    def read_mark(self) -> dict[str, Any] | None:
        return read_json(self.mark) if self.mark.exists() else None

    def finished(self) -> bool:
        """Whether this very stage (same command, sources and earlier stages) ran to its end before."""
        mark = self.read_mark()
        return mark is not None and mark["fingerprint"] == self.fingerprint and mark["seconds"] is not None

    def write_mark(self, seconds: float | None) -> None:
        """seconds: of the run that ended, None while it has not."""
        write_json(self.mark, {"fingerprint": self.fingerprint, "seconds": seconds, "command": self.command})

    def run(self) -> None:
        """Run the command; its output passes through. A killed one goes on; outputs of another stage are removed first.

        SystemExit names the stage when it fails.
        """
        mark = self.read_mark()
        if mark is not None and mark["fingerprint"] != self.fingerprint:
            shutil.rmtree(self.folder)
        self.write_mark(None)
        started = time.monotonic()
        done = subprocess.run([sys.executable, "-m", *self.command], cwd=ROOT, check=False)
        if done.returncode != 0:
            sys.exit(f"demo: {self.name} failed (exit {done.returncode}); `headstart demo` again goes on there")
        self.write_mark(round(time.monotonic() - started, 1))


def stages(config: DemoSettings) -> list[Stage]:
    """The demo's commands. A stage's fingerprint covers the sources, its overrides and every stage before it."""
    out = Path(config.out).resolve()
    chain: Any = source_fingerprint()
    planned = []
    for name, overrides in config.stages.items():
        folder = out / name
        command = [
            "headstart",
            name.split("-")[0],
            f"hydra.run.dir={folder}",
            *(text.replace("{out}", str(out)) for text in overrides),
        ]
        chain = fingerprint([chain, command])
        planned.append(Stage(name, command, folder, chain))
    return planned


def source_fingerprint() -> str:
    """Changes when any code or config of the project does: a finished stage of other code does not count."""
    files = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*") if path.suffix in SOURCES)
    return fingerprint([(str(path.relative_to(ROOT)), sha256_file(path)) for path in files])


@hydra.main(version_base="1.3", config_path="pkg://conf", config_name="demo")
def demo(config: DictConfig) -> None:
    """Prepare, train, evaluate and export on the embedded target; leaves report.json and a table on the screen."""
    known_groups(config, "out", "stages")
    plan = settings(DemoSettings, config, "demo")
    out = Path(plan.out).resolve()
    record(out, config)
    console = Console()
    for stage in stages(plan):
        if stage.finished():
            console.print(f"[dim]{stage.name}: finished before, not run again[/dim]")
            continue
        console.rule(stage.name)
        console.print(" ".join(stage.command), style="dim", soft_wrap=True)
        stage.run()
    report = demo_report(out, list(plan.stages))
    write_json(out / "report.json", report)
    show(report, console)


def demo_report(out: Path, names: Sequence[str]) -> dict[str, Any]:
    """The evaluation's report with the demo's own keys: seconds by stage, the head's folder and its exports."""
    seconds: dict[str, float] = {}
    exports: dict[str, str] = {}
    for name in names:
        stage, _, engine = name.partition("-")
        seconds[stage] = round(seconds.get(stage, 0.0) + read_json(out / name / "stage.json")["seconds"], 1)
        if stage == "export":
            exports[engine or stage] = str(next((out / name).rglob("config.json")).parent)
    report = read_json(out / "eval" / "report.json")
    return report | {
        "seconds": seconds | {"total": round(sum(seconds.values()), 1)},
        "drafter_dir": str(out / "train" / "drafter"),
        "export_dirs": exports,
    }


def show(report: dict[str, Any], console: Console) -> None:
    """Print what the demo found."""
    table = Table("domain", "tau", "accepted", title="held-out prompts", title_justify="left")
    for domain, tau in sorted(report["domains"].items()):
        table.add_row(domain, f"{tau:.2f}", f"{tau - 1:.2f}")
    table.add_row("all", f"{report['tau']:.2f}", f"{report['accepted']:.2f}", style="bold")
    console.print(table)
    console.print("alpha by slot  " + "  ".join(f"{value:.2f}" for value in report["alpha"]))
    console.print(
        f"greedy output identical on all {report['prompts']} prompts: {report['greedy_identical']} "
        f"(near ties: {report['near_ties']})"
    )
    console.print(
        f"{report['tokens_per_s']:.1f} tokens/s with the drafter, {report['baseline_tokens_per_s']:.1f} without: "
        f"{report['speedup']:.2f}x"
    )
    console.print("seconds        " + "  ".join(f"{name} {value:g}" for name, value in report["seconds"].items()))
    for engine, folder in report["export_dirs"].items():
        console.print(f"export {engine:12} {folder}", soft_wrap=True)


if __name__ == "__main__":
    main()
