"""An existing feature store in another form: fewer bits, fewer layers, top-k tokens, shared prefixes. Nothing is
captured anew."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from data.conversations import Conversation
from data.features import FeatureStore, check_ranges, new_header, with_top, write_store
from data.layout import Sample, StoreSettings
from data.target import DTYPES, Target


def convert(
    target: Target,
    source: Path,
    folder: Path,
    wanted: str | StoreSettings,
    layers: Sequence[int] | None = None,
    shard_bytes: int = 1 << 28,
) -> FeatureStore:
    """Write the features of the store `source` to `folder` and open that; a stopped conversion goes on.

    layers: of those stored (None: all). A queue's store becomes an ordinary one, in the conversations' own order. The
    new store has the same bytes as one captured in its form with the same batches. ValueError when the source is of
    another target, is itself rounded more than the new form first rounds to, or fails check 4 before or after.
    """
    old = FeatureStore.open(source, target.identity, layers, "lazy", target.parts)
    asked, stored = StoreSettings.of(wanted), old.layout
    layout = asked.layout(len(old.layers), stored.width, DTYPES[old.header["target_dtype"]])
    if not stored.is_first:
        raise ValueError(f"{source} holds {stored.describe()}: only a store of plain dtypes can be converted")
    for what, had, need in (
        ("layers' outputs", stored.aux_dtype, layout.aux_dtype),
        ("the last hidden state", stored.last_dtype, layout.last_dtype),
    ):
        if had not in (need, DTYPES["float32"]):
            raise ValueError(f"{source} holds {what} in {had}; {asked} starts from {need} or float32: capture again")
    texts = [old.text(i) for i in range(len(old))]
    conversations = [
        Conversation(name, domain, tokens.tolist(), turns.tolist())
        for name, domain, (tokens, turns) in zip(old.ids, old.domains, texts, strict=True)
    ]
    header = new_header(old.header["identity"], DTYPES[old.header["target_dtype"]], conversations, old.layers, layout)
    header |= {"batch_tokens": old.header["batch_tokens"], "shard_bytes": shard_bytes}

    def make(start: int, stop: int) -> Iterator[tuple[int, Sample]]:
        for index in range(start, stop):
            sample = old[index]
            check_ranges(sample.id, sample.aux, sample.last, old.layers, layout)
            sample = replace(sample, last=sample.last.to(layout.last_dtype))
            yield index - start, with_top(sample, target.parts, layout.topk)

    write_store(Path(folder), header, conversations, make)
    return FeatureStore.open(folder, target.identity, None, "lazy", target.parts)
