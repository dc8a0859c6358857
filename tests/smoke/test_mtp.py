"""MTP's forms and target families through the generic checks, and recursion against one step reused."""

import pytest
import torch

from checkpoints.folder import load_drafter, save_drafter
from drafters.mtp import Mtp
from tests import checks
from tests.doubles import tiny_target
from training.objectives import Objective

HARD = Objective({"hard_ce": 1.0}, {"kind": "uniform"}, chunk=16)
FORMS = {
    "modules": {"modules": 4},
    "kv": {"sharing": {"share": "kv"}},
    "index": {"sharing": {"top": 3}},
    "index_kv": {"sharing": {"top": 3, "share": "kv"}, "reads": "pre_norm"},
    "mimo": {"concat": "hidden_first", "reads": "pre_norm", "recycles": "post_norm"},
    "llama": {"block": {"kind": "llama"}, "recycles": "pre_norm", "zero_first": False},
}


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


@pytest.mark.parametrize("form", FORMS)
def test_checks_of_every_form(target, form, tmp_path):
    drafter = checks.build("mtp", target, **FORMS[form])
    batch = checks.train_batch(target, drafter)
    checks.frontier(drafter, batch, anchors=1)
    checks.draft_equals_train(drafter, target)
    checks.packed_equals_alone(drafter, target)
    if form in ("modules", "index"):
        checks.lossless(drafter, target)
    save_drafter(tmp_path / "head", drafter, target_identity=target.identity)
    again = load_drafter(tmp_path / "head", target.parts)
    assert again.settings() == drafter.settings()
    assert torch.equal(again.slots(batch).hidden, drafter.slots(batch).hidden)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "gemma2", "gpt_oss", "deepseek_v3", "glm4_moe", "cohere"])
def test_the_targets_own_block_of_every_family(family):
    target = tiny_target(family)
    form = {"modules": 2} if family in ("deepseek_v3", "gemma2") else {}
    drafter = checks.build("mtp", target, num_slots=2, **form)
    checks.packed_equals_alone(drafter, target)
    assert drafter.warm_start(target.parts)
    checks.fit(drafter, target, checks.train_batch(target, drafter), HARD, steps=1)
    checks.draft_equals_train(drafter, target)


def test_one_module_a_slot_overfits(target):
    torch.manual_seed(0)
    checks.overfit_one(checks.build("mtp", target, num_slots=2, modules=2), target, HARD, steps=80)


def test_shared_choices_overfit(target):
    torch.manual_seed(0)
    both = Objective({"hard_ce": 1.0, "own_index": 0.1}, {"kind": "uniform"}, unweighted=["own_index"])
    form = {"sharing": {"top": 8, "share": "kv"}}
    checks.overfit_one(checks.build("mtp", target, num_slots=2, **form), target, both, steps=80)


def test_a_step_trained_alone_does_not_recurse(target):
    """What the same module reaches when only its first step is trained and it is reused for the others."""
    torch.manual_seed(0)
    with pytest.raises(AssertionError, match="overfitting"):
        checks.overfit_one(checks.build("mtp", target, train_steps=1), target, HARD, steps=80)


def test_every_member_of_the_yaml_is_a_setting(target):
    drafter = checks.build("mtp", target)
    assert isinstance(drafter, Mtp)
    config = checks.compose_config("train", "drafter=mtp", "prepared=nowhere").drafter.model
    assert set(config) - {"_target_"} == set(drafter.settings())
    assert all(set(config[group]) == set(drafter.settings()[group]) for group in ("block", "sharing"))
