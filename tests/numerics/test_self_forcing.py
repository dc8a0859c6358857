"""Self-forcing by hand: which slots a rollout supervises, what the target says of rejected drafts, and the schedule."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from data.target import Target
from drafters.contract import Batch, Drafted, grid
from eval import branches
from eval.branches import read_branches
from eval.replay import Round
from tests import checks
from tests.doubles import FAMILIES, tiny_target
from training import self_forcing
from training.module import DrafterModule
from training.objectives import Objective, plain_terms, slot_terms
from training.optimizers import OptimizerSettings
from training.self_forcing import Rollout, SelfForcing, SelfForcingSettings, answers_of, with_drafts


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="module")
def batch(target) -> Batch:
    """One row: a document of 8 tokens (answer at 3..7) and one of 6 (answers at 2..3 and 5)."""
    drafter = checks.build("eagle3", target, num_slots=3)
    texts = [checks.random_text(target, n, n) for n in (8, 6)]
    turns = [[0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 2]]
    return checks.row_batch([[checks.sample(target, drafter, t, u) for t, u in zip(texts, turns, strict=True)]], 16)


def planned(monkeypatch: pytest.MonkeyPatch, rounds: list[Round]) -> None:
    """The drafter's rounds, written out instead of drafted."""

    def given(drafter, texts, numbers, num_slots, sampling, seeds) -> Iterator[Round]:
        yield from rounds

    monkeypatch.setattr(self_forcing, "rounds_of", given)


def test_answers_of_a_packed_row(batch):
    texts, offsets = answers_of(batch)
    # The one-token answer at position 5 of the second document has nothing to draft.
    assert offsets == [(0, 0), (0, 8)]
    assert [text.prompt for text in texts] == [3, 2]
    assert texts[1].tokens.tolist() == batch.tokens[0, 8:12].tolist()
    assert torch.equal(texts[1].aux, batch.aux[0, 8:12])


def test_the_accepted_prefix_and_the_first_rejected_slot(target, batch, monkeypatch):
    row = batch.tokens[0].tolist()
    wrong = [4 + (row[i] + 1 - 4) % 50 for i in range(16)]
    rounds = [
        Round("", 0, 3, [row[4], wrong[5], 9], 1, 4, None),  # slot 2 rejected
        Round("", 0, 5, [row[6], row[7], 9], 2, 2, None),  # the answer ends with slot 2
        Round("", 1, 2, [wrong[11], 9, 9], 0, 1, None),  # slot 1 rejected, and the last of its answer
    ]
    planned(monkeypatch, rounds)
    drafter = checks.build("eagle3", target, num_slots=3)
    anchors, drafted = SelfForcing(target, SelfForcingSettings(share=1.0), None).roll(drafter, batch)
    assert anchors.tolist() == [[3, 5, 10]]
    assert drafted.tokens[0].tolist() == [one.drafted for one in rounds]
    assert drafted.mask[0].tolist() == [[True, True, False], [True, True, False], [True, False, False]]
    assert drafted.labels[0][drafted.mask[0]].tolist() == [row[4], row[5], row[6], row[7], row[11]]
    assert drafted.teacher[0][drafted.mask[0]].tolist() == [3, 4, 5, 6, 10]
    assert drafted.last.shape == (1, 0, 32)
    made = grid(with_drafts(batch, Rollout(0, anchors, drafted)), 3)
    assert made.prev_ids[0].tolist() == [[row[3], row[4], wrong[5]], [row[5], row[6], row[7]], [row[10], wrong[11], 9]]


def test_the_target_judges_slots_after_the_first_rejected(target, batch, monkeypatch):
    row, end = batch.tokens[0].tolist(), target.eos_ids[0]
    wrong = [4 + (row[i] + 1 - 4) % 50 for i in range(16)]
    rounds = [
        Round("", 0, 3, [wrong[4], 9, 8, 7], 0, 4, None),  # slots 2, 3 and 4 are judged by the target
        Round("", 0, 4, [wrong[5], end, 8, 7], 0, 3, None),  # nothing follows the drafted end of turn in slot 2
        Round("", 1, 2, [wrong[11], 9, 8, 7], 0, 1, None),
    ]
    planned(monkeypatch, rounds)
    drafter = checks.build("eagle3", target, num_slots=4)
    forcing = SelfForcing(target, SelfForcingSettings(share=1.0, rejected=0.5), None)
    anchors, drafted = forcing.roll(drafter, batch)
    assert drafted.mask[0].tolist() == [[True] * 4, [True, True, False, False], [True] * 4]
    assert drafted.weights[0].tolist() == [[1, 0.5, 0.5, 0.5], [1, 0.5, 1, 1], [1, 0.5, 0.5, 0.5]]
    # Verdicts stand behind the row's 16 positions, in order.
    assert drafted.teacher[0].tolist() == [[3, 16, 17, 18], [4, 19, 0, 0], [10, 20, 21, 22]]
    alone = target.forward(torch.tensor([[*row[:4], wrong[4], 9, 8]]), ()).last[0]
    assert torch.allclose(drafted.last[0, :3], alone[4:], atol=1e-4)
    logits = target.logits(alone[4:])
    assert drafted.labels[0, 0, 1:].tolist() == logits.argmax(-1).tolist()
    assert torch.allclose(drafted.lse[0, :3], logits.logsumexp(-1), atol=1e-4)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"qwen3_moe"}))
