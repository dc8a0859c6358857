"""The target writes its own answers: in process or through a server, resumable by id, with one result either way.

A drafter must learn what its target says, so answers are sampled from the target and kept as token ids.
"""

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedModel

from checkpoints.files import atomic, fingerprint, read_json, write_json
from data.chat import Template
from data.conversations import Prompt
from data.decoding import Decoder, Request
from data.journal import Journal, check_header, dump
from data.server import Question, ServerSettings, ask_all
from data.sources import read_jsonl
from drafters.sampling import Sampling


@dataclass(frozen=True)
class AnswerSettings:
    """How the target answers.

    backend: local (in this process) or server. temperature, top_k, top_p, seed: the sampling. max_new_tokens: of one
    answer, the end token included. max_prompt_tokens: longer prompts are dropped and counted. samples: answers to each
    prompt. batch_size: rows of the local backend. server: settings of data.server.ServerSettings, for backend=server.
    """

    backend: str = "local"
    temperature: float = 0.7
    top_k: int | None = 50
    top_p: float | None = None
    seed: int = 0
    max_new_tokens: int = 256
    max_prompt_tokens: int = 2048
    samples: int = 1
    batch_size: int = 32
    server: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.backend not in ("local", "server"):
            raise ValueError(f"answers.backend must be local or server, got {self.backend!r}")
        if self.backend == "server" and not self.server:
            raise ValueError("answers.backend=server needs answers.server={base_url: URL, model: NAME}")
        for name in ("max_new_tokens", "max_prompt_tokens", "samples", "batch_size"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"answers.{name} must be an integer >= 1, got {getattr(self, name)!r}")
        self.sampling()

    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p)

    def server_settings(self) -> ServerSettings:
        known = ServerSettings.__dataclass_fields__
        if unknown := sorted(set(self.server or {}) - set(known)):
            raise ValueError(f"unknown key(s) in answers.server: {', '.join(unknown)}; allowed: {', '.join(known)}")
        return ServerSettings(**(self.server or {}))

    def recorded(self) -> dict[str, Any]:
        """What of the settings shapes an answer, as written into every row."""
        names = ("temperature", "top_k", "top_p", "seed", "max_new_tokens")
        return {name: getattr(self, name) for name in names}


class TargetLike(Protocol):
    """What answering in process reads of a target."""

    model: Any
    identity: dict[str, Any]

    @property
    def eos_ids(self) -> tuple[int, ...]: ...


@dataclass
class AnswerReport:
    """asked = reused + written + errors; dropped prompts were never asked. tokens and seconds: of this run. ids: of the
    answers that were asked for and are there."""

    asked: int = 0
    reused: int = 0
    written: int = 0
    tokens: int = 0
    seconds: float = 0.0
    dropped: dict[str, int] = field(default_factory=dict)
    finish: dict[str, int] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    ids: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """All counts, without the ids."""
        return {name: value for name, value in asdict(self).items() if name != "ids"}


def answer(
    prompts: Sequence[Prompt],
    settings: AnswerSettings,
    output: Path,
    template: Template,
    target: TargetLike,
    transport: httpx.AsyncBaseTransport | None = None,
) -> AnswerReport:
    """Let the target answer the prompts into `output`, a JSONL file in prompt order, rows of other prompts that were
    answered before behind them; say what happened.

    Rows: id, domain, messages (with the answer), prompt_ids, response_ids, finish_reason, sampling, thinking. Every
    finished row goes to `output.journal` at once, so a killed run continues where it was and ends with the same file;
    the finished file appears whole, with `output.json` beside it. Ids that are there already are not asked again. Ids
    that a server failed to answer are in the report and stay in the journal; the next run asks them again. `transport`
    replaces the network in tests.

    Raises ValueError when the file or journal was written by another target, template or sampling, when an id's prompt
    changed, when two prompts share an id, and when no prompt at all was answered.
    """
    output = Path(output)
    header = _header(settings, template, target)
    report = AnswerReport()
    questions = _questions(prompts, settings, template, target, report)
    before = _finished_rows(output, header)
    with Journal(output.with_name(output.name + ".journal"), header) as journal:
        done = before | {name: row for name, row in journal.rows.items() if "error" not in row}
        for name, (_, question) in questions.items():
            if name in done and done[name]["prompt_ids"] != question.prompt_ids:
                raise ValueError(f"{output}: id {name!r} was answered for another prompt; ids must keep their prompts")
        report.asked, report.reused = len(questions), sum(name in done for name in questions)
        left = [question for name, (_, question) in questions.items() if name not in done]
        with _Recorder(journal, settings, template, report, questions, total=len(left)) as recorder:
            if settings.backend == "server":
                server = settings.server_settings()
                asyncio.run(
                    ask_all(
                        left, template, settings.sampling(), settings.max_new_tokens, server,
                        recorder.finished, recorder.failed, transport,
                    )
                )  # fmt: skip
            else:
                _answer_here(left, settings, target, recorder)
        done |= {name: row for name, row in journal.rows.items() if "error" not in row}
    rows = [done[name] for name in questions if name in done]
    if not rows:
        reason = next(iter(report.errors.values()), "every prompt was dropped: " + str(report.dropped))
        raise ValueError(f"no prompt was answered; {reason}")
    report.finish = {reason: sum(row["finish_reason"] == reason for row in rows) for reason in ("stop", "length")}
    report.ids = [row["id"] for row in rows]
    rows += [row for name, row in done.items() if name not in questions]  # of a larger run: paid for, and kept
    if rows != list(before.values()):
        _publish(output, rows, header, report)
    if not report.errors:
        journal.path.unlink()
    return report


