"""The manual is whole: mkdocs.yml names every page once, and every link, anchors included, leads somewhere."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def pages_of(nav: Any) -> Iterator[str]:
    """The files that a nav names, in order."""
    for entry in nav:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            if isinstance(value, list):
                yield from pages_of(value)
            else:
                yield value


def anchors(text: str) -> set[str]:
    """What headings are called in links: lower case, words joined by dashes."""
    heads = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", head.lower()).strip()) for head in heads}


def broken(page: Path, text: str) -> list[str]:
    """Relative links of a page that lead nowhere."""
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        path = page if not name else page.parent / name
        if not path.exists() or (anchor and anchor not in anchors(path.read_text())):
            found.append(link)
    return found


def test_nav_names_every_page_once() -> None:
    nav = list(pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(nav) == [page.name for page in PAGES]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    assert broken(page, page.read_text()) == []


def test_a_broken_link_is_found() -> None:
    text = "[a](nowhere.md) [b](index.md#words) [c](index.md#no-such) [d](https://x/y) [e](#here)\n## Here\n"
    assert broken(DOCS / "index.md", text) == ["nowhere.md", "index.md#no-such", "#here"]


def test_nav_without_a_page_is_found() -> None:
    assert list(pages_of([{"A": "a.md"}, {"B": [{"C": "c.md"}, "d.md"]}])) == ["a.md", "c.md", "d.md"]


def test_every_page_is_reached_from_the_overview() -> None:
    """By links alone, from index.md on."""
    seen, open_pages = set(), ["index.md"]
    while open_pages:
        name = open_pages.pop()
        if name in seen or not (DOCS / name).exists():
            continue
        seen.add(name)
        open_pages += re.findall(r"\]\(([\w.]+\.md)", (DOCS / name).read_text())
    assert sorted(seen) == [page.name for page in PAGES]
