"""What only a GPU runs: FlexAttention's compiled kernels, CUDA graphs, pinned copies. Skipped where there is none.

The same weights and batch on the CPU, where attention is dense and nothing is captured, say what must come out. What
compiles, and takes its time, comes last.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from data.features import FeatureStore
from data.module import BatchSettings, PackedData, StoreSource
from data.target import Target
from drafters import attention
from drafters.contract import Batch, Drafter
from drafters.sampling import Sampling
from eval.decoder import DecodeSettings, generate
from eval.scheduler import Prefix
from eval.steady import Loop
from tests import checks
from tests.doubles import tiny_target
from tests.prepared import LAYERS, prepare_tiny, train
from tests.unit.test_scheduler import Line
from tests.unit.test_waits import ALSO
from training import objectives
from training.activations import KINDS, Kept, spare_activations, waiting
from training.objectives import slot_terms
from training.optimizers import OptimizerSettings, build_optimizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

WIDTH = attention.NARROWEST  # of a head: the tests' own 8 are too narrow for FlexAttention's kernels
PROMPTS = [[2, 9, 10, 11, 12, 13, 14, 15, 16, 17], [2, 30], [2, 21, 22, 23, 24], [2, 40, 41, 9, 9, 12], [2, 50, 51]]
LOOPS = ["eagle3", "dflash", "dspark", "mtp", "peagle"]


@pytest.fixture(autouse=True)
def _whole_products() -> Iterator[None]:
    """float32 products of 32 bits, not of TF32, and one seed."""
    torch.manual_seed(0)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(scope="module")
def here() -> Target:
    return tiny_target("llama", head_dim=WIDTH)


@pytest.fixture(scope="module")
def there() -> Target:
    return tiny_target("llama", head_dim=WIDTH).to("cuda")


def both(name: str, here: Target, there: Target, **model: Any) -> tuple[Drafter, Drafter]:
    """The same drafter on the CPU and on the GPU. Features' noise is drawn by each device's own generator: none."""
    if name in ("eagle", "hass"):
        model["noise"] = 0.0
    one = checks.build(name, here, num_slots=2, **model)
    other = checks.build(name, there, num_slots=2, **model).to("cuda")
    other.load_state_dict(one.state_dict())
    return one, other


def long_batch(target: Target, drafter: Drafter) -> Batch:
    """Rows of more than two of FlexAttention's blocks, none of whose lengths is a multiple of a block's."""
    texts = [checks.random_text(target, length, seed=length) for length in (150, 120, 290)]
    samples = [
        checks.sample(target, drafter, text, [0] * 20 + [1] * (len(text) - 20), str(i)) for i, text in enumerate(texts)
    ]
    return checks.row_batch([samples[:2], samples[2:]], 300)


def step(drafter: Drafter, batch: Batch, target: Target, name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one step, by the drafter's own objective."""
    drafter.zero_grad()
    terms = slot_terms(drafter, drafter.slots(batch), batch, target.parts, checks.own_objective(name))
    (terms.loss / terms.denominator).backward()
    found = {name: p.grad.cpu().clone() for name, p in drafter.named_parameters() if p.grad is not None}
    return (terms.loss / terms.denominator).detach().cpu(), found


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, top_k=24, top_p=0.95)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", LOOPS)
def test_captured_rounds_are_the_waiting_loops(name: str, sampling: Sampling, there: Target) -> None:
    drafter = checks.build(name, there, num_slots=3).to("cuda")
    drafter.warm_start(there.parts)
    how = DecodeSettings(num_slots=3, max_new_tokens=24, batch_size=8, seed=3, sampling=sampling)
    known = generate(there, drafter, PROMPTS, how)
    if sampling.greedy:
        plain = generate(there, None, PROMPTS, how)
        assert [one.tokens for one in known] == [one.tokens for one in plain]
    for kind in ("steady", "halves"):
        made = generate(there, drafter, PROMPTS, how, group=Loop(kind, checked=True).group)
        assert [one.tokens for one in made] == [one.tokens for one in known], kind
        assert [one.accepted for one in made] == [one.accepted for one in known], kind


@pytest.mark.parametrize("late", [False, True])
def test_a_schedule_waits_for_nothing(late: bool, there: Target) -> None:
    drafter = checks.build("dspark", there, num_slots=3).to("cuda")
    drafter.warm_start(there.parts)
    how = DecodeSettings(num_slots=3, max_new_tokens=24, batch_size=8, seed=3)
    plain = generate(there, None, PROMPTS, how)
    for kind in ("steady", "halves"):
        loop = Loop(kind, partial(Prefix, Line(1.0, 0.05), 3, late, False), checked=True)
        made = generate(there, drafter, PROMPTS, how, group=loop.group)
        assert [one.tokens for one in made] == [one.tokens for one in plain], kind


