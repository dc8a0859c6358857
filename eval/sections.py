"""What a report says, section by section, from the keys of report.json: one source of its page and its Markdown.

A section without data is left out.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

Report = dict[str, Any]
Rows = list[list[str]]


@dataclass(frozen=True)
class Section:
    """title; lines of words; a table, its head first; file names of pictures; text shown as it is."""

    title: str
    lines: list[str] = field(default_factory=list)
    rows: Rows = field(default_factory=list)
    plots: tuple[str, ...] = ()
    verbatim: str | None = None


def sections(report: Report) -> list[Section]:
    """All sections that have something to say, in order."""
    made = (make(report) for make in SECTIONS)
    return [section for section in made if section is not None]


def title_of(report: Report) -> str:
    """One line: what was measured."""
    about = report.get("drafter", {}).get("architecture", "drafter")
    name = report.get("target", {}).get("name", "target")
    label = "LOSSY: " if report.get("lossy") else ""
    return f"{label}{about} on {name}"


def number(value: Any, digits: int = 2) -> str:
    """A figure as shown; a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def _summary(report: Report) -> Section:
    rows = [["figure", "value"], ["tau (bonus included)", number(report["tau"])]]
    rows.append(["accepted drafts a round (tau - 1)", number(report["accepted"])])
    named = (
        ("speedup", "speedup against decoding without the drafter"),
        ("tokens_per_s", "tokens/s with the drafter"),
        ("baseline_tokens_per_s", "tokens/s without"),
        ("break_even_tau", "break-even tau on this machine"),
        ("efficiency", "decoding efficiency (emitted / verified tokens)"),
        ("verified_slots", "slots verified a round"),
    )
    rows += [[words, number(report[key])] for key, words in named if report.get(key) is not None]
    counts = [f"{report['prompts']} prompts"]
    if report.get("turns", report["prompts"]) != report["prompts"]:
        counts.append(f"{report['turns']} turns")
    counts += [f"{report['rounds']} rounds", f"{report['tokens']} tokens", f"{report['num_slots']} slots"]
    return Section("Summary", [", ".join(counts), *_verdict(report)], rows)


def _verdict(report: Report) -> Iterable[str]:
    """What is known of losslessness."""
    if report.get("lossy"):
        yield f"LOSSY: {report['lossy']['words']}. The text is not the target's own; see Agreement."
    elif report.get("greedy_identical") is not None:
        word = "identical" if report["greedy_identical"] else "NOT IDENTICAL"
        yield f"Greedy output {word} with and without drafter; {report['near_ties']} near tie(s) proven."
        yield from report["failures"]
    elif report.get("noise_identical") is not None:
        share = report["noise_identical"]
        yield f"Sampled output: {share:.0%} of answers are the target's own from the same noise, token by token."
    elif report.get("replay"):
        yield "Replay of the target's recorded greedy answers: no speed was measured."
    else:
        yield "Output was not compared token by token (sampled, or no baseline)."


def _agreement(report: Report) -> Section | None:
    found = (report.get("lossy") or {}).get("agreement")
    if not found:
        return None
    rows = [["LOSSY agreement with the target", "value"]]
    if found["same_answers"] is not None:
        rows.append(["answers equal to the target's greedy ones", f"{found['same_answers']:.1%}"])
    rows.append(["target's log-probability a token, this text", number(found["log_prob"], 4)])
    rows.append(["the same, text that the target wrote", number(found["target_log_prob"], 4)])
    return Section("Agreement", [], rows)


