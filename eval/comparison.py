"""What a comparison leaves: compare.json, compare.md and three pictures, from figures that are measured elsewhere."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from checkpoints.files import write_json, write_text
from eval.page import markdown_table
from eval.plots import png, tried_alpha, write_plots
from eval.replayed import Replayed
from eval.report import Report
from eval.sections import Rows, alphas

FILE, TABLE = "compare.json", "compare.md"
PLOTS = ("alpha.png", "learning.png", "domains.png")


@dataclass(frozen=True)
class Entry:
    """One drafter's figures, JSON-able. drafter: architecture, parameters, num_slots, layers. trained: steps, tokens,
    minutes, core_minutes (of CPU time), best_step. curve: tau while training. replay: greedy tau by replay. harness: by
    temperature, the decoding loop's figures; empty when it was left out."""

    overrides: list[str]
    drafter: dict[str, Any]
    trained: dict[str, Any]
    curve: list[dict[str, Any]]
    replay: dict[str, Any]
    harness: dict[str, dict[str, Any]] = field(default_factory=dict)


def replay_figures(found: Replayed) -> dict[str, Any]:
    """What a comparison keeps of a replay."""
    names = ("tau", "accepted", "alpha", "trials", "domains", "rounds", "tokens", "calibration")
    whole = found.as_dict()
    return {name: whole[name] for name in names}


def harness_figures(report: Report) -> dict[str, Any]:
    """What a comparison keeps of a report; the whole report lies beside the run."""
    names = (
        *("tau", "accepted", "tau_verified", "alpha", "domains", "rounds", "tokens", "draft_ms", "verify_ms"),
        *("tokens_per_s", "baseline_tokens_per_s", "speedup", "break_even_tau", "greedy_identical", "near_ties"),
        "calibration",
    )
    whole = report.as_dict()
    return {name: whole[name] for name in names}


Column = tuple[str, Callable[[Entry], str]]


