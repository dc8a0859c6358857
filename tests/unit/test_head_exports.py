"""P-EAGLE and Medusa in vLLM's layouts: what is written, and what lint sees."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints.engines import ENGINES, Source, export_engine
from checkpoints.folder import drafter_class, read_drafter, save_drafter
from checkpoints.foreign import import_head
from checkpoints.lint import lint
from drafters.vocabulary import DraftVocabulary
from tests.doubles import tiny_target

KEPT = torch.tensor([1, 4, 9, 63])
KINDS: dict[str, dict[str, Any]] = {
    "peagle": {"depth": 2, "layers": [0, 2, 5, 6], "mask_rows": {"token": 1}},
    "medusa": {"num_layers": 2, "bias": True},
}
SERVED = [(kind, engine) for engine, table in ENGINES.items() for kind in KINDS if kind in table]


@cache
def target() -> Any:
    return tiny_target("llama", num_hidden_layers=8)


def exported(folder: Path, kind: str, engine: str, pruned: bool = True, **arguments: Any) -> tuple[Path, Any]:
    parts = target().parts
    vocabulary = DraftVocabulary(KEPT, 64) if pruned else None
    made = drafter_class(kind)(parts, vocabulary, num_slots=4, **(KINDS[kind] | arguments))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    save_drafter(folder / "own", made, target_identity=target().identity)
    given = Source(read_drafter(folder / "own"), "/models/target", torch.float32, lambda: parts.head)
    return export_engine(given, engine, folder / "out").folder, made


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(("kind", "engine"), SERVED)
@pytest.mark.parametrize("pruned", [True, False])
@pytest.mark.parametrize("head", ["own", "target"])
def test_tensors_and_lint(tmp_path: Path, kind: str, engine: str, pruned: bool, head: str) -> None:
    folder, made = exported(tmp_path, kind, engine, pruned, head=head)
    tensors, trained = load_file(folder / "model.safetensors"), made.state_dict()
    if pruned and kind == "peagle":
        assert tensors.pop("d2t").tolist() == [1, 3, 7, 60]
        assert tensors.pop("t2d").sum() == 4
    if pruned and kind == "medusa":
        # All rows: those outside the vocabulary give the mean logit, which is never the best.
        whole = tensors["lm_head.weight"]
        tensors["lm_head.weight"] = whole[KEPT].clone()
        hidden = torch.randn(200, 32, generator=torch.Generator().manual_seed(1))
        assert torch.equal((hidden @ whole.T).argmax(-1), KEPT[(hidden @ whole[KEPT].T).argmax(-1)])
    if head == "target" and (pruned or kind == "medusa"):
        rows = KEPT if pruned else torch.arange(64)
        assert torch.equal(tensors.pop("lm_head.weight"), target().parts.head[rows])
    assert set(tensors) == set(trained)
    assert all(torch.equal(tensor, trained[name]) for name, tensor in tensors.items())
    assert [finding for finding in lint(folder, engine, target().parts.config) if finding.level != "note"] == []


@pytest.mark.parametrize("engine", ["vllm", "vllm_speculators"])
@pytest.mark.parametrize("head", ["own", "target"])
def test_parallel_heads_come_back(tmp_path: Path, engine: str, head: str) -> None:
    folder, made = exported(tmp_path, "peagle", engine, pruned=head == "own", head=head)
    tensors = load_file(folder / "model.safetensors")
    tensors["mask_hidden"] = tensors["mask_hidden"][None]  # as SpecForge writes it
    save_file(tensors, folder / "model.safetensors")
    back, _ = import_head(folder, target().parts, num_slots=4)
    assert {**back.settings(), "mask_rows": None} == {**made.settings(), "mask_rows": None}
    assert back.mask_token == 1
    assert torch.equal(back.vocabulary.ids, made.vocabulary.ids)
    assert all(torch.equal(tensor, made.state_dict()[name]) for name, tensor in back.state_dict().items())


def test_import_refusals(tmp_path: Path) -> None:
    folder, _ = exported(tmp_path / "p", "peagle", "vllm")
    config = config_of(folder)
    (folder / "config.json").write_text(json.dumps(config | {"norm_before_residual": True}))
    with pytest.raises(ValueError, match="norm_before_residual is on"):
        import_head(folder, target().parts)
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(ValueError, match="left over: layers.1"):
        import_head(folder, target().parts)
    with pytest.raises(ValueError, match="is a medusa head"):
        import_head(exported(tmp_path / "m", "medusa", "vllm")[0], target().parts)


def test_settings(tmp_path: Path) -> None:
    folder, _ = exported(tmp_path / "a", "peagle", "vllm")
    config = config_of(folder)
    # vLLM renames any architecture that neither starts nor ends with Eagle3.
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 6, 7]
    assert (config["mask_token_id"], config["num_aux_hidden_states"], config["num_hidden_layers"]) == (1, 4, 2)
    written = json.loads((folder / "headstart.json").read_text())
    assert written["speculative"] == {"method": "eagle3", "parallel_drafting": True}
    assert '"parallel_drafting": true' in written["command"]
    wrapped = config_of(exported(tmp_path / "b", "peagle", "vllm_speculators")[0])
    assert (wrapped["speculators_model_type"], wrapped["mask_token_id"]) == ("peagle", 1)
    medusa = config_of(exported(tmp_path / "c", "medusa", "vllm")[0])
    assert (medusa["num_heads"], medusa["num_hidden_layers"], medusa["medusa_fc_bias"]) == (4, 2, True)
    assert (medusa["vocab_size"], medusa["truncated_vocab_size"], medusa["original_lm_head"]) == (64, 64, True)


@pytest.mark.parametrize(
    ("kind", "config", "tensors", "level", "text"),
    [
        ("peagle", {"mask_token_id": 64}, None, "refused", "mask_token_id is 64"),
        ("peagle", {"num_aux_hidden_states": 3}, None, "refused", "4 layer ids are stated, fc reads 3"),
        ("peagle", {"eagle_aux_hidden_state_layer_ids": [1, 3, 6, 9]}, None, "refused", r"blocks applied, 1\.\.8"),
        ("peagle", {"architectures": ["PEagleDraftModel"]}, None, "refused", "under another name"),
        ("peagle", {"draft_vocab_size": 5}, None, "refused", "lm_head has 4 rows"),
        ("peagle", {}, lambda t: t.pop("mask_hidden"), "wrong", "mask_hidden is missing"),
        ("peagle", {}, lambda t: t.pop("d2t"), "wrong", "there is no d2t"),
        ("peagle", {}, lambda t: t.update(surprise=torch.ones(1)), "refused", "surprise is no parameter"),
        ("medusa", {}, lambda t: t.update(token_map=KEPT), "refused", "token_map is not taken as loaded"),
        ("medusa", {"truncated_vocab_size": 4}, None, "refused", "token_map is not taken as loaded"),
        ("medusa", {"medusa_fc_bias": False}, None, "wrong", "skipped without a word"),
        ("medusa", {"original_lm_head": False}, None, "wrong", "lm_heads.0.weight is missing"),
        ("medusa", {"hidden_size": 64}, None, "refused", "the target's"),
    ],
)
def test_planted_faults(tmp_path: Path, kind: str, config: dict[str, Any], tensors: Any, level: str, text: str) -> None:
    folder, _ = exported(tmp_path, kind, "vllm")
    (folder / "config.json").write_text(json.dumps(config_of(folder) | config))
    if tensors is not None:
        found = load_file(folder / "model.safetensors")
        tensors(found)
        save_file(found, folder / "model.safetensors")
    texts = [finding.text for finding in lint(folder, "vllm", target().parts.config) if finding.level == level]
    assert any(re.search(text, one) for one in texts), texts


def test_other_engines_do_not_run_them(tmp_path: Path) -> None:
    for kind in KINDS:
        folder, _ = exported(tmp_path / kind, kind, "vllm")
        assert lint(folder, "sglang")[0].level == "refused"
        with pytest.raises(ValueError, match=f"sglang does not serve '{kind}'"):
            exported(tmp_path / kind, kind, "sglang")
