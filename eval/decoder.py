"""Speculative decoding of several requests at once, and the same loop without a drafter.

One round of a request, its anchor at position a (known, not yet read by the target):

    propose    d1 .. dK                     drafter, after the anchor
    target     reads  A  d1 .. dK           one forward, positions a .. a + K
    verify     keeps  d1 .. dn  and adds the corrected or bonus token x
    cache      keeps  A  d1 .. dn           the rest is dropped
    observe    features of A d1 .. dn, followed by d1 .. dn x; x is the next anchor

Without a drafter K = 0: each round reads the anchor and adds one token, with the same cache and verification.

Letters in shapes: R requests still running, S requests of the group, K slots, L captured layers, D hidden width.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from data.target import Features, Target
from drafters.contract import Coupling, Drafter, Proposal
from drafters.sampling import NOISE_STREAM, Sampling, counter_uniform, draw, round_seeds
from eval.cache import RowCache, check_cacheable
from eval.drafted import draft, stored_bytes
from eval.lossy import Lossy, verify_lossy
from eval.verification import Verdict, take_all, verify, verify_greedy, verify_same_noise
from eval.verification_block import verify_block

Verification = Coupling | Literal["block", "none"]
VERIFICATIONS = (*get_args(Coupling), "block", "none")


@dataclass(frozen=True)
class DecodeSettings:
    """num_slots: tokens drafted per round (unused without a drafter). max_new_tokens: per request, end of turn
    included.

    batch_size: requests decoded together. sampling: applied to target and drafter alike. seed: of all random numbers.
    verification: of sampled proposals, null for the drafter's own coupling; "block" keeps at least as many drafts as
    "rejection"; "none" keeps every drafted token, greedy ones too, and is LOSSY. ValueError on values below 1 or an
    unknown verification.

    lossy: a rule that keeps drafts the target would not have written (None: lossless). peaks: also record the drafter's
    q_max by slot.
    """

    num_slots: int = 5
    max_new_tokens: int = 128
    batch_size: int = 8
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    verification: Verification | None = None
    lossy: Lossy | None = None
    peaks: bool = False

    def __post_init__(self) -> None:
        for name in ("num_slots", "max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.verification not in (None, *VERIFICATIONS):
            raise ValueError(f"verification must be null, {', '.join(VERIFICATIONS)}, got {self.verification!r}")

    def verified_by(self, drafter: Drafter | None) -> Verification:
        """How this drafter's sampled proposals are verified. Same noise verifies any proposal; ValueError for rejection
        or another order of the CDF where the drafter reads the target's noise."""
        own: Coupling = "rejection" if drafter is None else drafter.coupling
        if self.verification in (None, "none", own) or own == "rejection":
            return self.verification or own
        raise ValueError(f"verification={self.verification} with a drafter whose proposals need {own}")


@dataclass
class Generation:
    """One request's answer, and its rounds.

    tokens: new tokens; the first was written by the target while it read the prompt and belongs to no round.
    emitted: tokens of each round that stand in `tokens`. accepted: how many of those were drafted. proposed: slots that
    were scored: K, or, where the answer ended at an accepted draft (end of turn or max_new_tokens), the slots up to it;
    in a tree, where the walk ended at a leaf, the slots down to that.
    verified: drafts that verification accepted in each round before the answer's end cut it; engines count these.
    lengths: slots that each round had verified where a schedule chose them; empty where all K always were.
    confidences: the drafter's own estimates by slot, one list of K a round; empty when it gives none. peaks: q_max by
    slot in the same shape, when asked for. arrivals: seconds after its group's start at which the host had its first
    token and then each round's.
    stopped: whether an end of turn ended it.
    """

    tokens: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    proposed: list[int] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    confidences: list[list[float]] = field(default_factory=list)
    peaks: list[list[float]] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list, compare=False)
    stopped: bool = False

    def add_round(self, emitted: int, accepted: int, slots: int) -> None:
        """Note a round of `slots` slots that kept `accepted` drafts and emitted so many tokens, fewer where the answer
        ended in it."""
        self.emitted.append(emitted)
        self.accepted.append(min(accepted, emitted))
        self.proposed.append(emitted if emitted <= accepted else slots)
        self.verified.append(accepted)


class Clock:
    """Seconds by stage: prefill, draft, verify, rest. `device` is waited for at the stages' edges when it is a GPU.

    sizes: the most bytes that a group's target cache and drafter state held.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.seconds: dict[str, float] = dict.fromkeys(("prefill", "draft", "verify", "rest"), 0.0)
        self.sizes: dict[str, int] = {}
        self._device = torch.device(device)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time spent inside to a stage."""
        started = self._now()
        try:
            yield
        finally:
            self.seconds[name] += self._now() - started

    def hold(self, name: str, size: int) -> None:
        """Keep the largest size in bytes of a name."""
        self.sizes[name] = max(size, self.sizes.get(name, 0))

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


