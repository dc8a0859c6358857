"""MTP: every step by hand, masks written out, transformers' own module, target families, planted faults."""

import pytest
import torch
from torch import Tensor
from transformers.modeling_layers import MtpLayer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from drafters.contract import Batch, TargetParts
from drafters.mtp import Mtp
from drafters.mtp_block import ChainKeys, through
from drafters.mtp_index import Indexer, best, index_loss
from drafters.sampling import Sampling
from tests import checks
from tests.doubles import tiny_model, tiny_target
from training.objectives import Objective, slot_terms


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


def head(target, kind: type[Mtp] = Mtp, **model) -> Mtp:
    """A drafter whose norms are not all ones, so that a norm in the wrong place is seen."""
    torch.manual_seed(0)
    made = kind(target.parts, None, **({"num_slots": 3} | model)).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "eh_proj" in name:
                parameter.normal_(0, 0.2)
    return made


class ForgetsItsState(Mtp):
    """Every slot reads the target's state again instead of the slot before: training and drafting alike."""

    def slots(self, batch: Batch):
        self.kept = self.read(batch.aux, batch.last).gather(
            1, (batch.anchors - 1).clamp_min(0)[..., None].expand(-1, -1, self.size)
        )
        return super().slots(batch)

    def observe(self, state, next_ids, aux, last, lengths):
        super().observe(state, next_ids, aux, last, lengths)
        self.kept = self.read(aux, last)[:, -1:]

    def recycle(self, output: Tensor) -> Tensor:
        return self.kept if self.kept.shape == output.shape else super().recycle(output)


class ForgetsWhenDrafting(ForgetsItsState):
    """The same, in drafting only."""

    def slots(self, batch: Batch):
        return Mtp.slots(self, batch)

    drafting = False

    def propose(self, state, num_slots, sampling, seeds):
        self.drafting = True
        made = super().propose(state, num_slots, sampling, seeds)
        self.drafting = False
        return made

    def recycle(self, output: Tensor) -> Tensor:
        return self.kept if self.drafting else Mtp.recycle(self, output)


class RecyclesTheOtherState(Mtp):
    """Reads its output before its norm where it says after."""

    def recycle(self, output: Tensor) -> Tensor:
        return output


class ReadsBeforeTheNorm(Mtp):
    """Reads the target's state before the final norm where it says after it: one learned vector apart."""

    def read(self, aux: Tensor, last: Tensor) -> Tensor:
        return last / self.target_norm

    target_norm: Tensor


class ReadsBeforeTheNormWhenDrafting(ReadsBeforeTheNorm):
    def slots(self, batch: Batch):
        with_norm, self.target_norm = self.target_norm, torch.ones(self.size)
        made = super().slots(batch)
        self.target_norm = with_norm
        return made


def rms(x: Tensor, norm: LlamaRMSNorm) -> Tensor:
    return x / (x.square().mean() + norm.variance_epsilon).sqrt() * norm.weight


def rotate(x: Tensor, position: int, theta: float) -> Tensor:
    half = x.shape[-1] // 2
    angle = position * theta ** (-torch.arange(half) / half)
    return torch.cat(
        [
            x[..., :half] * angle.cos() - x[..., half:] * angle.sin(),
            x[..., half:] * angle.cos() + x[..., :half] * angle.sin(),
        ],
        -1,
    )


