"""`headstart doctor` names the planted fault and no other, and finds nothing on the healthy head.

Three heads are trained to the end on a tiny target's answers, so that the right reading accepts nearly everything; then
their folders, their target or their data are spoilt, always consistently: what a config declares is never the witness.
"""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import headstart
from checkpoints.files import read_json, read_tensors, sha256_file, write_json, write_tensors
from checkpoints.folder import CONFIG, TENSORS, save_drafter
from data.collate import Collate
from data.conversations import Conversation, Prompt, write_conversations
from data.features import Sample, capture, observe, with_top
from data.identity import identity_of
from data.layout import StoreSettings
from data.target import Target
from drafters.contract import Batch, Drafter
from drafters.vocabulary import DraftVocabulary
from eval.casework import Asking, Case, Prepared, StoreTruth, answer_spans, compare_store, generation_prompt
from eval.conventions import Fit, Reading, Tally, other_layers, same_rope
from eval.diagnoses import CHECKS, check_features, check_last_state, check_layers
from eval.doctor import Findings, examine
from eval.patient import admit, map_faults, nearest_rows
from tests import checks
from tests.doubles import CHARACTERS, CHAT_TEMPLATE, NUM_LAYERS, save_tiny, tiny_model, tiny_target, tiny_tokenizer
from training.objectives import Objective

WORDS = ("red bird", "two and two", "the sea", "a list of rain")
SWITCHED = CHAT_TEMPLATE.replace(
    "<|im_start|>assistant\n' }}", "<|im_start|>assistant\n' }}{% if enable_thinking %}{{ 'hm, ' }}{% endif %}"
)
SLOTS, LENGTH, STEPS = 3, 20, 120
OBJECTIVE = Objective({"hard_ce": 1.0}, {"kind": "uniform"}, chunk=4096)


def asking(thinking: bool | None = None) -> Asking:
    prompts = [Prompt(f"p{i}", "toy", [{"role": "user", "content": word}]) for i, word in enumerate(WORDS)]
    return Asking(prompts, thinking, max_new_tokens=LENGTH)


@pytest.fixture(scope="module")
def target() -> Target:
    made = tiny_target("llama", seed=5)  # one that answers all four prompts at length
    made.tokenizer.chat_template = SWITCHED
    made.identity = identity_of(made.model, made.tokenizer, "tiny", None) | {
        key: made.identity[key] for key in ("num_layers", "hidden_size", "vocab_size")
    }
    return made


@pytest.fixture(scope="module")
def conversations(target: Target) -> list[Conversation]:
    """The target's own answers in the mode without thinking."""
    case = Case(target, None, asking(False))  # type: ignore[arg-type]
    found = []
    for i, one in enumerate(case.trajectories(False)):
        turns = [0] * one.prompt + [1] * (len(one.tokens) - one.prompt)
        found.append(Conversation(f"c{i}", "toy", one.tokens.tolist(), turns))
    return found


def trained(target: Target, conversations: list[Conversation], name: str, spoil: Any = None, **model: Any) -> Drafter:
    torch.manual_seed(0)
    drafter = checks.build(name, target, num_slots=SLOTS, **model)
    samples: list[Sample] = [one for _, one in observe(target, conversations, drafter.needs.layers, dtype="float32")]
    batch: Batch = Collate(max(len(one.tokens) for one in samples), 1)([[one] for one in samples])
    if spoil is not None:
        spoil(batch)
    checks.fit(drafter, target, batch, OBJECTIVE, STEPS, lr=5e-3)
    return drafter


def saved(folder: Path, target: Target, drafter: Drafter, thinking: bool | None = False) -> Path:
    data = {"prepared": {"thinking": thinking, "chat_template": target.identity["chat_template"]}}
    return save_drafter(folder, drafter, target_identity=target.identity, data=data)


@pytest.fixture(scope="module")
def fused(tmp_path_factory: Any, target: Target, conversations: list[Conversation]) -> Path:
    """Reads three layers; a draft vocabulary of every token that is answered, and some more."""
    said = {t for one in conversations for t, turn in zip(one.tokens, one.turns, strict=True) if turn}
    ids = sorted(said | set(range(20, 64, 2)))
    vocabulary = DraftVocabulary(torch.tensor(ids), 64)
    made = trained(target, conversations, "eagle3", vocabulary=vocabulary)
    return saved(tmp_path_factory.mktemp("fused"), target, made)


