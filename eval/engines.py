"""The same report as `headstart eval`, measured on serving engines: with the drafter and without, at several loads.

    headstart eval engine=vllm drafter_dir=EXPORT target=any target.name=TARGET prompts=builtin limit=2
    headstart eval engine=sglang start=print ...                      says how to start both servers
    headstart eval engine=vllm url=http://HOST:8000 baseline_url=...  measures servers that run

drafter_dir: a folder that `headstart export` wrote for the engine, or our own drafter's, exported first. Servers that
are started here listen on loopback alone, run in turn, and end with the run. docs/engines.md explains the figures.
"""

import shlex
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from checkpoints.engine_entry import PROVENANCE
from checkpoints.engine_run import engine_python
from checkpoints.engines import Source, export_engine
from checkpoints.export import EngineSettings
from checkpoints.files import read_json
from checkpoints.folder import read_drafter
from checkpoints.redact import hide, without_secrets
from checkpoints.run import known_groups, machine, native_bf16, record, settings
from checkpoints.target_files import target_config, target_head
from data.conversations import Prompt
from data.embedded import target_source
from data.suites import load_prompts
from data.target import Target, TargetSettings, declared_ids
from drafters.vocabulary import tokenizer_fingerprint
from eval.engine_client import Asked, Client
from eval.engine_dialects import DIALECTS, Ask, Dialect, Setup
from eval.engine_figures import Timed, level
from eval.engine_report import EngineReport, parts
from eval.engine_server import Server, free_port, started
from eval.engine_settings import KEYS, ServingSettings
from eval.eval_settings import OPTIONS, EvalSettings, by_domain, checked, command, plain_keys
from eval.lossless import Difference, compare
from eval.page import PAGE
from eval.passes import prompt_seed
from eval.report import beside
from eval.traces import Traces
from eval.turns import Request, Turns

NOT_HERE = ("replay", "recording", "calibrate", "verification", "loop", "pareto", "weights")
WARM_UP_TOKENS = 16
EXAMPLE_PORTS = {True: 8000, False: 8001}
AGREED = ("num_layers", "hidden_size", "tokenizer")  # of an export's target, that check_export compares
DRAFTER_WORDS = {"architecture": "architecture", "measured": "measured", "made_for": "target"}


@dataclass(frozen=True)
class Voice:
    """What rendering and comparing need of a target, without its weights. source: folder or hub id that engines open.
    dtype: float32, bfloat16 or float16. hub: revision and trust_remote_code."""

    tokenizer: PreTrainedTokenizerBase
    eos_ids: tuple[int, ...]
    source: str
    dtype: str
    hub: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, how: TargetSettings) -> "Voice":
        """ValueError when the model says of no token that it ends an answer."""
        source = target_source(how.name)
        hub: dict[str, Any] = {"revision": how.revision, "trust_remote_code": how.trust_remote_code}
        tokenizer = AutoTokenizer.from_pretrained(source, **hub)
        dtype = ("bfloat16" if native_bf16() else "float32") if how.dtype == "auto" else how.dtype
        ends = declared_ids(source, target_config(source, **hub), tokenizer, how.revision)
        if not ends:
            raise ValueError(f"{how.name} names no token that ends an answer (eos_token_id)")
        return cls(tokenizer, ends, source, dtype, hub)


@dataclass(frozen=True)
class Job:
    """Everything that a measurement needs. requests: filled in by the first server where prompts have later turns."""

    name: str
    dialect: Dialect
    setup: Setup
    voice: Voice
    target: TargetSettings
    prompts: list[Prompt]
    how: EvalSettings
    serving: ServingSettings

    def asks(self, requests: Sequence[Request], seed: int) -> list[Ask]:
        how, ends = self.how, self.voice.eos_ids
        return [
            Ask(one.ids, how.max_new_tokens, ends, how.sampling, prompt_seed(one.id, seed) % 2**31) for one in requests
        ]

    @property
    def compares(self) -> bool:
        """Whether a server without the drafter is measured too."""
        return self.how.baseline and (self.serving.url is None or self.serving.baseline_url is not None)

    def words(self, drafted: bool, port: int) -> list[str]:
        return self.dialect.command(self.setup, port, drafted)


