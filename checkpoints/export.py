"""headstart export: write, lint, verify or import the folders that engines load; extract and stitch native heads.

    headstart export drafter_dir=DRAFTER engine=vllm            writes RUN/vllm and prints the serve command
    headstart export lint drafter_dir=FOLDER engine=sglang      names what the engine would refuse or get wrong
    headstart export verify drafter_dir=DRAFTER reference=FILE  serves it in vLLM, compares acceptance with ours
    headstart export import drafter_dir=FOREIGN                 writes RUN/drafter, our folder of a foreign head
    headstart export extract target_path=TARGET out=FOLDER      our folder of the target's native MTP head
    headstart export stitch drafter_dir=DRAFTER target_path=TARGET out=FOLDER    the target with our MTP head in it
    headstart export drafter_dir=DRAFTER push=ORG/NAME dry_run=true    and sends it to the hub, private by default
    headstart export push drafter_dir=FOLDER push=ORG/NAME             sends a folder as it is

`-m engine=vllm,vllm_speculators,sglang` does several engines; `engine=transformers` writes what generate() takes.
Verify needs an engine's environment (engine.python). The group `target` says how import, extract and verify load the
target; what needs its head or config alone reads those from its files.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from checkpoints.card import check_license
from checkpoints.engine_entry import DTYPES
from checkpoints.engine_run import engine_python
from checkpoints.engines import ENGINES, Exported, Source, entry_for, export_engine
from checkpoints.files import write_json
from checkpoints.folder import CONFIG, FORMAT, Whole, read_drafter, save_drafter
from checkpoints.foreign import import_head
from checkpoints.hub import push
from checkpoints.lint import lint
from checkpoints.native import extract, find_native
from checkpoints.native_files import Checkpoint
from checkpoints.run import known_groups, record, settings
from checkpoints.target_files import target_config, target_head
from checkpoints.verify import SUPPORTED, Reference, verify
from drafters.contract import TargetParts

ACTIONS = ("export", "lint", "verify", "import", "extract", "stitch", "push")
GROUPS = (
    "action",
    "drafter_dir",
    "target_path",
    "out",
    "dtype",
    "weights",
    "num_slots",
    "layer_convention",
    "reference",
    "prompts",
    "limit",
    "max_new_tokens",
    "tolerance",
    "push",
    "private",
    "license",
    "dry_run",
    "engine",
    "target",
)


@dataclass(frozen=True)
class EngineSettings:
    """name: vllm, vllm_speculators, sglang or transformers. python: interpreter of the engine's environment.
    max_num_seqs: requests at a time in verify. timeout_s: of verify."""

    name: str
    python: str | None = None
    max_num_seqs: int = 1
    timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        if self.name not in ENGINES:
            raise ValueError(f"engine.name must be one of {', '.join(ENGINES)}, got {self.name!r}")


@dataclass(frozen=True)
class ExportSettings:
    """action: export, lint, verify, import, extract, stitch or push. drafter_dir: our drafter's folder (lint,
    import: any head's; extract reads none). target_path: folder or hub id of the target as the engine opens it,
    null for target.name, or the one the drafter declares. hub: revision and trust_remote_code of the group target.
    out: folder that extract and stitch write, null for one in the run's. dtype: of the exported tensors, null for
    the drafter's own. weights: null, int8 or int4, or with a group int4:64 (see checkpoints.weights). num_slots,
    layer_convention: of an imported head (see import_head; num_slots also of an extracted one); verify drafts
    num_slots, null for the drafter's own. reference: what our harness measured (see checkpoints.verify.Reference);
    without one it is measured on `limit` prompts of each domain of `prompts` (builtin or a JSONL file),
    max_new_tokens each. tolerance: largest relative difference in tau. push: repository of the hub that the written
    (or, with action=push, the given) folder goes to, null for none; private: unless false; dry_run: list only.
    license: of the model card, the hub's identifier, null for unknown."""

    action: str
    drafter_dir: str = ""
    target_path: str | None = None
    out: str | None = None
    dtype: str | None = None
    weights: str | None = None
    num_slots: int | None = None
    layer_convention: str | None = None
    reference: str | None = None
    prompts: str = "builtin"
    limit: int | None = 4
    max_new_tokens: int = 64
    tolerance: float = 0.02
    push: str | None = None
    private: bool = True
    license: str | None = None
    dry_run: bool = False
    hub: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise ValueError(f"action must be one of {', '.join(ACTIONS)}, got {self.action!r}")
        check_license(self.license)
        if self.push is None and (self.action == "push" or self.dry_run):
            raise ValueError("push=ORGANISATION/NAME says where to send the folder")
        if self.push is not None and self.action not in ("push", "export", "stitch"):
            raise ValueError(f"push goes with action=export, stitch or push, not {self.action}")
        if not self.drafter_dir and self.action != "extract":
            raise ValueError(f"action={self.action} needs drafter_dir, the head's folder")
        if not self.target_path and self.action == "extract":
            raise ValueError("action=extract needs target_path, the folder of a target with a native head")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(f"dtype must be null or one of {', '.join(DTYPES)}, got {self.dtype!r}")


