"""The parts of a model's answer (thought, text, tool calls), token counts of answers, and the events of a stream."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec
from msgspec import Struct, field

from engine.api.wire.api_request import ApiRequest, Profile, call_reader
from engine.api.wire.errors import ApiError
from engine.chat.thinking import Delta, Splitter
from engine.chat.tool_calls import CallDelta
from engine.runtime.protocol.messages import DraftStatistics, TokenChoice
from engine.runtime.session.events import Done, Reading, Token

NO_CHANCE = -9999.0
"""Log-probability of a token whose probability is 0; OpenAI uses the same number."""
PING = b": ping\n\n"
"""A comment in a stream of server-sent events, which keeps proxies from closing it while a long prompt is processed."""
DONE = b"data: [DONE]\n\n"
CUT = ("length", "context_full", "repetition")
"""Stop reasons of answers that are not complete."""
REPEATED = (
    "The answer was stopped because it kept repeating itself. Send a repeat penalty (`repeat_penalty`: 1.1) or a "
    "higher temperature."
)
_encoder = msgspec.json.Encoder()


def event_of(document: object, name: str = "") -> bytes:
    """Return a server-sent event. `name`: event type, which Anthropic's and the Responses API need; empty: none."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + _encoder.encode(document) + b"\n\n"


class AnswerDelta(Struct, frozen=True):
    """New thought, text and tool calls of an answer, from one token or a few.

    `choices`: the chosen tokens with their probabilities; empty unless the client asks for them.
    """

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallDelta, ...] = ()
    choices: tuple[TokenChoice, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls or self.choices)


class Reader(Protocol):
    """Protocol of readers: they divide the text of one answer, token by token, into thought, text and tool calls
    (`AnswerDelta`).
    """

    @property
    def has_calls(self) -> bool: ...

    def add(self, token: Token) -> AnswerDelta: ...

    def end(self) -> AnswerDelta: ...


class PlainReader:
    """A reader that returns text unchanged, without a search for thoughts or tool calls."""

    has_calls = False

    def add(self, token: Token) -> AnswerDelta:
        """Return the token's text as a part."""
        return AnswerDelta(content=token.text, choices=token.choices)

    def end(self) -> AnswerDelta:
        """Return an empty part, because this reader never holds text back."""
        return AnswerDelta()


class AnswerReader:
    """Splits the streamed text of one chat answer into thought, text and tool calls."""

    def __init__(self, api_request: ApiRequest, profile: Profile) -> None:
        self._splitter = Splitter()
        self._calls = call_reader(api_request, profile) if api_request.uses_tools else None

    @property
    def has_calls(self) -> bool:
        """Whether the model has called a tool."""
        return self._calls is not None and self._calls.has_calls

    def add(self, token: Token) -> AnswerDelta:
        """Return the text and calls that the next token adds. Text that may be the beginning of a tag is held back."""
        delta = self._splitter.add(token.text)
        # Probabilities are those of the answer; OpenAI has none for thoughts.
        return self._part(delta, () if self._splitter.is_thinking else token.choices)

    def end(self) -> AnswerDelta:
        """Return the text that is still held back. Call it at the end of the answer."""
        part = self._part(self._splitter.rest(), ())
        if self._calls is None:
            return part
        found = self._calls.end()
        return AnswerDelta(part.reasoning, part.content + found.content, (*part.calls, *found.calls))

    def _part(self, delta: Delta, choices: tuple[TokenChoice, ...]) -> AnswerDelta:
        if self._calls is None or not delta.content:
            return AnswerDelta(delta.reasoning, delta.content, (), choices)
        found = self._calls.add(delta.content)
        return AnswerDelta(delta.reasoning, found.content, found.calls, choices)


class Call(Struct):
    """A complete tool call. `arguments`: a JSON object as text."""

    id: str
    name: str
    arguments: str = ""


