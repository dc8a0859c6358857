"""Greedy acceptance without the target: replay a drafter against the target's recorded greedy answers.

Greedy speculative decoding emits the target's own greedy answer whatever the drafter says, so the features and tokens
that verification would produce are known once the answer is. Replaying drafts for real (observe, propose, compare)
gives the same tau, round by round, as the full decoding loop; only the target's work is spared. Training uses it
at every interval; `eval.recording` keeps the answers.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.contract import Drafter
from drafters.sampling import Sampling
from eval.calibration import Rounds
from eval.drafted import draft


@dataclass
class Trajectory:
    """A prompt and the target's greedy answer with features.

    tokens int64 [T]; prompt: tokens of the prompt; aux [T, L, D], last [T, D] (the row of the last token is never
    read).
    """

    domain: str
    tokens: Tensor
    prompt: int
    aux: Tensor
    last: Tensor


@dataclass
class Acceptance:
    """tau overall and by domain (emitted tokens per round, bonus included), alpha_k [K] conditional acceptance and
    how many rounds tried each slot, rounds. confident: the rounds with the drafter's confidences, None when it
    gives none. peaked: the rounds with q_max in their place, when asked for."""

    tau: float
    domains: dict[str, float]
    alpha: list[float]
    trials: list[int]
    rounds: int
    confident: Rounds | None = None
    peaked: Rounds | None = None

    @property
    def accepted(self) -> float:
        return max(0.0, self.tau - 1)


@dataclass
class Round:
    """One round. answer: number of its trajectory. anchor: its position there. drafted [K]. accepted: drafts that agree
    with the answer. room: tokens left to emit. confidences, peaks: by slot, None without."""

    domain: str
    answer: int
    anchor: int
    drafted: list[int]
    accepted: int
    room: int
    confidences: list[float] | None
    peaks: list[float] | None = None


@torch.no_grad()
def replay(
    drafter: Drafter, trajectories: Sequence[Trajectory], num_slots: int, batch_size: int = 32, peaks: bool = False
) -> Acceptance:
    """Draft greedily through every trajectory and count what the target would have accepted.

    The token after the prompt comes from prefill and is not counted; a round that reaches the end of the answer
    counts the tokens it could still emit. peaks: also note q_max. Raises ValueError when no trajectory has an answer of
    two tokens.
    """
    was_training = drafter.training
    drafter.eval()
    emitted: dict[str, int] = defaultdict(int)
    rounds: dict[str, int] = defaultdict(int)
    offered, kept = [0] * num_slots, [0] * num_slots
    seen: list[Round] = []
    order = sorted(range(len(trajectories)), key=lambda index: len(trajectories[index].tokens))
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        for one in rounds_of(drafter, [trajectories[i] for i in chosen], chosen, num_slots, peaks=peaks):
            rounds[one.domain] += 1
            emitted[one.domain] += min(one.accepted + 1, one.room)
            for k in range(min(one.accepted + 1, num_slots, one.room)):
                offered[k] += 1
                kept[k] += k < one.accepted
            seen.append(one)
    drafter.train(was_training)
    total = sum(rounds.values())
    if total == 0:
        raise ValueError("no trajectory has an answer of at least two tokens: nothing to draft")
    return Acceptance(
        tau=sum(emitted.values()) / total,
        domains={domain: emitted[domain] / rounds[domain] for domain in sorted(rounds)},
        alpha=[k / max(o, 1) for k, o in zip(kept, offered, strict=True)],
        trials=offered,
        rounds=total,
        confident=_with(seen, [one.confidences for one in seen], num_slots),
        peaked=_with(seen, [one.peaks for one in seen], num_slots),
    )


def _with(rounds: Sequence[Round], given: Sequence[list[float] | None], num_slots: int) -> Rounds | None:
    """Rounds for calibration, None where values are missing; one whose last draft ends the answer scores the slots up
    to it."""
    if any(values is None for values in given):
        return None
    scored = [one.room if one.accepted >= one.room else num_slots for one in rounds]
    return Rounds(
        torch.tensor(given, dtype=torch.float64),
        torch.tensor([one.accepted for one in rounds]),
        torch.tensor(scored),
        torch.tensor([one.answer for one in rounds]),
    )


def rounds_of(
    drafter: Drafter,
    batch: Sequence[Trajectory],
    numbers: Sequence[int],
    num_slots: int,
    sampling: Sampling | None = None,
    seeds: Tensor | None = None,
    peaks: bool = False,
) -> Iterator[Round]:
    """Every round of a batch of trajectories, which have these numbers. sampling: of the drafts (None: greedy); they
    are accepted while they agree with the answer. seeds [R] int64 of the drafts (None: 0..R-1)."""
    longest = max(len(one.tokens) for one in batch)
    parameter = next(drafter.parameters(), None)
    like = batch[0].last if parameter is None else parameter
    state = drafter.begin(len(batch), longest + num_slots)
    drafter.start(state, torch.stack([one.tokens[0] for one in batch]).to(like.device))
    seeds = (torch.arange(len(batch)) if seeds is None else seeds).to(like.device)
    read, anchor = [0] * len(batch), [one.prompt for one in batch]
    while any(anchor[r] < len(one.tokens) - 1 for r, one in enumerate(batch)):
        next_ids, aux, last, lengths = _unread(batch, read, anchor)
        # Trajectories may rest in another place and dtype than the drafter, as features do while decoding.
        drafter.observe(state, next_ids.to(like.device), aux.to(like), last.to(like), lengths.to(like.device))
        proposal = draft(drafter, state, num_slots, sampling or Sampling(), seeds, peaks)
        drafted = proposal.tokens.tolist()
        given, noted = (None if part is None else part.tolist() for part in (proposal.confidences, proposal.peaks))
        for r, one in enumerate(batch):
            truth = one.tokens[anchor[r] + 1 : anchor[r] + 1 + num_slots].tolist()
            room = len(one.tokens) - 1 - anchor[r]
            read[r] = anchor[r]
            if room <= 0:
                continue
            accepted = next((k for k, (a, b) in enumerate(zip(drafted[r], truth, strict=False)) if a != b), len(truth))
            sure, peak = (None if part is None else part[r] for part in (given, noted))
            yield Round(one.domain, numbers[r], anchor[r], drafted[r], accepted, room, sure, peak)
            anchor[r] += min(accepted + 1, room)


def _unread(batch: Sequence[Trajectory], read: list[int], anchor: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Arguments of observe: positions read[r]..anchor[r] - 1 of each trajectory, padded to the longest."""
    counts = [a - r for a, r in zip(anchor, read, strict=True)]
    width, like = max(max(counts), 1), batch[0]
    next_ids = like.tokens.new_zeros(len(batch), width)
    aux = like.aux.new_zeros(len(batch), width, *like.aux.shape[1:])
    last = like.last.new_zeros(len(batch), width, like.last.shape[-1])
    for r, (one, count) in enumerate(zip(batch, counts, strict=True)):
        place = slice(read[r], read[r] + count)
        next_ids[r, :count] = one.tokens[read[r] + 1 : anchor[r] + 1]
        aux[r, :count], last[r, :count] = one.aux[place], one.last[place]
    return next_ids, aux, last, torch.tensor(counts, device=next_ids.device)
