"""Pictures of a report, from the keys of report.json alone. Each is left out where the report has no data for it."""

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoints.files import atomic

Report = dict[str, Any]
BLUE, RED = "tab:blue", "tab:red"


def draw_plots(report: Report) -> dict[str, bytes]:
    """PNG bytes by file name, in the order in which a page shows them."""
    return {name: png(draw, report) for name, (has_data, draw) in PLOTS.items() if has_data(report)}


def png(draw: Callable[..., None], *given: Any, size: tuple[float, float] = (6.4, 4)) -> bytes:
    """A picture of one pair of axes, which draw(axes, *given) fills. size: in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # heavy, and needed here alone
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure.add_subplot(), *given)
    memory = io.BytesIO()
    figure.savefig(memory, format="png", dpi=120)
    return memory.getvalue()


def write_plots(folder: Path, drawn: dict[str, bytes]) -> list[Path]:
    """Write each picture atomically; returns their paths."""
    paths = []
    for name, data in drawn.items():
        with atomic(Path(folder) / name) as temporary:
            temporary.write_bytes(data)
        paths.append(Path(folder) / name)
    return paths


def _alpha(axes: Any, report: Report) -> None:
    slots = range(1, len(report["alpha"]) + 1)
    for name, part in report.get("by_domain", {}).items():
        axes.plot(slots, tried_alpha(part), marker="o", linewidth=1, alpha=0.7, label=name)
    axes.plot(slots, tried_alpha(report), marker="o", color="black", linewidth=2, label="all")
    axes.set(xlabel="slot k", ylabel="alpha_k (conditional acceptance)", ylim=(0, 1.02), xticks=list(slots))
    axes.legend(fontsize="small")


def tried_alpha(part: dict[str, Any]) -> list[float]:
    """alpha_k; no point where no round tried the slot."""
    trials = part.get("trials") or [1] * len(part["alpha"])
    return [value if tried else math.nan for value, tried in zip(part["alpha"], trials, strict=True)]


def _tau(axes: Any, report: Report) -> None:
    taus = report["domains"] | {"all": report["tau"]}
    bars = axes.bar(list(taus), list(taus.values()), color=[BLUE] * len(report["domains"]) + ["black"])
    axes.bar_label(bars, fmt="%.2f")
    threshold = report.get("break_even_tau")
    if threshold:
        axes.axhline(threshold, linestyle="--", color=RED, label=f"break-even {threshold:.2f}")
        axes.legend(fontsize="small")
    axes.set(ylabel="tau (tokens per round, bonus included)")
    axes.tick_params(axis="x", rotation=30)


def _split(axes: Any, report: Report) -> None:
    parts = {name: part["split"] for name, part in report["by_domain"].items()} | {"all": report["split"]}
    left = [0.0] * len(parts)
    for stage in report["split"]:
        shares = [part[stage] for part in parts.values()]
        axes.barh(list(parts), shares, left=left, label=stage)
        left = [start + share for start, share in zip(left, shares, strict=True)]
    axes.set(xlabel="share of time with the drafter", xlim=(0, 1))
    axes.invert_yaxis()
    axes.legend(fontsize="small", ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1))


def _reliability(axes: Any, report: Report) -> None:
    axes.plot([0, 1], [0, 1], color="grey", linestyle="--", linewidth=1)
    for when, colour in (("before", RED), ("after", BLUE)):
        found = report["calibration"][when]
        sure, share = ([one[key] for one in found["reliability"]] for key in ("confidence", "happened"))
        most = max(one["count"] for one in found["reliability"])
        axes.plot(sure, share, color=colour, linewidth=1, label=f"{when}, ECE {found['ece']:.3f}")
        axes.scatter(sure, share, s=[8 + 60 * one["count"] / most for one in found["reliability"]], color=colour)
    axes.set(xlabel="mean confidence of a bin", ylabel="share accepted", xlim=(0, 1), ylim=(0, 1))
    axes.legend(fontsize="small", title="areas: number of slots", title_fontsize="x-small")


def _latency(axes: Any, report: Report) -> None:
    for index, (who, found) in enumerate(report["latency"].items()):
        names = list(found["token_ms"])
        places = [place + 0.4 * index for place in range(len(names))]
        bars = axes.bar(places, list(found["token_ms"].values()), 0.38, label=who)
        axes.bar_label(bars, fmt="%.1f", fontsize="small")
        axes.set_xticks([place + 0.2 for place in range(len(names))], [name.upper() for name in names])
    axes.set(ylabel="milliseconds a token")
    axes.legend(fontsize="small")


def _predicted(axes: Any, report: Report) -> None:
    points = report["predicted"]
    top = 1.1 * max(max(one["predicted"], one["measured"]) for one in points)
    axes.plot([0, top], [0, top], color="grey", linestyle="--", linewidth=1)
    axes.scatter([one["predicted"] for one in points], [one["measured"] for one in points], color=BLUE)
    for one in points:
        axes.annotate(one["name"], (one["predicted"], one["measured"]), textcoords="offset points", xytext=(4, 4))
    axes.set(xlabel="predicted speedup", ylabel="measured speedup", xlim=(0, top), ylim=(0, top))


def _pareto(axes: Any, report: Report) -> None:
    for name, points in report["pareto"].items():
        users, whole = ([one[key] for one in points] for key in ("user_tokens_per_s", "tokens_per_s"))
        axes.plot(users, whole, marker="o", label=name)
    axes.set(xlabel="tokens/s of one user", ylabel="tokens/s of all users")
    axes.legend(fontsize="small")


def _engine(axes: Any, report: Report) -> None:
    levels = report["engine"]["levels"]
    for who, colour in (("drafter", BLUE), ("baseline", "grey")):
        own = [(one["concurrency"], one[who]["tokens_per_s"]) for one in levels if one[who] is not None]
        if own:
            values = [span["value"] for _, span in own]
            reach = [[s["value"] - s["low"] for _, s in own], [s["high"] - s["value"] for _, s in own]]
            axes.errorbar([c for c, _ in own], values, yerr=reach, marker="o", capsize=3, color=colour, label=who)
    axes.set(xscale="log", xlabel="requests in flight", ylabel="tokens/s of the server (95%)", ylim=(0, None))
    axes.set_xticks([one["concurrency"] for one in levels], [str(one["concurrency"]) for one in levels])
    axes.minorticks_off()
    axes.legend(fontsize="small")


def _timed(report: Report) -> bool:
    found = (report.get("latency") or {}).values()
    return bool(found) and all(one["token_ms"] for one in found)


def _confident(report: Report) -> bool:
    found = report.get("calibration") or {}
    return bool(found) and all(found[when]["reliability"] for when in ("before", "after"))


Draw = Callable[[Any, Report], None]
PLOTS: dict[str, tuple[Callable[[Report], bool], Draw]] = {
    "alpha.png": (lambda report: bool(report.get("alpha")), _alpha),
    "tau_by_domain.png": (lambda report: bool(report["domains"]), _tau),
    "time_split.png": (lambda report: bool(report.get("split")), _split),
    "latency.png": (_timed, _latency),
    "engine.png": (lambda report: bool(report.get("engine")), _engine),
    "reliability.png": (_confident, _reliability),
    "predicted.png": (lambda report: bool(report.get("predicted")), _predicted),
    "pareto.png": (lambda report: bool(report.get("pareto")), _pareto),
}
