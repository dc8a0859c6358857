"""Self-forcing: a drafter trained on its own drafts, judged by the target (Draft-OPD, arXiv 2605.29343; online
speculative decoding, arXiv 2310.07177).

The drafter drafts through the answers of a batch as it would while serving: round after round, each from the token
where the last one ended. Up to the first rejected slot the drafts are the answer's own tokens, so the features that
the batch holds are the target's verdict, and no target is asked:

    answer          x1   x2   x3   x4   x5   x6
    round at x1          x2   x3   y           drafted; y is rejected: slots 1..3 are supervised, slot 3 towards x4
    round at x4                         x5 ..  the next round starts at the corrected token

Slots after the first rejected one follow tokens that the target never wrote. They count with the weight `rejected`;
then the target reads the drafts once (eval.branches), and its distributions there are kept with the rollout.

A rollout serves `reuse` micro-steps: rejections are replayed while the drafter moves on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from data.features import readout
from data.target import Target
from drafters.contract import Batch, Drafted, Drafter
from drafters.sampling import FORCING_STREAM, Sampling, counter_uniform
from eval.branches import check_branches, read_branches
from eval.replay import Round, Trajectory, rounds_of
from training.ranks import all_gathered

AT_ONCE = 32


@dataclass(frozen=True)
class SelfForcingSettings:
    """share: of micro-steps that train on drafts, reached linearly between the shares `start` and `full` of the run.
    reuse: micro-steps that a rollout serves. rounds: at most so many of a packed row. temperature: of the drafts.
    rejected: weight of slots after the first rejected one; 0 leaves them out and the target unasked. ValueError on
    values that are not allowed."""

    share: float = 0.0
    start: float = 0.0
    full: float = 0.0
    reuse: int = 1
    rounds: int = 64
    temperature: float = 0.0
    rejected: float = 0.0

    def __post_init__(self) -> None:
        for name in ("share", "start", "full"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"self_forcing.{name} must be in 0..1, got {getattr(self, name)}")
        if self.full < self.start:
            raise ValueError(f"self_forcing.full must not be below start {self.start}, got {self.full}")
        for name in ("reuse", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"self_forcing.{name} must be at least 1, got {getattr(self, name)}")
        for name in ("temperature", "rejected"):
            if getattr(self, name) < 0:
                raise ValueError(f"self_forcing.{name} must not be negative, got {getattr(self, name)}")

    def share_at(self, progress: float) -> float:
        """Share of micro-steps that train on drafts, at a share of the run."""
        if progress < self.start:
            return 0.0
        rise = self.full - self.start
        return self.share if rise == 0 else self.share * min(1.0, (progress - self.start) / rise)


@dataclass
class Rollout:
    """What the drafter drafted for rows of one micro-step: anchors [B, A] (-1 pads) and its tokens there. rows: the
    rows' numbers (None: those of the batch it is used with)."""

    micro_step: int
    anchors: Tensor
    drafted: Drafted
    rows: list[int] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors, for a checkpoint."""
        own = {f.name: getattr(self.drafted, f.name).cpu() for f in fields(Drafted)}
        return {"micro_step": self.micro_step, "anchors": self.anchors.cpu(), "drafted": own, "rows": self.rows}

    @classmethod
    def restore(cls, state: dict[str, Any]) -> Self:
        """From a checkpoint."""
        return cls(state["micro_step"], state["anchors"], Drafted(**state["drafted"]), state.get("rows"))

    def of(self, numbers: list[int]) -> Self:
        """These rows, one without anchors where a row is not here."""
        if self.rows is None or self.rows == numbers:
            return self
        place = {row: index for index, row in enumerate(self.rows)}
        index = torch.tensor([place.get(number, 0) for number in numbers], device=self.anchors.device)
        absent = torch.tensor([number not in place for number in numbers], device=self.anchors.device)
        chosen = {f.name: getattr(self.drafted, f.name)[index] for f in fields(Drafted)}
        chosen["mask"] = chosen["mask"] & ~absent[:, None, None]
        anchors = self.anchors[index].masked_fill(absent[:, None], -1)
        return replace(self, anchors=anchors, drafted=Drafted(**chosen), rows=numbers)


def merged(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One state of a rollout whose rows lie on several ranks; a row that several hold is taken once."""
    parts, rows = [Rollout.restore(state).state_dict() for state in states], [state["rows"] for state in states]
    first = {row: (part, place) for part, own in reversed(list(enumerate(rows))) for place, row in enumerate(own)}

    def join(values: list[Tensor], fill: int = 0) -> Tensor:
        shape = [max(value.shape[axis] for value in values) for axis in range(1, values[0].ndim)]
        whole = values[0].new_full((len(first), *shape), fill)
        for index, (part, place) in enumerate(first[row] for row in sorted(first)):
            one = values[part][place]
            inner = tuple(slice(size) for size in one.shape)
            whole[index][inner] = one
        return whole

    names = [f.name for f in fields(Drafted)]
    drafted = {name: join([part["drafted"][name] for part in parts]) for name in names}
    anchors = join([part["anchors"] for part in parts], -1)
    return {"micro_step": parts[0]["micro_step"], "anchors": anchors, "drafted": drafted, "rows": sorted(first)}


