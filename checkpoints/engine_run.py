"""Starts an engine in its own environment: a job as JSON in, what the engine saw as JSON out."""

import os
import shutil
import signal
import subprocess
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from checkpoints.files import read_json, write_json
from checkpoints.redact import hide, without_secrets

RUNNER = Path(__file__).with_name("vllm_runner.py")
PYTHON = "HEADSTART_ENGINE_PYTHON"
LOG_TAIL = 4000


@dataclass(frozen=True)
class Run:
    """One engine start. speculative: vLLM's speculative config, None for the target alone. prompts: token ids.
    Greedy."""

    name: str
    model: str
    prompts: list[list[int]]
    max_tokens: int
    max_model_len: int
    speculative: dict[str, Any] | None = None
    dtype: str = "auto"
    max_num_seqs: int = 1
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    enforce_eager: bool = True
    warmup: bool = False
    revision: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Served:
    """What the engine saw. seconds: generation alone. drafts: rounds that had a proposal; accepted_per_slot: of these
    rounds, how many had slot k accepted. error: why it failed, else None."""

    name: str
    outputs: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    start_seconds: float = 0.0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_slot: list[int] = field(default_factory=list)
    error: str | None = None

    @property
    def tau(self) -> float | None:
        """Mean tokens a round, the bonus or corrected token included; None without a drafter."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    @property
    def tokens(self) -> int:
        return sum(map(len, self.outputs))

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def engine_python(configured: str | None = None) -> Path:
    """The engine's interpreter: from the setting, else the environment variable HEADSTART_ENGINE_PYTHON. ValueError
    when neither names an executable."""
    found = configured or os.environ.get(PYTHON)
    if not found:
        raise ValueError(f"no engine environment: run `make engine` and set engine.python, or the variable {PYTHON}")
    path = Path(found).expanduser()
    if not os.access(path, os.X_OK):
        raise ValueError(f"the engine's python {path} is no executable file")
    return path


def serve(
    runs: list[Run], python: Path, *, timeout_s: float = 1800.0, threads: int | None = None, kv_gib: int = 1
) -> list[Served]:
    """Do all runs in one engine process, in order; a failed run comes back with its error.

    threads: OpenMP threads, None leaves the engine's choice. kv_gib: GiB of cache on a CPU. RuntimeError when the
    process dies or outlasts timeout_s, with the end of its log.
    """
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": str(kv_gib), "TOKENIZERS_PARALLELISM": "false"}
    # The engine lives in its own environment: ours must not leak in, and its home must not be asked for models by name.
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        environment.pop(name, None)
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    with tempfile.TemporaryDirectory(prefix="headstart-engine-") as folder:
        job, result, log = (Path(folder) / name for name in ("job.json", "result.json", "log.txt"))
        write_json(job, {"runs": [asdict(run) for run in runs]})
        # A copy: python puts a script's own folder first on its path, and ours holds modules with common names.
        script = shutil.copy(RUNNER, folder)
        command = [str(python), str(script), str(job), str(result)]
        with open(log, "wb") as handle:
            code = _wait(command, handle, environment, folder, timeout_s)
        if code != 0 or not result.exists():
            tail = hide(log.read_text(encoding="utf-8", errors="replace"))[-LOG_TAIL:]
            raise RuntimeError(f"the engine ended with code {code}; its log ends:\n{tail}")
        return [Served(**without_secrets(found)) for found in read_json(result)["runs"]]


def _wait(command: list[str], log: Any, environment: dict[str, str], folder: str, timeout_s: float) -> int | str:
    process = subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=folder, start_new_session=True
    )
    try:
        return process.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"(stopped after {timeout_s:g} s)"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