def run_engines(config: DictConfig, folder: Path) -> EngineReport | None:
    """`headstart eval engine=...`: measure as configured, write the report into folder, print the table. None with
    start=print, which says how to start the servers."""
    job = planned(config, folder)
    console = Console()
    if job.serving.start == "print":
        print_commands(job, console)
        return None
    predicted = foreseen(config, job)
    report, drafted = measure(job, folder, console)
    speeds = {f"c={one.concurrency}": one.speedup.value for one in report.levels if one.speedup}
    report = replace(
        report,
        drafter_dir=str(job.setup.drafter),
        command=command(),
        predicted=None if predicted is None else beside(predicted, {**speeds}),
    )
    record(folder, config, target=report.target)
    path = report.write(folder)
    report.show(console)
    console.print(f"report         {path.with_name(PAGE)}", soft_wrap=True)
    if config.traces is not None:  # after the report: a server that joined may not tell what traces need
        save_traces(drafted, job.setup.num_slots, Path(config.traces).expanduser())
    return report


def foreseen(config: DictConfig, job: Job) -> dict[str, Any] | None:
    """The predicted speedups, if any. ValueError, before hours of measuring, for traces of a server that loses the
    order of rounds, and for predictions of what will not be measured."""
    if config.traces is not None and not job.dialect.ordered:
        raise ValueError(f"traces need every round in its order, which {job.name} does not tell: traces must be null")
    if config.predicted is None:
        return None
    predicted: dict[str, Any] = read_json(Path(config.predicted).expanduser())
    beside(predicted, {f"c={one}": 1.0 if job.compares else None for one in job.serving.concurrency})
    return predicted


def planned(config: DictConfig, folder: Path) -> Job:
    """Read and check all settings; export the drafter when it is our own folder. ValueError names what does not fit."""
    own = plain_keys()
    known_groups(config, "drafter_dir", "prompts", "target", "engine", "tree", *OPTIONS, *own)
    plain: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    how = settings(EvalSettings, {name: plain[name] for name in own if name in plain}, "eval")
    serving = settings(ServingSettings, {name: plain[name] for name in KEYS if name in plain}, "eval")
    engine = settings(EngineSettings, plain["engine"], "engine")
    given = [name for name in NOT_HERE if plain.get(name)]
    given += ["tree"] if plain["tree"]["kind"] != "none" else []
    given += ["schedule"] if plain["schedule"]["name"] is not None else []
    if given:
        raise ValueError(f"engine={engine.name} measures what a server does: {', '.join(given)} cannot be set with it")
    if engine.name not in DIALECTS:
        raise ValueError(f"engine={engine.name} is no server; allowed: {', '.join(DIALECTS)}")
    target = settings(TargetSettings, plain["target"], "target")
    voice = Voice.load(target)
    drafter = exported(Path(plain["drafter_dir"]), engine.name, voice, folder)
    provenance = read_json(drafter / PROVENANCE)
    check_export(drafter, provenance, engine.name, voice)
    prompts = checked(load_prompts(plain["prompts"]), how)
    slots = how.num_slots or int(provenance["num_slots"])
    starts = serving.start == "run" and serving.url is None
    setup = Setup(
        python=str(engine_python(engine.python)) if starts else engine.python or "python",
        target=voice.source,
        drafter=drafter,
        provenance=provenance,
        num_slots=slots,
        dtype=voice.dtype,
        max_model_len=longest(prompts, voice, how) + slots + 1,
        max_num_seqs=max(serving.concurrency),
        extra=(*hub_words(target), *serving.server_args),
    )
    return Job(engine.name, DIALECTS[engine.name], setup, voice, target, spread(prompts), how, serving)


def hub_words(target: TargetSettings) -> list[str]:
    """What both engines must be told to open the same target as we do."""
    words = [] if target.revision is None else ["--revision", target.revision]
    return [*words, "--trust-remote-code"] if target.trust_remote_code else words


def exported(drafter_dir: Path, engine: str, voice: Voice, folder: Path) -> Path:
    """The folder that the engine loads: drafter_dir, or an export of it, written into folder."""
    drafter_dir = drafter_dir.expanduser().resolve()
    if (drafter_dir / PROVENANCE).exists():
        return drafter_dir
    dtype = getattr(torch, voice.dtype)
    source = Source(read_drafter(drafter_dir), voice.source, dtype, lambda: target_head(voice.source, **voice.hub))
    return export_engine(source, engine, (folder / "export").resolve()).folder


def check_export(drafter: Path, provenance: dict[str, Any], engine: str, voice: Voice) -> None:
    """ValueError when an export is another engine's, or plainly another target's (weights are not read here)."""
    if DIALECTS.get(provenance["engine"]) is not DIALECTS[engine]:
        raise ValueError(f"{drafter} was exported for {provenance['engine']}, not for {engine}")
    declared, config = provenance["target"], target_config(voice.source, **voice.hub)
    have = {"num_layers": config.num_hidden_layers, "hidden_size": config.hidden_size}
    have["tokenizer"] = tokenizer_fingerprint(voice.tokenizer)
    wrong = [f"{k} {v!r} instead of {declared[k]!r}" for k, v in have.items() if declared.get(k) not in (None, v)]
    if wrong:
        raise ValueError(f"{drafter} was made for {declared['name']}; {voice.source} has {', '.join(wrong)}")


