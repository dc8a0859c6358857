"""The whole speed table of some heads on one machine, within a time limit: what benchmarks/h200.sh runs.

    python benchmarks/speed_table.py TARGET HEAD [HEAD ...] --out FOLDER [--minutes 9.5] [--engine vllm]
    python benchmarks/speed_table.py random:llama-3.1-8b random:eagle3 random:dspark --out FOLDER
    python benchmarks/speed_table.py --dry-run --out FOLDER                   tiny doubles, on a CPU

TARGET: a folder or hub id. HEAD: a folder that training wrote. random:NAME makes a target of a known shape, or a head
of conf/drafter, with random weights: its tau is about 1, its step times are real. Parts, in order, each written to
FOLDER as it ends: our waiting loop by batch (plain decoding once, then every head), step times by head (steps.json)
with the roofline's error, predicted against measured, our steady loop by batch (CUDA graphs, on a GPU), and serving
engines where one is installed (HEADSTART_ENGINE_PYTHON). A part that outlasts its share, or fails, is noted and the
next one runs. FOLDER/table.md is rewritten after each.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig

from checkpoints.engine_run import PYTHON
from checkpoints.files import read_json, write_json, write_text
from checkpoints.folder import architecture_of, load_drafter, save_drafter
from checkpoints.run import ROOT, machine
from data.conversations import Prompt
from data.suites import load_prompts
from data.target import Target
from drafters.contract import Drafter
from drafters.vocabulary import DraftVocabulary
from eval.bench import ProfileSettings, profile, roofline_of
from eval.evaluate import EvalSettings, baselines, evaluate
from eval.hardware import Cost, load_hardware, speedup
from eval.hardware_measured import Measured, misses
from eval.page import markdown_table
from eval.passes import Pass

RANDOM = "random:"
# layers, width, inner width, heads, key-value heads, head width, vocabulary
SHAPES = {"llama-3.1-8b": (32, 4096, 14336, 32, 8, 128, 128256), "tiny": (12, 32, 48, 4, 2, 8, 64)}
DRY_HEADS = ("eagle3", "dflash", "dspark")
ENGINE_SHARE, LEAST_S = 0.5, 5.0


@dataclass
class Table:
    """What was measured so far. rows: of the harness and the engines. notes: what was left out, and why."""

    out: Path
    deadline: float
    about: dict[str, Any] = field(default_factory=dict)
    harness: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    predicted: list[dict[str, Any]] = field(default_factory=list)
    engines: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    def part(self, name: str, do: Callable[[], None], limit: float | None = None) -> None:
        """Run one part within `limit` seconds (all that is left when None); a failure is a note. Writes the table."""
        allowed = min(self.left, self.left if limit is None else limit)
        if allowed < LEAST_S:
            self.notes.append(f"{name}: not run, no time left")
        else:
            started = time.monotonic()
            try:
                with within(allowed):
                    do()
                Console().print(f"[dim]{name}: {time.monotonic() - started:.1f} s[/dim]")
            except Exception as error:
                traceback.print_exc()
                self.notes.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
        self.write()

    def write(self) -> None:
        """Write table.json and table.md."""
        kinds = ("harness", "steps", "predicted", "engines")
        write_json(self.out / "table.json", {name: getattr(self, name) for name in ("about", *kinds, "notes")})
        lines = [f"# Speed on {self.about['machine']['device']}", "", f"Target {self.about['target']}."]
        for name in kinds:
            rows = getattr(self, name)
            if rows:
                lines += ["", f"## {name.capitalize()}", "", markdown_table([list(rows[0]), *map(shown, rows)])]
        lines += ["", *(f"- {note}" for note in self.notes)]
        write_text(self.out / "table.md", "\n".join(lines) + "\n")


def shown(row: dict[str, Any]) -> list[str]:
    """Cells of a row."""
    return ["-" if x is None else f"{x:.3g}" if isinstance(x, float) else str(x) for x in row.values()]


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """TimeoutError inside after so many seconds."""

    def end(_: int, __: FrameType | None) -> None:
        raise TimeoutError(f"outlasted its {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def random_target(shape: str, dtype: str) -> Target:
    """A target of a known shape with random weights, on the GPU where there is one, with the tests' small tokenizer."""
    from tests.doubles import tiny_tokenizer

    if shape not in SHAPES:
        raise ValueError(f"no shape {shape!r}; there are {', '.join(SHAPES)}")
    layers, width, inner, heads, pairs, head, size = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=pairs,
        head_dim=head,
        max_position_embeddings=4096,
        bos_token_id=2,
        eos_token_id=3,
    )
    torch.manual_seed(0)
    wanted = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=wanted)
    return Target(model, tiny_tokenizer(), name=f"{RANDOM}{shape}")


