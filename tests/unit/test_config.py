"""Configs: every one composes, debug modes too, and a key that nothing reads fails with its name."""

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf

import headstart

CONF = Path(__file__).resolve().parents[2] / "conf"
PRIMARIES = sorted(path.stem for path in CONF.glob("*.yaml"))
ENTRIES = [name for name in headstart.ENTRIES if name != "demo"]


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def composed(primary: str, *overrides: str) -> DictConfig:
    with initialize_config_module("conf", version_base="1.3"):
        return compose(primary, list(overrides))


def test_every_command_has_its_config():
    assert set(PRIMARIES) == set(headstart.ENTRIES)


@pytest.mark.parametrize("primary", PRIMARIES)
def test_primaries_compose(primary):
    assert len(composed(primary)) > 0


@pytest.mark.parametrize("primary", PRIMARIES)
def test_a_misspelt_override_fails(primary):
    first = next(iter(composed(primary)))
    with pytest.raises(ConfigCompositionException):
        composed(primary, f"{first}_tyop=1")


@pytest.mark.parametrize("option", options("hardware"))
def test_every_hardware_composes(option):
    assert composed("simulate", f"hardware={option}")


@pytest.mark.parametrize(
    "group", ["drafter", "data", "objective", "optimizer", "trainer", "logger", "debug", "experiment"]
)
def test_every_option_of_every_group_composes(group):
    for option in options(group):
        assert composed("train", f"{'data@heldout' if group == 'data' else group}={option}")


@pytest.mark.parametrize("mode", ["overfit", "fast", "cpu"])
def test_debug_modes_change_the_training(mode):
    plain, debug = composed("train"), composed("train", f"debug={mode}")
    assert OmegaConf.to_container(plain, resolve=False) != OmegaConf.to_container(debug, resolve=False)


def test_debug_cpu_keeps_the_target_off_the_gpu():
    """Target.load takes the first GPU unless told otherwise, and the drafter's tensors would be on the CPU."""
    assert composed("train", "debug=cpu").target.device_map == "cpu"


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "qwen3_next"])
def test_targets_that_no_device_holds_are_spread(name):
    assert composed("eval", f"target={name}", "drafter_dir=x").target.device_map == "auto"


# What a command must be told, with values that no later stage could use: the config must fail first.
REQUIRED = {
    "prepare": ("target=any", "target.name=/nowhere"),
    "train": ("target=any", "target.name=/nowhere", "prepared=/nowhere"),
    "eval": ("target=any", "target.name=/nowhere", "drafter_dir=/nowhere"),
    "export": ("drafter_dir=/nowhere", "action=lint"),
    "doctor": ("target=any", "target.name=/nowhere", "drafter_dir=/nowhere"),
    "compare": ("target=any", "target.name=/nowhere", "prepared=/nowhere", "budget.steps=1"),
    "bench": ("target=any", "target.name=/nowhere"),
    "simulate": ("traces=/nowhere",),
}


