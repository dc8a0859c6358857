"""The loop that does not wait: the waiting loop's output token by token, and rounds that no sentinel stops."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from data.target import Target
from drafters.contract import Drafter, Proposal
from drafters.sampling import Sampling
from eval import captured, decoder, steady, streams
from eval.captured import Pinned, read
from eval.decoder import Clock, DecodeSettings, Decoding, Generation, generate
from eval.placed import PlacedCache
from eval.rounds import _Calls, profile_rounds, random_prompts
from eval.scheduler import Load, Static
from eval.sentinel import WaitError, no_waits
from eval.steady import Loop, SteadyGroup, Track, check_one_device, settle
from eval.streams import Streams
from tests import checks
from tests.doubles import END_ID, START_ID, tiny_target

K = 3
PROMPTS = [
    [START_ID, 9, 10, 11, 12, 13, 14, 15, 16, 17],
    [START_ID, 30],
    [START_ID, 21, 22, 23, 24],
    [START_ID, 40, 41, 9, 9, 12],
    [START_ID, 50, 51],
]
HEADS: dict[tuple[str, int], Drafter] = {}
SAMPLED = Sampling(0.9, top_k=24, top_p=0.95)
NAMES = ["eagle3", "dspark", "mtp", "independent"]


@pytest.fixture(scope="module")
def target() -> Target:
    """Ends of turn come now and then: the requests of a group end at different rounds."""
    made = tiny_target("llama")
    made.model.generation_config.eos_token_id = [END_ID, 11, 33]
    return made


def head(name: str, target: Target) -> Drafter:
    """Three slots; kept, as composing a config takes a while."""
    if (name, id(target)) not in HEADS:
        torch.manual_seed(1)
        drafter = checks.build(name, target, num_slots=K)
        drafter.warm_start(target.parts)
        HEADS[name, id(target)] = drafter
    return HEADS[name, id(target)]


def decode(target: Target, drafter: Drafter | None, loop: Loop | None, **changes: Any) -> list[Generation]:
    values = {"num_slots": K, "max_new_tokens": 12, "batch_size": 8, "seed": 3} | changes
    group = None if loop is None else loop.group
    return generate(target, drafter, PROMPTS, DecodeSettings(**values), group=group)


def same(mine: list[Generation], other: list[Generation]) -> None:
    """Equal in every count; floats of the drafter up to rounding."""
    for one, two in zip(mine, other, strict=True):
        assert one.tokens == two.tokens
        for name in ("emitted", "accepted", "proposed", "verified", "lengths", "stopped"):
            assert getattr(one, name) == getattr(two, name), name
        assert len(one.arrivals) == len(one.emitted) + 1
        for name in ("confidences", "peaks"):
            got, want = torch.tensor(getattr(one, name)), torch.tensor(getattr(two, name))
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", NAMES)
def test_output_is_the_waiting_loops(name: str, sampling: Sampling, target: Target) -> None:
    drafter = head(name, target)
    waiting = decode(target, drafter, None, sampling=sampling, peaks=True)
    assert len({len(one.tokens) for one in waiting}) > 1, "requests must end at different rounds"
    same(decode(target, drafter, Loop("steady", checked=True), sampling=sampling, peaks=True), waiting)
    if name in ("eagle3", "dspark"):
        same(decode(target, drafter, Loop("halves", checked=True), sampling=sampling, peaks=True), waiting)


@pytest.mark.parametrize("family", ["gemma2", "mistral"])
def test_windows_and_other_targets(family: str) -> None:
    """Answers grow beyond the window of 8, so a mask by columns instead of positions would show."""
    target = tiny_target(family)
    drafter = head("eagle3", target)
    waiting = decode(target, drafter, None, max_new_tokens=14)
    same(decode(target, drafter, Loop("steady", checked=True), max_new_tokens=14), waiting)
    plain = decode(target, None, Loop("steady", checked=True), max_new_tokens=14)
    same(plain, decode(target, None, None, max_new_tokens=14))
    assert [one.tokens for one in plain] == [one.tokens for one in waiting]


def test_groups_edges_and_the_clock(target: Target) -> None:
    drafter = head("eagle3", target)
    for changes in ({"batch_size": 2}, {"batch_size": 1}, {"max_new_tokens": 1}, {"max_new_tokens": 2}):
        for kind in ("steady", "halves"):
            same(decode(target, drafter, Loop(kind), **changes), decode(target, drafter, None, **changes))
    clock, seen = Clock(), []
    settings = DecodeSettings(K, 8, 8)
    made = generate(
        target, drafter, PROMPTS, settings, clock, watch=lambda *new: seen.append(new), group=Loop("halves").group
    )
    assert all(clock.seconds[stage] > 0 for stage in ("prefill", "draft", "verify", "rest"))
    assert [sum(column) for column in zip(*seen, strict=True)] == [5, sum(len(one.tokens) for one in made)]
    assert clock.sizes["target_cache"] % 640 == 0
    assert clock.sizes["drafter_state"] > 0


def test_every_verification_is_the_waiting_loops(target: Target) -> None:
    drafter = head("eagle3", target)
    sampled = ({"verification": name, "sampling": SAMPLED} for name in ("same_noise", "block"))
    for changes in ({"verification": "none"}, *sampled):
        same(decode(target, drafter, Loop(), **changes), decode(target, drafter, None, **changes))


def test_a_long_prompt_that_ends_at_its_first_token() -> None:
    """Its columns are still in the cache that the others' are taken from."""
    target = tiny_target("llama")
    prompts = [[START_ID, *(9 + (7 * i + n) % 40 for i in range(n - 1))] for n in (60, 50, 49)]
    short = DecodeSettings(num_slots=K, max_new_tokens=4)
    firsts = [one.tokens[0] for one in generate(target, None, prompts, DecodeSettings(max_new_tokens=1))]
    assert firsts[0] not in firsts[1:]
    target.model.generation_config.eos_token_id = [firsts[0]]
    drafter = checks.build("eagle3", target, num_slots=K)
    waiting = generate(target, drafter, prompts, short)
    assert len(waiting[0].tokens) == 1
    for kind in ("steady", "halves"):
        same(generate(target, drafter, prompts, short, group=Loop(kind).group), waiting)


