"""One pass over prompts, with or without a drafter, turn by turn; what it leaves is what a report is made of."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from data.conversations import Prompt
from data.target import Target
from drafters.contract import Drafter
from eval.decoder import Clock, DecodeSettings, Generation
from eval.metrics import Work
from eval.progress import Watch
from eval.steady import Loop
from eval.tree_decoder import decode
from eval.turns import Request, Turns, Wave

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Pass:
    """One decoding of prompts, turn by turn. waves: what was asked, one wave a turn. answers: to the requests of all
    waves, in order. settings: how. work, sizes: what it took."""

    waves: list[Wave]
    settings: DecodeSettings
    answers: list[Generation]
    work: Work
    sizes: dict[str, int]

    @property
    def requests(self) -> list[Request]:
        return [request for wave in self.waves for request in wave]

    @property
    def tokens(self) -> list[list[int]]:
        """New tokens of every answer."""
        return [one.tokens for one in self.answers]


def prompt_seed(name: str, seed: int) -> int:
    """A request's random seed: 62 bits of its id and the run's seed."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 2


class TurnDecoder:
    """Decodes prompts turn by turn: the target's own answer to a turn stands in the chat before the next. loop: how
    (default: the host waits for every round)."""

    def __init__(self, target: Target, thinking: bool | None, loop: Loop | None = None) -> None:
        self.target, self.turns, self.loop = target, Turns(target, thinking), loop or Loop("waiting")

    def decode(
        self,
        drafter: Drafter | None,
        prompts: Sequence[Prompt],
        decoding: DecodeSettings,
        watch: Watch,
        known: Pass | None = None,
    ) -> Pass:
        """known: the target's own pass over the same prompts, whose chats are asked again; without it the answers of
        this pass go into the chats."""
        clock, waves, answers = Clock(self.target.device), [], list[Generation]()
        wave = known.waves[0] if known else self.turns.first(prompts)
        while wave:
            seeds = [prompt_seed(request.id, decoding.seed) for request in wave]
            asked = [one.ids for one in wave]
            found = decode(self.target, drafter, asked, decoding, clock, seeds, watch, self.loop.group)
            waves.append(wave)
            answers += found
            if known is not None:
                wave = known.waves[len(waves)] if len(waves) < len(known.waves) else []
            else:
                wave = self.turns.after(wave, [one.tokens for one in found])
        return Pass(waves, decoding, answers, Work.of(answers, clock.seconds), clock.sizes)

    def warm_up(self, drafters: Sequence[Drafter | None], prompt: Prompt, decoding: DecodeSettings) -> None:
        """A few untimed tokens, so that first-call costs fall on neither side."""
        short = replace(decoding, max_new_tokens=min(WARM_UP_TOKENS, decoding.max_new_tokens))
        group = self.loop.fresh().group
        for one in drafters:
            decode(self.target, one, [self.turns.first([prompt])[0].ids], short, group=group)
