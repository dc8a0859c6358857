"""The decoding loop: the target's own tokens, honest counts, true features, caches that shrink."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from data.target import Target
from drafters.contract import Drafter, Needs, Proposal, SlotBatch
from drafters.sampling import DRAFT_STREAM, Sampling, counter_uniform, draw
from eval import verification
from eval.cache import BufferedLayer, RowCache, check_cacheable
from eval.decoder import Clock, DecodeSettings, Generation, generate
from tests import checks
from tests.doubles import START_ID, endless_target, tiny_target

K = 3
PROMPTS = [[START_ID, 9, 10, 11, 12, 13, 14, 15, 16, 17], [START_ID, 30], [START_ID, 21, 22, 23, 24]]


@dataclass
class Seen:
    """Everything a request's drafter was shown."""

    tokens: list[list[int]]
    aux: list[list[Tensor]] = field(default_factory=list)
    last: list[list[Tensor]] = field(default_factory=list)


class Toy(Drafter):
    """Runs the target itself on all it has seen. wrong(position): whether the token drafted for a position is spoilt.

    All prompts begin with START_ID, the one token that `observe` does not show. Sampled drafts come from the target's
    logits plus fixed noise.
    """

    def __init__(self, target: Target, wrong: Any, noise: float = 0.0) -> None:
        super().__init__()
        self.target, self.wrong = target, wrong
        self.num_slots, self.needs = K, Needs((0, 2), last_hidden=True)
        size = target.identity["vocab_size"]
        self.noise = noise * torch.randn(size, generator=torch.Generator().manual_seed(5))
        self.states: list[Seen] = []

    def settings(self) -> dict[str, Any]:
        return {}

    def slots(self, batch: Any) -> SlotBatch:
        raise NotImplementedError

    def logits(self, hidden: Tensor, prev_ids: Tensor) -> Tensor:
        raise NotImplementedError

    def begin(self, requests: int, capacity: int) -> Seen:
        state = Seen(
            [[START_ID] for _ in range(requests)], [[] for _ in range(requests)], [[] for _ in range(requests)]
        )
        self.states.append(state)
        return state

    def observe(self, state: Seen, next_ids: Tensor, aux: Tensor, last: Tensor, lengths: Tensor) -> None:
        for r, length in enumerate(lengths.tolist()):
            state.tokens[r] += next_ids[r, :length].tolist()
            state.aux[r].append(aux[r, :length])
            state.last[r].append(last[r, :length])

    def propose(self, state: Seen, num_slots: int, sampling: Sampling, seeds: Tensor) -> Proposal:
        texts = [list(text) for text in state.tokens]
        drafts, probs = [], []
        for _ in range(num_slots):
            longest = max(map(len, texts))
            mask = torch.tensor([[1] * len(t) + [0] * (longest - len(t)) for t in texts])
            rows = torch.tensor([t + [0] * (longest - len(t)) for t in texts])
            ends = mask.sum(1) - 1
            last = self.target.forward(rows, (), mask).last[torch.arange(len(texts)), ends]
            q = sampling.probs(self.target.logits(last) + self.noise)
            positions = ends + 1
            token = q.argmax(-1) if sampling.greedy else draw(q, counter_uniform(seeds, positions, DRAFT_STREAM))
            spoilt = torch.tensor([bool(self.wrong(p)) for p in positions.tolist()])
            token = torch.where(spoilt, (token + 1) % q.shape[-1], token)
            drafts.append(token)
            probs.append(q)
            for text, one in zip(texts, token.tolist(), strict=True):
                text.append(one)
        return Proposal(torch.stack(drafts, 1), None if sampling.greedy else torch.stack(probs, 1))


def always(target: Target) -> Toy:
    return Toy(target, lambda position: False)


def never(target: Target) -> Toy:
    return Toy(target, lambda position: True)


def sometimes(target: Target) -> Toy:
    return Toy(target, lambda position: position % 3 == 0)


def decode(
    target: Target, drafter: Drafter | None, prompts: list[list[int]] = PROMPTS, **changes: Any
) -> list[Generation]:
    settings = {"num_slots": K, "max_new_tokens": 14, "batch_size": 8} | changes
    return generate(target, drafter, prompts, DecodeSettings(**settings))


@pytest.fixture(scope="module")
def llama() -> Target:
    return endless_target()


