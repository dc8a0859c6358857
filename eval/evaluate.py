"""Measure a drafter: acceptance, speed against the same loop without it, and whether the output stays the target's own.

    headstart eval drafter_dir=... target=smollm2 prompts=builtin|SUITE|FILE.jsonl num_slots=5 max_new_tokens=128
    python -m eval.evaluate ...

`replay=true` measures greedy tau alone, against the target's recorded answers: fast, and without speed (eval.replay).
Prompts are rendered by the target's chat template. Each domain is decoded by itself, so that speed is known by domain.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console

from checkpoints.errors import run_module
from checkpoints.files import read_json
from checkpoints.folder import load_drafter
from checkpoints.run import known_groups, machine, record, settings
from data.chat import Template
from data.conversations import Prompt
from data.suites import load_prompts
from data.target import Target, TargetSettings
from drafters.contract import Drafter
from drafters.sampling import Sampling
from eval.bench import roofline_of
from eval.calibration import attach_estimator, calibrate_generations, save_calibration
from eval.decoder import DecodeSettings
from eval.engines import run_engines
from eval.eval_settings import OPTIONS, EvalSettings, by_domain, checked, command, plain_keys
from eval.hardware import Cost, HardwareSettings
from eval.hardware_measured import measured_times
from eval.latency import latency
from eval.lossless import Difference, compare
from eval.lossy import Agreement, agreement
from eval.metrics import acceptance, speed
from eval.page import PAGE
from eval.passes import Pass, TurnDecoder
from eval.progress import Watch
from eval.recording import Question, kept
from eval.replayed import Replayed, measure_replay
from eval.report import Part, Report, beside
from eval.scheduled import NoCost, ScheduleSettings
from eval.steady import Loop
from eval.traces import Traces
from eval.trees import TreeSettings
from eval.turns import Turns


@dataclass
class _Answers:
    """A domain's answers with the drafter and, unless it was left out, without."""

    domain: str
    drafted: Pass
    plain: Pass | None = None


def evaluate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    settings: EvalSettings,
    plain: Mapping[str, Pass] | None = None,
    loop: Loop | None = None,
) -> Report:
    """Decode all prompts with and (baseline) without the drafter in this process; figures overall and by domain.

    plain: the baseline by domain when this process has it already (see `baselines`). loop: as settings.loop says unless
    given, with a schedule. A prompt's random seed depends on its id and settings.seed alone. ValueError without
    prompts, or on equal ids.
    """
    prompts = checked(prompts, settings)
    decoding, plain = settings.decoding(drafter), dict(plain or {})
    if decoding.lossy is not None and not settings.baseline:
        raise ValueError("a lossy verification is scored against the target's own text: baseline must be true")
    started = time.perf_counter()
    decoder = TurnDecoder(target, settings.thinking, loop or Loop(settings.loop or "waiting"))
    fresh = settings.baseline and not plain
    decoder.warm_up((drafter, None) if fresh else (drafter,), prompts[0], decoding)
    done: list[_Answers] = []
    seconds = {"prepare": time.perf_counter() - started}
    with Watch(_answers_of(prompts) * (2 if fresh else 1)) as watch:
        for domain, own in by_domain(prompts).items():
            if fresh:
                watch.pass_ = f"{domain}, without"
                plain[domain] = decoder.decode(None, own, settings.plain_decoding(), watch)
            known = _own(decoder, domain, own, plain[domain], settings) if settings.baseline else None
            watch.pass_ = f"{domain}, with the drafter"
            done.append(_Answers(domain, decoder.decode(drafter, own, decoding, watch, known), known))
    seconds["drafter"] = sum(sum(one.drafted.work.seconds.values()) for one in done)
    if settings.baseline:
        seconds["baseline"] = sum(sum(one.plain.work.seconds.values()) for one in done if one.plain)
    started = time.perf_counter()
    comparable = settings.baseline and decoding.sampling.greedy and decoding.lossy is None
    differences = _differences(target, done) if comparable else None
    lossy = None if decoding.lossy is None else (decoding.lossy, _agreement(target, done, decoding))
    seconds["compare"] = time.perf_counter() - started
    return Report(
        whole=_part(done, decoding.num_slots, settings.tree_tokens(decoding.num_slots)),
        parts={one.domain: _part([one], decoding.num_slots, settings.tree_tokens(decoding.num_slots)) for one in done},
        num_slots=decoding.num_slots,
        differences=differences,
        seconds=seconds,
        example=_example(target, done[0]),
        calibration=calibrate_generations(generation for one in done for generation in one.drafted.answers),
        noise_identical=_noise_identical(done, decoding),
        sizes=drafter_sizes(drafter) | _largest([one.drafted.sizes for one in done]),
        lossy=lossy,
        answers=[generation for one in done for generation in one.drafted.answers],
        **about(target, drafter, settings, decoding.num_slots, decoding.verification),
    )


