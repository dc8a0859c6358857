"""`headstart eval` on a tiny target and a saved head: report, plots, prompts, refusals; acceptance while training."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from rich.console import Console

from checkpoints.folder import save_drafter
from data.conversations import Prompt
from data.target import Target
from drafters.eagle3 import Eagle3
from eval.evaluate import EvalSettings, evaluate, limited, load_prompts, measure_acceptance, prompt_seed, run
from tests.doubles import START_ID, save_tiny, tiny_target

PROMPTS = [
    Prompt("a", "json", [{"role": "user", "content": "give me a json object"}]),
    Prompt("b", "prose", [{"role": "user", "content": "write a line"}]),
    Prompt("c", "json", [{"role": "user", "content": "json!"}]),
]
KEYS = [
    *("tau", "accepted", "alpha", "domains", "greedy_identical", "near_ties", "tokens_per_s", "baseline_tokens_per_s"),
    *("speedup", "seconds", "drafter_dir", "export_dirs", "prompts", "num_slots"),
]


def head(target: Target) -> Eagle3:
    torch.manual_seed(0)
    drafter = Eagle3(target.parts, None, num_slots=3, layers=[0, 2, 4])
    drafter.warm_start(target.parts)
    return drafter


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A saved target, a saved head, and a file of prompts."""
    root = tmp_path_factory.mktemp("eval")
    source = save_tiny(root / "target")
    loaded = Target.load(str(source), dtype="float32")
    save_drafter(root / "head", head(loaded), target_identity=loaded.identity)
    rows = [{"id": p.id, "domain": p.domain, "messages": p.messages} for p in PROMPTS]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return source, root / "head", root / "prompts.jsonl"


def test_command_writes_the_report(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    source, saved, prompts = folders
    overrides = [
        "target=any",
        f"target.name={source}",
        "target.dtype=float32",
        f"drafter_dir={saved}",
        f"prompts={prompts}",
    ]
    with initialize_config_module("conf", version_base="1.3"):
        config = compose("eval", ["target=any", *overrides, "max_new_tokens=10", "batch_size=2"])
    report = run(config, tmp_path)
    written = json.loads((tmp_path / "report.json").read_text())
    assert list(written)[: len(KEYS)] == KEYS
    assert written["greedy_identical"] is True
    assert written["near_ties"] == 0
    assert written["prompts"] == 3
    assert written["num_slots"] == len(written["alpha"]) == 3
    assert written["accepted"] == pytest.approx(written["tau"] - 1)
    assert set(written["domains"]) == set(written["by_domain"]) == {"json", "prose"}
    assert written["by_domain"]["json"]["prompts"] == 2
    assert written["drafter_dir"] == str(saved)
    assert written["example"]["rendered_prompt"].startswith("<|im_start|>user\ngive me a json object<|im_end|>")
    assert written["speedup"] == pytest.approx(written["tokens_per_s"] / written["baseline_tokens_per_s"])
    assert sum(written["split"].values()) == pytest.approx(1)
    assert written["break_even_tau"] > 0
    assert (tmp_path / "run.json").exists()
    for plot in ("alpha.png", "tau_by_domain.png"):
        assert (tmp_path / plot).read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob(".tmp-*"))
    console = Console(width=200, record=True, file=StringIO())
    report.show(console)
    text = console.export_text()
    assert "alpha by slot" in text
    assert "identical with and without drafter, 0 near tie(s)" in text


