"""headstart prepare: from prompts to conversations and the target's features.

    headstart prepare data=jsonl data.path=prompts.jsonl target=any target.name=FOLDER
    headstart prepare data=answers_jsonl data.path=answers.jsonl dry_run=true
    headstart prepare estimate=true shape=llama_70b sizes.tokens=1000000000
    headstart prepare convert=PREPARED features.precision=int8

Leaves in the run's folder: answers.jsonl (what the target wrote, if it did), conversations.jsonl, heldout.jsonl (what
data.heldout kept out: prompts, or conversations where the rows had answers), features (a link to the store),
prepare.json and run.json. The same command over the same folder goes on where a killed one stopped.
"""

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from checkpoints.errors import run_module
from checkpoints.files import atomic, fingerprint, read_json, write_json, write_text
from checkpoints.lock import launched_rank, only_run
from checkpoints.run import known_groups, record, settings
from data.answers import AnswerReport, AnswerSettings, answer
from data.chat import Template
from data.conversations import (
    Conversation,
    Prompt,
    Report,
    read_prompts,
    read_source,
    split_heldout,
    token_counts,
    write_conversations,
)
from data.convert import convert
from data.embedded import cache_root
from data.estimate import Shape, SizeSettings, TargetCard, show_sizes, size_table
from data.features import conversations_fingerprint, estimate_bytes
from data.produce import FeatureSettings, produce
from data.sources import SourceSettings
from data.target import Target, TargetSettings
from drafters.contract import check_layers, default_layers
from drafters.vocabulary import coverage_curve

GROUPS = ["target", "data", "answers", "answered_by", "features", "dry_run", "estimate", "sizes", "shape", "convert"]
ANSWERED_BY = ("auto", "target", "source")
COVERAGE_SIZES = [2**i for i in range(10, 18)]


@hydra.main(version_base="1.3", config_path="pkg://conf", config_name="prepare")
def main(config: DictConfig) -> None:
    """Prepare as configured; prints what was kept and where things lie."""
    out = Path(HydraConfig.get().runtime.output_dir)
    if launched_rank() > 0 and config.target.tp_plan is None:
        raise ValueError(
            "prepare runs as one process; several (torchrun, srun) hold a target spread by target.tp_plan, got null: "
            "producers that share the work (features.queue.active=true) are started one by one, each with its own "
            "hydra.run.dir and all with the same features.folder"
        )
    with only_run(out) if launched_rank() == 0 else nullcontext():  # others only help to hold the target
        run(config, out, Console())


def run(config: DictConfig, out: Path, console: Console) -> dict[str, Any]:
    """The wiring, top to bottom. Returns what prepare.json holds. Unknown keys fail before anything is loaded."""
    known_groups(config, *GROUPS)
    loading = settings(TargetSettings, config.target, "target")
    source = settings(SourceSettings, config.data, "data")
    answering = settings(AnswerSettings, config.answers, "answers")
    wanted = settings(FeatureSettings, config.features, "features")
    sizes = settings(SizeSettings, config.sizes, "sizes")
    if config.answered_by not in ANSWERED_BY:
        raise ValueError(f"answered_by must be one of {', '.join(ANSWERED_BY)}, got {config.answered_by!r}")
    if config.estimate:
        return estimate(config, sizes, source, answering, wanted, console)
    target = Target.load(**asdict(loading))
    if config.convert is not None:
        return converted(target, Path(config.convert), wanted, config, out, console)
    layers = feature_layers(wanted, target.identity["num_layers"])
    own = config.answered_by == "target" or (config.answered_by == "auto" and source.source != "answers_jsonl")
    asked = None
    if own and config.dry_run and not (out / "answers.jsonl").exists():
        size = upper_bound(target, source, answering, layers, wanted)
        console.print(f"features: at most {size / 1e6:,.1f} MB; the exact size is known once the target has answered")
        return {"feature_bytes_at_most": size}
    if own:
        asked = ask(target, source, answering, out)
        source = asked.source
    conversations, report = read_source(source, target.tokenizer, target.eos_ids, target.identity["vocab_size"])
    if asked:  # the file may hold answers of a larger run, too
        wanted_ids = set(asked.answers.ids)
        conversations = [one for one in conversations if one.id in wanted_ids]
    if not conversations:
        raise ValueError(f"no conversation is left to learn from; dropped: {report.dropped}")
    if not own and source.heldout:
        conversations, kept_out = split_heldout(conversations, source.heldout)
        if not config.dry_run:
            write_conversations(out / "heldout.jsonl", kept_out)
    summary = summarise(target, conversations, report, asked, layers)
    width = target.identity["hidden_size"]
    summary["feature_bytes"] = estimate_bytes(conversations, len(layers), width, wanted.store, wanted.shard_bytes)
    show(console, summary)
    if config.dry_run:
        return summary
    write_conversations(out / "conversations.jsonl", conversations)
    write_json(out / "prepare.json", summary)
    if wanted.write:
        summary["features"] = str(write_features(target, conversations, layers, wanted, out / "features"))
    write_json(out / "prepare.json", summary)
    record(out, config, target=target.identity, data=summary["data"])
    console.print(f"conversations: {out / 'conversations.jsonl'}", soft_wrap=True)
    console.print(f"features: {summary['features'] or 'none written'}", soft_wrap=True)
    return summary


