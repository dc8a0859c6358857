"""EAGLE-1 and HASS: slow rewrite, labels by hand, noise, top-K loss, warm start, engine folders, foreign heads."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints.engines import Source, export_engine
from checkpoints.folder import read_drafter, save_drafter
from checkpoints.foreign import import_head
from checkpoints.lint import lint
from drafters.contract import Batch
from drafters.eagle import TOP_K, Eagle
from drafters.vocabulary import DraftVocabulary
from tests import checks
from tests.doubles import tiny_target
from training.objectives import Objective, slot_terms


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


def head(target, **model) -> Eagle:
    torch.manual_seed(0)
    return Eagle(target.parts, None, **({"num_slots": 3} | model)).eval()


def two_documents() -> Batch:
    """Tokens 10..15 and 20..23 in one row of 12; turns 0 0 1 1 1 0 and 0 1 1 1; anchors 2, 3 and 7, 8."""
    documents = torch.tensor([[0] * 6 + [1] * 4 + [-1] * 2])
    generator = torch.Generator().manual_seed(2)
    return Batch(
        tokens=torch.tensor([[10, 11, 12, 13, 14, 15, 20, 21, 22, 23, 0, 0]]),
        positions=torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 0, 0]]),
        documents=documents,
        turns=torch.tensor([[0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 0, 0]]),
        aux=torch.zeros(1, 12, 0, 32),
        last=torch.randn(1, 12, 32, generator=generator),
        top1=torch.tensor([[5] * 12]),
        lse=torch.full((1, 12), 4.0),
        anchors=torch.tensor([[2, 3, 7, 8]]),
    )


# The forward, written again
# ----------------------------------------------------------------------------------------------------------------------


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turned(x: Tensor, position: int) -> Tensor:
    """One head [8] rotated to a position, theta 10000."""
    out = x.clone()
    for i in range(4):
        angle = torch.tensor(position / 10000 ** (2 * i / 8), dtype=torch.float64)
        out[i] = x[i] * angle.cos() - x[i + 4] * angle.sin()
        out[i + 4] = x[i + 4] * angle.cos() + x[i] * angle.sin()
    return out


def layer_by_hand(state: dict[str, Tensor], name: str, x: Tensor, norm: bool) -> Tensor:
    """A Llama layer over rows [N, 32] at positions 0..N-1, causal, row by row and head by head."""
    w = {key.removeprefix(name): value.double() for key, value in state.items() if key.startswith(name)}
    read = rms(x, w["input_layernorm.weight"]) if norm else x
    q, k, v = (read @ w[f"self_attn.{p}_proj.weight"].T for p in "qkv")
    rows = []
    for n in range(len(x)):
        heads = []
        for h in range(4):  # two heads share a group
            query = turned(q[n, 8 * h : 8 * h + 8], n)
            group = slice(8 * (h // 2), 8 * (h // 2) + 8)
            scores = torch.stack([query @ turned(k[m, group], m) / 8**0.5 for m in range(n + 1)])
            heads.append(scores.softmax(0) @ v[: n + 1, group])
        after = x[n] + torch.cat(heads) @ w["self_attn.o_proj.weight"].T
        inner = rms(after, w["post_attention_layernorm.weight"])
        gate = inner @ w["mlp.gate_proj.weight"].T
        inner = gate * torch.sigmoid(gate) * (inner @ w["mlp.up_proj.weight"].T)
        rows.append(after + inner @ w["mlp.down_proj.weight"].T)
    return torch.stack(rows)


def by_hand(drafter: Eagle, features: list[Tensor], ids: list[int]) -> Tensor:
    """Outputs of rows (features[n], token ids[n]), [N, 32]."""
    state = drafter.state_dict()
    inputs = [torch.cat([drafter.embedding.weight[i], f.float()]).double() for i, f in zip(ids, features, strict=True)]
    x = torch.stack(inputs) @ state["fc.weight"].double().T
    if "fc.bias" in state:
        x = x + state["fc.bias"].double()
    for i in range(len(drafter.layers)):
        x = layer_by_hand(state, f"layers.{i}.", x, norm=i > 0)
    return x


@torch.no_grad()
@pytest.mark.parametrize("model", [{}, {"depth": 2, "bias": True}], ids=["plain", "two_layers_and_bias"])
def test_forward_equals_its_slow_rewrite(target, model):
    drafter, batch = head(target, **model), two_documents()
    made = drafter.slots(batch)
    for index, (anchor, start) in enumerate([(2, 0), (3, 0), (7, 6), (8, 6)]):
        features = [batch.last[0, t] for t in range(start, anchor)]
        ids = [int(batch.tokens[0, t + 1]) for t in range(start, anchor)]
        for k in range(3):
            output = by_hand(drafter, features, ids)[-1]
            assert torch.allclose(made.hidden[0, index, k], output.float(), atol=1e-5), (anchor, k)
            logits = drafter.logits(made.hidden[0, index, k][None], torch.zeros(1, dtype=torch.int64))[0]
            assert torch.allclose(logits, target.parts.head @ output.float(), atol=1e-4)
            features.append(output)
            ids.append(int(batch.tokens[0, anchor + 1 + k]))


# Labels, and what training makes
# ----------------------------------------------------------------------------------------------------------------------


def test_labels_by_hand(target):
    made = head(target).slots(two_documents())
    assert made.mask[0].tolist() == [
        [True, True, False],
        [True, False, False],
        [True, True, False],
        [True, False, False],
    ]
    assert made.prev_ids[0].tolist() == [[12, 13, 14], [13, 14, 15], [21, 22, 23], [22, 23, 0]]
    assert made.target_ids[0, :2].tolist() == [[13, 14, 15], [14, 15, 20]]
    assert made.teacher[0].tolist() == [[2, 3, 4], [3, 4, 5], [7, 8, 9], [8, 9, 10]]


def test_a_slot_regresses_onto_the_state_of_its_token(target):
    """The head input that loses nothing is the target's last hidden state at a + k - 1, whose logits predict a + k."""
    drafter, batch = head(target), two_documents()
    made = drafter.slots(batch)
    index = made.teacher.flatten(1)[..., None].expand(-1, -1, 32)
    made.hidden = batch.last.gather(1, index).view(made.hidden.shape)
    objective = Objective({"smooth_l1": 1.0, "kl": 1.0})
    assert slot_terms(drafter, made, batch, target.parts, objective).loss.item() == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize(("train_steps", "wanted"), [(1, 1), (2, 2), (None, 3)])
