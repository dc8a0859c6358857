"""Asks a server: streams answers, a fixed number at a time, and reads its counters.

A closed loop: `concurrency` users each send their next request when the last one's answer is whole. Times are the
client's own, from sending a request to each event that brings tokens.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from eval.decoder import Generation
from eval.engine_dialects import Ask, Counters, Dialect, Rounds
from eval.engine_server import Server, certificates

CONNECT_S, QUICK_S = 10.0, 30.0
SETTLE_S, SETTLE_READS = 0.1, 50
PREFIX = b"data:"
logging.getLogger("httpx").setLevel(logging.WARNING)  # a line a request, while it is timed


@dataclass
class Answered:
    """One answer. arrivals: seconds since the request was sent of each event with tokens; counts: its tokens. rounds:
    (accepted, proposed) of each, None where the server told none; ordered: whether in the order in which they were."""

    tokens: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    rounds: Rounds | None = None
    ordered: bool = False
    seconds: float = 0.0

    def drafted(self) -> Generation | None:
        """The rounds as our harness records them, the last cut at the answer's end; None where they are not known.

        A server goes on to count what it verified behind an end of turn; `verified` keeps that.
        """
        if self.rounds is None:
            return None
        found, left = Generation(tokens=self.tokens), len(self.tokens) - 1
        for accepted, proposed in self.rounds:
            if left < 1:
                break
            emitted = min(accepted + 1, left)
            left -= emitted
            found.add_round(emitted, accepted, proposed)
        return found

    def streamed(self) -> Generation:
        """The events as arrivals, for latency alone."""
        return Generation(tokens=self.tokens, emitted=self.counts[1:], arrivals=self.arrivals)


@dataclass(frozen=True)
class Asked:
    """What one timed pass brought: answers in the order of requests, wall seconds, what the counters moved by."""

    answers: list[Answered]
    seconds: float
    moved: Counters | None = None


class Client:
    """Speaks one dialect to one server. timeout_s: of a whole request. RuntimeError names the server, and its log when
    it was started here, on whatever goes wrong."""

    def __init__(self, server: Server, dialect: Dialect, num_slots: int, timeout_s: float) -> None:
        self.server, self.dialect, self.num_slots, self.timeout_s = server, dialect, num_slots, timeout_s
        self.model = str(self._get(dialect.models)["data"][0]["id"])

    def version(self) -> str:
        """The server's own word for its version; "unknown" where none of the dialect's pages tells it, which is no
        reason to end a measurement."""
        for path in self.dialect.versions:
            with suppress(RuntimeError, ValueError):  # no such page here, or not JSON
                found = self._get(path)
                if isinstance(found, dict) and isinstance(found.get("version"), str):
                    return found["version"]
        return "unknown"

    def ask(self, asks: Sequence[Ask], concurrency: int) -> list[Answered]:
        """Answers to all requests, `concurrency` at a time."""
        try:
            return asyncio.run(self._ask(asks, concurrency))
        except httpx.ConnectTimeout:
            raise self.server.failure(f"did not take a connection within {CONNECT_S:g} s") from None
        except (TimeoutError, httpx.TimeoutException):
            raise self.server.failure(f"did not answer a request within {self.timeout_s:g} s") from None
        except (httpx.HTTPError, ValueError, KeyError, EOFError) as error:
            raise self.server.failure(f"failed a request ({type(error).__name__}: {error})") from error

    def timed(self, asks: Sequence[Ask], concurrency: int) -> Asked:
        """The same, timed and counted."""
        before = self.counters()
        started = time.perf_counter()
        answers = self.ask(asks, concurrency)
        seconds = time.perf_counter() - started
        return Asked(answers, seconds, self.counters().since(before))

    def counters(self) -> Counters:
        """The counters once two readings agree: an engine counts its last step after the answer has left."""
        found = self._counters()
        for _ in range(SETTLE_READS):
            time.sleep(SETTLE_S)
            again = self._counters()
            if again == found:
                break
            found = again
        return found

    def _counters(self) -> Counters:
        return self.dialect.counters(self._text("/metrics"))

    def _get(self, path: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._text(path))
        return found

    def _text(self, path: str) -> str:
        try:
            # A proxy of the environment is no way to this machine.
            with httpx.Client(timeout=QUICK_S, trust_env=False, verify=certificates(), follow_redirects=True) as client:
                found = client.get(f"{self.server.url}{path}")
            found.raise_for_status()
        except httpx.HTTPError as error:
            raise self.server.failure(f"did not answer GET {path} ({type(error).__name__}: {error})") from error
        return found.text

    async def _ask(self, asks: Sequence[Ask], concurrency: int) -> list[Answered]:
        answers = [Answered() for _ in asks]
        waiting: Iterator[tuple[int, Ask]] = iter(list(enumerate(asks)))
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        wait = httpx.Timeout(self.timeout_s, connect=CONNECT_S)
        how: dict[str, Any] = {"timeout": wait, "limits": limits, "trust_env": False, "verify": certificates()}
        async with httpx.AsyncClient(**how) as client:

            async def user() -> None:
                for index, ask in waiting:
                    async with asyncio.timeout(self.timeout_s):
                        await self._one(client, ask, answers[index])

            users = [asyncio.create_task(user()) for _ in range(min(concurrency, len(asks)))]
            try:
                await asyncio.gather(*users)
            finally:
                for one in users:
                    one.cancel()
                await asyncio.gather(*users, return_exceptions=True)
        return answers

    async def _one(self, client: httpx.AsyncClient, ask: Ask, into: Answered) -> None:
        body = self.dialect.body(ask, self.model)
        started = time.perf_counter()
        async with client.stream("POST", f"{self.server.url}{self.dialect.path}", json=body) as response:
            if response.status_code != httpx.codes.OK:
                said = (await response.aread()).decode(errors="replace")[:1000]
                raise ValueError(f"HTTP {response.status_code}: {said}")
            async for event in events(response):
                piece = self.dialect.read(event, len(into.tokens), self.num_slots)
                if piece.tokens:
                    into.arrivals.append(time.perf_counter() - started)
                    into.counts.append(len(piece.tokens))
                    into.tokens += piece.tokens
                if piece.rounds is not None:
                    into.rounds, into.ordered = piece.rounds, piece.ordered
        into.seconds = time.perf_counter() - started
        if not into.tokens:
            raise EOFError("an answer came without tokens")


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each server-sent event, up to [DONE]. EOFError when the stream ends before."""
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if not line.startswith(PREFIX):
                continue
            data = line[len(PREFIX) :].strip()
            if data == b"[DONE]":
                return
            yield json.loads(data)
    raise EOFError("the stream ended before [DONE]")