@dataclass
class Asked:
    """What the target answered: a source of recorded ids, and what became of prompts and answers."""

    source: SourceSettings
    prompts: Report
    answers: AnswerReport


def prompts_of(source: SourceSettings, out: Path) -> tuple[list[Prompt], Report]:
    """The source's prompts less those held out, which are written to heldout.jsonl; and what was dropped."""
    report = Report()
    prompts = read_prompts(source, report=report)
    if source.heldout:
        prompts, kept_out = split_heldout(prompts, source.heldout)
        lines = [json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in kept_out]
        write_text(out / "heldout.jsonl", "".join(lines))
    return prompts, report


def ask(target: Target, source: SourceSettings, answering: AnswerSettings, out: Path) -> Asked:
    """Let the target answer the source's prompts into answers.jsonl, going on where it stopped."""
    prompts, report = prompts_of(source, out)
    template = Template(target.tokenizer, source.thinking, target.eos_ids)
    answers = answer(prompts, answering, out / "answers.jsonl", template, target)
    written = SourceSettings(
        "answers_jsonl",
        str(out / "answers.jsonl"),
        domain=source.domain,
        thinking=source.thinking,
        max_length=source.max_length,
        eval_path=source.eval_path,
    )
    return Asked(written, report, answers)


def upper_bound(
    target: Target, source: SourceSettings, answering: AnswerSettings, layers: Sequence[int], wanted: FeatureSettings
) -> int:
    """Bytes of the features if every answer grew to max_new_tokens: what can be said before the target has answered."""
    template = Template(target.tokenizer, source.thinking, target.eos_ids)
    rows = longest_rows(source, answering, template)
    return estimate_bytes(rows, len(layers), target.identity["hidden_size"], wanted.store, wanted.shard_bytes)


def longest_rows(source: SourceSettings, answering: AnswerSettings, template: Template) -> list[Conversation]:
    """The source's prompts as conversations whose answers are as long as they may be."""
    longest = source.max_length or 1 << 40
    rows = []
    for prompt in read_prompts(source):
        tokens = template.prompt(prompt.messages)
        room = min(longest - len(tokens), answering.max_new_tokens)
        if room >= 0:
            turns = [0] * len(tokens) + [1] * room
            rows += [Conversation(prompt.id, prompt.domain, [*tokens, *[0] * room], turns)] * answering.samples
    return rows


def feature_layers(wanted: FeatureSettings, depth: int) -> tuple[int, ...]:
    """The layers to capture of a target of `depth` layers; ValueError when they do not fit."""
    return default_layers(depth) if wanted.layers is None else check_layers(tuple(wanted.layers), depth, least=0)


def write_features(
    target: Target, conversations: Sequence[Conversation], layers: Sequence[int], wanted: FeatureSettings, link: Path
) -> Path:
    """Capture into the store's folder, with a progress bar, and leave a link to it. Returns the folder."""
    data = conversations_fingerprint(conversations)
    key = fingerprint([target.identity["weights"], str(target.dtype), data, list(layers), *wanted.key()])
    folder = Path(wanted.folder).expanduser() if wanted.folder else cache_root() / "features" / key
    began, done = time.perf_counter(), 0
    columns = [
        TextColumn("features"),
        BarColumn(),
        TextColumn("{task.fields[rate]} tokens/s, left"),
        TimeRemainingColumn(),
    ]
    if wanted.queue_settings.active:  # trainers may begin now
        folder.mkdir(parents=True, exist_ok=True)
        leave_link(folder, link)
    with Progress(*columns) as bar:
        task = bar.add_task("features", total=sum(len(one.tokens) for one in conversations), rate=0)

        def advance(tokens: int) -> None:
            nonlocal done
            done += tokens
            bar.update(task, advance=tokens, rate=f"{done / (time.perf_counter() - began):.0f}")

        produce(target, conversations, layers, folder, wanted, advance)
    return leave_link(folder, link)


def leave_link(folder: Path, link: Path) -> Path:
    """Let `link` point to a store's folder; returns where that really is."""
    if link.is_symlink():
        link.unlink()
    if link.resolve() != folder.resolve():
        os.symlink(folder.resolve(), link, target_is_directory=True)
    return folder.resolve()


