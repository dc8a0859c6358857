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
    r"(^|[._-])(token|((api|access|secret|private)_?)key|secret|password|passwd|authorization|credentials?)$",
    re.IGNORECASE,
)
FORMS = (
    (re.compile(r"(?<=://)[^/\s@\"']+@"), f"{HIDDEN}@"),  # user:password@ of an address
    (re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{6,}", re.IGNORECASE), rf"\1 {HIDDEN}"),
    (re.compile(r"\b(hf_|sk-|wandb_v\d_|ghp_|github_pat_)[\w-]{6,}"), HIDDEN),
    (re.compile(r"(?<=[?&])((?:access_)?token|api_?key|key|signature|sig)=[^&\s\"']+", re.IGNORECASE), rf"\1={HIDDEN}"),
    (
        re.compile(
            r"(?<![\w])([\w.]*(?:[._](?:token|api_?key|secret|password))|api_?key|token|password)"
            r"=(?!null\b|true\b|false\b|-?\d+\b)[^\s\"',}]+",
            re.IGNORECASE,
        ),
        rf"\1={HIDDEN}",
    ),
)
ENVIRONMENT = re.compile(r"TOKEN|API_?KEY|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
SHORTEST = 8  # a shorter value would hide ordinary words


def without_secrets(value: Any, name: str = "") -> Any:
    """A copy of plain data in which secrets read <hidden>. name: of the setting that holds the value."""
    if isinstance(value, Mapping):
        return {key: without_secrets(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(without_secrets(inner, name) for inner in value)
    if not isinstance(value, str):
        return value
    return HIDDEN if value and NAME.search(name) and not value.isdigit() else hide(value)


def hide(text: str) -> str:
    """Text in which whatever looks like a secret, or is one of this process's environment, reads <hidden>."""
    for name, value in os.environ.items():
        if ENVIRONMENT.search(name) and len(value) >= SHORTEST:
            text = text.replace(value, HIDDEN)
    for form, put in FORMS:
        text = form.sub(put, text)
    return text
