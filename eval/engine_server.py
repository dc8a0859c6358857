"""Starts a serving engine on loopback, waits until it is healthy, and ends it with all its children on any way out."""

import os
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import httpx

from checkpoints.redact import hide, without_secrets

HOST = "127.0.0.1"
SUPERVISOR = Path(__file__).with_name("engine_supervisor.py")
GRACE_S, POLL_S, LAST_WORDS_S = 15.0, 0.25, 2.0
LOG_TAIL = 4000
# The engine lives in its own environment: ours must not leak in.
OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
DEFAULTS = {"TOKENIZERS_PARALLELISM": "false", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


@cache
def certificates() -> ssl.SSLContext:
    """Read once: httpx reads them for every client, which costs more than a request to loopback."""
    return httpx.create_ssl_context(trust_env=False)


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as one:
        one.bind((HOST, 0))
        return int(one.getsockname()[1])


def environment() -> dict[str, str]:
    """What a server sees: ours without our Python's paths; defaults where nothing is set."""
    return DEFAULTS | {name: value for name, value in os.environ.items() if name not in OURS}


class Server:
    """A server at `url`, ours or somebody else's. process, log: of one that was started here, else None."""

    def __init__(self, url: str, process: subprocess.Popen[bytes] | None = None, log: Path | None = None) -> None:
        self.url, self.process, self.log = url.rstrip("/"), process, log

    def failure(self, what: str) -> RuntimeError:
        """An error that says what happened, whether the server lives, and where its log is, without secrets."""
        if self.process is None or self.log is None:
            return RuntimeError(hide(f"the server at {self.url} {what}"))
        # A server that drops its connections may take a moment to be gone.
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(LAST_WORDS_S)
        code = self.process.poll()
        life = "it still runs" if code is None else f"it ended with code {code}"
        said = f"the server at {self.url} {what}; {life}; its log {self.log} ends:\n{tail(self.log)}"
        return RuntimeError(hide(said))

    def wait_until_healthy(self, timeout_s: float) -> float:
        """Seconds until GET /health answered 200. RuntimeError when it dies before, or timeout_s pass."""
        started = time.monotonic()
        with httpx.Client(trust_env=False, verify=certificates(), timeout=5.0) as client:
            while time.monotonic() - started < timeout_s:
                if self.process is not None and self.process.poll() is not None:
                    raise self.failure("died while starting")
                if self._healthy(client):
                    return time.monotonic() - started
                time.sleep(POLL_S)
        raise self.failure(f"was not healthy after {timeout_s:g} s")

    def _healthy(self, client: httpx.Client) -> bool:
        try:
            return client.get(f"{self.url}/health").status_code == httpx.codes.OK
        except httpx.TransportError:
            return False


@contextmanager
def started(command: Sequence[str], port: int, log: Path, timeout_s: float) -> Iterator[Server]:
    """A healthy server, started by `command` on loopback port `port`, inside; gone after, however the block ends.

    log: file that takes its output, kept. RuntimeError names it when the server dies or is not healthy in time.
    """
    log = Path(log).resolve()
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as handle:
        handle.write(f"$ {shlex.join(without_secrets(list(command)))}\n".encode())
        handle.flush()
        process = subprocess.Popen(
            [sys.executable, "-I", str(SUPERVISOR), *command],
            stdin=subprocess.PIPE,
            stdout=handle,
            stderr=subprocess.STDOUT,
            env=environment(),
            # Python puts the working folder on its path for -m, and ours holds modules with common names.
            cwd=log.parent,
            start_new_session=True,
        )
    server = Server(f"http://{HOST}:{port}", process, log)
    try:
        server.wait_until_healthy(timeout_s)
        yield server
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the process group to end, then kill what is left of it."""
    if process.poll() is None:
        _signal(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):  # it is killed below
            process.wait(GRACE_S)
    _signal(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _signal(group: int, number: int) -> None:
    with suppress(ProcessLookupError):  # all gone
        os.killpg(group, number)


def tail(log: Path, size: int = LOG_TAIL) -> str:
    """The last characters of a log."""
    return log.read_text(encoding="utf-8", errors="replace")[-size:]
