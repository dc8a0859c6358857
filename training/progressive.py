"""A stage of progressive self-forcing: a drafter of K slots learns from a frozen one of K / 2, run twice.

The second run stands behind tokens that the frozen drafter made up, so no feature store knows their features: the
target reads them, as branches off each document (eval.branches).
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from checkpoints.files import fingerprint
from checkpoints.folder import load_drafter, read_drafter
from data.target import Target
from drafters.contract import Batch, Drafter
from eval.branches import check_branches, read_branches


@dataclass(frozen=True)
class Stage:
    """half: folder of the frozen drafter. share: of the packed rows that learn its labels; the others keep the target's
    own. start: begin from its tensors. exact: in those rows, too, keep the target's labels as far as they are known,
    and take the half's only behind them, where it agreed with them all; false: all labels of such a row are its own."""

    half: str
    share: float = 0.5
    start: bool = True
    exact: bool = True


@runtime_checkable
class Staged(Protocol):
    """What a drafter offers that can learn in stages."""

    def begin_stage(self, half: Any, read: Any, share: float, start: bool = True, exact: bool = True) -> list[str]: ...


def begin(drafter: Drafter, stage: Stage, target: Target) -> list[str]:
    """Give the drafter its frozen half and a way to read branches. Returns lines to show. ValueError for a drafter
    without stages, a half that is not its own kind, or a target that cannot read branches where there are any."""
    if not isinstance(drafter, Staged):
        raise ValueError(f"{type(drafter).__name__} does not learn in stages: drafter.stage must be null")
    if drafter.num_slots > 2:
        check_branches(target, f"drafter.stage of {drafter.num_slots} slots")
    half = load_drafter(Path(stage.half).expanduser(), target.parts, torch.float32)
    return drafter.begin_stage(half, partial(read_behind, target), stage.share, stage.start, stage.exact)


def marks(stage: Stage | None) -> dict[str, str]:
    """What a resumed run's stage must share: the frozen half's settings and tensors; nothing without a stage."""
    if stage is None:
        return {}
    half = read_drafter(Path(stage.half).expanduser()).declared
    return {"stage.half": fingerprint([half.architecture, half.settings, half.tensors])}


def read_behind(target: Target, batch: Batch, branches: Tensor, layers: tuple[int, ...]) -> Tensor:
    """Aux features [B, A, n, L, D] of tokens [B, A, n] that follow each of the batch's anchors, in the batch's dtype;
    zero at padding anchors. Without tokens the target is not run."""
    aux = batch.aux.new_zeros(*branches.shape, *batch.aux.shape[2:])
    for row, anchors in enumerate(batch.anchors if branches.shape[2] else ()):
        own = torch.where(anchors < 0, -1, batch.documents[row, anchors.clamp_min(0)])
        for document in own[own >= 0].unique().tolist():
            mine, inside = (own == document).nonzero()[:, 0], (batch.documents[row] == document).nonzero()[:, 0]
            blocks = torch.cat([batch.tokens[row, anchors[mine]][:, None], branches[row, mine]], 1)
            places = (anchors[mine] - inside[0]).tolist()
            aux[row, mine] = read_branches(target, batch.tokens[row, inside], places, blocks, layers).aux[:, 1:].to(aux)
    return aux
