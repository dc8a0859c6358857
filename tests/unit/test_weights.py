"""Packed weights: codes by hand, bytes as engines read them, what an import gives back, and refusals."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints.engines import Source, export_engine
from checkpoints.folder import load_drafter, read_drafter, save_drafter
from checkpoints.foreign import import_head
from checkpoints.lint import lint
from checkpoints.weights import CLIPS, WeightGrid, pack_weights, round_weights, unpack_weights
from data.target import Target
from drafters.eagle3 import Eagle3
from drafters.vocabulary import DraftVocabulary
from tests import checks
from tests.doubles import tiny_target

NAME = "midlayer.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama", num_hidden_layers=8, hidden_size=64, intermediate_size=96)


@pytest.fixture
def own(tmp_path: Path, target: Target) -> Path:
    torch.manual_seed(0)
    drafter = Eagle3(target.parts, DraftVocabulary(torch.tensor([1, 4, 9, 63]), 64), num_slots=4, layers=[1, 3, 4])
    save_drafter(tmp_path / "own", drafter, target_identity=target.identity)
    return tmp_path / "own"


def test_bytes_are_those_of_compressed_tensors() -> None:
    """Eight codes of 0..15 (value + 8) to an int32, the first in the lowest four bits; the scale is exact here."""
    row = torch.tensor([-8.0, -7, 0, 1, 2, 3, 4, 7] * 4)[None] * 0.5
    packed, config = pack_weights({NAME: row, "norm.weight": torch.ones(3)}, "int4:32")
    # 0x F C B A 9 8 1 0, read from the last value to the first, as a signed 32-bit number.
    assert packed["midlayer.mlp.up_proj.weight_packed"].tolist() == [[0xFCBA9810 - 2**32] * 4]
    assert packed["midlayer.mlp.up_proj.weight_packed"].dtype == torch.int32
    assert packed["midlayer.mlp.up_proj.weight_shape"].tolist() == [1, 32]
    assert packed["norm.weight"].tolist() == [1, 1, 1]
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == 32
    assert torch.equal(unpack_weights(packed, config, "here")[NAME], round_weights({NAME: row}, "int4:32")[NAME])


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_rounding_is_within_half_a_step_of_the_clipped_range(name: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 128)
    weight[2, :64] = 0
    grid = WeightGrid.parse(f"{name}:64", {NAME: weight})
    codes, scales = grid.encode(weight)
    back = grid.decode(codes, scales)
    assert back[2, :64].count_nonzero() == 0
    reach = weight.unflatten(1, (-1, 64)).abs().amax(-1)
    most = 2 ** (grid.bits - 1)
    assert bool((scales <= reach / (most - 0.5) * 1.0001).all())
    assert bool((scales >= min(CLIPS) * reach / (most - 0.5) * 0.9999).all())
    inside = weight.unflatten(1, (-1, 64)).abs() <= (scales * (most - 1))[..., None]
    error = (back - weight).unflatten(1, (-1, 64)).abs()
    assert bool((error[inside] <= 0.501 * scales[..., None].expand_as(error)[inside]).all())
    # The search never does worse than the whole range.
    plain = (weight.unflatten(1, (-1, 64)) / (reach / (most - 0.5))[..., None].clamp_min(1e-9)).round()
    whole = plain.clamp(-most, most - 1) * (reach / (most - 0.5))[..., None]
    assert float(error.square().sum()) <= float((whole.flatten(1) - weight).square().sum()) * 1.0001


@pytest.mark.parametrize("form", ["int8", "int4", "int4:32"])
def test_an_export_comes_back_as_what_evaluation_measures(form: str, own: Path, target: Target, tmp_path: Path) -> None:
    source = Source(read_drafter(own), "target", torch.float32, lambda: target.parts.head, weights=form)
    exported = export_engine(source, "vllm", tmp_path / "out")
    assert "weights=" in exported.notes[-1]
    assert [one for one in lint(exported.folder, "vllm", target.parts.config) if one.level != "note"] == []
    measured = load_drafter(own, target.parts, weights=form).state_dict()
    imported, _ = import_head(exported.folder, target.parts, num_slots=4)
    found, plain = imported.state_dict(), load_drafter(own, target.parts).state_dict()
    assert sorted(found) == sorted(measured)
    assert all(torch.equal(found[key], measured[key]) for key in found)
    changed = {key for key in plain if not torch.equal(plain[key], found[key])}
    assert changed == {key for key in plain if "_proj" in key or key == "fc.weight"}
    small = sum(tensor.nbytes for tensor in load_file(exported.folder / "model.safetensors").values())
    assert small < 0.6 * sum(tensor.nbytes for tensor in plain.values())


@pytest.mark.parametrize("name", checks.DRAFTERS)
def test_every_drafter_with_projections_can_be_rounded(name: str, target: Target, tmp_path: Path) -> None:
    torch.manual_seed(0)
    drafter = checks.build(name, target)
    save_drafter(tmp_path / "own", drafter, target_identity=target.identity)
    if not any("_proj.weight" in key or key == "fc.weight" for key in drafter.state_dict()):
        with pytest.raises(ValueError, match="no projections that could be rounded"):
            load_drafter(tmp_path / "own", target.parts, weights="int8")
        return
    rounded = load_drafter(tmp_path / "own", target.parts, weights="int8").state_dict()
    assert any(not torch.equal(rounded[key], value) for key, value in drafter.state_dict().items())


def test_refusals(own: Path, target: Target, tmp_path: Path) -> None:
    whole = read_drafter(own)
    with pytest.raises(ValueError, match=r"weights must be null, int8, int4 or NAME:GROUP .* 32.* got 'int3'"):
        load_drafter(own, target.parts, weights="int3")
    with pytest.raises(ValueError, match="got 'int4:128'"):
        load_drafter(own, target.parts, weights="int4:128")
    with pytest.raises(ValueError, match="sglang cannot serve .* weights=int4 is not among"):
        export_engine(Source(whole, "target", torch.float32, weights="int4"), "sglang", tmp_path / "no")
    folder = export_engine(
        Source(whole, "target", torch.float32, lambda: target.parts.head, weights="int4"), "vllm", tmp_path / "out"
    ).folder
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["format"] = "marlin-24"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="only compressed-tensors' pack-quantized"):
        lint(folder, "vllm")
    config["quantization_config"]["format"] = "pack-quantized"
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = False
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="must be symmetric"):
        lint(folder, "vllm")
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = True
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    del tensors["fc.weight_scale"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"fc\.weight_packed .* without fc\.weight_scale"):
        lint(folder, "vllm")
