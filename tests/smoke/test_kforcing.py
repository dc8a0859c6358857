"""Push-forward heads on the road: stages 1, 2, 4 through the training entry, lossless and lossy evaluation."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_module
from torch import Tensor

from checkpoints.files import read_json, write_json
from checkpoints.folder import load_drafter, read_drafter, save_drafter
from data.conversations import Conversation, Prompt, write_conversations
from data.features import capture
from data.target import Target
from drafters.contract import Batch
from drafters.kforcing import KForcing
from drafters.sampling import Sampling
from eval import pushforward
from eval.decoder import DecodeSettings, generate
from eval.evaluate import EvalSettings, evaluate
from tests import checks
from tests.doubles import save_tiny, tiny_target
from training.objectives import Objective, slot_terms
from training.stages import run_stages
from training.train import run

LAYERS = [0, 2, 3]
OBJECTIVE = Objective({"hard_ce": 1.0})


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """A folder as prepare leaves it."""
    folder = tmp_path_factory.mktemp("prepared")
    target = Target.load(str(save_tiny(folder / "target")), dtype="float32")
    texts = [checks.random_text(target, 12 + n, seed=n) for n in range(4)]
    conversations = [
        Conversation(f"c{n}", "test", text, [0] * 4 + [1] * (len(text) - 4)) for n, text in enumerate(texts)
    ]
    write_conversations(folder / "conversations.jsonl", conversations)
    capture(target, conversations, LAYERS, folder / "features", dtype="float32")
    write_json(folder / "prepare.json", {"thinking": None})
    row = '{"id": "h", "domain": "d", "messages": [{"role": "user", "content": "ab"}]}'
    (folder / "heldout.jsonl").write_text(row + "\n")
    return folder


def words(prepared: Path) -> list[str]:
    values = {
        "target": "any",
        "target.name": prepared / "target",
        "target.dtype": "float32",
        "drafter": "kforcing",
        "prepared": prepared,
        "drafter.model.layers": LAYERS,
        "drafter.model.block.depth": 1,
        "data@heldout": "jsonl",
        "heldout.path": prepared / "heldout.jsonl",
        "trainer.max_steps": 2,
        "trainer.progress": False,
        "trainer.precision": "32-true",
        "batch.rows": 2,
        "acceptance.every": 2,
        "acceptance.prompts": 1,
        "acceptance.max_new_tokens": 6,
    }
    return [f"{key}={value}" for key, value in values.items()]


@pytest.fixture(scope="module")
def stages(prepared: Path, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("stages")
    found = run_stages(checks.compose_config("train", *words(prepared)), out, [1, 2, 4], share=0.5)
    assert [one["window"] for one in found] == [1, 2, 4]
    return out


def test_stages_build_on_each_other(stages: Path) -> None:
    for window in (1, 2, 4):
        assert read_drafter(stages / f"window-{window}" / "drafter").declared.num_slots == window
        stage = read_json(stages / f"window-{window}" / "run.json")["config"]["drafter"]["stage"]
        half = None if window == 1 else str(stages / f"window-{window // 2}" / "drafter")
        assert stage == (None if half is None else {"half": half, "share": 0.5})


def test_a_stage_goes_on_with_the_same_half_alone(prepared: Path, stages: Path, tmp_path: Path) -> None:
    """Wherever it lies; other weights in the same place are another half."""
    half, moved, out = tmp_path / "half", tmp_path / "moved", tmp_path / "run"
    shutil.copytree(stages / "window-1" / "drafter", half)
    out.mkdir()

    def go_on(place: Path) -> int:
        stage = ["drafter.model.num_slots=2", f"+drafter.stage={{half: {place}}}"]
        return run(checks.compose_config("train", *words(prepared), *stage), out)["step"]

    step = go_on(half)
    assert len(read_json(out / "run.json")["fingerprints"]["run"]["stage.half"]) > 8
    shutil.copytree(half, moved)
    assert go_on(moved) == step
    parts = Target.load(str(prepared / "target"), dtype="float32").parts
    other = load_drafter(half, parts)
    with torch.no_grad():
        next(other.parameters()).add_(1)
    save_drafter(half, other, target_identity=parts.identity)
    with pytest.raises(ValueError, match=r"fingerprint\.stage\.half '\w+' is now '\w+'"):
        go_on(half)
    last = out / "checkpoints" / "last.ckpt"
    old = torch.load(last, weights_only=True)
    del old["config"]["fingerprint.stage.half"]  # as from before it was recorded
    torch.save(old, last)
    assert go_on(half) == step


def test_stages_refuse_what_does_not_double_or_stage(prepared: Path, tmp_path: Path, stages: Path) -> None:
    with pytest.raises(ValueError, match="double"):
        run_stages(checks.compose_config("train", *words(prepared)), tmp_path, [1, 3])
    half = stages / "window-1" / "drafter"
    other = ["drafter=dflash", "drafter.model.num_slots=2", f"+drafter.stage={{half: {half}}}"]
    changed = [word for word in words(prepared) if not word.startswith("drafter=")] + other
    with pytest.raises(ValueError, match="does not learn in stages"):
        run_stages(checks.compose_config("train", *changed), tmp_path, [2])


def test_mistyped_keys_of_stages_are_refused(prepared: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "training.stages", *words(prepared), "+shares=1.0", f"hydra.run.dir={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).resolve().parents[2])
    assert done.returncode != 0
    assert "shares" in done.stderr


def test_evaluation_names_the_verification(prepared: Path, stages: Path) -> None:
    target = Target.load(str(prepared / "target"), dtype="float32")
    drafter = load_drafter(stages / "window-4" / "drafter", target.parts)
    prompts = [Prompt("a", "d", [{"role": "user", "content": "give"}])]
    report = evaluate(target, drafter, prompts, EvalSettings(max_new_tokens=8, temperature=1.0)).as_dict()
    assert report["noise_identical"] == 1.0
    assert report["settings"]["verification"] == "same_noise"
    assert len(report["alpha"]) == 4
    assert report["calibration"] is not None
    with pytest.raises(ValueError, match="proposals need same_noise"):
        evaluate(target, drafter, prompts, EvalSettings(temperature=1.0, verification="rejection"))


@pytest.mark.parametrize("temperature", [0, 1])
def test_lossy_decoding_says_so_and_is_measured(
    temperature: int, prepared: Path, stages: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["target=any", f"target.name={prepared / 'target'}", "target.dtype=float32", "max_new_tokens=9"]
    overrides += [f"drafter_dir={stages / 'window-4' / 'drafter'}", f"prompts={prepared / 'heldout.jsonl'}"]
    with initialize_config_module("conf", version_base="1.3"):
        config = compose("eval", [*overrides, f"temperature={temperature}"])
    found = pushforward.run(config, tmp_path)
    written = read_json(tmp_path / pushforward.FILE)
    assert next(iter(written)) == "lossy"
    assert written["lossy"] is True
    assert written["warning"].startswith("LOSSY")
    assert written["settings"]["verification"] == "none"
    assert written["drafted"]["perplexity"] > 1
    assert written["sampled"]["perplexity"] > 1
    assert 1 <= written["tokens_per_call"] <= 4
    assert len(written["agreement"]) == len(written["agreement_prefix"]) == 4
    assert all(a >= b for a, b in zip(written["agreement"], written["agreement_prefix"], strict=True))
    found.show(pushforward.Console())
    assert capsys.readouterr().out.startswith("LOSSY")


class DrawsAnew(KForcing):
    """Reads other noises than its labels were picked by."""

    def blocks(self, batch: Batch, tokens: Tensor, noise: Tensor, tau: Tensor, branch: Tensor | None = None) -> Tensor:
        return super().blocks(batch, tokens, torch.rand_like(noise), tau, branch)


def agreement(kind: type[KForcing]) -> list[float]:
    """Same-noise agreement by slot on 24 sampled answers after 60 steps, each with other noises."""
    target = tiny_target("llama")
    model = {"num_slots": 2, "layers": LAYERS, "block": {"depth": 1}, "noise": {"greedy": 0.0}}
    drafter = kind(target.parts, None, **model)
    prompt = checks.random_text(target, 6, seed=0)
    made = generate(target, None, [prompt] * 24, DecodeSettings(1, 12, 24, Sampling(1.0), seed=5))
    turns = [[0] * 6 + [1] * len(one.tokens) for one in made]
    samples = [
        checks.sample(target, drafter, prompt + one.tokens, turn, str(n))
        for n, (one, turn) in enumerate(zip(made, turns, strict=True))
    ]
    batch = checks.row_batch([samples[n : n + 6] for n in range(0, 24, 6)], 6 * 18)
    checks.fit(drafter, target, batch, OBJECTIVE, steps=60)
    batch.seed = 100  # noises that no step has seen
    drafter.train()
    terms = slot_terms(drafter, drafter.slots(batch), batch, target.parts, OBJECTIVE)
    return (terms.kept / terms.offered).tolist()


def test_learns_what_noise_decides() -> None:
    """The target's likeliest token has probability 0.15 here on average."""
    assert min(agreement(KForcing)) > 0.3


def test_learns_nothing_from_noise_drawn_anew() -> None:
    assert max(agreement(DrawsAnew)) < 0.3