def converted(
    target: Target, prepared: Path, wanted: FeatureSettings, config: DictConfig, out: Path, console: Console
) -> dict[str, Any]:
    """A prepared folder with the same conversations and features in the form that `features` says; the target reads
    nothing anew."""
    source = prepared / "features"
    folder = Path(wanted.folder).expanduser() if wanted.folder else out / "store"
    store = convert(target, source, folder, wanted.store, wanted.layers, wanted.shard_bytes)
    for name in ("conversations.jsonl", "heldout.jsonl"):
        if (prepared / name).exists():
            with atomic(out / name) as temporary:
                shutil.copyfile(prepared / name, temporary)
    size = sum(path.stat().st_size for path in folder.iterdir())
    summary = read_json(prepared / "prepare.json") | {
        "layers": list(store.layers),
        "feature_bytes": size,
        "features": str(leave_link(folder, out / "features")),
    }
    write_json(out / "prepare.json", summary)
    record(out, config, target=target.identity, data=summary["data"])
    truth = f"check 4 on {store.truth:.2%} of a sample"
    console.print(f"features: {store.layout.describe()}; {size / sum(store.lengths):,.0f} bytes a token; {truth}")
    console.print(f"features: {summary['features']}", soft_wrap=True)
    return summary


def estimate(
    config: DictConfig,
    sizes: SizeSettings,
    source: SourceSettings,
    answering: AnswerSettings,
    wanted: FeatureSettings,
    console: Console,
) -> dict[str, Any]:
    """Print and return the bytes of each way to keep the features, without the target's weights."""
    if config.get("shape") is not None:
        shape = settings(Shape, config.shape, "shape")
        rows = None
    else:
        card = TargetCard.load(settings(TargetSettings, config.target, "target"))
        shape = card.shape
        own = config.answered_by == "target" or (config.answered_by == "auto" and source.source != "answers_jsonl")
        rows = None
        if sizes.tokens is None and own:
            rows = longest_rows(source, answering, Template(card.tokenizer, source.thinking, card.eos_ids))
        elif sizes.tokens is None:
            rows, _ = read_source(source, card.tokenizer, card.eos_ids, shape.vocab_size)
    layers = feature_layers(wanted, shape.num_layers)
    found = size_table(shape, len(layers), sizes, rows, wanted.store, wanted.shard_bytes)
    show_sizes(console, shape, layers, found)
    return found


def summarise(
    target: Target,
    conversations: Sequence[Conversation],
    report: Report,
    asked: Asked | None,
    layers: Sequence[int],
) -> dict[str, Any]:
    """What prepare.json says: identities, the template and thinking mode, counts and the vocabulary's coverage."""
    vocab_size = target.identity["vocab_size"]
    counts: Tensor = token_counts(conversations, vocab_size)
    sizes = [size for size in COVERAGE_SIZES if size < vocab_size] + [vocab_size]
    return {
        "target": target.identity,
        "data": conversations_fingerprint(conversations),
        "chat_template": target.identity["chat_template"],
        "thinking": report.thinking,
        "layers": list(layers),
        "conversations": len(conversations),
        "tokens": sum(len(one.tokens) for one in conversations),
        "answer_tokens": int(counts.sum()),
        "domains": dict(sorted(Counter(one.domain for one in conversations).items())),
        "rows": report.as_dict(),
        "prompts": asked.prompts.as_dict() if asked else None,
        "answers": asked.answers.as_dict() if asked else None,
        "distinct_answer_tokens": int((counts > 0).sum()),
        "coverage": [[size, round(share, 6)] for size, share in coverage_curve(counts, sizes)],
        "feature_bytes": 0,
        "features": None,
    }


def show(console: Console, summary: dict[str, Any]) -> None:
    """The counts as a table."""
    table = Table("what", "count", title=f"prepared for {summary['target']['name']}")
    rows = summary["rows"]
    table.add_row("rows read", f"{rows['read']:,}")
    for part in ("prompts", "answers"):
        for reason, count in sorted((summary[part] or {}).get("dropped", {}).items()):
            table.add_row(f"prompt dropped: {reason}", f"{count:,}")
    if failed := (summary["answers"] or {}).get("errors"):
        table.add_row("prompts without an answer (the same command asks again)", f"{len(failed):,}")
        table.add_row("the first of them", f"{next(iter(failed))}: {failed[next(iter(failed))]}")
    for reason, count in sorted(rows["dropped"].items()):
        table.add_row(f"dropped: {reason}", f"{count:,}")
    for name, count in summary["domains"].items():
        table.add_row(f"conversations, {name}", f"{count:,}")
    table.add_row("cut to length", f"{rows['truncated']:,}")
    table.add_row("tokens", f"{summary['tokens']:,}")
    table.add_row("answer tokens", f"{summary['answer_tokens']:,}")
    for size, share in summary["coverage"]:
        table.add_row(f"draft vocabulary of {size:,} covers", f"{share:.2%}")
    table.add_row(f"features, layers {summary['layers']}", f"{summary['feature_bytes'] / 1e6:,.1f} MB")
    console.print(table)


if __name__ == "__main__":
    run_module("prepare", "data.prepare")
