"""The target answers: the same text alone and in a crowd, killed or not, in process or through a server."""

import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from rich.console import Console

from data.answers import AnswerSettings, answer, request_seed
from data.chat import Template
from data.conversations import Prompt
from data.decoding import Decoder, Request, next_tokens
from data.journal import Journal, check_header
from data.prepare import show
from drafters.sampling import Sampling
from tests.doubles import CHAT_TEMPLATE, END_ID, tiny_model, tiny_target, tiny_tokenizer

TEXTS = ["hi", "what is tea?", "a", "tell me about the sea, please", "1+1", "yes or no", "why", "how are you today"]
SETTINGS = AnswerSettings(temperature=1.0, top_k=None, max_new_tokens=24, batch_size=3)


def prompts(count: int = 8) -> list[Prompt]:
    return [
        Prompt(f"p{i}", "chat", [{"role": "user", "content": TEXTS[i % len(TEXTS)] + "." * (i // len(TEXTS))}])
        for i in range(count)
    ]


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def alone(model: Any, request: Request, sampling: Sampling, max_new_tokens: int) -> list[int]:
    """One request, whole context through the model at every step: no cache, no padding, no batch."""
    written: list[int] = []
    while len(written) < max_new_tokens and END_ID not in written:
        context = torch.tensor([request.prompt_ids + written])
        with torch.inference_mode():
            logits = model(context).logits[:, -1]
        token = next_tokens(logits, sampling, torch.tensor([request.seed]), torch.tensor([context.shape[1]]))
        written.append(int(token))
    return written


@pytest.mark.parametrize("family", ["llama", "mistral", "deepseek_v3", "qwen3_next"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, 20, 0.95)])
def test_batched_answers_equal_each_prompt_alone(family: str, sampling: Sampling) -> None:
    model = tiny_model(family)
    generator = torch.Generator().manual_seed(3)
    lengths = [5, 40, 3, 17, 60, 2, 9, 31, 4, 90]  # longer prompts arrive late: the buffer has to shift and grow
    requests = [
        Request(str(i), torch.randint(4, 60, (n,), generator=generator).tolist(), request_seed(str(i), 0))
        for i, n in enumerate(lengths)
    ]
    decoder = Decoder(model, sampling, 20, [END_ID], batch_size=4)
    found = {one.id: one for one in decoder.run(requests)}
    assert sorted(found) == sorted(request.id for request in requests)
    for request in requests:
        one = found[request.id]
        assert one.response_ids == alone(model, request, sampling, 20), request.id
        assert one.finish_reason == ("stop" if one.response_ids[-1] == END_ID else "length")
    assert decoder.tokens == sum(len(one.response_ids) for one in found.values())


def test_a_model_that_reads_padding_answers_one_prompt_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the recurrent layers take padding in."""
    model = tiny_model("qwen3_next")
    requests = [Request(str(n), list(range(4, 4 + n)), n) for n in (3, 9)]
    wanted = {one.id: alone(model, one, Sampling(), 8) for one in requests}
    decoder = Decoder(model, Sampling(), 8, [END_ID], batch_size=2)
    assert decoder._blanks_padding([4, 5])
    monkeypatch.setattr(
        "transformers.models.qwen3_next.modeling_qwen3_next.create_recurrent_attention_mask", lambda **_: None
    )
    assert not decoder._blanks_padding([4, 5])
    assert {one.id: one.response_ids for one in decoder.run(requests)} == wanted


def test_long_answers_outgrow_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.decoding.COLUMNS", 4)
    monkeypatch.setattr("data.decoding.PREFILL_TOKENS", 8)
    model = tiny_model("llama")
    requests = [Request(str(n), list(range(4, 4 + n)), n) for n in (3, 6, 4, 9, 5)]
    for one in Decoder(model, Sampling(), 30, [], batch_size=2).run(requests):
        request = next(r for r in requests if r.id == one.id)
        context = list(request.prompt_ids)
        for token in one.response_ids:
            assert token == int(model(torch.tensor([context])).logits[0, -1].argmax())
            context.append(token)
        assert (len(one.response_ids), one.finish_reason) == (30, "length")


def test_top_k_shortcut_draws_what_the_full_vocabulary_draws() -> None:
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(0)) * 3
    seeds, positions = torch.arange(64), torch.arange(64) * 7
    short = next_tokens(logits, Sampling(0.8, 12, 0.9), seeds, positions)
    edge = logits.topk(12).values[:, -1:]
    full = next_tokens(logits.masked_fill(logits < edge, -torch.inf), Sampling(0.8, None, 0.9), seeds, positions)
    assert torch.equal(short, full)
    assert len(set(short.tolist())) > 10


def test_file_holds_prompt_order_and_all_that_was_chosen(tmp_path: Path) -> None:
    target, template = tiny_target(), Template(tiny_tokenizer())
    report = answer(prompts(), SETTINGS, tmp_path / "answers.jsonl", template, target)
    found = rows(tmp_path / "answers.jsonl")
    assert [row["id"] for row in found] == [f"p{i}" for i in range(8)]
    assert set(found[0]) == {
        "id", "domain", "messages", "prompt_ids", "response_ids", "finish_reason", "sampling", "thinking",
    }  # fmt: skip
    assert found[0]["sampling"] == {"temperature": 1.0, "top_k": None, "top_p": None, "seed": 0, "max_new_tokens": 24}
    assert found[1]["prompt_ids"] == template.prompt(prompts()[1].messages)
    assert (report.written, report.reused, report.tokens) == (8, 0, sum(len(row["response_ids"]) for row in found))
    assert not (tmp_path / "answers.jsonl.journal").exists()
    again = answer(prompts(), SETTINGS, tmp_path / "answers.jsonl", template, target)
    assert (again.written, again.reused) == (0, 8)
    assert rows(tmp_path / "answers.jsonl") == found


def test_a_smaller_run_keeps_the_answers_of_a_larger_one(tmp_path: Path) -> None:
    target, template = tiny_target(), Template(tiny_tokenizer())
    answer(prompts(), SETTINGS, tmp_path / "answers.jsonl", template, target)
    found = rows(tmp_path / "answers.jsonl")
    some = answer(prompts()[3:5], SETTINGS, tmp_path / "answers.jsonl", template, target)
    assert (some.asked, some.reused, some.ids) == (2, 2, ["p3", "p4"])
    assert "ids" not in some.as_dict()
    kept = rows(tmp_path / "answers.jsonl")
    assert [row["id"] for row in kept] == ["p3", "p4", "p0", "p1", "p2", "p5", "p6", "p7"]
    again = answer(prompts(), SETTINGS, tmp_path / "answers.jsonl", template, target)
    assert (again.written, again.reused) == (0, 8)
    assert rows(tmp_path / "answers.jsonl") == found


def test_other_settings_other_prompts_and_repeated_ids_are_refused(tmp_path: Path) -> None:
    target, template, path = tiny_target(), Template(tiny_tokenizer()), tmp_path / "answers.jsonl"
    answer(prompts(2), SETTINGS, path, template, target)
    with pytest.raises(ValueError, match=r"begun by another run \(sampling: .*'temperature': 1.0.*'temperature': 0.5"):
        answer(prompts(2), dataclasses.replace(SETTINGS, temperature=0.5), path, template, target)
    with pytest.raises(ValueError, match="id 'p0' was answered for another prompt"):
        answer([Prompt("p0", "chat", prompts()[3].messages)], SETTINGS, path, template, target)
    with pytest.raises(ValueError, match="two prompts have the id 'p1'"):
        answer([prompts()[1], prompts()[1]], SETTINGS, path, template, target)
    long = AnswerSettings(max_new_tokens=4, max_prompt_tokens=5)
    with pytest.raises(ValueError, match=r"every prompt was dropped: \{'longer than 5 tokens': 2\}"):
        answer(prompts(2), long, tmp_path / "b.jsonl", template, target)


def test_samples_differ_and_carry_their_number(tmp_path: Path) -> None:
    settings = dataclasses.replace(SETTINGS, samples=2)
    answer(prompts(1), settings, tmp_path / "a.jsonl", Template(tiny_tokenizer()), tiny_target())
    first, second = rows(tmp_path / "a.jsonl")
    assert (first["id"], second["id"]) == ("p0", "p0#1")
    assert first["response_ids"] != second["response_ids"]


def test_one_sample_is_extended_to_several(tmp_path: Path) -> None:
    target, template, path = tiny_target(), Template(tiny_tokenizer()), tmp_path / "answers.jsonl"
    answer(prompts(2), SETTINGS, path, template, target)
    once = rows(path)
    more = answer(prompts(2), dataclasses.replace(SETTINGS, samples=2), path, template, target)
    assert (more.reused, more.written, more.ids) == (2, 2, ["p0", "p0#1", "p1", "p1#1"])
    assert rows(path)[::2] == once
    less = answer(prompts(2), SETTINGS, path, template, target)
    assert (less.reused, less.written, less.ids) == (2, 0, ["p0", "p1"])


KILLED = """
import sys, time
from pathlib import Path
import data.decoding
from data.answers import answer
from data.chat import Template
from tests.doubles import tiny_target, tiny_tokenizer
from tests.unit.test_answers import SETTINGS, prompts
if sys.argv[2] == "slow":
    step = data.decoding.Decoder._step
    data.decoding.Decoder._step = lambda *a: (time.sleep(0.05), step(*a))[1]
answer(prompts(20), SETTINGS, Path(sys.argv[1]), Template(tiny_tokenizer()), tiny_target())
"""


def test_killed_and_resumed_gives_the_uninterrupted_file(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    journal = tmp_path / "broken.jsonl.journal"
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(broken), "slow"], cwd=root, env=environment)
    began = time.monotonic()
    while not (journal.exists() and journal.read_bytes().count(b"\n") > 4):
        assert process.poll() is None, "answered everything before it could be killed"
        assert time.monotonic() - began < 300
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not broken.exists()
    done = journal.read_bytes().count(b"\n") - 1
    journal.write_bytes(journal.read_bytes() + b'{"id":"p19","domain":"ch')  # torn as a kill within a write leaves it
    template, target = Template(tiny_tokenizer()), tiny_target()
    resumed = answer(prompts(20), SETTINGS, broken, template, target)
    assert 4 <= done <= resumed.reused < 20
    assert resumed.reused + resumed.written == 20
    answer(prompts(20), SETTINGS, whole, template, target)
    assert broken.read_bytes() == whole.read_bytes()
    assert not journal.exists()


def test_journal_refuses_a_broken_line_in_the_middle(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_text('{"header":{"a":1}}\n{"id":"x"\n{"id":"y"}\n')
    with pytest.raises(ValueError, match="j:2: not whole JSON"):
        Journal(path, {"a": 1})


class Server:
    """An OpenAI-compatible server in memory. Fails each request's first tries as told."""

    def __init__(self, failures: dict[str, list[int]] | None = None, **extra: Any) -> None:
        self.failures, self.extra = failures or {}, extra
        self.bodies: list[dict[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.bodies.append(body)
        text = body["messages"][-1]["content"]
        if self.failures.get(text):
            return httpx.Response(self.failures[text].pop(0), text="busy", headers={"retry-after": "0"})
        choice = {"message": {"content": "ok then"}, "finish_reason": "stop"} | self.extra.get("choice", {})
        return httpx.Response(200, json={"choices": [choice]} | self.extra.get("reply", {}))


def ask(tmp_path: Path, server: Server, count: int = 8, **changes: Any) -> Any:
    more = {"base_url": "http://test/v1", "model": "tiny", "concurrency": 3, "retries": 2, "backoff": 0.0} | changes
    settings = dataclasses.replace(SETTINGS, backend="server", server=more)
    template = Template(tiny_tokenizer())
    return answer(prompts(count), settings, tmp_path / "s.jsonl", template, tiny_target(), httpx.MockTransport(server))


def test_server_text_is_retokenised_and_verified(tmp_path: Path) -> None:
    report = ask(tmp_path, Server({"hi": [503, 429]}))
    assert (report.written, report.errors) == (8, {})
    found = rows(tmp_path / "s.jsonl")
    assert [row["id"] for row in found] == [f"p{i}" for i in range(8)]
    assert found[0]["response_ids"] == [*tiny_tokenizer()("ok then")["input_ids"], END_ID]


def test_server_answer_cut_at_its_length_has_no_end_of_turn(tmp_path: Path) -> None:
    ask(tmp_path, Server(choice={"finish_reason": "length"}), count=1)
    (row,) = rows(tmp_path / "s.jsonl")
    assert row["response_ids"] == tiny_tokenizer()("ok then")["input_ids"]
    assert row["finish_reason"] == "length"


def test_server_token_ids_are_taken_as_they_are(tmp_path: Path) -> None:
    server = Server(choice={"token_ids": [7, 7, END_ID]})
    ask(tmp_path, server, count=1)
    assert rows(tmp_path / "s.jsonl")[0]["response_ids"] == [7, 7, END_ID]
    assert server.bodies[0]["return_token_ids"] is True
    assert (server.bodies[0]["temperature"], server.bodies[0]["max_tokens"]) == (1.0, 24)
    assert "top_k" not in server.bodies[0]


def test_server_errors_are_recorded_by_id_and_asked_again(tmp_path: Path) -> None:
    report = ask(tmp_path, Server({"hi": [500, 500, 500], "why": [400]}))
    assert report.errors == {"p0": "gave up after 3 tries: HTTP 500: busy", "p6": "HTTP 400: busy"}
    assert [row["id"] for row in rows(tmp_path / "s.jsonl")] == ["p1", "p2", "p3", "p4", "p5", "p7"]
    again = ask(tmp_path, server := Server())
    assert (again.reused, again.written, again.errors) == (6, 2, {})
    assert len(server.bodies) == 2
    assert [row["id"] for row in rows(tmp_path / "s.jsonl")] == [f"p{i}" for i in range(8)]
    assert not (tmp_path / "s.jsonl.journal").exists()


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (Server(reply={"prompt_token_ids": [1, 2]}), "the server reads another prompt"),
        (Server(choice={"message": {"content": ""}, "token_ids": []}), "the answer is empty"),
        (Server(reply={"choices": []}), "not a chat completion"),
        (Server(choice={"message": {"content": "costs 5 £"}}), ".*characters that the tokenizer does not know"),
    ],
)
def test_unusable_server_answers(tmp_path: Path, server: Server, message: str) -> None:
    with pytest.raises(ValueError, match=f"no prompt was answered; {message}"):
        ask(tmp_path, server, count=1)


def test_thinking_choice_reaches_server_and_rows(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE + "{% if add_generation_prompt and enable_thinking is false %}-{% endif %}"
    server = Server(choice={"token_ids": [7, END_ID]})
    more = {"base_url": "http://test/v1", "model": "tiny"}
    settings = dataclasses.replace(SETTINGS, backend="server", server=more)
    template = Template(tokenizer, thinking=False)
    answer(prompts(1), settings, tmp_path / "t.jsonl", template, tiny_target(), httpx.MockTransport(server))
    assert server.bodies[0]["chat_template_kwargs"]["enable_thinking"] is False
    assert rows(tmp_path / "t.jsonl")[0]["thinking"] is False


def test_answer_settings_are_checked() -> None:
    for values, message in [
        ({"backend": "cloud"}, "answers.backend must be local or server"),
        ({"backend": "server"}, "needs answers.server="),
        ({"temperature": -1}, "temperature must be >= 0"),
        ({"batch_size": 0}, "answers.batch_size must be an integer >= 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            AnswerSettings(**values)
    with pytest.raises(ValueError, match="unknown key.* in answers.server: url"):
        AnswerSettings(backend="server", server={"url": "x"}).server_settings()


def test_a_target_is_known_by_its_weights_not_by_its_name(tmp_path: Path) -> None:
    """A folder under another spelling goes on; other weights, or a target without a fingerprint, do not."""
    wrote = {"sampling": 1, "target": {"name": "./a", "revision": None, "weights": "w", "vocab_size": 9}}
    same = {"sampling": 1, "target": wrote["target"] | {"name": "/x/a", "revision": "1f"}}
    with Journal(tmp_path / "j", wrote) as journal:
        journal.append({"id": "one"})
    with Journal(tmp_path / "j", same) as journal:
        assert list(journal.rows) == ["one"]
    with pytest.raises(ValueError, match="begun by another run \\(target: .*'weights': 'w'.*'weights': 'v'"):
        check_header(wrote, {"sampling": 1, "target": same["target"] | {"weights": "v"}}, tmp_path / "j")
    with pytest.raises(ValueError, match=r"'\./a'.*'b'"):
        check_header({"target": {"name": "./a"}}, {"target": {"name": "b"}}, tmp_path / "j")


def test_failed_answers_are_shown() -> None:
    """prepare says how many prompts have no answer, and why the first has none."""
    found = {"dropped": {"too long": 2}, "errors": {"p6": "HTTP 400: busy", "p7": "HTTP 500"}}
    rows = {"read": 9, "dropped": {}, "truncated": 0}
    summary = {"target": {"name": "t"}, "rows": rows, "prompts": None, "answers": found, "domains": {}, "tokens": 1}
    summary |= {"answer_tokens": 1, "coverage": [], "layers": [0], "feature_bytes": 0}
    console = Console(record=True, width=120, file=io.StringIO())
    show(console, summary)
    text = console.export_text()
    assert re.search(r"prompts without an answer .* 2 ", text)
    assert "p6: HTTP 400: busy" in text