@hydra.main(version_base="1.3", config_path="pkg://conf", config_name="export")
def main(config: DictConfig) -> None:
    """Hydra entry. Import needs the target's weights, so it runs as `headstart export import`, which hands in a
    loader."""
    execute(config, Path(HydraConfig.get().runtime.output_dir))


def execute(
    config: DictConfig,
    out: Path,
    load_target: Callable[[str], TargetParts] | None = None,
    measure: Callable[[], Path] | None = None,
) -> None:
    """Do the configured action; files go into `out`. load_target opens a target by name or folder (import and extract
    need it). measure writes the reference of a verify that names none; it is asked when all else is ready.

    SystemExit with the findings when lint finds a fault or verify disagrees.
    """
    known_groups(config, *GROUPS)
    engine = settings(EngineSettings, config.engine, "engine")
    wanted = settings(ExportSettings, _plain(config), "export")
    if wanted.action == "verify":
        if wanted.reference is None and measure is None:
            raise ValueError("action=verify needs reference=FILE here; `headstart export verify` measures one itself")
        runnable(engine)
    record(out, config)
    console = Console(soft_wrap=True)
    if wanted.action == "import":
        if load_target is None:
            raise ValueError("action=import needs the target's weights; run `headstart export import ...`")
        bring_in(wanted, out / "drafter", load_target, console)
    elif wanted.action == "extract":
        if load_target is None:
            raise ValueError("action=extract needs the target's identity; run `headstart export extract ...`")
        take_out(wanted, engine.name, Path(wanted.out or out / "drafter"), load_target, console)
    elif wanted.action == "lint":
        check(wanted, engine.name, console)
    elif wanted.action == "push":
        send(wanted, Path(wanted.drafter_dir), console)
    else:
        whole = read_drafter(Path(wanted.drafter_dir))
        if wanted.action == "stitch" and entry_for(engine.name, whole.declared.architecture).whole is None:
            raise ValueError(f"{engine.name} has no target that holds a {whole.declared.architecture!r} head in it")
        folder = Path(wanted.out) if wanted.out and wanted.action == "stitch" else out / engine.name
        exported = write(wanted, whole, engine.name, folder, console)
        if wanted.push is not None:
            send(wanted, exported.folder, console)
        if wanted.action == "verify":
            reference = Path(str(wanted.reference)) if wanted.reference is not None or measure is None else measure()
            prove(wanted, engine, exported, target_path(wanted, whole), reference, console)


def _plain(config: DictConfig) -> dict[str, Any]:
    """Keys of ExportSettings. Of the group target: its name where target_path is null, and how the hub is asked."""
    given = [key for key in GROUPS if key not in ("engine", "target") and key in config]
    plain = {key: config[key] for key in given if not OmegaConf.is_missing(config, key)}
    target = config.get("target") or OmegaConf.create()
    if plain.get("target_path") is None and not OmegaConf.is_missing(target, "name"):
        plain["target_path"] = target.get("name")
    hub = {"revision": target.get("revision"), "trust_remote_code": target.get("trust_remote_code", False)}
    return plain | {"hub": hub}


def runnable(engine: EngineSettings) -> Path:
    """The interpreter that verify runs the engine with. ValueError for an engine that is not run from here, or without
    an environment."""
    if engine.name not in SUPPORTED:
        raise ValueError(f"verify serves {', '.join(SUPPORTED)}; {engine.name} is not run from here")
    return engine_python(engine.python)


def send(wanted: ExportSettings, folder: Path, console: Console) -> None:
    """Send a folder to the hub, or list what would be sent."""
    for line in push(folder, str(wanted.push), private=wanted.private, dry_run=wanted.dry_run).lines():
        console.print(line, markup=False, highlight=False)


