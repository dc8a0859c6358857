"""How each engine is started, asked, read and counted. One Dialect an engine; nothing else here knows an engine's name.

vllm    OpenAI completions with token ids in and out, streamed. Counters vllm:spec_decode_*; every round of a request
        where the server runs with --per-request-spec-decode-metrics detailed (a histogram with summary)
sglang  its own /generate, streamed: its OpenAI API gives no token ids in a stream, and greedy answers are compared by
        id. Counters sglang:spec_verify_calls_total and sglang:generation_tokens_total, which move when a request ends;
        a histogram of accepted drafts a request
"""

import json
import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoints.engine_entry import sglang_chain
from drafters.sampling import Sampling
from eval.engine_server import HOST

Rounds = list[tuple[int, int]]
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Ask:
    """One request. ids: the prompt's. stop_ids: tokens that end an answer. seed: of sampling."""

    ids: list[int]
    max_tokens: int
    stop_ids: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0


@dataclass(frozen=True)
class Piece:
    """What one event of a stream brought. tokens: new ones. rounds: (accepted, proposed) of all the request's rounds,
    None where the event says nothing of them; ordered: whether they stand in the order in which they were."""

    tokens: list[int] = field(default_factory=list)
    rounds: Rounds | None = None
    ordered: bool = False


@dataclass(frozen=True)
class Counters:
    """Totals since a server started, or the difference of two. rounds, accepted (None where not counted), per_slot
    (rounds that accepted slot k; empty where not counted), tokens: generated."""

    rounds: float
    accepted: float | None
    per_slot: list[float]
    tokens: float

    def since(self, before: "Counters") -> "Counters":
        """What moved. ValueError when a counter fell: another server answers now."""
        slots = before.per_slot or [0.0] * len(self.per_slot)
        accepted = None if self.accepted is None else self.accepted - (before.accepted or 0.0)
        moved = Counters(
            self.rounds - before.rounds,
            accepted,
            [a - b for a, b in zip(self.per_slot, slots, strict=True)],
            self.tokens - before.tokens,
        )
        if min(moved.rounds, moved.tokens, accepted or 0.0, *moved.per_slot) < 0:
            raise ValueError(f"a server's counters fell from {before} to {self}: it was started anew")
        return moved

    def __add__(self, other: "Counters") -> "Counters":
        accepted = None if self.accepted is None or other.accepted is None else self.accepted + other.accepted
        slots = [a + b for a, b in zip(self.per_slot, other.per_slot, strict=True)]
        return Counters(self.rounds + other.rounds, accepted, slots, self.tokens + other.tokens)

    def tau(self, requests: int) -> float | None:
        """Tokens a round by the counters; None without rounds. Where drafts accepted are not counted, tokens that are
        no request's first are divided by rounds."""
        if not self.rounds:
            return None
        if self.accepted is None:
            return (self.tokens - requests) / self.rounds
        return 1 + self.accepted / self.rounds


@dataclass(frozen=True)
class Setup:
    """How to serve. python: of the engine's environment. target: folder or hub id; drafter: the export's folder.
    provenance: its headstart.json. dtype, max_model_len, max_num_seqs: of the server. extra: further words for both
    servers."""

    python: str
    target: str
    drafter: Path
    provenance: dict[str, Any]
    num_slots: int
    dtype: str
    max_model_len: int
    max_num_seqs: int
    extra: tuple[str, ...] = ()

    def model(self, drafted: bool) -> str:
        """What the server opens: the export itself where it holds the target too."""
        return str(self.drafter) if drafted and self.provenance.get("whole") else self.target


@dataclass(frozen=True)
class Dialect:
    """command(setup, port, drafted): words that start a server. path: of requests. body(ask, model): a request's JSON.
    read(event, seen, num_slots): a stream's event, after `seen` tokens of a request drafted by num_slots. models: path
    that names the model. versions: paths that may tell the version; the first that does is taken. counters(text): from
    /metrics. ordered: whether it can tell a request's rounds in their order."""

    command: Callable[[Setup, int, bool], list[str]]
    path: str
    body: Callable[[Ask, str], dict[str, Any]]
    read: Callable[[dict[str, Any], int, int], Piece]
    models: str
    versions: tuple[str, ...]
    counters: Callable[[str], Counters]
    ordered: bool = True