def baselines(target: Target, prompts: Sequence[Prompt], settings: EvalSettings) -> dict[str, Pass]:
    """Decode all prompts without a drafter, by domain: once for all drafters that `evaluate` then measures in this
    process."""
    prompts = checked(prompts, settings)
    decoding, loop = settings.plain_decoding(), Loop(settings.loop or "waiting")
    decoder = TurnDecoder(target, settings.thinking, loop)
    decoder.warm_up((None,), prompts[0], decoding)
    found = {}
    with Watch(_answers_of(prompts)) as watch:
        for domain, own in by_domain(prompts).items():
            watch.pass_ = f"{domain}, without"
            found[domain] = decoder.decode(None, own, decoding, watch)
    return found


def render(target: Target, prompts: Sequence[Prompt], settings: EvalSettings) -> dict[str, list[int]]:
    """Token ids by prompt id, through the target's chat template."""
    template = Template(target.tokenizer, settings.thinking, target.eos_ids)
    return {prompt.id: template.prompt(prompt.messages) for prompt in prompts}


def questions(target: Target, prompts: Sequence[Prompt], settings: EvalSettings) -> list[Question]:
    """The prompts to measure on as a recording asks them, turn by turn."""
    turns = Turns(target, settings.thinking)
    return [turns.question(request) for request in turns.first(checked(prompts, settings))]


def _own(decoder: TurnDecoder, domain: str, prompts: Sequence[Prompt], plain: Pass, settings: EvalSettings) -> Pass:
    """A domain's baseline; ValueError when it is that of other prompts or settings."""
    if plain.waves[0] != decoder.turns.first(prompts) or plain.settings != settings.plain_decoding():
        raise ValueError(f"the baseline of {domain} was decoded from other prompts or with other settings")
    return plain


def _answers_of(prompts: Sequence[Prompt]) -> int:
    return sum(1 + len(prompt.later) for prompt in prompts)


def _differences(target: Target, done: list[_Answers]) -> list[Difference]:
    found = []
    for one in done:
        asked, plain = one.drafted.requests, one.plain.tokens if one.plain else []
        found += compare(target, [r.id for r in asked], [r.ids for r in asked], plain, one.drafted.tokens)
    return found


def _noise_identical(done: list[_Answers], decoding: DecodeSettings) -> float | None:
    """Share of answers equal to the baseline's, which draws from the same noises in token-id order."""
    if decoding.sampling.greedy or decoding.verification != "same_noise":
        return None
    pairs = [pair for one in done if one.plain for pair in zip(one.drafted.tokens, one.plain.tokens, strict=True)]
    return sum(mine == other for mine, other in pairs) / len(pairs) if pairs else None


def _agreement(target: Target, done: list[_Answers], decoding: DecodeSettings) -> Agreement:
    asked = [request.ids for one in done for request in one.drafted.requests]
    made = [tokens for one in done for tokens in one.drafted.tokens]
    own = [tokens for one in done for tokens in (one.plain.tokens if one.plain else [])]
    return agreement(target, asked, made, own, decoding.sampling.greedy)


def _part(done: list[_Answers], num_slots: int, tree_tokens: int | None) -> Part:
    """Figures of some domains together. tree_tokens: that the target read a round; None for chains."""
    drafted = [generation for one in done for generation in one.drafted.answers]
    plain = [generation for one in done if one.plain for generation in one.plain.answers]
    timed = {"drafter": latency(drafted), "baseline": latency(plain)}
    work = reduce(add, (one.drafted.work for one in done))
    baseline = reduce(add, (one.plain.work for one in done if one.plain)) if plain else None
    return Part(
        prompts=sum(len(one.drafted.waves[0]) for one in done),
        turns=len(drafted),
        acceptance=acceptance(drafted, num_slots, target_tokens=tree_tokens),
        speed=speed(work, baseline),
        latency={who: found for who, found in timed.items() if found is not None},
    )