def test_greedy_output_is_the_cpus(here: Target, there: Target) -> None:
    one, other = both("eagle3", here, there)
    how = DecodeSettings(num_slots=2, max_new_tokens=24, batch_size=8)
    mine, theirs = generate(here, one, PROMPTS, how), generate(there, other, PROMPTS, how)
    assert [made.tokens for made in mine] == [made.tokens for made in theirs]


@pytest.mark.parametrize("name", checks.DRAFTERS)
def test_a_training_step_is_the_cpus(name: str, here: Target, there: Target) -> None:
    one, other = (drafter.train() for drafter in both(name, here, there))
    batch = long_batch(here, one)
    loss, gradients = step(one, batch, here, name)
    moved = batch.to("cuda", torch.float32)
    on_gpu, theirs = step(other, moved, there, name)
    torch.testing.assert_close(on_gpu, loss, rtol=1e-3, atol=1e-4)
    assert set(theirs) == set(gradients)
    for key, gradient in gradients.items():
        off = (theirs[key] - gradient).norm() / gradient.norm().clamp_min(1e-6)
        assert off < 1e-2, f"{key} is off by {off:.2e}"
    with torch.autocast("cuda", torch.bfloat16):
        mixed, rounded = step(other, moved, there, name)
    torch.testing.assert_close(mixed, loss, rtol=5e-2, atol=5e-2)
    assert all(bool(gradient.isfinite().all()) for gradient in rounded.values())


@pytest.mark.parametrize("name", [name for name in checks.DRAFTERS if name not in ALSO])
def test_a_step_waits_where_slots_are_counted(name: str, there: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own check, of the drafters that wait for nothing else."""
    drafter = checks.build(name, there, num_slots=2).to("cuda").train()
    batch = long_batch(there, drafter).to("cuda", torch.float32)
    objective, parts = checks.own_objective(name), there.parts
    optimizer = build_optimizer(drafter.named_parameters(), OptimizerSettings("muon"))
    counted = objectives.groups_of

    def run() -> None:
        terms = slot_terms(drafter, drafter.slots(batch), batch, parts, objective)
        terms.loss.backward()
        optimizer.step()

    def uncounted(*arguments: Any) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        found = counted(*arguments)
        torch.cuda.set_sync_debug_mode("error")
        return found

    run()  # compiles, and moves what is moved once
    monkeypatch.setattr(objectives, "groups_of", uncounted)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_come_pinned_beside_a_gpu_in_use(workers: int, tmp_path: Path) -> None:
    """Loader processes are forked from a process that uses CUDA: those of a store never touch it."""
    prepared = prepare_tiny(tmp_path)
    source = StoreSource(FeatureStore.open(prepared / "features", None, LAYERS))
    data = PackedData(source, BatchSettings(rows=2, workers=workers))
    data.total = 3
    torch.zeros(1, device="cuda")
    for batch in data.train_dataloader():
        assert batch.aux.is_pinned()
        assert batch.lse.is_pinned()
        assert torch.equal(batch.to("cuda", torch.float32).aux.cpu(), batch.aux.float())


@pytest.mark.parametrize("name", ["eagle3", "dspark"])
def test_the_whole_road_in_16_bits(name: str, tmp_path: Path) -> None:
    prepared = prepare_tiny(tmp_path / "prepared", head_dim=WIDTH)
    keys: dict[str, object] = {"drafter": name, "trainer.precision": "bf16-mixed", "trainer.max_steps": 6}
    found = train(prepared, tmp_path / "run", **keys)
    assert found["tau"] >= 1


def test_recomputed_and_offloaded_states_change_nothing(here: Target, there: Target) -> None:
    _, drafter = both("dflash", here, there)
    batch = long_batch(there, drafter).to("cuda")
    wanted = step(drafter.train(), batch, there, "dflash")[1]
    for kept in KINDS[1:]:
        spare_activations(drafter, cast(Kept, kept))
        with waiting(cast(Kept, kept), torch.device("cuda")):
            made = step(drafter, batch, there, "dflash")[1]
        for key, gradient in wanted.items():
            torch.testing.assert_close(made[key], gradient, rtol=1e-3, atol=1e-4)