def test_training_makes_train_steps_slots(target, train_steps, wanted):
    drafter, batch = head(target, train_steps=train_steps, noise=0.0), two_documents()
    whole = drafter.slots(batch)
    assert whole.hidden.shape == (1, 4, 3, 32)
    some = drafter.train().slots(batch)
    assert some.hidden.shape == (1, 4, wanted, 32)
    assert torch.equal(some.hidden, whole.hidden[:, :, :wanted])
    assert torch.equal(some.mask, whole.mask[:, :, :wanted])


def test_noise_is_of_the_seed_alone_and_off_in_eval(target):
    drafter, batch = head(target, noise=0.25), two_documents()
    clean = batch.last.clone()
    quiet = drafter.slots(batch).hidden
    batch.seed = 7
    assert torch.equal(drafter.slots(batch).hidden, quiet), "eval mode reads the features as they are"
    drafter.train()
    seven = drafter.slots(batch).hidden
    torch.manual_seed(99)
    assert torch.equal(drafter.slots(batch).hidden, seven), "the global generator must not matter"
    assert not torch.allclose(seven, quiet[:, :, :1])
    batch.seed = 8
    assert not torch.allclose(drafter.slots(batch).hidden, seven)
    assert torch.equal(batch.last, clean), "the teacher's features are never noisy"
    drawn = (drafter.noisy(batch).last - clean).flatten()
    assert drawn.abs().max() <= 0.25 + 1e-6
    # U(-0.25, 0.25): mean 0, standard deviation 0.25 / sqrt(3) = 0.144; 384 draws.
    assert abs(drawn.mean()) < 0.03
    assert drawn.std() == pytest.approx(0.144, abs=0.015)


def test_topk_loss_by_hand(target):
    drafter = head(target, train_steps=3)
    batch = checks.train_batch(target, drafter)
    made = drafter.slots(batch)
    found = slot_terms(drafter, made, batch, target.parts, Objective({"own_topk_ce": 1.0})).loss
    total = torch.zeros(())
    for b, a, k in made.mask.nonzero().tolist():
        p = (target.parts.head @ batch.last[b, made.teacher[b, a, k]]).softmax(-1)
        logq = (target.parts.head @ made.hidden[b, a, k]).log_softmax(-1)
        best = sorted(range(64), key=lambda v, p=p: -float(p[v]))[:10]
        total = total - sum(p[v] * logq[v] for v in best)
    assert TOP_K == 10
    assert found.item() == pytest.approx(total.item(), rel=1e-4)


