"""Our drafter folder: round trip, half-written folders, other targets, unknown and missing keys and tensors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints.files import read_tensors, sha256_file, write_tensors
from checkpoints.folder import CONFIG, TENSORS, load_drafter, read_drafter, save_drafter
from drafters.eagle3 import Eagle3
from drafters.vocabulary import DraftVocabulary
from tests.doubles import tiny_target

SHAPES = [{}, {"hidden_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}]
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 128}


def odd() -> DraftVocabulary:
    return DraftVocabulary(torch.arange(1, 64, 2), 64)


def saved(folder: Path, target: Any, vocabulary: DraftVocabulary | None = None, **arguments: Any) -> Eagle3:
    drafter = Eagle3(target.parts, vocabulary, num_slots=4, layers=[0, 2, 4], **arguments)
    data = {"chat_template": "abc", "thinking": False}
    save_drafter(folder, drafter, target_identity=target.identity, data=data, measured={"tau": 2.5})
    return drafter


@pytest.mark.parametrize("shape", SHAPES, ids=["plain", "wide_heads"])
@pytest.mark.parametrize("head", ["own", "target"])
def test_round_trip(tmp_path: Path, shape: dict[str, int], head: str) -> None:
    target = tiny_target("llama", **shape)
    switches = {"fc_norm": True, "norm_output": True}
    drafter = saved(tmp_path, target, odd(), head=head, switches=switches, layer={"rope_parameters": YARN})
    again = load_drafter(tmp_path, target.parts)
    assert again.settings() == drafter.settings()
    assert again.needs == drafter.needs
    assert again.layer_config.rope_parameters["rope_type"] == "yarn"
    assert torch.equal(again.vocabulary.ids, drafter.vocabulary.ids)
    own = drafter.state_dict()
    assert set(own) == set(again.state_dict())
    assert all(torch.equal(own[name], tensor) for name, tensor in again.state_dict().items())


def test_declares_what_a_reader_would_guess(tmp_path: Path) -> None:
    target = tiny_target()
    saved(tmp_path, target, odd())
    config = json.loads((tmp_path / CONFIG).read_text())
    assert config["format"] == "headstart-drafter"
    assert config["architecture"] == "eagle3"
    assert config["layers"] == [0, 2, 4]
    assert config["layer_convention"] == "0 is the first decoder layer's output"
    assert config["slot_convention"] == "anchor_first"
    assert config["mask_token"] is None
    assert config["num_slots"] == 4
    assert config["vocabulary"] == {"size": 32, "target_size": 64, "fingerprint": odd().fingerprint}
    assert config["rope"]["rope_theta"] == config["settings"]["layer"]["rope_parameters"]["rope_theta"]
    assert config["target"] == target.identity
    assert config["data"] == {"chat_template": "abc", "thinking": False}
    assert config["measured"] == {"tau": 2.5}
    assert config["dtype"] == "float32"
    tensors = read_tensors(tmp_path / TENSORS)
    assert tensors["d2t"].tolist() == [i + 1 for i in range(32)]
    assert tensors["t2d"].tolist() == [i % 2 == 1 for i in range(64)]
    assert "tau" in (tmp_path / "README.md").read_text()


def test_dtype_is_cast_and_declared(tmp_path: Path) -> None:
    target = tiny_target()
    drafter = Eagle3(target.parts, None, layers=[1])
    save_drafter(tmp_path, drafter, target_identity=target.identity, dtype=torch.bfloat16)
    assert read_drafter(tmp_path).declared.dtype == "bfloat16"
    assert read_tensors(tmp_path / TENSORS)["fc.weight"].dtype == torch.bfloat16
    # On load the parameters follow the target, or what is asked.
    assert load_drafter(tmp_path, target.parts).fc.weight.dtype == torch.float32
    assert load_drafter(tmp_path, target.parts, torch.bfloat16).fc.weight.dtype == torch.bfloat16


def test_half_written_is_never_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    saved(tmp_path, target)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    # Killed after the new tensors and before the new config: the old config must not vouch for them.
    monkeypatch.setattr("checkpoints.folder.write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        saved(tmp_path, target, odd())
    with pytest.raises(ValueError, match="never written whole"):
        read_drafter(tmp_path)


def test_tensors_of_another_save_are_refused(tmp_path: Path) -> None:
    target = tiny_target()
    saved(tmp_path, target)
    tensors = read_tensors(tmp_path / TENSORS)
    tensors["fc.weight"][0, 0] += 1
    write_tensors(tmp_path / TENSORS, tensors)
    with pytest.raises(ValueError, match="checksum"):
        read_drafter(tmp_path)


def test_another_target_is_named_on_both_sides(tmp_path: Path) -> None:
    saved(tmp_path, tiny_target())
    other = tiny_target("llama", seed=1)
    with pytest.raises(ValueError, match="weights: the drafter has") as error:
        load_drafter(tmp_path, other.parts)
    assert other.identity["weights"] in str(error.value)
    assert tiny_target().identity["weights"] in str(error.value)


def test_another_chat_template_warns(tmp_path: Path) -> None:
    target = tiny_target()
    drafter = Eagle3(target.parts, None, layers=[1])
    save_drafter(tmp_path, drafter, target_identity=target.identity | {"chat_template": "other"})
    with pytest.warns(UserWarning, match="chat template"):
        load_drafter(tmp_path, target.parts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(surprise=1), "unknown key.*surprise"),
        (lambda c: c.pop("mask_token"), "missing key.*mask_token"),
        (lambda c: c.update(version=2), "version 2"),
        (lambda c: c.update(format="pytorch"), "format 'pytorch'"),
        (lambda c: c.update(layer_convention="blocks applied"), "layer convention"),
        (lambda c: c["vocabulary"].update(fingerprint="0"), "declares 0"),
        (lambda c: c["settings"].update(surprise=1), "settings do not fit"),
        (lambda c: c["settings"].pop("layers"), "no default capture layers"),
        (lambda c: c.update(layers=[0, 1, 4]), r"declares \[0, 1, 4\]"),
        (lambda c: c.update(architecture="../eagle3"), "module name"),
        (lambda c: c.update(architecture="eagle99"), "no drafter architecture"),
        (lambda c: c.update(architecture="layers"), "exactly one Drafter"),
    ],
)
def test_config_faults(tmp_path: Path, change: Any, message: str) -> None:
    target = tiny_target()
    saved(tmp_path, target)
    config = json.loads((tmp_path / CONFIG).read_text())
    change(config)
    (tmp_path / CONFIG).write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path, target.parts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("d2t"), "lacks the vocabulary map.*d2t"),
        (lambda t: t.update(t2d=torch.ones(64, dtype=torch.bool)), "different tokens"),
        (lambda t: t.pop("norm.weight"), "missing for Eagle3: norm.weight"),
        (lambda t: t.update(extra=torch.ones(1)), "unknown: extra"),
        (lambda t: t.update({"fc.weight": torch.ones(2, 2)}), "fc.weight is"),
    ],
)
def test_tensor_faults(tmp_path: Path, change: Any, message: str) -> None:
    target = tiny_target()
    saved(tmp_path, target, odd())
    tensors = read_tensors(tmp_path / TENSORS)
    change(tensors)
    write_tensors(tmp_path / TENSORS, tensors)
    config = json.loads((tmp_path / CONFIG).read_text())
    config["tensors"] = sha256_file(tmp_path / TENSORS)
    (tmp_path / CONFIG).write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path, target.parts)


def test_an_identity_is_required(tmp_path: Path) -> None:
    target = tiny_target()
    with pytest.raises(ValueError, match="lacks weights"):
        save_drafter(tmp_path, Eagle3(target.parts, None, layers=[1]), target_identity={"name": "x"})