def test_time_that_passes_once_counts_once() -> None:
    """Two halves of a batch whose drafts and verifications overlap, in 10 seconds."""

    class At:
        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

        def since(self, start: "At") -> float:
            return self.seconds - start.seconds

    clock = Clock()
    spans = [("draft", At(0), At(4)), ("verify", At(4), At(10)), ("draft", At(4), At(8)), ("verify", At(0), At(6))]
    settle(clock, spans, 10.0)  # type: ignore[arg-type]
    assert sum(clock.seconds.values()) == pytest.approx(10.0)
    assert clock.seconds["draft"] == pytest.approx(4.0)
    settle(clock, [("draft", At(0), At(1))], 3.0)  # type: ignore[list-item]
    assert clock.seconds["rest"] == pytest.approx(2.0)


class Watched(SteadyGroup):
    """Counts rounds issued, and notes where the tensors of the state lie."""

    rounds_issued = 0
    places: list[list[int]]

    def issue_verify(self) -> None:
        super().issue_verify()
        Watched.rounds_issued += 1
        assert self.pinned is not None
        tensors = [*self.pinned.tensors, *self.track.tensors]
        Watched.places.append([tensor.data_ptr() for tensor in tensors])
        for holder, key, tensor in self.pinned.places:
            now = read(holder, key)
            assert now is tensor or now is None or now.shape != tensor.shape, key


@pytest.mark.parametrize("name", NAMES)
def test_state_stays_in_place_and_results_come_a_round_late(name: str, target: Target) -> None:
    """What CUDA graphs rely on; and the round that was under way when the last request ended is thrown away."""
    drafter, loop = head(name, target), Loop()
    Watched.rounds_issued, Watched.places = 0, []
    settings = DecodeSettings(K, 12, 1)
    (made,) = generate(target, drafter, PROMPTS[:1], settings, group=lambda *given: Watched(loop, *given))
    assert Watched.rounds_issued == len(made.emitted) + 1
    assert all(places == Watched.places[0] for places in Watched.places)


def planted(drafter: Drafter, fault: Callable[[Proposal], Any]) -> Drafter:
    """The drafter, with something else done to each proposal."""
    own = drafter.propose

    def propose(*given: Any) -> Proposal:
        made = own(*given)
        fault(made)
        return made

    drafter.propose = propose  # type: ignore[method-assign]
    return drafter


