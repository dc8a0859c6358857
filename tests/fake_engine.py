"""A serving engine in a few lines: streams known answers in known rounds, and moves vLLM's and SGLang's counters.

    python fake_engine.py --port PORT [--drafted] [--fault die|hang|short|other] [--delay S] [--child FILE]
        [--info PATH]

Answer to a prompt: token i is (sum of its ids + i) % 50 + 4, up to max_tokens. Drafted, rounds accept 2, 0, 3, 2, ...
of 3 drafts. Every event waits --delay seconds. Faults come with the first request of more than 4 tokens. --child: start
a child process that lives until killed, its id in FILE. --info: where SGLang tells its version. Standard library only.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ACCEPTED, SLOTS = (2, 0, 3), 3


def text(ids: list[int], count: int) -> list[int]:
    """The known answer."""
    return [(sum(ids) + i) % 50 + 4 for i in range(count)]


def rounds(count: int) -> list[int]:
    """Accepted drafts of each round of an answer of `count` tokens, the last uncut."""
    found, left = [], count - 1
    while left > 0:
        found.append(ACCEPTED[len(found) % len(ACCEPTED)])
        left -= found[-1] + 1
    return found


class Engine(ThreadingHTTPServer):
    """State of a server."""

    daemon_threads = True

    def __init__(
        self,
        port: int,
        drafted: bool,
        fault: str = "",
        delay: float = 0.0,
        per_request: bool = True,
        info: str = "/server_info",
    ) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.info, self.about = info, '{"version": "fake-2"}'
        self.drafted, self.fault, self.delay, self.per_request = drafted, fault, delay, per_request
        # Totals never start at zero in the life of a server that others use.
        self.drafts, self.accepted, self.per_slot, self.tokens = 100, 50, [40, 10, 0], 1000
        self.flying, self.most, self.bodies = 0, 0, list[dict[str, Any]]()
        self.lock = threading.Lock()

    def count(self, accepted: int) -> None:
        with self.lock:
            self.drafts += 1
            self.accepted += accepted
            for slot in range(accepted):
                self.per_slot[slot] += 1

    def metrics(self) -> str:
        name = 'engine="0",model_name="fake"'
        lines = ["# HELP vllm:generation_tokens_total Number of tokens.", "# TYPE vllm:generation_tokens_total counter"]
        lines.append(f"vllm:generation_tokens_total{{{name}}} {self.tokens}.0")
        lines.append(f"sglang:generation_tokens_total{{{name}}} {self.tokens}.0")
        if self.drafted:
            lines.append(f"vllm:spec_decode_num_drafts_total{{{name}}} {self.drafts}.0")
            lines.append(f"vllm:spec_decode_num_draft_tokens_total{{{name}}} {self.drafts * SLOTS}.0")
            lines.append(f"vllm:spec_decode_num_accepted_tokens_total{{{name}}} {self.accepted}.0")
            lines.append(f"sglang:spec_verify_calls_total{{{name}}} {self.drafts}.0")
            metric = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines += [f'{metric}{{{name},position="{k}"}} {count}.0' for k, count in enumerate(self.per_slot)]
        return "\n".join(lines) + "\n"


class Handler(BaseHTTPRequestHandler):
    """Requests."""

    server: Engine

    def log_message(self, *_: Any) -> None:
        return None

    def do_GET(self) -> None:  # noqa: N802 - the library's name
        pages = {"/metrics": self.server.metrics(), "/health": "", "/version": '{"version": "fake-1"}'}
        pages |= {"/v1/models": '{"data": [{"id": "fake"}]}', self.server.info: self.server.about}
        self._send(200 if self.path in pages else 404, pages.get(self.path, ""))

    def do_POST(self) -> None:  # noqa: N802 - the library's name
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        native = self.path == "/generate"
        wanted = body["sampling_params"]["max_new_tokens"] if native else body["max_tokens"]
        with self.server.lock:
            self.server.flying += 1
            self.server.most = max(self.server.most, self.server.flying)
        try:
            if wanted > 4 and self._fault():
                return
            self._stream(body["input_ids"] if native else body["prompt"], wanted, native)
        finally:
            with self.server.lock:
                self.server.flying -= 1

    def _fault(self) -> bool:
        if self.server.fault == "die":
            os._exit(7)
        if self.server.fault == "hang":
            time.sleep(60)
        if self.server.fault == "refuse":
            self._send(400, '{"error": "too long"}')
        if self.server.fault == "short":
            self._open()
            self._event({"choices": [{"token_ids": [5]}]})
        return bool(self.server.fault) and self.server.fault != "other"

    def _stream(self, ids: list[int], count: int, native: bool) -> None:
        answer = text(ids, count)
        if self.server.fault == "other":
            answer[2] = 63
        taken = rounds(count) if self.server.drafted else [0] * (count - 1)
        ends = [1]
        for accepted in taken:
            ends.append(min(ends[-1] + accepted + 1, count))
        self._open()
        for start, stop in zip([0, *ends], ends, strict=False):
            time.sleep(self.server.delay)
            if native:
                meta: dict[str, Any] = {"completion_tokens": stop, "finish_reason": None}
                if stop == count:
                    meta["finish_reason"] = {"type": "length"}
                    histogram = [taken.count(j) for j in range(SLOTS + 1)]
                    meta |= {"spec_correct_drafts_histogram": histogram} if self.server.drafted else {}
                self._event({"text": "", "output_ids": answer[:stop], "meta_info": meta})
            else:
                self._event({"choices": [{"index": 0, "text": "", "token_ids": answer[start:stop]}]})
        for accepted in taken if self.server.drafted else []:
            self.server.count(accepted)
        self.server.tokens += count
        if not native:
            last: dict[str, Any] = {"choices": [], "usage": {"completion_tokens": count}}
            if self.server.drafted and self.server.per_request:
                steps = {"per_step_accepted": taken, "per_step_drafted": [SLOTS] * len(taken)}
                last["metrics"] = {"speculative_decoding": steps}
            self._event(last)
        self.wfile.write(b"data: [DONE]\n\n")

    def _open(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def _send(self, status: int, page: str) -> None:
        data = page.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--drafted", action="store_true")
    parser.add_argument("--fault", default="")
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--child")
    parser.add_argument("--info", default="/server_info")
    given = parser.parse_args()
    print("fake engine: a line of log", flush=True)
    if given.child:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(given.child, "w", encoding="utf-8") as handle:
            handle.write(str(child.pid))
    if given.fault == "start":
        sys.exit("fake engine: no such model")
    Engine(given.port, given.drafted, given.fault, given.delay, info=given.info).serve_forever()


if __name__ == "__main__":
    main()
