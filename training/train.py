"""headstart train: a drafter on a frozen target, from a prepared folder to a drafter folder.

    headstart train prepared=outputs/prepare/... drafter=NAME objective=own optimizer=muon trainer.max_steps=2000

Leaves in the run's folder: run.json, metrics.csv, checkpoints/last.ckpt, and drafter/ (the one with the best tau on
held-out prompts). The same command over the same folder goes on from last.ckpt.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning import Trainer, seed_everything
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from omegaconf import DictConfig, ListConfig, OmegaConf
from rich.console import Console

from checkpoints.errors import run_module
from checkpoints.files import read_json
from checkpoints.folder import load_drafter, read_drafter
from checkpoints.lock import launched_rank, only_run
from checkpoints.run import complete, known_groups, native_bf16, record, settings
from data.chat import Template
from data.collate import Plan
from data.conversations import Conversation, Prompt, read_conversations, read_prompts, token_counts
from data.features import BATCH_TOKENS, FeatureStore, conversations_fingerprint
from data.module import BatchSettings, OnlineSource, PackedData, SampleSource, StoreSource
from data.queue import QueueSource
from data.sources import SourceSettings
from data.target import Target, TargetSettings
from drafters.contract import Drafter, TargetParts
from drafters.vocabulary import DraftVocabulary
from eval.recording import Question, Recording, belongs, owner_of, record_answers, trajectory
from eval.replay import Trajectory
from training import progressive
from training.acceptance import AcceptanceCallback, AcceptanceSettings
from training.activations import Kept, spare_activations
from training.keeper import AtomicCheckpoints, Keeper, StepLog, WindowTimer, resume_point
from training.marks import check_resumed, difference, plain
from training.module import DrafterModule
from training.objectives import Objective
from training.optimizers import OptimizerSettings
from training.progressive import Stage
from training.ranks import explained, launched_outside, own_device, stay_on_this_machine
from training.self_forcing import SelfForcing, SelfForcingSettings
from training.teacher import check_store

GROUPS = (
    *("target", "prepared", "heldout", "drafter", "objective", "optimizer", "batch", "acceptance", "trainer"),
    *("self_forcing", "logger", "seed", "resume", "limit", "init"),
)


@dataclass(frozen=True)
class DrafterSettings:
    """model: `_target_` and plain arguments of the class. vocabulary: size of the draft vocabulary, built from the
    training answers (null: the whole target vocabulary). warm_start: initialise from the target. objective:
    the paper's objective, read through objective=own. stage: training.progressive.Stage, for a drafter that learns from
    one of half as many slots (null: none)."""

    model: dict[str, Any]
    vocabulary: int | None = None
    warm_start: bool = True
    objective: dict[str, Any] | None = None
    stage: dict[str, Any] | None = None


@dataclass(frozen=True)
class TrainerSettings:
    """max_steps: optimizer steps (0: as many as `max_tokens` take or, without it, `epochs` make). max_tokens: end with
    the step that has seen so many answer tokens (null: no such limit). accumulate: micro-batches per optimizer step.
    precision: Lightning's name, "auto" = bf16-mixed where the hardware multiplies bf16, else 32-true.
    checkpoint_every: optimizer steps. max_minutes: stop early after this long (null: never).
    max_skipped: steps in a row whose loss or gradient is not finite that are skipped before the run ends. activations:
    "keep", "recompute" or "offload" (training.activations). The rest is Lightning's."""

    max_steps: int = 0
    epochs: int = 1
    max_tokens: int | None = None
    accumulate: int = 1
    precision: str = "auto"
    accelerator: str = "auto"
    devices: int | str | list[int] = 1
    num_nodes: int = 1
    strategy: Any = "auto"
    checkpoint_every: int = 200
    max_minutes: float | None = None
    log_every: int = 10
    progress: bool = True
    deterministic: bool = False
    max_skipped: int = 20
    activations: Kept = "keep"

    def __post_init__(self) -> None:
        for name, least in (
            ("max_steps", 0),
            ("epochs", 1),
            ("accumulate", 1),
            ("checkpoint_every", 1),
            ("log_every", 1),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"trainer.{name} must be at least {least}, got {getattr(self, name)}")
        if self.max_minutes is not None and self.max_minutes <= 0:
            raise ValueError(f"trainer.max_minutes must be above 0 or null, got {self.max_minutes}")

    def resolved_precision(self) -> str:
        if self.precision != "auto":
            return self.precision
        return "bf16-mixed" if native_bf16() else "32-true"


