"""The house rules that a linter does not know: sizes, names, what lies where, and what the wheel holds."""

import ast
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("drafters", "checkpoints", "data", "eval", "training")
FOLDERS = (*ROOMS, "conf")
ALLOWED_SUFFIXES = {".py", ".yaml", ".jsonl"}
SOURCES = sorted([p for room in ROOMS for p in (ROOT / room).rglob("*.py")] + [ROOT / "headstart.py"])
MAX_LINES, MAX_PARAMETERS, README_LINES = 60, 8, 150


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(source: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def too_large(source: str) -> list[str]:
    """Functions over 60 lines (decorators aside) or over 8 parameters (self and cls aside)."""
    found = []
    for node in functions(source):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        if arguments[:1] in (["self"], ["cls"]):
            arguments = arguments[1:]
        if lines > MAX_LINES:
            found.append(f"{node.name} has {lines} lines")
        if len(arguments) > MAX_PARAMETERS:
            found.append(f"{node.name} has {len(arguments)} parameters")
    return found


def drafter_names() -> list[str]:
    """Module and class names of every drafter: what the rooms outside drafters/ must not say. Its yaml names it."""
    found = set()
    for path in (ROOT / "conf" / "drafter").glob("*.yaml"):
        found.update(re.findall(r"_target_: drafters\.(\w+)\.(\w+)", path.read_text()))
    return sorted({name for pair in found for name in pair})


def mentions(source: str, names: list[str]) -> list[str]:
    """Which drafters' names stand in a source as whole words, in any case."""
    return [name for name in names if re.search(rf"(?<![a-z0-9]){re.escape(name)}(?![a-z0-9])", source, re.IGNORECASE)]


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_functions_are_small(path):
    assert too_large(path.read_text()) == []


def test_a_large_function_is_found():
    long = "def f():\n" + "    x = 1\n" * 60
    wide = "class C:\n    def f(self, a, b, c, d, e, f, g, h, *, i): ...\n"
    assert too_large(long) == ["f has 61 lines"]
    assert too_large(wide) == ["f has 9 parameters"]
    assert too_large("class C:\n    def f(self, a, b, c, d, e, f, g, h): ...\n") == []


def tracked(folder: str) -> list[Path]:
    """Files of a folder that git knows or would add; all files outside a git checkout."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", folder],
        capture_output=True,
        text=True,
        check=False,
    )
    names = listed.stdout.split() if listed.returncode == 0 else []
    found = [ROOT / name for name in names] or [p for p in (ROOT / folder).rglob("*") if "__pycache__" not in p.parts]
    return [path for path in found if path.is_file()]


@pytest.mark.parametrize("folder", FOLDERS)
def test_code_folders_hold_code(folder):
    stray = [name_of(p) for p in tracked(folder) if p.suffix not in ALLOWED_SUFFIXES and p.name != "py.typed"]
    assert stray == []


@pytest.mark.parametrize("room", ["training", "data", "eval"])
def test_no_drafter_is_named_outside_its_files(room):
    names = drafter_names()
    assert names
    found = {name_of(p): mentions(p.read_text(), names) for p in (ROOT / room).rglob("*.py")}
    assert {path: said for path, said in found.items() if said} == {}


def test_a_named_drafter_is_found():
    assert mentions("if name == 'eagle3':", ["eagle3", "Eagle3", "mtp"]) == ["eagle3", "Eagle3"]
    assert mentions("attempt to mtpx", ["mtp"]) == []


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def test_documents_link_to_files_that_exist():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    broken = []
    for page in pages:
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            if "://" not in link and not (page.parent / link).exists():
                broken.append(f"{page.name}: {link}")
    assert broken == []


def test_wheel_holds_exactly_the_packages(tmp_path):
    """Built from this checkout: these top-level names and no others, with prompts and configs inside."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert top == {*FOLDERS, "headstart.py"}
    assert {"conf/__init__.py", "conf/train.yaml", "conf/drafter/eagle3.yaml"} <= set(names)
    assert any(re.fullmatch(r"data/prompts/.+\.jsonl", name) for name in names)
    # Nothing in the tree is left behind: a package without its subfolders imports fine from a checkout only.
    here = {name_of(p) for folder in FOLDERS for p in tracked(folder)} | {"headstart.py"}
    assert here <= set(names)