def _publish(output: Path, rows: list[dict[str, Any]], header: dict[str, Any], report: AnswerReport) -> None:
    """Write the finished file and, beside it, what run it belongs to."""
    with atomic(output) as temporary, open(temporary, "w", encoding="utf-8") as handle:
        handle.writelines(dump(row) for row in rows)
    write_json(output.with_name(output.name + ".json"), {"header": header, "report": report.as_dict()})


def _header(settings: AnswerSettings, template: Template, target: TargetLike) -> dict[str, Any]:
    return {
        "sampling": settings.recorded(),
        "thinking": template.thinking,
        "template": fingerprint(str(template.tokenizer.get_chat_template())),
        "target": target.identity,
    }


def _finished_rows(output: Path, header: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Rows of a finished file by id, after checking that this very run could have written it."""
    if not output.exists():
        return {}
    check_header(read_json(output.with_name(output.name + ".json")).get("header"), header, output)
    return {row["id"]: row for _, row in read_jsonl(output)}


def _questions(
    prompts: Sequence[Prompt], settings: AnswerSettings, template: Template, target: TargetLike, report: AnswerReport
) -> dict[str, tuple[Prompt, Question]]:
    """Prompts that fit, rendered and seeded, by answer id: the prompt's id, `id#n` for further answers."""
    room = getattr(target.model.config.get_text_config(), "max_position_embeddings", None)
    longest = min(settings.max_prompt_tokens, (room or 1 << 40) - settings.max_new_tokens)
    questions: dict[str, tuple[Prompt, Question]] = {}
    for prompt in prompts:
        ids = template.prompt(prompt.messages)
        if len(ids) > longest:
            reason = f"longer than {longest} tokens"
            report.dropped[reason] = report.dropped.get(reason, 0) + 1
            continue
        for sample in range(settings.samples):
            name = f"{prompt.id}#{sample}" if sample else prompt.id  # so that one sample can be extended to several
            if name in questions:
                raise ValueError(f"two prompts have the id {prompt.id!r}; ids must be unique to resume by them")
            questions[name] = (prompt, Question(name, prompt.messages, ids, request_seed(name, settings.seed)))
    return questions


def request_seed(name: str, seed: int) -> int:
    """The int64 that keys one answer's random numbers: from its id and the run's seed alone."""
    digest = hashlib.sha256(f"{seed}\n{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _answer_here(left: list[Question], settings: AnswerSettings, target: TargetLike, recorder: "_Recorder") -> None:
    model: PreTrainedModel = target.model
    decoder = Decoder(model, settings.sampling(), settings.max_new_tokens, target.eos_ids, settings.batch_size)
    by_id = {question.id: question for question in left}
    # Longest prompts first: the buffer gets its width at once, and short ones fill the gaps at the end.
    order = sorted(left, key=lambda question: -len(question.prompt_ids))
    for one in decoder.run(Request(q.id, q.prompt_ids, q.seed) for q in order):
        recorder.in_flight = decoder.tokens
        recorder.finished(by_id[one.id], one.response_ids, one.finish_reason)


class _Recorder:
    """Writes each finished row to the journal and keeps the progress bar."""

    def __init__(
        self, journal: Journal, settings: AnswerSettings, template: Template, report: AnswerReport,
        questions: dict[str, tuple[Prompt, Question]], total: int,
    ) -> None:  # fmt: skip
        self.journal, self.settings, self.template, self.report = journal, settings, template, report
        self.questions = questions
        self.total = total
        self.in_flight = 0

    def __enter__(self) -> "_Recorder":
        self.began = time.perf_counter()
        self.bar = Progress(
            TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]} tokens/s"),
            TextColumn("left"), TimeRemainingColumn(), disable=self.total == 0,
        )  # fmt: skip
        self.task = self.bar.add_task("answers", total=self.total, rate=0)
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()
        self.report.seconds = time.perf_counter() - self.began

    def finished(self, question: Question, response_ids: list[int], finish_reason: str) -> None:
        prompt = self.questions[question.id][0]
        text = self.template.tokenizer.decode(response_ids, skip_special_tokens=True)
        self.journal.append(
            {
                "id": question.id,
                "domain": prompt.domain,
                "messages": [*prompt.messages, {"role": "assistant", "content": text}],
                "prompt_ids": question.prompt_ids,
                "response_ids": response_ids,
                "finish_reason": finish_reason,
                "sampling": self.settings.recorded(),
                "thinking": self.template.thinking,
            }
        )
        self.report.written += 1
        self.report.tokens += len(response_ids)
        self._advance()

    def failed(self, question: Question, error: str) -> None:
        self.journal.append({"id": question.id, "error": error})
        self.report.errors[question.id] = error
        self._advance()

    def _advance(self) -> None:
        rate = max(self.in_flight, self.report.tokens) / max(time.perf_counter() - self.began, 1e-9)
        self.bar.update(self.task, advance=1, rate=f"{rate:.0f}")
