"""A target's checkpoint folder as it lies on disk: which file holds which tensor, tensors read one at a time, and files
copied byte for byte with some tensors replaced in place."""

import json
import os
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from checkpoints.files import atomic, index_of, read_json
from checkpoints.native_layouts import text_config
from checkpoints.target_files import EMBEDDINGS, HEADS, INDEX, SINGLE

CONFIG = "config.json"
FLOATS = ("F32", "BF16", "F16")
# What a quantised tensor brings along, and names that only quantised ones have.
QUANTISED = ("_scale", "_scale_inv", "_scale_2", ".scales", ".qweight", ".qzeros", ".g_idx", "_packed", ".absmax")
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True)
class Entry:
    """One tensor in a safetensors header. dtype in safetensors' words; begin, end: bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Checkpoint:
    """A target's folder. files: the file of each tensor. config: config.json."""

    folder: Path
    config: dict[str, Any]
    files: dict[str, str]

    @classmethod
    def open(cls, folder: Path | str) -> "Checkpoint":
        """Read config.json and the index, no tensor. ValueError when the folder holds no safetensors checkpoint."""
        folder = Path(folder)
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder; a native head is read from the target's downloaded files")
        config = read_json(folder / CONFIG)
        if (folder / INDEX).exists():
            files = index_of(folder / INDEX)
            lost = sorted({file for file in files.values() if not (folder / file).exists()})
            if lost:
                raise ValueError(f"{folder / INDEX} names {', '.join(lost)}, which is not there")
        elif (folder / SINGLE).exists():
            files = dict.fromkeys(header(folder / SINGLE), SINGLE)
        else:
            raise ValueError(f"{folder} holds neither {INDEX} nor {SINGLE}: it is no safetensors checkpoint")
        return cls(folder, config, files)

    @property
    def text(self) -> dict[str, Any]:
        return text_config(self.config)

    @property
    def depth(self) -> int:
        """Number of decoder layers of the target itself."""
        depth = self.text.get("num_hidden_layers")
        if not isinstance(depth, int):
            raise ValueError(f"{self.folder / CONFIG} has no num_hidden_layers")
        return depth

    @cached_property
    def headers(self) -> dict[str, dict[str, Entry]]:
        return {}

    def entry(self, name: str) -> Entry:
        """Header of one tensor; ValueError when its file lacks it."""
        file = self.files[name]
        if file not in self.headers:
            self.headers[file] = header(self.folder / file)
        if name not in self.headers[file]:
            raise ValueError(f"{self.folder / INDEX} says that {name} lies in {file}, which does not hold it")
        return self.headers[file][name]

    def tensor(self, name: str) -> Tensor:
        """One tensor, read by itself."""
        self.entry(name)
        with safe_open(self.folder / self.files[name], framework="pt") as handle:
            return handle.get_tensor(name)

    def embedding(self) -> str:
        """Name of the input embedding; ValueError when there is none under a known name."""
        return self._first(EMBEDDINGS)

    def head(self) -> str:
        """Name of the output projection, which is the embedding in a tied target."""
        tied = self.text.get("tie_word_embeddings", self.config.get("tie_word_embeddings", False))
        return self._first(HEADS + (EMBEDDINGS if tied else ()))

    def _first(self, wanted: tuple[str, ...]) -> str:
        for name in wanted:
            if name in self.files:
                return name
        raise ValueError(f"{self.folder} holds none of {', '.join(wanted)}")


def header(path: Path) -> dict[str, Entry]:
    """Names, types and byte ranges of a safetensors file. ValueError when it is none, or is cut short."""
    size = path.stat().st_size
    with open(path, "rb") as handle:
        first = handle.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else size
        if length + 8 > size:
            raise ValueError(f"{path} is not a whole safetensors file")
        try:
            fields = json.loads(handle.read(length))
        except ValueError as error:
            raise ValueError(f"{path} is not a safetensors file: {error}") from error
    start, found = 8 + length, {}
    for name, value in fields.items():
        if name == "__metadata__":
            continue
        begin, end = value["data_offsets"]
        if start + end > size:
            raise ValueError(f"{path} is cut short: {name} ends at byte {start + end} of {size}")
        found[name] = Entry(value["dtype"], tuple(value["shape"]), start + begin, start + end)
    return found


def unquantised(checkpoint: Checkpoint, names: list[str], what: str) -> None:
    """ValueError unless all these tensors are ordinary floats (or whole numbers beside them) without scales."""
    for name in sorted(names):
        kind = checkpoint.entry(name).dtype
        if name.endswith(QUANTISED) or kind.startswith(("F8", "F4", "F6", "U8", "I8", "U4", "I4", "I32")):
            method = (checkpoint.config.get("quantization_config") or {}).get("quant_method", "unnamed")
            raise ValueError(
                f"{checkpoint.folder}: {name} ({kind}) is quantised (quantization_config: {method}); {what} works on "
                f"{', '.join(FLOATS)} alone: take the unquantised checkpoint, or one that leaves the MTP head out of it"
            )


def copy_file(source: Path, destination: Path, link: bool) -> None:
    """Copy a file atomically, or put a symbolic link to it."""
    if link:
        destination.unlink(missing_ok=True)
        os.symlink(source.resolve(), destination)
        return
    with atomic(destination) as temporary:
        shutil.copyfile(source, temporary)


def replace_tensors(source: Path, destination: Path, tensors: Mapping[str, Tensor]) -> None:
    """Copy a safetensors file, writing `tensors` over those of their names: same dtype, same shape, same place.

    Every other byte, the header included, stays. ValueError when a tensor does not fit its place.
    """
    entries = header(source)
    with atomic(destination) as temporary:
        shutil.copyfile(source, temporary)
        with open(temporary, "r+b") as handle:
            for name, tensor in tensors.items():
                entry, data = entries[name], raw_bytes(tensor)
                if tuple(tensor.shape) != entry.shape or len(data) != entry.end - entry.begin:
                    raise ValueError(
                        f"{name} of {tuple(tensor.shape)} and {len(data)} bytes does not fit {source.name}, which has "
                        f"{entry.shape} and {entry.end - entry.begin} bytes"
                    )
                handle.seek(entry.begin)
                handle.write(data)


def raw_bytes(tensor: Tensor) -> bytes:
    """A tensor's values as safetensors stores them."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def data_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of all tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def companions(folder: Path) -> list[Path]:
    """The files beside the tensors and config.json, to be copied: tokenizer, templates, licence, remote code. Weights
    in other formats are left behind."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file()
        and not path.name.startswith(".")
        and path.suffix not in (".safetensors", *OTHER_WEIGHTS)
        and path.name != CONFIG
        and not path.name.endswith((".bin.index.json", "headstart.json"))
    )