class ByHand:
    """One anchor's slots from the equations alone: one vector at a time, Llama's layer written out."""

    def __init__(self, drafter: Mtp, batch: Batch, row: int) -> None:
        self.drafter, self.batch, self.row = drafter, batch, row
        self.attention, self.theta = drafter.block.self_attn, drafter.layer_config.rope_parameters["rope_theta"]

    def fuse(self, state: Tensor, token: int, position: int) -> Tensor:
        drafter = self.drafter
        embedded = drafter.embedding.weight[token] * (0.0 if position == 0 and drafter.state["zero_first"] else 1.0)
        parts = [rms(embedded, drafter.enorm), rms(state, drafter.hnorm)]
        if drafter.state["concat"] == "hidden_first":
            parts = parts[::-1]
        return drafter.eh_proj.weight @ torch.cat(parts)

    def key(self, x: Tensor, position: int) -> tuple[Tensor, Tensor]:
        normed = rms(x, self.drafter.block.input_layernorm)
        keys, values = self.attention.k_proj.weight @ normed, self.attention.v_proj.weight @ normed
        return rotate(keys.view(2, 8), position, self.theta), values.view(2, 8)

    def layer(self, x: Tensor, position: int, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        block = self.drafter.block
        queries = (self.attention.q_proj.weight @ rms(x, block.input_layernorm)).view(4, 8)
        queries, heads = rotate(queries, position, self.theta), []
        for h in range(4):
            scores = torch.stack([queries[h] @ key[h // 2] / 8**0.5 for key, _ in seen]).softmax(0)
            heads.append(sum(score * value[h // 2] for score, (_, value) in zip(scores, seen, strict=True)))
        x = x + self.attention.o_proj.weight @ torch.cat(heads)
        normed = rms(x, block.post_attention_layernorm)
        gate, up = block.mlp.gate_proj.weight @ normed, block.mlp.up_proj.weight @ normed
        return x + block.mlp.down_proj.weight @ (gate * gate.sigmoid() * up)

    def slots(self, anchor: int) -> list[Tensor]:
        drafter, batch, row, made = self.drafter, self.batch, self.row, []
        first = int((batch.documents[row] == batch.documents[row, anchor]).nonzero()[0, 0])
        source = batch.last[row] if drafter.state["reads"] == "post_norm" else batch.aux[row, :, 0]
        tokens = batch.tokens[row].tolist()
        seen, state = [], source[anchor - 1]
        for t in range(first, anchor):
            x = self.fuse(source[t], tokens[t + 1], t - first)
            seen.append(self.key(x, t - first))
        for k in range(1, drafter.num_slots + 1):
            position = anchor - 1 - first + k - 1
            if k > 1:
                x = self.fuse(state, tokens[min(anchor + k - 1, len(tokens) - 1)], position)
                if drafter.sharing["share"] == "none":
                    seen.append(self.key(x, position))
            output = self.layer(x, position, seen)
            made.append(rms(output, drafter.norm))
            state = made[-1] if drafter.state["recycles"] == "post_norm" else output
        return made


@torch.no_grad()
def error_by_hand(drafter: Mtp, target) -> float:
    batch = checks.train_batch(target, drafter)
    slots, worst = drafter.slots(batch), 0.0
    for row, index in slots.mask[..., 0].nonzero()[::3].tolist():
        wanted = ByHand(drafter, batch, row).slots(int(batch.anchors[row, index]))
        for k in slots.mask[row, index].nonzero()[:, 0].tolist():
            worst = max(worst, float((slots.hidden[row, index, k] - wanted[k]).abs().max()))
    return worst


STATES = [
    {},
    {"reads": "pre_norm", "recycles": "pre_norm"},
    {"concat": "hidden_first", "zero_first": False},
    {"sharing": {"share": "kv"}, "reads": "pre_norm"},
]


@pytest.mark.parametrize("model", STATES)
def test_every_slot_by_hand(target, model):
    assert error_by_hand(head(target, **model), target) < 1e-5


@pytest.mark.parametrize("kind", [ForgetsItsState, RecyclesTheOtherState, ReadsBeforeTheNorm])
def test_by_hand_finds_planted_faults(target, kind):
    faulty = head(target, kind)
    faulty.target_norm = target.parts.norm.weight.detach()
    assert error_by_hand(faulty, target) > 1e-2


@pytest.mark.parametrize("kind", [ForgetsWhenDrafting, ReadsBeforeTheNormWhenDrafting])
def test_drafting_otherwise_than_training_is_found(target, kind):
    faulty = head(target, kind)
    faulty.target_norm = target.parts.norm.weight.detach()
    with pytest.raises(AssertionError, match="differ"):
        checks.draft_equals_train(faulty, target)


def test_reads_what_it_says(target):
    """pre_norm is the last layer's output, post_norm the same after the final norm."""
    before, after = head(target, reads="pre_norm"), head(target)
    assert (before.needs.layers, before.needs.last_hidden) == ((4,), False)
    assert (after.needs.layers, after.needs.last_hidden) == ((), True)
    one = checks.sample(target, before, checks.random_text(target, 6, 0), [0] * 3 + [1] * 3)
    states = before.read(one.aux, one.last)
    assert torch.allclose(target.parts.norm(states), after.read(one.aux, one.last), atol=1e-5)
    assert not torch.allclose(states, one.last, atol=0.1)


def two_documents() -> Batch:
    """Tokens of two documents, four and three long; anchors at 1, 2 and 5."""
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1]])
    return Batch(
        tokens=torch.arange(10, 17)[None],
        positions=torch.tensor([[0, 1, 2, 3, 0, 1, 2]]),
        documents=documents,
        turns=torch.tensor([[0, 1, 1, 1, 0, 1, 1]]),
        aux=torch.randn(1, 7, 0, 32),
        last=torch.randn(1, 7, 32),
        top1=torch.zeros(1, 7, dtype=torch.int64),
        lse=torch.zeros(1, 7),
        anchors=torch.tensor([[1, 2, 5]]),
    )


def test_masks_and_positions_by_hand(target):
    seen = []

    class Watched(Mtp):
        def through(self, fused, positions, mask, keys):
            seen.append((positions.tolist(), mask.int().tolist()))
            return super().through(fused, positions, mask, keys)

    for share in ("none", "kv"):
        head(target, Watched, sharing={"share": share}).slots(two_documents())
    rows = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1, 1],
    ]
    assert seen[0] == seen[3] == ([[0, 1, 2, 3, 0, 1]], [rows])
    # The anchors at 1, 2 and 5 stand on rows 0, 1 and 4; then come the keys of their chains, step after step.
    second = [
        [1, 0, 0, 0, 0, 0, 1, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1, 0, 0, 0, 1],
    ]
    third = [
        [1, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0],
        [0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 1],
    ]
    assert seen[1] == ([[1, 2, 1]], [second])
    assert seen[2] == ([[2, 3, 2]], [third])
    alone = [line[:6] for line in second]
    assert seen[4] == ([[1, 2, 1]], [alone])
    assert seen[5] == ([[2, 3, 2]], [alone])


def test_names_are_the_modules(target):
    one = set(head(target).state_dict())
    assert {name for name in one if not name.startswith("block.")} == {
        "enorm.weight",
        "hnorm.weight",
        "eh_proj.weight",
        "norm.weight",
    }
    assert {name[6:] for name in one if name.startswith("block.")} == set(target.parts.last_block())
    three = set(head(target, modules=3).state_dict())
    assert three == one | {f"more.{i}.{name}" for i in (0, 1) for name in one}


def their_layers(drafter: Mtp, target) -> list[MtpLayer]:
    """transformers' own MTP layers with this drafter's weights."""
    made = []
    for module in drafter.heads:
        layer = MtpLayer(
            drafter.layer_config, type(module.block), LlamaRMSNorm, drafter.layer_config.num_hidden_layers - 1
        )
        layer.mtp_block.load_state_dict(module.block.state_dict())
        for ours, theirs in ((module.enorm, layer.enorm), (module.hnorm, layer.hnorm), (module.norm, layer.post_norm)):
            theirs.load_state_dict(ours.state_dict())
        layer.eh_proj.load_state_dict(module.eh_proj.state_dict())
        made.append(layer.eval())
    return made


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek_v3", "glm4_moe"])
def test_modules_equal_transformers_own(family):
    """One module a slot, against transformers' layers run over a document alone, without any cache."""
    target = tiny_target(family)
    drafter = head(target, modules=3, zero_first=False)
    one = checks.sample(target, drafter, checks.random_text(target, 9, 0), [0] * 3 + [1] * 6)
    batch = checks.row_batch([[one]], 9)
    slots, states = drafter.slots(batch), batch.last
    for k, layer in enumerate(their_layers(drafter, target), 1):
        count = 9 - k
        places = torch.arange(count)[None]
        mask = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)[None, None]
        embedded = target.parts.embedding[batch.tokens[:, k:]]
        angles = drafter.rotary.angles(embedded, places)
        states = layer(embedded, states[:, :count], angles, mask, places, None)
        for index, anchor in enumerate(batch.anchors[0].tolist()):
            if slots.mask[0, index, k - 1]:
                assert torch.allclose(slots.hidden[0, index, k - 1], states[0, anchor - 1], atol=1e-5)
    assert slots.mask.all(1).any(), "no slot was compared"


def qwen3_next():
    """A hybrid: three linear-attention layers to each full one, gated attention, experts."""
    config = CONFIG_MAPPING["qwen3_next"](
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        initializer_range=0.2,
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention", "linear_attention"],
    )
    return TargetParts(config, torch.randn(64, 32), LlamaRMSNorm(32), torch.randn(64, 32))


@torch.no_grad()
def test_a_hybrid_gives_its_full_attention_layer():
    drafter = Mtp(qwen3_next(), num_slots=2).eval()
    assert {"block.self_attn.q_norm.weight", "block.mlp.experts.down_proj"} <= set(drafter.state_dict())
    assert drafter.state_dict()["block.self_attn.q_proj.weight"].shape == (2 * 32, 32), "the gate stands in q_proj"
    assert drafter.slots(two_documents()).hidden.isfinite().all()


def test_latent_attention_caches_latents():
    drafter = head(tiny_target("deepseek_v3"))
    assert drafter.key_shapes == ((1, 16), (1, 8))
    assert head(tiny_target("llama")).key_shapes == ((2, 8), (2, 8))


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe", "glm4_moe"])
def test_dense_takes_the_experts_place(family):
    target = tiny_target(family)
    assert "block.mlp.experts.down_proj" in head(target).state_dict()
    dense = head(target, block={"mlp": "dense"})
    assert dense.state_dict()["block.mlp.down_proj.weight"].shape == (32, 48)
    checks.draft_equals_train(dense, target)


def test_dense_is_refused_where_the_layer_expects_experts():
    with pytest.raises(ValueError, match="block.kind llama"):
        head(tiny_target("gpt_oss"), block={"mlp": "dense"})


def test_soft_caps_and_sinks_run_eagerly():
    for family in ("gemma2", "gpt_oss"):
        assert head(tiny_target(family)).layer_config._attn_implementation == "eager"
    assert head(tiny_target("llama")).layer_config._attn_implementation == "sdpa"


def test_an_unknown_config_is_refused(target):
    class Unknown(type(target.parts.config)):
        model_type = "unknown"

    parts = TargetParts(
        Unknown(**target.parts.config.to_dict()), *(getattr(target.parts, n) for n in ("embedding", "norm", "head"))
    )
    with pytest.raises(ValueError, match="Unknown.*llama"):
        Mtp(parts)
    assert head(type("T", (), {"parts": parts}), block={"kind": "llama"}).block.mlp


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "deepseek_v3"])
@pytest.mark.parametrize("concat", ["embedding_first", "hidden_first"])
def test_warm_start_is_the_targets_last_block(family, concat):
    target = tiny_target(family)
    drafter = head(target, concat=concat, num_slots=2, modules=2)
    taken = drafter.warm_start(target.parts)
    names = {line.split()[2].removeprefix("block.") for line in taken if "last block" in line}
    assert names == set(target.model.model.layers[-1].state_dict())
    states, places = torch.randn(1, 5, 32), torch.arange(5)[None]
    mask = torch.ones(1, 5, 5, dtype=torch.bool).tril()
    for module in drafter.heads:
        assert torch.allclose(module.norm(states), target.parts.norm(states), atol=1e-4)
        fused = module.fuse(states, torch.zeros(1, 5, 32))
        assert torch.allclose(fused, module.hnorm(states), atol=1e-5)
        small = module.fuse(torch.zeros(1, 5, 32), states).square().mean().sqrt()
        assert 0.01 < small / module.enorm(states).square().mean().sqrt() < 0.2
        ours = module.through(fused, places, mask, ChainKeys())
        theirs = through(target.model.model.layers[-1], drafter.rotary, fused, places, mask, ChainKeys())
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_warm_start_of_a_llama_block_leaves_normed_queries_alone():
    target = tiny_target("qwen3")
    lines = " ".join(head(target, block={"kind": "llama"}).warm_start(target.parts))
    assert "v_proj" in lines
    assert "down_proj" in lines
    assert "q_proj" not in lines


