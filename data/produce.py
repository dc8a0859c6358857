"""Where features are made and how they come to the store: by the target here or by a running server, by one process
or by several that fill one folder."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from checkpoints.run import settings
from data.collate import production_order
from data.conversations import Conversation
from data.engine_states import Engine, EngineSettings
from data.features import (
    BATCH_TOKENS,
    SHARD_BYTES,
    capture,
    new_header,
    observe,
    probe,
    write_store,
)
from data.layout import Sample, StoreSettings
from data.queue import Producer, QueueSettings, queue_header
from data.target import Target


@dataclass(frozen=True)
class FeatureSettings:
    """How features are written.

    write: false leaves conversations only. layers: target layer ids (null: the default three). precision, last,
    topk, teacher_at, share_prefixes: how they are kept, see data.layout.StoreSettings. batch_tokens: positions in
    one forward, padding included. shard_bytes: of one shard. folder: of the store (null: in the cache).
    """

    write: bool = True
    layers: list[int] | None = None
    precision: str = "auto"
    last: str = "auto"
    topk: int = 0
    teacher_at: str = "all"
    share_prefixes: bool = False
    batch_tokens: int = BATCH_TOKENS
    shard_bytes: int = SHARD_BYTES
    folder: str | None = None
    server: dict[str, Any] | None = None
    queue: dict[str, Any] | None = None

    @property
    def store(self) -> StoreSettings:
        """How they are kept."""
        return StoreSettings(self.precision, self.last, self.topk, self.teacher_at, self.share_prefixes)

    @property
    def queue_settings(self) -> QueueSettings:
        """How several processes share the work."""
        return settings(QueueSettings, self.queue or {}, "features.queue")

    def engine(self, target: Target, layers: Sequence[int]) -> Engine | None:
        """The server that features come from; None: the target here makes them."""
        if self.server is None:
            return None
        return Engine(settings(EngineSettings, self.server, "features.server"), target, layers)

    def key(self) -> list[Any]:
        """What a store in the cache is found again by."""
        first: dict[str, Any] = {"write": self.write, "layers": self.layers, "dtype": self.precision}
        first |= {"batch_tokens": self.batch_tokens, "shard_bytes": self.shard_bytes, "folder": self.folder}
        more: dict[str, Any] = {} if self.store == StoreSettings(self.precision) else asdict(self.store)
        more |= {"made_by": "vllm"} if self.server else {}
        more |= {"queue": self.queue_settings.seed} if self.queue_settings.active else {}
        return [first, more] if more else [first]

    def __post_init__(self) -> None:
        _ = self.store, self.queue_settings
        if self.server is not None:
            settings(EngineSettings, self.server, "features.server")
        for name in ("batch_tokens", "shard_bytes"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"features.{name} must be an integer >= 1, got {getattr(self, name)!r}")


def produce(
    target: Target,
    conversations: Sequence[Conversation],
    layers: Sequence[int],
    folder: Path,
    wanted: FeatureSettings,
    progress: Callable[[int], None],
) -> None:
    """Fill the store's folder as `wanted` says; as data.features.capture, which does it for one process and the target
    here."""
    queue, store = wanted.queue_settings, wanted.store
    if wanted.server is None and not queue.active:
        capture(target, conversations, layers, folder, wanted.batch_tokens, store, wanted.shard_bytes, progress)
        return
    layout = store.layout(len(layers), target.identity["hidden_size"], target.dtype)
    engine = wanted.engine(target, layers)
    if engine is None:
        probe(target, conversations, layout)
    else:
        engine.check(conversations)
    rows = list(conversations)
    if queue.active:
        rows = [conversations[i] for i in production_order(len(rows), queue.seed)]

    def make(start: int, stop: int) -> Iterable[tuple[int, Sample]]:
        if engine is not None:
            return engine.observe(rows[start:stop], store)
        return observe(target, rows[start:stop], layers, wanted.batch_tokens, store)

    header = new_header(target.identity, target.dtype if engine is None else engine.dtype, rows, layers, layout)
    header |= {"batch_tokens": wanted.batch_tokens, "shard_bytes": wanted.shard_bytes}
    header |= {} if engine is None else {"made_by": "vllm"}
    if queue.active:
        plan = queue_header(header, rows, queue)
        Producer(folder, header, rows, plan, make, queue, progress=progress).run()
        return
    write_store(folder, header, rows, make, progress)
