"""Native MTP heads: read from checkpoints written by hand from the layouts' name tables, put back, and refused where an
engine would run them otherwise than they were trained."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from checkpoints import verify as verifying
from checkpoints.engine_run import Run, Served
from checkpoints.engines import PROVENANCE, Source, export_engine
from checkpoints.export import execute
from checkpoints.folder import CARD, Whole, drafter_class, read_drafter, save_drafter
from checkpoints.lint import lint
from checkpoints.native import extract, stitch
from checkpoints.native_layouts import MODEL_TYPES
from checkpoints.target_files import target_config
from drafters.vocabulary import DraftVocabulary
from tests.doubles import FAMILIES, tiny_model, tiny_target

D, V, L = 32, 64, 5
NORMS = {"input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,)}
GROUPED = {f"self_attn.{p}_proj.weight": s for p, s in (("q", (D, D)), ("k", (16, D)), ("v", (16, D)), ("o", (D, D)))}
LATENT = {
    "self_attn.q_a_proj.weight": (16, D),
    "self_attn.q_a_layernorm.weight": (16,),
    "self_attn.q_b_proj.weight": (64, 16),
    "self_attn.kv_a_proj_with_mqa.weight": (24, D),
    "self_attn.kv_a_layernorm.weight": (16,),
    "self_attn.kv_b_proj.weight": (64, 16),
    "self_attn.o_proj.weight": (D, D),
}
INDEXER = {
    "self_attn.indexer.wq_b.weight": (128, 16),
    "self_attn.indexer.wk.weight": (16, D),
    "self_attn.indexer.k_norm.weight": (16,),
    "self_attn.indexer.k_norm.bias": (16,),
    "self_attn.indexer.weights_proj.weight": (8, D),
}
BIASES = {"self_attn.q_proj.bias": (D,), "self_attn.k_proj.bias": (16,), "self_attn.v_proj.bias": (16,)}
GATED = {"self_attn.q_norm.weight": (8,), "self_attn.k_norm.weight": (8,), "self_attn.q_proj.weight": (64, D)}


def gated_mlp(before: str, inner: int) -> dict[str, tuple[int, ...]]:
    sizes = (("gate", (inner, D)), ("up", (inner, D)), ("down", (D, inner)))
    return {f"{before}{part}_proj.weight": size for part, size in sizes}


EXPERTS = {name: size for i in range(4) for name, size in gated_mlp(f"mlp.experts.{i}.", 16).items()}
ROUTED = EXPERTS | {"mlp.gate.weight": (4, D)}
SHARED = gated_mlp("mlp.shared_experts.", 16) | {"mlp.gate.e_score_correction_bias": (4,)}
SHARED_EXPERT = gated_mlp("mlp.shared_expert.", 16) | {"mlp.shared_expert_gate.weight": (1, D)}
FUSION = {"enorm.weight": (D,), "hnorm.weight": (D,), "eh_proj.weight": (D, 2 * D), "shared_head.norm.weight": (D,)}
COPIES = {"embed_tokens.weight": (V, D), "shared_head.head.weight": (V, D)}


def before(root: str, *tables: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {root + name: size for table in tables for name, size in table.items()}


HEADS = {
    "deepseek_v3": before("model.layers.5.", FUSION, COPIES, NORMS, LATENT, ROUTED, SHARED),
    "glm_moe_dsa": before("model.layers.5.", FUSION, COPIES, NORMS, LATENT | INDEXER, ROUTED, SHARED),
    "glm4_moe": before("model.layers.5.", FUSION, NORMS, GROUPED, ROUTED, SHARED),
    "qwen3_next": before(
        "mtp.", {"fc.weight": (D, 2 * D), "norm.weight": (D,)}, dict.fromkeys(("pre_fc_norm_embedding.weight",), (D,))
    )
    | {"mtp.pre_fc_norm_hidden.weight": (D,)}
    | before("mtp.layers.0.", NORMS, GROUPED | GATED, ROUTED, SHARED_EXPERT),
    "mimo": before(
        "model.mtp_layers.0.",
        dict.fromkeys(("token_layernorm.weight", "hidden_layernorm.weight", "final_layernorm.weight"), (D,)),
        {"input_proj.weight": (D, 2 * D)},
        *(NORMS, GROUPED, BIASES, gated_mlp("mlp.", 48)),
    ),
}
HEADS["two_modules"] = HEADS["deepseek_v3"] | before("model.layers.6.", FUSION, NORMS, LATENT, ROUTED, SHARED)
FAMILY = {"mimo": "qwen2", "two_modules": "deepseek_v3"}
HYBRID = (  # linear attention but for every fourth layer; no family of tests.doubles, whose checks ask for five layers
    "qwen3_next",
    {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    | {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    | {"num_hidden_layers": 4},
)
OWN = {  # by hand, of each layout's first module
    "deepseek_v3": ("model.layers.5.eh_proj.weight", "model.layers.5.self_attn.kv_b_proj.weight"),
    "glm_moe_dsa": ("model.layers.5.eh_proj.weight", "model.layers.5.self_attn.kv_b_proj.weight"),
    "glm4_moe": ("model.layers.5.eh_proj.weight", "model.layers.5.self_attn.k_proj.weight"),
    "qwen3_next": ("mtp.fc.weight", "mtp.layers.0.self_attn.k_proj.weight"),
    "mimo": ("model.mtp_layers.0.input_proj.weight", "model.mtp_layers.0.self_attn.k_proj.weight"),
    "two_modules": ("model.layers.5.eh_proj.weight", "model.layers.5.self_attn.kv_b_proj.weight"),
}
SETTINGS = {  # concat, reads, recycles, zero_first as vLLM 0.32 serves them
    "deepseek_v3": ("embedding_first", "post_norm", "post_norm", True),
    "two_modules": ("embedding_first", "post_norm", "post_norm", True),
    "glm_moe_dsa": ("embedding_first", "post_norm", "post_norm", True),
    "glm4_moe": ("embedding_first", "post_norm", "pre_norm", True),
    "qwen3_next": ("embedding_first", "post_norm", "post_norm", False),
    "mimo": ("hidden_first", "pre_norm", "post_norm", True),
}
IDENTITY = {"name": "tiny", "weights": "w", "tokenizer": "t", "hidden_size": D, "vocab_size": V}


def shards(folder: Path, tensors: dict[str, torch.Tensor], count: int = 3) -> None:
    """Tensors dealt round over `count` files, and their index."""
    names = sorted(tensors)
    places = {}
    for i in range(count):
        file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        mine = {name: tensors[name] for name in names[i::count]}
        save_file(mine, folder / file, {"format": "pt", "shard": str(i)})
        places |= dict.fromkeys(mine, file)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": places})
    (folder / "model.safetensors.index.json").write_text(text)


def write_checkpoint(folder: Path, kind: str) -> Path:
    """A random target in bf16 (its tensors as transformers names them) with a head whose names stand above."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "qwen3_next", HYBRID)
        model = tiny_model(FAMILY.get(kind, kind)).to(torch.bfloat16)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    random = torch.Generator().manual_seed(7)
    for name, size in HEADS[kind].items():
        tensors[name] = torch.randn(size, generator=random).to(torch.bfloat16)
        if name.endswith("e_score_correction_bias"):
            tensors[name] = torch.randn(size, generator=random)  # real checkpoints keep it in float32
    if kind in ("deepseek_v3", "two_modules", "glm_moe_dsa"):
        tensors["model.layers.5.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.5.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    shards(folder, tensors)
    config = json.loads((folder / "config.json").read_text())
    config["num_nextn_predict_layers"] = 2 if kind == "two_modules" else 1
    if kind == "mimo":
        config["architectures"] = ["MiMoForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text('{"x": 1}')
    return folder


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("targets")
    return {kind: write_checkpoint(root / kind, kind) for kind in HEADS}


@pytest.fixture(scope="module")
def extracted(targets: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Whole]:
    root = tmp_path_factory.mktemp("extracted")
    for kind, target in targets.items():
        extract(target, root / kind, target_config(str(target)), IDENTITY | {"num_layers": depth(kind)})
    return {kind: read_drafter(root / kind) for kind in targets}


def depth(kind: str) -> int:
    return 4 if kind == "qwen3_next" else L


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in (PROVENANCE, CARD)}


def edited(whole: Whole, **changed: Any) -> Whole:
    """The same drafter with other settings."""
    settings = whole.declared.settings | changed
    return replace(whole, declared=replace(whole.declared, settings=settings))


@pytest.mark.parametrize("kind", list(HEADS))
def test_extracted_head_has_our_names_and_the_target_s_values(
    kind: str, targets: dict[str, Path], extracted: dict[str, Whole]
) -> None:
    native, ours, settings = all_tensors(targets[kind]), extracted[kind].tensors, extracted[kind].declared.settings
    projection, keys = (native[name] for name in OWN[kind])
    assert torch.equal(ours["eh_proj.weight"].bfloat16(), projection)
    name = OWN[kind][1].split("self_attn.")[1]
    assert torch.equal(ours[f"block.self_attn.{name}"].bfloat16(), keys)
    assert tuple(settings[key] for key in ("concat", "reads", "recycles", "zero_first")) == SETTINGS[kind]
    assert settings["modules"] == (2 if kind == "two_modules" else 1)
    root = {"qwen3_next": "mtp.layers.0.", "mimo": ""}.get(kind, "model.layers.5.")
    if root:
        second = [native[f"{root}mlp.experts.2.{part}_proj.weight"] for part in ("gate", "up", "down")]
        assert torch.equal(ours["block.mlp.experts.gate_up_proj"][2].bfloat16(), torch.cat(second[:2]))
        assert torch.equal(ours["block.mlp.experts.down_proj"][2].bfloat16(), second[2])
    assert not [name for name in ours if "embed" in name or "head" in name]
    if kind == "two_modules":
        other = native["model.layers.6.eh_proj.weight"]
        assert torch.equal(ours["more.0.eh_proj.weight"].bfloat16(), other)
        assert not torch.equal(other, projection)


def test_norms_of_qwen_are_multiplied_as_stored_plus_one(targets: dict[str, Path], extracted: dict[str, Whole]) -> None:
    native, ours = all_tensors(targets["qwen3_next"]), extracted["qwen3_next"].tensors
    for own, name in (("enorm", "pre_fc_norm_embedding"), ("hnorm", "pre_fc_norm_hidden"), ("norm", "norm")):
        assert torch.equal(ours[f"{own}.weight"], native[f"mtp.{name}.weight"].float() + 1)
    # The layer's own norms are the target's own class, which adds the one itself.
    stored = native["mtp.layers.0.input_layernorm.weight"]
    assert torch.equal(ours["block.input_layernorm.weight"], stored.float())


@pytest.mark.parametrize("kind", list(HEADS))
def test_an_untouched_head_gives_the_same_bytes(
    kind: str, targets: dict[str, Path], extracted: dict[str, Whole], tmp_path: Path
) -> None:
    stitch(extracted[kind], targets[kind], tmp_path / "out")
    assert contents(tmp_path / "out") == contents(targets[kind])
    assert not [path for path in (tmp_path / "out").iterdir() if path.is_symlink()]


@pytest.mark.parametrize("kind", list(HEADS))
def test_after_training_only_the_changed_tensors_differ(
    kind: str, targets: dict[str, Path], extracted: dict[str, Whole], tmp_path: Path
) -> None:
    ours = {name: tensor.clone() for name, tensor in extracted[kind].tensors.items()}
    wanted = {OWN[kind][0], {"qwen3_next": "mtp.norm.weight"}.get(kind, OWN[kind][1])}
    ours["eh_proj.weight"] += 1
    if kind == "qwen3_next":
        ours["norm.weight"] += 1
    else:
        ours["block.self_attn." + OWN[kind][1].split("self_attn.")[1]] *= 2
    if kind != "mimo":
        ours["block.mlp.experts.down_proj"][3] += 1
        root = "mtp.layers.0." if kind == "qwen3_next" else "model.layers.5."
        wanted.add(f"{root}mlp.experts.3.down_proj.weight")
    trained = replace(extracted[kind], tensors=ours)
    stitch(trained, targets[kind], tmp_path / "out", link=True)
    old, new = all_tensors(targets[kind]), all_tensors(tmp_path / "out")
    assert {name for name in old if not torch.equal(old[name], new[name])} == wanted
    assert {name: tensor.dtype for name, tensor in new.items()} == {name: old[name].dtype for name in old}
    assert torch.equal(new[OWN[kind][0]], (old[OWN[kind][0]].float() + 1).bfloat16())
    if kind == "qwen3_next":
        assert torch.equal(new["mtp.norm.weight"], ((old["mtp.norm.weight"].float() + 1 + 1) - 1).bfloat16())
    # Links stand for what did not change, so the target's own files are never written through them.
    assert (tmp_path / "out" / "tokenizer_config.json").is_symlink()
    again = extract(
        tmp_path / "out", tmp_path / "again", target_config(str(tmp_path / "out")), IDENTITY | {"num_layers": 5}
    )
    read = read_drafter(again.folder).tensors
    assert all(torch.equal(read[name].bfloat16(), ours[name].bfloat16()) for name in ours if "norm" not in name)


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        *(("deepseek_v3", "concat", "hidden_first"), ("mimo", "concat", "embedding_first")),
        *(("deepseek_v3", "reads", "pre_norm"), ("mimo", "reads", "post_norm")),
        *(("glm4_moe", "recycles", "post_norm"), ("qwen3_next", "recycles", "pre_norm")),
        *(("qwen3_next", "zero_first", True), ("two_modules", "modules", 1)),
    ],
)
def test_a_head_trained_otherwise_than_served_is_refused(
    kind: str, key: str, value: Any, targets: dict[str, Path], extracted: dict[str, Whole], tmp_path: Path
) -> None:
    served = extracted[kind].declared.settings[key]
    with pytest.raises(ValueError, match=rf"{key}: the drafter has {value!r}, vllm serves {served!r}"):
        stitch(edited(extracted[kind], **{key: value}), targets[kind], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_engine_serves_another_state(
    targets: dict[str, Path], extracted: dict[str, Whole], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="recycles: the drafter has 'pre_norm', sglang serves 'post_norm'"):
        stitch(extracted["glm4_moe"], targets["glm4_moe"], tmp_path / "out", engine="sglang")
    extract(
        targets["glm4_moe"],
        tmp_path / "own",
        target_config(str(targets["glm4_moe"])),
        IDENTITY | {"num_layers": 5},
        engine="sglang",
    )
    stitch(read_drafter(tmp_path / "own"), targets["glm4_moe"], tmp_path / "out", engine="sglang")
    with pytest.raises(ValueError, match="transformers is not known"):
        stitch(extracted["glm4_moe"], targets["glm4_moe"], tmp_path / "out", engine="transformers")


def test_what_no_engine_shares_is_refused(
    targets: dict[str, Path], extracted: dict[str, Whole], tmp_path: Path
) -> None:
    whole = extracted["mimo"]
    sharing = whole.declared.settings["sharing"]
    for changed in ({"share": "kv"}, {"top": 4}):
        with pytest.raises(ValueError, match="sharing: the drafter has"):
            stitch(edited(whole, sharing=sharing | changed), targets["mimo"], tmp_path / "out")
    reduced = replace(whole, vocabulary=DraftVocabulary(torch.arange(8), V))
    with pytest.raises(ValueError, match="the drafter has 8 tokens, vllm drafts all 64"):
        stitch(reduced, targets["mimo"], tmp_path / "out")


def test_shared_indices_are_those_that_the_engine_shares(targets: dict[str, Path], tmp_path: Path) -> None:
    """GLM-5.2's config lets later steps keep to what the first one's indexer chose; the first GLM-5's does not."""
    folder = shutil.copytree(targets["glm_moe_dsa"], tmp_path / "target")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"index_share_for_mtp_iteration": True}))
    take_out_of(folder, tmp_path / "own")
    whole = read_drafter(tmp_path / "own")
    assert whole.declared.settings["sharing"]["share"] == "kv"
    stitch(whole, folder, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(folder)
    assert "sharing.share kv" in lint(folder, "vllm")[-1].text
    with pytest.raises(ValueError, match="sharing: .* every step see the keys of all before it"):
        stitch(whole, targets["glm_moe_dsa"], tmp_path / "other")
    sharing = whole.declared.settings["sharing"] | {"share": "none"}
    with pytest.raises(ValueError, match="sharing: .* what the head's indexer chose"):
        stitch(edited(whole, sharing=sharing), folder, tmp_path / "other")


def rewritten(target: Path, folder: Path, change: Any) -> Path:
    """A copy of a checkpoint whose tensors `change` has edited."""
    shutil.copytree(target, folder)
    tensors = all_tensors(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    change(tensors)
    shards(folder, tensors)
    return folder


def take_out_of(target: Path, folder: Path) -> None:
    extract(target, folder, target_config(str(target)), IDENTITY | {"num_layers": 5})


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("deepseek_v3", "model.layers.5.hnorm.weight"),
        ("glm4_moe", "model.layers.5.self_attn.v_proj.weight"),
        ("glm4_moe", "model.layers.5.mlp.experts.2.up_proj.weight"),
        ("qwen3_next", "mtp.fc.weight"),
        ("mimo", "model.mtp_layers.0.final_layernorm.weight"),
    ],
)
def test_a_missing_tensor_is_named(kind: str, name: str, targets: dict[str, Path], tmp_path: Path) -> None:
    folder = rewritten(targets[kind], tmp_path / "cut", lambda tensors: tensors.pop(name))
    wanted = name.split("mlp.")[-1] if "experts" in name else name
    with pytest.raises(ValueError, match=wanted):
        take_out_of(folder, tmp_path / "own")


