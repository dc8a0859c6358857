"""The model card of a drafter: README.md with the header that the hub reads, beside our folder and beside every export.

A card is made to be published, so no path of the machine that wrote it stands there (`public`).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # checkpoints.folder writes cards: importing it here would go round
    from checkpoints.folder import Declared

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
# Paths of two parts or more, absolute or in a home folder; the last part stays. Text of one part, as "/no_think" and
# "</s>", is none. Spaces belong to a path in quotes, and to one that is a whole value.
FILE_URL = re.compile(r"\bfile://(?:localhost)?(?=/)")
PATH = re.compile(r"(?<![\w/.<|])(?:~|/[\w.@+-]+)(?:/[\w.@+-]+)*/([\w.@+-]+)")
QUOTED = re.compile(r"""(["'])(?:~|/[^/"'\n]+)(?:/[^/"'\n]+)*/([^/"'\n]+)\1""")
ALONE = re.compile(r"(?:~|/[^/\s]+)(?:/(?:[^/\s]| (?![-/~{]))+)*/((?:[^/\s]| (?![-/~{]))+)/?")
DATA_KEYS = ("thinking", "chat_template", "conversations", "tokens", "answer_tokens", "domains")
LONGEST = 200


@dataclass(frozen=True)
class Shown:
    """What a card says beyond what the drafter declares. commands: how it is served, by engine or step. license: the
    hub's identifier, None for unknown. notes: what a user should know."""

    commands: dict[str, str] = field(default_factory=dict)
    license: str | None = None
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_license(self.license)


def check_license(name: str | None) -> None:
    """ValueError for something that is no license identifier of the hub (apache-2.0, mit, other, ...)."""
    if name is not None and not LICENSE.fullmatch(name):
        raise ValueError(f"license must be an identifier such as apache-2.0, mit or other, got {name!r}")


def public(value: Any) -> Any:
    """A JSON value without paths of this machine: of each only the last part stays. Hub ids and URLs stay whole."""
    if isinstance(value, dict):
        return {key: public(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [public(one) for one in value]
    if not isinstance(value, str):
        return value
    text = FILE_URL.sub("", value)
    alone = ALONE.fullmatch(text)
    return alone[1] if alone else PATH.sub(r"\1", QUOTED.sub(r"\1\2\1", text))


def card(declared: "Declared", shown: Shown | None = None) -> str:
    """README.md: the hub's header, what it is, for which target, trained on what, measured how, served how."""
    shown = shown or Shown()
    name = str(public(str(declared.target.get("name"))))
    rows = _rows(declared) | {f"measured: {key}": value for key, value in declared.measured.items()}
    body = "\n".join(f"| {key} | {_cell(public(value))} |" for key, value in rows.items())
    served = "\n\n".join(f"{what}:\n\n```\n{public(command)}\n```" for what, command in shown.commands.items())
    notes = "".join(f"- {public(note)}\n" for note in shown.notes)
    return (
        f"{header(declared, shown.license)}\n# Drafter ({declared.architecture}) for {name}\n\n"
        "A drafter head for speculative decoding: it guesses the next tokens of this one target, which verifies them,\n"
        "so the output stays the target's own.\n\n"
        f"| what | value |\n|---|---|\n{body}\n\n"
        + (f"## Serve\n\n{served}\n\n" if served else "")
        + (f"## Notes\n\n{notes}\n" if notes else "")
        + "Written by headstart. `headstart eval` measures it, `headstart doctor` finds a wrong convention,\n"
        "`headstart export` writes what engines load.\n"
    )


def header(declared: "Declared", terms: str | None) -> str:
    """The block between two lines of dashes. base_model stands there when the target's name is a hub id, and no folder
    here. terms: the license."""
    name = str(declared.target.get("name"))
    lines = [f"license: {terms or 'unknown'}", "library_name: headstart", "pipeline_tag: text-generation"]
    if HUB_ID.fullmatch(name) and not Path(name).is_dir():
        lines.append(f"base_model: {name}")
    lines += ["tags:", *(f"- {tag}" for tag in ("speculative-decoding", "draft-model", "headstart"))]
    lines.append(f"- {declared.architecture}")
    return "\n".join(["---", *lines, "---", ""])


def _rows(declared: "Declared") -> dict[str, Any]:
    target, data = declared.target, declared.data
    prepared = data.get("prepared", {})
    known = {key: value for key, value in (data | prepared).items() if key in DATA_KEYS and value is not None}
    other = {key: value for key, value in data.items() if key not in (*DATA_KEYS, "prepared")}
    rope = declared.rope or {}
    return {
        "architecture": declared.architecture,
        "target": f"{target.get('name')}{'' if not target.get('revision') else ' at ' + str(target['revision'])}",
        "target weights": target.get("weights"),
        "target tokenizer": target.get("tokenizer"),
        "target chat template": target.get("chat_template"),
        "target layers": f"{declared.layers} ({declared.layer_convention})",
        "reads the last hidden state": declared.last_hidden,
        "slots": f"{declared.num_slots} ({declared.slot_convention})",
        "mask token": declared.mask_token,
        "draft vocabulary": f"{declared.vocabulary['size']} of {declared.vocabulary['target_size']} tokens",
        "rope": f"{rope.get('rope_type', 'default')}, theta {rope.get('rope_theta')}" if rope else None,
        "dtype": declared.dtype,
        "tensors (sha256)": declared.tensors,
        **{f"data: {key}": value for key, value in (known | other).items()},
    }


def _cell(value: Any) -> str:
    text = str(value).replace("|", "\\|").replace("\n", " ")
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."
