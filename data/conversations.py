"""Prompts and conversations: read from any source, cut to length, counted, split, written.

Nothing disappears silently: a row that cannot teach is dropped under a reason, and the report holds the counts.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from checkpoints.files import atomic, fingerprint
from data.chat import Chat, Template, TemplateError, recorded
from data.sources import Row, SourceSettings, read_jsonl, read_rows

T = TypeVar("T", "Prompt", "Conversation")


@dataclass(frozen=True)
class Prompt:
    """What the target is asked. messages end before the answer. later: what the user says after each answer, in turn;
    empty for a prompt of one turn."""

    id: str
    domain: str
    messages: list[dict[str, Any]]
    later: list[str] = field(default_factory=list)


@dataclass
class Conversation:
    """Token ids of one chat and its turns: 0 outside answers, n in the n-th answer (end of turn included)."""

    id: str
    domain: str
    tokens: list[int]
    turns: list[int]

    @property
    def answer_tokens(self) -> int:
        return sum(turn > 0 for turn in self.turns)


@dataclass
class Report:
    """What became of a source's rows. read = kept + dropped, except that multi_turn=split keeps several of one row.

    kept, truncated: conversations (or prompts). tokens, answer_tokens: in the kept. dropped: reason -> rows.
    thinking: the choice that all answers were written or rendered with, None where they differ. first_refusal: the
    first row that the chat template refused, and why.
    """

    read: int = 0
    kept: int = 0
    truncated: int = 0
    tokens: int = 0
    answer_tokens: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    thinking: bool | None = None
    first_refusal: str | None = None

    def drop(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_prompts(
    source: SourceSettings | Path | str, part: str = "train", report: Report | None = None
) -> list[Prompt]:
    """Prompts of a source (or of a JSONL file of messages): each chat up to its first answer.

    part: train or heldout, of the shipped set. Rows without a question and repeated prompts are dropped and counted in
    `report`. ValueError names file and line of a bad row.
    """
    report = report if report is not None else Report()
    settings = source if isinstance(source, SourceSettings) else SourceSettings("jsonl", str(source))
    barred = _eval_keys(settings)
    prompts: dict[str, Prompt] = {}
    for row in read_rows(settings, part):
        report.read += 1
        messages = asked(row.messages or [])
        key = prompt_key(messages)
        if trouble := _order(messages or row.messages or []):
            report.drop(trouble)
        elif key in barred:
            report.drop("prompt is among the evaluation prompts")
        elif key in prompts:
            report.drop("repeated prompt")
        else:
            prompts[key] = Prompt(row.id, row.domain, messages)
    report.kept += len(prompts)
    return list(prompts.values())


def read_source(
    settings: SourceSettings,
    tokenizer: PreTrainedTokenizerBase,
    eos_ids: Iterable[int] = (),
    vocab_size: int | None = None,
) -> tuple[list[Conversation], Report]:
    """Conversations of a source that already holds answers, and what was dropped.

    Rows with recorded ids are used as they are; rows of messages go through the tokenizer's chat template. Raises
    ValueError naming file and line for bad rows, for ids outside the vocabulary and for answers recorded in another
    thinking mode, and TemplateError when the template refuses every row.
    """
    if settings.source == "builtin":
        raise ValueError("data.source=builtin holds prompts only: let the target answer them first")
    report = Report(thinking=settings.thinking)
    size = vocab_size or len(tokenizer)
    template = None if settings.source == "answers_jsonl" else Template(tokenizer, settings.thinking, eos_ids)
    barred = _eval_keys(settings)
    kept: list[Conversation] = []
    modes: set[bool | None] = set()
    for row in read_rows(settings):
        report.read += 1
        if row.messages and prompt_key(asked(row.messages)) in barred:
            report.drop("prompt is among the evaluation prompts")
            continue
        for conversation in _chats(row, settings, template, report):
            if conversation.tokens and max(conversation.tokens) >= size:
                worst = max(conversation.tokens)
                raise ValueError(f"{row.where}: token id {worst} is outside the target's {size} tokens")
            if fit(conversation, settings.max_length, report):
                kept.append(conversation)
                written = row.extra.get("thinking")
                modes.add(settings.thinking if written is None else written)
    if modes:
        report.thinking = modes.pop() if len(modes) == 1 else None
    if not kept and report.first_refusal:
        raise TemplateError(f"the chat template refused every row with an answer; the first: {report.first_refusal}")
    return kept, report


def _chats(row: Row, settings: SourceSettings, template: Template | None, report: Report) -> Iterator[Conversation]:
    """The row's conversations, one or (split) one for each answer; refusals are counted."""
    if row.prompt_ids is not None and row.response_ids is not None:
        written = row.extra.get("thinking")
        if written is not None and settings.thinking is not None and written != settings.thinking:
            raise ValueError(f"{row.where}: answered with thinking={written}, but data.thinking={settings.thinking}")
        chats = [recorded(row.prompt_ids, row.response_ids)]
    elif trouble := _order(row.messages or []):
        report.drop(trouble)
        return
    else:
        assert template is not None
        messages = row.messages or []
        try:
            chats = template.split(messages) if settings.multi_turn == "split" else [template.chat(messages)]
        except TemplateError as error:
            report.drop("refused by the chat template")
            report.first_refusal = report.first_refusal or f"{row.where}: {error}"
            return
        if not chats:
            report.drop("no answer")
    for number, chat in enumerate(chats, start=1):
        name = row.id if len(chats) == 1 else f"{row.id}/{number}"
        yield Conversation(name, row.domain, chat.tokens, chat.turns)


