"""benchmarks/sampled_text.py: exact chances of continuations, and a test that planted faults fail."""

from collections import Counter
from typing import Any

import pytest
import torch

from benchmarks.sampled_text import chi_square, count, exact_cells, holm, measure, plant
from data.target import Target
from drafters.sampling import Sampling
from eval import decoder, verification
from eval.decoder import DecodeSettings
from tests.doubles import tiny_target
from tests.unit.test_decoder import PROMPTS, Toy

SAMPLING = Sampling(1.5, top_k=3)


@pytest.fixture(scope="module")
def llama() -> Target:
    return tiny_target("llama")


def test_cells_are_a_partition_with_the_targets_chances(llama: Target) -> None:
    prompt = PROMPTS[2]
    last = llama.forward(torch.tensor([prompt]), ()).last[:, -1]
    p = SAMPLING.probs(llama.logits(last))[0].double()
    cells = exact_cells(llama, prompt, 2, SAMPLING, 0.0)
    assert sum(cells.values()) == pytest.approx(1.0)
    for token in p.nonzero().flatten().tolist():
        under = sum(mass for cell, mass in cells.items() if cell[0] == token)
        assert under == pytest.approx(float(p[token]))
    coarse = exact_cells(llama, prompt, 2, SAMPLING, 0.3)
    assert sum(coarse.values()) == pytest.approx(1.0)
    assert len(coarse) < len(cells)
    assert coarse[(-1,)] == pytest.approx(float(p[p < 0.3].sum()))


def test_continuations_fall_where_they_belong() -> None:
    cells = {(7, 1): 0.3, (7, -1): 0.2, (9,): 0.2, (-1,): 0.3}
    assert count([(7, 1), (7, 2), (7, 3), (9,), (4, 1)], cells) == Counter({(7, -1): 2, (7, 1): 1, (9,): 1, (-1,): 1})
    with pytest.raises(ValueError, match="outside all cells"):
        chi_square(Counter({(8, 8): 20}), cells)
    with pytest.raises(ValueError, match="draw more samples"):
        chi_square(Counter({(9,): 1}), cells)
    # Cells in order (-1,) 30, (7, -1) 20, (7, 1) 30, (9,) 20 of 100: (40-30)^2/30 + (10-20)^2/20 = 8.33, 3 degrees.
    cells_seen, p = chi_square(Counter({(-1,): 40, (7, -1): 10, (7, 1): 30, (9,): 20}), cells)
    assert cells_seen == 4
    assert p == pytest.approx(0.0396, abs=1e-4)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


@pytest.mark.parametrize(("rule", "fault"), [(None, None), ("block", None), (None, "residual"), (None, "ratio")])
def test_faults_are_told(rule: Any, fault: str | None, llama: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((verification, "residual"), (decoder, "verify")):
        monkeypatch.setattr(module, name, getattr(module, name))  # taken back afterwards
    plant(fault)
    settings = DecodeSettings(2, 3, 1500, SAMPLING, verification=rule)
    found = measure(llama, Toy(llama, lambda _: False, 0.3), PROMPTS[2], settings, 1500, 0)
    assert found.cells >= 10
    assert (found.p > 0.01) == (fault is None)
