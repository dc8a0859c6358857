"""Measuring servers: the stream, the counters, the intervals, and servers that die or hang, against a fake engine."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from eval.engine_client import Answered, Asked, Client
from eval.engine_dialects import DIALECTS, Ask, Counters, Setup, samples
from eval.engine_figures import Timed, counted, level, side, span, told
from eval.engine_server import Server, free_port, started
from eval.engine_settings import ServingSettings
from tests import fake_engine
from tests.fake_engine import Engine, text

FAKE = Path(fake_engine.__file__)
VLLM, SGLANG = DIALECTS["vllm"], DIALECTS["sglang"]
EIGHT = Ask([5, 6], 8, (3,))  # rounds accept 2, 0, 3: 1 + 3 + 1 + 3 tokens, the last of four cut off


@contextmanager
def served(drafted: bool = True, fault: str = "", **how: Any) -> Iterator[Engine]:
    engine = Engine(0, drafted, fault, **how)
    thread = threading.Thread(target=engine.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield engine
    finally:
        engine.shutdown()
        engine.server_close()


def client(engine: Engine, dialect: Any = VLLM, timeout_s: float = 20.0) -> Client:
    return Client(Server(f"http://127.0.0.1:{engine.server_port}"), dialect, fake_engine.SLOTS, timeout_s)


def command(port: int, *more: str) -> list[str]:
    return [sys.executable, str(FAKE), "--port", str(port), *more]


def alive(pid: int) -> bool:
    """Whether a process runs; a dead one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(pid)


def test_answers_rounds_and_counters_are_read_as_they_were() -> None:
    with served() as engine:
        asked = client(engine).timed([EIGHT], 1)
    (answer,) = asked.answers
    assert answer.tokens == text([5, 6], 8)
    assert answer.counts == [1, 3, 1, 3]
    assert answer.rounds == [(2, 3), (0, 3), (3, 3)]
    assert answer.ordered
    drafted = answer.drafted()
    assert drafted is not None
    assert (drafted.emitted, drafted.accepted, drafted.verified) == ([3, 1, 3], [2, 0, 3], [2, 0, 3])
    # Not the totals, which began at 100 rounds.
    assert asked.moved == Counters(3, 5, [2, 2, 1], 8)
    found = told(asked.answers, 3)
    assert found.tau == pytest.approx(7 / 3)
    assert found.tau_verified == pytest.approx(1 + 5 / 3)
    assert found.alpha == pytest.approx([2 / 3, 1.0, 0.5])
    assert engine.bodies[0]["temperature"] == 0
    assert engine.bodies[0]["stop_token_ids"] == [3]


def test_acceptance_by_counters_alone() -> None:
    """A server that tells no rounds of a request: tau and alpha from what its counters moved by."""
    with served(per_request=False) as engine:
        asked = client(engine).timed([EIGHT], 1)
    assert asked.answers[0].rounds is None
    found = counted([asked, asked], 3)
    assert found.tau == pytest.approx(1 + 5 / 3)
    assert found.alpha == pytest.approx([2 / 3, 1.0, 0.5])
    assert found.rounds == 6
    with served(drafted=False) as engine:
        plain = client(engine).timed([EIGHT], 1)
    with pytest.raises(ValueError, match="no drafter is at work"):
        counted([plain], 3)


def test_sglang_tells_a_histogram_and_counts_calls() -> None:
    with served() as engine:
        asked = client(engine, SGLANG).timed([EIGHT, Ask([7], 5, (3,))], 2)
        version = client(engine, SGLANG).version()
    assert version == "fake-2"
    first, second = asked.answers
    assert first.tokens == text([5, 6], 8)
    assert first.rounds == [(0, 3), (2, 3), (3, 3)]
    assert not first.ordered
    assert second.rounds == [(0, 3), (2, 3)]
    assert asked.moved == Counters(5, None, [], 13)
    # 13 tokens, 2 of them came with the prompts.
    assert asked.moved is not None
    assert asked.moved.tau(2) == pytest.approx(11 / 5)
    assert engine.bodies[0]["sampling_params"]["max_new_tokens"] in (5, 8)


def test_a_version_is_asked_for_where_it_may_be_and_never_guessed() -> None:
    for path, version in (("/get_server_info", "fake-2"), ("/nowhere", "unknown")):
        with served(info=path) as engine:
            assert client(engine, SGLANG).version() == version
    with served() as engine:
        for engine.about in ("", "[]", "{}", '{"version": null}'):
            assert client(engine, SGLANG).version() == "unknown"


