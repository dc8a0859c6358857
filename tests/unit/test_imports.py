"""Imports run one way: drafters <- checkpoints <- data <- eval <- training <- headstart."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ORDER = ("drafters", "checkpoints", "data", "eval", "training")
FILES = sorted(path for room in ORDER for path in (ROOT / room).rglob("*.py"))
DRAFTERS_MAY = {"drafters", "torch", "transformers"}


def imported(source: str) -> list[str]:
    """Dotted names of every import in a source, at any depth; relative ones start with a dot."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append("." * node.level + (node.module or ""))
    return names


def faults(room: str, source: str) -> list[str]:
    """What the rules forbid in a source of this room, in words."""
    found = []
    rooms_right = (*ORDER[ORDER.index(room) + 1 :], "headstart", "tests", "conf")
    for name in imported(source):
        top = name.split(".")[0]
        if name.startswith("."):
            found.append(f"relative import {name}")
        elif top in rooms_right:
            found.append(f"{room} imports {name}, which stands to its right")
        elif room == "drafters" and top not in DRAFTERS_MAY and top not in sys.stdlib_module_names:
            found.append(f"drafters imports {name}; torch and transformers only")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_one_way(path):
    assert faults(path.relative_to(ROOT).parts[0], path.read_text()) == []


def inside_functions(source: str) -> list[str]:
    """Modules of eval that are imported inside functions."""
    made = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return [name for node in made for name in imported(ast.unparse(node)) if name.split(".")[0] == "eval"]


@pytest.mark.parametrize("path", sorted((ROOT / "eval").glob("*.py")), ids=lambda path: path.name)
def test_eval_has_no_cycle_to_hide(path):
    assert inside_functions(path.read_text()) == []


def test_a_hidden_cycle_is_found():
    assert inside_functions("def f():\n    from eval.evaluate import run\n    import math") == ["eval.evaluate"]


@pytest.mark.parametrize("path", [p for p in FILES if p.name == "__init__.py"], ids=lambda p: p.parent.name)
def test_package_files_hold_no_code(path):
    body = ast.parse(path.read_text()).body
    assert [node for node in body if not isinstance(node, ast.Expr)] == []


@pytest.mark.parametrize(
    ("room", "source", "fault"),
    [
        ("drafters", "import data.target", "right"),
        ("drafters", "def f():\n    from eval.decoder import generate", "right"),
        ("drafters", "import hydra", "torch and transformers only"),
        ("checkpoints", "from training.module import X", "right"),
        ("data", "from .target import Target", "relative"),
        ("training", "import headstart", "right"),
    ],
)
def test_a_planted_import_is_found(room, source, fault):
    assert fault in faults(room, source)[0]


@pytest.mark.parametrize(
    ("room", "source"), [("drafters", "import math\nimport torch"), ("training", "from eval.decoder import generate")]
)
def test_allowed_imports_pass(room, source):
    assert faults(room, source) == []