def test_replay_gives_the_greedy_tau_without_speed(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    source, saved, prompts = folders
    words = ["target=any", f"target.name={source}", "target.dtype=float32", f"drafter_dir={saved}"]
    words += [f"prompts={prompts}", "max_new_tokens=10", "baseline=false"]
    kept = tmp_path / "answers.safetensors"
    with initialize_config_module("conf", version_base="1.3"):
        real = run(compose("eval", words), tmp_path / "real").as_dict()
        config = compose("eval", [*words, "replay=true", f"recording={kept}"])
        run(config, tmp_path / "first")
        before = kept.stat().st_mtime_ns
        report = run(config, tmp_path / "replay")
        assert kept.stat().st_mtime_ns == before
        with pytest.raises(ValueError, match=r"replay is greedy: temperature must be 0 with replay=true, got 0\.5"):
            run(compose("eval", [*words, "replay=true", "temperature=0.5"]), tmp_path)
        with pytest.raises(ValueError, match="gives no confidences to calibrate"):
            run(compose("eval", [*words, "replay=true", "calibrate=true"]), tmp_path)
    written = json.loads((tmp_path / "replay" / "report.json").read_text())
    assert written["replay"] is True
    assert written["tokens_per_s"] is written["speedup"] is written["calibration"] is None
    for name in ("tau", "accepted", "alpha", "domains"):
        assert written[name] == pytest.approx(real[name])
    for name in ("rounds", "prompts", "num_slots", "tokens", "drafter_dir", "target", "drafter"):
        assert written[name] == (str(saved) if name == "drafter_dir" else real[name])
    console = Console(width=200, record=True, file=StringIO())
    report.show(console)
    assert "no speed" in console.export_text()


def test_a_drafter_that_changes_the_output_is_named(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    from eval import decoder
    from eval.verification import Verdict, verify_greedy

    def careless(best: torch.Tensor, tokens: torch.Tensor) -> Verdict:
        """Planted fault: with a drafter, the corrected token is off by one."""
        verdict = verify_greedy(best, tokens)
        if tokens.shape[1]:
            verdict.tokens = torch.where(
                verdict.tokens >= 0, (verdict.tokens + 1) % best.new_tensor(64), verdict.tokens
            )
        return verdict

    monkeypatch.setattr(decoder, "verify_greedy", careless)
    report = evaluate(target, head(target), PROMPTS[:1], EvalSettings(max_new_tokens=6))
    assert report.greedy_identical is False
    assert report.failures()[0].startswith("prompt a, new token 1:")


def test_sampled_without_baseline(target: Target) -> None:
    settings = EvalSettings(
        num_slots=2, max_new_tokens=8, temperature=0.9, top_k=10, top_p=0.9, baseline=False, limit=1
    )
    first = evaluate(target, head(target), PROMPTS, settings)
    again = evaluate(target, head(target), list(reversed(PROMPTS[:2])), settings)
    assert first.whole.prompts == 2
    assert first.greedy_identical is first.near_ties is first.whole.speed.speedup is None
    # A prompt's tokens depend on its id and the seed, not on order or company.
    assert first.whole.acceptance == again.whole.acceptance
    json.dumps(first.as_dict(), allow_nan=False)
    assert prompt_seed("a", 0) != prompt_seed("a", 1)


def test_acceptance_while_training_equals_the_report(target: Target) -> None:
    drafter = head(target)
    drafter.train()
    report = evaluate(target, drafter, PROMPTS, EvalSettings(max_new_tokens=10))
    rendered: dict[str, Any] = {}
    for prompt in PROMPTS:
        ids = target.tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, return_dict=False)
        rendered.setdefault(prompt.domain, []).append(ids)
    found = measure_acceptance(target, drafter, rendered, max_new_tokens=10)
    assert drafter.training
    assert found.tau == report.whole.acceptance.tau
    assert found.alpha == report.whole.acceptance.alpha
    assert found.domains == report.as_dict()["domains"]
    with pytest.raises(ValueError, match="at least one prompt"):
        measure_acceptance(target, drafter, {})


def test_prompts(tmp_path: Path) -> None:
    assert {prompt.domain for prompt in load_prompts("builtin")} >= {"chat", "code", "json"}
    bench = tmp_path / "question.jsonl"
    bench.write_text(json.dumps({"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]}) + "\n")
    assert load_prompts(str(bench)) == [Prompt("81", "writing", [{"role": "user", "content": "Write."}])]
    bench.write_text(json.dumps({"question_id": 81, "turns": []}) + "\n")
    with pytest.raises(ValueError, match=r"question\.jsonl:1: a Spec-Bench row needs"):
        load_prompts(str(bench))
    assert [prompt.id for prompt in limited(PROMPTS, 1)] == ["a", "b"]
    with pytest.raises(ValueError, match="limit must be at least 1"):
        limited(PROMPTS, 0)


def test_refusals(target: Target) -> None:
    with pytest.raises(ValueError, match="at least one prompt"):
        evaluate(target, head(target), [], EvalSettings())
    with pytest.raises(ValueError, match="prompt ids must differ"):
        evaluate(target, head(target), [PROMPTS[0], PROMPTS[0]], EvalSettings())
    assert START_ID in target.tokenizer.apply_chat_template(PROMPTS[0].messages, return_dict=False)