FAULTS: dict[str, Callable[[Proposal], Any]] = {
    "item": lambda made: made.tokens[0, 0].item(),
    "tolist": lambda made: made.tokens.tolist(),
    "bool": lambda made: bool((made.tokens > 3).any()),
    "nonzero": lambda made: (made.tokens > 3).nonzero(),
    "mask": lambda made: made.tokens[made.tokens > 3],
    "write": lambda made: made.tokens.clone().__setitem__(made.tokens > 3, 1),
    "select": lambda made: made.tokens.masked_select(made.tokens > 3),
    "unique": lambda made: made.tokens.unique(),
    "cpu": lambda made: made.tokens.cpu(),
    "numpy": lambda made: made.tokens.numpy(),
    "repeat": lambda made: made.tokens[0].repeat_interleave(made.tokens[0].clamp(0, 1)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_sentinel_catches_planted_waits(fault: str, target: Target) -> None:
    drafter = planted(copy(head("eagle3", target)), FAULTS[fault])
    with pytest.raises(WaitError, match="inside a round"):
        decode(target, drafter, Loop("steady", checked=True))


def test_the_sentinel_lets_copies_pass_that_do_not_wait() -> None:
    values = torch.arange(6.0).view(2, 3)
    with no_waits():
        values.to("meta", non_blocking=True)
        torch.tensor([1.0])
        values.double()
        values.gather(1, torch.tensor([[0], [1]]))
        values[:, torch.tensor([0, 2])]
        values.repeat_interleave(2, 0)
        torch.where(values > 1, values, 0.0)
    with pytest.raises(WaitError, match="masks|mask"), no_waits():
        values[values > 1] = 0
    with pytest.raises(WaitError, match="from the host"), no_waits():
        values.to("meta")
    with pytest.raises(WaitError, match="from the host"), no_waits():
        torch.tensor([1.0], device="meta")


def test_track_by_hand() -> None:
    ends = torch.tensor([3])
    track = Track(
        anchors=torch.tensor([10, 11, 12, 13]),
        positions=torch.tensor([5, 6, 7, 8]),
        room=torch.tensor([4, 4, 2, 9]),
        alive=torch.tensor([True, True, True, False]),
        seeds=torch.zeros(4, dtype=torch.int64),
        limits=torch.zeros(4, dtype=torch.int64),
    )
    # Goes on; ends at an accepted end of turn (the end in the discarded part of row 0 does not count); has no room for
    # more than its two tokens; had ended before.
    tokens = torch.tensor([[20, 21, 3], [3, 22, -1], [23, 24, -1], [25, -1, -1]])
    read = track.advance(tokens, torch.tensor([1, 1, 1, 0]), ends)
    assert read.tolist() == [2, 0, 0, 0]
    assert track.alive.tolist() == [True, False, False, False]
    assert track.anchors.tolist() == [21, 11, 12, 13]
    assert track.positions.tolist() == [7, 6, 7, 8]
    assert track.room.tolist() == [2, 4, 2, 9]


def test_pinned_state_by_hand() -> None:
    class State:
        def __init__(self) -> None:
            self.a, self.pair = torch.zeros(2), [torch.ones(2), torch.full((2,), 2.0)]
            self.note: Tensor | None = torch.zeros(3)

    state = State()
    pinned = Pinned(state)
    a, (one, two) = state.a, state.pair
    state.a = state.a + 5
    state.pair = [two, one]  # swapped: each must get the other's old value
    state.note = torch.zeros(4)
    pinned.settle()
    assert state.a is a
    assert a.tolist() == [5, 5]
    assert state.pair[0] is two or state.pair[0].tolist() == [2, 2]
    assert state.note.shape == (4,)
    with pytest.raises(ValueError, match="tuple"):
        Pinned({"keys": (torch.zeros(1), torch.zeros(1))})


def test_refusals(target: Target) -> None:
    with pytest.raises(ValueError, match="loop must be one of waiting, steady, halves"):
        Loop("eager")
    with pytest.raises(ValueError, match="a schedule needs"):
        Loop("waiting", lambda: None)  # type: ignore[arg-type, return-value]
    odd = tiny_target("llama")
    odd.model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="attn_implementation eager or sdpa"):
        PlacedCache(odd.model, None, 4)  # type: ignore[arg-type]


def test_a_target_on_several_gpus_needs_the_waiting_loop() -> None:
    def placed(*names: str) -> Any:
        parameters = [SimpleNamespace(device=torch.device(name)) for name in names]
        model = SimpleNamespace(parameters=lambda: iter(parameters))
        return SimpleNamespace(device=parameters[0].device, model=model)

    for kind in ("steady", "halves"):
        with pytest.raises(ValueError, match=f"loop={kind} needs the target on one device, it lies on cuda:0, cuda:1"):
            Loop(kind).group(Decoding(placed("cuda:0", "cuda:1"), None, DecodeSettings()))
    for one in (("cuda:1", "cuda:1"), ("cpu", "meta")):
        check_one_device(placed(*one), "steady")


def test_the_second_half_waits_from_the_start(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a half's prompts takes a second; the second half's begin when the first one's are read."""
    now, read_prompts = [0.0], SteadyGroup._prefill

    def slow(self: SteadyGroup, prompts: list[list[int]]) -> Any:
        now[0] += 1.0
        return read_prompts(self, prompts)

    monkeypatch.setattr(SteadyGroup, "_prefill", slow)
    for module in (decoder, steady):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    made = decode(target, None, Loop("halves"), max_new_tokens=1)
    assert sorted(one.arrivals[0] for one in made) == [1.0, 1.0, 1.0, 2.0, 2.0]


class Graph:
    """A graph that takes 100 s to capture and 1 s to replay, by a clock that nothing else moves."""

    now, replays = 0.0, 0

    def __init__(self, run: Callable[[], Any], changed: list[Tensor], pool: Any) -> None:
        Graph.now += 100.0
        self.run = run

    def __call__(self) -> Any:
        Graph.now += 1.0
        Graph.replays += 1
        return self.run()


class OnGpu(SteadyGroup):
    """As on a GPU, with graphs."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.on_gpu = True

    def issue_verify(self) -> None:
        super().issue_verify()
        flight = self.waits[-1]  # results leave a GPU as copies
        flight.sent = {name: values.clone() for name, values in flight.sent.items()}


@pytest.mark.parametrize("kind", ["steady", "halves"])
def test_capturing_is_no_part_of_a_round(kind: str, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are captured in the middle of decoding: neither the clock nor a reader's wait has that time."""
    Graph.now, Graph.replays = 0.0, 0
    monkeypatch.setattr(captured, "Captured", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (1,))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(steady, "SteadyGroup", OnGpu)
    for module in (captured, decoder, steady, streams):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: Graph.now))
    clock, loop = Clock(), Loop(kind)
    made = generate(target, None, PROMPTS, DecodeSettings(max_new_tokens=12), clock, group=loop.group)
    same(made, decode(target, None, None))
    assert loop.captured >= 100
    assert Graph.now == loop.captured + Graph.replays
    assert clock.seconds["verify"] == Graph.replays
    assert clock.seconds["draft"] == 0, "an empty part was captured"
    assert sum(clock.seconds.values()) == Graph.replays
    assert max(one.arrivals[-1] for one in made) <= Graph.replays