@pytest.fixture(scope="module")
def block(tmp_path_factory: Any, target: Target, conversations: list[Conversation]) -> Path:
    """Has mask rows and a slot convention."""
    made = trained(target, conversations, "dflash", block={"depth": 2, "mask_token": 0})
    return saved(tmp_path_factory.mktemp("block"), target, made)


@pytest.fixture(scope="module")
def late(tmp_path_factory: Any, target: Target, conversations: list[Conversation]) -> Path:
    """Reads the last state, and was trained on it as it is before the final norm."""

    def before_the_norm(batch: Batch) -> None:
        for row in range(len(batch.tokens)):
            length = int((batch.documents[row] == 0).sum())
            features = target.forward(batch.tokens[row : row + 1, :length], (NUM_LAYERS - 1,))
            batch.last[row, :length] = features.aux[0, :, 0]

    made = trained(target, conversations, "hass", before_the_norm, train_steps=SLOTS, noise=0.0)
    return saved(tmp_path_factory.mktemp("late"), target, made)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: Any, target: Target, conversations: list[Conversation]) -> Path:
    return prepare(tmp_path_factory.mktemp("prepared"), target, conversations)


def prepare(
    folder: Path, target: Target, conversations: list[Conversation], how: StoreSettings | str = "float32"
) -> Path:
    capture(target, conversations, (0, 2, 3), folder / "features", dtype=how)
    write_conversations(folder / "conversations.jsonl", conversations)
    about = {"target": target.identity, "chat_template": target.identity["chat_template"], "thinking": False}
    write_json(folder / "prepare.json", about)
    return folder


def spoilt(folder: Path, into: Path, change: Callable[[dict[str, Any]], None], drop: tuple[str, ...] = ()) -> Path:
    """A copy of a drafter's folder with a changed config.json, or without some tensors; its checksum is right."""
    shutil.copytree(folder, into, dirs_exist_ok=True)
    config = read_json(into / CONFIG)
    change(config)
    if drop:
        kept = {name: tensor for name, tensor in read_tensors(into / TENSORS).items() if name not in drop}
        write_tensors(into / TENSORS, kept)
        config["tensors"] = sha256_file(into / TENSORS)
    write_json(into / CONFIG, config)
    return into


def diagnosis(found: Findings, check: str) -> Any:
    return next(one for one in found.diagnoses if one.check == check)


def unchanged(config: dict[str, Any]) -> None:
    """No change."""


@pytest.mark.parametrize("kind", ["fused", "block"])
def test_a_healthy_head_has_nothing(kind: str, request: Any, target: Target, prepared: Path) -> None:
    folder = request.getfixturevalue(kind)
    found = examine(target, folder, asking(False), Prepared.read(prepared))
    assert found.culprits == []
    assert list(found.as_dict()["checks"]) == list(CHECKS)
    assert diagnosis(found, "acceptance").evidence["tau"] > 0.8 * (SLOTS + 1)
    assert diagnosis(found, "mask").evidence["fits_by_shift"][0] == 1.0
    assert [one.check for one in found.diagnoses if one.verdict == "not judged"] == []


def wrong_layer(config: dict[str, Any]) -> None:
    config["layers"] = config["settings"]["layers"] = [1, 2, 3]


def rope_theta(config: dict[str, Any]) -> None:
    config["settings"]["layer"]["rope_parameters"]["rope_theta"] = config["rope"]["rope_theta"] = 30.0


def slot_convention(config: dict[str, Any]) -> None:
    config["slot_convention"] = config["settings"]["slot_convention"] = "anchor_first"


def mask_token(config: dict[str, Any]) -> None:
    config["mask_token"] = config["settings"]["block"]["mask_token"] = 1


@pytest.mark.parametrize(
    ("kind", "fault", "culprit", "best"),
    [
        ("fused", wrong_layer, "layers", "[0, 2, 3]"),
        ("fused", rope_theta, "rope", None),
        ("block", slot_convention, "slot_convention", "fill_in"),
        ("block", mask_token, "mask_token", "0"),
    ],
    ids=["wrong_layer", "rope_theta", "slot_convention", "mask_token"],
)
def test_a_convention_is_found_by_drafting(
    kind: str, fault: Any, culprit: str, best: str | None, request: Any, target: Target, tmp_path: Path
) -> None:
    """The config declares the wrong value consistently; the head accepts more under the right one."""
    found = examine(target, spoilt(request.getfixturevalue(kind), tmp_path, fault), asking(False))
    assert found.culprits == [culprit]
    evidence = diagnosis(found, culprit).evidence
    assert evidence["tau_of_best"] > 1.1 * evidence["tau"]
    assert best is None or evidence["best"] == best
    assert culprit in diagnosis(found, culprit).as_dict()["check"]
    assert diagnosis(found, culprit).advice


