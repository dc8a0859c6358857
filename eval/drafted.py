"""A round's proposal as evaluation asks for it, and what a drafting state weighs."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from drafters.contract import Drafter, Proposal
from drafters.drafting import peaks, slot_peaks
from drafters.sampling import Sampling
from eval.estimator import Calibrated


def draft(
    drafter: Drafter, state: Any, num_slots: int, sampling: Sampling, seeds: Tensor, with_peaks: bool = False
) -> Proposal:
    """`drafter.propose`, with q_max by slot where it is wanted, and confidences by the drafter's estimator where it has
    one and gives none of its own; where it was calibrated, its own at their temperatures."""
    known = drafter.estimator
    own = known if isinstance(known, Calibrated) and known.estimator is None else None
    if not with_peaks and (known is None or own is not None):
        proposal = drafter.propose(state, num_slots, sampling, seeds)
        noted = None
    else:
        with peaks() as found:
            proposal = drafter.propose(state, num_slots, sampling, seeds)
        noted = slot_peaks(found, proposal.tokens)
    sure = proposal.confidences
    if sure is not None and isinstance(known, Calibrated):
        sure = known.scaled(sure)
    elif sure is None and noted is not None and known is not None and own is None:
        sure = known(noted)
    return replace(proposal, confidences=sure, peaks=noted)


def stored_bytes(value: Any) -> int:
    """Bytes of all tensors that an object holds, in its fields and containers; a storage counts once. Modules are not
    entered: parameters are no state."""
    seen: dict[tuple[str, int], int] = {}
    _collect(value, seen, set())
    return sum(seen.values())


def _collect(value: Any, seen: dict[tuple[str, int], int], entered: set[int]) -> None:
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        seen[str(value.device), storage.data_ptr()] = storage.nbytes()
        return
    if isinstance(value, torch.nn.Module | type | str | bytes | int | float) or id(value) in entered:
        return
    entered.add(id(value))
    if isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, list | tuple | set):
        parts = list(value)
    else:
        parts = list(getattr(value, "__dict__", {}).values())
    for part in parts:
        _collect(part, seen, entered)
