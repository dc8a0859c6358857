"""One global normaliser: one batch of eight equals eight of one, and two ranks equal one."""

import torch
import torch.multiprocessing as mp
from torch import nn

from training.reduce import Window, divide_gradients


def test_a_window_of_micro_batches_equals_one_batch():
    inputs, weights = torch.randn(8, 3), torch.tensor([1.0, 0, 2, 1, 0, 0, 3, 1])
    whole, parts = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    ((inputs @ whole) * weights).sum().div(weights.sum()).backward()
    window = Window()
    for x, w in zip(inputs.split(2), weights.split(2), strict=True):
        loss = ((x @ parts) * w).sum()
        (loss / 4).backward()  # frameworks average over the window
        window.add(denominator=w.sum())
    divide_gradients([parts], window.close()["denominator"], averaged_over=4)
    assert torch.allclose(whole.grad, parts.grad)


def test_a_mean_of_means_is_not_the_same():
    """The planted fault: dividing each micro-batch by its own count weighs slots unevenly."""
    losses, counts = torch.tensor([4.0, 1.0]), torch.tensor([4.0, 1.0])
    wrong = (losses * torch.tensor([1.0, 5.0]) / counts).mean()
    right = (losses * torch.tensor([1.0, 5.0])).sum() / counts.sum()
    assert wrong != right


def test_an_empty_window_gives_zero_not_nan():
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    divide_gradients([p], torch.tensor(0.0), 1)
    assert p.grad.tolist() == [0.0, 0.0]


def _rank(rank: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    window = Window()
    window.add(denominator=torch.tensor(float(rank + 1)), kept=torch.tensor([rank, 10.0]))
    sums = window.close()
    assert sums["denominator"] == 3.0
    assert sums["kept"].tolist() == [1.0, 20.0]
    torch.distributed.destroy_process_group()


def test_denominators_add_up_over_ranks(tmp_path):
    mp.spawn(_rank, (str(tmp_path),), nprocs=2)
