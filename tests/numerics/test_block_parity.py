"""Block drafters against a slow rewrite from the papers' formulas: one anchor at a time, one head at a time, loops."""

import math

import pytest
import torch
from torch import Tensor

from drafters.contract import Batch
from tests import checks
from tests.doubles import tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps))


def rope(x: Tensor, position: int, theta: float) -> Tensor:
    """x [d] turned by `position`: halves are pairs."""
    half = len(x) // 2
    out = x.clone()
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        a, b = x[i], x[i + half]
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def slow_block(weights: dict[str, Tensor], drafter, context: Tensor, anchor: int, start: int) -> Tensor:
    """Normed states [S, D] of the block whose anchor token is `anchor` at position `start`, given fused context."""
    config, table = drafter.layer_config, drafter.embedding.weight
    eps, width = config.rms_norm_eps, config.head_dim
    theta = config.rope_parameters["rope_theta"]
    share = config.num_attention_heads // config.num_key_value_heads
    count = drafter.num_slots + (drafter.slot_convention == "fill_in")
    x = torch.stack([table[anchor]] + [table[drafter.mask_token]] * (count - 1)).double()
    for index in range(drafter.block["depth"]):
        w = {name.split(".", 2)[2]: t for name, t in weights.items() if name.startswith(f"layers.{index}.")}
        normed = rms(x, w["input_layernorm.weight"], eps)
        seen = torch.cat([context, normed])
        places = [*range(len(context)), *range(start, start + count)]
        out = torch.zeros(count, config.num_attention_heads * width, dtype=torch.float64)
        for head in range(config.num_attention_heads):
            mine, group = slice(head * width, (head + 1) * width), head // share
            theirs = slice(group * width, (group + 1) * width)
            q = rms((normed @ w["self_attn.q_proj.weight"].T)[:, mine], w["self_attn.q_norm.weight"], eps)
            k = rms((seen @ w["self_attn.k_proj.weight"].T)[:, theirs], w["self_attn.k_norm.weight"], eps)
            v = (seen @ w["self_attn.v_proj.weight"].T)[:, theirs]
            keys = torch.stack([rope(row, place, theta) for row, place in zip(k, places, strict=True)])
            for row in range(count):
                scores = keys @ rope(q[row], start + row, theta) / math.sqrt(width)
                out[row, mine] = scores.softmax(0) @ v
        x = x + out @ w["self_attn.o_proj.weight"].T
        normed = rms(x, w["post_attention_layernorm.weight"], eps)
        gate = normed @ w["mlp.gate_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * (normed @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
    return rms(x, weights["norm.weight"], eps)[-drafter.num_slots :]


def setting(target, name: str, **model):
    """A drafter with random weights, one document, and its weights in float64."""
    torch.manual_seed(3)
    drafter = checks.build(name, target, 4, **model)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    text = checks.random_text(target, 14, 5)
    batch = checks.row_batch([[checks.sample(target, drafter, text, [0] * 5 + [1] * 9)]], 14)
    return drafter, batch, {n: t.detach().double() for n, t in drafter.state_dict().items()}


def slow_hidden(drafter, batch: Batch, weights: dict[str, Tensor], anchor: int) -> Tensor:
    aux = batch.aux[0].double().flatten(-2)
    fused = rms(aux @ weights["fc.weight"].T, weights["hidden_norm.weight"], drafter.layer_config.rms_norm_eps)
    return slow_block(weights, drafter, fused[:anchor], int(batch.tokens[0, anchor]), anchor)


@torch.no_grad()
@pytest.mark.parametrize("convention", ["fill_in", "anchor_first"])
def test_backbone(target, convention):
    drafter, batch, weights = setting(target, "dflash", slot_convention=convention)
    made = drafter.slots(batch).hidden
    for index, anchor in enumerate(batch.anchors[0, :4].tolist()):
        slow = slow_hidden(drafter, batch, weights, anchor)
        assert torch.allclose(made[0, index].double(), slow, atol=1e-5)
        logits = slow @ target.parts.head.double().T
        assert torch.allclose(drafter.logits(made[0, index], batch.tokens[0, :4]).double(), logits, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_markov_heads(target, kind):
    head = {"kind": kind, "rank": 8, "confidence": True, "confidence_reads_token": True}
    drafter, batch, weights = setting(target, "dspark", head=head)
    slots, table = drafter.slots(batch), weights["markov_head.markov_w1.weight"]
    for index, anchor in enumerate(batch.anchors[0, :3].tolist()):
        hidden, state = slow_hidden(drafter, batch, weights, anchor), torch.zeros(8, dtype=torch.float64)
        for k in range(4):
            h, seen = hidden[k], table[batch.tokens[0, anchor + k]]
            markov = seen
            if kind == "gated":
                gate = weights["markov_head.gate_proj.weight"] @ torch.cat([h, seen])
                markov = torch.sigmoid(gate + weights["markov_head.gate_proj.bias"]) * seen
            if kind == "rnn":
                joint = weights["markov_head.joint_proj.weight"] @ torch.cat([state, seen, h])
                g, c, o = (joint + weights["markov_head.joint_proj.bias"]).split(8)
                state = torch.sigmoid(g) * state + (1 - torch.sigmoid(g)) * torch.tanh(c)
                markov = torch.tanh(o)
            wanted = target.parts.head.double() @ h + weights["markov_head.markov_w2.weight"] @ markov
            inputs, prev = slots.hidden[0, index, k : k + 1], slots.prev_ids[0, index, k : k + 1]
            assert torch.allclose(drafter.logits(inputs, prev)[0].double(), wanted, atol=1e-4)
            sure = weights["confidence_head.proj.weight"][0] @ torch.cat([h, seen])
            sure = torch.sigmoid(sure + weights["confidence_head.proj.bias"][0])
            assert torch.allclose(drafter.confidence(inputs, prev)[0].double(), sure, atol=1e-5)


@torch.no_grad()
def test_recurrent_correction(target):
    """Slot 1 keeps its base logits; slot k reads the GRU's state after the anchor and k - 1 tokens."""
    drafter, batch, weights = setting(target, "domino", head={"state": 6, "rank": 8, "base_share": 0.5})
    slots, table = drafter.slots(batch), drafter.embedding.weight.double()
    w_in, w_state = weights["prefix_gru.weight_ih_l0"], weights["prefix_gru.weight_hh_l0"]
    for index, anchor in enumerate(batch.anchors[0, :3].tolist()):
        hidden, state = slow_hidden(drafter, batch, weights, anchor), torch.zeros(6, dtype=torch.float64)
        for k in range(4):
            (r_in, z_in, n_in) = (w_in @ table[batch.tokens[0, anchor + k]]).split(6)
            (r_state, z_state, n_state) = (w_state @ state).split(6)
            reset, update = torch.sigmoid(r_in + r_state), torch.sigmoid(z_in + z_state)
            state = (1 - update) * torch.tanh(n_in + reset * n_state) + update * state
            wanted = target.parts.head.double() @ hidden[k]
            if k > 0:
                inner = weights["embed_proj.0.weight"] @ torch.cat([hidden[k], state])
                wanted = wanted + weights["embed_proj.2.weight"] @ (inner * torch.sigmoid(inner))
            made = drafter.logits(slots.hidden[0, index, k : k + 1], slots.prev_ids[0, index, k : k + 1])
            assert torch.allclose(made[0].double(), wanted, atol=1e-4)


@torch.no_grad()
def test_path_scores(target):
    drafter, batch, weights = setting(target, "dflash2", head={"candidates": 5, "rank": 8, "taps": 2, "group": 16})
    slots = drafter.slots(batch)
    hidden, prev = slots.hidden[0, 0], slots.prev_ids[0, 0]
    made = drafter.logits(hidden, prev)
    for k in range(4):
        base = target.parts.head @ hidden[k]
        best = base.argsort(descending=True)[:5].tolist()
        read = weights["candidate_selector.predecessor_codebook"][prev[k]]
        read = read * (weights["candidate_selector.hidden_projection.weight"] @ hidden[k].double())
        for token in range(64):
            if token not in best:
                assert made[k, token] == -math.inf
                continue
            edge = read @ weights["candidate_selector.successor_codebook"][token]
            assert float(made[k, token]) == pytest.approx(float(base[token] + edge), abs=1e-4)


@torch.no_grad()
def test_convolution_stays_inside_its_block(target):
    """Row i reads rows i and i - 1 of its own block; the first row reads itself alone."""
    drafter, _, _ = setting(target, "dflash2")
    conv = drafter.layers[0].attention_conv
    states = torch.randn(1, 2, 3, 32)
    before, _ = conv.kernels(states)
    made = conv(states, before)
    delta = conv.kernel_projection(states).view(1, 2, 3, 2, 2, 2)  # side, tap, group of 16
    for a in range(2):
        for row in range(3):
            for channel in range(32):
                total = 0.0
                for tap in range(min(row, 1) + 1):
                    kernel = conv.base_kernel[0, tap, channel] + delta[0, a, row, 0, tap, channel // 16]
                    total += float(kernel * states[0, a, row - tap, channel])
                assert float(made[0, a, row, channel]) == pytest.approx(total, abs=1e-4)
