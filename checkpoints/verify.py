"""Does the real engine report our acceptance? Serve an export in vLLM with and without drafter and compare."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from checkpoints.engine_run import Run, Served, serve
from checkpoints.engines import PROVENANCE
from checkpoints.files import read_json

SUPPORTED = ("vllm", "vllm_speculators")


@dataclass(frozen=True)
class Reference:
    """What our harness measured, greedy, and on what: written by the evaluation, read here.

    prompts: token ids. tau: 1 + drafts accepted by verification / rounds, the last round of an answer uncut, as engines
    count (report.json's `tau_verified`). outputs: our greedy answers, to count equal ones; may be empty.
    """

    prompts: list[list[int]]
    max_tokens: int
    num_slots: int
    tau: float
    stop_token_ids: list[int] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if not self.prompts or any(not prompt for prompt in self.prompts):
            raise ValueError("a reference needs prompts, each of at least one token id")
        if self.max_tokens < 1 or self.num_slots < 1 or self.tau < 1:
            raise ValueError(
                "a reference needs max_tokens, num_slots and tau of at least 1, got "
                f"{self.max_tokens}, {self.num_slots}, {self.tau}"
            )
        if self.outputs and len(self.outputs) != len(self.prompts):
            raise ValueError(f"a reference has {len(self.prompts)} prompts but {len(self.outputs)} outputs")

    @classmethod
    def read(cls, path: Path) -> "Reference":
        """ValueError names unknown and missing keys."""
        values = read_json(path)
        known = set(cls.__dataclass_fields__)
        unknown, missing = (
            sorted(set(values) - known),
            sorted({"prompts", "max_tokens", "num_slots", "tau"} - set(values)),
        )
        if unknown or missing:
            raise ValueError(
                f"{path}: unknown key(s) {', '.join(unknown) or 'none'}; missing {', '.join(missing) or 'none'}"
            )
        return cls(**values)


@dataclass(frozen=True)
class Verified:
    """tau of the engine and ours, greedy. difference: engine / ours - 1. speedup: the drafter's tokens/s over the
    target's alone, in one process. same_as_alone, same_as_ours: equal greedy answers, of `prompts`."""

    engine: str
    tau: float
    own_tau: float
    difference: float
    agrees: bool
    alpha: list[float]
    tokens_per_s: float
    alone_tokens_per_s: float
    speedup: float
    seconds: float
    alone_seconds: float
    prompts: int
    same_as_alone: int
    same_as_ours: int | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def verify(
    export: Path,
    target_path: str,
    reference: Reference,
    python: Path,
    *,
    hub: Mapping[str, Any] | None = None,
    tolerance: float = 0.02,
    max_num_seqs: int = 1,
    timeout_s: float = 1800.0,
) -> Verified:
    """Serve `target_path` alone, then with the exported drafter, on the reference's prompts, in one engine process.

    hub: revision and trust_remote_code of the target. max_num_seqs: requests at a time; 1 compares speed as a
    single user sees it. RuntimeError when the engine fails, with what the export needs when that is more than an
    ordinary engine has.
    """
    written = read_json(Path(export) / PROVENANCE)
    engine, needs = written["engine"], written["needs"]
    if written["speculative"] is None:
        raise ValueError(f"{export} is an export for {engine}, which is not run from here")
    folder, whole = str(Path(export).resolve()), bool(written.get("whole"))
    draft = {**written["speculative"], "num_speculative_tokens": reference.num_slots}
    if not whole:
        draft["model"] = folder
    longest = max(map(len, reference.prompts)) + reference.max_tokens + reference.num_slots + 1

    def run(name: str, speculative: dict[str, Any] | None) -> Run:
        return Run(
            name,
            folder if whole and speculative else target_path,
            reference.prompts,
            reference.max_tokens,
            longest,
            speculative,
            reference.dtype,
            max_num_seqs,
            reference.stop_token_ids,
            warmup=True,
            **(hub or {}),
        )

    alone, drafted = serve([run("alone", None), run("drafted", draft)], python, timeout_s=timeout_s)
    for served in (alone, drafted):
        if served.error is not None:
            hint = f"this export needs {needs}; " if needs and served is drafted else ""
            raise RuntimeError(f"{engine} failed ({served.name}): {hint}{served.error}")
    return compare(engine, alone, drafted, reference, tolerance)


def compare(engine: str, alone: Served, drafted: Served, reference: Reference, tolerance: float) -> Verified:
    """Engine against harness. RuntimeError when the engine drafted nothing."""
    if drafted.tau is None:
        raise RuntimeError(f"{engine} reports no draft round: the drafter was not used")
    difference = drafted.tau / reference.tau - 1
    return Verified(
        engine=engine,
        tau=drafted.tau,
        own_tau=reference.tau,
        difference=difference,
        agrees=abs(difference) <= tolerance,
        alpha=conditional(drafted.accepted_per_slot, drafted.drafts),
        tokens_per_s=drafted.tokens_per_s,
        alone_tokens_per_s=alone.tokens_per_s,
        speedup=drafted.tokens_per_s / alone.tokens_per_s,
        seconds=drafted.seconds,
        alone_seconds=alone.seconds,
        prompts=len(reference.prompts),
        same_as_alone=sum(a == b for a, b in zip(drafted.outputs, alone.outputs, strict=True)),
        same_as_ours=sum(a == b for a, b in zip(drafted.outputs, reference.outputs, strict=True))
        if reference.outputs
        else None,
    )


def conditional(per_slot: list[int], rounds: int) -> list[float]:
    """alpha_k from the engine's unconditional counts: slot k accepted, given slots before it were; 0.0 where none
    were."""
    before = [rounds, *per_slot[:-1]]
    return [count / given if given else 0.0 for count, given in zip(per_slot, before, strict=True)]
