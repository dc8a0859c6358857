"""Latency of a trace made by hand, decoding efficiency, and sizes."""

from dataclasses import dataclass

import pytest
import torch

from eval.decoder import Clock, Generation
from eval.drafted import stored_bytes
from eval.latency import latency, percentiles
from eval.metrics import acceptance


def test_percentiles_interpolate() -> None:
    # Ranks 0..4: P50 is rank 2, P90 rank 3.6 (4 + 0.6 * 6), P99 rank 3.96 (4 + 0.96 * 6).
    assert percentiles([0.010, 0.001, 0.002, 0.003, 0.004]) == pytest.approx({"p50": 3, "p90": 7.6, "p99": 9.76})


def test_a_trace_by_hand() -> None:
    """One answer: first token after 100 ms, 4 tokens 20 ms later, 1 token 10 ms later. Another: 2 after 30 ms."""
    one = Generation([1] * 6, emitted=[4, 1], arrivals=[0.1, 0.12, 0.13])
    two = Generation([1] * 3, emitted=[2], arrivals=[0.2, 0.23])
    found = latency([one, two])
    assert found is not None
    assert found.first_ms == pytest.approx({"p50": 150, "p90": 190, "p99": 199})
    # Gaps 10, 20, 30 ms, however many tokens they brought.
    assert found.gap_ms == pytest.approx({"p50": 20, "p90": 28, "p99": 29.8})
    # A token: 5 5 5 5 10 15 15 ms: rank 3 of 0..6, rank 5.4, rank 5.94.
    assert found.token_ms == pytest.approx({"p50": 5, "p90": 15, "p99": 15})
    assert latency([Generation([1])]) is None
    alone = latency([Generation([1], arrivals=[0.5])])
    assert alone is not None
    assert alone.gap_ms is alone.token_ms is None


def test_efficiency_by_hand() -> None:
    # K = 3: 2 rounds, the target read 8 tokens for them, 4 + 1 were emitted.
    found = acceptance([Generation([1] * 6, [4, 1], [3, 0], [3, 3], [3, 0])], 3)
    assert found.efficiency == pytest.approx(5 / 8)
    assert acceptance([Generation([1])], 3).efficiency == 0.0


@dataclass
class State:
    keys: list[torch.Tensor]
    length: torch.Tensor


def test_sizes_count_a_storage_once() -> None:
    keys = torch.zeros(2, 10)
    assert stored_bytes(State([keys, keys[:1], keys.t()], torch.zeros(3, dtype=torch.int64))) == 80 + 24
    assert stored_bytes({"module": torch.nn.Linear(4, 4), "x": None}) == 0
    clock = Clock()
    for size in (3, 9, 4):
        clock.hold("cache", size)
    assert clock.sizes == {"cache": 9}
