"""Files that are whole or absent: atomic writes, checksums, safetensors with metadata."""

import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success flush it to disk and rename it over `path`, else remove it.

    A reader sees the old file or the new one, never a part, and a kill at any moment leaves at most a `.tmp-*` file.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{uuid.uuid4().hex[:8]}-{path.name}")
    try:
        yield temporary
        with open(temporary, "rb") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file, atomically."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write value as indented JSON, atomically. Keys keep their order."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Read JSON; a missing or broken file raises ValueError that names it."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path} does not exist") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not whole JSON: {error}") from error


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file atomically. Tensors are made contiguous and moved to the CPU."""
    with atomic(path) as temporary:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, temporary, metadata)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file whole; ValueError names a missing or torn file. Pickle formats are never read here."""
    try:
        with safe_open(path, framework="pt") as handle:
            return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError as error:
        raise ValueError(f"{path} does not exist") from error
    except Exception as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file, read in 4 MiB pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while piece := handle.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def inside(folder: Path, name: Any) -> Path:
    """The file `name` of a folder, where the name was read from a file of others (an index, an archive). ValueError
    when it leads out of the folder."""
    parts = PurePosixPath(name).parts if isinstance(name, str) else ()
    if not parts or "\\" in name or "\0" in name or PurePosixPath(name).is_absolute() or ".." in parts:
        raise ValueError(f"{folder} names the file {name!r}, which does not lie in it: not opened")
    return Path(folder) / name


def index_of(path: Path) -> dict[str, str]:
    """weight_map of a safetensors or torch index: tensor -> file. ValueError names a file outside the index's
    folder."""
    found = read_json(path)
    places = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(places, dict):
        raise ValueError(f"{path} has no weight_map")
    for file in set(map(str, places.values())):
        inside(Path(path).parent, file)
    return {str(tensor): str(file) for tensor, file in places.items()}


def fingerprint(value: Any) -> str:
    """16 hex digits over the canonical JSON of a value."""
    return hashlib.sha256(_canonical(value)).hexdigest()[:16]


def fingerprint_rows(rows: Iterable[Any]) -> str:
    """fingerprint(list(rows)), with one row's text in memory at a time."""
    digest = hashlib.sha256(b"[")
    for place, row in enumerate(rows):
        digest.update((b", " if place else b"") + _canonical(row))
    digest.update(b"]")
    return digest.hexdigest()[:16]


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False).encode()
