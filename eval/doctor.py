"""headstart doctor: my acceptance is low; which convention is wrong?

    headstart doctor drafter_dir=FOLDER target=any target.name=TARGET [prepared=FOLDER] [prompts=FILE.jsonl]

Any head's folder: ours, an export, another tool's. Checks what its files declare against the target, the prompts and
the prepared data, and what it accepts under the declared and under every other convention (eval.diagnoses has the
table). Leaves doctor.json; exit status 1 when something is wrong.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from checkpoints.errors import run_module
from checkpoints.files import write_json
from checkpoints.run import known_groups, record, settings
from data.suites import load_prompts
from data.target import Target, TargetSettings
from eval.casework import Asking, Case, Prepared
from eval.diagnoses import Diagnosis, diagnose
from eval.eval_settings import limited
from eval.patient import admit

FILE = "doctor.json"
MARKS = {"ok": "green", "note": "yellow", "wrong": "bold red", "not judged": "dim"}


@dataclass(frozen=True)
class DoctorSettings:
    """drafter_dir: the head's folder. prepared: folder of the data that it was trained from, null for none. prompts,
    limit: as in `headstart eval`. num_slots, max_new_tokens, batch_size, thinking: see eval.casework.Asking. json:
    print doctor.json instead of the table."""

    drafter_dir: str
    prepared: str | None = None
    prompts: Any = "builtin"
    limit: int | None = 2
    num_slots: int | None = None
    max_new_tokens: int = 64
    batch_size: int = 8
    thinking: bool | None = None
    json: bool = False

    def __post_init__(self) -> None:
        for name in ("num_slots", "max_new_tokens", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"doctor.{name} must be at least 1, got {value}")


@dataclass(frozen=True)
class Findings:
    """All diagnoses of a head on a target."""

    folder: str
    target: dict[str, Any]
    diagnoses: list[Diagnosis]

    @property
    def culprits(self) -> list[str]:
        """The checks that found something wrong."""
        return [one.check for one in self.diagnoses if one.verdict == "wrong"]

    def as_dict(self) -> dict[str, Any]:
        """Keys of doctor.json."""
        return {
            "drafter_dir": self.folder,
            "target": self.target,
            "culprits": self.culprits,
            "checks": {one.check: one.as_dict() for one in self.diagnoses},
        }

    def show(self, console: Console) -> None:
        """The checks as a table, then what to do."""
        table = Table("check", "", "found", title=f"{self.folder} on {self.target['name']}", title_justify="left")
        for one in self.diagnoses:
            table.add_row(one.check, f"[{MARKS[one.verdict]}]{one.verdict}[/]", _plain(one.text))
        console.print(table)
        for one in self.diagnoses:
            if one.verdict == "wrong":
                console.print(f"{one.check}: {one.advice}", markup=False)
        if not self.culprits:
            console.print("nothing is wrong with the head's conventions")


def _plain(text: str) -> str:
    return text.replace("[", "\\[")


def examine(
    target: Target,
    folder: Path,
    asking: Asking,
    prepared: Prepared | None = None,
    watch: Callable[[str], None] | None = None,
) -> Findings:
    """Check a head's folder on a target. watch: told the name of each check before it starts. ValueError when the
    folder holds no head, or nothing can be asked."""
    if not asking.prompts:
        raise ValueError("the doctor needs at least one prompt")
    case = Case(target, admit(folder, target.parts, asking.num_slots), asking, prepared)
    return Findings(str(folder), dict(target.identity), diagnose(case, watch))


def run(config: DictConfig, out: Path, console: Console) -> Findings:
    """The wiring; writes doctor.json and run.json into `out`."""
    own = list(DoctorSettings.__dataclass_fields__)
    known_groups(config, "target", *own)
    plain = {name: config[name] for name in own if name in config}
    chosen = settings(DoctorSettings, plain, "doctor")
    loading = settings(TargetSettings, config.target, "target")
    names: str | Sequence[str] = chosen.prompts if isinstance(chosen.prompts, str) else list(chosen.prompts)
    prompts = limited(load_prompts(names), chosen.limit)
    prepared = None if chosen.prepared is None else Prepared.read(Path(chosen.prepared).expanduser())
    target = Target.load(**asdict(loading))
    asking = Asking(prompts, chosen.thinking, chosen.num_slots, chosen.max_new_tokens, chosen.batch_size)
    with Console(stderr=True).status("reading the head") as status:
        found = examine(
            target,
            Path(chosen.drafter_dir).expanduser(),
            asking,
            prepared,
            lambda name: status.update(f"checking {name}; drafting under other conventions takes the longest"),
        )
    record(out, config, target=target.identity)
    write_json(out / FILE, found.as_dict())
    if chosen.json:
        console.print_json(json.dumps(found.as_dict()))
    else:
        found.show(console)
        console.print(f"doctor         {out / FILE}", soft_wrap=True)
    return found


@hydra.main(version_base="1.3", config_path="pkg://conf", config_name="doctor")
def main(config: DictConfig) -> None:
    """`headstart doctor`: exit status 1 when something is wrong."""
    found = run(config, Path(HydraConfig.get().runtime.output_dir), Console())
    if found.culprits:
        raise SystemExit(1)


if __name__ == "__main__":
    run_module("doctor", "eval.doctor")