def _example(target: Target, answers: _Answers) -> dict[str, Any]:
    """The first prompt as the target saw it, and its answer."""
    asked, generation = answers.drafted.requests[0], answers.drafted.answers[0]
    return {
        "id": asked.id,
        "domain": answers.domain,
        "rendered_prompt": target.tokenizer.decode(asked.ids, skip_special_tokens=False),
        "answer": target.tokenizer.decode(generation.tokens, skip_special_tokens=False),
        "emitted_by_round": generation.emitted,
    }


def drafter_sizes(drafter: Drafter) -> dict[str, int]:
    """Bytes of what a drafter adds to the target: its own tensors, those that it shares with the target left out."""
    return {"drafter_parameters": sum(tensor.nbytes for tensor in drafter.state_dict().values())}


def _largest(sizes: Sequence[dict[str, int]]) -> dict[str, int]:
    return {name: max(one.get(name, 0) for one in sizes) for name in sorted({name for one in sizes for name in one})}


def about(
    target: Target, drafter: Drafter, settings: EvalSettings, num_slots: int, verification: str | None = None
) -> dict[str, Any]:
    """What was measured, where: the keys settings, target, drafter and machine of a report."""
    decoded = {"num_slots": num_slots, "dtype": str(target.dtype).removeprefix("torch.")}
    if settings.lossy is None:
        decoded["verification"] = verification
    return {
        "settings": asdict(settings) | decoded,
        "target": dict(target.identity),
        "drafter": drafter_words(drafter),
        "machine": machine(),
    }


def run(config: DictConfig, folder: Path) -> Report | Replayed | None:
    """Evaluate as configured; writes report.html, report.md, report.json, pictures and run.json into folder, prints the
    table. None when it was asked how to start a server (engine=... start=print)."""
    if config.get("engine") is not None:
        return run_engines(config, folder)
    own = plain_keys()
    known_groups(config, "drafter_dir", "prompts", "target", "tree", *OPTIONS, *own)
    measured = settings(EvalSettings, {name: config[name] for name in own if name in config}, "eval")
    tree = settings(TreeSettings, config.tree, "tree")
    how = settings(ScheduleSettings, config.schedule, "schedule")
    hardware = settings(HardwareSettings, config.hardware, "hardware")
    measured = replace(measured, peaks=bool(config.calibrate), tree=tree)
    check_keys(config, measured, how)
    drafter_dir = Path(config.drafter_dir).expanduser().resolve()
    prompts = load_prompts(config.prompts if isinstance(config.prompts, str) else list(config.prompts))
    predicted, pareto = foreseen(config, measured, prompts)
    target = Target.load(**asdict(settings(TargetSettings, config.target, "target")))
    drafter = load_drafter(drafter_dir, target.parts, weights=measured.weights)
    if not config.calibrate:
        attach_estimator(drafter, drafter_dir, asdict(measured.sampling))
    report: Report | Replayed
    if config.replay:
        recording = None if config.recording is None else Path(config.recording).expanduser()
        words = {"drafter_dir": str(drafter_dir), "command": command()}
        report = evaluate_replay(target, drafter, prompts, measured, recording, words)
    else:
        model = partial(cost_of, target, drafter_dir, hardware, config.hardware_engine)
        loop = loop_of(how, measured, drafter, model)
        report = evaluate(target, drafter, prompts, measured, loop=loop)
        measured_speeds = {name: part.speed.speedup for name, part in [*report.parts.items(), ("all", report.whole)]}
        report = replace(
            report,
            drafter_dir=str(drafter_dir),
            command=command(),
            settings=report.settings | {"loop": loop.kind, "schedule": config.schedule.name},
            predicted=None if predicted is None else beside(predicted, measured_speeds),
            pareto=pareto,
        )
    record(folder, config, target=target.identity)
    path = report.write(folder)
    console = Console()
    report.show(console)
    console.print(f"report         {path.with_name(PAGE)}", soft_wrap=True)
    # What can fail comes after the report, which hours may have gone into.
    if config.calibrate:
        _keep_calibration(drafter_dir, report, measured.sampling)
    if config.traces is not None and isinstance(report, Report):
        Traces.of(report.answers, report.num_slots).save(Path(config.traces).expanduser())
    return report


def check_keys(config: DictConfig, measured: EvalSettings, how: ScheduleSettings) -> None:
    """ValueError for keys that exclude each other, before anything is loaded."""
    if config.replay and (how.name is not None or measured.loop is not None):
        raise ValueError("a replay decodes nothing: schedule must be none and loop null with replay=true")
    if config.calibrate and measured.tree.kind != "none":
        raise ValueError(f"calibrate=true is for chains: tree must be none, got {measured.tree.kind}")
    if config.traces is None:
        return
    if config.replay:
        raise ValueError("traces are recorded where the target decodes: replay must be false")
    if how.name is not None:
        raise ValueError(f"traces need all slots of every round: schedule must be none, got {how.name}")
    if measured.tree.kind != "none":
        raise ValueError(f"traces are of chains: tree must be none, got {measured.tree.kind}")