def random_head(name: str, target: Target, folder: Path) -> Path:
    """A head of conf/drafter with random weights for this target, as training would save it."""
    with initialize_config_module("conf", version_base="1.3"):
        chosen = compose(f"drafter/{name}")["drafter"]
    size = target.identity["vocab_size"]
    words = min(size, chosen.vocabulary or size)
    vocabulary = None if words == size else DraftVocabulary(torch.arange(words), size)
    torch.manual_seed(0)
    head = instantiate(chosen.model, _partial_=True, _convert_="all")(target=target.parts, vocabulary=vocabulary)
    # Half the bytes to write, to check and to read: a head runs in the target's dtype.
    return save_drafter(folder, head, target_identity=target.identity, dtype=target.dtype)


def prompts_of(name: str, count: int) -> list[Prompt]:
    """`count` prompts of one domain, so that a batch is full; they come again under other ids where there are fewer."""
    found = load_prompts(name)
    return [
        replace(found[i % len(found)], id=f"{found[i % len(found)].id}#{i // len(found)}", domain="all", later=[])
        for i in range(count)
    ]


def harness(table: Table, target: Target, heads: dict[str, Drafter], given: argparse.Namespace, loop: str) -> None:
    """Our own loop: plain decoding once for each batch size, then every head."""
    for batch in given.batches:
        prompts = prompts_of(given.prompts, max(batch, given.least))
        how = EvalSettings(max_new_tokens=given.max_new_tokens, batch_size=batch, loop=loop)
        plain: dict[str, Pass] = {}
        where = f"{loop} loop, batch {batch}"
        table.part(f"plain, {where}", partial(decode_plain, table, target, prompts, how, plain))
        for name, head in heads.items() if plain else ():
            table.part(f"{name}, {where}", partial(decode, table, target, (name, head), prompts, how, plain))


def decode_plain(table: Table, target: Target, prompts: list[Prompt], how: EvalSettings, into: dict[str, Pass]) -> None:
    """One pass without a drafter, kept in `into`."""
    into.update(baselines(target, prompts, how))
    rate = into["all"].work.tokens_per_s
    table.harness.append(_row("plain", how, None, rate, None, None, None))


def decode(
    table: Table,
    target: Target,
    named: tuple[str, Drafter],
    prompts: list[Prompt],
    how: EvalSettings,
    plain: dict[str, Pass],
) -> None:
    """One pass with a head."""
    name, head = named
    report = evaluate(target, head, prompts, how, plain=plain)
    pace, tau = report.whole.speed, report.whole.acceptance.tau
    same = None if report.greedy_identical is None else str(report.greedy_identical)
    rounds = tau / pace.break_even_tau if pace.break_even_tau else None
    row = _row(name, how, tau, pace.tokens_per_s, pace.speedup, rounds, same)
    table.harness.append(row | {"draft ms": pace.draft_ms, "verify ms": pace.verify_ms})
    # Random weights leave logits small and close: there bf16 parts answers further than two units in the last place.
    table.notes += [f"{name}, {how.loop} loop, batch {how.batch_size}: {line}" for line in report.failures()[:1]]
    write_json(table.out / f"harness_{name}_{how.loop}_{how.batch_size}.json", report.as_dict())


def _row(
    name: str,
    how: EvalSettings,
    tau: float | None,
    rate: float,
    gain: float | None,
    rounds: float | None,
    same: str | None,
) -> dict[str, Any]:
    """speedup of rounds: prompts left out, tau / break-even tau."""
    row = {"head": name, "loop": how.loop, "batch": how.batch_size, "tau": tau, "tokens/s": rate, "speedup": gain}
    return row | {"speedup of rounds": rounds, "identical": same, "draft ms": None, "verify ms": None}


