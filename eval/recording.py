"""The target's greedy answers to a set of prompts, decoded once and kept: what replays are measured against.

A recording is one safetensors file. It says which target wrote it (weights, tokenizer, dtype), for which rendered
prompts and up to how many new tokens; another target's or another prompt set's file is refused by name. Features are
kept when layers are asked for, so that a replay needs no target at all; without them a file holds token ids alone.

Letters in shapes: N tokens of all texts in a row, T of one text, L captured layers, D hidden width.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor

from checkpoints.files import fingerprint, read_tensors, write_tensors
from data.decoding import Decoder, Request
from data.structure import PLAIN_ATTENTION, layer_kinds
from data.target import Target
from eval.decoder import DecodeSettings, check_lengths, generate
from eval.replay import Trajectory

FORMAT = "headstart-recording"


@dataclass(frozen=True)
class Question:
    """A prompt as the target sees it: token ids, generation prompt included. later: what the user says after each
    answer; follow: the next turn's question from the answer (new tokens), None for prompts of one turn."""

    domain: str
    ids: list[int]
    later: tuple[str, ...] = ()
    follow: Callable[[list[int]], "Question | None"] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Recording:
    """questions and the answers (new tokens) to them, in one order. owner: whose they are (see `owner_of`).

    layers, aux [N, L, D], last [N, D]: features of all texts one after the other; None when only tokens are kept.
    """

    questions: list[Question]
    answers: list[list[int]]
    owner: dict[str, Any]
    layers: tuple[int, ...] | None = None
    aux: Tensor | None = None
    last: Tensor | None = None

    def holds(self, layers: Sequence[int]) -> bool:
        """Whether these layers' features are here."""
        return self.layers is not None and set(layers) <= set(self.layers)

    def trajectories(self, layers: Sequence[int]) -> list[Trajectory]:
        """What a drafter that reads these layers replays; ValueError when their features were not kept."""
        if not self.holds(layers) or self.layers is None or self.aux is None or self.last is None:
            raise ValueError(f"the recording holds layers {self.layers}, not all of {tuple(layers)}")
        chosen = [self.layers.index(layer) for layer in layers]
        found, start = [], 0
        for question, answer in zip(self.questions, self.answers, strict=True):
            text = slice(start, start + len(question.ids) + len(answer))
            start = text.stop
            tokens = torch.tensor(question.ids + answer)
            found.append(
                Trajectory(question.domain, tokens, len(question.ids), self.aux[text][:, chosen], self.last[text])
            )
        return found

    def save(self, path: Path) -> Path:
        """Write the file, atomically; returns its path."""
        texts = [question.ids + answer for question, answer in zip(self.questions, self.answers, strict=True)]
        tensors = {
            "tokens": torch.tensor([token for text in texts for token in text]),
            "prompts": torch.tensor([len(question.ids) for question in self.questions]),
            "answers": torch.tensor([len(answer) for answer in self.answers]),
        }
        if self.aux is not None and self.last is not None:
            tensors |= {"aux": self.aux, "last": self.last}
        described = {
            "format": FORMAT,
            "owner": self.owner,
            "layers": self.layers,
            "domains": [question.domain for question in self.questions],
        }
        write_tensors(path, tensors, {"headstart": json.dumps(described)})
        return path

    @classmethod
    def load(cls, path: Path, owner: dict[str, Any]) -> Self:
        """Read a file of this owner; ValueError names a file that is torn, none of ours, or another's."""
        described = _described(path)
        if lines := _foreign(described["owner"], owner):
            raise ValueError(f"{path} is another recording: {'; '.join(lines)}; remove it or name another file")
        tensors = read_tensors(path)
        tokens, start = tensors["tokens"].tolist(), 0
        questions, answers = [], []
        lengths = zip(described["domains"], tensors["prompts"].tolist(), tensors["answers"].tolist(), strict=True)
        for domain, prompt, answer in lengths:
            questions.append(Question(domain, tokens[start : start + prompt]))
            answers.append(tokens[start + prompt : start + prompt + answer])
            start += prompt + answer
        layers = None if described["layers"] is None else tuple(described["layers"])
        return cls(questions, answers, described["owner"], layers, tensors.get("aux"), tensors.get("last"))


def owner_of(target: Target, questions: Sequence[Question], max_new_tokens: int) -> dict[str, Any]:
    """What makes a recording this target's, these prompts' and this length's."""
    return {
        "name": target.identity["name"],
        "weights": target.identity["weights"],
        "tokenizer": target.identity["tokenizer"],
        "dtype": str(target.dtype).removeprefix("torch."),
        "prompts": fingerprint([[one.domain, one.ids, *([list(one.later)] if one.later else [])] for one in questions]),
        "max_new_tokens": max_new_tokens,
    }