def test_a_head_trained_before_the_final_norm(late: Path, target: Target) -> None:
    found = examine(target, late, asking(False))
    assert found.culprits == ["last_state"]
    evidence = diagnosis(found, "last_state").evidence
    assert evidence["best"] == "swapped"
    assert evidence["tau_of_best"] > 0.8 * (SLOTS + 1)


def test_missing_maps(fused: Path, target: Target, tmp_path: Path) -> None:
    """Without d2t: t2d still says which tokens; without both: the head's rows do, or nothing."""
    found = examine(target, spoilt(fused, tmp_path / "one", unchanged, ("d2t",)), asking(False))
    assert found.culprits == ["vocabulary_map"]
    taus = diagnosis(found, "vocabulary_map").evidence["tau_by_reading"]
    assert taus["t2d"] > 0.8 * (SLOTS + 1)
    assert taus["ids 0, 1, 2, ..."] < 2
    both = admit(spoilt(fused, tmp_path / "both", unchanged, ("d2t", "t2d")), target.parts)
    assert "there is no d2t and no t2d" in both.about("vocabulary_map")[0]
    assert both.drafter is not None


def test_thinking_mode(fused: Path, target: Target) -> None:
    found = examine(target, fused, asking(True))
    assert found.culprits == ["thinking_mode"]
    taus = diagnosis(found, "thinking_mode").evidence["tau_by_mode"]
    assert taus["False"] > 1.1 * taus["True"]
    # Asked in the template's own default, which is the mode of training, nothing is wrong.
    assert Case(target, admit(fused, target.parts), asking(None)).served is False


def test_thinking_mode_is_read_off_the_data(fused: Path, target: Target, prepared: Path, tmp_path: Path) -> None:
    def silent(config: dict[str, Any]) -> None:
        config["data"] = {}

    case = Case(target, admit(spoilt(fused, tmp_path, silent), target.parts), asking(True), Prepared.read(prepared))
    assert case.trained is False
    assert CHECKS["thinking_mode"](case).verdict == "wrong"


def test_shifted_mask(fused: Path, target: Target, conversations: list[Conversation], tmp_path: Path) -> None:
    moved = [replace(one, turns=[*one.turns[-1:], *one.turns[:-1]]) for one in conversations]
    for one in moved:
        one.turns[0] = 0
    found = examine(target, fused, asking(False), Prepared.read(prepare(tmp_path, target, moved)))
    assert found.culprits == ["mask"]
    assert diagnosis(found, "mask").evidence["fits_by_shift"] == {s: float(s == -1) for s in range(-3, 4)}
    assert "shifted by +1" in diagnosis(found, "mask").text


def test_foreign_tokenizer(fused: Path, target: Target) -> None:
    """The same weights and template, other ids for the same letters."""
    other = tiny_tokenizer()
    state = json.loads(other.backend_tokenizer.to_str())
    letters = {character: 4 + i for i, character in enumerate(reversed(CHARACTERS))}
    state["model"]["vocab"] |= letters
    other.backend_tokenizer.__setstate__(json.dumps(state).encode())
    other.chat_template = SWITCHED
    found = examine(Target(target.model, other, "foreign"), fused, asking(False))
    assert found.culprits == ["tokenizer"]
    assert diagnosis(found, "tokenizer").evidence["declared"] == target.identity["tokenizer"]
    assert diagnosis(found, "layers").verdict == "not judged"


def test_other_target_weights(fused: Path, target: Target, prepared: Path) -> None:
    other = Target(tiny_model("llama", seed=1), target.tokenizer, "other")
    found = examine(other, fused, asking(False), Prepared.read(prepared))
    assert found.culprits == ["target_weights"]
    assert diagnosis(found, "target_weights").evidence["tau"] < 2
    assert "the feature store is of" in diagnosis(found, "target_weights").text


