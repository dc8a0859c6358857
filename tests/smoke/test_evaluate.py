"""`headstart eval` on a tiny target and a saved head: report, plots, prompts, refusals; acceptance while training."""

import json
import shutil
from io import StringIO
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_module
from rich.console import Console

from checkpoints.files import read_tensors
from checkpoints.folder import save_drafter
from data.conversations import Prompt
from data.target import Target
from drafters.eagle3 import Eagle3
from eval.decoder import generate
from eval.eval_settings import EvalSettings, limited
from eval.evaluate import evaluate, load_prompts, questions, run
from eval.passes import prompt_seed
from eval.recording import record_answers
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


def loaded_head(folder: Path) -> dict[str, torch.Tensor]:
    """Trained tensors of a head's folder, its vocabulary maps left out."""
    return {
        name: tensor
        for name, tensor in read_tensors(folder / "model.safetensors").items()
        if name not in ("d2t", "t2d")
    }


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
    for plot in ("alpha.png", "tau_by_domain.png", "time_split.png", "latency.png"):
        assert (tmp_path / plot).read_bytes().startswith(b"\x89PNG")
    assert written["efficiency"] == pytest.approx(written["tau"] / 4)
    assert set(written["latency"]) == {"drafter", "baseline"}
    assert 0 < written["latency"]["drafter"]["token_ms"]["p50"] <= written["latency"]["drafter"]["gap_ms"]["p99"]
    # The target keeps keys and values of 2 heads of 8 floats in 5 layers: 640 bytes a position.
    assert written["sizes"]["target_cache"] % 640 == 0
    assert written["sizes"]["drafter_state"] > 0
    assert written["sizes"]["drafter_parameters"] == sum(one.nbytes for one in loaded_head(saved).values())
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 4
    assert "http" not in page
    assert "Confidences" not in page
    assert "identical with and without drafter" in page
    assert "| all | 3 |" in (tmp_path / "report.md").read_text()
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
        with pytest.raises(ValueError, match="a replay is lossless: verification must be null, got typical"):
            run(compose("eval", [*words, "replay=true", "verification=typical"]), tmp_path)
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