def fit(conversation: Conversation, max_length: int | None, report: Report) -> bool:
    """Cut a conversation in place, to max_length and after its last answer, and count it; False if it cannot teach.

    An anchor needs a following token in the same answer, so an answer of one token teaches nothing.
    """
    tokens, turns = conversation.tokens, conversation.turns
    if not any(turns):
        report.drop("no answer")
        return False
    last = max(i for i, turn in enumerate(turns) if turn) + 1
    del tokens[last:], turns[last:]
    cut = Chat(tokens, turns).truncate(max_length)
    if not any(turns):
        report.drop("answer beyond max_length")
        return False
    if not any(len(list(run)) >= 2 for turn, run in groupby(turns) if turn):
        report.drop("fewer than 2 answer tokens")
        return False
    last = max(i for i, turn in enumerate(turns) if turn) + 1
    del tokens[last:], turns[last:]
    report.truncated += cut
    report.kept += 1
    report.tokens += len(tokens)
    report.answer_tokens += conversation.answer_tokens
    return True


def write_conversations(path: Path, conversations: Iterable[Conversation]) -> None:
    """Write JSONL atomically: {"id", "domain", "tokens", "answers": [[start, stop, turn], ...]}."""
    with atomic(path) as temporary, open(temporary, "w", encoding="utf-8") as handle:
        for one in conversations:
            row = {"id": one.id, "domain": one.domain, "tokens": one.tokens, "answers": _spans(one.turns)}
            handle.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")


def read_conversations(path: Path) -> list[Conversation]:
    """Read what `write_conversations` wrote; ValueError names file and line of a row that is not such a row."""
    conversations: list[Conversation] = []
    known: dict[int, int] = {}  # one object an id, where JSON makes one of 28 bytes for every token
    for where, row in read_jsonl(Path(path)):
        if set(row) != {"id", "domain", "tokens", "answers"}:
            raise ValueError(f"{where}: expected id, domain, tokens and answers, got {', '.join(row)}")
        turns = [0] * len(row["tokens"])
        for start, stop, turn in row["answers"]:
            if not 0 <= start < stop <= len(turns):
                raise ValueError(f"{where}: answer {[start, stop]} lies outside its {len(turns)} tokens")
            turns[start:stop] = [turn] * (stop - start)
        tokens = [known.setdefault(token, token) for token in row["tokens"]]
        conversations.append(Conversation(row["id"], row["domain"], tokens, turns))
    return conversations


def token_counts(conversations: Iterable[Conversation], vocab_size: int) -> Tensor:
    """How often each token occurs in answers: int64 [V]. Prompts do not count; a drafter never predicts them."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for one in conversations:
        answers = torch.tensor(one.tokens)[torch.tensor(one.turns) > 0]
        counts += torch.bincount(answers, minlength=vocab_size)
    return counts


def split_heldout(items: Sequence[T], per_domain: int) -> tuple[list[T], list[T]]:
    """Split into (train, heldout): `per_domain` prompts of each domain are held out, with all their answers.

    Chosen by a hash of the prompt itself, so the choice does not depend on order, ids or what else is there, and
    several answers to one prompt land on one side. ValueError when a domain has no more prompts than that.
    """
    chosen: set[str] = set()
    for domain in sorted({item.domain for item in items}):
        keys = sorted({_key(item) for item in items if item.domain == domain})
        if per_domain >= len(keys):
            raise ValueError(f"cannot hold out {per_domain} prompts of domain {domain!r}: it has {len(keys)}")
        chosen |= set(keys[:per_domain])
    return [i for i in items if _key(i) not in chosen], [i for i in items if _key(i) in chosen]


def asked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The chat up to its first answer."""
    answers = (i for i, message in enumerate(messages) if message["role"] == "assistant")
    return messages[: next(answers, len(messages))]


def prompt_key(messages: Sequence[dict[str, Any]]) -> str:
    """What makes two prompts the same: roles and words, white space and case aside."""
    return fingerprint([[m["role"], " ".join((m["content"] or "").casefold().split())] for m in messages])


def _key(item: Prompt | Conversation) -> str:
    if isinstance(item, Prompt):
        return prompt_key(item.messages)
    start = next((i for i, turn in enumerate(item.turns) if turn), len(item.tokens))
    return hashlib.sha256(json.dumps(item.tokens[:start]).encode()).hexdigest()


def _eval_keys(settings: SourceSettings) -> set[str]:
    if settings.eval_path is None:
        return set()
    return {prompt_key(prompt.messages) for prompt in read_prompts(settings.eval_path)}


def _order(messages: Sequence[dict[str, Any]]) -> str | None:
    """Why a chat cannot be used, by its roles alone; None when it can."""
    roles = [message["role"] for message in messages if message["role"] not in ("system", "developer", "tool")]
    if not roles:
        return "no question" if messages else "empty chat"
    if roles[0] == "assistant":
        return "starts with an answer"
    for index in range(1, len(messages)):
        if messages[index]["role"] == messages[index - 1]["role"] != "tool":
            return "roles out of order"
    return None


def _spans(turns: list[int]) -> list[list[int]]:
    spans: list[list[int]] = []
    at = 0
    for turn, run in groupby(turns):
        length = len(list(run))
        if turn:
            spans.append([at, at + length, turn])
        at += length
    return spans