class WrittenAnswer(Struct):
    """One answer: the text and calls that the model has written so far. `done`: the engine's final report; None until
    the end.
    """

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)
    choices: list[TokenChoice] = field(default_factory=list)
    done: Done | None = None

    def add(self, part: AnswerDelta) -> None:
        """Append the next part to the answer."""
        self.reasoning += part.reasoning
        self.content += part.content
        self.choices += part.choices
        for call in part.calls:
            # Only the first delta of a call has its name.
            if call.name:
                self.calls.append(Call(call.id, call.name))
            if self.calls:
                self.calls[-1].arguments += call.arguments

    @property
    def finish_reason(self) -> str:
        """Why the answer ended, as OpenAI's `finish_reason`."""
        return finish_reason(self.done, has_calls=bool(self.calls))


class AnswerWriter(Protocol):
    """Protocol of writers: they make the JSON of one API from the answers to one HTTP request.

    Without streaming only `whole` is called. A stream calls `begin`, `part` several times and `end` for each answer,
    then `close`; or `fail` at any point. The argument `index` is the number of the answer, from 0.
    """

    def whole(self, answers: Sequence[WrittenAnswer]) -> dict[str, object]:
        """Return the JSON document of all answers, for a request without streaming."""

    def begin(self, index: int, prompt: Reading | None) -> bytes:
        """Return the first events of an answer. `prompt`: progress of computing the prompt; None: unknown."""

    def part(self, index: int, part: AnswerDelta) -> bytes: ...

    def end(self, index: int, done: Done, *, has_calls: bool) -> bytes: ...

    def close(self, done: Sequence[Done]) -> bytes: ...

    def fail(self, error: ApiError) -> bytes: ...


def finish_reason(done: Done | None, *, has_calls: bool) -> str:
    """Return why an answer ended, as OpenAI's `finish_reason`."""
    if done is not None and done.stop_reason in CUT:
        return "length"
    return "tool_calls" if has_calls else "stop"


def usage_of(answers: Sequence[Done]) -> dict[str, object]:
    """Return OpenAI's `usage` (token counts) of the answers to one request, which share one prompt."""
    prompt = answers[0].prompt_tokens if answers else 0
    completion = sum(each.generated_tokens for each in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": answers[0].cached_tokens if answers else 0},
    }


def warnings_of(answers: Sequence[Done]) -> dict[str, list[str]]:
    """Return the field `warnings` of a JSON answer.

    It says that a chat template was replaced, or that an answer was stopped because it repeated itself without end.
    The result is empty if there is no warning.
    """
    warnings = list(dict.fromkeys(done.replaced for done in answers if done.replaced))
    warnings += [REPEATED] if any(done.stop_reason == "repetition" for done in answers) else []
    return {"warnings": warnings} if warnings else {}


def timings_of(done: Done) -> dict[str, object]:
    """Return llama.cpp's `timings` of an answer, in tokens and milliseconds."""
    read = done.prompt_tokens - done.cached_tokens
    return {
        "cache_n": done.cached_tokens,
        "prompt_n": read,
        "prompt_ms": _milliseconds(read, done.prompt_tokens_per_second),
        "prompt_per_second": done.prompt_tokens_per_second,
        "predicted_n": done.generated_tokens,
        "predicted_ms": _milliseconds(done.generated_tokens, done.generation_tokens_per_second),
        "predicted_per_second": done.generation_tokens_per_second,
        **_draft_counts(done.draft),
    }


def _draft_counts(draft: DraftStatistics | None) -> dict[str, object]:
    # llama-server has both fields only if tokens were drafted.
    if draft is None or not draft.drafted_tokens:
        return {}
    return {"draft_n": draft.drafted_tokens, "draft_n_accepted": draft.accepted_tokens}


def _milliseconds(tokens: int, per_second: float) -> float:
    return 1000 * tokens / per_second if per_second else 0.0


def logprobs_of(choices: Iterable[TokenChoice], count: int) -> list[dict[str, object]]:
    """Return OpenAI's `logprobs` entries of tokens, each with the `count` most probable tokens."""
    return [
        {
            **_entry(choice.text, choice.probability),
            "top_logprobs": [_entry(text, probability) for text, probability in choice.likeliest[:count]],
        }
        for choice in choices
    ]


def _entry(text: str, probability: float) -> dict[str, object]:
    return {"token": text, "logprob": logarithm(probability), "bytes": list(text.encode(errors="replace"))}


def logarithm(probability: float) -> float:
    """Return the natural logarithm of a probability; `NO_CHANCE` if the probability is 0."""
    return math.log(probability) if probability > 0 else NO_CHANCE
