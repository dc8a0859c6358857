"""`headstart bench train`: the twins agree in what they compute, and the naive one holds all logits at once."""

import io
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from rich.console import Console

import headstart
from checkpoints.files import read_json
from eval.bench import StepSettings
from tests import checks
from training import bench
from training.bench import FILE, Job, Step, apart, build, jobs, matmul_peak, measure, random_batch, random_parts
from training.objectives import Objective, plain_terms, slot_terms

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 12,
    "vocab_size": 500,
}
HOW = StepSettings(None, num_slots=3, tokens=24, repeats=1, shape=SMALL)


def job(name: str, how: StepSettings = HOW, objective: Objective | None = None) -> Job:
    config = checks.compose_config("train", f"drafter={name}", "prepared=nowhere")
    model: Any = OmegaConf.to_container(config.drafter.model)
    model["num_slots"] = how.num_slots
    return Job(name, model, objective or Objective({"hard_ce": 1.0}, {"kind": "uniform"}), None, how)


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_both_forms_compute_one_loss(name: str) -> None:
    torch.manual_seed(0)
    made = job(name)
    parts = random_parts(SMALL, torch.device("cpu"))
    drafter = build(made, parts)
    batch = random_batch(drafter, HOW, parts)
    slots = drafter.slots(batch)
    terms = slot_terms(drafter, slots, batch, parts, made.objective)
    plain = plain_terms(drafter, slots, batch, parts, made.objective)
    assert torch.allclose(terms.loss, plain, rtol=1e-4)
    # 24 tokens, the first 3 a prompt; the last token is no anchor: 20 anchors, 19 and 18 of them with slots 2 and 3.
    assert slots.mask.sum().item() == 20 + 19 + 18


def test_products_are_counted() -> None:
    """The naive twin multiplies everything that ours does, and the unsupervised slots too."""
    ours, naive = (measure(job("eagle3"), form) for form in ("ours", "naive"))  # type: ignore[arg-type]
    assert ours.slots == naive.slots == 57
    assert ours.tokens == 21
    head = 2 * 57 * 32 * 500  # one product of the supervised slots with the head
    assert ours.flops > 3 * head
    assert naive.flops > ours.flops * 0.9
    assert ours.seconds > 0


def test_the_naive_twin_takes_more_memory() -> None:
    """Wide vocabulary, many slots: all logits at once show in the peak of a process of its own."""
    how = StepSettings(None, num_slots=3, tokens=256, repeats=1, shape=SMALL | {"vocab_size": 12000})
    made = job("eagle3", how, Objective({"hard_ce": 1.0}, {"kind": "uniform"}, chunk=64))
    ours, naive = (apart(measure, made, form) for form in ("ours", "naive"))
    whole = ours.slots * 12000 * 4
    assert naive.bytes > whole
    assert ours.bytes < 0.5 * naive.bytes


def test_every_drafter_has_a_job() -> None:
    checks.compose_config("train", "prepared=nowhere")  # leaves Hydra as a command finds it
    from hydra import initialize_config_module

    with initialize_config_module("conf", version_base="1.3"):
        found = jobs(HOW)
        with pytest.raises(ValueError, match="no nosuch; there are dflash"):
            jobs(StepSettings(["nosuch"]))
    assert [one.name for one in found] == checks.DRAFTERS
    assert all(one.model["num_slots"] == 3 for one in found)


def fails(error: Exception) -> None:
    raise error


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_of_its_own() -> None:
    assert apart(pow, 2, 5) == 32
    with pytest.raises(ValueError, match="no"):
        apart(fails, ValueError("no"))
    with pytest.raises(RuntimeError, match="KeyError"):
        apart(fails, KeyError("x"))
    with pytest.raises(RuntimeError, match="out of memory"):
        apart(dies)
    assert matmul_peak(1) > 1e8


def test_one_that_fails_leaves_the_others_their_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed for its memory, say: the naive twin first, then ours."""
    step = Step(1, 1, 1.0, 1, 1)

    def killed(forms: set[str]) -> Any:
        def apart(_: Any, __: Job, form: str) -> Step:
            if form in forms:
                raise RuntimeError("the measuring process ended with status -9: out of memory?")
            return step

        return apart

    monkeypatch.setattr(bench, "apart", killed({"naive"}))
    alone = bench.line(job("medusa"))
    assert (alone.ours, alone.naive) == (step, None)
    assert alone.refused is not None
    assert alone.refused.startswith("naive twin: the measuring process ended")
    monkeypatch.setattr(bench, "apart", killed({"ours", "naive"}))
    none = bench.line(job("medusa"))
    assert (none.ours, none.naive) == (None, None)
    assert none.refused is not None
    console = Console(width=400, record=True, file=io.StringIO())
    bench.show([alone, none], 1e9, console)
    assert console.export_text().count("out of memory") == 2


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match=r"train\.tokens"):
        StepSettings(tokens=1)
    with pytest.raises(ValueError, match=r"train\.shape"):
        StepSettings(shape={"hidden_size": 1})


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [f"train.shape.{name}={value}" for name, value in SMALL.items()]
    words = ["bench", "train", "train.drafters=[medusa]", "train.tokens=24", "train.repeats=1", *sizes]
    monkeypatch.setattr(sys, "argv", ["headstart", *words, f"hydra.run.dir={tmp_path}"])
    headstart.main()
    found = read_json(tmp_path / FILE)
    (row,) = found["rows"]
    assert row["refused"] is None
    assert row["slots_per_s"] > 0
    assert 0 < row["share_of_peak"] < 2
    assert row["speed_over_naive"] > 0
    assert "medusa" in capsys.readouterr().out
