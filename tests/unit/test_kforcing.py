"""Push-forward heads: noise encoder and bins by hand, what a slot sees, exact labels, stages against a slow twin."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from data.target import Target
from drafters.contract import Batch, grid
from drafters.kforcing import KForcing, _rows_of
from drafters.noise import PointwiseNoiseEncoder, bins, pick, pick_ranked, sinusoid
from drafters.sampling import DRAFT_STREAM, NOISE_STREAM, Sampling, counter_uniform
from eval.decoder import DecodeSettings
from eval.evaluate import EvalSettings
from tests import checks
from tests.doubles import tiny_target
from training.progressive import Stage, begin, read_behind

K = 4
FORMS = ("causal", "joint", "conditional")


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama")


def head(target: Target, num_slots: int = K, seed: int = 0, **noise) -> KForcing:
    torch.manual_seed(seed)
    block = {"depth": 2}
    made = KForcing(target.parts, None, num_slots=num_slots, layers=[0, 2, 3], block=block, noise=noise)
    return made.eval()


def random_blocks(drafter: KForcing, batch: Batch, tau: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Anchor tokens, noise and tau for every anchor of a batch."""
    noise = torch.rand(*batch.anchors.shape, drafter.num_slots, dtype=torch.float64)
    tokens = batch.tokens.gather(1, batch.anchors.clamp_min(0))
    return tokens, noise, torch.full(batch.anchors.shape, tau)


def test_sinusoid_by_hand() -> None:
    # Angles of a quarter: pi / 2 at the first frequency, 0.005 pi at the second, a hundredth of it.
    found = sinusoid(torch.tensor([0.25]), 4)
    assert found.dtype == torch.float64
    assert torch.allclose(found[0], torch.tensor([0.0, 0.99987663, 1.0, 0.01570732], dtype=torch.float64), atol=1e-7)


def test_encoder_is_its_formula_and_deaf_at_tau_zero() -> None:
    encoder = PointwiseNoiseEncoder(4, 6)
    noise, tau = torch.tensor([0.25, 0.5]), torch.tensor([1.0, 1.0])
    x = encoder.fuse(torch.cat([sinusoid(noise, 4), sinusoid(tau, 4)], -1).float())
    assert torch.allclose(encoder(noise, tau), encoder.out(x + encoder.mlp(encoder.norm(x))))
    cold = encoder(noise, torch.zeros(2))
    assert torch.equal(cold[0], cold[1])
    with torch.autocast("cpu", dtype=torch.bfloat16):  # close noises stay apart in 16-bit training
        near = encoder.fuse.weight.new_tensor([0.5, 0.5 + 2.0**-12])
        rows = encoder(near, torch.ones(2))
    assert not torch.equal(rows[0], rows[1])


@pytest.mark.parametrize(
    ("probs", "ranked", "wanted"),
    [
        ([0.2, 0.5, 0.3], False, [(0.0, 0.2), (0.2, 0.7), (0.7, 1.0)]),
        ([0.2, 0.5, 0.3], True, [(0.8, 1.0), (0.0, 0.5), (0.5, 0.8)]),
        ([0.4, 0.2, 0.4], True, [(0.0, 0.4), (0.8, 1.0), (0.4, 0.8)]),
        ([0.5, 0.0, 0.5], False, [(0.0, 0.5), (0.5, 0.5), (0.5, 1.0)]),
    ],
)
def test_bins_by_hand(probs: list[float], ranked: bool, wanted: list[tuple[float, float]]) -> None:
    p, tokens = torch.tensor([probs] * 3).double(), torch.arange(3)
    left, right = bins(p, tokens, ranked)
    assert torch.allclose(torch.stack([left, right], 1), torch.tensor(wanted).double(), atol=1e-12)
    inside = right > left
    assert torch.equal(pick(p, (left + right) / 2, ranked)[inside], tokens[inside])


def uniform_distance(noise: Tensor) -> float:
    """Kolmogorov-Smirnov distance to the uniform distribution."""
    ordered = noise.sort().values
    return float((ordered - torch.arange(1, len(noise) + 1) / len(noise)).abs().max())