@dataclass
class Comparison:
    """All drafters side by side. entries: those that were measured, in order; failures: what went wrong with the
    others, by name. about: budget, settings, target, machine."""

    about: dict[str, Any]
    entries: dict[str, Entry] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def temperatures(self) -> list[str]:
        return list(next((entry.harness for entry in self.entries.values()), {}))

    def as_dict(self) -> dict[str, Any]:
        """The keys of compare.json."""
        measured = {name: asdict(entry) for name, entry in self.entries.items()}
        return self.about | {"drafters": measured, "failures": self.failures}

    def write(self, folder: Path) -> None:
        """Write pictures, compare.md and, last, compare.json into folder, each atomically."""
        folder = Path(folder)
        if self.entries:
            self._plot(folder)
        write_text(folder / TABLE, self.markdown())
        write_json(folder / FILE, self.as_dict())

    def tables(self) -> list[tuple[str, Rows]]:
        """(title, rows with the head first) of what is shown; a table without figures is left out."""
        tables = [
            ("drafters", self._rows(self._tau_columns())),
            ("speed", self._rows(self._speed_columns())),
            ("ECE of confidences, before and after temperature scaling", self._rows(self._error_columns())),
            ("alpha by slot, greedy", self._alphas()),
            ("tau by domain, greedy", self._domains()),
        ]
        return [(title, rows) for title, rows in tables if len(rows) > 1 and len(rows[0]) > 1]

    def _rows(self, columns: list[Column]) -> Rows:
        """A table of columns, one row a drafter."""
        head = ["drafter", *(title for title, _ in columns)]
        return [head, *([name, *(show(one) for _, show in columns)] for name, one in self.entries.items())]

    def _tau_columns(self) -> list[Column]:
        return [
            ("parameters", lambda one: f"{one.drafter['parameters'] / 1e6:.2f}M"),
            ("slots", lambda one: str(one.drafter["num_slots"])),
            ("answer tokens", lambda one: str(one.trained["tokens"])),
            ("minutes", lambda one: f"{one.trained['minutes']:.1f}"),
            ("CPU minutes", lambda one: f"{one.trained['core_minutes']:.1f}"),
            ("tau (replay)", lambda one: f"{one.replay['tau']:.2f}"),
            *((f"tau T={heat}", _cell(heat, "tau")) for heat in self.temperatures),
        ]

    def _speed_columns(self) -> list[Column]:
        shown = (("draft_ms", "draft ms"), ("verify_ms", "verify ms"), ("speedup", "speedup"))
        return [(f"{title} T={heat}", _cell(heat, name)) for name, title in shown for heat in self.temperatures]

    def _error_columns(self) -> list[Column]:
        if not any(one.replay["calibration"] for one in self.entries.values()):
            return []
        columns: list[Column] = [("replay", lambda one: _error(one.replay["calibration"]))]
        return columns + [(f"T={heat}", _error_at(heat)) for heat in self.temperatures]

    def _alphas(self) -> Rows:
        most = max((len(one.replay["alpha"]) for one in self.entries.values()), default=0)
        rows = [["drafter", *(f"alpha_{k}" for k in range(1, most + 1))]]
        for name, one in self.entries.items():
            shown = alphas(one.replay)
            rows.append([name, *shown, *["-"] * (most - len(shown))])
        return rows

    def _domains(self) -> Rows:
        names = sorted({domain for one in self.entries.values() for domain in one.replay["domains"]})
        rows = [["drafter", *names, "all"]]
        for name, one in self.entries.items():
            taus = [f"{one.replay['domains'][domain]:.2f}" for domain in names]
            rows.append([name, *taus, f"{one.replay['tau']:.2f}"])
        return rows

    def markdown(self) -> str:
        """The tables as Markdown, with what they were measured on."""
        lines = ["# Comparison", "", *(f"- {name}: {value}" for name, value in self._caption())]
        for title, rows in self.tables():
            lines += ["", f"## {title}", "", markdown_table(rows)]
        if self.failures:
            lines += ["", "## failed", "", *(f"- {name}: {error}" for name, error in self.failures.items())]
        if self.entries:
            lines += ["", *(f"![{name.removesuffix('.png')}]({name})" for name in PLOTS)]
        return "\n".join(lines) + "\n"

    def _caption(self) -> list[tuple[str, str]]:
        settings, machine = self.about["settings"], self.about["machine"]
        budget = ", ".join(f"{value:g} {name}" for name, value in self.about["budget"].items() if value is not None)
        return [
            ("target", f"{self.about['target']['name']}, {settings['dtype']}"),
            ("budget", f"{budget} of training each"),
            (
                "prompts",
                f"{self.about['prompts']}, {settings['max_new_tokens']} new tokens, batch {settings['batch_size']}",
            ),
            ("machine", f"{machine['device']}, {machine['cpus']} cores, {machine['threads']} threads"),
        ]

    def show(self, console: Console | None = None) -> None:
        """Print the tables and what failed."""
        console = console or Console()
        for title, rows in self.tables():
            table = Table(title=title, title_justify="left")
            for index, name in enumerate(rows[0]):
                table.add_column(name, justify="right" if index else "left")
            for row in rows[1:]:
                table.add_row(*row)
            console.print(table)
        for name, error in self.failures.items():
            console.print(f"{name} failed: {error}", style="red", soft_wrap=True, markup=False)

    def _plot(self, folder: Path) -> None:
        """alpha_k by slot, tau by answer tokens, tau by domain: every drafter in each picture."""
        drawing = zip(PLOTS, (self._plot_alpha, self._plot_curves, self._plot_domains), strict=True)
        write_plots(folder, {name: png(draw, size=(7.2, 4.2)) for name, draw in drawing})

    def _plot_alpha(self, axes: Any) -> None:
        for name, one in self.entries.items():
            alpha = tried_alpha(one.replay)
            axes.plot(range(1, len(alpha) + 1), alpha, marker="o", label=name)
        most = max(len(one.replay["alpha"]) for one in self.entries.values())
        axes.set(xlabel="slot k", ylabel="alpha_k (conditional acceptance)", ylim=(0, 1.02), xticks=range(1, most + 1))
        axes.legend(fontsize="small")

    def _plot_curves(self, axes: Any) -> None:
        for name, one in self.entries.items():
            axes.plot([at["tokens"] for at in one.curve], [at["tau"] for at in one.curve], marker=".", label=name)
        axes.set(xlabel="answer tokens seen", ylabel="tau while training (held-out prompts, greedy)")
        axes.legend(fontsize="small")

    def _plot_domains(self, axes: Any) -> None:
        head, *rows = self._domains()
        width = 0.8 / len(rows)
        for index, row in enumerate(rows):
            places = [place + (index - (len(rows) - 1) / 2) * width for place in range(len(head) - 1)]
            axes.bar(places, [float(value) for value in row[1:]], width, label=row[0])
        axes.set_xticks(range(len(head) - 1), head[1:], rotation=30)
        axes.set(ylabel="tau (greedy, bonus included)")
        axes.legend(fontsize="small")


def _cell(heat: str, name: str) -> Callable[[Entry], str]:
    def show(one: Entry) -> str:
        value = one.harness[heat][name]
        return "-" if value is None else f"{value:.2f}"

    return show


def _error_at(heat: str) -> Callable[[Entry], str]:
    return lambda one: _error(one.harness[heat]["calibration"])


def _error(calibration: dict[str, Any] | None) -> str:
    """Calibration error before and after temperature scaling."""
    return "-" if calibration is None else f"{calibration['before']['ece']:.3f}, {calibration['after']['ece']:.3f}"
