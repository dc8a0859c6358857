"""A report as one self-contained HTML page (pictures inside, nothing fetched) and as Markdown."""

import base64
from html import escape
from pathlib import Path
from typing import Any

from checkpoints.files import write_text
from eval.plots import draw_plots, write_plots
from eval.sections import Rows, Section, sections, title_of

PAGE, TABLE = "report.html", "report.md"
STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --line: #d0d7de; --soft: #f3f5f7;
  --alarm: #b42318; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --paper: #14171b; --line: #3a424b; --soft: #1f242a; --alarm: #ff8a7a; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
  max-width: 62rem; padding: 1.5rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; border-bottom: 1px solid var(--line); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .6rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: right; overflow-wrap: anywhere; }
th:first-child, td:first-child, table.words td, table.words th { text-align: left; }
th { background: var(--soft); }
img { max-width: 100%; background: #ffffff; border-radius: .4rem; margin: .4rem .4rem .4rem 0; }
pre { background: var(--soft); padding: .8rem; white-space: pre-wrap; overflow-wrap: anywhere; max-height: 30rem;
  overflow-y: auto; }
.lossy { color: var(--alarm); font-weight: bold; }
"""


def html(report: dict[str, Any], drawn: dict[str, bytes]) -> str:
    """The page of report.json's keys. drawn: pictures by file name, from eval.plots."""
    title = escape(title_of(report))
    body = "\n".join(_section(section, drawn) for section in sections(report))
    alarm = ' class="lossy"' if report.get("lossy") else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1{alarm}>{title}</h1>\n{body}\n"
        "</body>\n</html>\n"
    )


def _section(section: Section, drawn: dict[str, bytes]) -> str:
    parts = [f"<h2>{escape(section.title)}</h2>"]
    for line in section.lines:
        alarm = ' class="lossy"' if line.startswith("LOSSY") or "NOT IDENTICAL" in line else ""
        parts.append(f"<p{alarm}>{escape(line)}</p>")
    if section.rows:
        parts.append(_table(section.rows))
    for name in section.plots:
        if name in drawn:
            data = base64.b64encode(drawn[name]).decode("ascii")
            alt = escape(name.removesuffix(".png").replace("_", " "))
            parts.append(f'<img alt="{alt}" width="620" src="data:image/png;base64,{data}">')
    if section.verbatim is not None:
        parts.append(f"<pre>{escape(section.verbatim)}</pre>")
    return "\n".join(parts)


def _table(rows: Rows) -> str:
    """Rows as a table; one of two columns reads like a list, from the left."""
    head, *body = rows
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in body]
    kind = ' class="words"' if len(head) == 2 else ""
    return f'<div class="wide"><table{kind}>\n<tr>' + "</tr>\n<tr>".join(lines) + "</tr>\n</table></div>"


def markdown(report: dict[str, Any], drawn: dict[str, bytes]) -> str:
    """The same sections as Markdown; pictures are links to the files beside it."""
    lines = [f"# {title_of(report)}"]
    for section in sections(report):
        lines += ["", f"## {section.title}"]
        for line in section.lines:
            lines += ["", line]
        if section.rows:
            lines += ["", markdown_table(section.rows)]
        lines += [f"\n![{name.removesuffix('.png')}]({name})" for name in section.plots if name in drawn]
        if section.verbatim is not None:
            lines += ["", *(f"    {line}" for line in section.verbatim.splitlines())]
    return "\n".join(lines) + "\n"


def markdown_table(rows: Rows) -> str:
    """Rows, the head first, as a Markdown table."""
    head, *body = (f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in rows)
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])


def write_page(folder: Path, report: dict[str, Any]) -> list[Path]:
    """Write pictures, report.md and report.html into folder, each atomically. Returns their paths, the page last."""
    folder = Path(folder)
    drawn = draw_plots(report)
    paths = write_plots(folder, drawn)
    for name, text in ((TABLE, markdown(report, drawn)), (PAGE, html(report, drawn))):
        write_text(folder / name, text)
        paths.append(folder / name)
    return paths
