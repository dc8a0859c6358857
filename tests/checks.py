"""The generic checks of a drafter (DESIGN, the ten checks): each a function that raises AssertionError on a fault.

tests/smoke/test_every_drafter.py runs them on every drafter by glob and, with planted faults, proves that they can
fail.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor

from checkpoints.run import settings
from data.collate import Collate
from data.conversations import Conversation
from data.features import Sample, observe
from data.target import Target
from drafters.contract import Batch, Drafted, Drafter
from drafters.sampling import Sampling
from drafters.vocabulary import DraftVocabulary
from eval.decoder import DecodeSettings, Generation, generate
from eval.metrics import acceptance
from training.objectives import Objective, slot_terms

ROOT = Path(__file__).resolve().parent.parent
DRAFTERS = sorted(path.stem for path in (ROOT / "conf" / "drafter").glob("*.yaml"))


def compose_config(name: str, *overrides: str) -> Any:
    """A composed primary config."""
    GlobalHydra.instance().clear()
    with initialize_config_module("conf", version_base="1.3"):
        return compose(name, overrides=list(overrides))


def build(
    name: str, target: Target, num_slots: int = 4, vocabulary: DraftVocabulary | None = None, **model: Any
) -> Drafter:
    """The drafter of conf/drafter/NAME.yaml on a tiny target, reading three layers where it reads any."""
    config = compose_config("train", f"drafter={name}", "prepared=nowhere")
    plain = cast(dict[str, Any], OmegaConf.to_container(config.drafter.model))
    reads = {"layers": [0, 2, 3]} if "layers" in plain else {}
    plain |= {"num_slots": num_slots} | reads
    if "train_steps" in plain:  # check 5 scores all slots, so all are trained
        plain["train_steps"] = num_slots
    if isinstance(plain.get("head"), dict):  # heads as small as the tiny target
        plain["head"] |= {name: min(plain["head"][name], 16) for name in ("state", "rank") if name in plain["head"]}
    plain |= model
    vocabulary = vocabulary or DraftVocabulary.full(target.identity["vocab_size"])
    return instantiate(plain, _partial_=True, _convert_="all")(target=target.parts, vocabulary=vocabulary).eval()


def own_objective(name: str) -> Objective:
    """The objective of conf/drafter/NAME.yaml."""
    config = compose_config("train", f"drafter={name}", "prepared=nowhere")
    return settings(Objective, config.objective, "objective")


def sample(target: Target, drafter: Drafter, tokens: list[int], turns: list[int], name: str = "x") -> Sample:
    """One conversation with the target's own features in float32."""
    made = observe(target, [Conversation(name, "test", tokens, turns)], drafter.needs.layers, dtype="float32")
    return next(iter(made))[1]


def row_batch(rows: list[list[Sample]], row_tokens: int) -> Batch:
    """Packed rows of samples."""
    return Collate(row_tokens, anchor_multiple=1)(rows)


def random_text(target: Target, length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, target.identity["vocab_size"], (length,), generator=generator).tolist()


@torch.no_grad()
def awake(drafter: Drafter) -> Drafter:
    """The drafter with noise in every tensor that is zero: a correction that starts at zero (a Markov head, a GRU, a
    path selector) would hide whatever is wrong with what it reads."""
    generator = torch.Generator().manual_seed(9)
    for parameter in drafter.parameters():
        if not parameter.any():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return drafter


def frontier(drafter: Drafter, batch: Batch, anchors: int = 3) -> None:
    """Check 1: noise in every feature at or after the anchor and every token after a slot's frontier changes
    nothing."""
    whole = drafter.slots(batch).hidden
    columns = torch.arange(batch.tokens.shape[1])
    generator = torch.Generator().manual_seed(1)
    for index in range(min(anchors, batch.anchors.shape[1])):
        anchor = batch.anchors[:, index : index + 1]
        for k in range(1, drafter.num_slots + 1):
            hidden_tokens, hidden_features = columns > anchor + k - 1, columns >= anchor
            noisy = replace(
                batch,
                tokens=torch.where(hidden_tokens, torch.randint_like(batch.tokens, 4, 60), batch.tokens),
                aux=torch.where(hidden_features[..., None, None], _noise(batch.aux, generator), batch.aux),
                last=torch.where(hidden_features[..., None], _noise(batch.last, generator), batch.last),
            )
            moved = drafter.slots(noisy).hidden[:, index, k - 1]
            real = batch.anchors[:, index] >= 0
            assert torch.allclose(moved[real], whole[real, index, k - 1], atol=1e-5), f"slot {k} sees past its frontier"