@pytest.mark.parametrize("apart", [False, True])
def test_a_part_is_captured_on_the_stream_it_runs_on(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two graphs of one stream share a workspace of cuBLAS: parts that run at once must not."""

    class Stream:
        def wait_stream(self, other: Any) -> None:
            pass

    default, here, seen = Stream(), Stream(), list[Any]()
    fakes = {
        "Stream": Stream,
        "current_stream": lambda: here if apart else default,
        "default_stream": lambda: default,
        "stream": lambda _: nullcontext(),
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        "graph": lambda _, pool, stream: seen.append((pool, stream)) or nullcontext(),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    changed = torch.zeros(2)
    made = captured.Captured(lambda: changed.add_(1), [changed], (7,))
    assert seen == [((7,), here if apart else None)]
    assert torch.equal(made(), torch.ones(2)), "the warm-up was not taken back"

    def refused(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: refused())
    with pytest.raises(RuntimeError, match="needs loop=waiting"):
        captured.Captured(lambda: None, [], (7,))


class Careless:
    """A graph that writes, as it begins, over all that graphs captured later in its pool left: memory that it needed
    only inside, and they took."""

    pools: dict[Any, list["Careless"]] = {}

    def __init__(self, run: Callable[[], Any], changed: list[Tensor], pool: Any) -> None:
        before = [tensor.clone() for tensor in changed]
        self.run, self.value = run, run()
        self.left = [getattr(holder, key) for holder, key, _ in captured._places(self.value, set())]
        for tensor, old in zip(changed, before, strict=True):
            tensor.copy_(old)
        self.pool = Careless.pools.setdefault(pool, [])
        self.pool.append(self)

    def __call__(self) -> Any:
        for later in self.pool[self.pool.index(self) + 1 :]:
            for tensor in later.left:
                tensor.fill_(-1)
        for tensor, (holder, key, _) in zip(self.left, captured._places(self.run(), set()), strict=True):
            tensor.copy_(read(holder, key))
        return self.value


class Restless(Static):
    """Another depth every round or two."""

    def depth(self, load: Load) -> int:
        self.round = getattr(self, "round", -1) + 1
        return (2, 2, 3, 2, 1, 3, 0)[self.round % 7]


@pytest.mark.parametrize(("name", "kind"), [("eagle3", "steady"), ("dspark", "steady"), ("eagle3", "halves")])
def test_graphs_that_share_a_pool_leave_each_other_what_is_read(
    name: str, kind: str, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pool a group of one size; halves that shared one would read each other's leavings."""
    drafter, handles = head(name, target), count(1)
    how = {"sampling": SAMPLED, "max_new_tokens": 24}
    plain = decode(target, drafter, Loop(kind, lambda: Restless(K)), **how)
    monkeypatch.setattr(captured, "Captured", Careless)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(steady, "SteadyGroup", OnGpu)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (next(handles),))
    monkeypatch.setattr(Careless, "pools", {})
    same(decode(target, drafter, Loop(kind, lambda: Restless(K)), **how), plain)
    assert max(map(len, Careless.pools.values())) >= 6, "draft, verify and commit of two depths"
    assert len(Careless.pools) >= (1 if kind == "steady" else 2)
    if kind == "halves":
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0,))
        with pytest.raises((AssertionError, IndexError, RuntimeError)):
            same(decode(target, drafter, Loop(kind, lambda: Restless(K)), **how), plain)