def test_declared_modules_without_tensors_are_an_error(targets: dict[str, Path], tmp_path: Path) -> None:
    folder = rewritten(
        targets["mimo"],
        tmp_path / "cut",
        lambda tensors: [tensors.pop(name) for name in list(tensors) if "mtp_layers" in name],
    )
    with pytest.raises(ValueError, match=r"declares 1 MTP module\(s\), the tensors of 0 .*model.mtp_layers.0"):
        take_out_of(folder, tmp_path / "own")
    found = lint(folder, "vllm")
    assert found[0].level == "refused"
    assert "model.mtp_layers.0" in found[0].text


@pytest.mark.parametrize(
    ("copy", "own"),
    [("embed_tokens.weight", "model.embed_tokens.weight"), ("shared_head.head.weight", "lm_head.weight")],
)
def test_a_copy_that_differs_names_both(copy: str, own: str, targets: dict[str, Path], tmp_path: Path) -> None:
    name = f"model.layers.5.{copy}"
    folder = rewritten(targets["deepseek_v3"], tmp_path / "cut", lambda tensors: tensors[name].add_(1))
    with pytest.raises(ValueError, match=f"{name} differs from {own}"):
        take_out_of(folder, tmp_path / "own")
    assert [finding.level for finding in lint(folder, "vllm")] == ["wrong", "note"]