def _noise(values: Tensor, generator: torch.Generator) -> Tensor:
    return 5 * torch.randn(values.shape, generator=generator)


@torch.no_grad()
def draft_equals_train(drafter: Drafter, target: Target, prompt: int = 9) -> None:
    """Check 2: what was drafted, read as data, gives slot by slot the distributions that it was drawn from."""
    text = random_text(target, prompt + 1, seed=3)
    known = sample(target, awake(drafter), text, [0] * prompt + [1])
    state = drafter.begin(1, 64)
    drafter.start(state, torch.tensor(text[:1]))
    # Two calls, so that a state that does not continue where it stopped is seen.
    for start, stop in ((0, 4), (4, prompt)):
        count = torch.tensor([stop - start])
        drafter.observe(
            state,
            torch.tensor([text[start + 1 : stop + 1]]),
            known.aux[None, start:stop],
            known.last[None, start:stop],
            count,
        )
    proposal = drafter.propose(state, drafter.num_slots, Sampling(temperature=1.0), torch.tensor([5]))
    again = drafter.propose(state, drafter.num_slots, Sampling(temperature=1.0), torch.tensor([5]))
    assert torch.equal(proposal.tokens, again.tokens), "propose changed its state"
    drafted = proposal.tokens[0].tolist()
    full = sample(target, drafter, text + drafted, [0] * prompt + [1] * (1 + len(drafted)))
    batch = row_batch([[full]], len(text) + len(drafted))
    batch.anchors = torch.tensor([[prompt]])
    batch.seed = 5  # as drafted: a drafter that reads noise reads the same
    slots = drafter.slots(batch)
    logits = drafter.logits(slots.hidden[0, 0], slots.prev_ids[0, 0]).float()
    wide = torch.zeros(len(logits), drafter.vocabulary.target_size)
    wide[:, drafter.vocabulary.ids] = logits.softmax(-1)
    assert slots.target_ids[0, 0].tolist() == drafted, "the slots' labels are not the tokens after the anchor"
    given = proposal.probs
    if drafter.coupling != "rejection" and given is None:  # not drawn: the likeliest token, its probability beside it
        assert drafted == wide.argmax(-1).tolist(), "drafting and training differ in their tokens"
        wide, given = wide.amax(-1), proposal.confidences
    assert given is not None
    error = (wide - given[0]).abs().max()
    assert error < 1e-4, f"drafting and training differ by {error:.2e}"


@torch.no_grad()
def own_tokens_are_read(drafter: Drafter, target: Target, prompt: int = 9) -> None:
    """Drafts given as the batch's own tokens, over a text that goes on otherwise, give the distributions that they were
    drawn from: what training on drafts relies on."""
    text = random_text(target, prompt + 1 + drafter.num_slots, seed=3)
    known = sample(target, awake(drafter), text, [0] * prompt + [1] * (1 + drafter.num_slots))
    batch = row_batch([[known]], len(text))
    state, count = drafter.begin(1, 64), torch.tensor([prompt])
    drafter.start(state, batch.tokens[:, 0])
    drafter.observe(state, batch.tokens[:, 1 : prompt + 1], known.aux[None, :prompt], known.last[None, :prompt], count)
    proposal = drafter.propose(state, drafter.num_slots, Sampling(temperature=1.0), torch.tensor([5]))
    assert proposal.tokens[0].tolist() != text[prompt + 1 :], "the drafts are the text: this shows nothing"
    tokens, whole = proposal.tokens[:, None], torch.ones(1, 1, drafter.num_slots, dtype=torch.bool)
    teacher = (prompt + torch.arange(drafter.num_slots))[None, None]
    empty = batch.last[:, :0]
    drafted = Drafted(tokens, tokens, whole, whole.float(), teacher, empty, batch.top1[:, :0], batch.lse[:, :0])
    slots = drafter.slots(replace(batch, anchors=torch.tensor([[prompt]]), drafted=drafted))
    wide = torch.zeros(drafter.num_slots, drafter.vocabulary.target_size)
    logits = drafter.logits(slots.hidden[0, 0], slots.prev_ids[0, 0]).float()
    wide[:, drafter.vocabulary.ids] = logits.softmax(-1)
    assert proposal.probs is not None
    error = (wide - proposal.probs[0]).abs().max()
    assert error < 1e-4, f"slots over drafted tokens and drafting differ by {error:.2e}"


