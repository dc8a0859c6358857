"""What an engine would refuse, or silently get wrong, in a target that carries a native MTP head."""

from pathlib import Path

from checkpoints.files import read_json
from checkpoints.lint_common import Finding
from checkpoints.native import Native, find_native, other_copies, shared_keys
from checkpoints.native_files import CONFIG, Checkpoint, header, unquantised
from checkpoints.native_layouts import declared_modules, layout_of
from checkpoints.target_files import EMBEDDINGS, INDEX, SINGLE

# Where quantisers list what they left as it was.
EXCEPTIONS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "dynamic", "exclude")


def carries_native(folder: Path) -> bool:
    """Whether a folder is a whole target of a family that has native heads, and so no drafter's own folder."""
    folder = Path(folder)
    if not (folder / CONFIG).exists() or not ((folder / INDEX).exists() or (folder / SINGLE).exists()):
        return False
    if layout_of(read_json(folder / CONFIG)) is None:
        return False
    checkpoint = Checkpoint.open(folder)
    last = f"layers.{checkpoint.depth - 1}."
    return any(name in checkpoint.files for name in EMBEDDINGS) and any(last in name for name in checkpoint.files)


def lint_native(folder: Path, engine: str) -> list[Finding]:
    """Findings for one engine. ValueError when the folder cannot be read at all."""
    checkpoint = Checkpoint.open(folder)
    layout = layout_of(checkpoint.config)
    if layout is None:
        raise ValueError(f"{folder} is of no family with a native head")
    if engine not in layout.serves:
        return [Finding("refused", f"{engine} is not known to run {layout.name} heads")]
    try:
        native = find_native(checkpoint)
    except ValueError as error:
        return [Finding("refused", str(error))]
    if native is None:
        return [Finding("refused", f"no tensors of a {layout.name} head: nothing to draft with")]
    found = _tensors(checkpoint, native) + _lost(checkpoint)
    if len(native.modules) > 1 and engine == "vllm":
        text = f"{len(native.modules)} modules: vLLM's V1 runner (CPU) uses the first for every slot, V2 uses all"
        found.append(Finding("note", text))
    declared = declared_modules(layout, checkpoint.config)
    if declared is None:
        found.append(Finding("note", f"none of {', '.join(layout.counts)} is written: engines assume one module"))
    state = layout.serves[engine]
    text = f"{engine} runs it as concat {layout.concat}, reads {state.reads}, recycles {state.recycles}"
    text = f"{text}, zero_first {state.zero_first}, sharing.share {shared_keys(checkpoint, native)}"
    return [*found, Finding("note", text)]


def _tensors(checkpoint: Checkpoint, native: Native) -> list[Finding]:
    found, size = [], checkpoint.text["hidden_size"]
    shapes = {f"{name}.weight": (size,) for name in ("enorm", "hnorm", "norm")} | {"eh_proj.weight": (size, 2 * size)}
    for module in native.modules:
        for name, own in module.items():
            shape = checkpoint.entry(name).shape
            if shape != shapes.get(own, shape):
                found.append(Finding("refused", f"{name} is {shape}, {CONFIG} gives {shapes[own]}"))
    try:
        unquantised(checkpoint, native.names, "training")
    except ValueError as error:
        return [*found, Finding("note", str(error))]
    quantised = checkpoint.config.get("quantization_config")
    left_out = [value for key, value in (quantised or {}).items() if key in EXCEPTIONS and value]
    if quantised and not left_out:
        text = f"the target is quantised and its head is not, but {', '.join(EXCEPTIONS)} leave nothing out"
        found.append(Finding("wrong", f"{text}: the engine builds the head quantised"))
    found += [
        Finding("wrong", f"{name} differs from {own}; engines use the target's")
        for name, own, _ in other_copies(checkpoint, native)
    ]
    return found


def _lost(checkpoint: Checkpoint) -> list[Finding]:
    """Tensors that lie in a file but not in the index: engines never look for them."""
    if not (checkpoint.folder / INDEX).exists():
        return []
    files = sorted({path.name for path in checkpoint.folder.glob("*.safetensors")} | set(checkpoint.files.values()))
    lost = sorted({name for file in files for name in header(checkpoint.folder / file)} - set(checkpoint.files))
    return [Finding("wrong", f"{name} lies in a file, but {INDEX} does not list it") for name in lost]
