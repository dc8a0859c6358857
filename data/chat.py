"""Chats as token ids, and which of those tokens the target wrote.

A chat's answers are found on token ids: full rendering minus prompt rendering, turn by turn. Nothing is searched for
in the text, so no marker or header has to be known. What a template does to a chat is verified turn by turn, and a
template whose prompt, answer and history do not fit together is refused (`TemplateError`), never guessed.

    prompt(messages[:i])      <s> user Hi </s> assistant:                      with the generation prompt
    full(messages[:i+1])      <s> user Hi </s> assistant: Hello </s> \\n
    turns                      0   0   0   0       0        1    1   0         end of turn counts, glue does not

Rows whose ids were recorded when the target wrote them need no template: `recorded` takes the ids as they are.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateError as JinjaError
from transformers import PreTrainedTokenizerBase

Messages = Sequence[dict[str, Any]]
ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
# Templates name the switch differently; each ignores the names it does not use.
THINKING_SWITCHES = ("enable_thinking", "thinking")


class TemplateError(ValueError):
    """A chat template cannot give a trustworthy mask for this chat. The message names the trouble and the turn."""


@dataclass
class Chat:
    """tokens: ids as the target sees them. turns: 0 outside answers, n in the n-th answer (end of turn included)."""

    tokens: list[int]
    turns: list[int]

    def truncate(self, max_length: int | None) -> bool:
        """Cut both lists to max_length tokens in place; True if something was cut."""
        cut = max_length is not None and len(self.tokens) > max_length
        if cut:
            del self.tokens[max_length:], self.turns[max_length:]
        return cut

    def prompt_and_answer(self) -> tuple[list[int], list[int]]:
        """Ids before the last answer, and that answer's ids (end of turn included). ValueError without one."""
        last = max(self.turns, default=0)
        if not last:
            raise ValueError("the chat holds no answer")
        start = self.turns.index(last)
        stop = start + self.turns.count(last)
        return self.tokens[:start], self.tokens[start:stop]