def test_one_trained_step_leaves_the_others_out(target):
    drafter, whole = head(target, train_steps=1), head(target)
    batch = checks.train_batch(target, drafter)
    full, shown = whole.slots(batch), drafter.slots(batch)
    assert torch.equal(shown.hidden, full.hidden), "without training every slot is there"
    drafter.train()
    trained = drafter.slots(batch)
    assert torch.equal(trained.mask[..., 0], full.mask[..., 0])
    assert not trained.mask[..., 1:].any()
    assert full.mask[..., 1:].any()
    assert torch.equal(trained.hidden[..., 0, :], full.hidden[..., 0, :])
    assert not trained.hidden[..., 1:, :].any()


def observe(drafter: Mtp, state, target, texts, spans) -> None:
    """Show each request its text's positions start..stop - 1; spans [(start, stop)]."""
    most = max(stop - start for start, stop in spans)
    last, ids = torch.randn(len(texts), most, 32), torch.zeros(len(texts), most, dtype=torch.int64)
    aux = torch.randn(len(texts), most, len(drafter.needs.layers), 32)
    for r, (text, (start, stop)) in enumerate(zip(texts, spans, strict=True)):
        if stop > start:
            known = checks.sample(target, drafter, text, [0] * (len(text) - 2) + [1] * 2)
            last[r, : stop - start], aux[r, : stop - start] = known.last[start:stop], known.aux[start:stop]
            ids[r, : stop - start] = torch.tensor(text[start + 1 : stop + 1])
    drafter.observe(state, ids, aux, last, torch.tensor([stop - start for start, stop in spans]))


