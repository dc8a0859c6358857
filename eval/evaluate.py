"""Measure a drafter: acceptance, speed against the same loop without it, and whether the output stays the target's own.

    headstart eval drafter_dir=... target=smollm2 prompts=builtin|FILE.jsonl num_slots=5 max_new_tokens=128
    python -m eval.evaluate ...

`replay=true` measures greedy tau alone, against the target's recorded answers: fast, and without speed (eval.replay).
Prompts are rendered by the target's chat template. Each domain is decoded by itself, so that speed is known by domain.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console

from checkpoints.folder import load_drafter
from checkpoints.run import known_groups, machine, record, settings
from data.chat import Template
from data.conversations import Prompt, read_prompts
from data.sources import SourceSettings, read_jsonl
from data.target import Target, TargetSettings
from drafters.contract import Drafter
from drafters.sampling import Sampling
from eval.calibration import Calibration, Rounds, calibrate, save_calibration
from eval.decoder import Clock, DecodeSettings, Generation, Verification, generate
from eval.lossless import Difference, compare
from eval.metrics import Acceptance, Work, acceptance, speed
from eval.progress import Watch
from eval.recording import Question, kept
from eval.replayed import Replayed, measure_replay
from eval.report import Part, Report

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class EvalSettings:
    """How to measure.

    num_slots: tokens drafted per round, null for the drafter's own. max_new_tokens, batch_size, seed: of decoding.
    temperature (0 = greedy), top_k, top_p: on target and drafter alike. baseline: also decode without the drafter.
    limit: prompts of each domain, null for all. thinking: the chat template's thinking choice, null for its default.
    verification: of sampled proposals, rejection or same_noise; null for the drafter's own coupling.
    """

    num_slots: int | None = None
    max_new_tokens: int = 128
    batch_size: int = 8
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    baseline: bool = True
    seed: int = 0
    limit: int | None = None
    thinking: bool | None = None
    verification: Verification | None = None

    def __post_init__(self) -> None:
        if self.verification == "none":
            raise ValueError("verification=none is lossy: python -m eval.pushforward measures it")

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p)

    def plain_decoding(self) -> DecodeSettings:
        """Settings of the loop without a drafter."""
        return DecodeSettings(1, self.max_new_tokens, self.batch_size, self.sampling, self.seed)

    def decoding(self, drafter: Drafter) -> DecodeSettings:
        """Settings of the decoding loop; ValueError on values out of range."""
        slots = self.num_slots if self.num_slots is not None else drafter.num_slots
        made = DecodeSettings(slots, self.max_new_tokens, self.batch_size, self.sampling, self.seed, self.verification)
        return replace(made, verification=made.verified_by(drafter))


@dataclass(frozen=True)
class Baseline:
    """Answers without a drafter, and the work they took, of one domain. rendered, settings: what was decoded, how."""

    rendered: list[list[int]]
    settings: DecodeSettings
    answers: list[Generation]
    work: Work


@dataclass
class _Answers:
    """A domain's prompts, rendered, and their answers with and without the drafter."""

    domain: str
    ids: list[str]
    rendered: list[list[int]]
    drafted: list[Generation]
    work: Work
    plain: list[Generation] | None = None
    plain_work: Work | None = None

    def part(self, num_slots: int) -> Part:
        return Part(len(self.ids), acceptance(self.drafted, num_slots), speed(self.work, self.plain_work))


def measure_acceptance(
    target: Target,
    drafter: Drafter,
    prompt_ids_by_domain: Mapping[str, Sequence[list[int]]],
    num_slots: int | None = None,
    max_new_tokens: int = 64,
    batch_size: int = 8,
) -> Acceptance:
    """Really draft, greedily, on rendered prompts: tau, tau by domain, alpha. For use while training.

    prompt_ids_by_domain: token ids of each prompt, generation prompt included. All domains share batches. The drafter's
    training mode is left as it was. ValueError when there is no prompt.
    """
    pairs = [(domain, list(ids)) for domain, prompts in prompt_ids_by_domain.items() for ids in prompts]
    if not pairs:
        raise ValueError("acceptance needs at least one prompt")
    slots = num_slots if num_slots is not None else drafter.num_slots
    decoding = DecodeSettings(slots, max_new_tokens, batch_size)
    generations = generate(target, drafter, [ids for _, ids in pairs], decoding)
    return acceptance(generations, slots, [domain for domain, _ in pairs])


