"""A small indexer that chooses which positions a query attends to (DeepSeek-V3.2's lightning indexer, without its
rotary part), for choices that later steps reuse (IndexShare, arXiv 2603.12201).

score(t, s) = sum_j w_j(t) ReLU(q_j(t) . k(s)) / sqrt(heads * width);   a query keeps the `top` best visible s.

Letters in shapes: B rows, N queries, S positions, D hidden width.
"""

import math

import torch
from torch import Tensor, nn


class Indexer(nn.Module):
    """heads: queries a row; width: of each query and of the one key a position."""

    def __init__(self, size: int, heads: int, width: int) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.q_proj = nn.Linear(size, heads * width, bias=False)
        self.k_proj = nn.Linear(size, width, bias=False)
        self.weights_proj = nn.Linear(size, heads, bias=False)

    def scores(self, states: Tensor, keys: Tensor) -> Tensor:
        """states [B, N, D], keys [B, S, width] from `k_proj` -> [B, N, S]."""
        queries = self.q_proj(states).unflatten(-1, (self.heads, self.width))
        weights = self.weights_proj(states) / math.sqrt(self.heads * self.width)
        total = torch.zeros(*states.shape[:2], keys.shape[1], dtype=states.dtype, device=states.device)
        for j in range(self.heads):  # one head's [N, S] at a time
            total = total + weights[..., j, None] * (queries[:, :, j] @ keys.transpose(1, 2)).relu()
        return total


def best(scores: Tensor, visible: Tensor, top: int) -> Tensor:
    """The `top` best-scored visible positions of each query, all of them where there are fewer. [B, N, S] bool."""
    return among(visible, scores.masked_fill(~visible, -torch.inf).topk(min(top, scores.shape[-1]), -1).indices)


def among(visible: Tensor, columns: Tensor) -> Tensor:
    """The visible positions [B, N, S] that are among columns [B, N, top] of each query."""
    return torch.zeros_like(visible).scatter_(-1, columns.long(), True) & visible


def index_loss(weights: Tensor, scores: Tensor, visible: Tensor) -> Tensor:
    """KL(attention || softmax of the scores) over the visible positions (DeepSeek-V3.2, section 2.1).

    weights [B, H, N, S] of the attention, detached here and averaged over heads. Returns [B, N].
    """
    wanted = weights.detach().float().mean(1) * visible
    wanted = wanted / wanted.sum(-1, keepdim=True).clamp_min(1e-12)
    log_given = scores.float().masked_fill(~visible, -torch.inf).log_softmax(-1).masked_fill(~visible, 0.0)
    return (torch.xlogy(wanted, wanted) - wanted * log_given).sum(-1)
