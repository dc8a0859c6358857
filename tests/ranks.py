"""Real processes that train together, as torchrun would start them, for the tests of distributed runs.

They come from a fork server that has imported the heavy packages once; each runs the training entry with its overrides
and leaves what it saw in a file.
"""

import json
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["training.train", "tests.checks"])


def free_port() -> int:
    """A port of the loopback interface that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(out: Path, words: Sequence[str], ranks: int, hook: str | None = None) -> list[BaseProcess]:
    """`ranks` processes that train with `words` in folder out. hook: name of a function of tests.rank_hooks, called in
    each before the run, with its rank. What each saw is out/seen-RANK.json, its last words out/words-RANK.txt."""
    out.mkdir(parents=True, exist_ok=True)
    port = free_port()
    found = [_CONTEXT.Process(target=_main, args=(rank, ranks, port, out, list(words), hook)) for rank in range(ranks)]
    for process in found:
        process.start()
    return found


def finish(processes: Sequence[BaseProcess], seconds: float) -> list[int | None]:
    """Exit codes; one that is not there in time is killed, and its code is None."""
    codes: list[int | None] = []
    for process in processes:
        process.join(seconds)
        codes.append(process.exitcode)
        if process.exitcode is None:
            process.kill()
            process.join()
    return codes


def _main(rank: int, ranks: int, port: int, out: Path, words: list[str], hook: str | None) -> None:
    torch.set_num_threads(1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    if ranks > 1:
        os.environ |= {name: str(value) for name, value in names.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}
    with open(out / f"words-{rank}.txt", "w", buffering=1) as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        from tests import checks, rank_hooks
        from training.train import run

        seen: dict[str, list[Any]] = {}
        rank_hooks.watch(seen)
        if hook is not None:
            getattr(rank_hooks, hook)(rank)
        try:
            found = run(checks.compose_config("train", *words), out)
            seen["tau"] = [found["tau"]]
        except BaseException:
            traceback.print_exc()
            sys.stdout.flush()
            raise
        finally:
            (out / f"seen-{rank}.json").write_text(json.dumps(seen))


def seen(out: Path, rank: int) -> dict[str, list[Any]]:
    """What a process saw: ids of each micro-step, gradients of each optimizer step after the division."""
    return json.loads((out / f"seen-{rank}.json").read_text())


def words(out: Path, rank: int) -> str:
    """What a process said."""
    return (out / f"words-{rank}.txt").read_text()