@dataclass(frozen=True)
class Given:
    """What the config says, all of it checked, and the texts that it names: what can fail before a target is loaded."""

    drafter: DrafterSettings
    optimizer: OptimizerSettings
    objective: Objective
    trainer: TrainerSettings
    batches: BatchSettings
    accepting: AcceptanceSettings
    forcing: SelfForcingSettings
    heldout: SourceSettings
    target: TargetSettings
    stage: Stage | None
    prepared: Path
    prepared_as: dict[str, Any]
    conversations: list[Conversation]
    prompts: list[Prompt]


@hydra.main(version_base="1.3", config_path="pkg://conf", config_name="train")
def main(config: DictConfig) -> None:
    """Train as configured; prints where the drafter lies."""
    known_groups(config, *GROUPS)
    say("init", settings_of_init(config, HydraConfig.get().overrides.task))
    out = Path(HydraConfig.get().runtime.output_dir)
    found = run(config, out)
    Console().print(f"best tau {found['tau']:.3f} at step {found['step']}: {found['drafter']}", soft_wrap=True)


def run(config: DictConfig, out: Path) -> dict[str, Any]:
    """Train in the folder `out`, which nobody else writes. Returns the best measurement and the drafter's folder."""
    with only_run(out) if launched_rank() == 0 else nullcontext(), explained(out, config.batch):
        return _run(config, out)


def _run(config: DictConfig, out: Path) -> dict[str, Any]:
    """The wiring, top to bottom. Nothing in `out` changes before a checkpoint there is known to be this run's."""
    loggers = build_loggers(config.logger, out)
    given = read_given(config)
    resumed = resume_point(config.resume, out)
    check_resumed(resumed, config)
    seed_everything(config.seed, verbose=False)
    torch.set_float32_matmul_precision("high")
    if torch.cuda.is_available():  # each rank of a node holds its own target, where Lightning puts its drafter
        torch.cuda.set_device(own_device(given.trainer.devices))
    target = Target.load(**asdict(given.target))
    conversations, batches, steering = given.conversations, given.batches, given.trainer
    drafter = build_drafter(given.drafter, target, conversations, config.init)
    source = feature_source(batches, given.prepared, target, drafter, conversations)
    data = PackedData(source, batches, anchors=drafter.anchors_per_row)
    if given.drafter.warm_start and config.init is None:
        warm_start(drafter, target, data)
    if given.stage is not None:
        say("stage", progressive.begin(drafter, given.stage, target))
    steps = planned_steps(steering, data.plan, [one.answer_tokens for one in conversations])
    data.total = steps * steering.accumulate
    own_drafts = SelfForcing(target, given.forcing, lambda step: data.steps[step]) if given.forcing.share else None
    module = DrafterModule(
        drafter, target.parts, given.objective, given.optimizer, steps, own_drafts, steering.max_skipped
    )
    marks = {
        "target": target.identity["weights"],
        "data": conversations_fingerprint(conversations),
        "vocabulary": drafter.vocabulary.fingerprint,
        **progressive.marks(given.stage),
    }
    check_resumed(resumed, config, marks)
    declared = {"prepared": given.prepared_as, "conversations": len(conversations)}
    if not isinstance(source, OnlineSource):
        conversations.clear()  # what is read holds them again; kept, they fill a node's memory once a rank
    if launched_rank() == 0:
        keep_metrics(out)
    recorded = held_out(given, target, drafter, out / "heldout.safetensors")
    acceptance = AcceptanceCallback(recorded, given.accepting)
    if isinstance(source, QueueSource):
        source.follow(data.plan, data.total)
    declared["features"] = held_features(source, given, drafter)
    if launched_rank() == 0:
        record(out, config, target=target.identity, prepared=declared, run=marks)
    keeper = Keeper(out, config, acceptance, target.identity, declared, marks, steering.checkpoint_every)
    trainer = build_trainer(steering, given.optimizer, loggers, out, [acceptance, keeper], steps)
    module.activations = steering.activations
    spare_activations(drafter, module.activations)
    module.autocast = sharded(trainer.strategy) and steering.resolved_precision() == "bf16-mixed"
    trainer.fit(module, datamodule=data, ckpt_path=resumed, weights_only=True)
    if isinstance(source, QueueSource):
        source.close()
    return keeper.finish(trainer)


