"""How a command ends when what it was given cannot be used: with one line that says what to give, and exit status 2."""

import importlib
import inspect
import linecache
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra.errors import HydraException
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue, OmegaConfBaseException

from checkpoints.redact import hide
from checkpoints.run import ROOT

ROOMS = ("drafters", "checkpoints", "data", "eval", "training", "conf")
# What a path or an interpolation that the user gave raises wherever it is read.
GIVEN = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError, InterpolationResolutionError)
FULL = "HYDRA_FULL_ERROR"  # 1: every error with its traceback, unless
SHORT = "HEADSTART_SHORT_ERRORS"  # is set: then it is there for Hydra alone, also in the commands that this one starts


def run_module(command: str, name: str) -> None:
    """`python -m NAME` as `headstart COMMAND`, with its short errors: the module's entry under its own name, which is
    the job's for Hydra. torchrun and srun start it so."""
    start(command, importlib.import_module(name).main)


def start(command: str, entry: Callable[[], Any]) -> None:
    """Run an entry as the Hydra app that it is, with short errors, of its task before Hydra says a word of them."""
    task = short_errors(command)(inspect.unwrap(entry))
    with short_errors(command):
        hydra.main(version_base="1.3", config_path="pkg://conf", config_name=command)(task)()


@contextmanager
def short_errors(command: str) -> Iterator[None]:
    """An error of what the user gave ends the command with one line and exit status 2; any other keeps its traceback,
    and so do all under HYDRA_FULL_ERROR=1."""
    full = os.environ.get(FULL) == "1" and SHORT not in os.environ
    before = {name: os.environ.get(name) for name in (FULL, SHORT)}
    os.environ.update({FULL: "1"} if full else {FULL: "1", SHORT: "1"})  # let Hydra pass errors on as they are
    try:
        yield
    except Exception as error:
        said = None if full else mistake(error)
        if said is None:
            raise
        print(f"headstart {command}: {hide(said)}", file=sys.stderr)
        raise SystemExit(2) from None
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


def mistake(error: BaseException) -> str | None:
    """One line for an error that the user can mend: a value that was not given, a refused override, a path, or a
    ValueError that this project raises on purpose. None for any other."""
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} needs a value: {error.full_key}=..."
    if isinstance(error, HydraException):
        cause = error.__cause__
        if cause is not None and not isinstance(cause, OmegaConfBaseException | HydraException):
            return mistake(cause)
        return " ".join(f"{error} {cause or ''}".split())
    if isinstance(error, GIVEN) or (isinstance(error, ValueError) and on_purpose(error)):
        return " ".join(str(error).split())
    return None


def on_purpose(error: BaseException) -> bool:
    """Whether an error comes from a raise statement of this project's code, not from a slip in it or from a library."""
    last = [*traceback.walk_tb(error.__traceback__)][-1:]
    for frame, number in last:
        path = Path(frame.f_code.co_filename).resolve()
        own = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in (*ROOMS, "headstart.py")
        return own and linecache.getline(str(path), number).strip().startswith("raise ")
    return False
