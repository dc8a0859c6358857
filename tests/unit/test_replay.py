"""Replay equals the decoding loop; recordings are kept, reused, and refused when they are another's."""

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from checkpoints.files import write_tensors
from data.target import Target
from drafters.contract import Drafter, Proposal
from drafters.sampling import Sampling
from eval import recording
from eval.calibration import Rounds
from eval.decoder import DecodeSettings, generate
from eval.metrics import acceptance
from eval.progress import Watch
from eval.recording import Question, Recording, belongs, kept, owner_of, record_answers, with_features
from eval.replay import replay
from tests import checks
from tests.doubles import tiny_target

QUESTIONS = [Question("a", [5, 6, 7, 8]), Question("b", [9, 10]), Question("a", [11, 12, 13])]
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="module")
def drafter(target: Target) -> Drafter:
    torch.manual_seed(0)
    made = checks.build("eagle3", target, num_slots=3)
    made.warm_start(target.parts)
    return made


def confident(drafter: Drafter, patch: pytest.MonkeyPatch) -> None:
    """Let the drafter say, of slot k after anchor token t, (t + k) / 80."""
    really = type(drafter).propose

    def propose(self: Drafter, state: Any, num_slots: int, sampling: Sampling, seeds: torch.Tensor) -> Proposal:
        made = really(self, state, num_slots, sampling, seeds)
        sure = (state.anchor[:, None] + torch.arange(1, num_slots + 1)) / 80
        return Proposal(made.tokens, made.probs, sure)

    patch.setattr(type(drafter), "propose", propose)


def test_replay_equals_the_decoding_loop_round_by_round(
    target: Target, drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    confident(drafter, monkeypatch)
    answers = record_answers(target, QUESTIONS, NEW_TOKENS)
    found = replay(drafter, with_features(target, answers, drafter.needs.layers).trajectories(drafter.needs.layers), 3)
    # Batch 2: requests that end early leave the group, and their confidences with them.
    decoded = generate(target, drafter, [q.ids for q in QUESTIONS], DecodeSettings(3, NEW_TOKENS, batch_size=2))
    wanted = acceptance(decoded, 3)
    assert found.tau == pytest.approx(wanted.tau)
    assert found.accepted == found.tau - 1
    assert found.alpha == pytest.approx(wanted.alpha)
    for domain in {q.domain for q in QUESTIONS}:
        own = [one for one, q in zip(decoded, QUESTIONS, strict=True) if q.domain == domain]
        assert found.domains[domain] == pytest.approx(acceptance(own, 3).tau)
    real = Rounds.of(decoded)
    assert real is not None
    assert found.confident is not None
    assert rows(found.confident) == rows(real)
    first = decoded[1]
    assert first.confidences[0] == pytest.approx([(first.tokens[0] + k) / 80 for k in (1, 2, 3)])


def rows(rounds: Rounds) -> list[tuple]:
    """Everything of every round, in an order that does not depend on batches."""
    columns = (rounds.answer, rounds.confidences, rounds.accepted, rounds.proposed)
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


def test_a_file_is_recorded_once_and_grows_by_layers(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "answers.safetensors"
    first = kept(path, target, QUESTIONS, [0, 2], NEW_TOKENS)
    monkeypatch.setattr(recording, "generate", None)  # decoding again would fail
    wider = kept(path, target, QUESTIONS, [3], NEW_TOKENS)
    assert (first.layers, wider.layers) == ((0, 2), (0, 2, 3))
    assert wider.answers == first.answers
    again = Recording.load(path, owner_of(target, QUESTIONS, NEW_TOKENS))
    assert again.questions == QUESTIONS
    for one, other in zip(again.trajectories([0, 3]), wider.trajectories([0, 3]), strict=True):
        assert one.domain == other.domain
        assert one.prompt == other.prompt
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.aux, other.aux)
        assert torch.equal(one.last, other.last)
    fresh = target.forward(again.trajectories([3])[1].tokens[None], [3])
    assert torch.allclose(again.trajectories([3])[1].aux, fresh.aux[0], atol=1e-5)
    with pytest.raises(ValueError, match=r"holds layers \(0, 2, 3\), not all of \(1,\)"):
        again.trajectories([1])


@pytest.mark.parametrize("what", ["weights", "tokenizer", "prompts", "max_new_tokens", "dtype"])
def test_a_foreign_file_is_refused_by_name(target: Target, tmp_path: Path, what: str) -> None:
    path = tmp_path / "answers.safetensors"
    own = record_answers(target, QUESTIONS[:1], 2)
    replace(own, owner=own.owner | {what: "another"}).save(path)
    assert not belongs(path, own.owner)
    with pytest.raises(ValueError, match=f"answers.safetensors is another recording: {what} 'another' instead of"):
        kept(path, target, QUESTIONS[:1], [0], 2)


def test_a_target_with_a_recurrent_state_is_recorded() -> None:
    """Nothing is taken back without a drafter."""
    target = tiny_target("qwen3_next")
    told: list[tuple[int, int]] = []
    made = record_answers(target, QUESTIONS, 6, batch_size=2, watch=lambda ended, tokens: told.append((ended, tokens)))
    for question, answer in zip(QUESTIONS, made.answers, strict=True):
        text = list(question.ids)
        for token in answer:
            assert token == int(target.model(torch.tensor([text])).logits[0, -1].argmax())
            text.append(token)
        assert len(answer) == 6 or answer[-1] in target.eos_ids
    assert sorted(told) == sorted((1, len(answer)) for answer in made.answers)
    with pytest.raises(ValueError, match="prompt 0 has 4 tokens; with max_new_tokens 509 .* the target has 512"):
        record_answers(target, QUESTIONS, 509)


def test_other_files_are_refused(target: Target, tmp_path: Path) -> None:
    path = tmp_path / "answers.safetensors"
    write_tensors(path, {"x": torch.zeros(1)})
    with pytest.raises(ValueError, match="is no recording of answers"):
        Recording.load(path, owner_of(target, QUESTIONS, 2))
    path.write_bytes(b"torn")
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        Recording.load(path, owner_of(target, QUESTIONS, 2))
    with pytest.raises(ValueError, match="at least one prompt"):
        record_answers(target, [], 2)


def test_progress_counts_prompts_and_tokens(target: Target) -> None:
    """Off a terminal: a line now and then, here after every round."""
    screen = Console(file=StringIO(), width=200)
    with Watch(3, screen, every=0.0) as watch:
        watch.pass_ = "recording"
        made = record_answers(target, QUESTIONS, NEW_TOKENS, batch_size=2, watch=watch)
    assert watch.ended == 3
    assert watch.tokens == sum(map(len, made.answers))
    lines = screen.file.getvalue().splitlines()
    assert lines[-1].startswith("recording: 3 of 3 prompts, ")
    quiet = Console(file=StringIO())
    with Watch(3, quiet) as watch:
        record_answers(target, QUESTIONS, 2, watch=watch)
    assert quiet.file.getvalue() == ""