def test_incremental_streams_of_sglang_are_read_alike() -> None:
    whole = SGLANG.read({"output_ids": [1, 2, 3, 4], "meta_info": {"completion_tokens": 4}}, 3, 3)
    new = SGLANG.read({"output_ids": [4], "meta_info": {"completion_tokens": 4}}, 3, 3)
    assert whole.tokens == new.tokens == [4]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_so_many_requests_are_in_flight(concurrency: int) -> None:
    asks = [Ask([i], 4, ()) for i in range(6)]
    with served(delay=0.02) as engine:
        answers = client(engine).ask(asks, concurrency)
    assert engine.most == concurrency
    assert [one.tokens for one in answers] == [text([i], 4) for i in range(6)]


def test_arrivals_are_counted_from_the_request() -> None:
    """The server waits 0.1 s before each of four events: no arrival can be earlier, however busy we are."""
    with served(delay=0.1) as engine:
        (answer,) = client(engine).ask([EIGHT], 1)
    assert len(answer.arrivals) == 4
    assert all(at >= 0.1 * count - 0.005 for count, at in enumerate(answer.arrivals, start=1))
    assert answer.seconds >= answer.arrivals[-1]


def test_time_to_the_first_token_and_between_tokens() -> None:
    """Gaps of 300 ms bring 3, 1 and 3 tokens: 100, 300 and 100 ms a token."""
    answer = Answered(list(range(8)), [0.2, 0.5, 0.8, 1.1], [1, 3, 1, 3], seconds=1.1)
    found = side(Timed(["a"], [Asked([answer], 1.1)]), None).latency
    assert found.first_ms["p50"] == pytest.approx(200)
    assert found.gap_ms is not None
    assert found.gap_ms == {"p50": pytest.approx(300), "p90": pytest.approx(300), "p99": pytest.approx(300)}
    assert found.token_ms is not None
    assert found.token_ms["p50"] == pytest.approx(100)
    assert found.token_ms["p99"] > 280


def test_a_hang_is_an_error_in_time() -> None:
    with served(fault="hang") as engine, pytest.raises(RuntimeError, match=r"did not answer a request within 0\.3 s"):
        client(engine, timeout_s=0.3).ask([EIGHT], 1)


def test_a_connection_that_is_not_taken_is_no_slow_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: Any) -> None:
        raise httpx.ConnectTimeout("no")

    with served() as engine:
        asking = client(engine, timeout_s=600.0)
        monkeypatch.setattr(asking, "_one", never)
        with pytest.raises(RuntimeError, match="did not take a connection within 10 s"):
            asking.ask([EIGHT], 1)


def test_an_answer_of_one_token_has_no_rounds_in_their_order() -> None:
    """vLLM leaves the lists of rounds out where there are none; a histogram with rounds has lost their order."""
    none = VLLM.read({"choices": [], "metrics": {"speculative_decoding": {"acceptance_histogram": [0, 0, 0, 0]}}}, 1, 3)
    assert (none.rounds, none.ordered) == ([], True)
    some = VLLM.read({"choices": [], "metrics": {"speculative_decoding": {"acceptance_histogram": [1, 0, 2, 0]}}}, 8, 3)
    assert (some.rounds, some.ordered) == ([(0, 3), (2, 3), (2, 3)], False)


@pytest.mark.parametrize(("fault", "words"), [("refuse", "HTTP 400.*too long"), ("short", "ended before")])
def test_a_failed_request_is_named(fault: str, words: str) -> None:
    with served(fault=fault) as engine, pytest.raises(RuntimeError, match=words):
        client(engine).ask([EIGHT, EIGHT], 2)


def test_a_server_without_token_ids_is_named() -> None:
    with pytest.raises(ValueError, match="return_token_ids"):
        VLLM.read({"choices": [{"text": "a"}]}, 0, 3)


def test_counters_that_fall_mean_another_server() -> None:
    with pytest.raises(ValueError, match="started anew"):
        Counters(3, 2, [2], 10).since(Counters(9, 2, [2], 20))


def test_prometheus_text() -> None:
    page = '# TYPE a counter\na{x="1",y="a\\"}b"} 2.0\nb 3e2\n\n'
    assert list(samples(page)) == [("a", {"x": "1", "y": 'a\\"}b'}, 2.0), ("b", {}, 300.0)]
    with pytest.raises(ValueError, match="Prometheus"):
        list(samples("<html>"))


# Servers started here
# ------------------------------------------------------------------------------------------------------------------


