"""Optimizers: AdamW, and Muon for the matrices with AdamW for the rest; learning-rate schedules.

Muon orthogonalises the momentum of every hidden matrix; embeddings, heads, norms and vectors go to AdamW, as its
authors advise (Jordan et al. 2024; the update is scaled to AdamW's size, Liu et al. 2025, section 2.2).
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class OptimizerSettings:
    """name: "adamw" | "muon". lr: AdamW's rate. muon_lr: rate of the matrices under Muon. betas, weight_decay as usual.
    warmup: share of steps with a linear rise. schedule: what follows. final: last rate as a share of lr. decay: share
    of steps that the wsd schedule spends falling. clip: gradient-norm bound, 0 for none.
    """

    name: Literal["adamw", "muon"] = "adamw"
    lr: float = 6e-4
    muon_lr: float = 0.02
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup: float = 0.04
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    final: float = 0.0
    decay: float = 0.2
    clip: float = 1.0

    def __post_init__(self) -> None:
        if self.name not in ("adamw", "muon"):
            raise ValueError(f'optimizer name must be "adamw" or "muon", got {self.name!r}')
        if self.schedule not in ("cosine", "wsd", "constant"):
            raise ValueError(f'schedule must be "cosine", "wsd" or "constant", got {self.schedule!r}')
        for name in ("warmup", "final", "decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"optimizer {name} must be in 0..1, got {getattr(self, name)}")


def rate(settings: OptimizerSettings, total_steps: int) -> Callable[[int], float]:
    """Factor of the learning rate at an optimizer step (0-based), for a run of total_steps."""
    warm = max(1, round(settings.warmup * total_steps))

    def factor(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        done = min(1.0, (step - warm) / max(1, total_steps - warm))
        if settings.schedule == "constant":
            return 1.0
        if settings.schedule == "wsd":
            left = min(1.0, (1.0 - done) / max(settings.decay, 1e-9))
            return settings.final + (1 - settings.final) * left
        return settings.final + (1 - settings.final) * 0.5 * (1 + math.cos(math.pi * done))

    return factor


def build_optimizer(named: Iterable[tuple[str, nn.Parameter]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Optimizer over trainable named parameters. Under Muon, matrices go to Muon, save heads, tables of tokens and
    single rows."""
    trainable = [(name, p) for name, p in named if p.requires_grad]
    betas = cast(tuple[float, float], tuple(settings.betas))  # a list when it comes from yaml
    if settings.name == "adamw":
        return torch.optim.AdamW(
            [p for _, p in trainable], lr=settings.lr, betas=betas, weight_decay=settings.weight_decay
        )
    matrices = [
        p
        for name, p in trainable
        if p.ndim == 2 and min(p.shape) > 1 and not any(word in name for word in ("head", "embed", "codebook"))
    ]
    inside = {id(p) for p in matrices}
    rest = [p for _, p in trainable if id(p) not in inside]
    return Muon(
        [
            {"params": matrices, "kind": "muon", "lr": settings.muon_lr, "weight_decay": settings.weight_decay},
            {"params": rest, "kind": "adamw", "lr": settings.lr, "weight_decay": settings.weight_decay},
        ],
        betas=betas,
    )


class Muon(torch.optim.Optimizer):
    """Muon (kind "muon") and AdamW (kind "adamw") groups in one optimizer, so that one scheduler and one state dict
    serve.

    Muon: m <- momentum m + g; update = orthogonalise(g + momentum m) * 0.2 sqrt(max(rows, columns)).
    """

    def __init__(self, groups: list[dict[str, Any]], betas: tuple[float, float], momentum: float = 0.95) -> None:
        super().__init__(groups, {"lr": 1e-3, "betas": betas, "momentum": momentum, "eps": 1e-8, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            update = self._matrix_update if group["kind"] == "muon" else self._adam_update
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update(parameter, group), alpha=-group["lr"])
        return loss

    def _matrix_update(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        state, gradient = self.state[parameter], parameter.grad
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].mul_(group["momentum"]).add_(gradient)
        direction = gradient + group["momentum"] * state["momentum"]
        return orthogonalise(direction) * (0.2 * math.sqrt(max(parameter.shape)))

    def _adam_update(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        state, gradient = self.state[parameter], parameter.grad
        if not state:
            state |= {
                "step": torch.zeros(()),
                "first": torch.zeros_like(parameter),
                "second": torch.zeros_like(parameter),
            }
        first, second = group["betas"]
        state["step"] += 1
        state["first"].lerp_(gradient, 1 - first)
        state["second"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        count = float(state["step"])
        scale = (state["second"] / (1 - second**count)).sqrt_().add_(group["eps"])
        return state["first"] / (1 - first**count) / scale


def orthogonalise(matrix: Tensor, steps: int = 5) -> Tensor:
    """Nearest semi-orthogonal matrix by the quintic Newton-Schulz iteration (Jordan et al. 2024). [m, n] -> [m, n]
    float32.

    bf16 where a GPU does the work, as in the source; float32 elsewhere, where long matrices take the shorter way.
    """
    x = matrix.to(torch.bfloat16 if matrix.is_cuda else torch.float32)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (x.norm() + 1e-7)
    long = x.shape[1] > 2 * x.shape[0] and x.dtype == torch.float32
    x = (iterate_gram if long and not isinstance(x, DTensor) else iterate_plain)(x, steps)
    return (x.T if tall else x).to(matrix.dtype)


A, B, C = 3.4445, -4.7750, 2.0315  # of the quintic, Jordan et al. 2024


def iterate_plain(x: Tensor, steps: int) -> Tensor:
    """x <- (A + B G + C G^2) x with G = x x^T, `steps` times; x [m, n], m <= n."""
    for _ in range(steps):
        gram = x @ x.T
        x = A * x + (B * gram + C * gram @ gram) @ x
    return x


def iterate_gram(x: Tensor, steps: int) -> Tensor:
    """The same in [m, m] products, which commute, and one last product with x: 34 m^3 + 4 m^2 n instead of
    10 m^3 + 20 m^2 n operations at five steps. Float32 only: G squares what is small in x. Not for a sharded x, whose
    diagonal cannot be written in place."""
    gram, whole = x @ x.T, None
    for step in range(steps):
        factor = B * gram + C * gram @ gram
        factor.diagonal().add_(A)
        whole = factor if whole is None else factor @ whole
        if step < steps - 1:
            gram = factor @ (gram @ factor)
    return x if whole is None else whole @ x
