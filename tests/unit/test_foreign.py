"""Heads of other tools: taken key by key, nothing left over or missing, layer ids translated, offsets checked."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from checkpoints.engines import Source, export_engine
from checkpoints.folder import read_drafter, save_drafter
from checkpoints.foreign import import_eagle3
from drafters.eagle3 import Eagle3
from drafters.vocabulary import DraftVocabulary
from tests.doubles import tiny_target

IDS = "eagle_aux_hidden_state_layer_ids"


def target(**overrides: Any) -> Any:
    return tiny_target("llama", **({"num_hidden_layers": 8} | overrides))


def head(**arguments: Any) -> Eagle3:
    vocabulary = DraftVocabulary(torch.tensor([1, 4, 9, 63]), 64)
    return Eagle3(target().parts, vocabulary, num_slots=4, **({"layers": [1, 3, 4]} | arguments))


def plain_config(**changes: Any) -> dict[str, Any]:
    """What SpecForge and the EAGLE repository write: no layer ids, old rope spelling."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "vocab_size": 64,
        "draft_vocab_size": 4,
    } | changes


def plain_tensors(drafter: Eagle3) -> dict[str, torch.Tensor]:
    maps = {"d2t": drafter.vocabulary.d2t, "t2d": drafter.vocabulary.t2d}
    return {name: tensor.clone() for name, tensor in drafter.state_dict().items()} | maps


def written(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], pickled: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


def same(drafter: Any, wanted: Eagle3) -> None:
    own, other = drafter.state_dict(), wanted.state_dict()
    assert set(own) == set(other)
    assert all(torch.equal(own[name], other[name]) for name in own)
    assert torch.equal(drafter.vocabulary.ids, wanted.vocabulary.ids)


@pytest.mark.parametrize("pickled", [False, True], ids=["specforge", "eagle_repository"])
def test_plain_layout(tmp_path: Path, pickled: bool) -> None:
    wanted = head()
    folder = written(tmp_path, plain_config(), plain_tensors(wanted), pickled)
    drafter, notes = import_eagle3(folder, target().parts, num_slots=4)
    same(drafter, wanted)
    # L = 8 and nothing stated: the engines' default, blocks applied 2, 4, 5.
    assert list(drafter.needs.layers) == [1, 3, 4]
    assert any("default" in note for note in notes)


def test_other_spellings_of_names(tmp_path: Path) -> None:
    wanted = head()
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in plain_tensors(wanted).items()}
    renamed["model.norm.weight"] = renamed.pop("norm.weight")
    renamed["embed_tokens.weight"] = target().parts.embedding.detach().clone()
    drafter, notes = import_eagle3(written(tmp_path, plain_config(), renamed), target().parts)
    same(drafter, wanted)
    assert any("embed_tokens" in note for note in notes)


@pytest.mark.parametrize("engine", ["vllm", "vllm_speculators", "sglang"])
@pytest.mark.parametrize("switches", [{}, {"fc_norm": True, "norm_output": True}, {"norm_before_residual": True}])
def test_our_own_exports_come_back(tmp_path: Path, engine: str, switches: dict[str, bool]) -> None:
    if engine == "sglang" and "norm_before_residual" in switches:
        pytest.skip("SGLang does not serve it")
    wanted = head(layers=[0, 2, 6], switches=switches)
    save_drafter(tmp_path / "own", wanted, target_identity=target().identity)
    given = Source(read_drafter(tmp_path / "own"), "target", torch.float32)
    exported = export_engine(given, engine, tmp_path / "out")
    drafter, _ = import_eagle3(exported.folder, target().parts, num_slots=4)
    same(drafter, wanted)
    assert drafter.settings() == wanted.settings()


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({IDS: [1, 3, 7]}, [0, 2, 6]),
        ({"eagle_config": {IDS: [0, 2, 6]}}, [0, 2, 6]),
        ({IDS: [1, 3, 7], "eagle_config": {IDS: [0, 2, 6]}}, [0, 2, 6]),
    ],
    ids=["top_level_counts_blocks", "nested_counts_outputs", "both_agree"],
)
def test_layer_ids_are_translated(tmp_path: Path, config: dict[str, Any], layers: list[int]) -> None:
    drafter, _ = import_eagle3(written(tmp_path, plain_config(**config), plain_tensors(head())), target().parts)
    assert list(drafter.needs.layers) == layers


