"""What a store keeps and how: fewer bits, top-k tokens, teachers in answers, prefixes once, conversion, old stores."""

import json
from pathlib import Path

import pytest
import torch

from checkpoints.files import read_json
from data.conversations import Conversation
from data.convert import convert
from data.features import FeatureStore, capture, estimate_bytes, top_truth
from data.layout import Places, Prefixes, StoreSettings, plan_of
from data.target import Target
from tests.doubles import HIDDEN_SIZE, VOCAB_SIZE, tiny_target

LAYERS = (0, 2, 3)
SMALL = 16_000
ALONE = 1  # batch_tokens: a forward for each conversation, since rounding depends on what is read beside it
A, B = [2, 9, 9, 5], [2, 9, 7]


def chat(name: str, tokens: list[int], answered: int) -> Conversation:
    return Conversation(name, "chat", tokens, [0] * (len(tokens) - answered) + [1] * answered)


def conversations(count: int = 8, prefix: int = 10) -> list[Conversation]:
    """Random ends behind one beginning."""
    draw = torch.Generator().manual_seed(0)
    begin = torch.randint(4, VOCAB_SIZE, (prefix,), generator=draw).tolist()
    ends = [torch.randint(4, VOCAB_SIZE, (8 + i,), generator=draw).tolist() for i in range(count)]
    return [chat(f"row-{i}", begin + end, 6) for i, end in enumerate(ends)]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="module")