def packed_equals_alone(drafter: Drafter, target: Target) -> None:
    """Check 3: a document's slots are the same among others in a row and by itself."""
    texts = [random_text(target, n, seed) for seed, n in enumerate((11, 8, 13))]
    samples = [sample(target, drafter, t, [0] * 4 + [1] * (len(t) - 4), str(i)) for i, t in enumerate(texts)]
    packed = row_batch([samples], sum(map(len, texts)))
    together = drafter.slots(packed)
    start = 0
    for one in samples:
        alone_batch = row_batch([[one]], len(one.tokens))
        alone = drafter.slots(alone_batch)
        inside = (packed.anchors[0] >= start) & (packed.anchors[0] < start + len(one.tokens))
        assert torch.equal(packed.anchors[0][inside] - start, alone_batch.anchors[0]), "other anchors when packed"
        assert torch.equal(together.mask[0][inside], alone.mask[0]), "other supervised slots when packed"
        seen = alone.mask[0]
        assert torch.allclose(together.hidden[0][inside][seen], alone.hidden[0][seen], atol=1e-4), "documents leak"
        start += len(one.tokens)


def greedy_text(target: Target, prompt: list[int], count: int) -> list[int]:
    """The target's own greedy answer."""
    return generate(target, None, [prompt], DecodeSettings(max_new_tokens=count))[0].tokens


def fit(drafter: Drafter, target: Target, batch: Batch, objective: Objective, steps: int, lr: float = 3e-3) -> float:
    """Train on one batch; the last loss per slot."""
    drafter.train()
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=lr)
    value = 0.0
    for step in range(steps):
        batch.seed = step
        terms = slot_terms(drafter, drafter.slots(batch), batch, target.parts, objective)
        optimizer.zero_grad()
        (terms.loss / terms.denominator).backward()
        optimizer.step()
        value = float(terms.loss.detach() / terms.denominator)
    drafter.eval()
    return value


def overfit_one(drafter: Drafter, target: Target, objective: Objective, steps: int = 150) -> float:
    """Check 5: one sample trained to the end reaches tau > 0.9 (K + 1) in the harness. Returns tau."""
    rounds, width = 4, drafter.num_slots + 1
    for seed in range(7, 27):  # the first prompt that the tiny target answers at length
        prompt = random_text(target, 6, seed)
        answer = greedy_text(target, prompt, rounds * width + 1)
        if len(answer) == rounds * width + 1:
            break
    assert len(answer) == rounds * width + 1, "the tiny target ended all of its answers"
    one = sample(target, drafter, prompt + answer, [0] * len(prompt) + [1] * len(answer))
    fit(drafter, target, row_batch([[one]], len(one.tokens)), objective, steps)
    made = generate(target, drafter, [prompt], DecodeSettings(num_slots=drafter.num_slots, max_new_tokens=len(answer)))
    tau = acceptance(made, drafter.num_slots).tau
    assert tau > 0.9 * width, f"overfitting one sample gives tau {tau:.2f}, more than {0.9 * width:.2f} expected"
    return tau


def lossless(drafter: Drafter, target: Target) -> None:
    """Check 6, greedy: with the drafter and without, token by token, for prompts of different lengths in one batch."""
    prompts = [random_text(target, n, seed) for seed, n in enumerate((5, 9, 3))]
    settings = DecodeSettings(num_slots=drafter.num_slots, max_new_tokens=20, batch_size=3)
    plain, drafted = generate(target, None, prompts, settings), generate(target, drafter, prompts, settings)
    assert [one.tokens for one in plain] == [one.tokens for one in drafted], "greedy output changed"


def train_batch(target: Target, drafter: Drafter) -> Batch:
    """Two packed rows of random conversations, one of them with two answers."""
    texts = [random_text(target, n, 20 + n) for n in (12, 9, 15)]
    turns = [[0] * 4 + [1] * 8, [0] * 3 + [1] * 6, [0] * 3 + [1] * 4 + [0] * 2 + [2] * 6]
    samples = [sample(target, drafter, t, u, str(i)) for i, (t, u) in enumerate(zip(texts, turns, strict=True))]
    return row_batch([samples[:2], samples[2:]], 24)


def saw_the_text(
    target: Target, drafter: Any, prompts: list[list[int]], answers: list[Generation], num_slots: int
) -> None:
    """A drafter that noted what it observed of one group got each text's tokens and the target's features of them."""
    (state,) = drafter.states
    for row, index in enumerate(sorted(range(len(prompts)), key=lambda i: len(prompts[i]))):
        text, seen = prompts[index] + answers[index].tokens, state.tokens[row]
        assert seen == text[: len(seen)]
        assert len(seen) > len(prompts[index]) + num_slots
        truth = target.forward(torch.tensor([seen[:-1]]), drafter.needs.layers)
        torch.testing.assert_close(torch.cat(state.aux[row]), truth.aux[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(torch.cat(state.last[row]), truth.last[0], rtol=1e-4, atol=1e-4)