def test_layer_convention_overrides(tmp_path: Path) -> None:
    folder = written(tmp_path, plain_config(**{IDS: [0, 2, 6]}), plain_tensors(head()))
    drafter, _ = import_eagle3(folder, target().parts, layer_convention="outputs")
    assert list(drafter.needs.layers) == [0, 2, 6]
    with pytest.raises(ValueError, match="not ascending ids from 0"):
        import_eagle3(folder, target().parts)


def test_speculators_default_is_norm_before_residual(tmp_path: Path) -> None:
    body = plain_config()
    config = {"speculators_model_type": "eagle3", "transformer_layer_config": body, "draft_vocab_size": 4}
    drafter, _ = import_eagle3(written(tmp_path, config, plain_tensors(head())), target().parts)
    assert drafter.settings()["switches"]["norm_before_residual"] is True


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({}, lambda t: t.update(d2t=torch.tensor([1, 4, 9, 63])), "d2t holds absolute ids"),
        ({}, lambda t: t.pop("d2t"), "there is no d2t"),
        ({}, lambda t: t.update(t2d=torch.arange(64) < 4), "different tokens"),
        ({"draft_vocab_size": 5}, lambda t: None, "draft_vocab_size is 5"),
        ({}, lambda t: t.update(surprise=torch.ones(1)), "unknown tensor.*surprise"),
        ({}, lambda t: t.pop("midlayer.mlp.up_proj.weight"), "missing: midlayer.mlp.up_proj.weight"),
        ({"fc_norm": True}, lambda t: None, "missing: fc_norm.0.weight"),
        ({}, lambda t: t.update({"fc_norm.0.weight": torch.ones(32)}), "left over: fc_norm.0.weight"),
        ({"norm_before_fc": True}, lambda t: None, "norm_before_fc is on"),
        ({"attention_bias": True}, lambda t: None, "attention_bias is on"),
        ({"num_hidden_layers": 2}, lambda t: None, "it has 2 layers"),
        ({"hidden_size": 64}, lambda t: None, "hidden_size is 64, the target's 32"),
        ({"vocab_size": 65}, lambda t: None, "vocab_size is 65, the target's 64"),
        ({IDS: [1, 3, 8, 9]}, lambda t: None, "fc reads 3 features"),
        ({IDS: [1, 3, 9]}, lambda t: None, "past the target's 8 layers"),
        ({IDS: [2, 4, 5], "eagle_config": {IDS: [2, 4, 5]}}, lambda t: None, "name different layers"),
        ({"logit_scale": 0.5}, lambda t: None, "logit_scale is 0.5"),
        ({"head_dim": 16}, lambda t: None, "wrong shape: midlayer.self_attn.q_proj.weight"),
        ({}, lambda t: t.update({"embed_tokens.weight": torch.ones(64, 32)}), "embedding of its own"),
        ({}, lambda t: t.update({"layers.0.mlp.up_proj.weight": torch.ones(1)}), "two tensors are both"),
    ],
)
def test_refusals(tmp_path: Path, config: dict[str, Any], tensors: Any, message: str) -> None:
    found = plain_tensors(head())
    tensors(found)
    with pytest.raises(ValueError, match=message):
        import_eagle3(written(tmp_path, plain_config(**config), found), target().parts)


class Harmful:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return print, ("this must not run",)


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path, plain_config(), {"fc.weight": Harmful()}, pickled=True)  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="other pickles are not opened"):
        import_eagle3(folder, target().parts)
    assert "must not run" not in capsys.readouterr().out