def test_quantised_heads_are_refused(targets: dict[str, Path], extracted: dict[str, Whole], tmp_path: Path) -> None:
    name = "model.layers.5.eh_proj.weight"

    def to_float8(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    folder = rewritten(targets["glm4_moe"], tmp_path / "float8", to_float8)
    with pytest.raises(ValueError, match=r"eh_proj.weight \(F8_E4M3\) is quantised"):
        take_out_of(folder, tmp_path / "own")
    with pytest.raises(ValueError, match="is quantised"):
        stitch(extracted["glm4_moe"], folder, tmp_path / "out")

    def with_scale(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.5.self_attn.k_proj.weight_scale_inv"] = torch.ones(1)

    folder = rewritten(targets["glm4_moe"], tmp_path / "scaled", with_scale)
    with pytest.raises(ValueError, match="weight_scale_inv"):
        take_out_of(folder, tmp_path / "own")
    # A quantised target whose head is not: fine.
    folder = rewritten(targets["glm4_moe"], tmp_path / "body", lambda tensors: None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    take_out_of(folder, tmp_path / "own")
    assert "builds the head quantised" in lint(folder, "vllm")[0].text


def test_nothing_of_others_is_overwritten(
    targets: dict[str, Path], extracted: dict[str, Whole], tmp_path: Path
) -> None:
    whole, target = extracted["mimo"], targets["mimo"]
    with pytest.raises(ValueError, match="would be overwritten"):
        stitch(whole, target, target)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "notes.txt").write_text("kept")
    with pytest.raises(ValueError, match="not written by headstart"):
        stitch(whole, target, tmp_path / "theirs")
    assert (tmp_path / "theirs" / "notes.txt").read_text() == "kept"
    stitch(whole, target, tmp_path / "ours")
    (tmp_path / "ours" / "config.json").unlink()  # as a killed run leaves it
    (tmp_path / "ours" / "left.safetensors").write_bytes(b"x")
    stitch(whole, target, tmp_path / "ours")
    assert contents(tmp_path / "ours") == contents(target)


def test_lint_of_a_sound_checkpoint_only_says_how_it_is_run(targets: dict[str, Path], tmp_path: Path) -> None:
    for kind, target in targets.items():
        found = lint(target, "vllm")
        assert {finding.level for finding in found} == {"note"}, (kind, found)
        assert any(f"reads {SETTINGS[kind][1]}, recycles {SETTINGS[kind][2]}" in finding.text for finding in found)
    folder = shutil.copytree(targets["mimo"], tmp_path / "unlisted")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"].pop("model.mtp_layers.0.mlp.up_proj.weight")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "mlp.up_proj.weight" in lint(folder, "vllm")[0].text


# A target without a native head
# ------------------------------------------------------------------------------------------------------------------


def fresh(folder: Path, family: str, **changed: Any) -> tuple[Path, Whole]:
    """A tiny target's folder and a random MTP drafter of it, in the states that vLLM's MiMo serves."""
    target = tiny_target(family)
    target.model.save_pretrained(folder / "target")
    settings = {"reads": "pre_norm", "recycles": "post_norm", "concat": "hidden_first"} | changed
    drafter: Any = drafter_class("mtp")(target.parts, None, num_slots=2, **settings)
    torch.manual_seed(1)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter)
    save_drafter(folder / "own", drafter, target_identity=target.identity)
    return folder / "target", read_drafter(folder / "own")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_target_without_a_head_becomes_a_mimo_model(family: str, tmp_path: Path) -> None:
    target, whole = fresh(tmp_path, family)
    notes = stitch(whole, target, tmp_path / "out")
    out = tmp_path / "out"
    assert (out / "model.safetensors").read_bytes() == (target / "model.safetensors").read_bytes()
    extra, config = load_file(out / "model-mtp.safetensors"), json.loads((out / "config.json").read_text())
    root = "model.mtp_layers.0."
    table = HEADS["mimo"] | ({f"{root}self_attn.{p}_norm.weight": (8,) for p in "qk"} if family == "qwen3" else {})
    zeros = {f"model.layers.{i}.self_attn.{p}_proj.bias": (D if p == "q" else 16,) for i in range(L) for p in "qkv"}
    tied = {"lm_head.weight": (V, D)} if family == "qwen3" else {}  # the one tied family of the doubles
    wanted = table | ({} if family == "qwen2" else zeros) | tied
    assert {name: tuple(tensor.shape) for name, tensor in extra.items()} == wanted
    assert torch.equal(extra[f"{root}input_proj.weight"], whole.tensors["eh_proj.weight"])
    assert torch.equal(extra[f"{root}token_layernorm.weight"], whole.tensors["enorm.weight"])
    assert torch.equal(extra[f"{root}hidden_layernorm.weight"], whole.tensors["hnorm.weight"])
    assert torch.equal(extra[f"{root}final_layernorm.weight"], whole.tensors["norm.weight"])
    assert torch.equal(extra[f"{root}mlp.down_proj.weight"], whole.tensors["block.mlp.down_proj.weight"])
    if family != "qwen2":
        assert all(not extra[name].any() for name in zeros)
        assert not extra[f"{root}self_attn.k_proj.bias"].any()
        assert "zero biases" in notes[0]
    assert config["architectures"] == ["MiMoForCausalLM"]
    assert config["num_nextn_predict_layers"] == 1
    assert config["model_type"] == family
    assert config.get("qk_norm", False) == (family == "qwen3")
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    places = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(places) == set(extra) | set(load_file(target / "model.safetensors"))
    assert {places[name] for name in extra} == {"model-mtp.safetensors"}
    assert {finding.level for finding in lint(out, "vllm")} == {"note"}


def test_a_stitched_target_is_still_the_target_and_gives_its_head_back(tmp_path: Path) -> None:
    target, whole = fresh(tmp_path, "llama")
    stitch(whole, target, tmp_path / "out")
    tokens = torch.arange(12)[None]
    logits = [
        AutoModelForCausalLM.from_pretrained(folder)(tokens).logits.detach() for folder in (target, tmp_path / "out")
    ]
    assert torch.equal(*logits)
    # Its block now has biases, which a Llama layer has no place for; as MiMo it is Qwen2's.
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps(config | {"model_type": "qwen2"}))
    found = extract(
        tmp_path / "out", tmp_path / "back", target_config(str(tmp_path / "out")), IDENTITY | {"num_layers": L}
    )
    back = read_drafter(found.folder)
    assert all(torch.equal(back.tensors[name], tensor) for name, tensor in whole.tensors.items())
    assert not any(back.tensors[name].any() for name in set(back.tensors) - set(whole.tensors))
    stitch(back, tmp_path / "out", tmp_path / "twice")
    assert contents(tmp_path / "twice") == contents(tmp_path / "out")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"model_type": "gemma2"}, "model type 'gemma2' is none of llama"),
        ({"head_dim": 16}, "head_dim 16 is not hidden_size / heads = 8"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "it is quantised"),
        ({"model_type": "mistral", "sliding_window": 8}, "sliding window of 8"),
    ],
)
def test_a_target_that_mimo_cannot_be_is_refused(changed: dict[str, Any], reason: str, tmp_path: Path) -> None:
    target, whole = fresh(tmp_path, "llama")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(ValueError, match=reason):
        stitch(whole, target, tmp_path / "out")