def recorded(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> Chat:
    """A chat from ids recorded at generation, used as they are: the response is answer 1."""
    return Chat([*prompt_ids, *response_ids], [0] * len(prompt_ids) + [1] * len(response_ids))


class Template:
    """A tokenizer's chat template with one thinking choice.

    thinking: True or False sets the template's switch, None leaves its default. It belongs in the record of whatever
    is made with it; `switches` is what the template is given. eos_ids: tokens that end an answer besides the
    tokenizer's special tokens. Raises TemplateError when the tokenizer has no template, or a thinking choice is given
    and the template has no switch.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, thinking: bool | None = None, eos_ids: Iterable[int] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self.thinking = thinking
        try:
            text = str(tokenizer.get_chat_template())
        except ValueError as error:
            raise TemplateError(f"tokenizer {tokenizer.name_or_path!r} has no chat template: {error}") from error
        self.switches: dict[str, Any] = {}
        if thinking is not None:
            self.switches = {name: thinking for name in THINKING_SWITCHES if re.search(rf"\b{name}\b", text)}
            if not self._switch_works():
                raise TemplateError(f"thinking={thinking}: the chat template has no thinking switch; set it to null")
        special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        # The unknown token stands for text, unless it also ends answers (GPT-2's only special token).
        unknown = {tokenizer.unk_token_id} - {tokenizer.eos_token_id}
        self._ends = ((special | set(tokenizer.all_special_ids)) - unknown) | set(eos_ids)
        self._end_texts = tuple(_squeeze(token) for token in tokenizer.convert_ids_to_tokens(sorted(self._ends)))

    def ends(self, token: int) -> bool:
        """Whether a token ends an answer."""
        return token in self._ends

    def prompt(self, messages: Messages) -> list[int]:
        """Token ids of the messages with the generation prompt: what the target reads before it answers."""
        return self._render(messages, prompt=True)[1]

    def chat(self, messages: Messages) -> Chat:
        """A whole chat and its turns, one an assistant message. TemplateError when turns do not fit together."""
        answers = check_messages(messages)
        _, whole = self._render(messages, prompt=False)
        turns = [0] * len(whole)
        for turn, index in enumerate(answers, start=1):
            start, full = self._answer(messages[: index + 1], turn)
            stop = self._end(full, start)
            if full[:stop] != whole[:stop]:
                where = next(i for i, (a, b) in enumerate(zip(full, [*whole, -1], strict=False)) if a != b)
                raise TemplateError(
                    f"the chat template rewrites history: turn {turn}, read alone, parts from the whole chat at token "
                    f"{where}; use multi_turn=split, which makes one chat of every turn"
                )
            if any(turns[start:]):
                raise TemplateError(f"turn {turn} starts inside an earlier answer: the chat template merges turns")
            turns[start:stop] = [turn] * (stop - start)
        return Chat(whole, turns)

    def split(self, messages: Messages) -> list[Chat]:
        """One chat for each answer, with only that answer supervised and the history as the template shows it then."""
        chats = []
        for turn, index in enumerate(check_messages(messages), start=1):
            start, full = self._answer(messages[: index + 1], turn)
            stop = self._end(full, start)
            chats.append(Chat(full[:stop], [0] * start + [1] * (stop - start)))
        return chats

    def _answer(self, messages: Messages, turn: int) -> tuple[int, list[int]]:
        """Start of the last message's answer and ids of the chat up to it; verified in text and in ids."""
        before, prompt = self._render(messages[:-1], prompt=True)
        text, full = self._render(messages, prompt=False)
        if not text.startswith(before) or full[: len(prompt)] != prompt:
            raise TemplateError(
                f"turn {turn}: the prompt's rendering is not a prefix of the chat's, so where the answer starts is "
                f"unknown. The prompt ends in {before[-60:]!r}; there the chat reads "
                f"{text[max(0, len(before) - 60) :][:120]!r}"
                f"{self._hint()}"
            )
        self._verify_text(text[len(before) :], messages[-1], turn)
        return len(prompt), full

    def _verify_text(self, answer: str, message: dict[str, Any], turn: int) -> None:
        """The rendered answer is the message's own words, all of them and no others (white space aside)."""
        if message.get("tool_calls"):
            return  # rendered by the template in its own syntax; prefix and history checks still hold
        shown, content = _squeeze(answer), _squeeze(message.get("content") or "")
        reasoning = _squeeze(next((message[key] for key in REASONING_KEYS if message.get(key)), ""))
        start = shown.find(reasoning) + len(reasoning)
        at = shown.find(content, start) if reasoning in shown else -1
        tail = shown[at + len(content) :]
        ended = any(end in tail for end in self._end_texts)
        if at < 0 or (at > 0 and not reasoning) or (ended and not tail.startswith(self._end_texts)):
            raise TemplateError(
                f"turn {turn}: the chat template does not show the answer as it is (it drops, adds or changes text): "
                f"message {_head(message.get('content') or '')!r}, rendered {_head(answer)!r}{self._hint()}. "
                "Ids recorded when the target answered need no template"
            )

    def _end(self, full: list[int], start: int) -> int:
        """One past the end of turn: the first of the last run of ending tokens, else the rendering's end."""
        ends = [i for i in range(start, len(full)) if full[i] in self._ends]
        if not ends:
            return len(full)
        return next(i for i in reversed(ends) if i == start or full[i - 1] not in self._ends) + 1

    def _render(self, messages: Messages, prompt: bool) -> tuple[str, list[int]]:
        """Text and ids; special tokens come from the template alone, so a template that writes BOS has exactly one."""
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=prompt, **self.switches
            )
        except (JinjaError, TypeError, KeyError, AttributeError) as error:
            raise TemplateError(f"the chat template refuses this chat of {len(messages)} messages: {error}") from error
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        bos = self.tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            raise TemplateError(f"the rendered chat starts with two BOS tokens ({bos})")
        return str(text), ids

    def _switch_works(self) -> bool:
        """Whether the choice changes the prompt: a name in the template's text may be a message's field."""
        asked = [{"role": "user", "content": "hi"}]
        choices: list[dict[str, Any]] = [dict.fromkeys(self.switches, choice) for choice in (True, False)]
        shown = {
            str(self.tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True, **switches))
            for switches in choices
        }
        return len(shown) == 2

    def _hint(self) -> str:
        return (
            ". The template has a thinking switch: set thinking to the mode in which the answers were written"
            if any(name in str(self.tokenizer.get_chat_template()) for name in THINKING_SWITCHES)
            else ""
        )


def check_messages(messages: Messages) -> list[int]:
    """Indices of the assistant messages. ValueError names the first message that is not a chat message."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise ValueError(f"messages must be a list, got {type(messages).__name__}")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            role = message.get("role") if isinstance(message, dict) else message
            raise ValueError(f"message {index}: role must be one of {', '.join(ROLES)}, got {role!r}")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise ValueError(f"message {index}: content must be text, got {type(content).__name__}")
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


def _squeeze(text: str) -> str:
    """Text without white space, in NFKC: what trimming and re-wrapping leave alone."""
    return "".join(unicodedata.normalize("NFKC", text).split())


def _head(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
