"""Prompts of several turns: the target's own answer to a turn goes into the chat before the next is asked.

As a chat server does it, the answer goes in as text and the template renders the whole chat anew: a template that hides
earlier reasoning hides it here too.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from data.chat import Template
from data.conversations import Prompt
from eval.recording import Question


@dataclass(frozen=True)
class Request:
    """One turn as the target sees it. id: the prompt's, with /TURN from turn 2 on. ids: token ids, generation prompt
    included. messages: the chat so far; later: what the user says in the turns to come."""

    id: str
    domain: str
    ids: list[int]
    messages: list[dict[str, Any]]
    later: list[str]
    prompt: str
    turn: int = 1


Wave = list[Request]


class Speaker(Protocol):
    """What of a target renders chats and ends answers."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...

    @property
    def eos_ids(self) -> tuple[int, ...]: ...


class Turns:
    """Renders turns through the target's chat template with one thinking choice."""

    def __init__(self, target: Speaker, thinking: bool | None) -> None:
        self.template = Template(target.tokenizer, thinking, target.eos_ids)
        self._ends = set(target.eos_ids)

    def first(self, prompts: Iterable[Prompt]) -> Wave:
        """Turn 1 of every prompt."""
        return [
            Request(one.id, one.domain, self.template.prompt(one.messages), one.messages, list(one.later), one.id)
            for one in prompts
        ]

    def after(self, wave: Sequence[Request], answers: Sequence[Sequence[int]]) -> Wave:
        """The next turn of those that have one. answers: new tokens of each request, in order."""
        found = []
        for request, answer in zip(wave, answers, strict=True):
            if request.later:
                text = self.text(answer)
                said = [{"role": "assistant", "content": text}, {"role": "user", "content": request.later[0]}]
                messages, turn = [*request.messages, *said], request.turn + 1
                name, ids = f"{request.prompt}/{turn}", self.template.prompt(messages)
                found.append(Request(name, request.domain, ids, messages, request.later[1:], request.prompt, turn))
        return found

    def text(self, answer: Sequence[int]) -> str:
        """An answer as a server returns it: without its end of turn and other special tokens."""
        kept = list(answer[:-1] if answer and answer[-1] in self._ends else answer)
        return str(self.template.tokenizer.decode(kept, skip_special_tokens=True))

    def question(self, request: Request) -> Question:
        """A request as a recording asks it, its later turns in tow."""

        def follow(answer: list[int]) -> Question | None:
            following = self.after([request], [answer])
            return self.question(following[0]) if following else None

        return Question(request.domain, request.ids, tuple(request.later), follow if request.later else None)