def test_fresh_heads_are_refused_for_other_states_and_other_targets(tmp_path: Path) -> None:
    target, whole = fresh(tmp_path / "a", "llama", reads="post_norm")
    with pytest.raises(ValueError, match="reads: the drafter has 'post_norm', vllm serves 'pre_norm'"):
        stitch(whole, target, tmp_path / "out")
    stitch(whole, target, tmp_path / "out", engine="sglang")
    other, _ = fresh(tmp_path / "b", "qwen3")
    with pytest.raises(ValueError, match=r"missing model.mtp_layers.0.self_attn.k_norm.weight"):
        stitch(edited(whole, reads="pre_norm"), other, tmp_path / "out")
    wide = json.loads((target / "config.json").read_text()) | {"vocab_size": 65}
    (target / "config.json").write_text(json.dumps(wide))
    with pytest.raises(ValueError, match="vocab_size 64 against 65"):
        stitch(whole, target, tmp_path / "out")


# Commands, engines
# ------------------------------------------------------------------------------------------------------------------


def settings(**keys: Any) -> Any:
    return OmegaConf.create({"engine": {"name": "vllm"}, "drafter_dir": "???"} | keys)


def test_commands_take_out_and_put_back(targets: dict[str, Path], tmp_path: Path) -> None:
    target = tiny_target("glm4_moe")
    place = str(targets["glm4_moe"])
    taken = settings(action="extract", target_path=place, out=str(tmp_path / "own"), num_slots=4)
    execute(taken, tmp_path / "run", lambda path: target.parts)
    whole = read_drafter(tmp_path / "own")
    assert whole.declared.num_slots == 4
    assert whole.declared.target["weights"] == target.identity["weights"]
    put = settings(
        action="stitch", drafter_dir=str(tmp_path / "own"), target_path=place, out=str(tmp_path / "out"), dtype=None
    )
    execute(put, tmp_path / "run")
    assert contents(tmp_path / "out") == contents(targets["glm4_moe"])
    written = json.loads((tmp_path / "out" / PROVENANCE).read_text())
    assert written["whole"]
    assert written["speculative"] == {"method": "mtp"}
    with pytest.raises(ValueError, match="has the target's dtype"):
        execute(OmegaConf.merge(put, {"dtype": "float32"}), tmp_path / "run")
    for wrong, text in (({"action": "extract"}, "needs target_path"), ({"action": "stitch"}, "needs drafter_dir")):
        with pytest.raises(ValueError, match=text):
            execute(settings(**wrong), tmp_path / "run")
    tiny_model("llama").save_pretrained(tmp_path / "plain")
    plain = settings(action="extract", target_path=str(tmp_path / "plain"))
    with pytest.raises(ValueError, match="no native MTP head"):
        execute(plain, tmp_path / "run", lambda path: target.parts)