@pytest.mark.parametrize("top", [1, 7, 512])
def test_ranked_picks_equal_those_of_a_whole_sort(top: int) -> None:
    """Logits of 8 bits: many tokens are equally likely, and those go by id."""
    generator = torch.Generator().manual_seed(0)
    probs = (3 * torch.randn(300, 512, generator=generator)).bfloat16().float().softmax(-1)
    noise = torch.rand(300, generator=generator, dtype=torch.float64)
    noise[:2] = torch.tensor([0.0, 1 - 2**-53])
    assert len(probs[0].unique()) < 480, "some are equal"
    assert torch.equal(pick_ranked(probs, noise, top), pick(probs, noise, ranked=True))


@pytest.mark.parametrize("ranked", [False, True])
def test_noise_of_the_targets_own_tokens_is_uniform(ranked: bool) -> None:
    """Exact labels are unbiased when the data were drawn from the target; noise inversion on other data is not."""
    p, other = torch.tensor([0.5, 0.1, 0.4]), torch.tensor([0.8, 0.05, 0.15])
    count = 20_000
    first, second = torch.rand(2, count, dtype=torch.float64)

    def noises(source: Tensor) -> Tensor:
        left, right = bins(p.expand(count, 3), pick(source.expand(count, 3), first), ranked)
        return left + (right - left) * second

    assert uniform_distance(noises(p)) < 1.95 / count**0.5  # one in a thousand
    assert uniform_distance(noises(other)) > 0.2


MOVES = {
    "causal": [[1, 2, 3], [2, 3], [3]],
    "conditional": [[2, 3], [3], []],
    "joint": [[1, 2, 3], [1, 2, 3], [1, 2, 3]],
}


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_which_slots_see_a_noise(form: str, target: Target) -> None:
    drafter = head(target, 3, form=form)
    batch = checks.train_batch(target, drafter)
    tokens, noise, tau = random_blocks(drafter, batch)
    whole = drafter.blocks(batch, tokens, noise, tau)
    for j in range(3):
        other = noise.clone()
        other[..., j] = torch.rand_like(other[..., j])
        moved = (drafter.blocks(batch, tokens, other, tau) - whole).abs().amax((0, 1, 3)) > 1e-6
        assert [k + 1 for k in range(3) if moved[k]] == MOVES[form][j]
    cold = torch.zeros_like(tau)
    assert torch.equal(
        drafter.blocks(batch, tokens, noise, cold), drafter.blocks(batch, tokens, torch.rand_like(noise), cold)
    )


def drafting(drafter: KForcing, target: Target):
    """A state after nine known tokens of two requests."""
    texts = [checks.random_text(target, 10, seed) for seed in (3, 4)]
    state = drafter.begin(2, 40)
    seen = [checks.sample(target, drafter, text, [0] * 10) for text in texts]
    nexts = torch.tensor([text[1:] for text in texts])
    drafter.observe(
        state,
        nexts,
        torch.stack([s.aux[:9] for s in seen]),
        torch.stack([s.last[:9] for s in seen]),
        torch.tensor([9, 9]),
    )
    return state


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_fewer_slots_are_a_prefix_and_greedy_ignores_seeds(form: str, target: Target) -> None:
    drafter = head(target, form=form)
    state, hot = drafting(drafter, target), Sampling(temperature=1.0)
    seeds = torch.tensor([7, 8])
    whole = drafter.propose(state, K, hot, seeds)
    assert torch.equal(drafter.propose(state, 2, hot, seeds).tokens, whole.tokens[:, :2])
    greedy = drafter.propose(state, K, Sampling(), seeds).tokens
    assert torch.equal(greedy, drafter.propose(state, K, Sampling(), seeds + 9).tokens)
    assert (whole.probs is None) == (form != "conditional")
    assert (whole.confidences is None) == (form == "conditional")
    with pytest.raises(ValueError, match="at most 4"):
        drafter.propose(state, K + 1, hot, seeds)