def test_a_server_and_its_children_end_with_the_block(tmp_path: Path) -> None:
    port, note = free_port(), tmp_path / "child"
    with started(command(port, "--child", str(note)), port, tmp_path / "log", 30) as server:
        child = int(note.read_text())
        assert alive(child)
        assert Client(server, VLLM, 3, 20).ask([EIGHT], 1)[0].tokens == text([5, 6], 8)
        holder = server.process.pid if server.process else 0
    assert gone(child)
    assert gone(holder)
    assert "a line of log" in (tmp_path / "log").read_text()


def test_an_error_inside_ends_it_too(tmp_path: Path) -> None:
    port, note = free_port(), tmp_path / "child"

    def fail() -> None:
        with started(command(port, "--child", str(note)), port, tmp_path / "log", 30):
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        fail()
    assert gone(int(note.read_text()))


def test_a_killed_starter_leaves_no_server(tmp_path: Path) -> None:
    """SIGKILL runs no cleanup of ours: the supervisor sees the pipe's end."""
    port, note = free_port(), tmp_path / "child"
    code = (
        "import sys, time; from pathlib import Path; from eval.engine_server import started\n"
        f"with started({command(port, '--child', str(note))!r}, {port}, Path({str(tmp_path / 'log')!r}), 30) as one:\n"
        "    print(one.process.pid, flush=True); time.sleep(60)\n"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        cwd=FAKE.parents[1],
        env=os.environ | {"PYTHONPATH": str(FAKE.parents[1])},
    )
    assert starter.stdout is not None
    holder, child = int(starter.stdout.readline()), int(note.read_text())
    assert alive(holder)
    assert alive(child)
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    starter.stdout.close()
    assert gone(child)
    assert gone(holder)


