"""headstart bench train: what a training step of every drafter costs, beside its naive twin, in one table.

    headstart bench train
    headstart bench train train.tokens=4096 train.shape.hidden_size=4096 train.shape.vocab_size=151936

A step is the drafter's forward over the slot grid, its own objective, and the backward; random features of the given
widths stand in for a target, whose values cost nothing and change no speed. The naive twin is the same drafter with
the logits of all slots over the whole vocabulary at once and plain autograd (training.objectives.plain_terms), the form
that peers' trainers have. Each form of each drafter runs in a process of its own, so that its peak of memory is its
own. Products are counted by torch as they run; the machine's peak is that of a large matrix product in the same dtype.
"""

import multiprocessing
import resource
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, cast

import hydra
import torch
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from checkpoints.errors import run_module
from checkpoints.files import write_json
from checkpoints.run import ROOT, known_groups, native_bf16, record, settings
from data.collate import draw_anchors, gather_anchors
from drafters.contract import Batch, Drafter, TargetParts, answer_anchors
from drafters.vocabulary import DraftVocabulary
from eval.bench import GROUPS, ProfileSettings, StepSettings, timed
from training.objectives import Objective, plain_terms, slot_terms

FILE = "train.json"
Form = Literal["ours", "naive"]
PRODUCT = 1024  # side of the square matrices whose product is the machine's peak; eight times that on a GPU


@dataclass(frozen=True)
class Job:
    """One drafter to measure. model: `_target_` and arguments. vocabulary: draft tokens, None for all."""

    name: str
    model: dict[str, Any]
    objective: Objective
    vocabulary: int | None
    how: StepSettings


@dataclass(frozen=True)
class Step:
    """One form's step. slots: supervised. tokens: of answers. seconds: the fastest of the repeats. bytes: peak above
    what was there before the first step. flops: of matrix products, counted, in attention those of masked pairs too."""

    slots: int
    tokens: int
    seconds: float
    bytes: int
    flops: int


@dataclass(frozen=True)
class Row:
    """A drafter's line. refused: why it, or its naive twin, could not be measured; None when they were."""

    name: str
    ours: Step | None = None
    naive: Step | None = None
    refused: str | None = None

    def as_dict(self, peak: float) -> dict[str, Any]:
        """Rates and ratios. peak: products per second of the machine."""
        found: dict[str, Any] = {"drafter": self.name, "refused": self.refused}
        if self.ours is not None:
            found |= {"ours": asdict(self.ours), "slots_per_s": self.ours.slots / self.ours.seconds}
            found |= {"tokens_per_s": self.ours.tokens / self.ours.seconds}
            found["share_of_peak"] = self.ours.flops / self.ours.seconds / peak
        if self.ours is not None and self.naive is not None:
            found |= {"naive": asdict(self.naive), "speed_over_naive": self.naive.seconds / self.ours.seconds}
            found["naive_bytes_over_ours"] = self.naive.bytes / max(1, self.ours.bytes)
        return found


def device() -> torch.device:
    """The first GPU, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def autocast(where: torch.device) -> AbstractContextManager[Any]:
    """The step's precision as training has it: bf16 where the hardware multiplies it, else float32."""
    return torch.autocast(where.type, torch.bfloat16) if native_bf16() else nullcontext()


def random_parts(shape: dict[str, int], where: torch.device) -> TargetParts:
    """A target's parts of the given sizes, with random values."""
    config = LlamaConfig(**cast(dict[str, Any], shape))
    table = torch.randn(config.vocab_size, config.hidden_size, device=where) * 0.02
    norm = LlamaRMSNorm(config.hidden_size).to(where)
    return TargetParts(config, table, norm, table, mask_token=config.vocab_size - 1)


