"""Packed weights as vLLM's own code reads them: its config parser takes the file, its unpacking gives our values.

The kernel that multiplies them is not run: vLLM's CPU build for AVX2 machines misses it.
"""

import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoints.engines import Source, export_engine
from checkpoints.folder import read_drafter, save_drafter
from checkpoints.weights import round_weights
from drafters.eagle3 import Eagle3
from tests.doubles import tiny_target
from tests.engine.test_conformance import engine_or_skip

SCRIPT = """
import json, sys
from pathlib import Path
from safetensors.torch import load_file, save_file
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import unpack_quantized_values_into_int32
from vllm.scalar_type import scalar_types

for folder in map(Path, sys.argv[1:]):
    written = json.loads((folder / "config.json").read_text())["quantization_config"]
    described = CompressedTensorsConfig.from_config(written)
    weights = described.target_scheme_map["Linear"]["weights"]
    assert described.ignore == ["lm_head"], described.ignore
    assert described._is_wNa16_group_channel(weights, None), weights
    kind = {4: scalar_types.uint4b8, 8: scalar_types.uint8b128}[weights.num_bits]
    tensors = load_file(folder / "model.safetensors")
    found = {}
    for name, packed in tensors.items():
        if name.endswith("weight_packed"):
            scale = tensors[name.replace("packed", "scale")]
            codes = unpack_quantized_values_into_int32(packed, kind, packed_dim=1) - kind.bias
            assert codes.shape == tuple(tensors[name.replace("packed", "shape")].tolist())
            assert codes.shape[1] // scale.shape[1] == weights.group_size
            found[name.removesuffix("_packed")] = codes * scale.repeat_interleave(weights.group_size, 1)
    save_file(found, folder / "read.safetensors")
"""


@pytest.mark.engine
@pytest.mark.slow
def test_vllm_reads_the_values_that_evaluation_measures(tmp_path: Path) -> None:
    python = engine_or_skip()
    target = tiny_target("llama", num_hidden_layers=8, hidden_size=64, intermediate_size=96)
    torch.manual_seed(0)
    drafter = Eagle3(target.parts, None, num_slots=4)
    save_drafter(tmp_path / "own", drafter, target_identity=target.identity)
    whole, folders = read_drafter(tmp_path / "own"), {}
    for form in ("int8", "int4"):
        source = Source(whole, "target", torch.float32, weights=form)
        folders[form] = export_engine(source, "vllm", tmp_path / form).folder
    command = [str(python), "-c", SCRIPT, *map(str, folders.values())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    for form, folder in folders.items():
        read, ours = load_file(folder / "read.safetensors"), round_weights(whole.tensors, form)
        assert len(read) == 8
        assert all(torch.allclose(value, ours[name], rtol=1e-6, atol=0) for name, value in read.items())
