"""Answers from an OpenAI-compatible server (vLLM, SGLang ...), many requests in flight."""

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from checkpoints.redact import hide
from data.chat import Template, TemplateError
from drafters.sampling import Sampling

RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)
LONGEST_WAIT = 30.0  # seconds between two tries at most


def check_address(where: str, base_url: str) -> None:
    """ValueError, naming the settings, for a base_url that is no http address or holds credentials."""
    if not base_url.startswith(("http://", "https://")):
        raise ValueError(f"{where}.base_url must start with http:// or https://, got {base_url!r}")
    if "@" in base_url.partition("://")[2].partition("/")[0]:
        raise ValueError(
            f"{where}.base_url holds credentials: put the key into an environment variable and name that in api_key_env"
        )


def key_headers(api_key_env: str | None) -> dict[str, str]:
    """The header with the key that an environment variable holds; none without one."""
    key = os.environ.get(api_key_env, "") if api_key_env else ""
    return {"Authorization": f"Bearer {key}"} if key else {}


@dataclass(frozen=True)
class ServerSettings:
    """base_url ends in /v1. model: the served name. concurrency: requests in flight. retries: after the first try.

    backoff: seconds before the first retry, doubled each time. timeout: seconds for one request. api_key_env: name of
    the environment variable that holds the key. return_token_ids: ask for token ids (vLLM); turn off where a server
    refuses that field.
    """

    base_url: str
    model: str
    concurrency: int = 64
    retries: int = 5
    backoff: float = 1.0
    timeout: float = 600.0
    api_key_env: str | None = None
    return_token_ids: bool = True

    def __post_init__(self) -> None:
        check_address("answers.server", self.base_url)
        if self.concurrency < 1 or self.retries < 0:
            given = f"{self.concurrency} and {self.retries}"
            raise ValueError(f"answers.server: concurrency must be >= 1 and retries >= 0, got {given}")


@dataclass(frozen=True)
class Question:
    """One request: its chat, the prompt ids our template gives, and its seed."""

    id: str
    messages: list[dict[str, Any]]
    prompt_ids: list[int]
    seed: int


class Refused(ValueError):
    """This request has no usable answer; the message says why. Others go on."""


async def ask_all(
    questions: Sequence[Question],
    template: Template,
    sampling: Sampling,
    max_new_tokens: int,
    settings: ServerSettings,
    finished: Callable[[Question, list[int], str], None],
    failed: Callable[[Question, str], None],
    transport: httpx.AsyncBaseTransport | None = None,
) -> None:
    """Ask all; for each call `finished(question, response_ids, finish_reason)` or `failed(question, error)`."""
    headers, waiting = key_headers(settings.api_key_env), iter(questions)
    limits = httpx.Limits(max_connections=settings.concurrency)  # the library's own is 100
    how: dict[str, Any] = {"headers": headers, "timeout": settings.timeout, "limits": limits, "transport": transport}
    async with httpx.AsyncClient(**how) as client:

        async def work() -> None:
            for question in waiting:
                body = request_body(question, template, sampling, max_new_tokens, settings)
                try:
                    reply = await _post(client, body, settings)
                    answer = read_reply(reply, question, template)
                except Refused as error:
                    failed(question, str(error))
                else:
                    finished(question, *answer)

        await asyncio.gather(*(work() for _ in range(min(settings.concurrency, len(questions)))))


def request_body(
    question: Question, template: Template, sampling: Sampling, max_new_tokens: int, settings: ServerSettings
) -> dict[str, Any]:
    """The chat completion request. top_k and chat_template_kwargs only when chosen: not every server knows them."""
    body: dict[str, Any] = {
        "model": settings.model,
        "messages": question.messages,
        "max_tokens": max_new_tokens,
        "temperature": sampling.temperature,
        "seed": question.seed & 0x7FFFFFFF,
    }
    if sampling.top_p is not None:
        body["top_p"] = sampling.top_p
    if sampling.top_k is not None:
        body["top_k"] = sampling.top_k
    if template.switches:
        body["chat_template_kwargs"] = template.switches
    if settings.return_token_ids:
        body["return_token_ids"] = True
    return body


def read_reply(reply: dict[str, Any], question: Question, template: Template) -> tuple[list[int], str]:
    """(response_ids, finish_reason): the server's own ids where given, else the text re-tokenised and verified.

    Raises Refused when the server rendered another prompt than ours, when the answer is empty, or when the text does
    not come back from the chat template as it is.
    """
    try:
        choice = reply["choices"][0]
        message, reason = choice["message"], choice["finish_reason"]
    except (KeyError, IndexError, TypeError) as error:
        raise Refused(f"not a chat completion: {str(reply)[:200]}") from error
    theirs = reply.get("prompt_token_ids")
    if theirs is not None and theirs != question.prompt_ids:
        raise Refused(
            f"the server reads another prompt ({len(theirs)} tokens {theirs[:12]}...) than our template gives "
            f"({len(question.prompt_ids)} tokens {question.prompt_ids[:12]}...): tokenizer, template or thinking differ"
        )
    ids = choice.get("token_ids")
    if ids is None:
        ids = _retokenised(message, question, template, ended=reason == "stop")
    if not ids:
        raise Refused("the answer is empty")
    return list(ids), str(reason)


def _retokenised(message: dict[str, Any], question: Question, template: Template, ended: bool) -> list[int]:
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    answer = {"role": "assistant", "content": message.get("content") or ""}
    if reasoning:
        answer["reasoning_content"] = reasoning
    try:
        prompt, ids = template.chat([*question.messages, answer]).prompt_and_answer()
    except TemplateError as error:
        raise Refused(f"the server gave no token ids, and its text cannot be re-tokenised: {error}") from error
    if prompt != question.prompt_ids:
        raise Refused("the server gave no token ids, and the re-tokenised chat has another prompt")
    unknown = template.tokenizer.unk_token_id
    if unknown is not None and unknown in ids:
        raise Refused("the server gave no token ids, and its text holds characters that the tokenizer does not know")
    # A template always ends the turn; an answer cut at max_tokens did not.
    return ids if ended or not template.ends(ids[-1]) else ids[:-1]


async def _post(client: httpx.AsyncClient, body: dict[str, Any], settings: ServerSettings) -> dict[str, Any]:
    url = settings.base_url.rstrip("/") + "/chat/completions"
    for attempt in range(settings.retries + 1):
        wait = min(LONGEST_WAIT, settings.backoff * 2**attempt)
        try:
            response = await client.post(url, json=body)
        except httpx.TransportError as error:
            trouble = f"{type(error).__name__}: {error}"
        else:
            if response.is_success:
                try:
                    return dict(response.json())
                except ValueError as error:
                    raise Refused(f"HTTP {response.status_code} without JSON: {response.text[:200]}") from error
            trouble = f"HTTP {response.status_code}: {response.text[:200]}"
            if response.status_code not in RETRIED:
                raise Refused(hide(trouble))
            after = response.headers.get("retry-after", "")
            wait = min(LONGEST_WAIT, float(after)) if after.isdigit() else wait
        if attempt < settings.retries:
            await asyncio.sleep(wait)
    raise Refused(hide(f"gave up after {settings.retries + 1} tries: {trouble}"))