def belongs(path: Path, owner: dict[str, Any]) -> bool:
    """Whether a file is there and is this owner's."""
    return Path(path).exists() and not _foreign(_described(path)["owner"], owner)


def record_answers(
    target: Target,
    questions: Sequence[Question],
    max_new_tokens: int,
    batch_size: int = 16,
    watch: Callable[[int, int], None] | None = None,
) -> Recording:
    """Let the target answer greedily, prompts of several turns turn by turn: further turns are questions of their own,
    behind the given ones. watch: see eval.decoder.generate. ValueError without prompts."""
    if not questions:
        raise ValueError("a recording needs at least one prompt")
    decoding = DecodeSettings(max_new_tokens=max_new_tokens, batch_size=batch_size)
    asked: list[Question] = []
    answers: list[list[int]] = []
    wave = list(questions)
    while wave:
        found = _written(target, [one.ids for one in wave], decoding, watch)
        asked += wave
        answers += found
        following = [one.follow(answer) for one, answer in zip(wave, found, strict=True) if one.follow is not None]
        wave = [one for one in following if one is not None]
    return Recording(asked, answers, owner_of(target, questions, max_new_tokens))


def _written(
    target: Target, prompts: Sequence[list[int]], decoding: DecodeSettings, watch: Callable[[int, int], None] | None
) -> list[list[int]]:
    """The target's own tokens after each prompt. Nothing is drafted here, so a target whose state cannot be taken back
    writes them, too."""
    if layer_kinds(target.model) <= set(PLAIN_ATTENTION):
        return [one.tokens for one in generate(target, None, prompts, decoding, watch=watch)]
    check_lengths(target, prompts, decoding, 0)
    decoder = Decoder(
        target.model, decoding.sampling, decoding.max_new_tokens, target.eos_ids, batch_size=decoding.batch_size
    )
    found: dict[str, list[int]] = {}
    for one in decoder.run(Request(str(index), ids, decoding.seed) for index, ids in enumerate(prompts)):
        found[one.id] = one.response_ids
        if watch is not None:
            watch(1, len(one.response_ids))
    return [found[str(index)] for index in range(len(prompts))]


def with_features(target: Target, recording: Recording, layers: Sequence[int]) -> Recording:
    """The same answers with these layers' features, one forward a text, kept on the CPU in the target's dtype."""
    aux, last = [], []
    for question, answer in zip(recording.questions, recording.answers, strict=True):
        made = trajectory(target, question, answer, layers)
        aux.append(made.aux.cpu())
        last.append(made.last.cpu())
    return Recording(
        recording.questions, recording.answers, recording.owner, tuple(layers), torch.cat(aux), torch.cat(last)
    )


@torch.inference_mode()
def trajectory(target: Target, question: Question, answer: list[int], layers: Sequence[int]) -> Trajectory:
    """Features of a prompt and its answer, in one forward, on the target's device."""
    tokens = torch.tensor([question.ids + answer], device=target.device)
    features = target.forward(tokens, layers)
    return Trajectory(
        question.domain, tokens[0].clone(), len(question.ids), features.aux[0].clone(), features.last[0].clone()
    )


def kept(
    path: Path | None,
    target: Target,
    questions: Sequence[Question],
    layers: Sequence[int],
    max_new_tokens: int,
    batch_size: int = 16,
    watch: Callable[[int, int], None] | None = None,
) -> Recording:
    """The recording in a file, made there when the file is missing; with features of at least these layers.

    A file of the same owner with other layers keeps its answers and gets the features. path None: nothing is written.
    ValueError names a file that is another target's, prompt set's or length's.
    """
    there = path is not None and Path(path).exists()
    if path is not None and there:
        recording = Recording.load(path, owner_of(target, questions, max_new_tokens))
    else:
        recording = record_answers(target, questions, max_new_tokens, batch_size, watch)
    if not recording.holds(layers):
        recording = with_features(target, recording, sorted({*layers, *(recording.layers or ())}))
        if path is not None:
            recording.save(path)
    return recording


def _foreign(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """One line for each thing that makes two recordings different; the target's name may differ."""
    keys = [key for key in wanted if key != "name"]
    return [f"{key} {found.get(key)!r} instead of {wanted[key]!r}" for key in keys if found.get(key) != wanted[key]]


def _described(path: Path) -> dict[str, Any]:
    """What a recording says of itself; ValueError for any other file."""
    try:
        with safe_open(path, framework="pt") as handle:
            metadata = handle.metadata() or {}
    except Exception as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
    described = json.loads(metadata.get("headstart", "{}"))
    if described.get("format") != FORMAT:
        raise ValueError(f"{path} is no recording of answers (its format is {described.get('format')!r})")
    return described
