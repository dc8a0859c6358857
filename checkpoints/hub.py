"""Upload of a head's folder to the model hub, on request: private unless said otherwise, the token never shown.

Only files that a head consists of go up, whatever else lies in the folder. Those JSON files that this project writes
go up without paths of this machine; all others, a tokenizer's say, as they are.
"""

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, get_token

from checkpoints.card import HUB_ID, public
from checkpoints.engine_entry import PROVENANCE
from checkpoints.files import read_json
from checkpoints.folder import CONFIG

WANTED = re.compile(
    r"[^.].*\.safetensors(\.index\.json)?|README\.md|LICENSE|NOTICE|mask_embedding\.pt|medusa_lm_head\.pt|[^.].*\.jinja"
    r"|tokenizer\.model|merges\.txt|vocab\.txt"
    r"|(config|headstart|calibration|generation_config|special_tokens_map|added_tokens|tokenizer|tokenizer_config|vocab"
    r"|chat_template|preprocessor_config|processor_config)\.json"
)
OURS = (CONFIG, PROVENANCE, "calibration.json")


@dataclass(frozen=True)
class Pushed:
    """files: (name, bytes) of each. url: None when nothing was sent."""

    repo: str
    private: bool
    files: list[tuple[str, int]]
    url: str | None

    def lines(self) -> list[str]:
        """What was, or would be, sent."""
        total = sum(size for _, size in self.files)
        verb = "would send" if self.url is None else "sent"
        kind = "private" if self.private else "public"
        head = f"{verb} {len(self.files)} file(s), {total / 1e6:,.1f} MB, to {self.repo} ({kind})"
        return [head, *(f"  {name}  {size:,}" for name, size in self.files)] + ([self.url] if self.url else [])


def files_of(folder: Path) -> list[Path]:
    """The files of a head's folder that are sent, by name. ValueError for a folder that was never written whole, and
    for a link that leaves it."""
    folder = Path(folder)
    if not (folder / CONFIG).exists():
        raise ValueError(f"{folder} holds no head, or was never written whole: it has no {CONFIG}")
    found = sorted(path for path in folder.iterdir() if path.is_file() and WANTED.fullmatch(path.name))
    away = [path.name for path in found if path.is_symlink() and folder.resolve() not in path.resolve().parents]
    if away:
        raise ValueError(f"{folder}: {', '.join(away)} link(s) to files elsewhere, which are not sent; export again")
    return found


def push(
    folder: Path,
    repo: str,
    *,
    private: bool = True,
    dry_run: bool = False,
    connect: Callable[[str], Any] | None = None,
) -> Pushed:
    """Send a head's folder to `repo` (ORGANISATION/NAME), one commit. connect: gives the hub's API from a token.

    dry_run: list what would be sent, without a token or a connection. ValueError on a bad name, without a token, and
    when `private` is asked of a repository that is public. RuntimeError when the hub refuses, in its words.
    """
    if not HUB_ID.fullmatch(repo):
        raise ValueError(f"push must be ORGANISATION/NAME, got {repo!r}")
    files = files_of(folder)
    listed = [(path.name, len(_content(path)) if path.name in OURS else path.stat().st_size) for path in files]
    if dry_run:
        return Pushed(repo, private, listed, None)
    token = get_token()
    if not token:
        raise ValueError("no token of the hub: set HF_TOKEN, or run `hf auth login`")
    try:
        api = (connect or _connect)(token)
        api.create_repo(repo, private=private, exist_ok=True, repo_type="model")
        if private and not api.repo_info(repo, repo_type="model").private:
            raise ValueError(f"{repo} is there already and is public; pass private=false to send to it")
        sent = [(path, _content(path) if path.name in OURS else str(path)) for path in files]
        operations = [CommitOperationAdd(path.name, content) for path, content in sent]
        done = api.create_commit(repo, operations, commit_message="headstart export", repo_type="model")
    except ValueError:
        raise
    except Exception as error:
        # The hub's own errors quote requests; whatever they quote, the token is not passed on, nor is the chain.
        words = str(error).replace(token, "***")
        raise RuntimeError(f"the hub refused {repo}: {type(error).__name__}: {words}") from None
    return Pushed(repo, private, listed, str(done.commit_url))


def _connect(token: str) -> HfApi:
    return HfApi(token=token, endpoint=os.environ.get("HF_ENDPOINT"))


def _content(path: Path) -> bytes:
    """A JSON file without paths of this machine: as it is when it has none."""
    value = read_json(path)
    told = public(value)
    return path.read_bytes() if told == value else (json.dumps(told, indent=2, ensure_ascii=False) + "\n").encode()
