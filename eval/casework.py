"""What `headstart doctor` looks at: a head, its target, prompts, and what the head was trained from, if that is there.

Everything costly is done once and when a check first asks for it: the target's recorded answers (by thinking mode),
the search over conventions, the target's features beside those of a store.

Letters in shapes: T tokens, L layers, D hidden width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor

from checkpoints.files import read_json
from data.chat import Template, TemplateError
from data.conversations import Conversation, Prompt, read_conversations
from data.features import FeatureStore, observe
from data.target import DTYPES, Target, feature_truth, unused_token
from eval.conventions import Bedside, Found, Tally
from eval.patient import Patient
from eval.recording import Question, record_answers, with_features
from eval.replay import Trajectory

STORE_SAMPLE, SPANS = 4, 256
SHIFTS = range(-3, 4)
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


@dataclass(frozen=True)
class Asking:
    """How the head is tried: prompts, rendered with this thinking choice (null: the template's default), num_slots
    drafted (null: the head's own), max_new_tokens of each answer, batch_size requests at a time."""

    prompts: list[Prompt]
    thinking: bool | None = None
    num_slots: int | None = None
    max_new_tokens: int = 64
    batch_size: int = 8


@dataclass(frozen=True)
class Prepared:
    """A folder of `headstart prepare`. store: None when features were not written. summary: prepare.json, {} without
    one."""

    folder: Path
    conversations: list[Conversation]
    store: FeatureStore | None
    summary: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """ValueError names what is missing or torn."""
        folder = Path(folder)
        summary = read_json(folder / "prepare.json") if (folder / "prepare.json").exists() else {}
        there = (folder / "features" / "header.json").exists()
        store = FeatureStore.open(folder / "features", None, None, "lazy") if there else None
        return cls(folder, read_conversations(folder / "conversations.jsonl"), store, summary)

    @property
    def identities(self) -> dict[str, dict[str, Any]]:
        """Which target its parts say they are of, by part."""
        found = {"prepare.json": self.summary.get("target") or {}}
        if self.store is not None:
            found["the feature store"] = self.store.header["identity"]
        return found


@dataclass(frozen=True)
class Spans:
    """Where supervised answers begin. fits: share of answers that follow the template's generation prompt when their
    start is moved by so many tokens. ended: share that end with an ending token or with the text. count: answers."""

    thinking: bool | None
    fits: dict[int, float]
    ended: float
    count: int

    @property
    def shift(self) -> int:
        """The move that fits most answers, the smallest of equals."""
        return max(self.fits, key=lambda shift: (self.fits[shift], -abs(shift)))


@dataclass(frozen=True)
class StoreTruth:
    """A store against the target. last, normed: share of positions where the head gives the target's own argmax, on the
    stored last state and on its norm. layers: for each stored id the target's layer that is nearest, and the relative
    differences to that and to the id's own layer."""

    last: float
    normed: float
    layers: dict[int, tuple[int, float, float]]


@dataclass
class Case:
    """The patient with everything that the checks ask for."""

    target: Target
    patient: Patient
    asking: Asking
    prepared: Prepared | None = None

    @cached_property
    def modes(self) -> list[bool | None]:
        """The thinking modes of the chat template; [None] without a switch."""
        try:
            Template(self.target.tokenizer, True, self.target.eos_ids)
        except TemplateError:
            return [None]
        return [True, False]

    def template(self, mode: bool | None) -> Template:
        """The target's template in a mode."""
        return Template(self.target.tokenizer, mode, self.target.eos_ids)

    @cached_property
    def served(self) -> bool | None:
        """The mode in which prompts are asked; None when the template has no switch, or a default of its own."""
        if self.modes == [None] or self.asking.thinking is not None:
            return None if self.modes == [None] else self.asking.thinking
        default = self.template(None).prompt(ASKED)
        return next((mode for mode in self.modes if self.template(mode).prompt(ASKED) == default), None)

    @cached_property
    def trained(self) -> bool | None:
        """The mode of the training data: as declared, else as the prepared conversations show it, else None."""
        if self.modes == [None]:
            return None
        if self.patient.thinking is not None:
            return self.patient.thinking
        return None if self.spans is None or max(self.spans.fits.values()) < 0.5 else self.spans.thinking

    @property
    def foreign(self) -> list[str]:
        """Which of weights and tokenizer are not those that the head or its data declare."""
        identity = self.target.identity
        known = [self.patient.target, *(self.prepared.identities.values() if self.prepared else ())]
        return [
            key
            for key in ("weights", "tokenizer")
            if any(one.get(key, identity[key]) != identity[key] for one in known)
        ]

    def trajectories(self, mode: bool | None) -> list[Trajectory]:
        """The target's greedy answers to the prompts in a mode, with the outputs of all its layers, kept. ValueError
        when no answer has two tokens."""
        if mode not in self._kept:
            template, asking = self.template(mode), self.asking
            questions = [Question(one.domain, template.prompt(one.messages)) for one in asking.prompts]
            recording = record_answers(self.target, questions, asking.max_new_tokens, asking.batch_size)
            layers = range(self.target.identity["num_layers"])
            made = with_features(self.target, recording, layers).trajectories(layers)
            if not any(len(one.tokens) > one.prompt + 1 for one in made):
                raise ValueError("the target answers every prompt with less than two tokens: give other prompts")
            self._kept[mode] = made
        return self._kept[mode]

    @cached_property
    def _kept(self) -> dict[bool | None, list[Trajectory]]:
        return {}

    def bedside(self, mode: bool | None) -> Bedside | None:
        """The head beside the answers of a mode; None for a head that cannot be built."""
        drafter = self.patient.drafter
        if drafter is None:
            return None
        slots = self.asking.num_slots or drafter.num_slots
        return Bedside(drafter, self.target.parts, self.trajectories(mode), slots, mask_tokens(self.target))

    def tally(self, mode: bool | None) -> Tally | None:
        """What the head accepts as declared, in a mode."""
        if mode not in self._tallies:
            beside = self.bedside(mode)
            self._tallies[mode] = None if beside is None else beside.tally(beside.declared)
        return self._tallies[mode]

    @cached_property
    def _tallies(self) -> dict[bool | None, Tally | None]:
        return {}

    @property
    def home(self) -> bool | None:
        """The mode in which the head is at home: that of its training data, else the served one."""
        return self.trained if self.trained is not None else self.served

    @cached_property
    def found(self) -> Found | None:
        """The search over conventions, in the head's home mode; None for a head that cannot be built or is on a target
        that is not its own, where all readings are equally bad."""
        beside = None if self.foreign else self.bedside(self.home)
        return None if beside is None else beside.search()

    @cached_property
    def spans(self) -> Spans | None:
        """Supervised spans against the template, in the mode that fits best; None without prepared data, or when the
        template gives nothing to go by."""
        if self.prepared is None:
            return None
        made = [answer_spans(self.prepared.conversations, self.template(mode)) for mode in self.modes]
        known = [one for one in made if one is not None]
        # The longer of two nested generation prompts is the later in the text: ties go to fewer moves.
        return max(known, key=lambda one: (max(one.fits.values()), -abs(one.shift)), default=None)

    @cached_property
    def store_truth(self) -> StoreTruth | None:
        """The prepared store beside the target; None without one."""
        if self.prepared is None or self.prepared.store is None:
            return None
        return compare_store(self.target, self.prepared.store)

    @cached_property
    def truth(self) -> float:
        """Share of the recorded texts' positions where head(last) has the argmax of the whole model; ValueError as
        feature_truth."""
        one = max(self.trajectories(self.home), key=lambda one: len(one.tokens))
        own = self.target.own_top1(one.tokens[None])[0]
        return feature_truth(self.target.parts, one.last, own, "the target", self.target.dtype)


def mask_tokens(target: Target) -> list[int]:
    """Ids that drafters use as mask token: the unused one that this toolkit takes, the tokenizer's special tokens, the
    first rows beyond the tokenizer, the last row."""
    tokenizer, rows = target.tokenizer, len(target.parts.embedding)
    ids = [unused_token(tokenizer, rows), tokenizer.mask_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id]
    ids += [tokenizer.unk_token_id, tokenizer.bos_token_id, *sorted(tokenizer.added_tokens_decoder)[-8:]]
    ids += [len(tokenizer), len(tokenizer) + 1, rows - 1, 0]
    return list(dict.fromkeys(int(i) for i in ids if i is not None and 0 <= int(i) < rows))


def generation_prompt(template: Template) -> list[int]:
    """Ids that the template puts between a question and the answer."""
    asked = template.prompt(ASKED)
    plain = template.tokenizer.apply_chat_template(
        ASKED, tokenize=False, add_generation_prompt=False, **template.switches
    )
    bare = list(template.tokenizer(str(plain), add_special_tokens=False)["input_ids"])
    same = next((i for i, (a, b) in enumerate(zip(asked, [*bare, -1], strict=False)) if a != b), len(asked))
    return asked[same:]


def answer_spans(conversations: Sequence[Conversation], template: Template) -> Spans | None:
    """How the supervised spans lie against the generation prompt of a template; None when it has none."""
    mark = generation_prompt(template)
    if not mark:
        return None
    fits, ended, count = dict.fromkeys(SHIFTS, 0), 0, 0
    for one in conversations:
        starts = [i for i, turn in enumerate(one.turns) if turn and (i == 0 or one.turns[i - 1] != turn)]
        for start in starts:
            stop = next((i for i in range(start, len(one.turns)) if one.turns[i] != one.turns[start]), len(one.turns))
            for shift in SHIFTS:
                place = start + shift
                fits[shift] += place >= len(mark) and one.tokens[place - len(mark) : place] == mark
            ended += template.ends(one.tokens[stop - 1]) or stop == len(one.tokens)
            count += 1
        if count >= SPANS:
            break
    if not count:
        return None
    return Spans(template.thinking, {shift: hits / count for shift, hits in fits.items()}, ended / count, count)


@torch.inference_mode()
def compare_store(target: Target, store: FeatureStore) -> StoreTruth:
    """Features of the first conversations made anew, beside what the store holds of them."""
    samples = [store[i] for i in range(min(STORE_SAMPLE, len(store)))]
    chats = [Conversation(one.id, "", one.tokens.tolist(), one.turns.tolist()) for one in samples]
    layers = range(target.identity["num_layers"])
    fresh = dict(observe(target, chats, layers, dtype="float32"))
    own = torch.cat([fresh[i].aux for i in range(len(samples))]).float()
    kept = torch.cat([one.aux for one in samples]).float()
    nearest = {}
    for place, layer in enumerate(store.layers):
        away = [relative(kept[:, place], own[:, other]) for other in layers]
        best = min(layers, key=lambda other: away[other])
        nearest[layer] = (best, away[best], away[layer] if layer < len(away) else float("inf"))
    kept_at = [(one.turns > 0) | (store.layout.teacher_at == "all") for one in samples]
    top1 = torch.cat([fresh[i].top1[at] for i, at in enumerate(kept_at)])
    if store.layout.last is None:  # top-k tokens in place of the state: only the first of them can be compared
        first = torch.cat([cast(Tensor, one.top_ids)[at, 0] for one, at in zip(samples, kept_at, strict=True)])
        same = float((first == top1).float().mean())
        return StoreTruth(same, 0.0, nearest)
    last = torch.cat([one.last[at] for one, at in zip(samples, kept_at, strict=True)])
    parts = target.parts
    normed = parts.norm(last.to(parts.embedding))
    dtype = DTYPES[store.header["target_dtype"]]
    return StoreTruth(truth_share(target, last, top1, dtype), truth_share(target, normed, top1, dtype), nearest)


def relative(found: Tensor, wanted: Tensor) -> float:
    """Size of the difference over that of what is wanted. Any equal shapes."""
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-12))


def truth_share(target: Target, last: Tensor, top1: Tensor, dtype: torch.dtype) -> float:
    """Share of positions where head(last) gives top1, near ties of a 16-bit dtype counted. last [N, D], top1 [N]."""
    logits = target.logits(last.to(target.parts.embedding)).float().cpu()
    best, eps = logits.amax(-1), torch.finfo(dtype).eps
    return float((logits.gather(-1, top1[:, None])[:, 0] >= best - eps * best.abs()).float().mean())
