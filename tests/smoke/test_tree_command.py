"""`headstart eval tree=...` on a tiny target and a saved head; what trees refuse."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_module

from checkpoints.folder import save_drafter
from data.target import Target
from eval.evaluate import run
from tests import checks
from tests.doubles import save_tiny
from tests.smoke.test_evaluate import head


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("trees")
    loaded = Target.load(str(save_tiny(root / "target")), dtype="float32")
    torch.manual_seed(0)
    save_drafter(root / "head", head(loaded), target_identity=loaded.identity)
    row = {"id": "a", "domain": "json", "messages": [{"role": "user", "content": "json!"}]}
    (root / "prompts.jsonl").write_text(json.dumps(row) + "\n")
    named = [f"target.name={root / 'target'}", "target.dtype=float32", f"drafter_dir={root / 'head'}"]
    return ["target=any", *named, f"prompts={root / 'prompts.jsonl'}", "max_new_tokens=8"]


@pytest.mark.parametrize("tree", [["tree=static"], ["tree=dynamic", "tree.nodes=5", "tree.width=2"]])
def test_a_tree_gives_the_targets_own_text(tree: list[str], words: list[str], tmp_path: Path) -> None:
    with initialize_config_module("conf", version_base="1.3"):
        report = run(compose("eval", [*words, *tree]), tmp_path).as_dict()
    assert report["greedy_identical"] is True
    assert report["settings"]["tree"]["kind"] == tree[0].split("=")[1]
    depth, nodes = (5, 14) if tree[0] == "tree=static" else (3, 5)
    assert report["num_slots"] == len(report["alpha"]) == depth
    assert report["efficiency"] == pytest.approx(report["tau"] / (nodes + 1))


def commands() -> list[str]:
    """How docs/trees.md makes its table."""
    page = (checks.ROOT / "docs" / "trees.md").read_text().partition("## Measured")[2]
    return [line for line in page.split("```")[1].splitlines() if line]


@pytest.fixture(scope="module")
def heads(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Heads of as many slots as those of the table."""
    loaded = Target.load(words[1].removeprefix("target.name="), dtype="float32")
    found = {}
    for name, slots, more in (("eagle3", 5, {}), ("dflash", 7, {"block": {"depth": 1, "mask_token": 0}})):
        torch.manual_seed(0)
        drafter = checks.build(name, loaded, num_slots=slots, **more)
        folder = tmp_path_factory.mktemp(name)
        found[name.upper()] = save_drafter(folder, drafter, target_identity=loaded.identity)
    return found


@pytest.mark.parametrize("line", commands())
def test_the_commands_of_the_table_run(line: str, words: list[str], heads: dict[str, Path], tmp_path: Path) -> None:
    headstart, entry, drafter_dir, *rest = shlex.split(line)
    assert (headstart, entry) == ("headstart", "eval")
    head_of_row = heads[drafter_dir.removeprefix("drafter_dir=")]
    with initialize_config_module("conf", version_base="1.3"):
        config = compose("eval", [*rest, *words, f"drafter_dir={head_of_row}", "batch_size=1"])
        report = run(config, tmp_path).as_dict()
    assert report["rounds"] > 0
    assert report["num_slots"] == int(rest[3].removeprefix("num_slots="))
    assert report["greedy_identical"] is (None if "temperature=1" in rest else True)


def test_block_verification_is_reported(words: list[str], tmp_path: Path) -> None:
    more = ["temperature=1", "verification=block", "baseline=false"]
    with initialize_config_module("conf", version_base="1.3"):
        report = run(compose("eval", [*words, *more]), tmp_path).as_dict()
    assert report["settings"]["verification"] == "block"
    assert report["tau"] >= 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["tree=ddtree"], "read drafted tokens"),
        (["tree=dynamic", "replay=true"], "a replay drafts chains"),
        (["tree=dynamic", "verification=block", "temperature=1"], "rejection or same_noise"),
        (["tree=dynamic", "verification=typical"], "tree.kind must be none"),
        (["tree=dynamic", "tree.nodes=0"], "tree.nodes"),
        (["tree=static", "num_slots=2"], "depth of tree.paths"),
    ],
)
def test_refusals(more: list[str], message: str, words: list[str], tmp_path: Path) -> None:
    with initialize_config_module("conf", version_base="1.3"), pytest.raises(ValueError, match=message):
        run(compose("eval", [*words, *more]), tmp_path)
