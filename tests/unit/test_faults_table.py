"""docs/faults.md promises outcomes: each row names tests that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUTCOMES = ("resume", "refuse", "skip", "ends", "nothing", "counts", "free", "reads", "say", "stop")


def rows(text: str) -> list[list[str]]:
    """Cells of the table's rows, heads aside."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def missing(text: str) -> list[str]:
    """Rows without a test, and tests that are not there."""
    found = []
    for fault, _, named in rows(text):
        tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", named)
        found += [] if tests else [fault]
        for path, name in tests:
            file = ROOT / path
            tree = ast.parse(file.read_text()) if file.exists() else ast.Module([], [])
            if name not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
                found.append(f"{fault}: {path}::{name}")
    return found


def test_every_row_names_tests_that_exist():
    text = (ROOT / "docs" / "faults.md").read_text()
    assert len(rows(text)) >= 25
    assert missing(text) == []


def test_every_row_has_a_defined_outcome():
    for fault, outcome, _ in rows((ROOT / "docs" / "faults.md").read_text()):
        assert any(word in outcome for word in OUTCOMES), f"{fault}: {outcome}"


def test_a_row_without_its_test_is_found():
    text = "| fault | outcome | test |\n|---|---|---|\n| a | skip | - |\n"
    text += "| b | skip | `tests/unit/test_house.py::test_no` |"
    assert missing(text) == ["a", "b: tests/unit/test_house.py::test_no"]
