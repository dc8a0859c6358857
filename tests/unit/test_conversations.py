"""Sources give conversations; rows that cannot teach are dropped under a reason; splits leak nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from checkpoints.files import fingerprint, fingerprint_rows
from checkpoints.run import settings as read_settings
from data.chat import TemplateError
from data.collate import Collate
from data.conversations import (
    Conversation,
    Prompt,
    Report,
    fit,
    prompt_key,
    read_conversations,
    read_prompts,
    read_source,
    split_heldout,
    token_counts,
    write_conversations,
)
from data.features import conversations_fingerprint
from data.layout import Sample
from data.sources import SourceSettings, read_rows
from tests.doubles import END_ID, tiny_tokenizer

CONF = Path(__file__).parents[2] / "conf" / "data"
PRESETS = ("sharegpt", "ultrachat", "open_perfectblend")


def lines(path: Path, rows: list[Any]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def chat(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def preset(name: str, **changes: Any) -> SourceSettings:
    config = OmegaConf.merge(OmegaConf.load(CONF / f"{name}.yaml"), changes)
    return read_settings(SourceSettings, config, f"data={name}")


SHAREGPT = [
    {"id": "QWJhYvA_0", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ab"}]},
    {"id": "i6IyJda_0", "conversations": [{"from": "gpt", "value": "ab"}, {"from": "human", "value": "hi"}]},
    {"id": "A5AbcES_0", "conversations": []},
]
ULTRACHAT = [
    {"prompt": "hi", "prompt_id": "f0e37e9f", "messages": chat("hi", "ab", "more", "cd")},
    {"prompt": "yo", "prompt_id": "2d137eb2", "messages": chat("yo", "abc")},
    {"prompt": "no", "prompt_id": "87e2f31a", "messages": chat("no")},
]
PERFECTBLEND = [
    {"conversations": [{"from": "human", "value": "1+1"}, {"from": "gpt", "value": "2."}], "source": "math/qa"},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "human", "value": "hi"}], "source": "x"},
]


@pytest.mark.parametrize(
    ("name", "rows", "expected", "dropped"),
    [
        ("sharegpt", SHAREGPT, [("chat-000000", "chat", 3)], {"starts with an answer": 1, "empty chat": 1}),
        ("ultrachat", ULTRACHAT, [("chat-000000", "chat", 6), ("chat-000001", "chat", 4)], {"no answer": 1}),
        (
            "open_perfectblend",
            PERFECTBLEND,
            [("math/qa-000000", "math/qa", 3)],
            {"roles out of order": 1},
        ),
    ],
)
def test_presets_read_datasets_of_their_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, rows: list[Any], expected: Any, dropped: dict[str, int]
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    settings = preset(name, path=lines(tmp_path / "rows.jsonl", rows))
    kept, report = read_source(settings, tiny_tokenizer())
    assert [(c.id, c.domain, c.answer_tokens) for c in kept] == expected
    assert report.dropped == dropped
    assert report.read == len(rows) == report.kept + sum(dropped.values())


def test_every_preset_is_a_valid_source() -> None:
    for path in CONF.glob("*.yaml"):
        assert preset(path.stem, **({} if path.stem in (*PRESETS, "builtin") else {"path": "x"})).source


def test_unknown_settings_and_contradictions_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown key.* in data: pth"):
        read_settings(SourceSettings, {"source": "jsonl", "pth": "x"}, "data")
    for values, message in [
        ({"source": "hub"}, "data.source must be one of"),
        ({"source": "jsonl"}, "needs one"),
        ({"source": "builtin", "path": "x"}, "takes none"),
        ({"source": "builtin", "multi_turn": "all"}, "joined or split"),
        ({"source": "builtin", "max_length": 1}, "data.max_length must be an integer >= 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            SourceSettings(**values)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ('{"messages": [', "rows.jsonl:3: not whole JSON"),
        ({"text": "hi"}, "rows.jsonl:3: no 'messages' in the row; it has 'text'"),
        ({"messages": [{"role": "user"}]}, "rows.jsonl:3: message 0 must have 'role' and 'content'"),
        ({"messages": [{"role": "bot", "content": "hi"}]}, "rows.jsonl:3: message 0: role must be one of"),
        ({"id": "a", "messages": chat("hi")}, "rows.jsonl:3: id 'a' was used before, at .*rows.jsonl:1"),
        ("[1]", "rows.jsonl:3: a row must be a JSON object, got list"),
    ],
)
def test_bad_rows_name_file_and_line(tmp_path: Path, bad: Any, message: str) -> None:
    path = lines(tmp_path / "rows.jsonl", [{"id": "a", "messages": chat("hi", "ab")}, "", bad])
    with pytest.raises(ValueError, match=message):
        list(read_rows(SourceSettings("jsonl", path)))


def test_recorded_ids_are_kept_as_they_are(tmp_path: Path) -> None:
    ids = {"prompt_ids": [2, 9, 9], "response_ids": [7, 8, 3]}
    row = {"id": "a", "domain": "json", "messages": chat("hi", "ab"), **ids}
    path = lines(tmp_path / "rows.jsonl", [row])
    kept, report = read_source(SourceSettings("answers_jsonl", path), tiny_tokenizer())
    assert kept == [Conversation("a", "json", [2, 9, 9, 7, 8, 3], [0, 0, 0, 1, 1, 1])]
    assert (report.tokens, report.answer_tokens) == (6, 3)
    with pytest.raises(ValueError, match="rows.jsonl:1: token id 9 is outside the target's 9 tokens"):
        read_source(SourceSettings("answers_jsonl", path), tiny_tokenizer(), vocab_size=9)
    thought = lines(tmp_path / "thought.jsonl", [row | {"thinking": True}])
    with pytest.raises(ValueError, match="thought.jsonl:1: answered with thinking=True, but data.thinking=False"):
        read_source(SourceSettings("answers_jsonl", thought, thinking=False), tiny_tokenizer())
    torn = lines(tmp_path / "torn.jsonl", [row | {"prompt_ids": "2 9 9"}])
    with pytest.raises(ValueError, match="torn.jsonl:1: prompt_ids must be a list of token ids"):
        read_source(SourceSettings("answers_jsonl", torn), tiny_tokenizer())


@pytest.mark.parametrize(
    ("prompt", "response", "max_length", "reason"),
    [
        (200, 10, 64, "answer beyond max_length"),
        (63, 10, 64, "fewer than 2 answer tokens"),
        (4, 1, 64, "fewer than 2 answer tokens"),
        (4, 0, 64, "no answer"),
        (62, 10, 64, None),
        (4, 2, None, None),
    ],
)
def test_rows_with_nothing_to_learn_are_counted(
    prompt: int, response: int, max_length: int | None, reason: str | None
) -> None:
    report = Report()
    one = Conversation("a", "x", list(range(prompt + response)), [0] * prompt + [1] * response)
    assert fit(one, max_length, report) == (reason is None)
    assert report.dropped == ({} if reason is None else {reason: 1})
    assert report.kept == (reason is None)
    assert report.truncated == (reason is None and max_length is not None and prompt + response > max_length)


def test_cut_after_the_last_answer_and_at_every_length() -> None:
    tokens, turns = [5, 6, 7, 8, 9, 10, 11, 12], [0, 1, 1, 0, 0, 2, 2, 0]
    expected = {2: 0, 3: 3, 4: 3, 5: 3, 6: 6, 7: 7, 8: 7}
    for length, kept in expected.items():
        one = Conversation("a", "x", list(tokens), list(turns))
        assert fit(one, length, Report()) == bool(kept)
        if kept:
            assert (one.tokens, one.turns) == (tokens[:kept], turns[:kept])


def test_refused_rows_are_counted_and_all_refused_is_an_error(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    changed = "message['content'].replace('z', 'y')"
    tokenizer.chat_template = tokenizer.chat_template.replace("message['content']", changed)
    rows = [{"messages": chat("hi", "zz")}, {"messages": chat("hi", "ab")}]
    kept, report = read_source(SourceSettings("jsonl", lines(tmp_path / "a.jsonl", rows)), tokenizer)
    assert len(kept) == 1
    assert report.dropped == {"refused by the chat template": 1}
    assert "a.jsonl:1: turn 1" in str(report.first_refusal)
    with pytest.raises(TemplateError, match="refused every row"):
        read_source(SourceSettings("jsonl", lines(tmp_path / "b.jsonl", rows[:1])), tokenizer)


def test_split_turns_make_one_conversation_an_answer(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [{"id": "q", "messages": chat("hi", "ab", "yo", "cde")}])
    kept, _ = read_source(SourceSettings("jsonl", path, multi_turn="split"), tiny_tokenizer())
    assert [(c.id, c.answer_tokens, c.tokens[-1]) for c in kept] == [("q/1", 3, END_ID), ("q/2", 4, END_ID)]


def test_eval_prompts_are_kept_out_of_training(tmp_path: Path) -> None:
    held = lines(tmp_path / "eval.jsonl", [{"messages": chat("What  is TEA?")}])
    path = lines(tmp_path / "a.jsonl", [{"messages": chat("what is tea?", "ab")}, {"messages": chat("hi", "ab")}])
    kept, report = read_source(SourceSettings("jsonl", path, eval_path=held), tiny_tokenizer())
    assert len(kept) == 1
    assert report.dropped == {"prompt is among the evaluation prompts": 1}
    counted = Report()
    assert len(read_prompts(SourceSettings("jsonl", path, eval_path=held), report=counted)) == 1
    assert counted.dropped == {"prompt is among the evaluation prompts": 1}


def test_prompts_end_before_the_first_answer_and_repeats_are_counted(tmp_path: Path) -> None:
    rows = [{"messages": chat("hi", "ab", "yo", "cd")}, {"messages": chat("HI ")}, {"messages": []}]
    report = Report()
    prompts = read_prompts(lines(tmp_path / "a.jsonl", rows), report=report)
    assert prompts == [Prompt("chat-000000", "chat", chat("hi"))]
    assert report.dropped == {"repeated prompt": 1, "empty chat": 1}


def test_answers_to_one_prompt_stay_on_one_side() -> None:
    items = [Conversation(f"{d}{p}-{n}", d, [p, 50, n], [0, 1, 1]) for d in "ab" for p in range(5) for n in range(3)]
    train, heldout = split_heldout(items, 2)
    assert len(heldout) == 2 * 2 * 3
    assert not {(c.domain, c.tokens[0]) for c in train} & {(c.domain, c.tokens[0]) for c in heldout}
    again = split_heldout(items[::-1], 2)[1]
    assert {c.id for c in again} == {c.id for c in heldout}
    with pytest.raises(ValueError, match="cannot hold out 5 prompts of domain 'a': it has 5"):
        split_heldout(items, 5)


def test_conversations_file_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "conversations.jsonl"
    made = [Conversation("a", "x", [5, 6, 7, 8, 9], [0, 1, 1, 0, 2]), Conversation("é", "y", [1, 2], [1, 1])]
    write_conversations(path, made)
    assert read_conversations(path) == made
    assert json.loads(path.read_text().splitlines()[0])["answers"] == [[1, 3, 1], [4, 5, 2]]
    path.write_text('{"id":"a","domain":"x","tokens":[1],"answers":[[0,2,1]]}\n')
    with pytest.raises(ValueError, match=r"conversations.jsonl:1: answer \[0, 2\] lies outside its 1 tokens"):
        read_conversations(path)


def test_reading_makes_one_object_an_id(tmp_path: Path) -> None:
    path = tmp_path / "conversations.jsonl"
    write_conversations(path, [Conversation(name, "x", [1000, 2, 1000], [0, 1, 1]) for name in "ab"])
    first, second = read_conversations(path)
    assert first.tokens[0] is first.tokens[2] is second.tokens[0]


def test_a_fingerprint_takes_one_conversation_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [Conversation(f"é{n}", "x", [7, 8, 9] * 20, [0, 1, 1] * 20) for n in range(30)]
    for count in (0, 1, 30):
        rows = [[one.id, one.tokens, one.turns] for one in made[:count]]
        assert conversations_fingerprint(made[:count]) == fingerprint_rows(iter(rows)) == fingerprint(rows)
    longest, dumps = [0], json.dumps

    def watched(*args: Any, **named: Any) -> str:
        longest.append(len(text := dumps(*args, **named)))
        return text

    monkeypatch.setattr("checkpoints.files.json.dumps", watched)
    conversations_fingerprint(made)
    assert 0 < max(longest) < 1000


MIXED = [
    {"id": "r", "prompt_ids": [2, 10], "response_ids": [20, 21, 22, 3], "thinking": True},
    {"id": "n", "prompt_ids": [2, 10, 30], "response_ids": [23, 3], "thinking": False},
]


def test_recorded_rows_of_both_thinking_modes_keep_their_masks_and_declare_neither(tmp_path: Path) -> None:
    kept, report = read_source(SourceSettings("answers_jsonl", lines(tmp_path / "a.jsonl", MIXED)), tiny_tokenizer())
    assert report.thinking is None
    samples = []
    for one in kept:
        tokens, turns = torch.tensor(one.tokens), torch.tensor(one.turns)
        aux, last = torch.zeros(len(tokens), 1, 2), torch.zeros(len(tokens), 2)
        samples.append(Sample(one.id, tokens, turns, aux, last, torch.zeros_like(tokens), last[:, 0]))
    batch = Collate(12, anchor_multiple=1)([samples])
    assert batch.tokens.tolist() == [[2, 10, 20, 21, 22, 3, 2, 10, 30, 23, 3, 0]]
    assert batch.turns.tolist() == [[0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 0]]
    assert batch.anchors.tolist() == [[2, 3, 4, 9]]
    for rows in (MIXED[:1], MIXED[1:]):
        source = SourceSettings("answers_jsonl", lines(tmp_path / "b.jsonl", rows))
        assert read_source(source, tiny_tokenizer())[1].thinking is rows[0]["thinking"]
    with pytest.raises(ValueError, match="a.jsonl:2: answered with thinking=False, but data.thinking=True"):
        read_source(SourceSettings("answers_jsonl", str(tmp_path / "a.jsonl"), thinking=True), tiny_tokenizer())


def test_of_chats_with_and_without_reasoning_one_kind_fits_a_mode_the_other_is_counted(tmp_path: Path) -> None:
    """Brackets are the thinking block; without thinking the generation prompt holds an empty one."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
        "{{ '(' + (m.get('reasoning_content') or '') + ')' }}{% endif %}{{ m['content'] + '<|im_end|>' + '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
        "{% if enable_thinking is defined and not enable_thinking %}{{ '()' }}{% endif %}{% endif %}"
    )
    reasoned = [*chat("hi"), {"role": "assistant", "content": "c", "reasoning_content": "ab"}]
    rows = [{"id": "r", "messages": reasoned}, {"id": "n", "messages": chat("hi", "d")}]
    path = lines(tmp_path / "rows.jsonl", rows)
    for thinking, name, answer in ((True, "r", "(ab)c"), (False, "n", "d")):
        kept, report = read_source(SourceSettings("jsonl", path, thinking=thinking), tokenizer)
        assert [one.id for one in kept] == [name]
        supervised = [token for token, turn in zip(kept[0].tokens, kept[0].turns, strict=True) if turn]
        assert supervised == [*tokenizer(answer)["input_ids"], END_ID]
        assert (report.thinking, report.dropped) == (thinking, {"refused by the chat template": 1})


def test_token_counts_of_answers_only() -> None:
    made = [Conversation("a", "x", [5, 6, 6, 5], [0, 1, 1, 1]), Conversation("b", "x", [1, 6, 2], [0, 1, 0])]
    assert torch.equal(token_counts(made, 8), torch.tensor([0, 0, 0, 0, 0, 1, 3, 0]))


def test_shipped_prompts_cover_five_domains_and_do_not_overlap() -> None:
    train, heldout = (read_prompts(SourceSettings("builtin"), part) for part in ("train", "heldout"))
    for prompts, each in ((train, 48), (heldout, 8)):
        domains = [prompt.domain for prompt in prompts]
        expected = dict.fromkeys(("chat", "code", "json", "math", "prose"), each)
        assert {d: domains.count(d) for d in set(domains)} == expected
    assert not {prompt_key(p.messages) for p in train} & {prompt_key(p.messages) for p in heldout}
    assert not {p.id for p in train} & {p.id for p in heldout}
    with pytest.raises(ValueError, match="holds prompts only"):
        read_source(SourceSettings("builtin"), tiny_tokenizer())