@dataclass(frozen=True)
class Decoding:
    """What the groups of one `generate` share. drafter: None decodes without. clock, watch: see generate."""

    target: Target
    drafter: Drafter | None
    settings: DecodeSettings
    clock: Clock | None = None
    watch: Callable[[int, int], None] | None = None


@torch.no_grad()
def generate(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[list[int]],
    settings: DecodeSettings,
    clock: Clock | None = None,
    seeds: Sequence[int] | None = None,
    watch: Callable[[int, int], None] | None = None,
    group: "Callable[..., Group] | None" = None,
) -> list[Generation]:
    """Decode every prompt (token ids), in groups of similar length; results in the order of the prompts.

    A request's tokens do not depend on the others in its group, up to the rounding of batched kernels. seeds: one per
    prompt; by default settings.seed + its index. clock: filled when given (a GPU is then waited for at every stage).
    watch: called after each round, outside the clock, with the requests that ended and the tokens that were written.
    group: how requests decode together (eval.steady, eval.tree_decoder; default: the host waits for every round).
    ValueError for an empty prompt, one that leaves no room in the target's positions, or a target without plain KV
    cache.
    """
    check_cacheable(target.model)
    check_lengths(target, prompts, settings, 0 if drafter is None else settings.num_slots)
    seeds = seeds if seeds is not None else [settings.seed + index for index in range(len(prompts))]
    if len(seeds) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts need as many seeds, got {len(seeds)}")
    results = [Generation() for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    training = drafter is not None and drafter.training
    if drafter is not None:
        drafter.eval()
    try:
        for start in range(0, len(order), settings.batch_size):
            chosen = order[start : start + settings.batch_size]
            made = (group or Group)(Decoding(target, drafter, settings, clock, watch))
            made.run([prompts[i] for i in chosen], [seeds[i] for i in chosen], [results[i] for i in chosen])
    finally:
        if drafter is not None:
            drafter.train(training)
    return results


class Group:
    """Requests that are decoded together until the last has ended; those that end earlier leave the target's batch.

    `run` is `open` (read the prompts), `rounds` and `close`; other loops replace `rounds`.
    """

    def __init__(self, shared: Decoding) -> None:
        target, drafter, settings = shared.target, shared.drafter, shared.settings
        self.target, self.drafter, self.settings = target, drafter, settings
        self.num_slots = settings.num_slots if drafter is not None else 0
        self.room = self.num_slots + 1  # columns that a drafter's state needs beside the text
        self.layers = drafter.needs.layers if drafter is not None else ()
        self.clock, self.watch = shared.clock, shared.watch
        self.reported = (0, 0)
        self.ends = set(target.eos_ids)
        self.verification = settings.verified_by(drafter)
        parameter = None if drafter is None else next(drafter.parameters(), None)
        self.like = parameter if parameter is not None else torch.empty(0, device=target.device, dtype=target.dtype)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        if self.clock is None:
            yield
        else:
            with self.clock.stage(name):
                yield

    def run(self, prompts: list[list[int]], seeds: list[int], results: list[Generation]) -> None:
        """Decode prompts into results."""
        self.open(prompts, seeds, results)
        self.rounds()
        self.close()

    def open(
        self, prompts: list[list[int]], seeds: list[int], results: list[Generation], began: float | None = None
    ) -> None:
        """Read the prompts, write the first tokens, show the drafter the prompts' features. began: when the requests
        began to wait, by time.perf_counter; None: now."""
        device = self.target.device
        self.began = time.perf_counter() if began is None else began
        self.results = results
        self.alive = list(range(len(prompts)))  # rows of the drafter's state that still run, in the order of the cache
        self.all_seeds = torch.tensor(seeds, device=device)
        self.seeds = self.all_seeds
        with self.timed("prefill"):
            features, mask = self._prefill(prompts)
            first = self._first_tokens(features.last[:, -1])
            self.anchors = torch.tensor(first, device=device)
        with self.timed("rest"):
            for result, token in zip(results, first, strict=True):
                self._append(result, [token])
                result.arrivals.append(time.perf_counter() - self.began)
        with self.timed("draft"):
            if self.drafter is not None and not all(map(self._ended, results)):
                capacity = max(map(len, prompts)) + self.settings.max_new_tokens + self.room
                self.state = self.drafter.begin(len(prompts), capacity)
                self.drafter.start(self.state, torch.tensor([prompt[0] for prompt in prompts], device=self.like.device))
                self._observe_prompts(prompts, features, mask)
        del features
        with self.timed("rest"):
            self._drop_ended()
        self._report()

    def rounds(self) -> None:
        """All rounds until the last request has ended."""
        while self.alive:
            self._round()
            self._report()

    def close(self) -> None:
        """Note what the state weighed."""
        if self.clock is not None and self.drafter is not None and hasattr(self, "state"):
            self.clock.hold("drafter_state", stored_bytes(self.state))

    def _report(self) -> None:
        """Tell the watcher what came since the last time."""
        if self.watch is not None:
            now = len(self.results) - len(self.alive), sum(len(result.tokens) for result in self.results)
            self.watch(now[0] - self.reported[0], now[1] - self.reported[1])
            self.reported = now

    def _prefill(self, prompts: list[list[int]]) -> tuple[Features, Tensor]:
        """Read the prompts, padded on the left. Features [S, T, ...] and mask [S, T]."""
        longest = max(map(len, prompts))
        rows = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
        real = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        mask = torch.tensor(real, device=self.target.device)
        self.cache = RowCache(self.target.model, mask)
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        tokens = torch.tensor(rows, device=self.target.device)
        return self.target.forward(tokens, self.layers, mask, positions, self.cache.cache), mask

    def _first_tokens(self, last: Tensor) -> list[int]:
        """The target's own token after each prompt. last [S, D]."""
        logits = self.target.logits(last)
        sampling = self.settings.sampling
        if sampling.greedy:
            return logits.argmax(-1).tolist()
        positions = self.cache.lengths.to(logits.device)
        return draw(
            sampling.probs(logits), counter_uniform(self.seeds.to(logits.device), positions, NOISE_STREAM)
        ).tolist()

    def _observe_prompts(self, prompts: list[list[int]], features: Features, mask: Tensor) -> None:
        """Show the drafter the prompts' features, moved from left padding to the front of each row."""
        longest = mask.shape[1]
        first = [result.tokens[0] for result in self.results]
        padded = [
            prompt[1:] + [token] + [0] * (longest - len(prompt)) for prompt, token in zip(prompts, first, strict=True)
        ]
        lengths = self.cache.lengths
        columns = torch.arange(longest, device=mask.device) + (longest - lengths)[:, None]
        columns = columns.clamp_max(longest - 1).to(features.last.device)
        rows = torch.arange(len(prompts), device=columns.device)[:, None]
        moved = Features(features.aux[rows, columns], features.last[rows, columns])
        self._observe(torch.tensor(padded, device=mask.device), moved, lengths)

    def _observe(self, next_ids: Tensor, features: Features, lengths: Tensor) -> None:
        """Hand features to the drafter in its own dtype and place, every row of its state filled."""
        drafter, device = self.drafter, self.like.device
        assert drafter is not None
        aux, last = features.aux.to(self.like), features.last.to(self.like)
        next_ids, lengths = next_ids.to(device), lengths.to(device)
        if len(self.alive) < len(self.all_seeds):
            rows = torch.tensor(self.alive, device=device)
            aux, last, next_ids, lengths = (
                value.new_zeros(len(self.all_seeds), *value.shape[1:]).index_copy_(0, rows, value)
                for value in (aux, last, next_ids, lengths)
            )
        drafter.observe(self.state, next_ids, aux, last, lengths)

    def _round(self) -> None:
        num_slots, device = self.num_slots, self.target.device
        with self.timed("draft"):
            proposal = self._propose()
            block = torch.cat([self.anchors[:, None], proposal.tokens], 1)
        with self.timed("verify"):
            lengths = self.cache.lengths
            positions = lengths[:, None] + torch.arange(num_slots + 1, device=device)
            mask = self.cache.mask(num_slots + 1)
            features = self.target.forward(block, self.layers, mask, positions, self.cache.cache)
            verdict = self._verify(features.last, proposal, lengths)
            # The round's one wait for the device: what was emitted, and how much of it was drafted.
            found = torch.cat([verdict.accepted[:, None], verdict.tokens], 1).tolist()
        with self.timed("rest"):
            arrived = time.perf_counter() - self.began
            if self.clock is not None:
                self.clock.hold("target_cache", self.cache.nbytes)
            accepted = [row[0] for row in found]
            for row, result_row in zip(found, self.alive, strict=True):
                self._record(self.results[result_row], row[1 : row[0] + 2], row[0])
                self.results[result_row].arrivals.append(arrived)
            for name, values in (("confidences", proposal.confidences), ("peaks", proposal.peaks)):
                if values is not None:
                    for given, result_row in zip(values.tolist(), self.alive, strict=True):
                        getattr(self.results[result_row], name).append(given)
            self.cache.keep([count + 1 for count in accepted], num_slots + 1)
            self.anchors = verdict.tokens.gather(1, verdict.accepted[:, None]).squeeze(1).to(device)
            running = any(not self._ended(self.results[row]) for row in self.alive)
        if self.drafter is not None and running:
            with self.timed("draft"):
                self._observe(verdict.tokens.clamp_min(0), features, verdict.accepted + 1)
        with self.timed("rest"):
            self._drop_ended()

    def _propose(self) -> Proposal:
        """A proposal for the running requests: tokens [R, K], none without a drafter."""
        if self.drafter is None:
            return Proposal(self.anchors.new_empty(len(self.anchors), 0))
        seeds = self.all_seeds.to(self.like.device)
        if self.verification == "block":
            seeds = self._round_seeds()
        settings = self.settings
        proposal = draft(self.drafter, self.state, self.num_slots, settings.sampling, seeds, settings.peaks)
        parts = [proposal.tokens, proposal.probs, proposal.confidences, proposal.peaks]
        if len(self.alive) < len(self.all_seeds):
            rows = torch.tensor(self.alive, device=proposal.tokens.device)
            parts = [None if part is None else part[rows] for part in parts]
        tokens, *others = parts
        assert tokens is not None
        return Proposal(tokens.to(self.target.device), *others)

    def _round_seeds(self) -> Tensor:
        """This round's own seeds for every row of the drafter's state (those that ended: any)."""
        anchors = torch.zeros_like(self.all_seeds)
        anchors[torch.tensor(self.alive, device=anchors.device)] = self.cache.lengths.to(anchors.device)
        return round_seeds(self.all_seeds, anchors).to(self.like.device)

    def _verify(self, last: Tensor, proposal: Proposal, positions: Tensor) -> Verdict:
        """last [R, K+1, D], anchors at positions [R]."""
        logits = self.target.logits(last)
        tokens = proposal.tokens.to(logits.device)
        sampling = self.settings.sampling
        if self.verification == "none" and self.drafter is not None:
            return take_all(tokens)
        if self.settings.lossy is not None and self.drafter is not None:
            seeds, positions = self.seeds.to(logits.device), positions.to(logits.device)
            return verify_lossy(logits, tokens, self.settings.lossy, sampling, seeds, positions)
        if sampling.greedy:
            return verify_greedy(logits.argmax(-1), tokens)
        if self.verification != "rejection":
            seeds, positions = self.seeds.to(logits.device), positions.to(logits.device)
            ranked = self.verification == "same_noise_ranked"
            return verify_same_noise(sampling.probs(logits), tokens, seeds, positions, ranked)
        probs = None if proposal.probs is None else proposal.probs.to(logits.device)
        if self.verification == "block":
            own = round_seeds(self.seeds.to(logits.device), positions.to(logits.device))
            return verify_block(sampling.probs(logits), tokens, probs, own, positions.to(logits.device))
        return verify(sampling.probs(logits), tokens, probs, self.seeds.to(logits.device), positions.to(logits.device))

    def _record(self, result: Generation, tokens: list[int], accepted: int, slots: int | None = None) -> None:
        """Add one round, cut at an end of turn and at max_new_tokens. slots: that were verified (None: all K)."""
        result.add_round(self._append(result, tokens), accepted, self.num_slots if slots is None else slots)

    def _append(self, result: Generation, tokens: list[int]) -> int:
        """Append up to the answer's end; returns how many tokens were taken."""
        room = self.settings.max_new_tokens - len(result.tokens)
        end = next((index + 1 for index, token in enumerate(tokens) if token in self.ends), None)
        taken = tokens[: min(room, end or room)]
        result.tokens += taken
        result.stopped = bool(taken) and taken[-1] in self.ends
        return len(taken)

    def _ended(self, result: Generation) -> bool:
        return result.stopped or len(result.tokens) >= self.settings.max_new_tokens

    def _drop_ended(self) -> None:
        keep = [index for index, row in enumerate(self.alive) if not self._ended(self.results[row])]
        if len(keep) == len(self.alive):
            return
        self.alive = [self.alive[index] for index in keep]
        if self.alive:
            self.cache.select(keep)
            index = torch.tensor(keep, device=self.anchors.device)
            self.anchors, self.seeds = self.anchors[index], self.seeds[index]


def check_lengths(target: Target, prompts: Sequence[list[int]], settings: DecodeSettings, num_slots: int) -> None:
    """ValueError for an empty prompt, or one that leaves no room in the target's positions."""
    limit = getattr(target.parts.config, "max_position_embeddings", None)
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {index} is empty: the target needs at least one token")
        needed = len(prompt) + settings.max_new_tokens + num_slots
        if limit is not None and needed > limit:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens; with max_new_tokens {settings.max_new_tokens} and "
                f"{num_slots} slots that is {needed} positions, the target has {limit}"
            )
