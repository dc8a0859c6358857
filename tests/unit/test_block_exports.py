"""Block drafters in each engine's layout: what is written, what is refused, what lint sees, what comes back."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, Qwen3Config

from checkpoints.engines import ENGINES, PROVENANCE, Source, export_engine
from checkpoints.folder import drafter_class, read_drafter, save_drafter
from checkpoints.foreign import import_head
from checkpoints.lint import lint
from drafters.vocabulary import DraftVocabulary
from tests.doubles import save_tiny, tiny_model, tiny_target

LAYERS = [0, 2, 5]
KEPT = torch.tensor([1, 4, 9, 63])
SIZES = {"intermediate_size": 56, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
HEADS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dspark": {"rank": 4},
    "domino": {"state": 12, "rank": 4},
    "dflash2": {"candidates": 3, "rank": 4, "taps": 2, "group": 8},
}
SERVED = [(kind, engine) for engine, table in ENGINES.items() for kind in HEADS if kind in table]


@cache
def target() -> Any:
    return tiny_target("llama", num_hidden_layers=8)


def drafter(kind: str, pruned: bool = False, **arguments: Any) -> Any:
    """A random drafter: nothing in it is zero or one, so a lost or swapped tensor shows."""
    block = {"depth": 2, "mask_token": 1, "anchors": None} | arguments.pop("block", {})
    head = HEADS[kind] | arguments.pop("head", {})
    arguments = {"num_slots": 4, "layers": LAYERS, "layer": SIZES} | arguments | ({"head": head} if head else {})
    vocabulary = DraftVocabulary(KEPT, 64) if pruned else None
    made = drafter_class(kind)(target().parts, vocabulary, block=block, **arguments)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return made


def exported(folder: Path, engine: str, made: Any, dtype: torch.dtype = torch.float32) -> Path:
    parts = target()
    save_drafter(folder / "own", made, target_identity=parts.identity)
    given = Source(read_drafter(folder / "own"), "/models/target", dtype, lambda: parts.parts.head)
    return export_engine(given, engine, folder / "out").folder


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def convention(kind: str, engine: str) -> str:
    return "anchor_first" if kind == "dspark" and engine == "sglang" else "fill_in"


@pytest.mark.parametrize(("kind", "engine"), SERVED)
def test_tensors_config_lint_and_import(tmp_path: Path, kind: str, engine: str) -> None:
    """Every tensor is a trained one, config.json rebuilds the layers, lint is silent, and import gives it back."""
    made = drafter(kind, slot_convention=convention(kind, engine))
    folder = exported(tmp_path, engine, made)
    tensors, trained = load_file(folder / "model.safetensors"), made.state_dict()
    unified = {name.replace("encoder.fc", "fc").replace("encoder.output_norm_enc", "hidden_norm") for name in tensors}
    assert unified == set(trained)
    config = config_of(folder)
    body = config.get("transformer_layer_config", config)
    built = Qwen3Config.from_dict(dict(body) | {"model_type": "qwen3"})
    for key, value in (SIZES | {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64}).items():
        assert getattr(built, key) == value
    assert body["rope_theta"] == built.rope_parameters["rope_theta"]
    findings = lint(folder, engine, target().parts.config)
    assert [finding for finding in findings if finding.level != "note"] == []
    back, _ = import_head(folder, target().parts)
    assert back.settings() | {"block": None} == made.settings() | {"block": None}
    assert {**back.block, "anchors": None} == made.block
    assert all(torch.equal(tensor, trained[name]) for name, tensor in back.state_dict().items())


@pytest.mark.parametrize(
    ("kind", "engine"), [(k, e) for k, e in SERVED if e.startswith("vllm") and k in ("dflash", "dspark")]
)
def test_reduced_vocabulary_in_vllm(tmp_path: Path, kind: str, engine: str) -> None:
    made = drafter(kind, pruned=True)
    folder = exported(tmp_path, engine, made)
    tensors = load_file(folder / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], target().parts.head[KEPT])
    assert tensors["d2t"].tolist() == [1, 3, 7, 60]
    assert config_of(folder)["draft_vocab_size"] == 4
    assert [f for f in lint(folder, engine, target().parts.config) if f.level != "note"] == []
    back, _ = import_head(folder, target().parts)
    assert torch.equal(back.vocabulary.ids, KEPT)
    assert all(torch.equal(tensor, made.state_dict()[name]) for name, tensor in back.state_dict().items())


@pytest.mark.parametrize("engine", ["sglang", "transformers"])
def test_engines_with_the_targets_head_alone_draft_every_word(tmp_path: Path, engine: str) -> None:
    made = drafter("dflash", pruned=True)
    parts = target()
    save_drafter(tmp_path / "own", made, target_identity=parts.identity)
    written = export_engine(Source(read_drafter(tmp_path / "own"), "t", torch.float32), engine, tmp_path / "out")
    assert any("from all 64 tokens, not from the drafter's 4" in note for note in written.notes)
    assert not {"lm_head.weight", "d2t"} & set(load_file(written.folder / "model.safetensors"))


def test_ids_blocks_and_commands(tmp_path: Path) -> None:
    plain = config_of(exported(tmp_path / "a", "vllm", drafter("dflash")))
    # Outputs 0, 2, 5 in target_layer_ids; blocks applied 1, 3, 6 in speculators' key. Four slots and the anchor: five.
    assert plain["architectures"] == ["DFlashDraftModel"]
    assert plain["dflash_config"] == {"mask_token_id": 1, "target_layer_ids": [0, 2, 5]}
    assert (plain["block_size"], plain["num_target_layers"], plain["model_type"]) == (5, 8, "qwen3")
    wrapped = config_of(exported(tmp_path / "b", "vllm_speculators", drafter("dflash")))
    assert wrapped["aux_hidden_state_layer_ids"] == [1, 3, 6]
    assert wrapped["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert "sliding_window_non_causal" not in wrapped
    spark = config_of(exported(tmp_path / "c", "sglang", drafter("dspark", slot_convention="anchor_first")))
    assert (spark["block_size"], spark["target_layer_ids"], spark["sample_from_anchor"]) == (4, [0, 2, 5], True)
    assert (spark["markov_rank"], spark["markov_head_type"], spark["confidence_head_with_markov"]) == (
        *(4, "vanilla"),
        True,
    )
    provenance = json.loads((tmp_path / "c" / "out" / PROVENANCE).read_text())
    assert "--speculative-algorithm DSPARK" in provenance["command"]
    assert "--speculative-dspark-block-size 4" in provenance["command"]
    provenance = json.loads((tmp_path / "a" / "out" / PROVENANCE).read_text())
    assert '"method": "dflash"' in provenance["command"]
    assert '"num_speculative_tokens": 4' in provenance["command"]
    assert (provenance["speculative"], provenance["needs"]) == ({"method": "dflash"}, None)


def test_domino_rows_and_slots(tmp_path: Path) -> None:
    """SGLang drafts block_size - 1 tokens in both conventions; anchor-first, the last row is there for the others."""
    first = exported(tmp_path / "a", "sglang", drafter("domino", slot_convention="anchor_first", num_slots=16))
    config = config_of(first)
    assert (config["block_size"], config["dflash_config"]["shift_label"]) == (16, True)
    assert {"projector_type": "domino", "gru_hidden_dim": 12, "emb_dim": 4, "pure_draft_prefix_len": 1}.items() <= (
        config["dflash_config"].items()
    )
    filled = config_of(exported(tmp_path / "b", "sglang", drafter("domino", num_slots=15)))
    assert (filled["block_size"], filled["dflash_config"]["shift_label"]) == (16, False)
    back, _ = import_head(first, target().parts)
    assert (back.num_slots, back.slot_convention) == (16, "anchor_first")


@pytest.mark.parametrize("windowed", [[0, 1], [1]], ids=["all", "mixed"])
def test_windows(tmp_path: Path, windowed: list[int]) -> None:
    made = drafter("dflash", block={"window": 6, "windowed": windowed})
    plain = config_of(exported(tmp_path / "a", "vllm", made))
    types = {0: "full_attention", 1: "full_attention"} | dict.fromkeys(windowed, "sliding_attention")
    assert (plain["layer_types"], plain["sliding_window"], plain["use_sliding_window"]) == ([*types.values()], 6, True)
    back, _ = import_head(tmp_path / "a" / "out", target().parts)
    assert (back.block["window"], back.block["windowed"]) == (6, windowed)
    needs = json.loads((tmp_path / "a" / "out" / PROVENANCE).read_text())["needs"]
    if windowed == [0, 1]:
        assert needs is None
        wrapped = exported(tmp_path / "b", "vllm_speculators", made)
        assert config_of(wrapped)["sliding_window_non_causal"] is False
        back, _ = import_head(wrapped, target().parts)
        assert back.block["windowed"] == windowed
    else:
        assert "V2 model runner" in needs
        with pytest.raises(ValueError, match="one causality for all layers"):
            exported(tmp_path / "b", "vllm_speculators", made)
    with pytest.raises(ValueError, match="not causal inside the block"):
        exported(tmp_path / "c", "transformers", made)


def test_trained_mask_has_a_file_of_its_own(tmp_path: Path) -> None:
    made = drafter("dflash", block={"trained_mask": True})
    folder = exported(tmp_path, "vllm", made)
    assert "mask_embedding" not in load_file(folder / "model.safetensors")
    found = torch.load(folder / "mask_embedding.pt", weights_only=True)
    assert torch.equal(found["embedding"], made.mask_embedding.detach())
    assert found["mask_token_id"] == 1
    back, _ = import_head(folder, target().parts)
    assert torch.equal(back.mask_embedding, made.mask_embedding)
    assert lint(folder, "sglang", None)[0].text.startswith("mask_embedding.pt is not read")
    # Another export into the same folder must not leave the file: the engine would read it.
    save_drafter(tmp_path / "plain", drafter("dflash"), target_identity=target().identity)
    export_engine(Source(read_drafter(tmp_path / "plain"), "t", torch.float32), "vllm", folder)
    assert not (folder / "mask_embedding.pt").exists()


@pytest.mark.parametrize(
    ("kind", "engine", "arguments", "message"),
    [
        ("dflash", "vllm", {"slot_convention": "anchor_first"}, "rejects sample_from_anchor"),
        ("dflash", "sglang", {"slot_convention": "anchor_first"}, "reads mask rows only"),
        ("dflash", "transformers", {"slot_convention": "anchor_first"}, "reads mask rows only"),
        ("dflash", "transformers", {"layers": [0, 2, 7]}, "replaces the last layer's output"),
        ("dflash", "sglang", {"block": {"trained_mask": True}}, "no place for a trained mask"),
        ("dflash2", "vllm", {"pruned": True}, "needs the whole vocabulary, the drafter has 4 of 64"),
        ("dflash2", "sglang", {"slot_convention": "anchor_first"}, "reads mask rows only"),
        ("dspark", "vllm", {"head": {"kind": "gated"}}, "vanilla Markov head alone"),
        ("dspark", "vllm", {"block": {"trained_mask": True}}, "no place for a trained mask"),
        ("dspark", "sglang", {}, "reads the anchor's row as slot 1"),
        ("dspark", "sglang", {"pruned": True, "slot_convention": "anchor_first"}, "needs the whole vocabulary"),
        ("domino", "sglang", {"pruned": True}, "needs the whole vocabulary"),
        ("domino", "vllm", {}, "vllm does not serve 'domino'"),
        ("dspark", "transformers", {}, "transformers does not serve 'dspark'"),
    ],
)
def test_refusals(tmp_path: Path, kind: str, engine: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        exported(tmp_path, engine, drafter(kind, **arguments))


def test_a_target_that_scales_its_embedding_is_refused(tmp_path: Path) -> None:
    parts = target()
    identity = {**parts.identity, "architecture": "Gemma3ForCausalLM"}
    save_drafter(tmp_path / "own", drafter("dflash"), target_identity=identity)
    given = Source(read_drafter(tmp_path / "own"), "t", torch.float32)
    with pytest.raises(ValueError, match="hands the drafter unscaled rows"):
        export_engine(given, "vllm", tmp_path / "out")


def top(**values: Any) -> Any:
    return lambda config: config.update(values)


def nested(**values: Any) -> Any:
    return lambda config: config["dflash_config"].update(values)


def changed(folder: Path, config: Any = None, tensors: Any = None) -> Path:
    written = config_of(folder)
    if config is not None:
        config(written)
    (folder / "config.json").write_text(json.dumps(written))
    if tensors is not None:
        found = load_file(folder / "model.safetensors")
        tensors(found)
        save_file(found, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("kind", "engine", "config", "tensors", "level", "text"),
    [
        ("dflash", "vllm", lambda c: c["dflash_config"].pop("mask_token_id"), None, "refused", "mask_token_id is miss"),
        ("dflash", "vllm", nested(mask_token_id=64), None, "refused", r"is 64, .*0\.\.63"),
        (
            "dflash",
            "vllm",
            nested(mask_token_id=3),
            None,
            "wrong",
            "target's eos_token_id",
        ),
        ("dflash", "vllm", nested(target_layer_ids=[0, 2]), None, "refused", "fc reads 3"),
        (
            "dflash",
            "vllm",
            nested(target_layer_ids=[0, 2, 8]),
            None,
            "refused",
            "8 layers",
        ),
        # Spread over 8 layers, three are outputs 1, 3, 5: the same plus one is the other convention.
        (
            "dflash",
            "vllm",
            nested(target_layer_ids=[2, 4, 6]),
            None,
            "wrong",
            "blocks app",
        ),
        (
            "dflash",
            "vllm_speculators",
            top(aux_hidden_state_layer_ids=[1, 3, 5]),
            None,
            "wrong",
            r"look like outputs: .*\[2, 4, 6\]",
        ),
        ("dflash", "vllm_speculators", top(block_size=4), None, "wrong", "block of 3 slots, .* is 4"),
        ("dflash", "vllm_speculators", lambda c: c.pop("aux_hidden_state_layer_ids"), None, "refused", "is missing"),
        ("dflash", "vllm_speculators", top(sample_from_anchor=True), None, "refused", "anchor's row"),
        ("dflash", "sglang", lambda c: c.pop("block_size"), None, "wrong", "block_size is missing"),
        ("dflash", "vllm", top(num_target_layers=7), None, "wrong", "num_target_layers is 7"),
        ("dflash", "vllm", top(architectures=["Qwen3ForCausalLM"]), None, "refused", "architectures"),
        ("dflash", "vllm", top(head_dim=8), None, "refused", "q_proj.weight is"),
        ("dflash", "vllm", top(num_hidden_layers=1), None, "refused", "layers.1.* is no parameter"),
        ("dflash", "vllm", None, lambda t: t.pop("hidden_norm.weight"), "wrong", "hidden_norm.weight is missing"),
        ("dflash", "vllm", None, lambda t: t.update(surprise=torch.ones(1)), "refused", "surprise is no parameter"),
        ("dflash", "sglang", None, lambda t: t.update(surprise=torch.ones(1)), "wrong", "skipped without a word"),
        ("dflash", "vllm", top(draft_vocab_size=4), None, "wrong", "there is no d2t"),
        ("dspark", "vllm", top(draft_vocab_size=4), None, "refused", "there is no lm_head"),
        ("dspark", "vllm", top(markov_head_type="gated"), None, "refused", "vLLM has vanilla alone"),
        (
            "dflash",
            "vllm",
            top(layer_types=["sliding_attention"] * 2),
            None,
            "refused",
            "window is miss",
        ),
        (
            "dflash",
            "vllm",
            None,
            lambda t: t.update({"context_proj.weight": t.pop("fc.weight")}),
            "refused",
            "context_proj.weight is fc.weight elsewhere",
        ),
        ("domino", "sglang", nested(pure_draft_prefix_len=2), None, "refused", "pure_draft_prefix_len is not 1"),
    ],
)
def test_planted_faults(
    tmp_path: Path, kind: str, engine: str, config: Any, tensors: Any, level: str, text: str
) -> None:
    folder = changed(exported(tmp_path, engine, drafter(kind)), config, tensors)
    texts = [f.text for f in lint(folder, engine, target().parts.config) if f.level == level]
    assert any(re.search(text, one) for one in texts), texts


def test_what_needs_the_other_runner_is_noted(tmp_path: Path) -> None:
    folder = exported(tmp_path, "vllm", drafter("dspark"))
    assert any("V2 model runner (dspark)" in finding.text for finding in lint(folder, "vllm", None))
    assert any(
        "vllm has no domino" in f.text for f in lint(exported(tmp_path / "d", "sglang", drafter("domino")), "vllm")
    )


# Folders as other tools write them
# ----------------------------------------------------------------------------------------------------------------------


def foreign(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    body = {"model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "rms_norm_eps": 1e-6}
    sizes = SIZES | {"max_position_embeddings": 512, "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(body | sizes | {"num_target_layers": 8} | config))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


NESTED = {"mask_token_id": 1, "target_layer_ids": LAYERS}
MARKOV = {
    "markov_rank": 4,
    "markov_head_type": "rnn",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


@pytest.mark.parametrize(
    ("kind", "arguments", "config"),
    [
        ("dflash", {}, {"architectures": ["DFlashDraftModel"], "block_size": 5, "dflash_config": NESTED}),
        # DeepSpec: flat keys, copies of embedding and head, its class for DFlash too.
        (
            "dspark",
            {"slot_convention": "anchor_first", "head": {"kind": "rnn"}},
            {"architectures": ["Qwen3DSparkModel"], "block_size": 4, "num_anchors": 512} | NESTED | MARKOV,
        ),
        (
            "dflash",
            {"slot_convention": "anchor_first"},
            {"architectures": ["Qwen3DSparkModel"], "block_size": 4, "markov_rank": 0} | NESTED,
        ),
        # SpecForge: all keys nested.
        (
            "dspark",
            {"slot_convention": "anchor_first", "head": {"kind": "rnn"}},
            {
                "architectures": ["DSparkDraftModel"],
                "block_size": 4,
                "dflash_config": NESTED | MARKOV | {"projector_type": "dspark"},
            },
        ),
        (
            "domino",
            {"slot_convention": "anchor_first"},
            {
                "architectures": ["DominoDraftModel"],
                "block_size": 4,
                "emb_dim": 4,
                "dflash_config": NESTED | {"projector_type": "domino", "gru_hidden_dim": 12, "shift_label": True},
            },
        ),
    ],
    ids=["z_lab", "deepspec", "deepspec_dflash", "specforge", "specforge_domino"],
)
def test_foreign_layouts(tmp_path: Path, kind: str, arguments: dict[str, Any], config: dict[str, Any]) -> None:
    made = drafter(kind, **arguments)
    tensors = dict(made.state_dict())
    if config["architectures"] == ["Qwen3DSparkModel"]:
        parts = target().parts
        tensors |= {"embed_tokens.weight": parts.embedding, "lm_head.weight": parts.head}
    back, notes = import_head(foreign(tmp_path, config, tensors), target().parts)
    assert {**back.settings(), "block": None} == {**made.settings(), "block": None}
    assert all(torch.equal(tensor, made.state_dict()[name]) for name, tensor in back.state_dict().items())
    assert any(f"target layers {LAYERS} (stated)" in note for note in notes)


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({}, lambda t: t.update(surprise=torch.ones(1)), "left over: surprise"),
        ({}, lambda t: t.pop("norm.weight"), "missing: norm.weight"),
        ({"attention_bias": True}, None, "attention_bias is on"),
        ({"is_causal": True}, None, "its full layers are causal"),
        ({"input_embedding_scale": 2.0}, None, "input_embedding_scale is 2.0"),
        ({"hidden_size": 64}, None, "hidden_size is 64, the target's 32"),
        ({"head_dim": 8}, None, "wrong shape: .*q_proj"),
        ({"dflash_config": NESTED | {"target_layer_ids": [0, 2, 8]}}, None, r"ids in 0\.\.7"),
        ({"dflash_config": NESTED | {"mask_token_id": None}}, None, "mask_token_id is missing"),
        ({}, lambda t: t.update({"lm_head.weight": torch.ones(64, 32)}), "lm_head.weight of its own"),
        ({"block_size": None}, None, "states no block_size"),
    ],
)
def test_foreign_refusals(tmp_path: Path, config: dict[str, Any], tensors: Any, message: str) -> None:
    found = dict(drafter("dflash").state_dict())
    if tensors is not None:
        tensors(found)
    base = {"architectures": ["DFlashDraftModel"], "block_size": 5, "dflash_config": NESTED}
    with pytest.raises(ValueError, match=message):
        import_head(foreign(tmp_path, base | config, found), target().parts)


def test_layer_convention_and_slots_must_fit(tmp_path: Path) -> None:
    config = {"architectures": ["DFlashDraftModel"], "block_size": 5, "dflash_config": NESTED}
    folder = foreign(tmp_path, config, dict(drafter("dflash").state_dict()))
    with pytest.raises(ValueError, match="layer_convention is for EAGLE-3"):
        import_head(folder, target().parts, layer_convention="outputs")
    with pytest.raises(ValueError, match="trained for 4 slots, num_slots is 7"):
        import_head(folder, target().parts, num_slots=7)


# transformers' own generation
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_transformers_generates_with_it(tmp_path: Path) -> None:
    """generate(speculation_type="dflash") takes the folder, and its greedy text is the target's own."""
    model = tiny_model("llama", num_hidden_layers=8)
    assistant = AutoModel.from_pretrained(exported(tmp_path, "transformers", drafter("dflash")))
    assert type(assistant).__name__ == "MuseGlimmerAssistantModel"
    ids = torch.tensor([[2, 9, 14, 5]])
    positions = torch.arange(ids.shape[1])[None]
    common = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    alone = model.generate(ids, **common)
    drafted = model.generate(
        ids, position_ids=positions, assistant_model=assistant, speculation_type="dflash", **common
    )
    assert torch.equal(drafted, alone)


def test_export_of_a_saved_target_names_it(tmp_path: Path) -> None:
    save_tiny(tmp_path / "target", "llama", num_hidden_layers=8)
    save_drafter(tmp_path / "own", drafter("dflash"), target_identity=target().identity)
    given = Source(read_drafter(tmp_path / "own"), str(tmp_path / "target"), torch.bfloat16)
    folder = export_engine(given, "vllm_speculators", tmp_path / "out").folder
    assert config_of(folder)["speculators_config"]["verifier"]["name_or_path"] == str(tmp_path / "target")
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
