"""Prompt sets to measure on, by name, by file, or several of them.

prompts=builtin                   the shipped held-out set: chat, code, json, math, prose
prompts=json                      one of its domains
prompts=long  prompts=long:4000   made texts of so many words with a question about them (default 500 to 4000)
prompts=gsm8k                     a preset of conf/suite, from the dataset hub
prompts=FILE.jsonl                rows of messages, or rows of turns (Spec-Bench, DeepSpec)
prompts=[json,gsm8k]              several in a row
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from checkpoints.run import ROOT, settings
from data.conversations import Prompt, read_prompts
from data.sources import SourceSettings, load_rows, read_jsonl

FOLDER = ROOT / "conf" / "suite"
LONG = "long"
WORDS, PER_LENGTH = (500, 1000, 2000, 4000), 2


@dataclass(frozen=True)
class Suite:
    """A hub dataset as prompts, as conf/suite/NAME.yaml gives it.

    path: the dataset's name, or a local file that `datasets` reads. subset, split, revision: of the dataset. text: the
    question, with the row's columns in braces; or turns_column: a column with one text, or with a list of what the user
    says in turn. domain_column: where a row names its domain (else the suite's name is it). ValueError unless there is
    exactly one of text and turns_column.
    """

    path: str
    subset: str | None = None
    split: str = "test"
    revision: str | None = None
    text: str | None = None
    turns_column: str | None = None
    domain_column: str | None = None

    def __post_init__(self) -> None:
        if (self.text is None) == (self.turns_column is None):
            raise ValueError("a suite needs either text or turns_column")


def load_prompts(name: str | Sequence[str]) -> list[Prompt]:
    """Prompts by the names above. ValueError names an unknown name, a bad row by file and line, and an id that comes
    twice."""
    if not isinstance(name, str):
        if not name:
            raise ValueError("prompts names no suite")
        found = [prompt for one in name for prompt in load_prompts(one)]
        ids = [prompt.id for prompt in found]
        if len(set(ids)) < len(ids):
            twice = next(one for one in ids if ids.count(one) > 1)
            raise ValueError(f"prompts {', '.join(name)}: id {twice!r} comes twice")
        return found
    if name == "builtin":
        return read_prompts(SourceSettings("builtin"), part="heldout")
    if name.split(":")[0] == LONG:
        return long_prompts(_lengths(name))
    if (FOLDER / f"{name}.yaml").exists():
        return suite_prompts(name, settings(Suite, _read(name), f"suite {name}"))
    if Path(name).suffix or Path(name).exists():
        return file_prompts(Path(name))
    shipped = read_prompts(SourceSettings("builtin"), part="heldout")
    found = [prompt for prompt in shipped if prompt.domain == name]
    if not found:
        raise ValueError(f"prompts: no suite {name!r}; allowed: {', '.join(names())}, or a JSONL file")
    return found


def names() -> list[str]:
    """What `load_prompts` knows by name."""
    shipped = sorted({prompt.domain for prompt in read_prompts(SourceSettings("builtin"), part="heldout")})
    return ["builtin", *shipped, LONG, *sorted(path.stem for path in FOLDER.glob("*.yaml"))]


def file_prompts(path: Path) -> list[Prompt]:
    """A JSONL file of messages ({"id", "domain", "messages"}, asked up to the first answer) or of turns."""
    first = next(read_jsonl(path), None)
    if first is None:
        raise ValueError(f"{path} holds no prompts")
    if "turns" not in first[1] or "messages" in first[1]:
        return read_prompts(path)
    return list(_turn_rows(path))


def _turn_rows(path: Path) -> Iterator[Prompt]:
    """Rows of Spec-Bench ({"question_id", "category", "turns"}) and of DeepSpec ({"turns"}, the file's name says what
    they are): all turns are asked, one after the other."""
    for index, (where, row) in enumerate(read_jsonl(path)):
        turns = row.get("turns")
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
            raise ValueError(f"{where}: a row of turns needs a list of texts, got {turns!r}")
        name = row.get("question_id", f"{path.stem}-{index:05d}")
        yield _prompt(str(name), str(row.get("category", path.stem)), turns)


def suite_prompts(name: str, suite: Suite) -> list[Prompt]:
    """A suite's prompts in the dataset's order. ValueError when the dataset cannot be had, or lacks a column."""
    try:
        rows = list(load_rows(suite.path, suite.subset, suite.split, suite.revision))
    except (OSError, RuntimeError) as error:  # what `datasets` and the hub's client raise without a network
        raise ValueError(
            f"prompts={name}: the dataset {suite.path} cannot be had ({type(error).__name__}: {error}); "
            "without the hub name a JSONL file of its prompts instead: prompts=FILE.jsonl"
        ) from error
    found = []
    for index, row in enumerate(rows):
        column = suite.turns_column
        try:
            turns = row[column] if column is not None else str(suite.text).format_map(row)
            domain = name if suite.domain_column is None else str(row[suite.domain_column])
        except KeyError as error:
            has = ", ".join(map(repr, row))
            raise ValueError(f"suite {name}: {suite.path} has no column {error}; it has {has}") from error
        found.append(_prompt(f"{name}-{index:05d}", domain, [turns] if isinstance(turns, str) else list(turns)))
    return found


def long_prompts(lengths: Sequence[int]) -> list[Prompt]:
    """Made logs of so many words each, with a question that only the whole text answers; the same ones every time.

    Their domain is long-WORDS, so that acceptance is seen by length of the context.
    """
    return [
        _prompt(f"{LONG}-{words}-{index}", f"{LONG}-{words}", [_log(words, index)])
        for words in lengths
        for index in range(PER_LENGTH)
    ]


def _log(words: int, index: int) -> str:
    draw = random.Random(f"{words}/{index}")
    people, places = ("Ana", "Bruno", "Carla", "Dino", "Emil", "Fran"), ("Split", "Graz", "Lyon", "Porto", "Turin")
    things = ("crates of apples", "boxes of nails", "rolls of cloth", "sacks of flour", "cans of paint")
    lines: list[str] = []
    while 13 * len(lines) < words:  # words of a line
        who, what, where = draw.choice(people), draw.choice(things), draw.choice(places)
        lines.append(f"Entry {len(lines) + 1}: {who} brought {draw.randint(2, 90)} {what} to the store in {where}.")
    wanted = draw.randint(1, len(lines))
    ask = (
        f"What does entry {wanted} say, and which entries around it name the same place?"
        if index % 2
        else "Summarise the log above: who brought what, and where to? Give a short list."
    )
    return "\n".join([*lines, "", ask])


def _lengths(name: str) -> list[int]:
    _, colon, given = name.partition(":")
    if not colon:
        return list(WORDS)
    parts = given.split(":")
    if not all(part.isdigit() and int(part) >= 1 for part in parts):
        raise ValueError(f"prompts={name}: {LONG}:WORDS[:WORDS...] takes numbers of words, got {given!r}")
    return [int(part) for part in parts]


def _prompt(name: str, domain: str, turns: Sequence[str]) -> Prompt:
    return Prompt(name, domain, [{"role": "user", "content": turns[0]}], list(turns[1:]))


def _read(name: str) -> dict[str, Any]:
    found: Any = OmegaConf.to_container(OmegaConf.load(FOLDER / f"{name}.yaml"))
    return dict(found)