@torch.no_grad()
@pytest.mark.parametrize(
    "model", [{}, {"modules": 3}, {"sharing": {"share": "kv", "top": 3}}, {"sharing": {"top": 2}, "reads": "pre_norm"}]
)
def test_a_batch_of_requests_drafts_as_each_alone(target, model):
    """Different lengths, several calls, proposals in between, a request that gets nothing any more."""
    drafter, texts = head(target, **model), [checks.random_text(target, n, n) for n in (12, 7, 10)]
    calls = [[(0, 5), (0, 1), (0, 8)], [(5, 9), (1, 4), (8, 8)]]
    sampling, seeds = Sampling(temperature=1.0), torch.tensor([3, 4, 5])
    state = drafter.begin(3, 20)
    for spans in calls:
        observe(drafter, state, target, texts, spans)
        together = drafter.propose(state, 3, sampling, seeds)
        for r, (_, stop) in enumerate(spans):
            alone = drafter.begin(1, 20)
            observe(drafter, alone, target, [texts[r]], [(0, stop)])
            made = drafter.propose(alone, 3, sampling, seeds[r : r + 1])
            assert torch.equal(made.tokens[0], together.tokens[r])
            assert torch.allclose(made.probs[0], together.probs[r], atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(("family", "top", "count"), [("llama", 2, 2), ("glm_moe_dsa", None, 3)])
def test_later_slots_keep_to_the_chosen_columns(family, top, count):
    target = tiny_target(family)
    drafter = head(target, sharing={"top": top, "share": "kv"})
    text = checks.random_text(target, 9, 1)
    state = drafter.begin(1, 20)
    observe(drafter, state, target, [text], [(0, 8)])
    assert int(state.chosen.sum()) == count
    before = drafter.propose(state, 3, Sampling(temperature=1.0), torch.tensor([1]))
    for noisy in (~state.chosen[0], state.chosen[0]):
        cached = (state.keys[0].keys, state.keys[0].values)  # of latent attention: latents, and rotary parts
        kept = [part.clone() for part in cached]
        for part in cached:
            part[:, :, noisy] += 1.0
        after = drafter.propose(state, 3, Sampling(temperature=1.0), torch.tensor([1]))
        for part, own in zip(cached, kept, strict=True):
            part.copy_(own)
        moved = (after.probs[:, 1:] - before.probs[:, 1:]).abs().max() > 1e-6
        assert bool(moved) == bool(torch.equal(noisy, state.chosen[0]))


@torch.no_grad()
@pytest.mark.parametrize("family", ["glm_moe_dsa", "deepseek_v32"])
@pytest.mark.parametrize("model", [{}, {"sharing": {"share": "kv"}}, {"modules": 3}])
def test_a_layer_that_chooses_its_positions(family, model):
    target = tiny_target(family)
    drafter = head(target, **model)
    batch = checks.train_batch(target, drafter)
    checks.frontier(drafter, batch, anchors=1)
    checks.draft_equals_train(drafter, target)
    checks.packed_equals_alone(drafter, target)
    frozen = {name for name, p in drafter.named_parameters() if not p.requires_grad}
    assert frozen == {name for name, _ in drafter.named_parameters() if ".indexer." in name}
    assert frozen
    made = drafter.slots(batch)
    for module in drafter.heads:
        module.block.self_attn.indexer.index_topk = 99
    moved = (drafter.slots(batch).hidden - made.hidden)[made.mask].abs().amax(-1) > 1e-4
    assert moved.float().mean() > 0.5, "three positions or all of them: it makes no difference"


def test_an_indexer_beside_the_layers_own_is_refused():
    with pytest.raises(ValueError, match=r"sharing\.top must be null"):
        head(tiny_target("glm_moe_dsa"), sharing={"top": 2})


def test_best_by_hand():
    scores = torch.tensor([[[5.0, 1.0, 9.0], [2.0, 7.0, 9.0], [3.0, 1.0, 2.0]]])
    visible = torch.ones(1, 3, 3, dtype=torch.bool).tril()
    assert best(scores, visible, 2).int().tolist() == [[[1, 0, 0], [1, 1, 0], [1, 0, 1]]]
    assert torch.equal(best(scores, visible, 9), visible)


def test_index_scores_and_loss_by_hand():
    indexer = Indexer(2, heads=2, width=1)
    with torch.no_grad():
        indexer.q_proj.weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
        indexer.k_proj.weight.copy_(torch.tensor([[0.0, 1.0]]))
        indexer.weights_proj.weight.copy_(torch.tensor([[2.0, 0.0], [0.0, 3.0]]))
    states = torch.tensor([[[1.0, 4.0], [-2.0, -1.0]]])
    # keys 4, -1. Row 0: queries 1, -1, weights 2, 12: 2 relu(4) and 12 relu(1). Row 1: queries -2, 2, weights -4, -3.
    wanted = torch.tensor([[8.0, 12.0], [-24.0, -8.0]]) / 2**0.5
    scores = indexer.scores(states, indexer.k_proj(states))
    assert torch.allclose(scores[0], wanted)
    weights = torch.tensor([[[[1.0, 0.0], [0.25, 0.75]]], [[[1.0, 0.0], [0.75, 0.25]]]]).transpose(0, 1)
    visible = torch.tensor([[[True, False], [True, True]]])
    made = index_loss(weights, torch.zeros(1, 2, 2), visible)
    assert made[0].tolist() == pytest.approx([0.0, 0.0], abs=1e-6)
    made = index_loss(weights, torch.tensor([[[5.0, 5.0], [1.0, 0.0]]]), visible)
    q = torch.tensor([1.0, 0.0]).log_softmax(0)
    assert made[0].tolist() == pytest.approx([0.0, float(-(0.5 * q).sum() - 0.6931472)], abs=1e-5)


def test_own_index_trains_the_indexer_alone(target):
    drafter = head(target, sharing={"top": 3}).train()
    batch = checks.train_batch(target, drafter)
    terms = slot_terms(drafter, drafter.slots(batch), batch, target.parts, Objective({"own_index": 1.0}))
    terms.loss.backward()
    assert float(terms.loss.detach()) > 0
    moved = {n for n, p in drafter.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert moved == {f"indexer.{name}_proj.weight" for name in ("q", "k", "weights")}
    before = float(terms.loss.detach() / terms.denominator)
    after = checks.fit(drafter, target, batch, Objective({"own_index": 1.0}), steps=40)
    assert after < 0.7 * before
    with pytest.raises(ValueError, match="own_index"):
        Objective({"own_index": 1.0}).measures(head(target))


def test_all_is_seen_until_the_indexer_has_learned(target):
    drafter, plain = head(target, sharing={"top": 2, "dense_until": 0.5}), head(target)
    plain.load_state_dict(drafter.state_dict(), strict=False)
    batch = checks.train_batch(target, drafter)
    drafter.train()
    for progress, equal in ((0.2, True), (0.7, False)):
        batch.progress = progress
        made = drafter.slots(batch)
        wanted = plain.slots(batch)
        near = torch.allclose(made.hidden[..., :32][made.mask], wanted.hidden[made.mask], atol=1e-5)
        assert near == equal
    batch.progress = 0.2
    drafter.eval()
    assert not torch.allclose(drafter.slots(batch).hidden[..., :32], plain.slots(batch).hidden, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("model", [{}, {"modules": 3}, {"sharing": {"top": 3, "share": "kv"}}])
def test_runs_in_bfloat16(target, model):
    drafter = head(target, **model).to(torch.bfloat16)
    batch = checks.train_batch(target, drafter).to("cpu", torch.bfloat16)
    made, exact = drafter.slots(batch), head(target, **model).slots(checks.train_batch(target, drafter))
    assert made.hidden.dtype == torch.bfloat16
    assert (made.hidden.float() - exact.hidden)[..., :32][made.mask].abs().median() < 0.05
    state = drafter.begin(1, 12)
    aux, last = torch.empty(1, 4, 0, 32, dtype=torch.bfloat16), torch.randn(1, 4, 32).bfloat16()
    drafter.observe(state, torch.randint(4, 60, (1, 4)), aux, last, torch.tensor([4]))
    assert drafter.propose(state, 3, Sampling(), torch.tensor([0])).tokens.shape == (1, 3)
    assert drafter.rotary.embedding.inv_freq.dtype == torch.float32


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"num_slots": 0}, "num_slots"),
        ({"num_slots": 2.5}, "num_slots must be at least 1 and whole"),
        ({"sharing": {"top": 2.5}}, r"sharing\.top must be at least 1 and whole"),
        ({"modules": 2}, "modules"),
        ({"train_steps": 4}, "train_steps"),
        ({"modules": 3, "train_steps": 1}, "train_steps"),
        ({"reads": "norm"}, "reads must be one of post_norm, pre_norm"),
        ({"recycles": None}, "recycles"),
        ({"concat": "both"}, "concat"),
        ({"zero_first": 2}, "zero_first"),
        ({"block": {"kind": "mine"}}, "kind"),
        ({"block": {"width": 3}}, "width"),
        ({"sharing": {"share": "all"}}, "share"),
        ({"sharing": {"top": 0}}, "top"),
        ({"sharing": {"dense_until": 2.0}}, "dense_until"),
        ({"sharing": {"index_heads": 0}}, "index_heads"),
        ({"modules": 3, "sharing": {"share": "kv"}}, "sharing"),
        ({"layers": [1]}, "layers"),
    ],
)
def test_bad_settings_are_refused(target, model, words):
    with pytest.raises(ValueError, match=words):
        Mtp(target.parts, **({"num_slots": 3} | model))


def test_more_slots_than_modules_are_refused_and_one_module_goes_on(target):
    many, one = head(target, modules=3), head(target)
    with pytest.raises(ValueError, match="3 modules"):
        many.propose(many.begin(1, 8), 4, Sampling(), torch.tensor([0]))
    state = one.begin(1, 12)
    observe(one, state, target, [checks.random_text(target, 6, 0)], [(0, 4)])
    assert one.propose(state, 6, Sampling(), torch.tensor([0])).tokens.shape == (1, 6)


def test_fresh_weights_follow_the_familys_initialisation():
    torch.manual_seed(0)
    config = tiny_model("deepseek_v3", initializer_range=0.05).config
    drafter = Mtp(TargetParts(config, torch.randn(64, 32), LlamaRMSNorm(32), torch.randn(64, 32)))
    experts = drafter.state_dict()["block.mlp.experts.gate_up_proj"]
    assert 0.04 < float(experts.std()) < 0.06
    assert not drafter.state_dict()["block.mlp.gate.e_score_correction_bias"].any()
