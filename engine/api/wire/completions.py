"""`/v1/completions`: the model continues texts without a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.api.wire.answer import (
    DONE,
    AnswerDelta,
    WrittenAnswer,
    event_of,
    finish_reason,
    logarithm,
    timings_of,
    usage_of,
    warnings_of,
)
from engine.api.wire.api_request import MAX_CHOICES, Profile, keep_alive_seconds
from engine.api.wire.errors import ApiError, invalid
from engine.api.wire.openai_chat import SamplingFields, StreamOptions, decode
from engine.chat.presets import chat_sampling
from engine.planning.settings.sampling_table import MAX_SEED
from engine.runtime.protocol.messages import TokenChoice
from engine.runtime.protocol.requests import Generate, Tokenise
from engine.runtime.session.events import Done, Reading

MAX_ANSWERS = 64
"""Largest number of answers to one request: number of prompts times `n`."""
MAX_LOGPROBS = 20
DEFAULT_MAX_TOKENS = 16
"""Default limit for the tokens of an answer, as in OpenAI's API.

Without a chat template most models would never end.
"""

Prompt = str | tuple[int, ...]


class CompletionRequest(SamplingFields, kw_only=True):
    """The body of a `/v1/completions` request. Fields that are not listed are ignored."""

    prompt: str | list[Any]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = None
    keep_alive: str | float | None = None

    @property
    def keep_alive_s(self) -> float | None:
        return keep_alive_seconds(self.keep_alive)

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """The prompts, each as text or as tokens."""
        return prompts_of(self.prompt, "prompt")

    @property
    def count(self) -> int:
        """Number of answers to each prompt."""
        return 1 if self.n is None else self.n


def prompts_of(value: str | list[Any], param: str) -> tuple[Prompt, ...]:
    """Return the prompts of a request field: a text, a list of tokens, or a list of texts or of lists of tokens.

    `param`: name of the field, for the error.

    Raises:
        ApiError: the value has none of these forms.
    """
    if isinstance(value, str):
        return (value,)
    if value and all(_is_token(each) for each in value):
        return (tuple(value),)
    found: list[Prompt] = []
    for each in value:
        if isinstance(each, str):
            found.append(each)
        elif isinstance(each, list) and each and all(_is_token(token) for token in each):
            found.append(tuple(each))
        else:
            raise invalid(f"{param} must be a text, a list of tokens, or a list of either.", param)
    if not found:
        raise invalid(f"{param} is empty.", param)
    return tuple(found)


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def read_completion(body: bytes) -> CompletionRequest:
    """Parse and check the body of a `/v1/completions` request.

    Raises:
        ApiError: the request is invalid or not supported.
    """
    request = decode(body, CompletionRequest)
    if request.suffix:
        raise invalid("suffix is not supported; leave it out.", "suffix")
    if request.best_of not in (None, 1, request.n):
        raise invalid("best_of is not supported; use n.", "best_of")
    if not 1 <= request.count <= MAX_CHOICES:
        raise invalid(f"n is {request.count}; use 1 to {MAX_CHOICES}.", "n")
    if len(request.prompts) * request.count > MAX_ANSWERS:
        raise invalid(f"The request asks for more than {MAX_ANSWERS} answers.", "prompt")
    if not 0 <= (request.logprobs or 0) <= MAX_LOGPROBS:
        raise invalid(f"logprobs is {request.logprobs}; use 0 to {MAX_LOGPROBS}.", "logprobs")
    request.settings()
    keep_alive_seconds(request.keep_alive)
    return request


def completion_requests(request: CompletionRequest, texts: Sequence[str], profile: Profile) -> list[Generate]:
    """Return an engine request for each answer. Requests for the same prompt are neighbours in the list.

    `texts`: the prompts as text.
    """
    limit = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    alternatives = None if request.logprobs is None else max(1, request.logprobs)
    settings = request.settings(max_tokens=limit if limit >= 0 else None, alternatives=alternatives)
    asked = []
    for text in texts:
        for number in range(request.count):
            own = dict(settings)
            seed = own.get("seed")
            if isinstance(seed, int):
                own["seed"] = (seed + number) % (MAX_SEED + 1)
            asked.append(Generate(prompt=text, sampling=chat_sampling(profile.file, None, own).settings))
    return asked


def counting_requests(asked: Sequence[Generate]) -> list[Tokenise]:
    """For each request in `asked`, return a request that counts the tokens of its prompt."""
    return [Tokenise(text=each.prompt) for each in asked]


class CompletionWriter:
    """The `AnswerWriter` of `/v1/completions`: makes JSON documents and server-sent events."""

    def __init__(self, id: str, model: str, created: int, request: CompletionRequest, texts: Sequence[str]) -> None:
        self._head = {"id": f"cmpl-{id}", "object": "text_completion", "created": created, "model": model}
        self._request, self._texts = request, texts
        self._offsets: dict[int, int] = {}

    def whole(self, answers: Sequence[WrittenAnswer]) -> dict[str, object]:
        choices = [
            {
                **self._choice(index, self._echo(index) + each.content, each.choices),
                "finish_reason": finish_reason(each.done, has_calls=False),
            }
            for index, each in enumerate(answers)
        ]
        done = [each.done for each in answers if each.done is not None]
        return {
            **self._head,
            "choices": choices,
            "usage": self._usage(done),
            "timings": timings_of(done[-1]),
            **warnings_of(done),
        }

    def begin(self, index: int, prompt: Reading | None) -> bytes:
        echo = self._echo(index)
        return self._chunk(index, echo) if echo else b""

    def part(self, index: int, part: AnswerDelta) -> bytes:
        return self._chunk(index, part.content, part.choices)

    def end(self, index: int, done: Done, *, has_calls: bool) -> bytes:
        choice = {**self._choice(index, "", ()), "finish_reason": finish_reason(done, has_calls=has_calls)}
        return event_of({**self._head, "choices": [choice], "timings": timings_of(done), **warnings_of([done])})

    def close(self, done: Sequence[Done]) -> bytes:
        options = self._request.stream_options
        if options is None or not options.include_usage:
            return DONE
        return event_of({**self._head, "choices": [], "usage": self._usage(done)}) + DONE

    def fail(self, error: ApiError) -> bytes:
        return event_of(error.document())

    def _usage(self, done: Sequence[Done]) -> dict[str, object]:
        """Return OpenAI's `usage` of all answers. The tokens of each prompt count once."""
        usage = usage_of(done)
        # Answers to one prompt are side by side.
        prompt = sum(each.prompt_tokens for each in done[:: self._request.count])
        completion = sum(each.generated_tokens for each in done)
        return {**usage, "prompt_tokens": prompt, "total_tokens": prompt + completion}

    def _echo(self, index: int) -> str:
        return self._texts[index // self._request.count] if self._request.echo else ""

    def _chunk(self, index: int, text: str, choices: Sequence[TokenChoice] = ()) -> bytes:
        return event_of({**self._head, "choices": [self._choice(index, text, choices)]})

    def _choice(self, index: int, text: str, choices: Sequence[TokenChoice]) -> dict[str, object]:
        logprobs = None if self._request.logprobs is None else self._logprobs(index, choices)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, index: int, choices: Sequence[TokenChoice]) -> dict[str, object]:
        offsets = []
        for each in choices:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(each.text)
        most = self._request.logprobs or 0
        return {
            "tokens": [each.text for each in choices],
            "token_logprobs": [logarithm(each.probability) for each in choices],
            "top_logprobs": [
                {text: logarithm(probability) for text, probability in each.likeliest[:most]} for each in choices
            ],
            "text_offset": offsets,
        }
