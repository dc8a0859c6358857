"""What never reaches a file or a log: keys, tokens and passwords, by the names they go under, by their form, and by the
values that this process's environment holds."""

import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "<hidden>"
# A setting of this name that holds text is a secret. `mask_token` holds a number; `api_key_env` and `role_key` do not
# match.
NAME = re.compile(
    r"(^|[._-])(token|((api|access|secret|private)[_-]?)key|secret|password|passwd|authorization|credentials?)$",
    re.IGNORECASE,
)
# A list, a value in quotes, or up to a space. Null, true, false and whole numbers are no text: `mask_token=7` stays.
VALUE = r"(?:\[[^\]]*(?:\]|$)|'(?:\\.|[^'\\])*(?:'|$)|\"(?:\\.|[^\"\\])*(?:\"|$)|[^\s\"',}]+)"
TEXT = r"(?!(?:null|none|true|false|-?\d+)(?=[\s\"',}\])]|$))" + VALUE
# A word of a command line whose value is the next word.
FLAG = r"--(?:[\w-]*api[_-]?key|(?:hf-|access-|auth-)?token|[\w-]*(?:password|secret))"
FLAG_ALONE = re.compile(FLAG, re.IGNORECASE)
FORMS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?<=://)[^/\s@\"']+@"), f"{HIDDEN}@"),  # user:password@ of an address
    (re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{6,}", re.IGNORECASE), rf"\1 {HIDDEN}"),
    (re.compile(r"\b(hf_[A-Za-z0-9]{16,}|(sk-|wandb_v\d_|ghp_|github_pat_)[\w-]{16,})"), HIDDEN),
    (re.compile(rf"(?<![\w-])({FLAG}[\"']?(?:\s*[,=]\s*|\s+))(?!--){VALUE}", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(r"(?<=[?&])((?:access_)?token|api_?key|key|signature|sig)=[^&\s\"']+", re.IGNORECASE), rf"\1={HIDDEN}"),
    (
        re.compile(
            r"(?<![\w])([\w.]*(?:[._](?:token|api[_-]?key|secret|password))|api[_-]?key|token|password)=" + TEXT,
            re.IGNORECASE,
        ),
        rf"\1={HIDDEN}",
    ),
)
# As servers log their settings and headers: the key of a dictionary, and a whole header.
HEADER = r"(?<![\w-])(?:(?:proxy-)?authorization|x-api-key)[\"']?\s*[:=]\s*[\"']?"
KEY = r"[\w.-]*api[_-]?key|(?:hf|hub|access|auth|refresh)?[_-]?token|[\w.-]*(?:password|secret)"
FORMS += (
    (re.compile(rf"([\"'](?:{KEY})[\"']\s*:\s*)" + TEXT, re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(rf"({HEADER})[^\"'\r\n,}}]+", re.IGNORECASE), rf"\1{HIDDEN}"),
)
ENVIRONMENT = re.compile(r"TOKEN|API_?KEY|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
SHORTEST = 8  # a shorter value would hide ordinary words


def without_secrets(value: Any, name: str = "") -> Any:
    """A copy of plain data in which secrets read <hidden>. name: of the setting that holds the value."""
    if isinstance(value, Mapping):
        return {key: without_secrets(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        before = [None, *value]
        return type(value)(
            HIDDEN
            if _flags(last) and isinstance(inner, str) and not inner.startswith("--")
            else without_secrets(inner, name)
            for last, inner in zip(before, value, strict=False)
        )
    if not isinstance(value, str):
        return value
    return HIDDEN if value and NAME.search(name) and not value.isdigit() else hide(value)


def _flags(word: Any) -> bool:
    return isinstance(word, str) and FLAG_ALONE.fullmatch(word) is not None


def hide(text: str) -> str:
    """Text in which whatever looks like a secret, or is one of this process's environment, reads <hidden>."""
    for name, value in os.environ.items():
        if ENVIRONMENT.search(name) and len(value) >= SHORTEST:
            text = text.replace(value, HIDDEN)
    for form, put in FORMS:
        text = form.sub(put, text)
    return text
