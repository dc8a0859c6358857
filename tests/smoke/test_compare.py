"""`headstart compare` on a tiny target: one budget, one table; finished runs stay, changed ones are refused, a failing
drafter is named and the others go on."""

import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

import headstart
from checkpoints.files import read_json
from checkpoints.folder import load_drafter
from checkpoints.run import settings
from data.conversations import Conversation, read_conversations, write_conversations
from data.features import capture
from data.target import Target
from drafters.contract import Proposal
from drafters.eagle3 import Eagle3
from eval.comparison import Comparison
from tests import checks
from tests.doubles import save_tiny, tiny_target
from training import compare, train
from training.train import DrafterSettings, TrainerSettings, build_drafter, planned_steps

LAYERS = [0, 2, 3]
WANTED_TOKENS = 150


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """A folder as prepare leaves it, and four prompts."""
    folder = tmp_path_factory.mktemp("prepared")
    save_tiny(folder / "target")
    target = Target.load(str(folder / "target"), dtype="float32")
    texts = [(n, checks.random_text(target, 10 + n, seed=n)) for n in range(12)]
    conversations = [Conversation(f"c{n}", "test", text, [0] * 4 + [1] * (len(text) - 4)) for n, text in texts]
    write_conversations(folder / "conversations.jsonl", conversations)
    capture(target, conversations, [0, 1, 2, 3], folder / "features", dtype="float32")
    lines = [
        f'{{"id": "h{n}", "domain": "d{n % 2}", "messages": [{{"role": "user", "content": "ab {n}"}}]}}'
        for n in range(4)
    ]
    (folder / "heldout.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def overrides(prepared: Path, second: str = "drafter.model.layers=[0,1,3]", **more: object) -> list[str]:
    shared = [
        "data@heldout=jsonl", f"heldout.path={prepared / 'heldout.jsonl'}", "drafter.vocabulary=48", "batch.rows=2",
        "trainer.progress=false", "trainer.precision=32-true", "trainer.checkpoint_every=3", "trainer.log_every=1",
        "acceptance.every=3", "acceptance.prompts=4", "acceptance.max_new_tokens=8",
    ]  # fmt: skip
    first = ["drafter=eagle3", f"drafter.model.layers={LAYERS}", "drafter.model.num_slots=2"]
    runs = {"short": first, "long": ["drafter=eagle31", second, "drafter.model.num_slots=3"]}
    base = {
        "target": "any",
        "target.name": prepared / "target",
        "target.dtype": "float32",
        "prepared": prepared,
        "prompts": prepared / "heldout.jsonl",
        "max_new_tokens": 8,
        "batch_size": 2,
        "train": shared,
        "only": "[short,long]",
    } | more
    named = [f"+drafters.{name}={quoted(words)}" for name, words in runs.items()]
    return [f"{key}={quoted(value)}" for key, value in base.items()] + named


def quoted(value: object) -> object:
    """A list of overrides as Hydra's command line takes it."""
    return "[" + ",".join(f"'{word}'" for word in value) + "]" if isinstance(value, list) else value


def run(out: Path, *words: str) -> Comparison:
    out.mkdir(parents=True, exist_ok=True)
    return compare.run(checks.compose_config("compare", *words), out)


@pytest.fixture(scope="module")
def compared(prepared, tmp_path_factory) -> Path:
    """One whole comparison, as a command, by answer tokens; its drafters say how sure they are."""
    out = tmp_path_factory.mktemp("compared")
    really = Eagle3.propose

    def sure(self, state, num_slots, sampling, seeds):
        made = really(self, state, num_slots, sampling, seeds)
        return Proposal(made.tokens, made.probs, torch.full(made.tokens.shape, 0.9))

    words = overrides(prepared, **{"budget.tokens": WANTED_TOKENS, "hydra.run.dir": out})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYDRA_FULL_ERROR", "1")
        patch.setattr(sys, "argv", ["headstart", "compare", *words])
        patch.setattr(Eagle3, "propose", sure)
        headstart.main()
    return out


def test_one_table_for_all(compared, prepared):
    found = read_json(compared / "compare.json")
    assert list(found["drafters"]) == ["short", "long"]
    assert found["failures"] == {}
    assert found["budget"] == {"steps": None, "tokens": WANTED_TOKENS, "minutes": None, "core_minutes": None}
    assert found["prompts"] == 4
    text = (compared / "compare.md").read_text()
    for name, slots, layers in (("short", 2, LAYERS), ("long", 3, [0, 1, 3])):
        entry, folder = found["drafters"][name], compared / "runs" / name
        assert (entry["drafter"]["num_slots"], entry["drafter"]["layers"]) == (slots, layers)
        target = Target.load(str(prepared / "target"), dtype="float32")
        drafter = load_drafter(folder / "drafter", target.parts)
        assert entry["drafter"]["parameters"] == sum(p.numel() for p in drafter.parameters() if p.requires_grad)
        # The step that reaches the budget is the last, for both drafters alike.
        conversations = read_conversations(prepared / "conversations.jsonl")
        plan = train.Plan([len(one.tokens) for one in conversations], 64, 2, seed=0)
        seen = [sum(conversations[i].answer_tokens for row in plan.batch(step) for i in row) for step in range(3)]
        assert sum(seen[:2]) < WANTED_TOKENS <= sum(seen) == entry["trained"]["tokens"]
        assert entry["curve"][-1]["step"] == entry["trained"]["steps"] == 3
        assert set(entry["harness"]) == {"0", "1"}
        greedy = entry["harness"]["0"]
        assert greedy["greedy_identical"] is True
        assert greedy["tau"] == pytest.approx(entry["replay"]["tau"])
        assert greedy["alpha"] == pytest.approx(entry["replay"]["alpha"])
        assert greedy["domains"] == pytest.approx(entry["replay"]["domains"])
        assert min(greedy["draft_ms"], greedy["verify_ms"], greedy["speedup"]) > 0
        assert entry["replay"]["calibration"]["before"]["rounds"] > 0
        assert read_json(folder / "run.json")["config"]["trainer"]["max_tokens"] == WANTED_TOKENS
        assert read_json(folder / "eval-T1" / "report.json")["settings"]["temperature"] == 1.0
        assert [e["sampling"]["temperature"] for e in read_json(folder / "drafter" / "calibration.json")] == [0.0, 1.0]
        assert f"| {name} | " in text
    both = [found["drafters"][name]["harness"]["1"]["baseline_tokens_per_s"] for name in ("short", "long")]
    assert both[0] == both[1], "the baseline is decoded once"
    assert "| drafter | d0 | d1 | all |" in text
    assert "| drafter | replay | T=0 | T=1 |" in text
    assert "speedup T=1" in text
    for plot in ("alpha.png", "learning.png", "domains.png"):
        assert (compared / plot).read_bytes().startswith(b"\x89PNG")
    assert (compared / "answers.safetensors").exists()
    assert not list(compared.rglob(".tmp-*"))


def test_a_run_that_begins_from_a_head_has_its_settings(compared, prepared, tmp_path):
    head = compared / "runs" / "short" / "drafter"
    words = overrides(prepared, **{"budget.steps": 1, "only": "[more]"})
    config = checks.compose_config("compare", *words, f"+drafters.more=['drafter=eagle3','init={head}']")
    given = OmegaConf.masked_copy(config, list(compare.CompareSettings.__dataclass_fields__))
    (one,) = compare.plan(settings(compare.CompareSettings, given, "compare"), config, tmp_path)
    assert one.config.drafter.model.num_slots == 2
    assert one.config.drafter.model.layers == LAYERS


def test_a_finished_run_is_not_trained_or_measured_again(compared, prepared, monkeypatch):
    before = read_json(compared / "compare.json")["drafters"]
    monkeypatch.setattr(compare, "train", None)
    monkeypatch.setattr(compare, "evaluate", None)
    again = run(compared, *overrides(prepared, **{"budget.tokens": WANTED_TOKENS}))
    assert again.failures == {}
    assert again.as_dict()["drafters"] == before


def test_changed_runs_are_refused_before_anything_starts(compared, prepared, monkeypatch):
    monkeypatch.setattr(compare, "train", None)
    with pytest.raises(ValueError, match=r"long: drafter\.model\.layers\[?.* is now") as error:
        run(compared, *overrides(prepared, "drafter.model.layers=[0,2,3]", **{"budget.tokens": WANTED_TOKENS}))
    assert "short" not in str(error.value)
    with pytest.raises(ValueError, match=r"short: budget\.minutes None is now 1; trainer\.max_tokens 150.* \| long: "):
        run(compared, *overrides(prepared, **{"budget.minutes": 1}))


@pytest.mark.parametrize("clock", ["minutes", "core_minutes"])
def test_a_failing_drafter_is_named_and_a_budget_of_time_makes_steps(prepared, tmp_path, capsys, clock):
    words = overrides(prepared, "drafter.model.layers=[0,99]", **{f"budget.{clock}": 0.01, "harness": "false"})
    found = run(tmp_path, *words)
    assert list(found.entries) == ["short"]
    assert list(found.failures) == ["long"]
    assert "99" in found.failures["long"]
    assert "long failed: ValueError" in capsys.readouterr().out
    assert found.entries["short"].harness == {}
    mark = read_json(tmp_path / "runs" / "short" / "run_plan.json")
    assert found.entries["short"].trained["steps"] <= mark["steps"]
    assert read_json(tmp_path / "runs" / "short" / "run.json")["config"]["trainer"]["max_steps"] == mark["steps"]
    assert not (tmp_path / "runs" / "short" / "probe").exists()
    assert read_json(tmp_path / "compare.json")["failures"].keys() == {"long"}


def test_a_killed_run_goes_on_without_decoding_again(prepared, tmp_path, monkeypatch):
    """Killed after its checkpoint at step 3: the next call trains the rest, with the recorded answers."""
    words = overrides(prepared, **{"budget.steps": 6, "harness": "false", "only": "[short]"})
    really = train.AcceptanceCallback.on_train_batch_end

    def killed(self, trainer, *rest):
        if trainer.global_step == 5:
            raise KeyboardInterrupt
        really(self, trainer, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.AcceptanceCallback, "on_train_batch_end", killed)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            run(tmp_path, *words)
    assert read_json(tmp_path / "runs" / "short" / "run_plan.json")["best"] is None
    monkeypatch.setattr(train, "record_answers", None)
    found = run(tmp_path, *words)
    assert found.failures == {}
    assert [at["step"] for at in found.entries["short"].curve] == [3, 6]
    for clock in ("seconds", "cpu_seconds"):
        shown = [at[clock] for at in found.entries["short"].curve]
        assert 0 < shown[0] < shown[1]


def test_steps_of_a_token_limit_by_hand(prepared):
    conversations = read_conversations(prepared / "conversations.jsonl")
    tokens = [one.answer_tokens for one in conversations]
    plan = train.Plan([len(one.tokens) for one in conversations], 64, 1, seed=0)
    first = sum(tokens[index] for index in plan.batch(0)[0])
    second = sum(tokens[index] for index in plan.batch(1)[0])
    for limit, steps in ((1, 1), (first, 1), (first + 1, 2), (first + second, 2), (first + second + 1, 3)):
        assert planned_steps(TrainerSettings(max_tokens=limit), plan, tokens) == steps
    assert planned_steps(TrainerSettings(max_tokens=first + second + 1, max_steps=2), plan, tokens) == 2
    assert planned_steps(TrainerSettings(max_tokens=first + 1, accumulate=2), plan, tokens) == 1
    assert planned_steps(TrainerSettings(max_steps=5), plan, tokens) == 5
    for name, value in {"max_steps": -1, "epochs": 0, "accumulate": 0, "checkpoint_every": 0, "max_minutes": 0}.items():
        with pytest.raises(ValueError, match=rf"trainer\.{name} must be .*, got {value}"):
            TrainerSettings(**{name: value})
    with pytest.raises(ValueError, match="max_tokens must be at least 1"):
        planned_steps(TrainerSettings(max_tokens=0), plan, tokens)


def test_when_all_fail_the_report_says_so(prepared, tmp_path):
    words = overrides(prepared, "drafter.model.layers=[0,99]", **{"budget.steps": 1, "only": "[long]"})
    assert list(run(tmp_path, *words).failures) == ["long"]
    assert "- long: ValueError: " in (tmp_path / "compare.md").read_text()
    assert read_json(tmp_path / "compare.json")["drafters"] == {}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "exactly one of steps, tokens, minutes, core_minutes, above 0; got none"),
        ({"budget.steps": 1, "budget.tokens": 1}, "got steps=1, tokens=1"),
        ({"budget.minutes": 0}, "got minutes=0"),
        ({"budget.steps": 1, "only": "[nobody]"}, "unknown run.s. nobody; drafters has"),
        ({"budget.steps": 1, "train": ["trainer.max_steps=3"]}, "train sets trainer.max_steps"),
        ({"budget.steps": 1, "train": ["target.name=x"]}, "train sets target.name"),
        ({"budget.steps": 1, "train": ["oops"]}, "train must be a list of overrides"),
        ({"budget.steps": 1, "temperatures": "[]"}, "temperatures must not be empty"),
    ],
)
def test_refusals(prepared, tmp_path, more, said):
    with pytest.raises(ValueError, match=said):
        run(tmp_path, *overrides(prepared, **more))


@pytest.mark.parametrize("path", sorted((checks.ROOT / "conf" / "comparison").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_recipe_composes_and_builds(path):
    """Each drafter of a recipe, on a tiny target: its overrides compose, and the class takes them."""
    config = checks.compose_config("compare", "prepared=nowhere", f"comparison={path.stem}")
    target = tiny_target(num_hidden_layers=9)
    assert path.stem == "all" or config.budget.minutes or config.budget.core_minutes
    for name, overrides in config.drafters.items():
        words = [*config.train, *overrides]
        sizes = [word for word in words if "num_key_value_heads" not in word]  # the real target's own
        chosen = checks.compose_config("train", "prepared=nowhere", *sizes).drafter
        drafter = build_drafter(
            settings(DrafterSettings, OmegaConf.merge(chosen, {"vocabulary": None}), name), target, []
        )
        assert drafter.num_slots == chosen.model.num_slots