def test_a_foreign_store_says_nothing_of_the_head(
    fused: Path, target: Target, conversations: list[Conversation], tmp_path: Path
) -> None:
    """The head is this target's, its data were captured with another: the culprit is that alone, and no state of the
    store is held against this target's."""
    other = Target(tiny_model("llama", seed=1), target.tokenizer, "other")
    strange = Prepared.read(prepare(tmp_path, other, conversations))
    found = examine(target, fused, asking(False), strange)
    assert found.culprits == ["target_weights"]
    assert "the feature store is of 'other'" in diagnosis(found, "target_weights").text
    assert "store_head_of_last" not in diagnosis(found, "features").evidence
    assert {diagnosis(found, check).verdict for check in ("layers", "last_state")} == {"not judged"}
    # Held against it all the same, the store differs in everything.
    assert compare_store(target, strange.store).last < 0.9


def test_a_top_k_teacher_of_answers_alone_is_healthy(
    fused: Path, target: Target, conversations: list[Conversation], tmp_path: Path
) -> None:
    """Such a store has no last state, and none of its rows where nothing is taught."""
    how = StoreSettings("float32", topk=4, teacher_at="answers")
    found = examine(target, fused, asking(False), Prepared.read(prepare(tmp_path, target, conversations, how)))
    assert found.culprits == []
    assert diagnosis(found, "features").evidence["store_head_of_last"] == 1.0


class Kept(list[Sample]):
    """A store of answers' four most likely tokens, in memory."""

    layers = (0, 2)
    layout = SimpleNamespace(last=None, teacher_at="answers")


def test_a_top_k_teacher_of_other_tokens_is_found(
    fused: Path, target: Target, conversations: list[Conversation]
) -> None:
    """The fourth most likely token stands first; where nothing is taught anything may stand."""
    read = observe(target, conversations, (0, 2), dtype="float32")
    store = Kept(with_top(one, target.parts, 4) for _, one in sorted(read, key=lambda pair: pair[0]))
    for one in store:
        assert one.top_ids is not None
        one.top_ids[one.turns == 0] = -1
    truth = compare_store(target, store)  # type: ignore[arg-type]
    assert (truth.last, truth.normed) == (1.0, 0.0)
    assert truth.layers[2][0] == 2
    case = Case(target, admit(fused, target.parts), asking(False))
    case.__dict__ |= {"store_truth": truth, "truth": 1.0}
    assert check_features(case).verdict == "ok"
    for one in store:
        assert one.top_ids is not None
        one.top_ids = one.top_ids.roll(1, -1)
    case.__dict__ |= {"store_truth": compare_store(target, store)}  # type: ignore[arg-type]
    found = check_features(case)
    assert found.verdict == "wrong"
    assert "on 0.0% of positions" in found.text


def test_a_changed_file_is_no_convention(fused: Path, target: Target, tmp_path: Path) -> None:
    def checksum(config: dict[str, Any]) -> None:
        config["tensors"] = "0" * 64

    case = Case(target, admit(spoilt(fused, tmp_path, checksum), target.parts), asking(False))
    assert CHECKS["files"](case).verdict == "wrong"
    assert CHECKS["vocabulary_map"](case).verdict == "ok"
    assert CHECKS["acceptance"](case).evidence["tau"] > 0.8 * (SLOTS + 1)


def test_a_folder_without_a_head(tmp_path: Path, target: Target) -> None:
    with pytest.raises(ValueError, match="holds no head"):
        examine(target, tmp_path, asking())


@pytest.mark.parametrize(
    ("truth", "check", "verdict"),
    [
        (StoreTruth(1.0, 0.1, {0: (0, 0.0, 0.0)}), check_last_state, "ok"),
        (StoreTruth(0.2, 1.0, {0: (0, 0.0, 0.0)}), check_last_state, "wrong"),
        (StoreTruth(1.0, 0.1, {0: (1, 0.001, 0.7)}), check_layers, "wrong"),
        (StoreTruth(1.0, 0.1, {0: (1, 0.010, 0.011)}), check_layers, "ok"),
    ],
    ids=["sound", "before_the_norm", "one_layer_off", "twins"],
)
def test_a_store_is_read(truth: StoreTruth, check: Any, verdict: str, fused: Path, target: Target) -> None:
    case = Case(target, admit(fused, target.parts), asking(False))
    case.__dict__ |= {"store_truth": truth, "found": None}
    assert check(case).verdict == (verdict if verdict == "wrong" else "not judged")


