"""Each planted fault is named for the engine that has it; our own exports have none."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints.engines import ENGINES, Source, export_engine
from checkpoints.folder import read_drafter, save_drafter
from checkpoints.lint import lint
from drafters.eagle3 import Eagle3
from drafters.vocabulary import DraftVocabulary
from tests.doubles import tiny_target

EAGLE_ENGINES = [engine for engine, table in ENGINES.items() if "eagle3" in table]
IDS = "eagle_aux_hidden_state_layer_ids"
# The last token is in, as in any real draft vocabulary: absolute ids cannot pass as offsets.
KEPT = torch.tensor([1, 4, 9, 63])


def exported(folder: Path, engine: str, pruned: bool = True, **arguments: Any) -> tuple[Path, Any]:
    target = tiny_target("llama", num_hidden_layers=8)
    vocabulary = DraftVocabulary(KEPT, 64) if pruned else None
    drafter = Eagle3(target.parts, vocabulary, num_slots=4, **({"layers": [1, 3, 4]} | arguments))
    save_drafter(folder / "own", drafter, target_identity=target.identity)
    given = Source(read_drafter(folder / "own"), "target", torch.float32, lambda: target.parts.head)
    return export_engine(given, engine, folder / "out").folder, target.parts.config


def levels(findings: list[Any], level: str) -> list[str]:
    return [finding.text for finding in findings if finding.level == level]


def test_our_own_folder_is_named_as_such(tmp_path: Path) -> None:
    exported(tmp_path, "vllm")
    with pytest.raises(ValueError, match="is our own drafter folder, which no engine reads: export it"):
        lint(tmp_path / "own", "vllm")


@pytest.mark.parametrize("engine", EAGLE_ENGINES)
@pytest.mark.parametrize("pruned", [True, False])
@pytest.mark.parametrize("head", ["own", "target"])
@pytest.mark.parametrize("layers", [[1, 3, 4], [0, 2, 5, 7]], ids=["default", "four"])
def test_own_exports_are_clean(tmp_path: Path, engine: str, pruned: bool, head: str, layers: list[int]) -> None:
    folder, config = exported(tmp_path, engine, pruned, head=head, layers=layers)
    assert [finding for finding in lint(folder, engine, config) if finding.level != "note"] == []


@pytest.mark.parametrize(
    ("engine", "config", "tensors", "level", "text"),
    [
        ("vllm", {"num_aux_hidden_states": 4}, None, "refused", "num_aux_hidden_states is 4, fc reads 3"),
        ("vllm", {IDS: [1, 3, 4]}, None, "wrong", "look like outputs"),
        ("vllm", {IDS: None, "eagle_config": {IDS: [1, 3, 4]}}, None, "wrong", "vLLM V1 reads them as blocks applied"),
        ("vllm", {IDS: [2, 4, 9]}, None, "refused", "output 8 is stated, the target has 8 layers"),
        ("sglang", {IDS: [1, 3, 5]}, None, "wrong", "SGLang ignores top-level ids"),
        ("sglang", {"norm_before_residual": True}, None, "wrong", "SGLang ignores it"),
        ("sglang", {"tie_word_embeddings": True}, None, "wrong", "uses the embedding as the draft head"),
        ("vllm", {"draft_vocab_size": 5}, None, "refused", "lm_head has 4 rows, draft_vocab_size is 5"),
        ("vllm", {}, lambda t: t.update(d2t=KEPT), "wrong", "d2t holds absolute ids"),
        ("vllm", {}, lambda t: t.update(d2t=torch.tensor([1, 3, 3, 61])), "refused", r"d2t maps to 1\.\.64"),
        ("vllm", {}, lambda t: t.update(d2t=torch.tensor([1, 3, 3, 2])), "wrong", "two draft ids to one token"),
        ("vllm", {}, lambda t: t.pop("d2t"), "wrong", "no d2t"),
        ("vllm", {"max_position_embeddings": 256}, None, "wrong", "max_position_embeddings is 256, the target's 512"),
        ("vllm", {}, lambda t: t.update(surprise=torch.ones(1)), "refused", "surprise is no parameter"),
        ("sglang", {}, lambda t: t.update(surprise=torch.ones(1)), "wrong", "surprise is unknown and skipped"),
        ("vllm", {}, lambda t: t.update({"fc.bias": torch.ones(32)}), "wrong", "fc.bias is dropped"),
        ("vllm", {}, lambda t: t.pop("midlayer.hidden_norm.weight"), "wrong", "hidden_norm.weight is missing"),
        ("vllm", {"fc_norm": True}, None, "wrong", "fc_norm.0.weight is missing"),
        ("vllm", {"head_dim": 16}, None, "refused", "q_proj.weight is"),
        ("vllm", {"rope_theta": 1.0}, None, "wrong", "differ"),
        ("vllm", {"architectures": ["Eagle4"]}, None, "refused", "architectures"),
        ("vllm", {"torch_dtype": "bfloat16", "dtype": "bfloat16"}, None, "note", "config.json says bfloat16"),
    ],
)
def test_planted_faults(
    tmp_path: Path, engine: str, config: dict[str, Any], tensors: Any, level: str, text: str
) -> None:
    folder, target = exported(tmp_path, engine)
    written = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(written))
    if tensors is not None:
        found = load_file(folder / "model.safetensors")
        tensors(found)
        # d2t alone is at issue: engines never read t2d, and heads without one are common.
        found.pop("t2d")
        save_file(found, folder / "model.safetensors")
    texts = levels(lint(folder, engine, target), level)
    assert any(re.search(text, one) for one in texts), texts


def test_four_features_without_their_count(tmp_path: Path) -> None:
    folder, target = exported(tmp_path, "vllm", layers=[0, 2, 5, 7])
    config = json.loads((folder / "config.json").read_text())
    config.pop("num_aux_hidden_states")
    (folder / "config.json").write_text(json.dumps(config))
    assert any("assumes 3 features, fc reads 4" in text for text in levels(lint(folder, "vllm", target), "refused"))


def test_layouts_are_told_apart(tmp_path: Path) -> None:
    folder, target = exported(tmp_path, "vllm_speculators")
    assert any("does not read the speculators layout" in t for t in levels(lint(folder, "sglang", target), "refused"))
    assert any("speculators layout" in text for text in levels(lint(folder, "vllm", target), "note"))
    with pytest.raises(ValueError, match="unknown engine"):
        lint(folder, "trt", target)