def test_a_server_that_dies_names_its_log(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"

    def run() -> None:
        with started(command(port, "--fault", "die"), port, log, 30) as server:
            Client(server, VLLM, 3, 20).ask([EIGHT], 1)

    with pytest.raises(
        RuntimeError, match=r"(?s)failed a request .*ended with code 7; its log .*log ends:.*fake engine"
    ):
        run()


def test_a_server_that_does_not_start_names_its_log(tmp_path: Path) -> None:
    port = free_port()
    with (
        pytest.raises(RuntimeError, match=r"(?s)died while starting; it ended with code 1.*no such model"),
        started(command(port, "--fault", "start"), port, tmp_path / "log", 30),
    ):
        pytest.fail("no server")


def test_a_server_that_never_gets_healthy_is_stopped(tmp_path: Path) -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    with (
        pytest.raises(RuntimeError, match="was not healthy after 0.5 s; it still runs"),
        started(sleeper, free_port(), tmp_path / "log", 0.5),
    ):
        pytest.fail("no server")


# Commands
# ------------------------------------------------------------------------------------------------------------------

EXPORT = {
    "engine": "sglang",
    "num_slots": 3,
    "speculative": {"method": "m"},
    "whole": False,
    "command": "python -m sglang.launch_server --model-path OLD --speculative-algorithm A"
    " --speculative-draft-model-path GONE"
    " --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4",
}
SETUP = Setup("py", "target", Path("/export"), EXPORT, 3, "bfloat16", 99, 16, ("--extra",))


def test_commands_bind_to_loopback_and_differ_in_the_drafter_alone() -> None:
    for dialect in (VLLM, SGLANG):
        plain, drafted = (dialect.command(SETUP, 5, one) for one in (False, True))
        assert plain[plain.index("--host") + 1] == "127.0.0.1"
        assert plain[plain.index("--port") + 1] == "5"
        assert drafted[: len(plain)] == plain
        assert "--extra" in plain
        assert "target" in plain
    assert '{"method": "m", "num_speculative_tokens": 3, "model": "/export"}' in VLLM.command(SETUP, 5, True)


def test_an_export_that_holds_the_target_is_opened_as_one() -> None:
    whole = replace(SETUP, provenance=EXPORT | {"whole": True})
    assert "/export" in VLLM.command(whole, 5, True)
    assert "target" not in VLLM.command(whole, 5, True)
    assert "target" in VLLM.command(whole, 5, False)
    assert '{"method": "m", "num_speculative_tokens": 3}' in VLLM.command(whole, 5, True)


def test_sglang_words_come_from_the_export() -> None:
    own = SGLANG.command(SETUP, 5, True)
    own = own[own.index("--speculative-algorithm") :]
    assert own[:4] == ["--speculative-algorithm", "A", "--speculative-draft-model-path", "/export"]
    assert own[4:] == EXPORT["command"].split()[9:]  # type: ignore[attr-defined]
    fewer = SGLANG.command(replace(SETUP, num_slots=2), 5, True)
    assert fewer[fewer.index("--speculative-num-steps") + 1] == "2"
    assert fewer[fewer.index("--speculative-num-draft-tokens") + 1] == "3"
    fixed = EXPORT | {"command": "x --speculative-algorithm B --speculative-draft-model-path GONE"}
    with pytest.raises(ValueError, match="its own number of slots"):
        SGLANG.command(replace(SETUP, num_slots=2, provenance=fixed), 5, True)


# Figures
# ------------------------------------------------------------------------------------------------------------------


def answer(tokens: int, seconds: float, rounds: list[tuple[int, int]] | None = None) -> Answered:
    """First token after a tenth of the time, the others at the end."""
    return Answered(list(range(tokens)), [0.1 * seconds, seconds], [1, tokens - 1], rounds, True, seconds)


def test_speeds_by_hand() -> None:
    """Two requests of 2 s and 4 s, two in flight, in 4 s of wall time: 30 tokens in 4 s."""
    timed = Timed(["a", "b"], [Asked([answer(10, 2.0), answer(20, 4.0)], 4.0)])
    found = side(timed, None)
    assert found.tokens_per_s.value == pytest.approx(7.5)
    assert found.in_flight == pytest.approx(1.5)
    assert found.user_tokens_per_s.value == pytest.approx(28 / 5.4)
    assert found.tau is None
    assert found.passes == pytest.approx([7.5])
    # Both prompts give 5 tokens a second of their own time, so resampling changes nothing.
    assert found.tokens_per_s.low == pytest.approx(7.5)
    assert found.tokens_per_s.high == pytest.approx(7.5)


def test_speedup_is_paired_and_its_interval_holds_the_truth() -> None:
    """Prompts take 0.5 to 10 s, the drafter is 1.5 to 2.5 times as fast: pairing removes the first."""
    names = [str(i) for i in range(40)]
    seconds = [0.5 + i / 4 for i in range(40)]
    gains = [1.5 + (i % 5) / 4 for i in range(40)]
    plain = Timed(names, [Asked([answer(20, s) for s in seconds], sum(seconds))])
    fast = [s / g for s, g in zip(seconds, gains, strict=True)]
    drafted = Timed(names, [Asked([answer(20, s, [(1, 3)] * 10) for s in fast], sum(fast))])
    found = level(1, drafted, plain, 3)
    assert found.speedup is not None
    assert found.speedup.value == pytest.approx(sum(seconds) / sum(fast))
    assert 1.5 < found.speedup.low < found.speedup.value < found.speedup.high < 2.5
    assert found.speedup.high - found.speedup.low < 0.3
    wide = found.drafter.tokens_per_s
    assert (wide.high - wide.low) / wide.value > 0.3
    assert found.same_answers == 40
    with pytest.raises(ValueError, match="different requests"):
        level(1, drafted, Timed(names[::-1], plain.passes), 3)


def test_interval_is_of_the_resamplings() -> None:
    import numpy as np

    found = span(np.array([7.0, *range(101)]))
    assert (found.value, found.low, found.high) == (7.0, 2.5, 97.5)


def test_answers_of_one_prompt_are_resampled_together() -> None:
    """Ten equal answers of one prompt are one draw, not ten: with two prompts the interval spans both."""
    slow, fast = [answer(20, 4.0)] * 10, [answer(20, 1.0)] * 10
    found = side(Timed(["a"] * 10 + ["b"] * 10, [Asked(slow + fast, 50.0)]), None).tokens_per_s
    assert found.low == pytest.approx(5.0)
    assert found.high == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"start": "fly"}, "start must be"),
        ({"concurrency": [1, 1]}, "different numbers"),
        ({"concurrency": []}, "different numbers"),
        ({"baseline_url": "http://x"}, "needs url"),
        ({"repeats": 0}, "repeats must be"),
        ({"server_args": ["--host", "0.0.0.0"]}, "must not hold --host: servers listen on 127.0.0.1 and a free port"),
        ({"server_args": ["--enforce-eager", "--host=0.0.0.0", "--port", 80]}, "must not hold --host, --port"),
        ({"server_args": ["--hos", "0.0.0.0"]}, "must not hold --hos"),
    ],
)
def test_settings_out_of_range(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ServingSettings(**values)


def test_other_words_for_servers_are_taken() -> None:
    words = ["--enforce-eager", "--", "--host-name", "x", "--hf-overrides={}"]
    assert ServingSettings(server_args=words).server_args == words
