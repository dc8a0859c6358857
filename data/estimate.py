"""How large a feature store becomes, for each way to keep it: from a target's config and the data, without weights."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from checkpoints.target_files import config_of
from data.conversations import Conversation
from data.embedded import target_source
from data.features import estimate_bytes
from data.layout import StoreSettings
from data.target import TargetSettings, declared_ids

TOPK = 32
WAYS = (
    StoreSettings("bfloat16"),
    StoreSettings("fp8"),
    StoreSettings("int8"),
    StoreSettings("int8", "int8:32"),
    StoreSettings("int4"),
    StoreSettings("fp8", topk=TOPK),
    StoreSettings("int8", topk=TOPK),
    StoreSettings("int4", topk=TOPK),
)


@dataclass(frozen=True)
class Shape:
    """What the size of features depends on, of a target."""

    name: str
    hidden_size: int
    num_layers: int
    vocab_size: int


@dataclass(frozen=True)
class SizeSettings:
    """tokens: positions in all (None: those of the data). answer_share: of positions that lie in answers."""

    tokens: int | None = None
    answer_share: float | None = None

    def __post_init__(self) -> None:
        if self.tokens is not None and self.tokens < 1:
            raise ValueError(f"sizes.tokens must be at least 1, got {self.tokens}")
        if self.answer_share is not None and not 0 <= self.answer_share <= 1:
            raise ValueError(f"sizes.answer_share must be in 0..1, got {self.answer_share}")


@dataclass
class TargetCard:
    """A target's config and tokenizer."""

    shape: Shape
    tokenizer: PreTrainedTokenizerBase
    eos_ids: tuple[int, ...]

    @classmethod
    def load(cls, asked: TargetSettings) -> Self:
        """From a folder or the hub; no weights are read."""
        source = target_source(asked.name)
        hub: dict[str, Any] = {"revision": asked.revision, "trust_remote_code": asked.trust_remote_code}
        config = config_of(source, **hub).get_text_config(decoder=True)
        tokenizer = AutoTokenizer.from_pretrained(source, **hub)
        shape = Shape(asked.name, config.hidden_size, config.num_hidden_layers, config.vocab_size)
        return cls(shape, tokenizer, declared_ids(source, config, tokenizer, asked.revision))


def size_table(
    shape: Shape,
    layers: int,
    sizes: SizeSettings,
    rows: Sequence[Conversation] | None,
    asked: StoreSettings,
    shard_bytes: int,
) -> dict[str, Any]:
    """Bytes a token and in all of each way, `asked` first. rows: the data; None: `sizes` alone.

    Numbers alone know no prefixes; without answer_share nor answers, so those ways are left out. ValueError when
    neither rows nor tokens are given, or the rows are none.
    """
    if rows is None and sizes.tokens is None:
        raise ValueError("estimate=true needs data, or sizes.tokens: positions in all")
    tokens = sum(len(one.tokens) for one in rows) if rows is not None else int(sizes.tokens or 0)
    if tokens < 1:
        raise ValueError("nothing to estimate: the data hold no prompt or conversation that is kept")
    ways = [asked, *(way for way in WAYS if way != asked)]
    if rows is not None or sizes.answer_share is not None:
        ways += [replace(way, teacher_at="answers") for way in WAYS if not way.topk and way.last == "auto"]
    if rows is not None:
        ways += [replace(way, share_prefixes=True) for way in WAYS[:3]]
    found: list[dict[str, Any]] = []
    for way in ways:
        layout = way.layout(layers, shape.hidden_size, torch.bfloat16)
        if layout.describe() in {one["holds"] for one in found}:  # auto is bfloat16
            continue
        total = way_bytes(way, shape, layers, sizes, rows, shard_bytes)
        found.append(
            {"way": asdict(way), "holds": layout.describe(), "bytes": total, "bytes_per_token": total / tokens}
        )
    return {"target": asdict(shape), "layers": layers, "tokens": tokens, "ways": found}


def way_bytes(
    way: StoreSettings,
    shape: Shape,
    layers: int,
    sizes: SizeSettings,
    rows: Sequence[Conversation] | None,
    shard_bytes: int,
) -> int:
    """Bytes of the whole store."""
    if rows is not None:
        return estimate_bytes(rows, layers, shape.hidden_size, way, shard_bytes)
    layout = way.layout(layers, shape.hidden_size, torch.bfloat16)
    taught = sizes.answer_share if way.teacher_at == "answers" and sizes.answer_share is not None else 1.0
    tokens = int(sizes.tokens or 0)
    return round(tokens * (layout.position_bytes + layout.feature_bytes + taught * layout.teacher_bytes))


def show_sizes(console: Console, shape: Shape, layers: Sequence[int], found: dict[str, Any]) -> None:
    """The table on the screen."""
    title = f"{shape.name}: {len(layers)} layers and the teacher of {found['tokens']:,} tokens"
    table = Table("kept", "bytes a token", "of bfloat16", "in all", title=title)
    plain = next(one["bytes"] for one in found["ways"] if one["holds"].startswith("layers bfloat16"))
    for one in found["ways"]:
        share, size = one["bytes"] / plain, f"{one['bytes'] / 1e9:,.2f} GB"
        table.add_row(one["holds"], f"{one['bytes_per_token']:,.0f}", f"{share:.0%}", size)
    console.print(table)