def test_topk_loss_stays_inside_a_small_vocabulary(target):
    """Four tokens, fewer than K: the whole draft vocabulary counts, with the target's own p (not renormalised)."""
    ids = torch.tensor([3, 5, 9, 40])
    drafter = Eagle(target.parts, DraftVocabulary(ids, 64), num_slots=3).eval()
    batch = checks.train_batch(target, drafter)
    batch.top1 = torch.full_like(batch.top1, 5)  # every label can be said
    made = drafter.slots(batch)
    found = slot_terms(drafter, made, batch, target.parts, Objective({"own_topk_ce": 1.0})).loss
    last = batch.last[torch.arange(2)[:, None, None], made.teacher]
    p = target.parts.logits(last).softmax(-1)[..., ids]
    logq = target.parts.logits(made.hidden, ids).log_softmax(-1)
    assert found.item() == pytest.approx(-(p * logq).sum(-1)[made.mask].sum().item(), rel=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma", "qwen3"])
def test_warm_start_and_unscaled_rows(family):
    target = tiny_target(family)
    drafter = Eagle(target.parts, num_slots=3)
    taken = " ".join(drafter.warm_start(target.parts))
    hidden = torch.randn(5, 32)
    assert torch.equal(drafter.enter(hidden, torch.zeros(5, 32))[0], hidden)
    ids = torch.tensor([3, 9])
    assert torch.equal(drafter.embedding(ids), target.parts.embedding[ids]), "engines hand out unscaled rows"
    assert "layers.0.mlp.up_proj.weight" in taken
    assert ("q_proj" in taken) == (family != "qwen3")
    block, shift = target.model.model.layers[-1], float(family == "gemma")
    size = (target.parts.norm.weight + shift).square().mean().sqrt()
    wanted = block.self_attn.v_proj.weight * (block.input_layernorm.weight + shift) / size
    assert torch.allclose(drafter.layers[0].self_attn.v_proj.weight, wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"num_slots": 0}, "num_slots"),
        ({"num_slots": 2.5}, "num_slots must be at least 1 and whole"),
        ({"depth": 0}, "depth"),
        ({"train_steps": 4}, r"1\.\.3"),
        ({"train_steps": 0}, r"1\.\.3"),
        ({"noise": -0.1}, "noise"),
        ({"layer": {"hidden_size": 64}}, "hidden_size"),
    ],
)
def test_bad_settings_are_refused(target, model, words):
    with pytest.raises(ValueError, match=words):
        head(target, **model)


# Engines, and heads of the EAGLE repository
# ----------------------------------------------------------------------------------------------------------------------