def samples(text: str) -> Iterable[tuple[str, dict[str, str], float]]:
    """(name, labels, value) of every line of a Prometheus page. ValueError on a line that is none."""
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        found = _SAMPLE.match(line)
        if found is None:
            raise ValueError(f"not a line of Prometheus text: {line[:200]!r}")
        yield found[1], dict(_LABEL.findall(found[2] or "")), float(found[3])


def histogram_rounds(histogram: list[int], num_slots: int) -> Rounds:
    """Rounds from counts by accepted drafts, all slots proposed; their order is lost."""
    return [(accepted, num_slots) for accepted, count in enumerate(histogram) for _ in range(int(count))]


# vLLM
# ------------------------------------------------------------------------------------------------------------------


def _vllm_command(setup: Setup, port: int, drafted: bool) -> list[str]:
    # The module, not `vllm serve`: that one asks for a package named vllm, and a build for the CPU has another name.
    words = [setup.python, "-m", "vllm.entrypoints.openai.api_server", "--model", setup.model(drafted)]
    words += ["--host", HOST, "--port", str(port), "--dtype", setup.dtype]
    words += ["--max-model-len", str(setup.max_model_len), "--max-num-seqs", str(setup.max_num_seqs)]
    # Repeated prompts must cost what new ones do, and a model's own sampling defaults must not change the text.
    words += ["--no-enable-prefix-caching", "--generation-config", "vllm", "--uvicorn-log-level", "warning"]
    words += setup.extra
    if drafted:
        draft = {**setup.provenance["speculative"], "num_speculative_tokens": setup.num_slots}
        if not setup.provenance.get("whole"):
            draft["model"] = str(setup.drafter)
        words += ["--speculative-config", json.dumps(draft), "--per-request-spec-decode-metrics", "detailed"]
    return words


def _vllm_body(ask: Ask, model: str) -> dict[str, Any]:
    sampling = {"temperature": ask.sampling.temperature, "top_p": ask.sampling.top_p or 1.0, "repetition_penalty": 1.0}
    if ask.sampling.top_k is not None:
        sampling["top_k"] = ask.sampling.top_k
    return {
        "model": model,
        "prompt": ask.ids,
        "max_tokens": ask.max_tokens,
        "seed": ask.seed,
        "stop_token_ids": list(ask.stop_ids),
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **sampling,
    }


def _vllm_read(event: dict[str, Any], seen: int, num_slots: int) -> Piece:
    if event.get("error") or event.get("object") == "error":
        raise ValueError(f"the server refused: {event.get('error') or event.get('message')}")
    tokens: list[int] = []
    for choice in event.get("choices", []):
        if "token_ids" not in choice:
            raise ValueError("the server streams no token ids; vLLM gives them since 0.10.2 (return_token_ids)")
        tokens += choice["token_ids"] or []
    found = (event.get("metrics") or {}).get("speculative_decoding")
    if not found:
        return Piece(tokens)
    if found.get("per_step_accepted"):
        steps = zip(found["per_step_accepted"], found["per_step_drafted"], strict=True)
        return Piece(tokens, [(int(a), int(p)) for a, p in steps], ordered=True)
    # An answer that ends at its first token has no rounds; the server then leaves their lists out.
    rounds = histogram_rounds(found["acceptance_histogram"], num_slots)
    return Piece(tokens, rounds, ordered=not rounds)