def target_path(wanted: ExportSettings, whole: Whole) -> str:
    """The target as an engine opens it: as given, else where the drafter's identity says it was loaded from."""
    declared = whole.declared.target
    return wanted.target_path or declared.get("source") or declared["name"]


def write(wanted: ExportSettings, whole: Whole, engine: str, folder: Path, console: Console) -> Exported:
    """Export for one engine and print its serve command."""
    path = target_path(wanted, whole)
    if wanted.dtype is not None and entry_for(engine, whole.declared.architecture).whole is not None:
        raise ValueError(f"dtype={wanted.dtype}: a head stitched into its target has the target's dtype; leave it null")
    dtype, link = DTYPES[wanted.dtype or whole.declared.dtype], wanted.action == "verify"
    source = Source(whole, path, dtype, lambda: target_head(path, **wanted.hub), link, wanted.weights)
    exported = export_engine(source, engine, folder, wanted.license)
    console.print(f"{engine}: {exported.folder}")
    for note in exported.notes:
        console.print(f"  note: {note}")
    console.print(f"  serve: {exported.command}", markup=False)
    return exported


def check(wanted: ExportSettings, engine: str, console: Console) -> None:
    """Print lint's findings; SystemExit when there is more than notes."""
    folder = Path(wanted.drafter_dir)
    config = None if wanted.target_path is None else target_config(wanted.target_path, **wanted.hub)
    found = lint(folder, engine, config)
    for finding in found:
        console.print(f"{finding.level:8} {finding.text}", markup=False)
    faults = [finding for finding in found if finding.level != "note"]
    if faults:
        raise SystemExit(f"{folder}: {len(faults)} fault(s) for {engine}")
    console.print(f"{folder}: nothing that {engine} would refuse or get wrong")


def prove(
    wanted: ExportSettings, engine: EngineSettings, exported: Exported, path: str, reference: Path, console: Console
) -> None:
    """Serve the export and compare; writes verify.json beside it. SystemExit when tau differs by more than the
    tolerance."""
    found = verify(
        exported.folder,
        path,
        Reference.read(reference),
        runnable(engine),
        hub=wanted.hub,
        tolerance=wanted.tolerance,
        max_num_seqs=engine.max_num_seqs,
        timeout_s=engine.timeout_s,
    )
    write_json(exported.folder.parent / f"verify-{engine.name}.json", found.as_dict())
    console.print(
        f"tau {found.tau:.3f} in {found.engine}, {found.own_tau:.3f} in ours ({found.difference:+.1%}); "
        f"{found.tokens_per_s:.1f} tokens/s drafted, {found.alone_tokens_per_s:.1f} without ({found.speedup:.2f}x); "
        f"greedy answers equal to the target alone: {found.same_as_alone} of {found.prompts}"
    )
    if not found.agrees:
        raise SystemExit(f"acceptance differs by {found.difference:+.1%}, more than {wanted.tolerance:.1%}")


def take_out(
    wanted: ExportSettings, engine: str, folder: Path, load_target: Callable[[str], TargetParts], console: Console
) -> None:
    """Write the target's native head as our own folder, in the states that `engine` serves."""
    path = str(wanted.target_path)
    if find_native(Checkpoint.open(path)) is None:
        raise ValueError(f"{path} has no native MTP head; train a fresh one and stitch it in")
    target = load_target(path)
    found = extract(Path(path), folder, target.config, target.identity or {}, engine=engine, num_slots=wanted.num_slots)
    for note in found.notes:
        console.print(f"  {note}", markup=False)
    console.print(f"drafter: {found.folder} ({CONFIG} of format {FORMAT})")


def bring_in(wanted: ExportSettings, folder: Path, load_target: Callable[[str], TargetParts], console: Console) -> None:
    """Write a foreign head as our own folder, with what was decided about it."""
    if wanted.target_path is None:
        raise ValueError("action=import needs target_path, the target that the head was trained for")
    target = load_target(wanted.target_path)
    convention: Any = wanted.layer_convention
    drafter, notes = import_head(
        Path(wanted.drafter_dir), target, num_slots=wanted.num_slots, layer_convention=convention
    )
    data = {"imported_from": str(wanted.drafter_dir), "chat_template": "unknown", "thinking": "unknown"}
    save_drafter(folder, drafter, target_identity=target.identity or {}, data=data)
    for note in notes:
        console.print(f"  {note}", markup=False)
    console.print(f"drafter: {folder} ({CONFIG} of format {FORMAT})")


if __name__ == "__main__":
    main()