def evaluate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    settings: EvalSettings,
    console: Console | None = None,
    plain: Mapping[str, Baseline] | None = None,
) -> Report:
    """Decode all prompts with and (baseline) without the drafter in this process; figures overall and by domain.

    plain: the baseline by domain when this process has it already (see `baselines`). A prompt's random seed depends on
    its id and settings.seed alone. ValueError without prompts, or on equal ids.
    """
    prompts = checked(prompts, settings)
    decoding, plain = settings.decoding(drafter), dict(plain or {})
    started = time.perf_counter()
    rendered = render(target, prompts, settings)
    fresh = settings.baseline and not plain
    _warm_up(target, (drafter, None) if fresh else (drafter,), rendered[prompts[0].id], decoding)
    done: list[_Answers] = []
    seconds = {"prepare": time.perf_counter() - started}
    with Watch(len(prompts) * (2 if fresh else 1), console) as watch:
        for domain, own in by_domain(prompts).items():
            watch.pass_ = f"{domain}, with the drafter"
            answers = _decode(target, drafter, own, rendered, decoding, watch)
            if fresh:
                watch.pass_ = f"{domain}, without"
                plain[domain] = _decode_plain(target, own, rendered, settings.plain_decoding(), watch)
            if settings.baseline:
                _join(answers, plain[domain], settings.plain_decoding())
            done.append(answers)
    seconds["drafter"] = sum(sum(one.work.seconds.values()) for one in done)
    if settings.baseline:
        seconds["baseline"] = sum(sum(one.plain_work.seconds.values()) for one in done if one.plain_work)
    started = time.perf_counter()
    differences = _differences(target, done) if settings.baseline and decoding.sampling.greedy else None
    seconds["compare"] = time.perf_counter() - started
    return Report(
        whole=_whole(done, decoding.num_slots),
        parts={one.domain: one.part(decoding.num_slots) for one in done},
        num_slots=decoding.num_slots,
        differences=differences,
        seconds=seconds,
        example=_example(target, done[0]),
        calibration=_calibration(done),
        noise_identical=_noise_identical(done, decoding),
        settings=asdict(settings)
        | {"num_slots": decoding.num_slots, "dtype": str(target.dtype).removeprefix("torch.")}
        | {"verification": decoding.verification},
        target=dict(target.identity),
        drafter=drafter_words(drafter),
        machine=machine(),
    )


def baselines(
    target: Target, prompts: Sequence[Prompt], settings: EvalSettings, console: Console | None = None
) -> dict[str, Baseline]:
    """Decode all prompts without a drafter, by domain: once for all drafters that `evaluate` then measures in this
    process."""
    prompts = checked(prompts, settings)
    decoding, rendered = settings.plain_decoding(), render(target, prompts, settings)
    _warm_up(target, (None,), rendered[prompts[0].id], decoding)
    found = {}
    with Watch(len(prompts), console) as watch:
        for domain, own in by_domain(prompts).items():
            watch.pass_ = f"{domain}, without"
            found[domain] = _decode_plain(target, own, rendered, decoding, watch)
    return found


def checked(prompts: Sequence[Prompt], settings: EvalSettings) -> list[Prompt]:
    """The prompts to measure on. ValueError without prompts, or on equal ids."""
    prompts = limited(prompts, settings.limit)
    if not prompts:
        raise ValueError("evaluation needs at least one prompt")
    if len({prompt.id for prompt in prompts}) != len(prompts):
        raise ValueError("prompt ids must differ: a prompt's random seed comes from its id")
    return prompts


def render(target: Target, prompts: Sequence[Prompt], settings: EvalSettings) -> dict[str, list[int]]:
    """Token ids by prompt id, through the target's chat template."""
    template = Template(target.tokenizer, settings.thinking, target.eos_ids)
    return {prompt.id: template.prompt(prompt.messages) for prompt in prompts}


def questions(target: Target, prompts: Sequence[Prompt], settings: EvalSettings) -> list[Question]:
    """The prompts to measure on as a recording asks them."""
    chosen = checked(prompts, settings)
    rendered = render(target, chosen, settings)
    return [Question(prompt.domain, rendered[prompt.id]) for prompt in chosen]


def by_domain(prompts: Sequence[Prompt]) -> dict[str, list[Prompt]]:
    """Prompts by domain, domains in alphabetical order."""
    return {name: [p for p in prompts if p.domain == name] for name in sorted({p.domain for p in prompts})}