def longest(prompts: Sequence[Prompt], voice: Voice, how: EvalSettings) -> int:
    """Positions that the longest chat may take: its prompt, and for every turn the user's words and an answer."""
    turns = Turns(voice, how.thinking)
    return max(
        len(one.ids)
        + sum(len(turns.template.prompt([{"role": "user", "content": text}])) for text in one.later)
        + (1 + len(one.later)) * (how.max_new_tokens + 1)
        for one in turns.first(prompts)
    )


def spread(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Prompts with their domains in turn, so that every stretch of them holds all domains."""
    groups = list(by_domain(prompts).values())
    most = max(map(len, groups))
    return [group[place] for place in range(most) for group in groups if place < len(group)]


def print_commands(job: Job, console: Console) -> None:
    """How to start both servers, and how to measure them then."""
    for drafted, words in ((True, "with the drafter"), (False, "without")):
        console.print(f"# {words}", highlight=False)
        console.print(shlex.join(job.words(drafted, EXAMPLE_PORTS[drafted])), soft_wrap=True, highlight=False)
    urls = [f"http://127.0.0.1:{EXAMPLE_PORTS[drafted]}" for drafted in (True, False)]
    console.print(f"# then this command with start=run url={urls[0]} baseline_url={urls[1]}", soft_wrap=True)


def measure(job: Job, folder: Path, console: Console) -> tuple[EngineReport, dict[int, Timed]]:
    """Serve without the drafter (unless baseline=false), then with it; ask, time and count at every concurrency. Also
    gives the passes with the drafter."""
    seconds: dict[str, float] = {}
    timed: dict[bool, dict[int, Timed]] = {True: {}, False: {}}
    about: dict[str, Any] = {"name": job.name, "version": "unknown", "commands": {}}
    requests: list[Request] = []
    served: dict[str, str] = {}
    for drafted in [False, True] if job.compares else [True]:
        who = "drafter" if drafted else "baseline"
        console.print(f"{who}: starting or joining a server", style="dim")
        begun = time.perf_counter()
        with serve(job, drafted, folder, about) as server:
            client = Client(server, job.dialect, job.setup.num_slots, job.serving.request_timeout_s)
            about["version"], served[who] = client.version(), hide(client.model)
            seconds[f"start {who}"] = time.perf_counter() - begun
            begun = time.perf_counter()
            requests = requests or every_turn(job, client)
            timed[drafted] = loads(job, client, requests, console, who)
            seconds[who] = time.perf_counter() - begun
    begun = time.perf_counter()
    differences = compared(job, requests, timed) if timed[False] and job.how.sampling.greedy else None
    seconds["compare"] = time.perf_counter() - begun
    slots = job.setup.num_slots
    levels = [level(c, one, timed[False].get(c), slots, job.how.seed) for c, one in timed[True].items()]
    whole, domains = parts(timed[True], timed[False], requests, slots)
    report = EngineReport(
        whole=whole,
        parts=domains,
        num_slots=slots,
        differences=differences,
        seconds=seconds,
        example=example(job, requests[0], timed[True]),
        settings={"num_slots": slots, "dtype": job.voice.dtype, **_said(job)},
        target=target_words(job, served),
        drafter={name: job.setup.provenance[key] for name, key in DRAFTER_WORDS.items()},
        machine=machine(),
        pareto=_pareto(levels),
        levels=levels,
        engine=about,
    )
    return report, timed[True]


def target_words(job: Job, served: dict[str, str]) -> dict[str, Any]:
    """The target that was measured: its name, what the export says of it and was found equal, and the model that each
    server says it serves. The export's own target, fingerprints included, stands with the drafter."""
    declared = job.setup.provenance["target"]
    found = {name: declared[name] for name in AGREED if name in declared}
    return {"name": job.voice.source, "revision": job.target.revision, **found, "served": served}


def serve(job: Job, drafted: bool, folder: Path, about: dict[str, Any]) -> AbstractContextManager[Server]:
    """A server that runs inside: one that the settings name, or one started here, whose log lies in folder."""
    who = "drafter" if drafted else "baseline"
    url = job.serving.url if drafted else job.serving.baseline_url
    if url:
        about["commands"][who] = hide(f"joined at {url}")
        server = Server(url)
        server.wait_until_healthy(job.serving.request_timeout_s)
        return nullcontext(server)
    port = free_port()
    words = job.words(drafted, port)
    about["commands"][who] = shlex.join(without_secrets(words))
    return started(words, port, Path(folder) / f"server_{who}.log", job.serving.start_timeout_s)


def every_turn(job: Job, client: Client) -> list[Request]:
    """All requests of all prompts. Later turns follow the answers of this server, asked once and not timed."""
    turns = Turns(job.voice, job.how.thinking)
    wave, found = turns.first(job.prompts), list[Request]()
    while wave:
        found += wave
        if not any(one.later for one in wave):
            break
        asks = job.asks(wave, job.how.seed)
        wave = turns.after(wave, [one.tokens for one in client.ask(asks, max(job.serving.concurrency))])
    return found


def loads(job: Job, client: Client, requests: Sequence[Request], console: Console, who: str) -> dict[int, Timed]:
    """Timed passes at every concurrency, after an untimed warm-up at each."""
    found = {}
    for concurrency in job.serving.concurrency:
        count = max(len(requests), job.serving.per_user * concurrency)
        asked = [requests[i % len(requests)] for i in range(count)]
        asks = job.asks(asked, job.how.seed)
        short = [replace(ask, max_tokens=min(WARM_UP_TOKENS, ask.max_tokens)) for ask in asks[:concurrency]]
        client.ask(short, concurrency)
        passes: list[Asked] = [client.timed(asks, concurrency) for _ in range(job.serving.repeats)]
        found[concurrency] = Timed([one.id for one in asked], passes)
        rates = ", ".join(f"{sum(len(a.tokens) for a in one.answers) / one.seconds:.1f}" for one in passes)
        console.print(f"{who}: {count} requests, {concurrency} at a time: {rates} tokens/s", style="dim")
    return found


def compared(job: Job, requests: Sequence[Request], timed: dict[bool, dict[int, Timed]]) -> list[Difference]:
    """Where greedy answers part, each pair of different answers once; the target is loaded only to prove near ties."""
    ids = {one.id: one.ids for one in requests}
    pairs: dict[tuple[str, tuple[int, ...], tuple[int, ...]], str] = {}
    for concurrency, drafted in timed[True].items():
        for (name, own), (_, plain) in zip(drafted.pairs, timed[False][concurrency].pairs, strict=True):
            if own.tokens != plain.tokens:
                pairs.setdefault((name, tuple(plain.tokens), tuple(own.tokens)), f"{name}, {concurrency} in flight")
    if not pairs:
        return []
    target = Target.load(**asdict(job.target) | {"dtype": job.voice.dtype})
    names, plain_texts, texts = zip(*pairs, strict=True)
    prompts = [ids[name] for name in names]
    return compare(target, list(pairs.values()), prompts, list(map(list, plain_texts)), list(map(list, texts)))


def example(job: Job, request: Request, drafted: dict[int, Timed]) -> dict[str, Any]:
    """The first prompt as the target saw it, and the answer with the drafter."""
    answer = next(iter(drafted.values())).answers[0]
    rounds = answer.drafted()
    return {
        "id": request.id,
        "domain": request.domain,
        "rendered_prompt": job.voice.tokenizer.decode(request.ids, skip_special_tokens=False),
        "answer": job.voice.tokenizer.decode(answer.tokens, skip_special_tokens=False),
        "emitted_by_round": answer.counts[1:] if rounds is None else rounds.emitted,
    }


def save_traces(drafted: dict[int, Timed], num_slots: int, path: Path) -> Path:
    """Rounds of every answer, for `headstart simulate traces=...`. ValueError where the server lost their order."""
    answers = [answer for timed in drafted.values() for answer in timed.answers]
    found = [one.drafted() for one in answers if one.ordered]
    if len(found) != len(answers):
        raise ValueError("traces need every round in its order, which this server does not tell")
    return Traces.of([one for one in found if one is not None], num_slots).save(path)


def _said(job: Job) -> dict[str, Any]:
    """Settings that a report of servers keeps."""
    how, serving = job.how, job.serving
    kept = {
        name: getattr(how, name) for name in ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "thinking")
    }
    asked = {name: getattr(serving, name) for name in ("concurrency", "repeats", "per_user", "server_args")}
    return kept | without_secrets(asked)


def _pareto(levels: Sequence[Any]) -> dict[str, list[dict[str, float]]]:
    sides = {"with the drafter": [one.drafter for one in levels], "without": [one.baseline for one in levels]}
    return {
        name: [
            {"user_tokens_per_s": one.user_tokens_per_s.value, "tokens_per_s": one.tokens_per_s.value}
            for one in found
            if one is not None
        ]
        for name, found in sides.items()
        if any(one is not None for one in found)
    }