class SelfForcing:
    """Turns micro-steps' batches into batches of the drafter's own drafts, by the schedule.

    again: gives the batch of an earlier micro-step anew, for rollouts that are used more than once; features are not
    kept twice.
    """

    def __init__(self, target: Target, settings: SelfForcingSettings, again: Callable[[int], Batch]) -> None:
        self.target, self.settings, self.again = target, settings, again
        self.kept: list[Rollout] = []
        self.used = 0  # micro-steps on drafts so far

    def __call__(self, drafter: Drafter, batch: Batch, micro_step: int) -> Batch:
        """The batch as it is, or one of drafts; decided by the micro-step alone."""
        chance = counter_uniform(torch.tensor(micro_step), torch.tensor(0), FORCING_STREAM)
        if float(chance) >= self.settings.share_at(batch.progress):
            return batch
        turn, self.used = self.used % self.settings.reuse, self.used + 1
        if turn == 0 or not self.kept:
            fresh = Rollout(micro_step, *self.roll(drafter, batch), batch.row_numbers.tolist())
            self.kept = [*self.kept, fresh][-self.settings.reuse :]
            return with_drafts(batch, fresh)
        pick = int(counter_uniform(torch.tensor(micro_step), torch.tensor(1), FORCING_STREAM) * len(self.kept))
        old = self.kept[pick]
        return with_drafts(self.again(old.micro_step).to(batch.tokens.device, batch.last.dtype), old)

    def check(self, drafter: Drafter) -> None:
        """ValueError where slots after a rejected draft are to count and this drafter or target cannot have them."""
        if not self.settings.rejected:
            return
        if not drafter.follows_drafts:
            raise ValueError(
                f"{type(drafter).__name__} does not read drafted tokens in every slot: self_forcing.rejected must be "
                f"0, got {self.settings.rejected}"
            )
        check_branches(self.target, f"self_forcing.rejected={self.settings.rejected:g}")

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: all ranks' rollouts, for any number of ranks. Every rank must call it."""
        kept = [one.state_dict() for one in self.kept]
        if self.kept and (held := all_gathered(kept)):
            kept = [merged(states) for states in zip(*held, strict=True)]
        return {"used": self.used, "kept": kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.used, self.kept = state["used"], [Rollout.restore(one) for one in state["kept"]]

    def roll(self, drafter: Drafter, batch: Batch) -> tuple[Tensor, Drafted]:
        """Draft through all answers of a batch: anchors [B, A] and what was drafted there."""
        self.check(drafter)
        texts, offsets = answers_of(batch)
        training = drafter.training
        drafter.eval()
        rounds: list[Round] = []
        seeds = draft_seeds(batch, texts, offsets)
        sampling = Sampling(temperature=self.settings.temperature)
        # Drafting keeps caches in the parameters' dtype; training may run the drafter in another.
        with torch.no_grad(), torch.autocast(batch.tokens.device.type, enabled=False):
            for start in range(0, len(texts), AT_ONCE):
                numbers = range(start, min(start + AT_ONCE, len(texts)))
                some, own = [texts[i] for i in numbers], seeds[start : numbers.stop]
                rounds += rounds_of(drafter, some, numbers, drafter.num_slots, sampling, own)
        drafter.train(training)
        chosen = self._choose(rounds, offsets, batch)
        verdicts = self._verdicts(chosen, texts)
        weight = self.settings.rejected
        anchors, drafted = _lay_out(chosen, texts, offsets, batch, verdicts, weight, drafter.num_slots)
        return anchors, self._read_out(drafted, batch.tokens.shape[1])

    def _choose(self, rounds: list[Round], offsets: list[tuple[int, int]], batch: Batch) -> list[Round]:
        """At most `rounds` of each row, drawn by (seed, row number, place), in order."""
        rows = torch.tensor([offsets[one.answer][0] for one in rounds], dtype=torch.int64)
        columns = torch.tensor([offsets[one.answer][1] + one.anchor for one in rounds], dtype=torch.int64)
        own = batch.first_row + batch.row_step * rows
        keys = counter_uniform(torch.full_like(rows, batch.seed), own * (1 << 20) + columns, FORCING_STREAM)
        kept = [
            index
            for row in range(len(batch.tokens))
            for index in sorted((rows == row).nonzero()[:, 0].tolist(), key=lambda i: float(keys[i]))[
                : self.settings.rounds
            ]
        ]
        return [rounds[i] for i in sorted(kept, key=lambda i: (int(rows[i]), int(columns[i])))]

    def _verdicts(self, rounds: list[Round], texts: list[Trajectory]) -> list[Tensor | None]:
        """For each round the target's last hidden states after anchor and drafts [K, D]; None where nothing that it has
        not read is to be supervised."""
        found: list[Tensor | None] = [None] * len(rounds)
        by_text: dict[int, list[int]] = {}
        for index, one in enumerate(rounds if self.settings.rejected else ()):
            if _known(one) < self._last(one):
                by_text.setdefault(one.answer, []).append(index)
        for answer, indices in by_text.items():
            text, anchors = texts[answer], [rounds[i].anchor for i in indices]
            drafted = torch.tensor([rounds[i].drafted for i in indices], device=text.tokens.device)
            blocks = torch.cat([text.tokens[anchors][:, None], drafted[:, :-1]], 1)
            read = read_branches(self.target, text.tokens, anchors, blocks).last
            for index, states in zip(indices, read.to(text.last), strict=True):
                found[index] = states[: self._last(rounds[index])]
        return found

    def _last(self, one: Round) -> int:
        """The last slot that has a label when the target reads the drafts: none follows a drafted end of turn, and
        none an answer that ended before it rejected anything."""
        if one.accepted >= one.room:
            return _known(one)
        ends = [k for k, token in enumerate(one.drafted) if token in self.target.eos_ids]
        return ends[0] + 1 if ends else len(one.drafted)

    def _read_out(self, drafted: Drafted, columns: int) -> Drafted:
        """Fill in what the target says at the verdicts' states, and its tokens there as labels."""
        if drafted.last.shape[1] == 0:
            return drafted
        with torch.autocast(drafted.last.device.type, enabled=False):
            top1, lse = readout(self.target, drafted.last.flatten(0, 1))
        top1, lse = (x.view(drafted.last.shape[:2]).to(drafted.last.device) for x in (top1, lse))
        own = (drafted.teacher - columns).clamp_min(0).flatten(1)
        said = top1.gather(1, own).view_as(drafted.labels)
        labels = torch.where(drafted.teacher >= columns, said, drafted.labels)
        return replace(drafted, labels=labels, top1=top1, lse=lse)


def _known(one: Round) -> int:
    """Slots of a round that the answer itself judges: the accepted ones and the first rejected one."""
    return min(one.accepted + 1, one.room, len(one.drafted))


def answers_of(batch: Batch) -> tuple[list[Trajectory], list[tuple[int, int]]]:
    """Every answer of a packed batch with what stands before it in its document, and where that begins: row, column."""
    texts, offsets = [], []
    for row in range(len(batch.tokens)):
        documents, turns = batch.documents[row], batch.turns[row]
        for document in range(int(documents.max()) + 1):
            inside = (documents == document).nonzero()[:, 0]
            start, own = int(inside[0]), turns[inside]
            for turn in range(1, int(own.max()) + 1):
                answer = (own == turn).nonzero()[:, 0]
                first, stop = int(answer[0]), int(answer[-1]) + 1
                if first == 0 or stop - first < 2:  # nothing to draft from, or nothing to draft
                    continue
                place = slice(start, start + stop)
                tokens, aux, last = (values[row, place] for values in (batch.tokens, batch.aux, batch.last))
                texts.append(Trajectory("", tokens, first, aux, last))
                offsets.append((row, start))
    return texts, offsets


def draft_seeds(batch: Batch, texts: list[Trajectory], offsets: list[tuple[int, int]]) -> Tensor:
    """[R] int64 seeds of the drafts in every answer: by (seed, row number, place), whichever rank drafts."""
    rows = torch.tensor([batch.first_row + batch.row_step * row for row, _ in offsets], dtype=torch.int64)
    starts = [start + text.prompt for (_, start), text in zip(offsets, texts, strict=True)]
    return ((batch.seed << 36) + (rows << 20)) + torch.tensor(starts, dtype=torch.int64)


def with_drafts(batch: Batch, rollout: Rollout) -> Batch:
    """The batch with a rollout's anchors and drafts."""
    device = batch.tokens.device
    if rollout.rows is not None:
        rollout = rollout.of(batch.row_numbers.tolist())
    return replace(batch, anchors=rollout.anchors.to(device), drafted=rollout.drafted.to(device, batch.last.dtype))


def _lay_out(
    rounds: list[Round],
    texts: list[Trajectory],
    offsets: list[tuple[int, int]],
    batch: Batch,
    verdicts: list[Tensor | None],
    rejected: float,
    num_slots: int,
) -> tuple[Tensor, Drafted]:
    """Rounds as anchors [B, A] and Drafted; verdicts' states stand behind the row's own positions."""
    rows, columns = batch.tokens.shape
    by_row: list[list[int]] = [[] for _ in range(rows)]
    for index, one in enumerate(rounds):
        by_row[offsets[one.answer][0]].append(index)
    width = max(1, *(len(one) for one in by_row))
    if batch.tokens.is_cuda:
        width = -(-width // 32) * 32  # few shapes, for attention that is compiled
    shape, device = (rows, width, num_slots), batch.tokens.device
    anchors = torch.full((rows, width), -1)
    tokens, labels, teacher = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
    mask, weights = torch.zeros(shape, dtype=torch.bool), torch.ones(shape)
    extra: list[list[Tensor]] = [[] for _ in range(rows)]
    for row, indices in enumerate(by_row):
        for place, index in enumerate(indices):
            one = rounds[index]
            text, column = texts[one.answer], offsets[one.answer][1] + one.anchor
            known = _known(one)
            anchors[row, place] = column
            tokens[row, place] = torch.tensor(one.drafted)
            labels[row, place, :known] = text.tokens[one.anchor + 1 : one.anchor + 1 + known].cpu()
            mask[row, place, :known] = True
            teacher[row, place, :known] = column + torch.arange(known)
            if (states := verdicts[index]) is not None:
                stop = len(states)
                mask[row, place, known:stop] = True
                weights[row, place, known:stop] = rejected
                teacher[row, place, known:stop] = columns + len(extra[row]) + torch.arange(stop - known)
                extra[row] += list(states[known:])
    last = batch.last.new_zeros(rows, max(map(len, extra)), batch.last.shape[-1])
    for row, states_of_row in enumerate(extra):
        if states_of_row:
            last[row, : len(states_of_row)] = torch.stack(states_of_row)
    none = batch.top1.new_zeros(last.shape[:2])
    drafted = Drafted(tokens, labels, mask, weights, teacher, last, none, none.float())
    return anchors.to(device), drafted.to(device)