def run(entry: str, monkeypatch: pytest.MonkeyPatch, folder: Path, *overrides: str) -> None:
    """The entry as a command, in this process, with Hydra's errors let through."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(sys, "argv", ["headstart", entry, f"hydra.run.dir={folder}", *REQUIRED[entry], *overrides])
    headstart.main()


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_unread_group_fails_by_name(entry, monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="tyop"):
        run(entry, monkeypatch, tmp_path, "+tyop.x=1")


def groups(primary: str) -> list[str]:
    config = OmegaConf.to_container(composed(primary), resolve=False)
    return [str(name) for name, value in config.items() if isinstance(value, dict) and value]


@pytest.mark.parametrize(("entry", "group"), [(e, g) for e in ENTRIES if e in PRIMARIES for g in groups(e)])
def test_an_unknown_key_in_a_group_fails_by_name(entry, group, monkeypatch, tmp_path):
    with pytest.raises((ValueError, TypeError), match="tyop"):
        run(entry, monkeypatch, tmp_path, f"+{group}.tyop=1")


def test_an_unknown_command_lists_the_commands(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["headstart", "trian"])
    with pytest.raises(SystemExit, match="prepare(.|\n)*train(.|\n)*eval(.|\n)*export"):
        headstart.main()


def test_help_lists_the_commands(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["headstart", "--help"])
    headstart.main()
    shown = capsys.readouterr().out
    assert [name for name in headstart.ENTRIES if f"\n  {name} " not in shown] == []


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_command_is_a_module_with_a_main(entry):
    module, _ = headstart.ENTRIES[entry]
    assert callable(importlib.import_module(module).main)


def test_demo_stages_name_commands():
    with pytest.raises(ValueError, match="trian"):
        headstart.DemoSettings("out", {"trian": []})
    stages = headstart.stages(headstart.DemoSettings("out", {"prepare": ["a={out}/x"], "train": [], "export-vllm": []}))
    assert [stage.name for stage in stages] == ["prepare", "train", "export-vllm"]
    assert stages[0].command[-1] == f"a={Path('out').resolve()}/x"
    assert stages[2].command[:2] == ["headstart", "export"]


def test_a_stage_is_finished_only_with_the_same_inputs(tmp_path):
    """A changed override re-runs its stage and every later one; an equal one does not."""
    first = headstart.stages(headstart.DemoSettings(str(tmp_path), {"prepare": ["a=1"], "train": []}))
    for stage in first:
        stage.write_mark(None)
    assert [stage.finished() for stage in first] == [False, False]
    for stage in first:
        stage.write_mark(1.0)
    assert [stage.finished() for stage in first] == [True, True]
    changed = headstart.stages(headstart.DemoSettings(str(tmp_path), {"prepare": ["a=2"], "train": []}))
    assert [stage.finished() for stage in changed] == [False, False]
    later = headstart.stages(headstart.DemoSettings(str(tmp_path), {"prepare": ["a=1"], "train": ["b=1"]}))
    assert [stage.finished() for stage in later] == [True, False]


def test_a_killed_stage_goes_on_and_another_starts_anew(tmp_path, monkeypatch):
    """The same stage finds what its killed run left; a changed one finds an empty folder."""
    seen = []

    def pretend(command, **_):
        seen.append((tmp_path / "train" / "half").exists())
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(headstart.subprocess, "run", pretend)
    (stage,) = headstart.stages(headstart.DemoSettings(str(tmp_path), {"train": ["b=1"]}))
    stage.write_mark(None)
    (stage.folder / "half").write_text("left by the killed run")
    stage.run()
    (changed,) = headstart.stages(headstart.DemoSettings(str(tmp_path), {"train": ["b=2"]}))
    changed.run()
    assert seen == [True, False]
    assert changed.finished()
    assert not stage.finished()


def documented() -> list[str]:
    """Every whole `headstart COMMAND key=value ...` line in the code blocks of the README and the docs."""
    lines = []
    for page in (CONF.parent / "README.md", *sorted((CONF.parent / "docs").glob("*.md"))):
        for block in re.findall(r"```[a-z]*\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if (
                    re.match(r"headstart (prepare|train|eval|export|doctor|bench|simulate|demo)\b", line)
                    and "..." not in line
                ):
                    lines.append(line.strip())
    return sorted(set(lines))


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["verify", "--engine", "vllm", "a=1"], ["action=verify", "engine=vllm", "a=1"]),
        (["engine=vllm", "-m"], ["engine=vllm", "-m"]),
        (["--help"], ["--help"]),
        ([], []),
    ],
)
def test_export_takes_its_action_as_a_word(words, meant):
    assert headstart.action_words(words) == meant


@pytest.mark.parametrize("line", documented())
def test_documented_commands_compose(line):
    _, primary, *rest = shlex.split(line, comments=True)
    rest = headstart.action_words(rest) if primary in ("export", "bench") else rest
    overrides = [word for word in rest if not word.startswith(("-", "hydra."))]
    if "-m" in rest:
        overrides = [word.split(",")[0] for word in overrides]
    composed(primary, *overrides)


def test_the_readme_documents_every_step():
    assert {line.split()[1] for line in documented()} >= {"prepare", "train", "eval", "export"}
