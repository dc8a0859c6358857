"""A target spread over processes, over accelerate's devices, and on disk shows the features of a whole one."""

import multiprocessing
import os
from pathlib import Path

import pytest
import torch

from data.conversations import Conversation
from data.features import FeatureStore, capture
from data.spread import parallel_arguments
from data.target import Target
from tests import checks
from tests.doubles import save_tiny
from tests.ranks import finish, free_port

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["training.train", "tests.checks"])


def conversations(target: Target) -> list[Conversation]:
    texts = [checks.random_text(target, n, n) for n in (9, 14, 6)]
    return [Conversation(f"c{len(t)}", "test", t, [0] * 4 + [1] * (len(t) - 4)) for t in texts]


def capture_together(rank: int, port: int, folder: Path, plan: object, out: Path) -> None:
    """As `torchrun -m data.prepare` would: the same call on each process."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    target = Target.load(str(folder), "float32", tp_plan=plan)
    assert rank == 0, "only the first process comes here"
    capture(target, conversations(target), (0, 2, 3), out, dtype="float32")
    with pytest.raises(ValueError, match="reads features and nothing else"):
        target.model(input_ids=torch.tensor([[4, 5]]))
    # atexit does not run in a forked server's child; a command's process runs it.
    target._together._end()


@pytest.mark.parametrize(("family", "plan"), [("llama", "auto"), ("qwen3_moe", "experts")])
def test_capture_on_two_processes_equals_one(tmp_path, family, plan):
    folder = save_tiny(tmp_path / "target", family)
    port = free_port()
    arguments = [(rank, port, folder, plan, tmp_path / "store") for rank in range(2)]
    processes = [CONTEXT.Process(target=capture_together, args=one) for one in arguments]
    for process in processes:
        process.start()
    assert finish(processes, 240) == [0, 0]
    target = Target.load(str(folder), "float32")
    # The same fingerprint from divided weights: the store opens for the whole target.
    spread = FeatureStore.open(tmp_path / "store", target.identity, parts=target.parts)
    whole = capture(target, conversations(target), (0, 2, 3), tmp_path / "alone", dtype="float32")
    for one, other in zip(spread, whole, strict=True):
        assert one.id == other.id
        assert torch.allclose(one.aux, other.aux, atol=1e-3)
        assert torch.allclose(one.last, other.last, atol=1e-3)
        assert torch.equal(one.top1, other.top1)


def test_a_plan_without_processes_is_refused(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match="torchrun"):
        parallel_arguments("auto")


def test_layers_on_disk_show_the_same(tmp_path):
    """accelerate's map by layers, the last ones kept on disk: features, fingerprint and head are the whole target's."""
    folder = save_tiny(tmp_path / "target")
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu", "model.rotary_emb": "cpu"}
    places |= {f"model.layers.{n}": "cpu" if n < 3 else "disk" for n in range(5)}
    offloaded = Target.load(str(folder), "float32", places, offload_folder=str(tmp_path / "disk"))
    assert any(p.device.type == "meta" for p in offloaded.model.parameters()), "nothing was offloaded"
    whole = Target.load(str(folder), "float32")
    assert offloaded.identity == whole.identity
    tokens = torch.arange(4, 20)[None]
    with torch.inference_mode():
        one, other = offloaded.forward(tokens, (0, 3, 4)), whole.forward(tokens, (0, 3, 4))
    assert torch.allclose(one.aux, other.aux, atol=1e-4)
    assert torch.allclose(offloaded.logits(one.last), whole.logits(other.last), atol=1e-4)
    assert torch.equal(
        offloaded.parts.last_block()["mlp.up_proj.weight"], whole.parts.last_block()["mlp.up_proj.weight"]
    )


def test_two_ways_of_spreading_exclude_each_other(tmp_path):
    folder = save_tiny(tmp_path / "target")
    with pytest.raises(ValueError, match="exclude each other"):
        Target.load(str(folder), "float32", "auto", tp_plan="auto")