def _acceptance(report: Report) -> Section | None:
    slots = [f"alpha_{k}" for k in range(1, report["num_slots"] + 1)]
    parts = report.get("by_domain") or {}
    if parts:
        rows = [["domain", "prompts", "tau", "accepted", "efficiency", *slots]]
        for name, part in [*parts.items(), ("all", report)]:
            shown = (number(part[key]) for key in ("tau", "accepted", "efficiency"))
            rows.append([name, str(part["prompts"]), *shown, *alphas(part)])
    else:
        rows = [["domain", "tau", "accepted"]]
        rows += [[name, number(tau), number(max(0.0, tau - 1))] for name, tau in report["domains"].items()]
        rows.append(["all", number(report["tau"]), number(report["accepted"])])
    lines = ["alpha_k: slot k accepted, given that the slots before it were."]
    if not parts:
        lines.append("alpha by slot: " + " ".join(alphas(report)))
    return Section("Acceptance", lines, rows, ("tau_by_domain.png", "alpha.png"))


def alphas(part: dict[str, Any]) -> list[str]:
    """alpha_k as shown; a dash for a slot that no round tried, as `trials` say. part: has both."""
    trials = part.get("trials") or [1] * len(part["alpha"])
    return [number(value) if tried else "-" for value, tried in zip(part["alpha"], trials, strict=True)]


def _speed(report: Report) -> Section | None:
    if not report.get("split"):
        return None
    stages = list(report["split"])
    rows = [["domain", "tokens/s", "without", "speedup", "break-even tau", "draft ms", "verify ms", *stages]]
    for name, part in [*report["by_domain"].items(), ("all", report)]:
        keys = ("tokens_per_s", "baseline_tokens_per_s", "speedup", "break_even_tau", "draft_ms", "verify_ms")
        rows.append([name, *(number(part[key]) for key in keys), *(f"{part['split'][one]:.0%}" for one in stages)])
    return Section("Speed and time", ["Shares are of the time with the drafter."], rows, ("time_split.png",))


def _latency(report: Report) -> Section | None:
    found = report.get("latency")
    if not found:
        return None
    rows = [["", "what", "P50", "P90", "P99"]]
    named = (("first_ms", "first token"), ("gap_ms", "between arrivals"), ("token_ms", "a token"))
    for who, one in found.items():
        rows += [[who, f"{words}, ms", *map(number, one[key].values())] for key, words in named if one[key]]
    lines = [
        "Between arrivals: from one arrival of tokens to the next, a round's tokens arriving together (vLLM's "
        "inter-token latency). A token: that gap divided by the tokens it brought, once for each (SGLang's)."
    ]
    return Section("Latency", lines, rows, ("latency.png",))


def _engine(report: Report) -> Section | None:
    found = report.get("engine")
    if not found:
        return None
    head = ["in flight", "who", "tokens/s", "one user's", "speedup", "one user's", "tau", "by counters"]
    rows = [[*head, "first token P50 ms", "token P50", "token P99", "same answers"]]
    for one in found["levels"]:
        for who in ("drafter", "baseline"):
            if one[who] is not None:
                rows.append([str(one["concurrency"]), who, *_side(one, who)])
    lines = [
        f"{found['name']} {found['version']}. Intervals: 95%, bootstrap over prompts. tau: tokens of a round as the "
        "requests tell; by counters: the server's, an answer's end uncut. Acceptance above counts all loads; speed and "
        f"latency above are those of {found['levels'][0]['concurrency']} in flight.",
        *(f"Server, {who}: {words}" for who, words in found["commands"].items()),
    ]
    told, counted = (
        [one["drafter"][key] for one in found["levels"] if one["drafter"]["rounds"] is not None]
        for key in ("rounds", "rounds_counted")
    )
    if told != counted:
        lines.append(f"The server counted {sum(counted)} rounds, our requests told {sum(told)}: it served others too.")
    return Section("Engine", lines, rows, ("engine.png",))


def _side(one: dict[str, Any], who: str) -> list[str]:
    """A server's row at one concurrency."""
    own, drafted = one[who], who == "drafter"
    spans = [own["tokens_per_s"], own["user_tokens_per_s"]]
    spans += [one["speedup"], one["user_speedup"], own["tau"]] if drafted else [None] * 3
    tokens = own["latency"]["token_ms"] or {}
    same = one["same_answers"] if drafted else None
    return [
        *(interval(value) for value in spans),
        number(own["tau_counted"]),
        number(own["latency"]["first_ms"]["p50"], 1),
        *(number(tokens.get(name), 1) for name in ("p50", "p99")),
        "-" if same is None else f"{same} of {own['requests']}",
    ]