def read_given(config: DictConfig) -> Given:
    """Everything that the config says or names, but for the target and heads. ValueError names what is missing or not
    allowed."""
    complete(config)
    chosen = settings(DrafterSettings, config.drafter, "drafter")
    prepared = Path(config.prepared)
    prepared_as = read_prepared(prepared)
    heldout = settings(SourceSettings, config.heldout, "heldout")
    if heldout.thinking is None:  # ask as the training data were asked
        heldout = replace(heldout, thinking=prepared_as.get("thinking"))
    return Given(
        drafter=chosen,
        optimizer=settings(OptimizerSettings, config.optimizer, "optimizer"),
        objective=settings(Objective, config.objective, "objective"),
        trainer=settings(TrainerSettings, config.trainer, "trainer"),
        batches=settings(BatchSettings, config.batch, "batch"),
        accepting=settings(AcceptanceSettings, config.acceptance, "acceptance"),
        forcing=settings(SelfForcingSettings, config.self_forcing, "self_forcing"),
        heldout=heldout,
        target=settings(TargetSettings, config.target, "target"),
        stage=None if chosen.stage is None else settings(Stage, chosen.stage, "drafter.stage"),
        prepared=prepared,
        prepared_as=prepared_as,
        conversations=first_conversations(prepared, config.limit),
        prompts=read_prompts(heldout, "heldout"),
    )


def held_features(source: SampleSource, given: Given, drafter: Drafter) -> dict[str, str]:
    """What a source's features hold, and of a store the share that passed check 4; prints it. ValueError when a store
    cannot train this drafter; see check_store."""
    if isinstance(source, OnlineSource):
        say("features", [source.holds])
        return {"holds": source.holds}
    assert isinstance(source, StoreSource | QueueSource)
    held = check_store(source.store, given.batches.precision, drafter, given.objective, given.forcing.share > 0)
    truth = "none yet" if source.store.truth is None else f"{source.store.truth:.2%}"
    say("features", [f"{held}; check 4 on {truth} of a sample"])
    return {"holds": held, "truth": truth}


def settings_of_init(config: DictConfig, typed: Sequence[str]) -> list[str]:
    """Put the settings of the head in `init` in place of those of drafter.model, and say which; nothing without init.

    typed: overrides of this command. A setting typed by hand stays, and is refused later should the head have another.
    ValueError when the head is of another class than drafter.model.
    """
    if config.init is None:
        return []
    declared = read_drafter(Path(config.init)).declared
    module = str(config.drafter.model.get("_target_")).rpartition(".")[0]
    if module != f"drafters.{declared.architecture}":
        own = declared.architecture
        raise ValueError(
            f"init {config.init} holds a head of drafters.{own}, drafter.model is of {module}: drafter={own}"
        )
    by_hand = [word.lstrip("+~").split("=")[0] for word in typed]
    before = plain(config.drafter.model)
    for name, value in declared.settings.items():
        key = f"drafter.model.{name}"
        if "drafter.model" not in by_hand and key not in by_hand:
            parts = {part: OmegaConf.select(config, part) for part in by_hand if part.startswith(f"{key}.")}
            for place, own in ({key: value} | parts).items():
                OmegaConf.update(config, place, own, merge=False, force_add=True)
    after = plain(config.drafter.model)
    stated = [name for name, value in before.items() if value is not None and name in after]
    return difference(*({name: one[name] for name in stated} for one in (before, after)))