def limited(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """The first `limit` prompts of each domain, in their order; all when None. ValueError below 1."""
    if limit is None:
        return list(prompts)
    if limit < 1:
        raise ValueError(f"limit must be at least 1 or null, got {limit}")
    kept, counts = [], dict.fromkeys((prompt.domain for prompt in prompts), 0)
    for prompt in prompts:
        counts[prompt.domain] += 1
        if counts[prompt.domain] <= limit:
            kept.append(prompt)
    return kept


def load_prompts(name: str) -> list[Prompt]:
    """builtin (the shipped held-out set) or a JSONL file.

    Rows are {"id", "domain", "messages"}, or Spec-Bench's {"question_id", "category", "turns"}, of which the first turn
    is asked. ValueError names file and line of any other row.
    """
    if name == "builtin":
        return read_prompts(SourceSettings("builtin"), part="heldout")
    first = next(read_jsonl(Path(name)), None)
    if first is None:
        raise ValueError(f"{name} holds no prompts")
    if "turns" not in first[1] or "messages" in first[1]:
        return read_prompts(Path(name))
    prompts = []
    for where, row in read_jsonl(Path(name)):
        turns = row.get("turns")
        if "question_id" not in row or not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
            raise ValueError(f"{where}: a Spec-Bench row needs question_id, category and turns, a list of texts")
        messages = [{"role": "user", "content": turns[0]}]
        prompts.append(Prompt(str(row["question_id"]), str(row.get("category", "all")), messages))
    return prompts


def prompt_seed(name: str, seed: int) -> int:
    """A request's random seed: 62 bits of its id and the run's seed."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 2


def _decode(
    target: Target,
    drafter: Drafter,
    prompts: list[Prompt],
    rendered: dict[str, list[int]],
    decoding: DecodeSettings,
    watch: Watch,
) -> _Answers:
    ids = [prompt.id for prompt in prompts]
    tokens, clock = [rendered[name] for name in ids], Clock(target.device)
    seeds = [prompt_seed(name, decoding.seed) for name in ids]
    drafted = generate(target, drafter, tokens, decoding, clock, seeds, watch)
    return _Answers(prompts[0].domain, ids, tokens, drafted, Work.of(drafted, clock.seconds))


def _decode_plain(
    target: Target, prompts: list[Prompt], rendered: dict[str, list[int]], decoding: DecodeSettings, watch: Watch
) -> Baseline:
    tokens, clock = [rendered[prompt.id] for prompt in prompts], Clock(target.device)
    seeds = [prompt_seed(prompt.id, decoding.seed) for prompt in prompts]
    answers = generate(target, None, tokens, decoding, clock, seeds, watch)
    return Baseline(tokens, decoding, answers, Work.of(answers, clock.seconds))


def _join(answers: _Answers, plain: Baseline, decoding: DecodeSettings) -> None:
    """Put a domain's baseline beside its answers; ValueError when it is that of other prompts or settings."""
    if plain.rendered != answers.rendered or plain.settings != decoding:
        raise ValueError(f"the baseline of {answers.domain} was decoded from other prompts or with other settings")
    answers.plain, answers.plain_work = plain.answers, plain.work


def _warm_up(target: Target, drafters: Sequence[Drafter | None], prompt: list[int], decoding: DecodeSettings) -> None:
    """A few untimed tokens, so that first-call costs fall on neither side."""
    short = replace(decoding, max_new_tokens=min(WARM_UP_TOKENS, decoding.max_new_tokens))
    for one in drafters:
        generate(target, one, [prompt], short)


def _calibration(done: Sequence[_Answers]) -> Calibration | None:
    found = Rounds.of(generation for one in done for generation in one.drafted)
    return None if found is None else calibrate(found)


def _differences(target: Target, done: list[_Answers]) -> list[Difference]:
    return [
        difference
        for one in done
        for difference in compare(
            target, one.ids, one.rendered, [g.tokens for g in one.plain or []], [g.tokens for g in one.drafted]
        )
    ]


def _noise_identical(done: list[_Answers], decoding: DecodeSettings) -> float | None:
    """Share of answers equal to the baseline's, which draws from the same noises in token-id order."""
    if decoding.sampling.greedy or decoding.verification != "same_noise":
        return None
    pairs = [pair for one in done if one.plain for pair in zip(one.drafted, one.plain, strict=True)]
    return sum(a.tokens == b.tokens for a, b in pairs) / len(pairs) if pairs else None


def _whole(done: list[_Answers], num_slots: int) -> Part:
    work, plain = done[0].work, done[0].plain_work
    for one in done[1:]:
        work = work + one.work
        plain = plain + one.plain_work if plain is not None and one.plain_work is not None else None
    drafted = [generation for one in done for generation in one.drafted]
    return Part(len(drafted), acceptance(drafted, num_slots), speed(work, plain))


def _example(target: Target, answers: _Answers) -> dict[str, Any]:
    """The first prompt as the target saw it, and its answer."""
    generation = answers.drafted[0]
    return {
        "id": answers.ids[0],
        "domain": answers.domain,
        "rendered_prompt": target.tokenizer.decode(answers.rendered[0], skip_special_tokens=False),
        "answer": target.tokenizer.decode(generation.tokens, skip_special_tokens=False),
        "emitted_by_round": generation.emitted,
    }


def run(config: DictConfig, folder: Path) -> Report | Replayed:
    """Evaluate as configured; writes report.json, plots and run.json into folder, prints the table."""
    own = [key.name for key in fields(EvalSettings)]
    known_groups(config, "drafter_dir", "prompts", "target", "replay", "recording", "calibrate", *own)
    measured = settings(EvalSettings, {name: config[name] for name in own if name in config}, "eval")
    drafter_dir = Path(config.drafter_dir).expanduser().resolve()
    prompts = load_prompts(config.prompts)
    target = Target.load(**asdict(settings(TargetSettings, config.target, "target")))
    drafter = load_drafter(drafter_dir, target.parts)
    report: Report | Replayed
    if config.replay:
        recording = None if config.recording is None else Path(config.recording).expanduser()
        report = evaluate_replay(target, drafter, prompts, measured, recording, {"drafter_dir": str(drafter_dir)})
    else:
        report = replace(evaluate(target, drafter, prompts, measured), drafter_dir=str(drafter_dir))
    if config.calibrate:
        _keep_calibration(drafter_dir, report, measured.sampling)
    record(folder, config, target=target.identity)
    path = report.write(folder)
    console = Console()
    report.show(console)
    console.print(f"report         {path}", soft_wrap=True)
    return report


def evaluate_replay(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    settings: EvalSettings,
    recording: Path | None = None,
    about: dict[str, Any] | None = None,
) -> Replayed:
    """Greedy tau against the target's recorded answers; the target runs only to record them, once.

    recording: file that keeps them, made when missing. about: further keys of the report. ValueError when the settings
    sample, or the file is another target's or another prompt set's.
    """
    if not settings.sampling.greedy:
        raise ValueError(f"a replay is greedy: temperature must be 0 with replay=true, got {settings.temperature}")
    asked = questions(target, prompts, settings)
    with Watch(len(asked)) as watch:
        watch.pass_ = "recording answers"
        layers, size = drafter.needs.layers, settings.batch_size
        answers = kept(recording, target, asked, layers, settings.max_new_tokens, size, watch)
    slots = settings.decoding(drafter).num_slots
    said = {
        "settings": asdict(settings) | {"num_slots": slots, "dtype": str(target.dtype).removeprefix("torch.")},
        "target": dict(target.identity),
        "drafter": drafter_words(drafter),
        "machine": machine(),
    }
    return measure_replay(drafter, answers, slots, (about or {}) | said)


def drafter_words(drafter: Drafter) -> dict[str, Any]:
    """What a report says of a drafter."""
    return {"architecture": type(drafter).__module__.rsplit(".", 1)[-1], "settings": drafter.settings()}


def _keep_calibration(drafter_dir: Path, report: Report | Replayed, sampling: Sampling) -> None:
    """Write the fitted temperatures beside the head; ValueError when it gives no confidences."""
    if report.calibration is None:
        raise ValueError(f"calibrate=true: the drafter in {drafter_dir} gives no confidences to calibrate")
    save_calibration(drafter_dir, report.calibration, asdict(sampling))


@hydra.main(version_base="1.3", config_path="pkg://conf", config_name="eval")
def main(config: DictConfig) -> None:
    """`headstart eval`: exit status 1 when the greedy output is not the target's own."""
    report = run(config, Path(HydraConfig.get().runtime.output_dir))
    if isinstance(report, Report) and report.greedy_identical is False:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
