"""Noise that decides tokens: the inverse CDF that maps it to them, and what a network reads of it.

Sampling is a deterministic map from uniforms to text: token t = first index whose cumulative probability exceeds u_t.
One noise belongs to one absolute position of a request, counter_uniform(seed, position, stream), and is never drawn
anew.
"""

import math

import torch
from torch import Tensor, nn

from drafters.sampling import draw


def pick(probs: Tensor, noise: Tensor, ranked: bool = False) -> Tensor:
    """Inverse CDF with float64 sums. probs [..., V], noise [...] -> int64 [...]. ranked: tokens in order of falling
    probability (equal ones by id) instead of token ids."""
    if not ranked:
        return draw(probs, noise)
    ordered = probs.sort(dim=-1, descending=True, stable=True)
    return ordered.indices.gather(-1, draw(ordered.values, noise)[..., None])[..., 0]


def pick_ranked(probs: Tensor, noise: Tensor, top: int = 1024) -> Tensor:
    """`pick` in ranked order of probs [N, V] in float32 and noise [N], without sorting what need not be: the `top`
    likeliest tokens first, and whole rows only where the noise lies beyond them. The host waits for how many those are.
    """
    ids = torch.arange(probs.shape[-1], device=probs.device, dtype=torch.float64)
    # Neighbouring float32 differ by 2^-24 of themselves: less than that sets equal ones in order of ids.
    first = (probs.double() * (1 - ids * 2.0**-45)).topk(min(top, len(ids))).indices
    reached = probs.gather(-1, first).double().cumsum(-1) > (noise * probs.double().sum(-1))[:, None]
    beyond = ~reached[:, -1]
    found = first.gather(-1, reached.int().argmax(-1, keepdim=True))[:, 0]
    found[beyond] = pick(probs[beyond], noise[beyond], ranked=True)
    return found


def bins(probs: Tensor, tokens: Tensor, ranked: bool = False) -> tuple[Tensor, Tensor]:
    """The noises that `pick` maps to tokens: [left, right) in float64, of probs [..., V] at tokens [...].

    Noise that is uniform in the bin of a token that was drawn from probs is uniform in [0, 1).
    """
    whole, at = probs.double(), tokens[..., None]
    if ranked:
        own = probs.gather(-1, at)
        ids = torch.arange(probs.shape[-1], device=probs.device)
        earlier = (probs > own) | ((probs == own) & (ids < at))
        left, total = (whole * earlier).sum(-1), whole.sum(-1)
        return left / total, (left + own[..., 0].double()) / total
    sums = whole.cumsum(-1)
    right = sums.gather(-1, at)[..., 0]
    left = torch.where(tokens > 0, sums.gather(-1, (at - 1).clamp_min(0))[..., 0], 0.0)
    return left / sums[..., -1], right / sums[..., -1]


def sinusoid(values: Tensor, width: int) -> Tensor:
    """[cos, sin] of values * 10000^(-2 j / width) * 2 pi, j = 0 .. width / 2 - 1, in float64. [...] -> [..., width]."""
    half = width // 2
    steps = torch.arange(half, device=values.device, dtype=torch.float64) / half
    angles = values.double()[..., None] * torch.exp(-math.log(10000.0) * steps) * (2 * math.pi)
    return torch.cat([angles.cos(), angles.sin()], -1)


class PointwiseNoiseEncoder(nn.Module):
    """Noise and temperature, each by itself, as an input row (K-Forcing, arXiv 2606.10820, released code).

    x = fuse([sinusoid(noise); sinusoid(tau)]);  x + mlp(norm(x)). width: of the sinusoids and the MLP, even; size: of
    the rows, reached by one more projection where it differs.
    """

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.width = width
        self.fuse = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.out: nn.Module = nn.Identity() if width == size else nn.Linear(width, size, bias=False)

    def forward(self, noise: Tensor, tau: Tensor) -> Tensor:
        """noise in [0, 1) and tau [...] -> rows [..., size]. At tau = 0 the rows do not depend on the noise."""
        noise = torch.where(tau > 0, noise, 0.0)
        features = torch.cat([sinusoid(noise, self.width), sinusoid(tau, self.width)], -1).float()
        # In 16 bits noises closer than 1 / 512 would be one.
        with torch.autocast(noise.device.type, enabled=False):
            fused = nn.functional.linear(features, self.fuse.weight.float(), self.fuse.bias.float())
        fused = fused.to(self.fuse.weight.dtype)
        return self.out(fused + self.mlp(self.norm(fused)))