def test_branches_equal_reading_each_alone(family):
    """Windowed, latent and mixture targets included; the slow form is one plain forward a branch."""
    target = tiny_target(family)
    text = torch.tensor(checks.random_text(target, 20, 1))
    drafted = torch.tensor([checks.random_text(target, 4, 30 + n) for n in range(3)])
    anchors = [2, 12, 19]
    blocks = torch.cat([text[anchors][:, None], drafted], 1)
    read = read_branches(target, text, anchors, blocks, (0, 3), rows=2)
    for index, anchor in enumerate(anchors):
        alone = target.forward(torch.cat([text[: anchor + 1], drafted[index]])[None], (0, 3))
        assert torch.allclose(read.last[index], alone.last[0, anchor:], atol=2e-4), f"branch at {anchor}"
        assert torch.allclose(read.aux[index], alone.aux[0, anchor:], atol=2e-4), f"branch at {anchor}"


def test_a_long_text_is_read_in_fewer_branches_at_once(target, monkeypatch):
    """A branch holds a copy of the text's cache: 16 copies of a long one would not fit beside a large target."""
    text = torch.tensor(checks.random_text(target, 20, 1))
    anchors, read, forward = [4, 9, 12, 15, 19], [], target.forward
    monkeypatch.setattr(
        target, "forward", lambda ids, *rest, **words: (read.append(len(ids)), forward(ids, *rest, **words))[1]
    )
    blocks = text[anchors][:, None].expand(-1, 2)
    whole = read_branches(target, text, anchors, blocks).last
    monkeypatch.setattr(branches, "CACHED", 40)  # positions: two copies of 19
    parts = read_branches(target, text, anchors, blocks).last
    assert read == [1, 5, 1, 2, 2, 1]
    assert torch.allclose(whole, parts, atol=2e-4)


@pytest.mark.parametrize("kind", ["uniform", "exponential", "dpace"])
def test_chunked_terms_equal_plain_terms_over_drafts(target, kind):
    drafter = checks.build("dspark", target, num_slots=4)
    batch = checks.train_batch(target, drafter)
    settings = SelfForcingSettings(share=1.0, rejected=0.25, temperature=1.0)
    rolled = with_drafts(batch, Rollout(0, *SelfForcing(target, settings, None).roll(drafter, batch)))
    assert rolled.drafted is not None
    assert rolled.drafted.last.shape[1] > 0
    terms = {"data_ce": 0.5, "kl": 1.0, "reverse_kl": 0.5, "own_confidence": 1.0}
    objective = Objective(terms, {"kind": kind}, unweighted=["own_confidence"], chunk=5)
    slots = drafter.slots(rolled)
    fast = slot_terms(drafter, slots, rolled, target.parts, objective)
    assert torch.allclose(fast.loss, plain_terms(drafter, slots, rolled, target.parts, objective), rtol=1e-4)
    static = objective.slot_weights.static(4, batch.tokens.device)
    weights = rolled.drafted.weights * rolled.drafted.mask
    assert torch.allclose(fast.denominator, (static * weights).sum(), rtol=1e-5)