def test_a_schedules_depth_is_asked_on_the_drafting_stream(target: Target) -> None:
    """There the confidences that it reads were written, and nothing else orders the two."""
    inside, seen = [False], []

    class Asked(Static):
        def depth(self, load: Load) -> int:
            seen.append(inside[0])
            return 1

    class Watched(Streams):
        @contextmanager
        def draft(self) -> Iterator[None]:
            inside[0] = True
            yield
            inside[0] = False

    def group(*given: Any) -> SteadyGroup:
        return SteadyGroup(Loop("steady", lambda: Asked(K)), *given, streams=Watched(target.device))

    generate(target, head("eagle3", target), PROMPTS[:2], DecodeSettings(K, 4), group=group)
    assert seen
    assert all(seen)


def test_reading_the_prompt_is_no_part_of_a_round(target: Target) -> None:
    """5 s of the drafter's before the rounds, 2 s and 3 s in them."""
    clock = Clock()
    clock.seconds["draft"] = 5.0
    calls = _Calls(target, None, clock, Loop())

    def round_() -> None:
        clock.seconds["draft"] += 2.0
        clock.seconds["verify"] += 3.0

    for _ in range(2):
        calls.around(round_)()
    assert calls.staged() == {"draft": 4.0, "target": 6.0}


@pytest.mark.parametrize("kind", ["waiting", "steady", "halves"])
def test_a_profile_of_rounds_adds_up(kind: str, target: Target) -> None:
    drafter = head("eagle3", target)
    prompts = random_prompts(target, 3, 6, 0)
    found = profile_rounds(target, drafter, prompts, DecodeSettings(K, 8, 3), Loop(kind))
    assert found.rounds >= 2
    assert min(found.draft, found.target, found.host) > 0
    assert found.as_dict()["host_share"] == found.host / (found.draft + found.target + found.host)
    assert not any(name in vars(owner) for owner, name in ((target, "forward"), (drafter, "propose")))