def interval(span: dict[str, float] | None) -> str:
    """A figure with its confidence interval; a dash where there is none."""
    return "-" if span is None else f"{span['value']:.2f} [{span['low']:.2f}, {span['high']:.2f}]"


def _calibration(report: Report) -> Section | None:
    found = report.get("calibration")
    if not found:
        return None
    before, after = found["before"], found["after"]
    rows = [["", "before", "after"]]
    for key, words in (("ece", "ECE"), ("brier", "Brier score"), ("auc", "AUC")):
        rows.append([words, number(before[key], 3), number(after[key], 3)])
    for k, pair in enumerate(zip(before["ece_prefix"], after["ece_prefix"], strict=True), start=1):
        rows.append([f"ECE of the product up to slot {k}", *(number(one, 3) for one in pair)])
    lines = [f"Temperatures by slot: {' '.join(number(one) for one in found['temperatures'])}."]
    if found.get("estimator"):
        biases = " ".join(number(one) for one in found["estimator"]["biases"])
        lines.insert(
            0,
            "The drafter gives no confidences: before is q_max, after the estimator sigmoid(w * logit(q_max) + b_k): "
            f"w {number(found['estimator']['weight'])}, b {biases}, and temperatures.",
        )
    lines.append(
        "Judged on answers that took no part in the fit."
        if found["held_out"]
        else "One answer: fitted and judged on it."
    )
    return Section("Confidences", lines, rows, ("reliability.png",))


def _sizes(report: Report) -> Section | None:
    found = report.get("sizes")
    if not found:
        return None
    rows = [["memory", "MiB"], *([name.replace("_", " "), number(size / 2**20)] for name, size in found.items())]
    return Section("Sizes", ["Caches and state: the most that one batch of requests held."], rows)


def _predicted(report: Report) -> Section | None:
    points = report.get("predicted")
    if not points:
        return None
    rows = [["", "predicted speedup", "measured", "error"]]
    for one in points:
        error = one["predicted"] / one["measured"] - 1
        rows.append([one["name"], number(one["predicted"]), number(one["measured"]), f"{error:+.1%}"])
    return Section("Predicted against measured", [], rows, ("predicted.png",))


def _pareto(report: Report) -> Section | None:
    if not report.get("pareto"):
        return None
    rows = [["", "tokens/s of one user", "of all users"]]
    for name, points in report["pareto"].items():
        rows += [[name, number(one["user_tokens_per_s"]), number(one["tokens_per_s"])] for one in points]
    return Section("Speed of one user against all", [], rows, ("pareto.png",))


def _example(report: Report) -> Section | None:
    found = report.get("example")
    if not found:
        return None
    lines = [f"Prompt {found['id']} of {found['domain']}; tokens by round: {found['emitted_by_round']}."]
    return Section("Example, as the target saw it", lines, verbatim=found["rendered_prompt"] + found["answer"])


def _environment(report: Report) -> Section:
    rows = [["what", "value"]]
    if report.get("command"):
        rows.append(["command", report["command"]])
    for group in ("target", "drafter", "settings", "machine"):
        for key, value in (report.get(group) or {}).items():
            rows.append([f"{group}: {key}", str(value)])
    rows += [["drafter folder", report["drafter_dir"]]] if report.get("drafter_dir") else []
    return Section("Environment", [], rows)


SECTIONS: tuple[Callable[[Report], Section | None], ...] = (
    _summary,
    _agreement,
    _acceptance,
    _speed,
    _latency,
    _engine,
    _calibration,
    _sizes,
    _predicted,
    _pareto,
    _example,
    _environment,
)