def test_noise_is_the_samplers_own_or_apart_from_it(target: Target) -> None:
    """Same noise reads what the target draws from; a drafter verified by rejection must not."""
    assert head(target).stream == NOISE_STREAM
    assert head(target, form="joint", order="ranked").coupling == "same_noise_ranked"
    assert head(target, form="conditional").stream == DRAFT_STREAM
    assert head(target, form="conditional", coupling="same_noise").stream == NOISE_STREAM


def test_evaluation_reads_draftings_noise(target: Target) -> None:
    drafter = head(target)
    batch = checks.train_batch(target, drafter)
    batch.seed = 5
    drawn = drafter.draws(batch, grid(batch, K))
    place = batch.positions.gather(1, batch.anchors.clamp_min(0))[..., None] + torch.arange(1, K + 1)
    assert torch.equal(drawn.noise, counter_uniform(torch.full_like(place, 5), place, NOISE_STREAM))


@pytest.mark.parametrize("order", ["id", "ranked"])
@pytest.mark.parametrize("fresh", [0.0, 0.5, 1.0])
def test_labels_are_the_targets_own_picks(order: str, fresh: float, target: Target) -> None:
    """Slow twin: pick by pick, supervised up to and including the first token that is not the data's."""
    drafter = head(target, order=order, fresh=fresh, greedy=0.3, temperatures=[0.5, 1.0]).train()
    batch = checks.train_batch(target, drafter)
    labels, seen, cold = grid(batch, K), 0, 0
    for seed in range(4):
        batch.seed = seed
        drawn = drafter.draws(batch, labels)
        for b, i, k in labels.mask.nonzero().tolist():
            heat = float(drawn.tau[b, i])
            logits = target.logits(batch.last[b, labels.teacher[b, i]])
            picks = pick(Sampling(heat).probs(logits), drawn.noise[b, i], order == "ranked")
            alive = torch.equal(picks[:k], labels.target_ids[b, i, :k])
            assert bool(drawn.mask[b, i, k]) == alive
            if alive:
                assert drawn.labels[b, i, k] == picks[k]
            seen, cold = seen + alive, cold + (alive and heat == 0)
            if fresh == 0 and heat > 0:
                assert picks[k] == labels.target_ids[b, i, k]
    assert seen > cold > 0


def slow_labels(half: KForcing, target: Target, text: list[int], noise: Tensor, tau: Tensor) -> list[int]:
    """Both halves on real text: the second reads features of the first half's tokens from a plain pass."""
    said: list[int] = []
    width = half.num_slots
    for part in (noise[:width], noise[width:]):
        row = text + said
        one = checks.row_batch([[checks.sample(target, half, row, [1] * len(row))]], len(row))
        one.anchors = torch.tensor([[len(row) - 1]])
        said += half.guess(one, torch.tensor([row[-1:]]), part[None, None], tau[None, None])[0, 0].tolist()
    return said


def self_forced(target: Target, form: str, width: int, read) -> list[bool]:
    """Whether each anchor's labels are those of the slow twin."""
    half, drafter = head(target, width, seed=1, form=form), head(target, 2 * width, form=form, greedy=0.3).train()
    drafter.begin_stage(half, read, 1.0, exact=False)
    batch = checks.train_batch(target, drafter)
    labels, found = grid(batch, 2 * width), []
    drawn = drafter.draws(batch, labels)
    for b, i in labels.mask[..., 0].nonzero().tolist():
        end = int(batch.anchors[b, i]) + 1
        text = batch.tokens[b, end - 1 - int(batch.positions[b, end - 1]) : end].tolist()
        found.append(drawn.labels[b, i].tolist() == slow_labels(half, target, text, drawn.noise[b, i], drawn.tau[b, i]))
    assert torch.equal(drawn.mask, labels.mask)
    return found


@pytest.mark.parametrize(("form", "width"), [("causal", 1), ("causal", 3), ("joint", 2)])
def test_self_forced_labels_equal_the_slow_twin(form: str, width: int, target: Target) -> None:
    assert all(self_forced(target, form, width, partial(read_behind, target)))


