"""Errors of what a user gave: one line that says what to give. Errors of this project keep their traceback."""

import importlib
import os
import re
import runpy
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hydra.errors import InstantiationException
from omegaconf import OmegaConf

import headstart
from checkpoints import errors
from checkpoints.run import complete, settings
from data.estimate import Shape, SizeSettings, size_table
from data.layout import StoreSettings


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.delenv(errors.FULL, raising=False)
    monkeypatch.delenv(errors.SHORT, raising=False)


def refused(monkeypatch, capsys, *words: str) -> str:
    """The one line with which a command ends."""
    monkeypatch.setattr(sys, "argv", ["headstart", *words])
    with pytest.raises(SystemExit) as ended:
        headstart.main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert errors.FULL not in os.environ
    return line


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["train"], r"prepared needs a value: prepared=\.\.\."),
        (["train", "prepared=/nowhere"], "/nowhere/conversations.jsonl cannot be read: No such file or directory"),
        (["train", "prepared=x", "heldout=jsonl"], "heldout must be .* 'jsonl'; data@heldout=jsonl chooses an option"),
        (["train", "prepared=x", "data@heldout=jsonl"], r"heldout.path needs a value: heldout.path=\.\.\."),
        (["train", "prepared=x", "batch=8"], "batch must be a mapping of keys, got 8"),
        (["prepare", "data=jsonl"], r"data.path needs a value: data.path=\.\.\."),
        (["prepare", "answers.temperature=hot"], "answers.temperature must be a number, got 'hot'"),
        (["eval"], r"drafter_dir needs a value: drafter_dir=\.\.\."),
        (["train", "seeed=1"], "Could not override 'seeed'.*"),
        (["train", "drafter=nope"], "In 'train': Could not find 'drafter/nope' Available options .* eagle3 .*"),
    ],
)
def test_a_command_ends_with_one_line(words, line, monkeypatch, tmp_path, capsys):
    """Before a target is loaded: it is one that does not exist."""
    at = ["target=any", "target.name=/no/target", f"hydra.run.dir={tmp_path}"]
    said = refused(monkeypatch, capsys, words[0], *at, *words[1:])
    assert re.fullmatch(f"headstart {words[0]}: {line}", said), said


def test_a_module_ends_with_one_line_too(monkeypatch, tmp_path, capsys):
    """As torchrun and srun start it."""
    words = ["target=any", "target.name=/no/target", f"hydra.run.dir={tmp_path}", "prepared=/nowhere"]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    importlib.import_module("training.train")  # so that runpy warns, whatever ran before
    with pytest.warns(RuntimeWarning, match="in sys.modules"), pytest.raises(SystemExit) as ended:
        runpy.run_module("training.train", run_name="__main__", alter_sys=True)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said == "headstart train: /nowhere/conversations.jsonl cannot be read: No such file or directory\n"


def test_full_errors_are_asked_for_by_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv(errors.FULL, "1")
    monkeypatch.setattr(sys, "argv", ["headstart", "train", f"hydra.run.dir={tmp_path}"])
    with pytest.raises(ValueError, match="prepared needs a value"):
        headstart.main()


def test_a_command_started_by_a_command_is_short_too(capsys):
    """The demo's stages inherit what was set for Hydra alone."""

    def stage() -> None:
        assert os.environ[errors.FULL] == "1"
        with errors.short_errors("train"):
            complete(OmegaConf.create({"a": "???"}))

    with pytest.raises(SystemExit):
        errors.short_errors("demo")(stage)()
    assert capsys.readouterr().err == "headstart train: a needs a value: a=...\n"


def test_a_bug_keeps_its_traceback():
    with pytest.raises(KeyError), errors.short_errors("train"):
        {}["x"]


def slip() -> None:
    """An error of a line of ours that raises nothing itself."""
    exec(compile("int('x')", str(headstart.ROOT / "headstart.py"), "exec"))


def bare() -> None:
    raise ValueError("not from a room of this project")


def instantiated() -> None:
    try:
        complete(OmegaConf.create({"a": "???"}))
    except ValueError as error:
        raise InstantiationException("Error in call to target") from error


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (slip, None),
        (bare, None),
        (lambda: {}["x"], None),
        (lambda: Path("/nowhere").read_bytes(), "[Errno 2] No such file or directory: '/nowhere'"),
        (lambda: OmegaConf.create({"a": {"b": "???"}}).a.b, "a.b needs a value: a.b=..."),
        (lambda: OmegaConf.create({"a": "${b}"}).a, "Interpolation key 'b' not found full_key: a object_type=dict"),
        (instantiated, "a needs a value: a=..."),
    ],
)
def test_only_errors_on_purpose_are_one_line(fault, line):
    with pytest.raises(Exception) as found:  # noqa: PT011 (each fault has its own)
        fault()
    assert errors.mistake(found.value) == line


@dataclass(frozen=True)
class Sized:
    path: str
    heat: float = 0.5
    top_k: int | None = None
    on: bool = True
    layers: list[int] | None = None
    words: dict[str, list[str]] = field(default_factory=dict)
    devices: int | str = 1
    kept: Literal["keep", "drop"] = "keep"
    free: Any = None


def test_values_of_the_fields_types_are_taken():
    group = {
        "path": "a",
        "heat": 1,
        "top_k": "${n}",
        "layers": [1],
        "words": {"a": ["b"]},
        "devices": "auto",
        "free": {},
    }
    config = OmegaConf.create({"n": 3, "group": group})
    assert settings(Sized, config.group, "group") == Sized("a", 1, 3, True, [1], {"a": ["b"]}, "auto", "keep", {})


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("path", 5, "text, got 5"),
        ("heat", "hot", "a number, got 'hot'"),
        ("heat", True, "a number, got True"),
        ("top_k", 1.5, "a whole number or null, got 1.5"),
        ("on", 1, "true or false, got 1"),
        ("layers", [1, "a"], r"a list \(each a whole number\) or null"),
        ("layers", "1,2", r"a list \(each a whole number\) or null"),
        ("words", {"a": "b"}, "a mapping, got"),
        ("devices", None, "a whole number or text, got None"),
        ("kept", "no", "keep or drop, got 'no'"),
    ],
)
def test_values_of_other_types_are_refused_by_key(key, value, wanted):
    with pytest.raises(ValueError, match=f"group.{key} must be {wanted}"):
        settings(Sized, {"path": "a", key: value}, "group")


def test_all_values_that_are_missing_are_named_at_once():
    with pytest.raises(ValueError, match=r"^a, b\.c need values: a=\.\.\. b\.c=\.\.\.$"):
        complete(OmegaConf.create({"a": "???", "b": {"c": "???", "d": 1}}))


def test_an_estimate_of_nothing_is_refused():
    with pytest.raises(ValueError, match="nothing to estimate"):
        size_table(Shape("tiny", 8, 4, 60), 3, SizeSettings(), [], StoreSettings(), 1 << 20)
