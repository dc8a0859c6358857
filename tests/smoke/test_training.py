"""Training through the real entry on a tiny target: kill and resume to the bit, online = offline, a toy drafter in
two files."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from omegaconf import OmegaConf

import drafters
from checkpoints.files import read_json, read_tensors
from checkpoints.lock import LOCK
from data.conversations import read_conversations
from data.features import FeatureStore, capture
from data.module import BatchSettings, OnlineSource, PackedData, StoreSource
from data.target import Target
from drafters.contract import Needs
from drafters.eagle3 import Eagle3
from tests import checks
from tests.prepared import LAYERS, overrides, prepare_tiny, trace, train
from training.keeper import AtomicCheckpoints, WindowTimer
from training.module import DrafterModule
from training.train import feature_source, held_features, run, settings_of_init


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    return prepare_tiny(tmp_path_factory.mktemp("prepared"))


def test_trains_and_leaves_a_whole_drafter(prepared, tmp_path):
    found = train(prepared, tmp_path)
    assert Path(found["drafter"]).name == "drafter"
    assert read_json(tmp_path / "drafter" / "config.json")["architecture"] == "eagle3"
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=False)
    assert all(name.startswith("drafter.") for name in saved["state_dict"])
    assert not any("embed" in name for name in saved["state_dict"]), "the target must never be in a checkpoint"
    assert saved["optimizer_states"][0]["state"], "an optimizer without state cannot resume"
    record = read_json(tmp_path / "run.json")
    assert record["fingerprints"]["target"]["weights"]
    assert record["config"]["trainer"]["max_steps"] == 12


@pytest.mark.parametrize("own_drafts", ["none", "replayed"])
def test_stopped_and_resumed_equals_uninterrupted(prepared, tmp_path, own_drafts):
    train(prepared, tmp_path / "whole", self_forcing=own_drafts)
    words = overrides(prepared, self_forcing=own_drafts)
    command = [sys.executable, "-m", "training.train", *words, f"hydra.run.dir={tmp_path / 'killed'}"]
    last = tmp_path / "killed" / "checkpoints" / "last.ckpt"
    running = subprocess.Popen(command, cwd=checks.ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while not last.exists() and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    running.wait()
    assert last.exists(), "the run never reached its first checkpoint"
    subprocess.run(command, cwd=checks.ROOT, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "whole" / "drafter" / name).read_bytes() == (
            tmp_path / "killed" / "drafter" / name
        ).read_bytes()
    whole = trace(tmp_path / "whole")
    assert len(whole) == 12
    assert trace(tmp_path / "killed") == whole
    assert torch.load(last, weights_only=False)["global_step"] == 12


def stamps(out: Path) -> dict[Path, int]:
    """When each file of a run was written; its lock, which every start takes, aside."""
    return {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file() and path.name != LOCK}


def test_a_checkpoint_finds_its_steps_row_in_the_file(prepared, tmp_path, monkeypatch):
    """A run killed right after it wrote a checkpoint goes on behind that step, whose row must not be lost with it."""
    seen, write = [], AtomicCheckpoints.save_checkpoint

    def spied(self, checkpoint, path, storage_options=None):
        write(self, checkpoint, path, storage_options)
        seen.append((checkpoint["global_step"], [int(step) for step, _ in trace(tmp_path)]))

    monkeypatch.setattr(AtomicCheckpoints, "save_checkpoint", spied)
    train(prepared, tmp_path, **{"trainer.max_steps": 4, "trainer.checkpoint_every": 1, "trainer.accumulate": 2})
    assert seen == [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 3, 4])]


def test_resume_with_other_settings_is_refused(prepared, tmp_path):
    """By name, with what to type to go on, before anything in the folder changes."""
    train(prepared, tmp_path, **{"trainer.max_steps": 1})
    before = stamps(tmp_path)
    wanted = r"batch\.anchor_multiple None is now 8; .*optimizer\.lr .* is now 1e-05; batch\.anchor_multiple=null .*"
    with pytest.raises(ValueError, match=wanted + r"optimizer\.lr=0\.\d+ goes on with them"):
        train(prepared, tmp_path, **{"trainer.max_steps": 1, "optimizer.lr": 1e-5, "batch.anchor_multiple": 8})
    assert stamps(tmp_path) == before


def test_other_spellings_of_the_same_folders_resume(prepared, tmp_path, monkeypatch):
    out, linked = tmp_path / "run", tmp_path / "linked"
    train(prepared, out, **{"trainer.max_steps": 1})
    linked.symlink_to(prepared)
    monkeypatch.chdir(prepared)
    words = {"prepared": "./", "target.name": f"{linked}/target/", "heldout.path": "heldout.jsonl"}
    assert train(prepared, out, **{"trainer.max_steps": 1} | words)["step"] == 1


def test_a_warm_start_multiplies_exactly(prepared, tmp_path, monkeypatch):
    """On a GPU `high` means TF32; steps may use it, equations that are solved may not."""
    seen, solve, step = [], Eagle3.warm_start_on, DrafterModule.training_step

    def solved(self, batch):
        seen.append(torch.get_float32_matmul_precision())
        return solve(self, batch)

    def stepped(self, batch, index):
        seen.append(torch.get_float32_matmul_precision())
        return step(self, batch, index)

    monkeypatch.setattr(Eagle3, "warm_start_on", solved)
    monkeypatch.setattr(DrafterModule, "training_step", stepped)
    train(prepared, tmp_path, **{"trainer.max_steps": 1, "drafter.warm_start": True})
    assert seen == ["highest", "high"]


def test_a_trained_head_is_trained_on(prepared, tmp_path):
    """init: training goes on from a head's tensors and its draft vocabulary; another model is refused by name."""
    train(prepared, tmp_path / "first")
    head = tmp_path / "first" / "drafter"
    words = {"init": head, "drafter.vocabulary": 16, "trainer.max_steps": 1, "optimizer.lr": 0, "optimizer.muon_lr": 0}
    train(prepared, tmp_path / "second", **words)
    first, second = (read_tensors(tmp_path / run / "drafter" / "model.safetensors") for run in ("first", "second"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(ValueError, match=r"init .*drafter was made with other settings of drafter\.model: num_slots 3"):
        train(prepared, tmp_path / "third", **words | {"drafter.model.num_slots": 2})
    # What shapes training alone may be another.
    train(prepared, tmp_path / "fourth", **words | {"drafter.model.keep": 0.5})
    assert read_json(tmp_path / "fourth" / "drafter" / "config.json")["settings"]["keep"] == 0.5


def test_a_head_brings_its_settings(prepared, tmp_path):
    """init alone is enough; what is typed stays and must be the head's; another class is refused."""
    train(prepared, tmp_path / "first", **{"trainer.max_steps": 1, "drafter.model.num_slots": 2})
    head = tmp_path / "first" / "drafter"
    plain = [word for word in overrides(prepared, **{"trainer.max_steps": 1}) if not word.startswith("drafter.model")]

    def composed(*typed: str):
        words = [*plain, f"init={head}", *typed]
        config = checks.compose_config("train", *words)
        return config, settings_of_init(config, words)

    config, lines = composed()
    assert "num_slots 7 is now 2" in lines
    assert config.drafter.model.layers == LAYERS
    assert run(config, tmp_path / "second")["tau"] >= 1.0
    assert read_json(tmp_path / "second" / "run.json")["config"]["drafter"]["model"]["num_slots"] == 2
    config, _ = composed("drafter.model.num_slots=4", "drafter.model.switches.fc_norm=true")
    assert (config.drafter.model.num_slots, config.drafter.model.switches.fc_norm) == (4, True)
    with pytest.raises(ValueError, match=r"num_slots 2 is now 4; .*give the head's own values"):
        run(config, tmp_path / "third")
    with pytest.raises(ValueError, match=r"holds a head of drafters\.eagle3, .*medusa: drafter=eagle3"):
        composed("drafter=medusa")


def test_a_checkpoint_that_does_not_exist_is_refused(prepared, tmp_path):
    with pytest.raises(ValueError, match="nowhere.ckpt"):
        train(prepared, tmp_path, resume="nowhere.ckpt")


def test_accumulation_equals_larger_rows(prepared, tmp_path):
    """Eight rows at once equal two times four: one normaliser for the window."""
    one = train(prepared, tmp_path / "one", **{"batch.rows": 4, "trainer.max_steps": 1, "acceptance.every": 1})
    two = train(
        prepared,
        tmp_path / "two",
        **{"batch.rows": 2, "trainer.accumulate": 2, "trainer.max_steps": 1, "acceptance.every": 1},
    )
    first, second = (read_tensors(Path(found["drafter"]) / "model.safetensors") for found in (one, two))
    assert all(torch.allclose(first[name].float(), second[name].float(), atol=2e-4) for name in first)


def test_online_and_offline_batches_are_the_same(prepared):
    target = Target.load(str(prepared / "target"), dtype="float32")
    store = FeatureStore.open(prepared / "features", target.identity, LAYERS)
    conversations = read_conversations(prepared / "conversations.jsonl")
    offline = PackedData(StoreSource(store), BatchSettings(rows=2))
    online = PackedData(OnlineSource(target, conversations, LAYERS, "float32", 4096), BatchSettings(rows=2))
    offline.total = online.total = 3
    for one, other in zip(offline.train_dataloader(), online.train_dataloader(), strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.anchors, other.anchors)
        assert torch.allclose(one.aux, other.aux, atol=1e-4)
        assert torch.allclose(one.lse, other.lse, atol=1e-4)


@pytest.mark.parametrize("precision", [None, "float16", "float32"])
def test_online_features_have_the_precision_that_is_asked_for(precision, prepared, tmp_path):
    target = Target.load(str(prepared / "target"), dtype="float32")
    conversations = read_conversations(prepared / "conversations.jsonl")[:3]
    drafter = cast(Any, SimpleNamespace(needs=Needs((0, 2, 3))))
    source = feature_source(
        BatchSettings(features="online", precision=precision), prepared, target, drafter, conversations
    )
    store = capture(target, conversations, LAYERS, tmp_path, dtype=precision or "auto")
    for index, made in enumerate(source.samples([0, 1, 2])):
        assert torch.equal(made.aux, store[index].aux)
        assert torch.equal(made.last, store[index].last)
    held = held_features(source, cast(Any, None), drafter)
    assert held["holds"].startswith(f"layers {precision or 'bfloat16'}, ")


@pytest.mark.parametrize("name", sorted(path.stem for path in (checks.ROOT / "conf" / "experiment").glob("*.yaml")))
def test_every_experiment_trains_a_step(name, prepared, tmp_path):
    keys = {"experiment": name, "trainer.max_steps": 1, "drafter.vocabulary": 48, "acceptance.every": 1}
    assert train(prepared, tmp_path, **keys)["tau"] >= 1.0


@pytest.mark.parametrize("name", ["overfit", "fast", "cpu"])
def test_every_debug_mode_trains(name, prepared, tmp_path):
    keys = overrides(prepared, debug=name)
    free = [k for k in keys if not k.startswith(("trainer.", "acceptance.", "batch."))]
    config = checks.compose_config("train", *free, "trainer.max_steps=2", "trainer.progress=false")
    assert run(config, tmp_path)["tau"] >= 1.0


TOY = """
from torch import nn
from drafters.contract import Drafter, Needs, Proposal, SlotBatch, grid
import torch


class Toy(Drafter):
    'Guesses from the previous token alone: an embedding and a matrix.'

    def __init__(self, target, vocabulary=None, *, num_slots=2):
        super().__init__()
        self.num_slots, self.needs, self.vocabulary = num_slots, Needs((0, 2, 3)), vocabulary
        self.table = nn.Embedding(target.config.vocab_size, 8)
        self.out = nn.Linear(8, len(vocabulary))

    def settings(self):
        return {"num_slots": self.num_slots}

    def slots(self, batch):
        made = grid(batch, self.num_slots)
        return SlotBatch(self.table(made.prev_ids), made.prev_ids, made.target_ids, made.mask, made.teacher)

    def logits(self, hidden, prev_ids):
        return self.out(hidden)

    def begin(self, requests, capacity):
        return {"anchor": torch.zeros(requests, dtype=torch.int64)}

    def observe(self, state, next_ids, aux, last, lengths):
        fresh = next_ids.gather(1, (lengths - 1).clamp_min(0)[:, None])[:, 0]
        state["anchor"] = torch.where(lengths > 0, fresh, state["anchor"])

    def propose(self, state, num_slots, sampling, seeds):
        token, tokens = state["anchor"], []
        for _ in range(num_slots):
            token = self.vocabulary.ids[self.logits(self.table(token), token).argmax(-1)]
            tokens.append(token)
        return Proposal(torch.stack(tokens, 1))
"""


def test_a_drafter_is_one_py_and_one_yaml(prepared, tmp_path, monkeypatch):
    code, conf = tmp_path / "code", tmp_path / "conf" / "drafter"
    code.mkdir()
    conf.mkdir(parents=True)
    (code / "toy.py").write_text(TOY)
    text = """
    model: {_target_: drafters.toy.Toy, num_slots: 2}
    vocabulary: 48
    warm_start: true
    objective: {terms: {hard_ce: 1.0}, weights: {kind: uniform}}
    """
    (conf / "toy.yaml").write_text(textwrap.dedent(text))
    monkeypatch.setattr(drafters, "__path__", [*drafters.__path__, str(code)])
    keys = [k for k in overrides(prepared) if "drafter.model" not in k]
    config = checks.compose_config("train", *keys, "drafter=toy", f"hydra.searchpath=[file://{tmp_path / 'conf'}]")
    OmegaConf.resolve(config)
    found = run(config, tmp_path / "out")
    assert read_json(Path(found["drafter"]) / "config.json")["architecture"] == "toy"


def test_recipes_and_debug_modes_override_the_primary_config():
    config = checks.compose_config("train", "prepared=x", "experiment=smollm2_eagle3", "debug=overfit")
    assert (config.limit, config.batch.rows, config.batch.row_tokens) == (1, 1, 512)


def test_resume_on_other_data_is_refused(prepared, tmp_path):
    """Also where the settings are equal, and only the texts behind them are others; the folder stays as it was."""
    folder, out = tmp_path / "prepared", tmp_path / "run"
    shutil.copytree(prepared, folder)
    words = {"trainer.max_steps": 1, "batch.features": "online", "target.name": folder / "target"}
    train(folder, out, **words)
    before = stamps(out)
    path = folder / "conversations.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:8]))
    with pytest.raises(ValueError, match=r"fingerprint\.data"):
        train(folder, out, **words)
    assert stamps(out) == before
    with pytest.raises(ValueError, match=r"limit None is now 8; limit=null goes on"):
        train(folder, out, **words | {"limit": 8})
    with pytest.raises(ValueError, match="limit must be at least 1 or null, got -1"):
        train(prepared, tmp_path / "other", limit=-1)


def test_a_second_kill_inside_an_accumulation_window_loses_nothing(prepared, tmp_path):
    """Resuming must not write the step it came from again: its window's gradient would be lost."""
    keys = {"trainer.accumulate": 2, "trainer.max_steps": 4, "acceptance.every": 0, "trainer.checkpoint_every": 2}
    train(prepared, tmp_path, **keys)
    last = tmp_path / "checkpoints" / "last.ckpt"
    before = last.stat().st_mtime_ns
    train(prepared, tmp_path, **keys)
    assert last.stat().st_mtime_ns == before


@pytest.mark.parametrize("checkpoint_every", [1, 4000])
def test_a_time_limit_still_leaves_a_measured_drafter(prepared, tmp_path, checkpoint_every):
    """Also when the step at which time is up has been written before it was measured."""
    keys = {"trainer.max_minutes": 0.05, "trainer.max_steps": 5000, "acceptance.every": 0}
    keys["trainer.checkpoint_every"] = checkpoint_every
    assert Path(train(prepared, tmp_path, **keys)["drafter"]).exists()
    assert read_json(tmp_path / "learning_curve.json")[-1]["tokens"] > 0


def test_time_is_up_only_between_optimizer_steps():
    """A stop inside an accumulation window would lose the gradient of its first micro-steps."""
    timer = WindowTimer(timedelta(seconds=0))
    looked: list[int] = []
    trainer = SimpleNamespace(accumulate_grad_batches=3, fit_loop=SimpleNamespace(total_batch_idx=0))
    timer._check_time_remaining = lambda trainer: looked.append(trainer.fit_loop.total_batch_idx)
    for index in range(7):
        trainer.fit_loop.total_batch_idx = index
        timer.on_train_batch_end(trainer, None, None, None, index)
    assert looked == [2, 5]