def test_self_forced_labels_need_their_own_branch(target: Target) -> None:
    """Planted: every anchor reads the branch of its neighbour."""

    def neighbours(batch: Batch, branches: Tensor, layers: tuple[int, ...]) -> Tensor:
        return read_behind(target, batch, branches, layers).roll(1, 1)

    assert not all(self_forced(target, "causal", 3, neighbours))


def test_a_share_of_rows_learns_from_the_half(target: Target) -> None:
    half, drafter = head(target, 1, seed=1), head(target, 2, fresh=0.0, greedy=0.0).train()
    read: list[int] = []

    def reader(batch: Batch, branches: Tensor, layers: tuple[int, ...]) -> Tensor:
        read.append(len(batch.tokens))
        return read_behind(target, batch, branches, layers)

    one = checks.train_batch(target, drafter)
    batches = [replace(one, seed=seed) for seed in range(30)]
    exact = [drafter.draws(batch, grid(batch, 2)) for batch in batches]
    drafter.begin_stage(half, reader, 0.5, exact=False)
    forced = 0
    for batch, plain in zip(batches, exact, strict=True):
        mixed, labels = drafter.draws(batch, grid(batch, 2)), grid(batch, 2)
        for row in range(len(batch.tokens)):
            same = (plain.noise[row] == mixed.noise[row]).all(-1)[batch.anchors[row] >= 0]
            assert same.all() or not same.any(), "a row is of one source"
            forced += not same.any()
            if same.all():
                assert torch.equal(plain.labels[row], mixed.labels[row])
                assert torch.equal(plain.mask[row], mixed.mask[row])
            else:
                assert torch.equal(mixed.mask[row], labels.mask[row])
    rows = 30 * len(one.tokens)
    assert forced == sum(read), "the target reads the forced rows alone"
    assert 0.3 * rows < forced < 0.7 * rows
    # A rank that holds a later row forces it as the rank that holds all does.
    last = replace(_rows_of(one, torch.tensor([len(one.tokens) - 1])), first_row=len(one.tokens) - 1)
    for seed in range(8):
        whole, alone = (drafter.draws(replace(b, seed=seed), grid(b, 2)).noise[-1] for b in (one, last))
        assert torch.equal(whole, alone)


@pytest.mark.parametrize("width", [1, 2])
def test_known_labels_stay_and_the_half_speaks_behind_them(width: int, target: Target) -> None:
    """Noise and the target's labels are untouched; behind them a slot counts where the half said every known one."""
    half, drafter = head(target, width, seed=1), head(target, 2 * width, fresh=0.5, greedy=0.3).train()
    one = checks.train_batch(target, drafter)
    batches = [replace(one, seed=seed) for seed in range(40)]
    exact = [drafter.draws(batch, grid(batch, 2 * width)) for batch in batches]
    drafter.begin_stage(half, partial(read_behind, target), 1.0)
    agreed = refused = 0
    for batch, plain in zip(batches, exact, strict=True):
        labels = grid(batch, 2 * width)
        mixed = drafter.draws(batch, labels)
        assert torch.equal(mixed.noise, plain.noise)
        assert torch.equal(mixed.tau, plain.tau)
        for b, i in labels.mask[..., 0].nonzero().tolist():
            known = plain.mask[b, i]
            assert torch.equal(mixed.labels[b, i][known], plain.labels[b, i][known])
            if bool(known.eq(labels.mask[b, i]).all()):
                assert torch.equal(mixed.mask[b, i], known)
                continue
            end = int(batch.anchors[b, i]) + 1
            text = batch.tokens[b, end - 1 - int(batch.positions[b, end - 1]) : end].tolist()
            said = torch.tensor(slow_labels(half, target, text, plain.noise[b, i], plain.tau[b, i]))
            if torch.equal(said[known], plain.labels[b, i][known]):
                assert torch.equal(mixed.mask[b, i], labels.mask[b, i])
                assert torch.equal(mixed.labels[b, i], said)
                agreed += 1
            else:
                assert torch.equal(mixed.mask[b, i], known)
                refused += 1
    assert agreed > 0
    assert refused > 0


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_branches_equal_reading_each_document_alone(family: str) -> None:
    """Packed documents, a padding anchor, and a target whose layers have a window."""
    target = tiny_target(family)
    batch = checks.train_batch(target, head(target))
    batch.anchors = torch.nn.functional.pad(batch.anchors, (0, 1), value=-1)
    branches = torch.randint(4, 60, (*batch.anchors.shape, 3), generator=torch.Generator().manual_seed(0))
    read = read_behind(target, batch, branches, (0, 2, 3))
    for row, place in (batch.anchors >= 0).nonzero().tolist():
        end = int(batch.anchors[row, place]) + 1
        text = batch.tokens[row, end - 1 - int(batch.positions[row, end - 1]) : end]
        alone = target.forward(torch.cat([text, branches[row, place]])[None], (0, 2, 3)).aux[0, len(text) :]
        assert torch.allclose(read[row, place], alone, atol=2e-4)
    assert not read[batch.anchors < 0].any()
    assert read_behind(target, batch, branches[..., :0], (0, 2, 3)).shape[2] == 0


