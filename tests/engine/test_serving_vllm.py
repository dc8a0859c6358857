"""`headstart eval engine=vllm` on a real vLLM server: the copy target and a drafter that is always right."""

import json
import os
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_module

from checkpoints.files import read_json
from checkpoints.folder import load_drafter, save_drafter
from data.target import Target
from eval.decoder import DecodeSettings, generate
from eval.engines import run_engines
from tests.doubles import END_ID, tiny_tokenizer
from tests.engine.kit import CASES, SLOTS, expected, save_target
from tests.engine.test_conformance import engine_or_skip

LAYER = next(case for case in CASES if case.name == "layer")
TOKENS = 9  # the first, and two rounds of four
ROWS = [
    {"id": name, "domain": domain, "messages": [{"role": "user", "content": said}]}
    for name, domain, said in (("a", "json", "one"), ("b", "prose", "two words"))
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The copy target with a tokenizer, its drafter, and prompts."""
    root = tmp_path_factory.mktemp("serving")
    source = save_target(root / "target")
    tiny_tokenizer().save_pretrained(source)
    target = Target.load(str(source), "float32")
    save_drafter(root / "head", LAYER.build(target.parts), target_identity=target.identity)
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return source, root / "head", root / "prompts.jsonl"


def answer(prompt: list[int]) -> list[int]:
    """The target's known text, up to its end of turn."""
    text = expected(prompt, TOKENS)
    return text[: text.index(END_ID) + 1] if END_ID in text else text


def test_own_harness_accepts_everything(folders: tuple[Path, Path, Path]) -> None:
    """What the engine is held to: without it the test below would show nothing of the drafter."""
    target = Target.load(str(folders[0]), "float32")
    head = load_drafter(folders[1], target.parts)
    prompt = [4, 5, 41]
    with torch.inference_mode():
        (made,) = generate(target, head, [prompt], DecodeSettings(SLOTS, TOKENS, 1))
    assert made.tokens == answer(prompt)
    assert made.verified == [SLOTS] * len(made.verified)


@pytest.mark.engine
@pytest.mark.slow
def test_vllm_serves_both_and_reports_what_is_known(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    python, (source, head, prompts) = engine_or_skip(), folders
    words = ["engine=vllm", f"engine.python={python}", "target=any", f"target.name={source}", "target.dtype=float32"]
    words += [f"drafter_dir={head}", f"prompts={prompts}", f"max_new_tokens={TOKENS}", "concurrency=[1,2]", "repeats=1"]
    words += ["per_user=1", "server_args=[--enforce-eager]"]
    with initialize_config_module("conf", version_base="1.3"):
        config = compose("eval", words)
    before = children()  # other tests of this worker may keep some, multiprocessing's resource tracker for one
    report = run_engines(config, tmp_path)
    assert report is not None
    assert report.whole.acceptance.tau_verified == pytest.approx(1 + SLOTS)
    assert report.whole.acceptance.alpha == [1.0] * SLOTS
    assert report.greedy_identical is True
    assert report.near_ties == 0
    written = read_json(tmp_path / "report.json")
    for level in written["engine"]["levels"]:
        assert level["drafter"]["tau_counted"] == pytest.approx(1 + SLOTS)
        assert level["drafter"]["rounds"] == level["drafter"]["rounds_counted"]
        assert level["same_answers"] == 2
        assert level["baseline"]["tokens_per_s"]["value"] > 0
    assert written["example"]["answer"] != ""
    for log in ("server_drafter.log", "server_baseline.log"):
        assert (tmp_path / log).exists()
    assert {number: words for number, words in children().items() if number not in before} == {}


def children() -> dict[int, str]:
    """Process ids and command lines of processes that this one started and that still run."""
    found: dict[int, str] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[:2]
                words = (folder / "cmdline").read_bytes()
            except OSError:
                continue  # it ended meanwhile
            if int(parent) == os.getpid() and state != "Z":
                found[int(folder.name)] = words.replace(b"\0", b" ").decode(errors="replace")
    return found
