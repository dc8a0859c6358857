"""Prompt sets: both row formats of turns, presets of the hub through a local stand-in, made long texts, refusals."""

import json
from pathlib import Path

import pytest

from data.conversations import Prompt
from data.suites import Suite, load_prompts, long_prompts, names, suite_prompts


def lines(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_spec_bench_rows_keep_all_turns(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "question.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite.", "Again."]},
        {"question_id": 300, "category": "qa", "turns": ["Who?"], "reference": ["x"]},
    )
    assert load_prompts(str(path)) == [
        Prompt("81", "writing", asked("Write."), ["Rewrite.", "Again."]),
        Prompt("300", "qa", asked("Who?"), []),
    ]


def test_deepspec_rows_are_named_after_their_file(tmp_path: Path) -> None:
    path = lines(tmp_path / "gsm8k.jsonl", {"turns": ["1 + 1?"]}, {"turns": ["2 + 2?", "Sure?"], "answer": "4"})
    assert load_prompts(str(path)) == [
        Prompt("gsm8k-00000", "gsm8k", asked("1 + 1?"), []),
        Prompt("gsm8k-00001", "gsm8k", asked("2 + 2?"), ["Sure?"]),
    ]


def test_bad_rows_name_file_and_line(tmp_path: Path) -> None:
    path = lines(tmp_path / "bad.jsonl", {"turns": ["a"]}, {"turns": []})
    with pytest.raises(ValueError, match=r"bad\.jsonl:2: a row of turns needs a list of texts, got \[\]"):
        load_prompts(str(path))
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"empty\.jsonl holds no prompts"):
        load_prompts(str(tmp_path / "empty.jsonl"))


def test_shipped_suites_and_lists(tmp_path: Path) -> None:
    for name in ("chat", "json", "code", "prose", "math"):
        assert {prompt.domain for prompt in load_prompts(name)} == {name}
    both = load_prompts(["json", "code"])
    assert [prompt.domain for prompt in both] == ["json"] * 8 + ["code"] * 8
    with pytest.raises(ValueError, match="id 'json-heldout-000' comes twice"):
        load_prompts(["json", "builtin"])
    with pytest.raises(ValueError, match="no suite 'jsonn'; allowed: builtin, chat, code, .*gsm8k, .*mt-bench"):
        load_prompts("jsonn")
    with pytest.raises(ValueError, match="names no suite"):
        load_prompts([])
    assert {"long", "gsm8k", "humaneval", "mbpp", "mt-bench", "math500"} <= set(names())


def test_long_texts_are_as_long_as_asked_and_always_the_same() -> None:
    found = load_prompts("long:130:1300")
    assert [prompt.domain for prompt in found] == ["long-130", "long-130", "long-1300", "long-1300"]
    text = found[2].messages[0]["content"]
    assert 1300 <= len(text.rpartition("\n")[0].split()) <= 1300 + 13
    assert found == long_prompts([130, 1300])
    with pytest.raises(ValueError, match="takes numbers of words, got '1k'"):
        load_prompts("long:1k")


def test_presets_read_a_local_stand_in(tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    from data.suites import FOLDER

    rows = {
        "gsm8k": ({"question": "2 {x} 3?", "answer": "5"}, "2 {x} 3?\nPlease reason step by step, and put your final "),
        "math500": ({"problem": "x = 2", "level": 1}, "x = 2\nPlease reason step by step, and put your final "),
        "humaneval": ({"prompt": "def f():\n"}, "Write a solution to the following problem and make sure that it "),
        "mbpp": ({"prompt": "Add two.", "code": ""}, "Add two."),
    }
    for name, (row, start) in rows.items():
        preset = dict(OmegaConf.load(FOLDER / f"{name}.yaml"))
        (prompt,) = suite_prompts(name, Suite(**preset | {"path": str(lines(tmp_path / f"{name}.jsonl", row))}))
        assert (prompt.id, prompt.domain, prompt.later) == (f"{name}-00000", name, [])
        assert prompt.messages[0]["content"].startswith(start)
    assert suite_prompts("gsm8k", Suite(str(tmp_path / "gsm8k.jsonl"), text="{question}\\boxed{{}}"))[0].messages == (
        asked("2 {x} 3?\\boxed{}")
    )
    preset = dict(OmegaConf.load(FOLDER / "mt-bench.yaml"))
    path = lines(tmp_path / "bench.jsonl", {"category": "roleplay", "prompt": ["Be a bot.", "Now a cat."]})
    assert suite_prompts("mt-bench", Suite(**preset | {"path": str(path)})) == [
        Prompt("mt-bench-00000", "roleplay", asked("Be a bot."), ["Now a cat."])
    ]
    with pytest.raises(ValueError, match="has no column 'answers'; it has 'category', 'prompt'"):
        suite_prompts("mine", Suite(str(path), text="{answers}"))
    with pytest.raises(ValueError, match="either text or turns_column"):
        Suite("x")


def test_an_unreachable_hub_is_named() -> None:
    with pytest.raises(ValueError, match=r"prompts=gsm8k: the dataset openai/gsm8k cannot be had .*prompts=FILE.jsonl"):
        load_prompts("gsm8k")