@torch.no_grad()
@pytest.mark.parametrize("form", ["causal", "joint"])
def test_a_stage_starts_as_its_half(form: str, target: Target) -> None:
    half, drafter = head(target, 2, seed=1, form=form), head(target, 4, form=form)
    drafter.begin_stage(half, partial(read_behind, target), 1.0)
    assert not any(name.startswith("_stage") for name in drafter.state_dict())
    batch = checks.train_batch(target, drafter)
    tokens, noise, tau = random_blocks(drafter, batch)
    mine, theirs = drafter.blocks(batch, tokens, noise, tau), half.blocks(batch, tokens, noise[..., :2], tau)
    assert torch.allclose(mine[:, :, :2], theirs, atol=1e-5)


def test_refusals(target: Target) -> None:
    read = partial(read_behind, target)
    for noise, said in (
        ({"form": "both"}, "noise.form"),
        ({"form": "conditional", "order": "ranked"}, "token-id order"),
        ({"coupling": "rejection"}, "verified by same_noise"),
        ({"temperatures": [0.0]}, "temperatures"),
        ({"fresh": 1.5}, "noise.fresh"),
        ({"width": 3}, "noise.width"),
        ({"tyop": 1}, "tyop"),
    ):
        with pytest.raises(ValueError, match=said):
            head(target, **noise)
    with pytest.raises(ValueError, match="mask_token"):
        KForcing(target.parts, None, num_slots=2, layers=[0, 2, 3], block={"mask_token": 1})
    for half, own, said in (
        (head(target, 3), head(target), "half as many"),
        (head(target, 2, form="conditional"), head(target), "push noise forward"),
        (head(target, 2, order="ranked"), head(target), "order ranked and id|order id and ranked"),
    ):
        with pytest.raises(ValueError, match=said):
            own.begin_stage(half, read, 0.5)
    with pytest.raises(ValueError, match="share"):
        head(target).begin_stage(head(target, 2), read, 0.0)


def test_a_recurrent_target_reads_no_branches(target: Target, tmp_path: Path) -> None:
    """At four slots the second half stands behind a branch; at two the target reads none."""
    recurrent = tiny_target("qwen3_next")
    for width, said in ((4, "drafter.stage of 4 slots .* linear_attention"), (2, "nowhere")):
        with pytest.raises(ValueError, match=said):
            begin(head(target, width), Stage(str(tmp_path / "nowhere")), recurrent)


def test_a_wrong_verification_is_refused(target: Target) -> None:
    with pytest.raises(ValueError, match="proposals need same_noise"):
        DecodeSettings(verification="rejection").verified_by(head(target))
    with pytest.raises(ValueError, match="verification must be"):
        DecodeSettings(verification="gumbel")
    with pytest.raises(ValueError, match="verification must be null, rejection, same_noise"):
        EvalSettings(verification="none")  # lossy: eval.pushforward's own
    assert EvalSettings().decoding(head(target)).verification == "same_noise"
    assert DecodeSettings(verification="same_noise").verified_by(head(target, form="conditional")) == "same_noise"