def _vllm_counters(text: str) -> Counters:
    sums = {"num_drafts_total": 0.0, "num_accepted_tokens_total": 0.0}
    per_slot: dict[int, float] = {}
    tokens = 0.0
    for name, labels, value in samples(text):
        short = name.removeprefix("vllm:spec_decode_")
        if short in sums:
            sums[short] += value
        elif short == "num_accepted_tokens_per_pos_total":
            per_slot[int(labels["position"])] = per_slot.get(int(labels["position"]), 0.0) + value
        elif name == "vllm:generation_tokens_total":
            tokens += value
    slots = [per_slot[k] for k in sorted(per_slot)]
    return Counters(sums["num_drafts_total"], sums["num_accepted_tokens_total"], slots, tokens)


# SGLang
# ------------------------------------------------------------------------------------------------------------------


def _sglang_command(setup: Setup, port: int, drafted: bool) -> list[str]:
    words = [setup.python, "-m", "sglang.launch_server", "--model-path", setup.model(drafted)]
    words += ["--host", HOST, "--port", str(port), "--dtype", setup.dtype]
    words += ["--context-length", str(setup.max_model_len), "--max-running-requests", str(setup.max_num_seqs)]
    words += ["--enable-metrics", "--disable-radix-cache", *setup.extra]
    return words + (_sglang_draft(setup) if drafted else [])


def _sglang_draft(setup: Setup) -> list[str]:
    """The export's own options, from the command that it was written with, for its folder as it lies now."""
    words = shlex.split(setup.provenance["command"])
    own = words[next(i for i, word in enumerate(words) if word.startswith("--speculative-")) :]
    values = {}
    if setup.num_slots != setup.provenance["num_slots"]:
        values = {f"--{name}": str(value) for name, value in sglang_chain(setup.num_slots).items()}
        if not set(values) <= set(own):
            raise ValueError(f"num_slots={setup.num_slots}: {setup.drafter} was exported for its own number of slots")
    values["--speculative-draft-model-path"] = str(setup.drafter)
    before = [None, *own]
    return [values.get(str(option), word) for option, word in zip(before, own, strict=False)]


def _sglang_body(ask: Ask, model: str) -> dict[str, Any]:
    sampling: dict[str, Any] = {
        "temperature": ask.sampling.temperature,
        "top_p": ask.sampling.top_p or 1.0,
        "max_new_tokens": ask.max_tokens,
        "stop_token_ids": list(ask.stop_ids),
    }
    if ask.sampling.top_k is not None:
        sampling["top_k"] = ask.sampling.top_k
    return {"input_ids": ask.ids, "sampling_params": sampling, "stream": True}


def _sglang_read(event: dict[str, Any], seen: int, num_slots: int) -> Piece:
    if event.get("error"):
        raise ValueError(f"the server refused: {event['error']}")
    meta, ids = event["meta_info"], event["output_ids"]
    whole = int(meta["completion_tokens"])
    # Whole answers so far, or, with incremental streaming, what is new.
    tokens = ids[seen:] if len(ids) == whole else ids
    found = meta.get("spec_correct_drafts_histogram") or meta.get("spec_accept_histogram")
    if not found or not meta.get("finish_reason"):
        return Piece(tokens)
    return Piece(tokens, histogram_rounds(found, num_slots))


def _sglang_counters(text: str) -> Counters:
    sums = {"sglang:spec_verify_calls_total": 0.0, "sglang:generation_tokens_total": 0.0}
    for name, _, value in samples(text):
        if name in sums:
            sums[name] += value
    return Counters(sums["sglang:spec_verify_calls_total"], None, [], sums["sglang:generation_tokens_total"])


_VLLM = Dialect(
    _vllm_command, "/v1/completions", _vllm_body, _vllm_read, "/v1/models", ("/version",), counters=_vllm_counters
)
DIALECTS: dict[str, Dialect] = {
    "vllm": _VLLM,
    "vllm_speculators": _VLLM,
    "sglang": Dialect(
        _sglang_command,
        "/generate",
        _sglang_body,
        _sglang_read,
        "/v1/models",
        ("/server_info", "/get_server_info"),  # servers had the second before they had the first
        _sglang_counters,
        ordered=False,
    ),
}
