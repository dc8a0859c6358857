"""Batches for Lightning: the store or the live target behind one plan of rows, resumable at any micro-step."""

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from data.collate import Collate, Plan
from data.conversations import Conversation
from data.features import FeatureStore, Sample, observe
from data.layout import StoreSettings
from data.precision import PLAIN
from data.target import Target
from drafters.contract import Batch


@dataclass(frozen=True)
class BatchSettings:
    """row_tokens: T, tokens per packed row (0: the longest conversation, rounded up to 64). rows: packed rows per
    micro-batch over all ranks. anchor_multiple: A is rounded up to this (0: A = T, fixed shapes; null: 32, and
    with a GPU, where each shape is compiled, a quarter of the most that a row can have). workers: loader
    processes, for features that lie on disk. seed: of the sample order. features: "store" reads the feature store,
    "online" runs the target while training, "queue" reads a store that producers are still filling. precision: that
    layers' outputs in the store must have (null: any; it is declared with the drafter), or are made in online (a plain
    dtype; null: as a store's auto).
    """

    row_tokens: int = 0
    rows: int = 8
    anchor_multiple: int | None = None
    workers: int = 0
    seed: int = 0
    features: str = "store"
    precision: str | None = None

    def __post_init__(self) -> None:
        if self.features not in ("store", "online", "queue"):
            raise ValueError(f'batch features must be "store", "online" or "queue", got {self.features!r}')
        if self.features != "online":
            return
        if self.workers:
            raise ValueError(
                f"batch.features=online runs the target in the training process, whose device a loader process cannot "
                f"use: batch.workers must be 0, got {self.workers}"
            )
        if self.precision not in (None, *PLAIN):
            raise ValueError(
                f"batch.features=online stores nothing: batch.precision must be null or one of {', '.join(PLAIN)} "
                f"(fewer bits take their scales from a store's shards), got {self.precision!r}"
            )


class SampleSource(Protocol):
    """Where conversations with features come from."""

    lengths: list[int]
    ids: list[str]

    def samples(self, indices: Sequence[int]) -> list[Sample]: ...


class StoreSource:
    """Samples read from a feature store."""

    def __init__(self, store: FeatureStore) -> None:
        self.store, self.lengths, self.ids = store, store.lengths, store.ids

    def samples(self, indices: Sequence[int]) -> list[Sample]:
        return [self.store[i] for i in indices]


class OnlineSource:
    """Samples made by the target on demand; the same numbers as a store of the same dtype would hold. holds: what
    those are, in words."""

    def __init__(
        self,
        target: Target,
        conversations: Sequence[Conversation],
        layers: Sequence[int],
        dtype: str,
        batch_tokens: int,
    ) -> None:
        self.target, self.conversations, self.layers = target, conversations, layers
        self.dtype, self.batch_tokens = dtype, batch_tokens
        self.lengths = [len(one.tokens) for one in conversations]
        self.ids = [one.id for one in conversations]
        layout = StoreSettings.of(dtype).layout(len(layers), target.identity["hidden_size"], target.dtype)
        self.holds = f"{layout.describe()}, made while training"

    def samples(self, indices: Sequence[int]) -> list[Sample]:
        chosen = [self.conversations[i] for i in indices]
        made = dict(observe(self.target, chosen, self.layers, self.batch_tokens, self.dtype))
        return [made[i] for i in range(len(chosen))]


class Steps(Dataset):
    """Micro-step of `total` -> Batch of this rank's rows: every `ranks`-th one. A rank left without rows in a short
    batch gets a row in which nothing is an answer, so that it takes part in every step and counts for nothing."""

    def __init__(
        self, source: SampleSource, plan: Plan, collate: Collate, total: int, rank: int = 0, ranks: int = 1
    ) -> None:
        self.source, self.plan, self.collate, self.total = source, plan, collate, total
        self.rank, self.ranks = rank, ranks

    def __getitem__(self, step: int) -> Batch:
        rows = self.plan.batch(step)
        mine = rows[self.rank :: self.ranks]
        samples = iter(self.source.samples([index for row in mine or rows[:1] for index in row]))
        packed = [[next(samples) for _ in row] for row in mine or rows[:1]]
        batch = self.collate(packed, step, step / self.total, self.rank, self.ranks)
        if not mine:
            batch.anchors.fill_(-1)
            batch.turns.zero_()
        return batch


def leave_signals(_: int) -> None:
    """For loader processes: SLURM signals the whole process group, and the trainer, which finishes its step, still
    needs them."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


class StepLoader:
    """An epoch-less loader of micro-steps [0, total) that starts where it was stopped.

    Lightning stores `state_dict` in its checkpoints and counts on from its own batch index; `position` is the next
    step.
    """

    def __init__(self, steps: Steps, workers: int) -> None:
        self.steps, self.total, self.workers, self.position = steps, steps.total, workers, 0

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[Batch]:
        loader = DataLoader(
            self.steps,
            batch_size=None,
            sampler=range(self.position, self.total),
            num_workers=self.workers,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=leave_signals,
        )
        for batch in loader:
            self.position += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class PackedData(LightningDataModule):
    """Training batches of a sample source, `total` micro-steps of them, with features in the source's own dtypes: they
    are widened where they are used, so that no more bytes than were stored are packed, pinned and sent to a GPU.
    anchors: drawn a row (None: all)."""

    def __init__(self, source: SampleSource, settings: BatchSettings, anchors: int | None = None) -> None:
        super().__init__()
        row_tokens = settings.row_tokens or -(-max(source.lengths) // 64) * 64
        self.source, self.settings = source, settings
        self.plan = Plan(source.lengths, row_tokens, settings.rows, settings.seed)
        multiple = settings.anchor_multiple
        if multiple is None:
            multiple = max(32, (anchors or row_tokens) // 4) if torch.cuda.is_available() else 32
        self.collate = Collate(row_tokens, multiple or row_tokens, None, anchors)
        self.total = 0

    @property
    def steps(self) -> Steps:
        """This rank's batch of every micro-step, whichever came last."""
        trainer = self.trainer
        rank, ranks = (trainer.global_rank, trainer.world_size) if trainer else (0, 1)
        return Steps(self.source, self.plan, self.collate, self.total, rank, ranks)

    @property
    def first(self) -> Batch:
        """The whole first micro-batch, on every rank, to solve a warm start from."""
        return Steps(self.source, self.plan, self.collate, 1)[0]

    def ids_at(self, step: int) -> list[str]:
        """Ids of all conversations of a micro-step, over all ranks."""
        return [self.source.ids[index] for row in self.plan.batch(step) for index in row]

    def setup(self, stage: str) -> None:
        ranks = self.trainer.world_size if self.trainer else 1
        if self.settings.rows < ranks:
            raise ValueError(f"batch.rows counts rows over all ranks: {self.settings.rows} leave some of {ranks} idle")

    def train_dataloader(self) -> StepLoader:
        return StepLoader(self.steps, self.settings.workers)