@pytest.mark.parametrize("kind", ["glm4_moe", "fresh"])
@pytest.mark.parametrize("link", [False, True])
def test_a_stitched_target_has_a_card(
    kind: str, link: bool, targets: dict[str, Path], extracted: dict[str, Whole], tmp_path: Path
) -> None:
    """In place of the target's own, which stays as it is, and before config.json."""
    if kind == "fresh":
        target, whole = fresh(tmp_path, "llama")
    else:
        target, whole = shutil.copytree(targets[kind], tmp_path / "target"), extracted[kind]
    (target / CARD).write_text("theirs")
    source = Source(whole, str(target), torch.bfloat16, link=link)
    export_engine(source, "vllm", tmp_path / "out", "apache-2.0")
    card = (tmp_path / "out" / CARD).read_text()
    assert "license: apache-2.0" in card
    assert "this folder holds the target itself" in card
    assert "vllm serve out --speculative-config" in card
    assert str(tmp_path) not in card
    assert (target / CARD).read_text() == "theirs"
    assert not (tmp_path / "out" / CARD).is_symlink()
    assert (tmp_path / "out" / CARD).stat().st_mtime_ns <= (tmp_path / "out" / "config.json").stat().st_mtime_ns


def test_verify_serves_the_stitched_folder_as_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, whole = fresh(tmp_path, "llama")
    exported = export_engine(Source(whole, str(target), torch.float32, link=True), "vllm", tmp_path / "vllm")
    assert (tmp_path / "vllm" / "model.safetensors").is_symlink()
    assert "mtp" in exported.command
    seen: list[Run] = []

    def serve(runs: list[Run], python: Path, **_: Any) -> list[Served]:
        seen.extend(runs)
        counts = {"drafts": 4, "drafted": 8, "accepted": 4, "accepted_per_slot": [3, 1]}
        return [Served(runs[0].name, [[1]], 1.0), Served(runs[1].name, [[1]], 1.0, **counts)]

    monkeypatch.setattr(verifying, "serve", serve)
    reference = verifying.Reference(prompts=[[1, 2]], max_tokens=4, num_slots=2, tau=2.0)
    assert verifying.verify(exported.folder, str(target), reference, Path("python")).agrees
    assert [run.model for run in seen] == [str(target), str((tmp_path / "vllm").resolve())]
    assert [run.speculative for run in seen] == [None, {"method": "mtp", "num_speculative_tokens": 2}]
    with pytest.raises(ValueError, match="is no folder"):
        export_engine(Source(whole, "owner/name", torch.float32), "vllm", tmp_path / "hub")


def test_every_layout_has_presets() -> None:
    """conf/target names one target of each layout, and its layout is known by its model type."""
    presets = {path.stem for path in (Path(__file__).parents[2] / "conf" / "target").glob("*.yaml")}
    assert {layout.name for layout in MODEL_TYPES.values()} <= presets