def exported(folder: Path, target, engine: str, vocabulary: DraftVocabulary | None = None, **model: Any) -> tuple:
    made = Eagle(target.parts, vocabulary, **({"num_slots": 4, "depth": 2} | model))
    save_drafter(folder / "own", made, target_identity=target.identity)
    given = Source(read_drafter(folder / "own"), "/models/target", torch.float32, lambda: target.parts.head)
    return export_engine(given, engine, folder / "out"), made


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_tensors_and_config(target, tmp_path, engine):
    done, made = exported(tmp_path, target, engine)
    tensors, trained = load_file(done.folder / "model.safetensors"), made.state_dict()
    if engine == "sglang":  # its fc has a bias in any case
        assert torch.equal(tensors.pop("fc.bias"), torch.zeros(32))
    assert set(tensors) == set(trained)
    assert "layers.0.input_layernorm.weight" not in tensors
    assert "layers.1.input_layernorm.weight" in tensors
    assert all(torch.equal(tensor, trained[name]) for name, tensor in tensors.items())
    config = config_of(done.folder)
    name = {"vllm": "EagleLlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}[engine]
    assert (config["architectures"], config["num_hidden_layers"], config["vocab_size"]) == ([name], 2, 64)
    word = {"vllm": '"method": "eagle"', "sglang": "--speculative-algorithm EAGLE "}[engine]
    assert word in done.command
    assert [finding for finding in lint(done.folder, engine, target.parts.config) if finding.level != "note"] == []
    for other in ("vllm_speculators", "transformers"):
        assert lint(done.folder, other)[0].level == "refused"
    back, _ = import_head(done.folder, target.parts, num_slots=4)
    assert {**back.settings(), "train_steps": 1, "bias": False} == made.settings()
    assert all(torch.equal(back.state_dict()[name], tensor) for name, tensor in trained.items())


def test_what_engines_cannot_serve(target, tmp_path):
    with pytest.raises(ValueError, match=r"drops fc\.bias"):
        exported(tmp_path / "a", target, "vllm", bias=True)
    assert exported(tmp_path / "b", target, "sglang", bias=True)[0].folder.exists()
    some = DraftVocabulary(torch.tensor([1, 4, 9]), 64)
    with pytest.raises(ValueError, match="3 of 64 tokens"):
        exported(tmp_path / "c", target, "vllm", some)


@pytest.mark.parametrize(
    ("engine", "config", "tensors", "level", "text"),
    [
        ("vllm", {"architectures": ["LlamaForCausalLMEagle"]}, None, "refused", "loads EagleLlamaForCausalLM"),
        ("sglang", {"architectures": ["LlamaForCausalLM"]}, None, "refused", "loads LlamaForCausalLMEagle"),
        (
            "vllm",
            {},
            lambda t: t.update({"layers.0.input_layernorm.weight": torch.ones(32)}),
            "refused",
            "no parameter",
        ),
        ("sglang", {}, lambda t: t.update({"norm.weight": torch.ones(32)}), "wrong", "skipped without a word"),
        ("sglang", {}, lambda t: t.pop("fc.bias"), "wrong", "stays at its random start"),
        ("vllm", {}, lambda t: t.update({"fc.bias": torch.ones(32)}), "wrong", "dropped without a word"),
        ("vllm", {}, lambda t: t.pop("layers.1.input_layernorm.weight"), "wrong", "is missing"),
        ("vllm", {"hidden_size": 64}, None, "refused", "not the target's"),
        ("vllm", {"draft_vocab_size": 32}, None, "refused", "whole head"),
        ("vllm", {"max_position_embeddings": 64}, None, "wrong", "max_position_embeddings is 64"),
    ],
)
def test_planted_faults(target, tmp_path, engine, config, tensors, level, text):
    folder = exported(tmp_path, target, engine)[0].folder
    (folder / "config.json").write_text(json.dumps(config_of(folder) | config))
    found = load_file(folder / "model.safetensors")
    if tensors is not None:
        tensors(found)
        save_file(found, folder / "model.safetensors")
    texts = [finding.text for finding in lint(folder, engine, target.parts.config) if finding.level == level]
    assert any(re.search(text, one) for one in texts), texts


def repository(folder: Path, target, **changes: Any) -> tuple[Path, Eagle]:
    """What the EAGLE repository holds: a plain Llama's config, pytorch_model.bin, fc with a bias, the embedding."""
    made = head(target, bias=True, num_slots=5)
    tensors = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    tensors["embed_tokens.weight"] = target.parts.embedding.clone()
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    tensors |= changes.pop("tensors", {})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "vocab_size": 64,
        "tie_word_embeddings": False,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | changes))
    torch.save(tensors, folder / "pytorch_model.bin")
    return folder, made


def test_a_head_of_the_eagle_repository(target, tmp_path):
    folder, wanted = repository(tmp_path / "a", target)
    drafter, notes = import_head(folder, target.parts)
    assert drafter.settings() == {**wanted.settings(), "layer": drafter.settings()["layer"], "noise": 0.1}
    assert (drafter.num_slots, drafter.settings()["layer"]["head_dim"]) == (5, 8)
    assert all(torch.equal(drafter.state_dict()[name], tensor) for name, tensor in wanted.state_dict().items())
    assert any("bias" in note for note in notes)
    batch = two_documents()
    assert torch.allclose(drafter.eval().slots(batch).hidden[:, :, :3], wanted.slots(batch).hidden[:, :, :3])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_size": 64}, "hidden_size is 64"),
        ({"attention_bias": True}, "attention_bias is on"),
        ({"model_type": "qwen2"}, "not llama"),
        ({"num_hidden_layers": 2}, "missing: layers.1"),
        ({"tensors": {"layers.0.input_layernorm.weight": torch.ones(32)}}, "left over: layers.0.input_layernorm"),
        ({"tensors": {"embed_tokens.weight": torch.ones(64, 32)}}, "embedding of its own"),
        ({"tensors": {"lm_head.weight": torch.ones(64, 32)}}, "a head of its own"),
    ],
)
def test_foreign_heads_that_are_refused(target, tmp_path, changes, text):
    with pytest.raises(ValueError, match=text):
        import_head(repository(tmp_path / "a", target, **changes)[0], target.parts)