def plain(target: Target, tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    """bfloat16 layers, float16 last hidden state: what `auto` keeps for a float32 target."""
    return capture(target, conversations(), LAYERS, tmp_path_factory.mktemp("plain"), ALONE, shard_bytes=SMALL)


def sizes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_prefix_tree_by_hand() -> None:
    """2 9 9 5 takes rows 0..3; 2 9 7 shares two and adds row 4; 9 9 begins anew."""
    tree = Prefixes()
    assert tree.add(A) == [0, 1, 2, 3]
    assert tree.known(B) == 2
    assert tree.add(B) == [0, 1, 4]
    assert tree.add([9, 9]) == [5, 6]
    assert tree.add(A) == [0, 1, 2, 3]


def test_places_by_hand() -> None:
    """Answers: the last token of A, the last two of B. The shared second row is taught because B's answer has it."""
    layout = StoreSettings(share_prefixes=True, teacher_at="answers").layout(1, 4, torch.float32)
    places = Places.of([chat("a", A, 1), chat("b", B, 2)], layout)
    assert places.rows.tolist() == [0, 1, 2, 3, 0, 1, 4]
    assert places.owner.tolist() == [0, 0, 0, 0, 1]
    assert places.teacher.tolist() == [-1, 0, -1, 1, 2]
    assert places.teachers == 3


def test_plan_counts_prefixes_once() -> None:
    """float32, D 4, one layer: a row costs 8 + 16 + 16 and 10 a position; 4 rows of A then 1 of B: 200 + 70."""
    layout = StoreSettings("float32", share_prefixes=True).layout(1, 4, torch.float32)
    rows = [chat("a", A, 1), chat("b", B, 1), chat("c", A, 1)]
    assert (layout.feature_bytes + layout.teacher_bytes, layout.position_bytes) == (40, 10)
    assert plan_of(rows, layout, 310) == [(0, 3)]
    assert plan_of(rows, layout, 309) == [(0, 2), (2, 3)]
    assert plan_of(rows, layout, 200) == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize("name", ["fp8", "int12", "int8", "int4"])
def test_kept_in_fewer_bits(target: Target, plain: FeatureStore, tmp_path: Path, name: str) -> None:
    asked = StoreSettings(name)
    store = capture(target, conversations(), LAYERS, tmp_path, ALONE, dtype=asked, shard_bytes=SMALL)
    allowed = {"fp8": 0.03, "int12": 0.002, "int8": 0.02, "int4": 0.2}[name]
    assert read_json(tmp_path / "header.json")["version"] == 2
    for index in range(len(store)):
        ours, exact = store[index], plain[index]
        assert ours.aux.dtype == torch.float32
        error = (ours.aux - exact.aux.float()).norm(dim=-1) / exact.aux.float().norm(dim=-1)
        assert float(error.mean()) < allowed
        assert float((ours.last - exact.last.float()).norm() / exact.last.float().norm()) < 0.002
        for same in ("tokens", "turns", "top1", "lse"):
            assert torch.equal(getattr(ours, same), getattr(exact, same))
    assert store.truth is not None
    assert store.truth >= 0.99
    subset = FeatureStore.open(tmp_path, target.identity, (2,))
    assert torch.equal(subset[1].aux, store[1].aux[:, 1:2])
    none = FeatureStore.open(tmp_path, target.identity, ())
    assert none[1].aux.shape == (len(store[1].tokens), 0, HIDDEN_SIZE)
    assert abs(estimate_bytes(conversations(), 3, HIDDEN_SIZE, asked, SMALL) / sizes(tmp_path) - 1) < 0.02


def test_a_last_hidden_state_of_too_few_bits_is_refused(target: Target, plain: FeatureStore, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="own argmax on only"):
        capture(target, conversations(), LAYERS, tmp_path / "captured", dtype=StoreSettings("int8", "int4:0"))
    with pytest.raises(ValueError, match="own argmax on only"):
        convert(target, plain.folder, tmp_path / "converted", StoreSettings("int8", "int4:0"))


@pytest.mark.parametrize(
    "asked",
    [
        StoreSettings("fp8"),
        StoreSettings("int8", share_prefixes=True, teacher_at="answers"),
        StoreSettings("int4", topk=8),
        StoreSettings("bfloat16", last="float16", share_prefixes=True),
    ],
    ids=str,
)
def test_converted_is_captured_so(target: Target, plain: FeatureStore, tmp_path: Path, asked: StoreSettings) -> None:
    """Byte for byte, so a store that exists answers what a new capture would be worth."""
    captured, converted = tmp_path / "captured", tmp_path / "converted"
    capture(target, conversations(), LAYERS, captured, ALONE, dtype=asked, shard_bytes=SMALL)
    convert(target, plain.folder, converted, asked, shard_bytes=SMALL)
    assert files(converted) == files(captured)
    again = convert(target, plain.folder, converted, asked, shard_bytes=SMALL)
    assert len(again) == len(plain)


def test_only_a_precise_store_is_converted(target: Target, plain: FeatureStore, tmp_path: Path) -> None:
    convert(target, plain.folder, tmp_path / "small", "int8")
    with pytest.raises(ValueError, match="only a store of plain dtypes can be converted"):
        convert(target, tmp_path / "small", tmp_path / "other", "int4")
    with pytest.raises(ValueError, match="capture again"):
        convert(target, plain.folder, tmp_path / "other", "float32")
    with pytest.raises(ValueError, match="weights"):
        convert(tiny_target(seed=1), plain.folder, tmp_path / "other", "int8")
    with pytest.raises(ValueError, match="holds other features: .*store"):
        convert(target, plain.folder, tmp_path / "small", "int4")
    with pytest.raises(ValueError, match="holds other features"):
        convert(target, plain.folder, tmp_path / "small", "auto")


def test_shared_prefixes_are_kept_once(target: Target, plain: FeatureStore, tmp_path: Path) -> None:
    rows = conversations()
    asked = StoreSettings(share_prefixes=True)
    store = capture(target, rows, LAYERS, tmp_path, dtype=asked)
    # 8 conversations of 10 + 8..15 tokens: 172 positions, 7 x 10 of them repeated.
    with_all = sum(len(row.tokens) for row in rows)
    assert with_all == 172
    assert len(Places.of(rows, store.layout).owner) == 172 - 70
    assert sizes(tmp_path) < 0.72 * sizes(plain.folder)
    for index in range(len(rows)):
        ours, exact = store[index], plain[index]
        # Another batch rounds otherwise, by a bit of bfloat16 at most.
        torch.testing.assert_close(ours.aux.float(), exact.aux.float(), rtol=2**-6, atol=2**-6)
        torch.testing.assert_close(ours.last.float(), exact.last.float(), rtol=2**-8, atol=2**-8)
        assert torch.equal(ours.tokens, exact.tokens)
        assert torch.equal(ours.turns, exact.turns)
    assert abs(estimate_bytes(rows, 3, HIDDEN_SIZE, asked) / sizes(tmp_path) - 1) < 0.02


def test_teacher_in_answers_only(target: Target, plain: FeatureStore, tmp_path: Path) -> None:
    asked = StoreSettings(teacher_at="answers")
    store = capture(target, conversations(), LAYERS, tmp_path, ALONE, dtype=asked, shard_bytes=SMALL)
    for index in range(len(store)):
        ours, exact = store[index], plain[index]
        answered = exact.turns > 0
        assert torch.equal(ours.last[answered], exact.last[answered])
        assert bool((ours.last[~answered] == 0).all())
        assert torch.equal(ours.aux, exact.aux)
    assert abs(estimate_bytes(conversations(), 3, HIDDEN_SIZE, asked, SMALL) / sizes(tmp_path) - 1) < 0.02


def test_topk_in_place_of_the_last_hidden_state(target: Target, plain: FeatureStore, tmp_path: Path) -> None:
    store = convert(target, plain.folder, tmp_path, StoreSettings(topk=8))
    assert store.truth == 1.0
    for index in range(len(store)):
        ours, exact = store[index], plain[index]
        logits = target.parts.logits(exact.last.float())
        values, ids = logits.topk(8)
        assert ours.last.shape == (len(ours.tokens), 0)
        assert ours.top_ids is not None
        assert ours.top_logp is not None
        assert torch.equal(ours.top_ids, ids)
        torch.testing.assert_close(ours.top_logp, values - exact.lse[:, None], atol=0.01, rtol=2e-3)


def test_damaged_top_tokens_are_refused() -> None:
    ids, logp = torch.tensor([[3, 1], [2, 0]]), torch.tensor([[-0.2, -2.0], [-0.5, -1.0]])
    good = {"top_ids": ids, "top_logp": logp, "top1": torch.tensor([3, 2]), "lse": torch.tensor([20.0, 20.0])}
    assert top_truth(good, "here") == 1.0
    nothing = {name: values[:0] for name, values in good.items()}
    for wrong in ({"top1": torch.tensor([3, 1])}, {"top_logp": logp.flip(1)}, {"top_logp": logp + 1}, nothing):
        with pytest.raises(ValueError, match="here: the most likely kept token"):
            top_truth(good | wrong, "here")


def test_top_tokens_that_16_bits_cannot_tell_apart_count_as_the_same() -> None:
    """Logits 20 and 19.95 are one bfloat16 number: which of the two is the argmax is chance."""
    taught = {"top_ids": torch.tensor([[3, 1]]), "top_logp": torch.tensor([[-0.7, -0.75]])}
    taught |= {"top1": torch.tensor([1]), "lse": torch.tensor([20.7])}
    assert top_truth(taught, "here", torch.bfloat16) == 1.0
    with pytest.raises(ValueError, match="most likely kept token"):
        top_truth(taught, "here")


def test_first_version_is_still_written_and_read(target: Target, plain: FeatureStore) -> None:
    header = read_json(plain.folder / "header.json")
    assert header["version"] == 1
    assert "store" not in header
    assert plain.layout.describe() == "layers bfloat16, last hidden state float16"
    path = plain.folder / "header.json"
    kept = path.read_bytes()
    path.write_text(json.dumps(header | {"version": 3}))
    with pytest.raises(ValueError, match="version 3, this code reads"):
        FeatureStore.open(plain.folder)
    path.write_bytes(kept)


def test_settings_name_what_is_wrong() -> None:
    for wrong, message in (
        ({"precision": "int3"}, "must be one of auto, bfloat16"),
        ({"last": "tiny"}, "must be one of auto"),
        ({"teacher_at": "nowhere"}, "must be all or answers"),
        ({"topk": -1}, "must be a whole number"),
        ({"topk": 4, "last": "int8"}, "has no use"),
    ):
        with pytest.raises(ValueError, match=message):
            StoreSettings(**wrong)  # type: ignore[arg-type]


def test_more_tokens_than_the_vocabulary_has(target: Target, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="topk 65 is beyond the target's vocabulary of 64"):
        capture(target, conversations(1), LAYERS, tmp_path, dtype=StoreSettings(topk=VOCAB_SIZE + 1))