def test_rounds_are_those_of_serving(target):
    """Each round starts at the corrected token of the one before; `rounds` draws some of them by the seed."""
    drafter = checks.build("medusa", target, num_slots=3)
    batch = checks.train_batch(target, drafter)
    forcing = SelfForcing(target, SelfForcingSettings(share=1.0), None)
    anchors, drafted = forcing.roll(drafter, batch)
    for row in range(len(anchors)):
        for place in range(anchors.shape[1] - 1):
            here, then = anchors[row, place], anchors[row, place + 1]
            if then < 0 or batch.documents[row, here] != batch.documents[row, then]:
                continue
            if batch.turns[row, here] == batch.turns[row, then]:
                truth = batch.tokens[row, here + 1 : then + 1]
                agreed = (drafted.tokens[row, place, : then - here] == truth).long().cumprod(0).sum()
                assert then - here == min(int(agreed) + 1, 4)
    few = SelfForcing(target, SelfForcingSettings(share=1.0, rounds=2), None)
    some, _ = few.roll(drafter, batch)
    again, _ = few.roll(drafter, batch)
    other, _ = few.roll(drafter, replace(batch, seed=5))
    assert some.shape == (2, 2)
    assert torch.equal(some, again)
    assert not torch.equal(some, other)
    assert set(some.flatten().tolist()) <= set(anchors.flatten().tolist())


def test_sampled_drafts_differ_from_greedy_ones(target):
    drafter = checks.build("eagle3", target, num_slots=3)
    batch = checks.train_batch(target, drafter)
    greedy = SelfForcing(target, SelfForcingSettings(share=1.0), None).roll(drafter, batch)[1]
    hot = SelfForcing(target, SelfForcingSettings(share=1.0, temperature=1.0), None).roll(drafter, batch)[1]
    assert greedy.tokens.shape != hot.tokens.shape or not torch.equal(greedy.tokens, hot.tokens)


def test_a_recurrent_target_cannot_judge_rejected_drafts():
    """Its state cannot be taken back: said before the first step, by the setting's name."""
    recurrent = tiny_target("qwen3_next")
    drafter = checks.build("eagle3", tiny_target(), num_slots=3)
    free, judged = (SelfForcing(recurrent, SelfForcingSettings(1.0, rejected=r), None) for r in (0.0, 0.5))
    free.check(drafter)
    words = r"self_forcing\.rejected=0\.5 .* layers of linear_attention keep cannot be taken back"
    with pytest.raises(ValueError, match=words):
        judged.check(drafter)
    with pytest.raises(ValueError, match=words):
        DrafterModule(drafter, recurrent.parts, Objective(), OptimizerSettings(), 1, judged)


def test_the_schedule():
    settings = SelfForcingSettings(share=0.8, start=0.25, full=0.75)
    assert [settings.share_at(x) for x in (0.0, 0.24, 0.25, 0.5, 0.75, 0.99)] == [0, 0, 0, 0.4, 0.8, 0.8]
    assert SelfForcingSettings(share=0.5).share_at(0.0) == 0.5


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"share": 1.5}, r"self_forcing\.share must be in 0\.\.1, got 1\.5"),
        ({"start": 0.5, "full": 0.2}, r"self_forcing\.full must not be below start 0\.5, got 0\.2"),
        ({"reuse": 0}, r"self_forcing\.reuse must be at least 1, got 0"),
        ({"rejected": -1.0}, r"self_forcing\.rejected must not be negative"),
    ],
)
def test_settings_are_checked(given, words):
    with pytest.raises(ValueError, match=words):
        SelfForcingSettings(**given)


def test_rollouts_serve_several_steps_and_survive_a_checkpoint(target):
    """share 1, reuse 3: one rollout in three micro-steps is new; a restored object goes on equally."""
    drafter = checks.build("eagle3", target, num_slots=3)
    batches = [replace(checks.train_batch(target, drafter), seed=step) for step in range(8)]
    asked: list[int] = []

    def again(step: int) -> Batch:
        asked.append(step)
        return batches[step]

    forcing = SelfForcing(target, SelfForcingSettings(share=1.0, reuse=3), again)
    made = [forcing(drafter, batches[step], step) for step in range(4)]
    assert all(isinstance(one.drafted, Drafted) for one in made)
    assert [one.micro_step for one in forcing.kept] == [0, 3]
    assert asked == [0, 0]
    restored = SelfForcing(target, SelfForcingSettings(share=1.0, reuse=3), again)
    restored.load_state_dict(forcing.state_dict())
    for step in range(4, 8):
        mine, other = (one(drafter, batches[step], step) for one in (forcing, restored))
        assert torch.equal(mine.anchors, other.anchors)
        assert torch.equal(mine.drafted.tokens, other.drafted.tokens)


def test_half_of_the_micro_steps(target):
    drafter = checks.build("medusa", target, num_slots=1)
    batch = checks.train_batch(target, drafter)
    forcing = SelfForcing(target, SelfForcingSettings(share=0.5, reuse=100), lambda step: batch)
    drafted = [forcing(drafter, batch, step).drafted is not None for step in range(100)]
    assert 35 <= sum(drafted) <= 65
    assert forcing.used == sum(drafted)