def test_command_writes_json_and_fails(
    fused: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through Hydra, on a target folder that is not the head's: the template has no switch there, the weights are
    others."""
    prompts = tmp_path / "prompts.jsonl"
    row = {"id": "p", "domain": "toy", "messages": [{"role": "user", "content": "rain"}]}
    prompts.write_text(json.dumps(row) + "\n")
    model = save_tiny(tmp_path / "target", seed=1)
    keys = ["target=any", f"target.name={model}", f"drafter_dir={fused}", f"prompts={prompts}", "max_new_tokens=8"]
    monkeypatch.setattr(sys, "argv", ["headstart", "doctor", *keys, "json=true", f"hydra.run.dir={tmp_path / 'run'}"])
    with pytest.raises(SystemExit) as stopped:
        headstart.main()
    assert stopped.value.code == 1
    found = read_json(tmp_path / "run" / "doctor.json")
    assert "target_weights" in found["culprits"]
    assert json.loads(capsys.readouterr().out) == found


def test_generation_prompt_by_hand(target: Target, conversations: list[Conversation]) -> None:
    case = Case(target, None, asking())  # type: ignore[arg-type]
    assert case.modes == [True, False]
    decode = target.tokenizer.decode
    assert decode(generation_prompt(case.template(False))) == "<|im_start|>assistant\n"
    assert decode(generation_prompt(case.template(True))) == "<|im_start|>assistant\nhm, "
    other = answer_spans(conversations, case.template(True))
    assert other is not None
    assert max(other.fits.values()) == 0.0


def test_other_layers_by_hand() -> None:
    found = other_layers((1, 3), 5)
    assert found[:2] == [(0, 2), (2, 4)]
    assert (3, 1) in found
    assert (1, 3) not in found
    assert all(len(set(one)) == 2 and max(one) < 5 for one in found)
    assert other_layers((), 5) == []


def test_beats_needs_size_and_certainty() -> None:
    counts = [10, 10, 10, 10]
    high, low = Fit([30.0, 20.0, 40.0, 30.0], counts), Fit([20.0, 10.0, 30.0, 20.0], counts)
    assert low.mean == 2.0
    assert low.beats(high)
    assert not high.beats(low)
    assert not Fit([29.9, 19.9, 39.9, 29.9], counts).beats(high), "too small a gain"
    assert not Fit([0.0, 22.0, 42.0, 32.0], counts).beats(high), "one answer alone carries it"
    assert Tally([20, 10], [10, 5]).tau == 2.0


def test_surprise_is_the_cross_entropy_of_training(fused: Path, target: Target) -> None:
    """Every supervised slot once, as the plain objective counts them."""
    case = Case(target, admit(fused, target.parts), asking(False))
    beside = case.bedside(False)
    assert beside is not None
    fit = beside.fit(beside.declared)
    lengths = [len(one.tokens) - one.prompt for one in beside.trajectories]
    # An answer of n tokens has n - 1 slots 1, n - 2 slots 2, ...
    assert fit.counts == [sum(max(0, n - k) for k in range(1, SLOTS + 1)) for n in lengths]
    assert fit.mean < 0.2
    other = beside.fit(replace(beside.declared, layers=(1, 2, 3)))
    assert other.mean > fit.mean + 0.1


def test_map_faults_by_hand() -> None:
    ids, size = torch.tensor([1, 4, 9]), 12
    d2t, t2d = ids - torch.arange(3), torch.zeros(12, dtype=torch.bool).index_fill(0, ids, True)
    assert map_faults(d2t, t2d, 3, size) == []
    assert "pass as the target ids 0..2" in map_faults(None, None, 3, size)[0]
    assert "absolute" in map_faults(ids, t2d, 3, size)[0]
    assert "different tokens" in map_faults(torch.tensor([1, 3, 6]), t2d, 3, size)[0]


def test_small_rules() -> None:
    table = torch.randn(12, 8)
    assert nearest_rows(table[[2, 5, 7]] + 0.01, table).tolist() == [2, 5, 7]
    plain = {"rope_theta": 10000.0, "rope_type": "default"}
    assert same_rope({"rope_theta": 10000.0, "factor": None}, plain)
    assert not same_rope({"rope_theta": 500.0}, plain)
    assert Reading((1, 2)).words("layers") == "[1, 2]"