def step_times(
    table: Table, target: Target, heads: dict[str, Drafter], folders: dict[str, Path], given: argparse.Namespace
) -> None:
    """`bench profile` of every head, the roofline's error, and predicted against measured speedup."""
    hardware = load_hardware(ROOT / "conf" / "hardware" / f"{given.hardware}.yaml")
    for name, head in heads.items():

        def one(name: str = name, head: Drafter = head) -> None:
            slots = sorted({1, (1 + head.num_slots) // 2, head.num_slots})
            how = ProfileSettings(list(given.batches), slots, given.context, given.repeats)
            found = profile(target, head, how)
            found.save(table.out / f"steps_{name}.json")
            model = roofline_of(target, folders[name], hardware, "transformers")
            errors = {kind: [m.error for m in misses(found, model) if m.kind == kind] for kind in ("target", "draft")}
            for rows in given.batches:
                table.steps.append(
                    {
                        "head": name,
                        "batch": rows,
                        "plain ms": 1000 * found.target_seconds(rows, rows, given.context),
                        "verify ms": 1000 * found.target_seconds(rows, rows * (head.num_slots + 1), given.context),
                        "draft ms": 1000 * found.draft_seconds(rows, head.num_slots, given.context),
                        "roofline off, target": statistics.median(map(abs, errors["target"])),
                        "roofline off, draft": statistics.median(map(abs, errors["draft"])),
                    }
                )
            predict(table, name, head.num_slots, found, model, given.context)

        table.part(f"{name}, step times", one)


def predict(table: Table, name: str, num_slots: int, found: Measured, model: Cost, context: int) -> None:
    """Speedup of rounds at the harness's own tau, by measured step times and by the roofline, beside the harness's: of
    the waiting loop, whose steps those are."""
    for row in table.harness:
        if row["head"] == name and row["loop"] == "waiting" and row["speedup of rounds"]:
            by_steps, by_roofline = (
                speedup(cost, row["tau"], row["batch"], num_slots, context) for cost in (found, model)
            )
            made = {
                "head": name,
                "batch": row["batch"],
                "measured": row["speedup of rounds"],
                "by step times": by_steps,
            }
            made |= {"error": by_steps / row["speedup of rounds"] - 1, "by roofline": by_roofline}
            table.predicted.append(made)


def engines(table: Table, target: str, folders: dict[str, Path], given: argparse.Namespace) -> None:
    """`headstart eval engine=...` of every head, plain decoding with the first alone."""
    base: dict[int, float] = {}
    for place, (name, folder) in enumerate(folders.items()):
        out = (table.out / f"engine_{name}").resolve()
        words = [f"engine={given.engine}", f"drafter_dir={folder}", "target=any", f"target.name={target}"]
        words += [f"prompts={given.prompts}", f"concurrency=[{','.join(map(str, given.batches))}]", "repeats=1"]
        words += [f"per_user={given.per_user}", f"limit={given.limit}", f"max_new_tokens={given.max_new_tokens}"]
        words += [f"baseline={'true' if place == 0 else 'false'}", f"hydra.run.dir={out}", *given.engine_words]

        def one(name: str = name, words: list[str] = words, out: Path = out) -> None:
            # The engine wants the GPU for itself; what this process held was given back before.
            subprocess.run(
                [sys.executable, "-m", "headstart", "eval", *words], cwd=ROOT, check=True, timeout=table.left
            )
            report = read_json(out / "report.json")
            for level in report["engine"]["levels"]:
                flying, own = level["concurrency"], level["drafter"]
                if level["baseline"] is not None:
                    base[flying] = level["baseline"]["tokens_per_s"]["value"]
                rate = own["tokens_per_s"]["value"]
                row = {"head": name, "in flight": flying, "tau": own["tau_counted"], "tokens/s": rate}
                row |= {"plain": base.get(flying), "speedup": rate / base[flying] if flying in base else None}
                table.engines.append(row | {"token P50 ms": own["latency"]["token_ms"]["p50"]})

        table.part(f"{name}, {given.engine}", one)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?")
    parser.add_argument("heads", nargs="*")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompts", default="builtin")
    parser.add_argument("--least", type=int, default=2, help="prompts at a batch size below it")
    parser.add_argument("--limit", type=int, default=2, help="prompts of each domain on engines")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--hardware", default="h200")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--engine", default=None, choices=["vllm", "sglang"], help="measured where it is installed")
    parser.add_argument("--engine-words", nargs="*", default=[], help="further keys of headstart eval")
    parser.add_argument("--per-user", type=int, default=2)
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args()
    if given.dry_run:
        given.target, given.heads = f"{RANDOM}tiny", [f"{RANDOM}{name}" for name in DRY_HEADS]
        given.dtype, given.hardware, given.context, given.repeats, given.max_new_tokens = "float32", "cpu", 32, 1, 8
        given.batches, given.least = [1, 2], 1
    if not given.target or not given.heads:
        parser.error("a target and at least one head, or --dry-run")
    return given


def main() -> None:
    """Everything, within the time limit."""
    given, started = arguments(), time.monotonic()
    given.out.mkdir(parents=True, exist_ok=True)
    table = Table(given.out, started + 60 * given.minutes, {"machine": machine(), "target": given.target})
    made = given.target.startswith(RANDOM)
    if made:
        target = random_target(given.target.removeprefix(RANDOM), given.dtype)
    else:
        target = Target.load(given.target, given.dtype)
    folders: dict[str, Path] = {}
    heads: dict[str, Drafter] = {}
    for one in given.heads:
        name = one.removeprefix(RANDOM) if one.startswith(RANDOM) else Path(one).resolve().parent.name
        name = name if name not in heads else f"{name}_{len(heads)}"

        def load(one: str = one, name: str = name) -> None:
            random = one.startswith(RANDOM)
            folder = random_head(name, target, given.out / "heads" / name) if random else Path(one).resolve()
            heads[name], folders[name] = load_drafter(folder, target.parts), folder
            table.about[name] = architecture_of(type(heads[name]))

        table.part(f"{name}: load", load)
    harness(table, target, heads, given, "waiting")
    step_times(table, target, heads, folders, given)
    # Last of ours: a graph that fails on the device may leave it unfit for what would come after.
    harness(table, target, heads, given, "steady")
    if given.engine and not made and os.environ.get(PYTHON):
        source = target.source
        heads.clear()
        del target
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        engines(table, source, folders, given)
    elif given.engine:
        table.notes.append(f"{given.engine}: not run, it needs real weights and {PYTHON}")
    table.write()
    Console().print((given.out / "table.md").read_text(), markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