@pytest.mark.parametrize(
    ("family", "attention"), [("llama", "eager"), ("llama", "sdpa"), ("mistral", "eager"), ("gemma2", "eager")]
)
def test_greedy_output_is_the_targets_own(family: str, attention: str) -> None:
    target = tiny_target(family, attn_implementation=attention)
    plain = decode(target, None)
    for prompt, one in zip(PROMPTS, plain, strict=True):
        # An independent witness: transformers' own greedy decoding.
        own = target.model.generate(torch.tensor([prompt]), max_new_tokens=14, do_sample=False)[0, len(prompt) :]
        assert one.tokens == own.tolist()
        assert one.emitted == [1] * (len(one.tokens) - 1)
    for make in (always, never, sometimes):
        assert [g.tokens for g in decode(target, make(target))] == [g.tokens for g in plain]
        assert [g.tokens for g in decode(target, make(target), batch_size=1)] == [g.tokens for g in plain]


def test_counts_of_always_and_never(llama: Target) -> None:
    # 14 new tokens: 1 from the prompt, then rounds of K + 1 = 4, 4, 4, and a last one with room for 1.
    for one in decode(llama, always(llama)):
        assert len(one.tokens) == 14, "the toy target must not stop by itself here"
        assert one.emitted == [4, 4, 4, 1]
        assert one.accepted == [3, 3, 3, 1]
        assert one.proposed == [3, 3, 3, 1]
        assert one.verified == [3, 3, 3, 3]
    for one in decode(llama, never(llama)):
        assert one.emitted == [1] * 13
        assert one.accepted == one.verified == [0] * 13
        assert one.proposed == [3] * 13


def test_counts_of_sometimes_follow_the_positions(llama: Target) -> None:
    # Prompt of 10 tokens: the first answer token stands at 10, a draft for 12, 15, 18 ... is wrong.
    # Anchor 10: draft 11 accepted, 12 wrong -> emits 11, 12. Anchor 12: 13, 14, 15 wrong -> 3. And so on.
    one = decode(llama, sometimes(llama))[0]
    assert one.emitted == [2, 3, 3, 3, 2]
    assert one.accepted == [1, 2, 2, 2, 2]
    assert one.proposed == [3, 3, 3, 3, 2]


def test_end_of_turn_inside_accepted_tokens() -> None:
    target = tiny_target("llama")
    prompt = PROMPTS[0]
    answer = decode(target, None, [prompt])[0].tokens
    stop = next(i for i in range(3, 14) if answer[i] not in answer[:i])
    target.model.generation_config.eos_token_id = answer[stop]
    cut = decode(target, always(target), [prompt])[0]
    assert cut.tokens == answer[: stop + 1]
    assert cut.stopped
    assert sum(cut.emitted) == stop
    # Tokens 1..stop belong to rounds of 4; the last emits what is left of it and no bonus, unless it fits exactly.
    last = (stop - 1) % 4 + 1
    assert cut.emitted[-1] == last
    assert (cut.accepted[-1], cut.proposed[-1]) == (min(last, 3), min(last, 3))
    assert cut.tokens == decode(target, None, [prompt])[0].tokens
    mixed = decode(target, always(target), PROMPTS)
    assert mixed[0].tokens == cut.tokens, "a request that ends early leaves; the others go on"
    assert [g.tokens for g in mixed] == [g.tokens for g in decode(target, None, PROMPTS)]


def test_drafter_sees_the_features_of_the_text(llama: Target) -> None:
    drafter = sometimes(llama)
    checks.saw_the_text(llama, drafter, PROMPTS, decode(llama, drafter), K)


def test_sampled_tokens_are_equal_alone_and_in_a_batch(llama: Target) -> None:
    sampling = Sampling(temperature=0.8, top_k=20, top_p=0.95)
    settings = DecodeSettings(K, 10, 3, sampling)
    together = generate(llama, Toy(llama, lambda _: False, 1.0), PROMPTS, settings, seeds=[5, 6, 7])
    for index, prompt in enumerate(PROMPTS):
        alone = generate(llama, Toy(llama, lambda _: False, 1.0), [prompt], settings, seeds=[5 + index])[0]
        assert alone == together[index]
    assert any(0 < sum(one.accepted) < sum(one.proposed) for one in together)