def random_batch(drafter: Drafter, how: StepSettings, parts: TargetParts) -> Batch:
    """Rows of one conversation each: an eighth prompt, then one answer; anchors as training draws them."""
    where, size, width = parts.head.device, len(parts.head), parts.head.shape[1]
    shape, count = (how.rows, how.tokens), len(drafter.needs.layers)
    tokens = torch.randint(0, size - 1, shape)
    positions = torch.arange(how.tokens).expand(shape)
    turns = (positions >= how.tokens // 8).long()
    documents = torch.zeros(shape, dtype=torch.int64)
    allowed = answer_anchors(turns, documents)
    if drafter.anchors_per_row is not None:
        allowed = draw_anchors(allowed, drafter.anchors_per_row, 0)
    last = torch.randn(*shape, width)
    logits = parts.logits(last.to(where))
    top1, lse = logits.argmax(-1).cpu(), logits.logsumexp(-1).cpu()
    aux = torch.randn(*shape, count, width)
    anchors = gather_anchors(allowed, 1)
    return Batch(tokens, positions, documents, turns, aux, last, top1, lse, anchors).to(where)


def build(job: Job, parts: TargetParts) -> Drafter:
    """The drafter, in training mode. ValueError when its class refuses the sizes."""
    size = len(parts.head)
    words = (
        DraftVocabulary.full(size) if job.vocabulary is None else DraftVocabulary(torch.arange(job.vocabulary), size)
    )
    made: Drafter = instantiate(job.model, _partial_=True, _convert_="all")(target=parts, vocabulary=words)
    return made.to(parts.head.device).train()


def measure(job: Job, form: Form) -> Step:
    """One form's step, in this process."""
    torch.manual_seed(0)
    where = device()
    parts = random_parts(job.how.shape, where)
    drafter = build(job, parts)
    batch = random_batch(drafter, job.how, parts)

    def run() -> Tensor:
        """One step; its supervised slots."""
        with autocast(where):
            slots = drafter.slots(batch)
            if form == "naive":
                loss = plain_terms(drafter, slots, batch, parts, job.objective)
            else:
                loss = slot_terms(drafter, slots, batch, parts, job.objective).loss
        loss.backward()
        drafter.zero_grad()
        return slots.mask.sum()

    before = _memory(where, reset=True)
    with FlopCounterMode(display=False) as counter:
        slots = int(run())
    _memory(where, reset=True)  # on a GPU, attention that is counted is not the one that is trained with
    seconds = min(timed(run, where) for _ in range(job.how.repeats))
    tokens = int((batch.turns > 0).sum())
    return Step(slots, tokens, seconds, _memory(where) - before, counter.get_total_flops())


def _memory(where: torch.device, reset: bool = False) -> int:
    """High-water mark in bytes: of the allocator on a GPU, of the process elsewhere (there it never falls)."""
    if where.type != "cuda":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if reset:
        torch.cuda.reset_peak_memory_stats(where)
    return torch.cuda.max_memory_allocated(where)


def matmul_peak(repeats: int = 5) -> float:
    """Products and sums per second of one large matrix product, in the step's precision."""
    where = device()
    side = PRODUCT * (8 if where.type == "cuda" else 1)
    one, other = (torch.randn(side, side, device=where) for _ in range(2))
    with autocast(where):
        seconds = min(timed(lambda: one @ other, where) for _ in range(repeats + 1))
    return 2 * side**3 / seconds


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call in a process of its own. ValueError as the call's; RuntimeError for anything else, and for a
    process that was killed."""
    context = multiprocessing.get_context("fork")  # imports are shared; nothing has touched a GPU or threads before
    mine, theirs = context.Pipe(False)
    process = context.Process(target=_answer, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        kind, value = mine.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"the measuring process ended with status {process.exitcode}: out of memory?") from None
    process.join()
    if kind == "ValueError":
        raise ValueError(value)
    if kind != "ok":
        raise RuntimeError(f"{kind}: {value}")
    return value


def _answer(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        pipe.send(("ok", function(*arguments)))
    except Exception as error:
        pipe.send((type(error).__name__, str(error)))


def jobs(how: StepSettings) -> list[Job]:
    """Every drafter of conf/drafter, or those asked for, at its paper's settings with how.num_slots slots."""
    known = sorted(path.stem for path in (ROOT / "conf" / "drafter").glob("*.yaml"))
    if unknown := sorted(set(how.drafters or []) - set(known)):
        raise ValueError(f"train.drafters: no {', '.join(unknown)}; there are {', '.join(known)}")
    found = []
    for name in how.drafters or known:
        config = compose("train", [f"drafter={name}", "prepared=nowhere", "target=smollm2"])
        model = cast(dict[str, Any], OmegaConf.to_container(config.drafter.model, resolve=True))
        model["num_slots"] = how.num_slots
        if model.get("train_steps"):
            model["train_steps"] = min(model["train_steps"], how.num_slots)
        objective = settings(Objective, config.objective, "objective")
        wanted, size = config.drafter.vocabulary, how.shape["vocab_size"]
        vocabulary = None if wanted is None or wanted >= size else int(wanted)
        found.append(Job(name, model, objective, vocabulary, how))
    return found


def line(job: Job) -> Row:
    """Both forms of one drafter. One that fails, out of memory for one, leaves the others their lines."""
    try:
        ours = apart(measure, job, "ours")
    except (ValueError, RuntimeError) as error:
        return Row(job.name, refused=str(error))
    try:
        return Row(job.name, ours, apart(measure, job, "naive") if job.how.naive else None)
    except (ValueError, RuntimeError) as error:
        return Row(job.name, ours, refused=f"naive twin: {error}")


def show(rows: list[Row], peak: float, console: Console) -> None:
    """The table."""
    title = f"one training step, matmul peak {peak / 1e9:,.0f} GFLOP/s"
    table = Table("drafter", title=title, title_justify="left")
    for name in ("slots/s", "answer tokens/s", "peak MB", "of matmul peak", "x naive speed", "naive MB"):
        table.add_column(name, justify="right")
    for row in rows:
        found = row.as_dict(peak)
        if row.ours is None:
            table.add_row(row.name, f"refused: {row.refused}")
            continue
        cells = [f"{found['slots_per_s']:,.0f}", f"{found['tokens_per_s']:,.0f}", f"{row.ours.bytes / 1e6:,.0f}"]
        cells.append(f"{found['share_of_peak']:.0%}")
        if row.refused is not None:
            cells.append(row.refused)
        if row.naive is not None:
            cells += [f"{found['speed_over_naive']:.2f}", f"{row.naive.bytes / 1e6:,.0f}"]
        table.add_row(row.name, *cells)
    console.print(table)


def run(config: DictConfig, out: Path, console: Console) -> list[Row]:
    """Measure as configured; writes train.json and run.json into `out`."""
    known_groups(config, *GROUPS, *ProfileSettings.__dataclass_fields__)
    how = settings(StepSettings, config.train, "train")
    rows = []
    peak = apart(matmul_peak)
    for job in jobs(how):
        rows.append(line(job))
        # As far as it goes: a table that its time limit ends is a shorter table.
        write_json(out / FILE, {"matmul_peak": peak, "rows": [row.as_dict(peak) for row in rows]})
        console.print(f"{job.name}: done", style="dim")
    record(out, config)
    show(rows, peak, console)
    console.print(f"table          {out / FILE}", soft_wrap=True)
    return rows


@hydra.main(version_base="1.3", config_path="pkg://conf", config_name="bench")
def main(config: DictConfig) -> None:
    """`headstart bench train`."""
    run(config, Path(HydraConfig.get().runtime.output_dir), Console())


if __name__ == "__main__":
    run_module("bench", "training.bench")