def test_a_head_without_confidences_gets_an_estimator(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    source, saved, prompts = folders
    copy = shutil.copytree(saved, tmp_path / "head")
    words = ["target=any", f"target.name={source}", "target.dtype=float32", f"drafter_dir={copy}"]
    words += [f"prompts={prompts}", "max_new_tokens=10", "baseline=false"]
    with initialize_config_module("conf", version_base="1.3"):
        plain = run(compose("eval", words), tmp_path / "plain").as_dict()
        fitted = run(compose("eval", [*words, "calibrate=true"]), tmp_path / "fitted").as_dict()
        replayed = run(compose("eval", [*words, "calibrate=true", "replay=true"]), tmp_path / "replayed").as_dict()
        again = run(compose("eval", words), tmp_path / "again").as_dict()
    assert plain["calibration"] is None
    assert fitted["alpha"] == plain["alpha"]
    assert len(fitted["calibration"]["estimator"]["biases"]) == 3
    assert len(replayed["calibration"]["estimator"]["biases"]) == 3
    (entry,) = json.loads((copy / "calibration.json").read_text())
    assert entry["estimator"] == replayed["calibration"]["estimator"]
    # Loaded beside the head, it fills the proposals' confidences: they are judged as a confidence head's are.
    assert again["calibration"]["estimator"] is None
    assert again["calibration"]["before"]["rounds"] == fitted["calibration"]["before"]["rounds"]
    assert "Confidences" in (tmp_path / "again" / "report.html").read_text()
    assert (tmp_path / "again" / "reliability.png").exists()


def test_lossy_is_labelled_and_scored(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    source, saved, prompts = folders
    words = ["target=any", f"target.name={source}", "target.dtype=float32", f"drafter_dir={saved}"]
    words += [f"prompts={prompts}", "max_new_tokens=10", "verification=threshold", "threshold=0"]
    (tmp_path / "predicted.json").write_text(json.dumps({"all": 1.5, "K=2": {"predicted": 2.0, "measured": 1.0}}))
    pareto = {"static": [{"user_tokens_per_s": 20.0, "tokens_per_s": 100.0}]}
    (tmp_path / "pareto.json").write_text(json.dumps(pareto))
    words += [f"predicted={tmp_path / 'predicted.json'}", f"pareto={tmp_path / 'pareto.json'}"]
    with initialize_config_module("conf", version_base="1.3"):
        report = run(compose("eval", words), tmp_path / "out")
        with pytest.raises(ValueError, match="baseline must be true"):
            run(compose("eval", [*words, "baseline=false", "predicted=null"]), tmp_path / "no")
        with pytest.raises(ValueError, match="verification must be null, rejection, .*typical, threshold, got 'loose'"):
            run(compose("eval", [*words, "verification=loose"]), tmp_path / "no")
    written = json.loads((tmp_path / "out" / "report.json").read_text())
    assert written["lossy"]["label"] == "LOSSY"
    assert written["greedy_identical"] is None
    found = written["lossy"]["agreement"]
    assert found["same_answers"] == 0.0
    assert found["log_prob"] < found["target_log_prob"]
    assert written["predicted"][0] == {"name": "all", "predicted": 1.5, "measured": pytest.approx(written["speedup"])}
    assert written["pareto"] == pareto
    page, table = ((tmp_path / "out" / name).read_text() for name in ("report.html", "report.md"))
    assert page.count("data:image/png;base64,") == 6
    assert '<h1 class="lossy">LOSSY: ' in page
    assert "| K=2 | 2.00 | 1.00 | +100.0% |" in table
    assert "# LOSSY: " in table
    console = Console(width=200, record=True, file=StringIO())
    report.show(console)
    assert "LOSSY          a draft stands where p(x) >= 0" in console.export_text()


def test_turns_are_asked_with_the_targets_own_answers(target: Target) -> None:
    """Two turns: the second prompt is user, the target's greedy answer without its end of turn, user, as rendered."""
    prompt = Prompt("m", "chat", [{"role": "user", "content": "json!"}], ["and then?"])
    settings = EvalSettings(max_new_tokens=6)
    report = evaluate(target, head(target), [prompt, PROMPTS[0]], settings)
    assert (report.whole.prompts, report.whole.turns, report.parts["chat"].turns) == (2, 3, 2)
    first = target.tokenizer("<|im_start|>user\njson!<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    answer = generate(target, None, [first], settings.plain_decoding())[0].tokens
    assert len(answer) > 1
    said = target.tokenizer.decode([token for token in answer if token > 3])
    second = target.tokenizer(
        f"<|im_start|>user\njson!<|im_end|>\n<|im_start|>assistant\n{said}<|im_end|>\n"
        "<|im_start|>user\nand then?<|im_end|>\n<|im_start|>assistant\n"
    )["input_ids"]
    recording = record_answers(target, questions(target, [prompt], settings), 6)
    assert [question.ids for question in recording.questions] == [first, second]
    assert report.parts["chat"].acceptance.rounds > 0
    own = [generate(target, head(target), [ids], settings.decoding(head(target)))[0] for ids in (first, second)]
    assert report.parts["chat"].acceptance.rounds == sum(len(one.emitted) for one in own)
    assert report.parts["chat"].acceptance.tokens == sum(map(len, recording.answers))
    alone = evaluate(target, head(target), [prompt], EvalSettings(max_new_tokens=6, baseline=False))
    assert alone.whole.acceptance == report.parts["chat"].acceptance


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


def test_prompts(tmp_path: Path) -> None:
    assert {prompt.domain for prompt in load_prompts("builtin")} >= {"chat", "code", "json"}
    bench = tmp_path / "question.jsonl"
    bench.write_text(json.dumps({"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]}) + "\n")
    assert load_prompts(str(bench)) == [Prompt("81", "writing", [{"role": "user", "content": "Write."}], ["Rewrite."])]
    assert [prompt.id for prompt in limited(PROMPTS, 1)] == ["a", "b"]
    with pytest.raises(ValueError, match="limit must be at least 1"):
        limited(PROMPTS, 0)


def test_refusals(target: Target) -> None:
    with pytest.raises(ValueError, match="at least one prompt"):
        evaluate(target, head(target), [], EvalSettings())
    with pytest.raises(ValueError, match="prompt ids must differ"):
        evaluate(target, head(target), [PROMPTS[0], PROMPTS[0]], EvalSettings())
    assert START_ID in target.tokenizer.apply_chat_template(PROMPTS[0].messages, return_dict=False)
