"""Where prompts and chats come from: the shipped set, JSONL files, Hugging Face datasets. One row shape for all."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.chat import check_messages

BUILTIN = Path(__file__).parent / "prompts"
SOURCES = ("builtin", "jsonl", "answers_jsonl", "dataset")
FILE_READERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}


@dataclass(frozen=True)
class SourceSettings:
    """One data source, as conf/data/*.yaml gives it.

    source: builtin (the shipped prompts), jsonl (rows with messages), answers_jsonl (rows with prompt_ids and
        response_ids, recorded when the target answered) or dataset (a Hugging Face dataset, or a local file of one).
    path: file, or the dataset's name. subset, split, revision: of the dataset.
    messages_column, role_key, content_key, id_column, domain_column: where a row keeps its chat. roles: the source's
        role names -> system, user, assistant, tool. domain: for rows that name none.
    limit: rows read at most. thinking: the template's thinking choice (null: its default). max_length: tokens kept of a
        conversation (null: all). multi_turn: joined (one row, all answers) or split (one row for each answer).
    heldout: prompts a domain kept out of training. eval_path: JSONL of prompts that training must not contain.
    Raises ValueError on values that contradict each other.
    """

    source: str
    path: str | None = None
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    messages_column: str = "messages"
    role_key: str = "role"
    content_key: str = "content"
    id_column: str | None = "id"
    domain_column: str | None = "domain"
    roles: dict[str, str] = field(default_factory=dict)
    domain: str = "chat"
    limit: int | None = None
    thinking: bool | None = None
    max_length: int | None = 2048
    multi_turn: str = "joined"
    heldout: int = 0
    eval_path: str | None = None

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"data.source must be one of {', '.join(SOURCES)}, got {self.source!r}")
        if (self.path is None) != (self.source == "builtin"):
            raise ValueError(f"data.path: source {self.source} " + ("takes none" if self.path else "needs one"))
        if self.multi_turn not in ("joined", "split"):
            raise ValueError(f"data.multi_turn must be joined or split, got {self.multi_turn!r}")
        for name, low in (("max_length", 2), ("limit", 1), ("heldout", 0)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
                raise ValueError(f"data.{name} must be an integer >= {low}, got {value!r}")


@dataclass
class Row:
    """One chat of a source. where: file and line. extra: the row's other keys (sampling, thinking ...)."""

    where: str
    id: str
    domain: str
    messages: list[dict[str, Any]] | None
    prompt_ids: list[int] | None = None
    response_ids: list[int] | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ("file:line", object) for every line that is not blank. ValueError names file and line."""
    try:
        handle = open(path, "rb")  # noqa: SIM115 (closed below; only the opening may fail here)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    with handle:
        for number, line in enumerate(handle, start=1):
            where = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where}: not whole JSON ({error})") from error
            if not isinstance(value, dict):
                raise ValueError(f"{where}: a row must be a JSON object, got {type(value).__name__}")
            yield where, value


def read_rows(settings: SourceSettings, part: str = "train") -> Iterator[Row]:
    """Yield the source's rows in order, at most `limit`. part: train or heldout, of the shipped set only.

    ValueError names file and line of a row that is not what the settings say, and of an id that comes twice.
    """
    if settings.source == "builtin":
        raw = read_jsonl(BUILTIN / f"{part}.jsonl")
    elif settings.source == "dataset":
        raw = _dataset(settings)
    else:
        raw = read_jsonl(Path(settings.path or ""))
    seen: dict[str, str] = {}
    for index, (where, value) in enumerate(raw):
        if index == settings.limit:
            return
        try:
            row = _row(settings, where, index, value)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        if row.id in seen:
            raise ValueError(f"{where}: id {row.id!r} was used before, at {seen[row.id]}")
        seen[row.id] = where
        yield row


def _row(settings: SourceSettings, where: str, index: int, value: dict[str, Any]) -> Row:
    named = value.get(settings.id_column) if settings.id_column else None
    domain = value.get(settings.domain_column) if settings.domain_column else None
    domain = str(domain or settings.domain)
    row = Row(where, str(named) if named is not None else f"{domain}-{index:06d}", domain, None)
    column = settings.messages_column
    recorded = settings.source == "answers_jsonl"
    if not recorded or value.get(column) is not None:
        if column not in value:
            raise ValueError(f"no {column!r} in the row; it has {', '.join(map(repr, value))}")
        row.messages = _messages(settings, value[column])
        check_messages(row.messages)
    if recorded:
        row.prompt_ids, row.response_ids = (_ids(value, name) for name in ("prompt_ids", "response_ids"))
        known = {settings.id_column, settings.domain_column, column, "prompt_ids", "response_ids"}
        row.extra = {name: item for name, item in value.items() if name not in known}
    return row


def _messages(settings: SourceSettings, value: Any) -> list[dict[str, Any]]:
    """The row's chat with this project's keys and roles; keys beyond role and content (tool_calls ...) stay."""
    if not isinstance(value, list):
        raise ValueError(f"{settings.messages_column} must be a list of messages, got {type(value).__name__}")
    messages = []
    for index, message in enumerate(value):
        if not isinstance(message, dict) or settings.role_key not in message or settings.content_key not in message:
            keys = f"{settings.role_key!r} and {settings.content_key!r}"
            raise ValueError(f"message {index} must have {keys}, got {message!r}")
        rest = {
            key: item
            for key, item in message.items()
            if key not in (settings.role_key, settings.content_key) and item is not None
        }
        role = message[settings.role_key]
        messages.append({"role": settings.roles.get(role, role), "content": message[settings.content_key], **rest})
    return messages


def _ids(value: dict[str, Any], name: str) -> list[int]:
    ids = value.get(name)
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError(f"{name} must be a list of token ids")
    return ids


def _dataset(settings: SourceSettings) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of a Hugging Face dataset by name, or of one local file in a format that `datasets` reads."""
    loaded = load_rows(str(settings.path), settings.subset, settings.split, settings.revision)
    for index, row in enumerate(loaded):
        yield f"{settings.path}[{settings.split}] row {index}", row


def load_rows(name: str, subset: str | None, split: str, revision: str | None) -> Iterator[dict[str, Any]]:
    """Rows of a dataset by its hub name, or of a local file in a format that `datasets` reads; ValueError when there is
    no such file."""
    import datasets  # imports pyarrow and pandas: slow, and needed here only

    path = Path(name)
    if path.suffix in FILE_READERS:
        if not path.exists():
            raise ValueError(f"data.path {path} does not exist")
        loaded = datasets.load_dataset(FILE_READERS[path.suffix], data_files=str(path), split="train")
    else:
        loaded = datasets.load_dataset(name, subset, split=split, revision=revision)
    for row in loaded:
        yield dict(row)
