"""A running vLLM shows the same features as the target here, and a head trains on what it fills a queue with."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from checkpoints.files import read_json
from data.engine_states import CPU_CONNECTOR, Engine, EngineSettings, engine_arguments
from data.features import FeatureStore, observe
from data.target import Target
from tests.doubles import save_tiny
from tests.engine.test_conformance import engine_or_skip
from tests.smoke.test_prepare import answers
from tests.smoke.test_store import run
from tests.unit.test_layout import conversations

ROOT = Path(__file__).resolve().parents[2]
LAYERS, SERVED, DEPTH = (0, 2, 3), "tiny", 5
START_S = 1500.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Head size 32: the engine's CPU attention has none of 8.
    return save_tiny(tmp_path_factory.mktemp("model"), hidden_size=64, head_dim=32)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSettings]:
    """vLLM's own server, as docs/store.md starts it, on a free port of this machine."""
    python, root = engine_or_skip(), tmp_path_factory.mktemp("server")
    (root / "states").mkdir()
    (root / "modules").mkdir()
    shutil.copy(ROOT / "data" / "vllm_states.py", root / "modules" / f"{CPU_CONNECTOR[1]}.py")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1"]
    command += ["--served-model-name", SERVED, "--port", str(port), "--dtype", "float32", "--max-model-len", "128"]
    command += ["--max-num-seqs", "4", "--enforce-eager", "--skip-tokenizer-init"]
    command += engine_arguments(LAYERS, DEPTH, str(root / "states"), cpu=True)
    environment = os.environ | {"PYTHONPATH": str(root / "modules"), "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment |= {"VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with open(root / "log.txt", "wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=root, start_new_session=True
        )
    try:
        wait_until_up(process, port, root / "log.txt")
        yield EngineSettings(f"http://127.0.0.1:{port}/v1", SERVED, str(root / "states"), concurrency=2)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_up(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + START_S
    while True:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health").is_success:
                return
        except httpx.TransportError:
            pass
        assert process.poll() is None, log.read_text(errors="replace")[-4000:]
        assert time.monotonic() < end, log.read_text(errors="replace")[-4000:]
        time.sleep(1)


@pytest.mark.engine
def test_features_equal_those_made_here(model: Path, server: EngineSettings) -> None:
    target, rows = Target.load(str(model), dtype="float32"), conversations()
    engine = Engine(server, target, LAYERS)
    assert engine.check(rows) > 0.999
    own = dict(observe(target, rows, LAYERS, dtype="float32"))
    same = total = 0
    for index, sample in engine.observe(rows, "float32"):
        for name in ("aux", "last"):
            ours, theirs = getattr(own[index], name), getattr(sample, name)
            assert float(torch.cosine_similarity(ours, theirs, dim=-1).min()) > 0.999
        same += int((sample.top1 == own[index].top1).sum())
        total += len(sample.tokens)
    assert same / total >= 0.99
    assert list(Path(server.folder).iterdir()) == []
    with pytest.raises(ValueError, match=r"layer 1 of the server is not the target's .* nearest to layer 2"):
        Engine(server, target, (0, 1, 3)).check(rows)


@pytest.mark.engine
def test_prepare_fills_a_queue_from_the_server(tmp_path: Path, model: Path, server: EngineSettings) -> None:
    source = ["data=answers_jsonl", f"data.path={answers(tmp_path / 'answers.jsonl')}", "features.queue.active=true"]
    asked = f"features.server={{base_url: '{server.base_url}', model: {SERVED}, folder: '{server.folder}'}}"
    run(tmp_path / "out", model, *source, asked, f"features.folder={tmp_path / 'store'}", "features.precision=int8")
    header = read_json(tmp_path / "store" / "header.json")
    assert (header["made_by"], header["store"]["aux"]) == ("vllm", "int8:64")
    target = Target.load(str(model), dtype="float32")
    store = FeatureStore.open(tmp_path / "out" / "features", target.identity, LAYERS, parts=target.parts)
    assert store.truth is not None
    assert store.truth >= 0.99
    assert len(store) == read_json(tmp_path / "out" / "prepare.json")["conversations"]
