"""What each engine gets: tensors equal to trained or target tensors, and a config that alone rebuilds rope, layers,
slots."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from transformers import LlamaConfig

from checkpoints.engine_run import Served
from checkpoints.engines import ENGINES, PROVENANCE, Source, export_engine
from checkpoints.export import execute
from checkpoints.files import read_tensors
from checkpoints.folder import read_drafter, save_drafter
from checkpoints.target_files import target_head
from checkpoints.verify import Reference, compare, conditional, verify
from drafters.eagle3 import Eagle3
from drafters.vocabulary import DraftVocabulary
from tests.doubles import save_tiny, tiny_target

EAGLE_ENGINES = [engine for engine, table in ENGINES.items() if "eagle3" in table]
WIDE = {"hidden_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 777.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def source(
    folder: Path, target: Any, dtype: torch.dtype = torch.float32, pruned: bool = True, **arguments: Any
) -> Source:
    vocabulary = DraftVocabulary(torch.arange(1, 64, 2), 64) if pruned else None
    drafter = Eagle3(target.parts, vocabulary, num_slots=4, **({"layers": [0, 2, 4]} | arguments))
    save_drafter(folder, drafter, target_identity=target.identity)
    return Source(read_drafter(folder), "/models/target", dtype, lambda: target.parts.head)


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("engine", EAGLE_ENGINES)
@pytest.mark.parametrize("head", ["own", "target"])
@pytest.mark.parametrize("pruned", [True, False])
@pytest.mark.parametrize("shape", [{}, WIDE], ids=["plain", "wide_heads"])
def test_every_tensor_is_a_trained_or_target_one(
    tmp_path: Path, engine: str, head: str, pruned: bool, shape: dict[str, int]
) -> None:
    target = tiny_target("llama", **shape)
    given = source(tmp_path / "own", target, pruned=pruned, head=head)
    exported = export_engine(given, engine, tmp_path / "out")
    tensors = read_tensors(exported.folder / "model.safetensors")
    trained = dict(given.whole.tensors)
    if pruned:
        assert tensors.pop("d2t").tolist() == [i + 1 for i in range(32)]
        assert tensors.pop("t2d").sum() == 32
        if head == "target":
            trained["lm_head.weight"] = target.parts.head[1::2]
    assert set(tensors) == set(trained)
    assert all(torch.equal(tensor, trained[name]) for name, tensor in tensors.items())


@pytest.mark.parametrize("engine", EAGLE_ENGINES)
@pytest.mark.parametrize("shape", [{}, WIDE], ids=["plain", "wide_heads"])
def test_config_alone_rebuilds_the_layer(tmp_path: Path, engine: str, shape: dict[str, int]) -> None:
    target = tiny_target("llama", **shape)
    given = source(tmp_path / "own", target, layer={"rope_parameters": LLAMA3, "intermediate_size": 56})
    config = config_of(export_engine(given, engine, tmp_path / "out").folder)
    body = config.get("transformer_layer_config", config)
    built = LlamaConfig.from_dict(dict(body))
    assert built.rope_parameters == LLAMA3
    wanted = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8} | shape
    for key, value in (wanted | {"intermediate_size": 56, "vocab_size": 64, "num_hidden_layers": 1}).items():
        assert getattr(built, key) == value
    assert built.max_position_embeddings == 512
    assert built.num_aux_hidden_states == 3
    assert built.tie_word_embeddings is False
    # Both spellings of rope stand in the file.
    assert body["rope_theta"] == 777.0
    assert body["rope_scaling"]["factor"] == 8.0
    assert config["draft_vocab_size"] == 32


def test_layer_ids_by_engine(tmp_path: Path) -> None:
    given = source(tmp_path / "own", tiny_target())
    plain = config_of(export_engine(given, "vllm", tmp_path / "vllm").folder)
    wrapped = config_of(export_engine(given, "vllm_speculators", tmp_path / "speculators").folder)
    sglang = config_of(export_engine(given, "sglang", tmp_path / "sglang").folder)
    # Ours are outputs 0, 2, 4: blocks applied 1, 3, 5 for vLLM; SGLang's nested ids are outputs, it ignores the top
    # level.
    assert plain["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert "eagle_config" not in plain
    assert wrapped["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert sglang["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 4]
    assert "eagle_aux_hidden_state_layer_ids" not in sglang


def test_default_layers_need_no_ids_in_sglang(tmp_path: Path) -> None:
    given = source(tmp_path / "own", tiny_target("llama", num_hidden_layers=8), layers=[1, 3, 4])
    assert "eagle_config" not in config_of(export_engine(given, "sglang", tmp_path / "out").folder)
    assert config_of(export_engine(given, "vllm", tmp_path / "v").folder)["eagle_aux_hidden_state_layer_ids"] == [
        2,
        4,
        5,
    ]


def test_switches_and_dtype(tmp_path: Path) -> None:
    switches = {"fc_norm": True, "norm_output": True, "norm_before_residual": True}
    given = source(tmp_path / "own", tiny_target(), torch.bfloat16, switches=switches)
    for engine in ("vllm", "vllm_speculators"):
        folder = export_engine(given, engine, tmp_path / engine).folder
        config = config_of(folder)
        assert {key: config[key] for key in switches} == switches
        assert config["norm_before_fc"] is False
        assert config["dtype"] == config["torch_dtype"] == "bfloat16"
        tensors = read_tensors(folder / "model.safetensors")
        assert {t.dtype for name, t in tensors.items() if name not in ("d2t", "t2d")} == {torch.bfloat16}
        assert {"fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight"} <= set(tensors)
    # The speculators layout reads a missing norm_before_residual as true, so false is written out.
    off = source(tmp_path / "off", tiny_target())
    assert config_of(export_engine(off, "vllm_speculators", tmp_path / "o").folder)["norm_before_residual"] is False


def test_refusals_name_the_reason(tmp_path: Path) -> None:
    given = source(tmp_path / "a", tiny_target(), switches={"norm_before_residual": True})
    with pytest.raises(ValueError, match="ignores norm_before_residual"):
        export_engine(given, "sglang", tmp_path / "out")
    given = source(tmp_path / "b", tiny_target(), layers=[2])
    with pytest.raises(ValueError, match="skips fc"):
        export_engine(given, "sglang", tmp_path / "out")
    with pytest.raises(ValueError, match="unknown engine 'trt'"):
        export_engine(given, "trt", tmp_path / "out")
    with pytest.raises(ValueError, match="overwrite the drafter"):
        export_engine(given, "vllm", tmp_path / "b")
    assert not (tmp_path / "out").exists()


def test_serve_commands(tmp_path: Path) -> None:
    given = source(tmp_path / "own", tiny_target())
    out = tmp_path / "out"
    assert export_engine(given, "vllm", out).command == (
        "vllm serve /models/target --speculative-config "
        f'\'{{"method": "eagle3", "model": "{out}", "num_speculative_tokens": 4}}\''
    )
    assert export_engine(given, "vllm_speculators", out).command == f"vllm serve {out}"
    assert config_of(out)["speculators_config"]["verifier"]["name_or_path"] == "/models/target"
    assert config_of(out)["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    command = export_engine(given, "sglang", out).command
    assert "--speculative-algorithm EAGLE3" in command
    assert "--speculative-num-steps 4 --speculative-eagle-topk 1 --speculative-num-draft-tokens 5" in command


@pytest.mark.parametrize("tied", [True, False])
def test_target_head_is_read_from_files(tmp_path: Path, tied: bool) -> None:
    save_tiny(tmp_path, "llama", tie_word_embeddings=tied)
    assert torch.equal(target_head(str(tmp_path)), tiny_target("llama", tie_word_embeddings=tied).parts.head)


def test_export_entry_writes_and_refuses_unread_keys(tmp_path: Path) -> None:
    source(tmp_path / "own", tiny_target(), switches={"norm_before_residual": True})
    config = OmegaConf.create(
        {
            "action": "export",
            "drafter_dir": str(tmp_path / "own"),
            "target_path": "/models/target",
            "dtype": None,
            "num_slots": None,
            "layer_convention": None,
            "reference": None,
            "tolerance": 0.02,
            "engine": {"name": "vllm"},
        }
    )
    execute(config, tmp_path / "run")
    assert config_of(tmp_path / "run" / "vllm")["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (tmp_path / "run" / "run.json").exists()
    linted = OmegaConf.merge(
        config, {"action": "lint", "drafter_dir": str(tmp_path / "run" / "vllm"), "target_path": None}
    )
    execute(linted, tmp_path / "lint")
    with pytest.raises(SystemExit, match="fault"):
        execute(OmegaConf.merge(linted, {"engine": {"name": "sglang"}}), tmp_path / "lint")
    with pytest.raises(ValueError, match="tyop"):
        execute(OmegaConf.merge(config, {"tyop": 1}), tmp_path / "run")
    with pytest.raises(ValueError, match="action must be one of"):
        execute(OmegaConf.merge(config, {"action": "ship"}), tmp_path / "run")
    verified = OmegaConf.merge(config, {"action": "verify", "engine": {"name": "vllm", "python": "/nowhere"}})
    with pytest.raises(ValueError, match="needs reference=FILE"):
        execute(verified, tmp_path / "run")
    with pytest.raises(ValueError, match="needs the target's weights"):
        execute(OmegaConf.merge(config, {"action": "import"}), tmp_path / "run")


def test_verify_counts_as_engines_do() -> None:
    # 10 rounds; slot 1 accepted in 8, slot 2 in 4, slot 3 in 0: tau = 1 + 12 / 10, alpha = 8/10, 4/8, 0/4.
    drafted = Served(
        "drafted", [[1, 2], [3]], 2.0, 1.0, drafts=10, drafted=30, accepted=12, accepted_per_slot=[8, 4, 0]
    )
    alone = Served("alone", [[1, 2], [4]], 4.0, 1.0)
    reference = Reference([[5], [6]], 2, 3, tau=2.0, outputs=[[1, 2], [3]])
    found = compare("vllm", alone, drafted, reference, tolerance=0.02)
    assert found.tau == pytest.approx(2.2)
    assert found.difference == pytest.approx(0.1)
    assert not found.agrees
    assert compare("vllm", alone, drafted, reference, tolerance=0.11).agrees
    assert found.alpha == pytest.approx([0.8, 0.5, 0.0])
    assert found.speedup == pytest.approx(2.0)
    assert (found.same_as_alone, found.same_as_ours, found.prompts) == (1, 2, 2)
    assert conditional([3, 0, 0], 6) == [0.5, 0.0, 0.0]
    with pytest.raises(RuntimeError, match="no draft round"):
        compare("vllm", alone, alone, reference, tolerance=0.02)


def test_verify_serves_as_the_export_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The method is the export's own; what a failed start lacks is said; an engine that is not run here is refused."""
    given = source(tmp_path / "own", tiny_target())
    folder = export_engine(given, "vllm", tmp_path / "out").folder
    reference, seen = Reference([[5]], 2, 3, tau=2.0), []

    def serve(runs: list[Any], python: Path, timeout_s: float) -> list[Served]:
        seen.extend(run.speculative for run in runs)
        return [Served("alone", [[1, 2]], 1.0), Served("drafted", error="NotImplementedError: no")]

    monkeypatch.setattr("checkpoints.verify.serve", serve)
    with pytest.raises(RuntimeError, match=r"\(drafted\): NotImplementedError"):
        verify(folder, "target", reference, Path("python"))
    assert seen == [None, {"method": "eagle3", "model": str(folder.resolve()), "num_speculative_tokens": 3}]
    written = json.loads((folder / PROVENANCE).read_text()) | {"needs": "the other runner"}
    (folder / PROVENANCE).write_text(json.dumps(written))
    with pytest.raises(RuntimeError, match="this export needs the other runner; NotImplementedError"):
        verify(folder, "target", reference, Path("python"))
    sglang = export_engine(given, "sglang", tmp_path / "sglang").folder
    with pytest.raises(ValueError, match="sglang, which is not run from here"):
        verify(sglang, "target", reference, Path("python"))


def test_reference_is_read_strictly(tmp_path: Path) -> None:
    path = tmp_path / "reference.json"
    path.write_text(json.dumps({"prompts": [[1]], "max_tokens": 4, "num_slots": 2, "surprise": 1}))
    with pytest.raises(ValueError, match="unknown key.*surprise.*missing tau"):
        Reference.read(path)
    path.write_text(json.dumps({"prompts": [[1]], "max_tokens": 4, "num_slots": 2, "tau": 1.5}))
    assert Reference.read(path).tau == 1.5