def planned_steps(chosen: TrainerSettings, plan: Plan, answer_tokens: Sequence[int]) -> int:
    """Optimizer steps of a run: known before it starts, so that schedules and curricula end with it.

    answer_tokens: of each conversation. ValueError for a token limit below 1 or data without answers.
    """
    if chosen.max_tokens is None:
        return chosen.max_steps or -(-plan.steps(chosen.epochs) // chosen.accumulate)
    if chosen.max_tokens < 1 or not any(answer_tokens):
        raise ValueError(f"trainer.max_tokens must be at least 1, of data with answers, got {chosen.max_tokens}")
    seen = steps = 0
    while seen < chosen.max_tokens and (steps < chosen.max_steps or not chosen.max_steps):
        for micro in range(steps * chosen.accumulate, (steps + 1) * chosen.accumulate):
            seen += sum(answer_tokens[index] for row in plan.batch(micro) for index in row)
        steps += 1
    return steps


def build_drafter(
    chosen: DrafterSettings, target: Target, conversations: Sequence[Conversation], init: str | None = None
) -> Drafter:
    """The drafter on the target's device, with its draft vocabulary from the training answers.

    init: a drafter folder to train on from, its draft vocabulary included. ValueError when its settings are not those
    of drafter.model.
    """
    parts = target.parts
    known = load_drafter(Path(init), parts, torch.float32) if init else None
    vocabulary = draft_vocabulary(chosen, target, conversations, known)
    drafter = construct(chosen.model, parts, vocabulary).to(target.device)
    if drafter.mask_token is not None and any(drafter.mask_token in one.tokens for one in conversations):
        raise ValueError(
            f"mask token {drafter.mask_token} stands in the training data: choose an id that no text contains"
        )
    if known is not None:
        go_on_from(drafter, known, f"init {init}")
    trained = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    size = f"{trained / 1e6:.1f}M trained parameters"
    console().print(f"drafter: {size}, {drafter.num_slots} slots, layers {drafter.needs.layers}")
    return drafter


def construct(model: dict[str, Any], parts: TargetParts, vocabulary: DraftVocabulary) -> Drafter:
    """The class that drafter.model names. ValueError for an argument that it does not take."""
    layers = model.get("layers")
    if layers is not None and not isinstance(layers, list | tuple | ListConfig):
        raise ValueError(f"drafter.model.layers must be a list of target layers, or null, got {layers!r}")
    make = instantiate(model, _partial_=True, _convert_="all")
    try:
        return make(target=parts, vocabulary=vocabulary)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise ValueError(f"drafter.model: {error}; conf/drafter names what it takes") from error


def draft_vocabulary(
    chosen: DrafterSettings, target: Target, conversations: Sequence[Conversation], known: Drafter | None
) -> DraftVocabulary:
    """The known head's own, else one of the tokens that the answers use most, else the target's whole vocabulary."""
    if known is not None:
        return known.vocabulary
    size = target.identity["vocab_size"]
    if chosen.vocabulary is None:
        return DraftVocabulary.full(size)
    counts = token_counts(conversations, size)
    vocabulary = DraftVocabulary.from_counts(counts, chosen.vocabulary)
    covered = f"{vocabulary.coverage(counts):.2%} of answers"
    console().print(f"draft vocabulary: {len(vocabulary)} of {size} tokens, {covered}")
    return vocabulary


def warm_start(drafter: Drafter, target: Target, data: PackedData) -> None:
    """Begin from what the target is and from what the first batch shows; prints what was taken. Equations are solved
    with products of 32 bits: a GPU's TF32, with which training goes on, would blur what they are solved from."""
    batch, before = data.first.to(target.device, torch.float32), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        say("warm start", drafter.warm_start(target.parts) + drafter.warm_start_on(batch))
    finally:
        torch.set_float32_matmul_precision(before)


def say(what: str, lines: Sequence[str]) -> None:
    """Print lines of what was done."""
    for line in lines:
        console().print(f"{what}: {line}", style="dim")


def lasting(drafter: Drafter) -> dict[str, Any]:
    """A drafter's settings without those that shape training alone."""
    kept = deepcopy(drafter.settings())
    for name in drafter.training_only:
        *groups, last = name.split(".")
        del reduce(getitem, groups, kept)[last]
    return kept


def go_on_from(drafter: Drafter, known: Drafter, where: str) -> None:
    """Take a trained head's tensors. ValueError names settings in which the two differ; those that shape training alone
    may."""
    mine, other = ({"class": type(one).__name__} | lasting(one) for one in (drafter, known))
    if lines := difference(other, mine):
        onward = "give the head's own values, or leave these keys out of the command"
        raise ValueError(f"{where} was made with other settings of drafter.model: {'; '.join(lines)}; {onward}")
    drafter.load_state_dict(known.state_dict())


def first_conversations(prepared: Path, limit: int | None) -> list[Conversation]:
    """The first `limit` prepared conversations, null for all. ValueError below 1."""
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1 or null, got {limit}")
    return read_conversations(prepared / "conversations.jsonl")[:limit]


def feature_source(
    batches: BatchSettings, prepared: Path, target: Target, drafter: Drafter, conversations: Sequence[Conversation]
) -> SampleSource:
    """The store beside the conversations, or the target itself; both checked against the drafter's needs."""
    if batches.features == "online":
        precision = batches.precision or "auto"
        return OnlineSource(target, conversations, drafter.needs.layers, precision, BATCH_TOKENS)
    if batches.features == "queue":
        return QueueSource(prepared / "features", conversations, target.identity, drafter.needs.layers, target.parts)
    store = FeatureStore.open(prepared / "features", target.identity, drafter.needs.layers, "lazy", target.parts)
    names = [one.id for one in conversations]
    lengths, whole = [len(one.tokens) for one in conversations], len(names) == len(store)
    same = store.ids[: len(names)] == names and list(store.lengths[: len(names)]) == lengths
    if not same or (whole and not store.holds(conversations)):
        raise ValueError(f"{prepared}: the features are not those of conversations.jsonl; run headstart prepare again")
    source = StoreSource(store)
    source.lengths, source.ids = source.lengths[: len(names)], names
    return source


def held_out(given: Given, target: Target, drafter: Drafter, cache: Path) -> list[Trajectory]:
    """The target's greedy answers to held-out prompts, spread evenly over domains, with features.

    cache: file that keeps the answers' tokens, so that a resumed run does not decode them again; one of other prompts,
    another length or target is written anew.
    """
    chosen = given.accepting
    by_domain: dict[str, list[Any]] = {}
    for prompt in given.prompts:
        by_domain.setdefault(prompt.domain, []).append(prompt)
    share = max(1, chosen.prompts // max(1, len(by_domain)))
    kept = [prompt for group in by_domain.values() for prompt in group[:share]]
    template = Template(target.tokenizer, given.heldout.thinking, target.eos_ids)
    questions = [Question(one.domain, template.prompt(one.messages)) for one in kept]
    owner = owner_of(target, questions, chosen.max_new_tokens)
    if belongs(cache, owner):
        found = Recording.load(cache, owner)
    else:
        found = record_answers(target, questions, chosen.max_new_tokens)
        if launched_rank() == 0:
            found.save(cache)
    layers = drafter.needs.layers
    return [trajectory(target, q, a, layers) for q, a in zip(found.questions, found.answers, strict=True)]


def build_trainer(
    chosen: TrainerSettings,
    optimizer: OptimizerSettings,
    loggers: list[Logger],
    out: Path,
    callbacks: list[Any],
    steps: int,
) -> Trainer:
    """Lightning's trainer; nothing of it lands outside `out`."""
    strategy = chosen.strategy if isinstance(chosen.strategy, str) else instantiate(chosen.strategy)
    if isinstance(strategy, ParallelStrategy):
        refuse_a_sweep()
        stay_on_this_machine(chosen.num_nodes)
    # Lightning's auto may mean another device than the target's, which is a GPU of CUDA or the CPU.
    own_kind = "cuda" if torch.cuda.is_available() else "cpu"
    accelerator = own_kind if chosen.accelerator == "auto" else chosen.accelerator
    precision = chosen.resolved_precision()
    if sharded(strategy) and precision == "bf16-mixed":
        precision = "32-true"  # Lightning refuses to mix here; the module's step does it
    ending = [] if chosen.max_minutes is None else [WindowTimer(timedelta(minutes=chosen.max_minutes))]
    own: list[Any] = [AtomicCheckpoints()]
    if SLURMEnvironment.detect():  # a signal must not write a checkpoint inside an accumulation window
        own.append(SLURMEnvironment(auto_requeue=False))
    return Trainer(
        default_root_dir=out,
        max_steps=steps,
        accelerator=accelerator,
        devices=chosen.devices,
        num_nodes=chosen.num_nodes,
        strategy=strategy,
        precision=precision,  # type: ignore[arg-type]
        accumulate_grad_batches=chosen.accumulate,
        gradient_clip_val=optimizer.clip or None,
        logger=loggers or False,
        log_every_n_steps=chosen.log_every,
        callbacks=[StepLog(chosen.log_every), *callbacks, *ending, *([RichProgressBar()] if chosen.progress else [])],
        enable_progress_bar=chosen.progress,
        enable_checkpointing=False,
        enable_model_summary=False,
        plugins=own,
        use_distributed_sampler=False,
        deterministic=chosen.deterministic,
    )


def sharded(strategy: Any) -> bool:
    """Whether a strategy leaves mixed precision to the module."""
    return isinstance(strategy, ModelParallelStrategy)


def refuse_a_sweep() -> None:
    """ValueError under `-m`, where Lightning's helper processes would each start the whole sweep."""
    if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN and not launched_outside():
        raise ValueError("a sweep (-m) over several processes: start each run by itself, or through torchrun or srun")


def console() -> Console:
    """Where rank 0 speaks; other ranks are silent."""
    return Console(quiet=launched_rank() > 0)


def keep_metrics(out: Path) -> None:
    """Give an earlier run's metrics.csv a number: the logger begins its file anew, and a resumed run logs nothing
    before its checkpoint."""
    if (out / "metrics.csv").exists():
        number = 1 + len(list(out.glob("metrics-*.csv")))
        (out / "metrics.csv").rename(out / f"metrics-{number:03d}.csv")


def build_loggers(config: DictConfig | None, out: Path) -> list[Logger]:
    """The loggers of the group, all writing under `out`. ValueError names an entry that is no logger."""
    loggers = []
    for key, one in (config or {}).items():
        name = str(key)
        if not isinstance(one, DictConfig) or "_target_" not in one:
            raise ValueError(f"logger.{name} must be a logger with a _target_, got {one!r}; see conf/logger")
        loggers.append(instantiate(one, save_dir=str(out)))
    return loggers


def read_prepared(folder: Path) -> dict[str, Any]:
    """What prepare said of the data: chat template, thinking mode, counts and fingerprints."""
    path = folder / "prepare.json"
    return read_json(path) if path.exists() else {}


if __name__ == "__main__":
    run_module("train", "training.train")
