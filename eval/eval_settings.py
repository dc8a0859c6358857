"""What `headstart eval` is told, on our own loop and on serving engines alike: settings, prompts, the command."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import cast, get_args

from hydra.core.hydra_config import HydraConfig

from checkpoints.redact import hide
from data.conversations import Prompt
from drafters.contract import Coupling, Drafter
from drafters.sampling import Sampling
from eval.decoder import DecodeSettings, Verification
from eval.engine_settings import KEYS
from eval.lossy import RULES, Lossy
from eval.steady import LOOPS
from eval.tree_decoder import TreeDecodeSettings
from eval.trees import TreeSettings

OPTIONS = (
    *("replay", "recording", "calibrate", "predicted", "pareto", "traces", "schedule", "hardware", "hardware_engine"),
    *KEYS,
)


@dataclass(frozen=True)
class EvalSettings:
    """How to measure.

    num_slots: tokens drafted per round, null for the drafter's own. max_new_tokens, batch_size, seed: of decoding.
    temperature (0 = greedy), top_k, top_p: on target and drafter alike. baseline: also decode without the drafter.
    limit: prompts of each domain, null for all. thinking: the chat template's thinking choice, null for its default.
    verification: of sampled proposals, rejection, block or same_noise; null for the drafter's own coupling. typical or
    threshold keep drafts by eval.lossy.Lossy with epsilon, delta and threshold, which is LOSSY. peaks: record q_max by
    slot, for an estimator of heads without confidences. tree: what is drafted in place of chains; num_slots is its
    depth. loop: of eval.steady.LOOPS; null: waiting, or steady under a schedule. weights: null, int8 or int4: round the
    drafter's projections to what such an export holds (checkpoints.weights).
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
    verification: str | None = None
    epsilon: float = 0.09
    delta: float = 0.3
    threshold: float = 0.3
    peaks: bool = False
    tree: TreeSettings = TreeSettings()
    loop: str | None = None
    weights: str | None = None

    def __post_init__(self) -> None:
        if self.loop is not None and self.loop not in LOOPS:
            raise ValueError(f"loop must be null, {', '.join(LOOPS)}, got {self.loop!r}")
        if self.tree.kind != "none" and self.loop not in (None, "waiting"):
            raise ValueError(f"a tree needs loop=waiting, got {self.loop}")
        allowed = (*get_args(Coupling), "block", *RULES)
        if self.verification is not None and self.verification not in allowed:
            raise ValueError(f"verification must be null, {', '.join(allowed)}, got {self.verification!r}")

    @property
    def lossy(self) -> Lossy | None:
        """The rule of a lossy verification; None for a lossless one."""
        if self.verification not in RULES:
            return None
        return Lossy(self.verification, self.epsilon, self.delta, self.threshold)

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p)

    def plain_decoding(self) -> DecodeSettings:
        """Settings of the loop without a drafter."""
        return DecodeSettings(1, self.max_new_tokens, self.batch_size, self.sampling, self.seed)

    def decoding(self, drafter: Drafter) -> DecodeSettings:
        """Settings of the decoding loop; ValueError on values out of range."""
        slots = self.num_slots if self.num_slots is not None else drafter.num_slots
        lossless = None if self.lossy is not None else cast(Verification | None, self.verification)
        slots = self.tree.depth(slots) if self.num_slots is None else slots
        made = DecodeSettings(slots, self.max_new_tokens, self.batch_size, self.sampling, self.seed, lossless)
        made = replace(made, verification=made.verified_by(drafter), lossy=self.lossy, peaks=self.peaks)
        if self.tree.kind == "none":
            return made
        self.tree.check(drafter, slots)
        return TreeDecodeSettings(**{key.name: getattr(made, key.name) for key in fields(made)}, tree=self.tree)

    def tree_tokens(self, num_slots: int) -> int | None:
        """Tokens that the target reads each round to verify a tree, the anchor included; None for chains."""
        return None if self.tree.kind == "none" else 1 + self.tree.size(num_slots)


def plain_keys() -> list[str]:
    """Keys of the config that are EvalSettings' own."""
    return [key.name for key in fields(EvalSettings) if key.name not in ("peaks", "tree")]


def checked(prompts: Sequence[Prompt], settings: EvalSettings) -> list[Prompt]:
    """The prompts to measure on. ValueError without prompts, or on equal ids."""
    prompts = limited(prompts, settings.limit)
    if not prompts:
        raise ValueError("evaluation needs at least one prompt")
    if len({prompt.id for prompt in prompts}) != len(prompts):
        raise ValueError("prompt ids must differ: a prompt's random seed comes from its id")
    return prompts


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


def command() -> str | None:
    """The command as typed but for secrets, inside a Hydra run; None elsewhere."""
    if not HydraConfig.initialized():
        return None
    return shlex.join(["headstart", "eval", *map(hide, HydraConfig.get().overrides.task)])