def foreseen(
    config: DictConfig, measured: EvalSettings, prompts: Sequence[Prompt]
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The files of `predicted` and `pareto`, None where there is none. ValueError, before anything is measured, for a
    prediction of what will not be."""
    predicted, pareto = (
        None if config[name] is None else read_json(Path(config[name]).expanduser()) for name in ("predicted", "pareto")
    )
    if predicted is not None:
        speeds = measured.baseline and not config.replay
        beside(predicted, {name: 1.0 if speeds else None for name in [*by_domain(prompts), "all"]})
    return predicted, pareto


def cost_of(target: Target, drafter_dir: Path, hardware: HardwareSettings, engine: str) -> Cost:
    """What a schedule takes for step times: those of hardware.table, else the roofline."""
    if hardware.table is not None:
        return measured_times(hardware.table)
    return roofline_of(target, drafter_dir, hardware, engine)


def loop_of(how: ScheduleSettings, measured: EvalSettings, drafter: Drafter, model: Callable[[], Cost]) -> Loop:
    """The loop and the schedule that settings ask for. model: step times where schedule.steps names none. ValueError
    when confidences are to be fitted under a schedule, whose rounds differ in their slots, and for one of trees."""
    if how.name is None:
        return Loop(measured.loop or "waiting")
    if measured.tree.kind != "none":
        raise ValueError(f"schedules are for chains: tree must be none with schedule={how.name}")
    if measured.peaks:
        raise ValueError(f"calibrate=true needs all slots of every round: schedule must be none, got {how.name}")
    cost: Cost = NoCost()
    if how.needs_cost:
        cost = how.measured() or model()
    slots = measured.decoding(drafter).num_slots
    return Loop(measured.loop or "steady", partial(how.make, slots, cost))


def evaluate_replay(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    settings: EvalSettings,
    recording: Path | None = None,
    words: dict[str, Any] | None = None,
) -> Replayed:
    """Greedy tau against the target's recorded answers; the target runs only to record them, once.

    recording: file that keeps them, made when missing. words: further keys of the report. ValueError when the settings
    sample, or the file is another target's or another prompt set's.
    """
    if not settings.sampling.greedy:
        raise ValueError(f"a replay is greedy: temperature must be 0 with replay=true, got {settings.temperature}")
    if settings.tree.kind != "none":
        raise ValueError(f"a replay drafts chains: tree must be none with replay=true, got {settings.tree.kind}")
    if settings.lossy is not None:
        raise ValueError(f"a replay is lossless: verification must be null, got {settings.verification}")
    asked = questions(target, prompts, settings)
    with Watch(len(asked)) as watch:
        watch.pass_ = "recording answers"
        layers, size = drafter.needs.layers, settings.batch_size
        answers = kept(recording, target, asked, layers, settings.max_new_tokens, size, watch)
    slots = settings.decoding(drafter).num_slots
    said = (words or {}) | about(target, drafter, settings, slots)
    return measure_replay(drafter, answers, slots, said, settings.peaks)


def drafter_words(drafter: Drafter) -> dict[str, Any]:
    """What a report says of a drafter."""
    return {"architecture": type(drafter).__module__.rsplit(".", 1)[-1], "settings": drafter.settings()}


def _keep_calibration(drafter_dir: Path, report: Report | Replayed, sampling: Sampling) -> None:
    """Write what was fitted beside the head; ValueError when it gives neither confidences nor q_max, or nothing was
    drafted."""
    if report.calibration is None:
        raise ValueError(f"calibrate=true: the drafter in {drafter_dir} gives neither confidences nor q_max")
    save_calibration(drafter_dir, report.calibration, asdict(sampling))


@hydra.main(version_base="1.3", config_path="pkg://conf", config_name="eval")
def main(config: DictConfig) -> None:
    """`headstart eval`: exit status 1 when the greedy output is not the target's own."""
    report = run(config, Path(HydraConfig.get().runtime.output_dir))
    if isinstance(report, Report) and report.greedy_identical is False:
        raise SystemExit(1)


if __name__ == "__main__":
    run_module("eval", "eval.evaluate")