def chi_square_p(target: Target, drafter: Drafter | None, rows: int = 1200) -> float:
    """p-value of three sampled tokens (top-k 3) after one prompt against the target's exact probabilities."""
    sampling, prompt = Sampling(temperature=1.5, top_k=3), PROMPTS[2]
    got: dict[tuple[int, ...], int] = {}
    for one in generate(target, drafter, [prompt] * rows, DecodeSettings(2, 3, rows, sampling)):
        got[tuple(one.tokens)] = got.get(tuple(one.tokens), 0) + 1
    exact: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        grown: dict[tuple[int, ...], float] = {}
        for prefix, mass in exact.items():
            if prefix and prefix[-1] in target.eos_ids:
                grown[prefix] = mass
                continue
            last = target.forward(torch.tensor([prompt + list(prefix)]), ()).last[:, -1]
            p = sampling.probs(target.logits(last))[0].double()
            grown |= {(*prefix, token): mass * float(p[token]) for token in p.nonzero().flatten().tolist()}
        exact = grown
    assert set(got) <= set(exact)
    assert len(exact) >= 15
    want = torch.tensor([mass * rows for mass in exact.values()]).double()
    seen = torch.tensor([got.get(key, 0) for key in exact]).double()
    small = want < 5
    want = torch.cat([want[~small], want[small].sum()[None]])
    seen = torch.cat([seen[~small], seen[small].sum()[None]])
    want, seen = want[want > 0], seen[want > 0]
    statistic = ((seen - want) ** 2 / want).sum()
    return float(torch.special.gammaincc(torch.tensor((len(want) - 1) / 2).double(), statistic / 2))


def test_sampling_is_lossless_and_a_planted_fault_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama")
    assert chi_square_p(target, None) > 1e-3
    assert chi_square_p(target, Toy(target, lambda _: False, 1.5)) > 1e-3
    monkeypatch.setattr(verification, "residual", lambda p, q, drafted: p)
    assert chi_square_p(target, Toy(target, lambda _: False, 1.5)) < 1e-4


def test_training_mode_and_clock(llama: Target) -> None:
    drafter, clock = always(llama), Clock()
    drafter.train()
    generate(llama, drafter, PROMPTS, DecodeSettings(K, 6, 2), clock)
    assert drafter.training
    assert all(clock.seconds[stage] > 0 for stage in ("prefill", "draft", "verify", "rest"))


def test_refusals(llama: Target) -> None:
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        decode(llama, None, [[START_ID], []])
    with pytest.raises(ValueError, match="the target has 512"):
        decode(llama, None, max_new_tokens=505)
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1"):
        DecodeSettings(max_new_tokens=0)
    config = SimpleNamespace(layer_types=["linear_attention", "full_attention"])
    hybrid: Any = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda decoder: config))
    with pytest.raises(ValueError, match="linear_attention"):
        check_cacheable(hybrid)


def test_drafting_for_a_recurrent_state_is_refused_before_the_first_prefill(
    llama: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target("qwen3_next")
    monkeypatch.setattr(target, "forward", None)
    wanted = (
        "Qwen3NextForCausalLM has layers of full_attention, linear_attention: what linear_attention keeps cannot be "
        "taken back .*takes layers of full_attention, sliding_attention, chunked_attention; .*"
        "headstart eval engine=vllm"
    )
    with pytest.raises(ValueError, match=wanted):
        decode(target, always(llama))


def filled(target: Target, sliding: bool) -> RowCache:
    """Two rows, the second with one column of padding, then three new columns; keys hold 10 * row + column."""
    cache = RowCache(target.model, torch.tensor([[1, 1], [0, 1]]))
    cache._holes_allowed = 0.0 if sliding else 10.0
    keys = torch.tensor([[0.0, 1, 2, 3, 4], [10, 11, 12, 13, 14]])[:, None, :, None]
    cache.cache.update(keys[:, :, :2], keys[:, :, :2], 0)
    cache.cache.update(keys[:, :, 2:], keys[:, :, 2:], 0)
    return cache


def test_cache_by_hand(llama: Target) -> None:
    cache = filled(llama, sliding=False)
    cache.keep([1, 2], 3)
    layer = cache.layers[0]
    assert isinstance(layer, BufferedLayer)
    assert cache.visible.tolist() == [[1, 1, 1, 0], [0, 1, 1, 1]]
    assert layer.keys[:, 0, :, 0].tolist() == [[0, 1, 2, 3], [10, 11, 12, 13]]
    assert cache.host_lengths == cache.lengths.tolist() == [3, 3]
    assert cache.mask(2).shape == (2, 6)

    cache = filled(llama, sliding=True)
    cache.keep([1, 2], 3)
    assert cache.visible.tolist() == [[1, 1, 1], [1, 1, 1]]
    assert cache.layers[0].keys[:, 0, :, 0].tolist() == [[0, 1, 2], [11, 12, 13]]
    cache.select([1])
    assert cache.layers[0].values[:, 0, :, 0].tolist() == [[11, 12, 13]]
    assert cache.host_lengths == [3]
