"""An append-only JSONL journal: what is in it is done, whatever happens next."""

import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from data.sources import read_jsonl


def dump(row: dict[str, Any]) -> str:
    """One row as one line, the same bytes whether it was just made or read back."""
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n"


class Journal:
    """Rows with an "id", appended one by one and flushed each; the first line is a header that says what run this is.

    Opening an existing journal reads its rows. A last line that was torn by a kill is cut off, and its id is redone. A
    header other than the given one is refused: its rows belong to another run. A later row of the same id wins.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path = Path(path)
        self.rows: dict[str, dict[str, Any]] = {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self._cut_torn_line()
        lines = list(read_jsonl(self.path)) if self.path.exists() else []
        if lines:
            check_header(lines[0][1].get("header"), header, self.path)
            for where, row in lines[1:]:
                if "id" not in row:
                    raise ValueError(f"{where}: a journal row needs an id")
                self.rows[row["id"]] = row
        self._handle = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (closed by __exit__)
        if not lines:
            self._write({"header": header})

    def append(self, row: dict[str, Any]) -> None:
        self.rows[row["id"]] = row
        self._write(row)

    def _write(self, row: dict[str, Any]) -> None:
        self._handle.write(dump(row))
        self._handle.flush()

    def _cut_torn_line(self) -> None:
        whole = self.path.read_bytes()
        end = whole.rfind(b"\n") + 1
        if end < len(whole):
            with open(self.path, "r+b") as handle:
                handle.truncate(end)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.close()


def check_header(found: Any, wanted: dict[str, Any], path: Path) -> None:
    """ValueError naming what differs between the run that wrote a file and this one."""
    wanted = _by_fingerprint(json.loads(json.dumps(wanted)))
    there = _by_fingerprint(found) if isinstance(found, dict) else {}
    if there != wanted:
        keys = sorted(set(wanted) | set(there))
        differ = [f"{k}: {there.get(k)!r} there, {wanted.get(k)!r} here" for k in keys if there.get(k) != wanted.get(k)]
        raise ValueError(f"{path} was begun by another run ({'; '.join(differ)}); remove it or choose another path")


def _by_fingerprint(header: dict[str, Any]) -> dict[str, Any]:
    """A header whose target is what its fingerprints say, under whatever name and revision it was opened."""
    target = header.get("target")
    if not isinstance(target, dict) or not target.get("weights"):
        return header
    return header | {"target": {key: value for key, value in target.items() if key not in ("name", "revision")}}
