"""`/v1/chat/completions`: translates OpenAI's JSON to an `ApiRequest`, and answers to OpenAI's JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from engine.api.wire.answer import (
    DONE,
    AnswerDelta,
    WrittenAnswer,
    event_of,
    finish_reason,
    logprobs_of,
    timings_of,
    usage_of,
    warnings_of,
)
from engine.api.wire.api_request import (
    AUTO,
    NONE,
    REQUIRED,
    ApiRequest,
    check_api_request,
    check_tool,
    checked_schema,
    checked_settings,
    keep_alive_seconds,
)
from engine.api.wire.errors import ApiError, invalid
from engine.api.wire.media import check_files, image_of_url, sound_of_base64
from engine.planning.settings.sampling_table import MAX_SEED, SAMPLING_KEYS
from engine.runtime.protocol.requests import ChatMessage, ImageFile, MediaFile, SoundFile, ToolCall
from engine.runtime.session.events import Done, Reading

MAX_TOP_LOGPROBS = 20
Kind = TypeVar("Kind", bound=Struct)


class ImageUrl(Struct):
    """The image of a content part. OpenAI's `detail` is ignored."""

    url: str


class InputAudio(Struct):
    """The sound of a content part. `data`: the file in base64."""

    data: str


class ContentPart(Struct):
    """A content part of a message; `type` decides which other fields are used."""

    type: str
    text: str | None = None
    image_url: ImageUrl | str | None = None
    input_audio: InputAudio | None = None
    refusal: str | None = None


class FunctionOfCall(Struct):
    """The function of a tool call. Some clients send `arguments` as an object instead of text."""

    name: str
    arguments: str | dict[str, Any] | None = None


class CallOfMessage(Struct):
    """A tool call in an earlier message of the assistant."""

    function: FunctionOfCall
    id: str | None = None


class MessageIn(Struct):
    """A message of a `/v1/chat/completions` request."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[CallOfMessage] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class StreamOptions(Struct):
    """Options of a stream. `include_usage`: whether the last chunk has the token counts."""

    include_usage: bool | None = None


class JsonSchema(Struct):
    """The JSON schema of a `response_format`. OpenAI's `strict` is ignored, because answers always match the schema."""

    schema: dict[str, Any] | None = None


class ResponseFormat(Struct):
    """The required form of the answer.

    `type`: `text`, `json_object` or `json_schema`.
    `json_schema`: the JSON schema in OpenAI's form.
    `schema`: the JSON schema in the form of llama.cpp's clients.
    """

    type: str
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None


class SamplingFields(Struct, kw_only=True):
    """The sampling fields that several requests share, with the names of OpenAI's and llama.cpp's APIs."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = None
    penalty_last_n: int | None = msgspec.field(default=None, name="repeat_last_n")
    typ_p: float | None = msgspec.field(default=None, name="typical_p")
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    repetition: str | None = None
    grammar: str | None = None
    logit_bias: dict[str, Any] | list[Any] | None = None

    def settings(self, **further: object) -> dict[str, object]:
        """Return the sampling settings that the request sets, and the settings in `further`.

        `further`: more settings, by the names of `SamplingSettings`; they override those of the request.

        Raises:
            ApiError: a value is out of range or not supported.
        """
        if self.logit_bias:
            raise invalid("logit_bias is not supported; leave it out.", "logit_bias")
        values = {key: getattr(self, key, None) for key in SAMPLING_KEYS if key not in ("alternatives", "json_schema")}
        if self.max_tokens is not None and self.max_tokens < 0:
            values["max_tokens"] = None  # llama.cpp's word for no limit
        if isinstance(self.stop, str):
            values["stop"] = [self.stop]
        if isinstance(values["stop"], list):
            # An empty text ends nothing; some clients send one for "none".
            values["stop"] = [text for text in values["stop"] if text]
        if self.seed is not None:
            values["seed"] = seed_of(self.seed)
        return checked_settings({**values, **further})


def seed_of(seed: int) -> int | None:
    """Translate a request's seed to the engine's. llama.cpp's clients send -1 or 4294967295 for a random seed: None."""
    return None if seed < 0 or seed == MAX_SEED + 1 else seed % (MAX_SEED + 1)


class ChatRequest(SamplingFields, kw_only=True):
    """The body of a `/v1/chat/completions` request. Fields that are not listed are ignored."""

    messages: list[MessageIn]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    json_schema: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    keep_alive: str | float | None = None
    functions: list[Any] | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None


def decode(body: bytes, kind: type[Kind]) -> Kind:
    """Return the JSON body of a request as a value of type `kind`.

    Raises:
        ApiError: the body is not JSON, or a value has a wrong type.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    # A subclass of `DecodeError`, so it comes first.
    except msgspec.ValidationError as error:
        raise invalid(f"{error}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"The body is not JSON: {error}.") from None
    except RecursionError:
        raise invalid("The body is nested too deeply.") from None


def read_chat(body: bytes) -> ApiRequest:
    """Return the body of a `/v1/chat/completions` request as an `ApiRequest`.

    Images and sounds are decoded in a child process, which takes a moment.

    Raises:
        ApiError: the request is invalid or not supported.
    """
    request = decode(body, ChatRequest)
    if request.functions:
        raise invalid("functions is deprecated; send tools.", "functions")
    if request.audio or "audio" in (request.modalities or ()):
        raise invalid("Answers are text; leave audio and modalities out.", "modalities")
    limit = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    has_logprobs = bool(request.logprobs)
    n_alternatives = request.top_logprobs or 0
    if n_alternatives and not has_logprobs:
        raise invalid("top_logprobs needs logprobs: true.", "top_logprobs")
    if not 0 <= n_alternatives <= MAX_TOP_LOGPROBS:
        raise invalid(f"top_logprobs is {n_alternatives}; use 0 to {MAX_TOP_LOGPROBS}.", "top_logprobs")
    tools = tuple(check_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools or ()))
    parts = (part for each in request.messages if isinstance(each.content, list) for part in each.content)
    check_files(sum(part.image_url is not None or part.input_audio is not None for part in parts))
    options = request.stream_options
    return check_api_request(
        ApiRequest(
            model=request.model or "",
            messages=tuple(_message(each, index) for index, each in enumerate(request.messages)),
            tools=tools,
            choice=choice_of(request.tool_choice),
            settings=request.settings(
                # llama.cpp's clients send -1 for no limit.
                max_tokens=limit if limit is None or limit >= 0 else None,
                # The engine returns the probability of the chosen token only together with an alternative.
                alternatives=max(1, n_alternatives) if has_logprobs else None,
            ),
            schema=_schema(request.response_format, request.json_schema),
            values={**effort_values(request.reasoning_effort), **(request.chat_template_kwargs or {})},
            n=1 if request.n is None else request.n,
            streams=bool(request.stream),
            includes_usage=bool(options and options.include_usage),
            top_logprobs=n_alternatives if has_logprobs else None,
            keep_alive_s=keep_alive_seconds(request.keep_alive),
        )
    )


def effort_values(effort: object) -> dict[str, object]:
    """Return the chat template's variables for a reasoning effort. `effort` is None if the request sets none."""
    if effort is None:
        return {}
    return {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}


def choice_of(choice: str | dict[str, Any] | None) -> str:
    """Return the choice of tools: `AUTO`, `NONE`, `REQUIRED`, or the name of a function.

    In the chat API the name is in the object `function`; in the Responses API it is one level higher.

    Raises:
        ApiError: the value has another form, or names no function.
    """
    if choice is None:
        return AUTO
    if isinstance(choice, str):
        if choice not in (AUTO, NONE, REQUIRED):
            raise invalid('tool_choice must be "auto", "none", "required", or name a function.', "tool_choice")
        return choice
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else choice.get("name")
    if not isinstance(name, str) or not name:
        raise invalid("tool_choice names no function.", "tool_choice")
    return name


def _schema(wanted: ResponseFormat | None, of_llama: dict[str, Any] | None) -> str:
    if of_llama is not None and (wanted is None or wanted.type == "text"):
        return checked_schema(of_llama, "json_schema")
    if wanted is None or wanted.type == "text":
        return ""
    param = "response_format"
    if wanted.type == "json_object":
        return checked_schema(wanted.schema or {"type": "object"}, param)
    if wanted.type == "json_schema":
        schema = wanted.schema if wanted.json_schema is None else wanted.json_schema.schema
        return checked_schema(schema, f"{param}.json_schema.schema")
    raise invalid('response_format.type must be "text", "json_object" or "json_schema".', param)


_ROLES: Mapping[str, Any] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


def _message(message: MessageIn, number: int) -> ChatMessage:
    param = f"messages[{number}]"
    role = _ROLES.get(message.role)
    if role is None:
        raise invalid(f"{param}.role is {message.role[:40]}; use {', '.join(_ROLES)}.", f"{param}.role")
    content, media = _content(message.content, param)
    if message.tool_call_id is None and role == "tool":
        raise invalid(f"{param} is a tool result without a tool_call_id.", param)
    if content is None and not message.tool_calls and role != "assistant":
        raise invalid(f"{param} has no content.", param)
    return ChatMessage(
        role,
        content or "",
        media,
        reasoning=message.reasoning_content or "",
        calls=tuple(_call(call) for call in message.tool_calls or ()) if role == "assistant" else (),
        call_id=message.tool_call_id or "" if role == "tool" else "",
        name=message.name or "",
    )


def _call(call: CallOfMessage) -> ToolCall:
    arguments = call.function.arguments
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return ToolCall(call.id or "", call.function.name, text or "{}")


def _content(content: str | list[ContentPart] | None, param: str) -> tuple[str | None, tuple[MediaFile, ...]]:
    if content is None or isinstance(content, str):
        return content, ()
    texts: list[str] = []
    media: list[MediaFile] = []
    for number, part in enumerate(content):
        at = f"{param}.content[{number}]"
        match part.type:
            case "text" | "input_text" | "output_text" if part.text is not None:
                texts.append(part.text)
            case "refusal":
                texts.append(part.refusal or "")
            case "image_url" | "input_image" if part.image_url is not None:
                media.append(_image(part.image_url, at))
            case "input_audio" if part.input_audio is not None:
                media.append(_sound(part.input_audio, at))
            case _:
                raise invalid(f"{at} is of type {part.type[:40]}; use text, image_url or input_audio.", at)
    return "\n".join(texts), tuple(media)


def _image(image: ImageUrl | str, param: str) -> ImageFile:
    return image_of_url(image if isinstance(image, str) else image.url, param)


def _sound(sound: InputAudio, param: str) -> SoundFile:
    return sound_of_base64(sound.data, param)


# ------------------------------------------------------------------ answers


class ChatWriter:
    """The `AnswerWriter` of `/v1/chat/completions`: makes JSON documents and server-sent events.

    `id`, `created` (seconds since 1970): values in each document of the answer.
    """

    def __init__(self, id: str, model: str, created: int, api_request: ApiRequest) -> None:
        self._head = {"id": f"chatcmpl-{id}", "created": created, "model": model}
        self._question = api_request

    def whole(self, answers: Sequence[WrittenAnswer]) -> dict[str, object]:
        """Return the JSON document of all answers, for a request without streaming."""
        done = [each.done for each in answers if each.done is not None]
        choices = [
            {
                "index": index,
                "message": _message_out(each),
                "logprobs": self._logprobs(each.choices) if self._question.top_logprobs is not None else None,
                "finish_reason": each.finish_reason,
            }
            for index, each in enumerate(answers)
        ]
        return {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            "usage": usage_of(done),
            "timings": timings_of(done[-1]) if done else None,
            **warnings_of(done),
        }

    def begin(self, index: int, prompt: Reading | None) -> bytes:
        """Return the first chunk of a choice, which contains the role of the message."""
        return event_of(self._chunk(index, {"role": "assistant", "content": None}))

    def part(self, index: int, part: AnswerDelta) -> bytes:
        """Return the chunks for the text and tool calls of a part."""
        deltas: list[dict[str, object]] = []
        if part.reasoning:
            deltas.append({"reasoning_content": part.reasoning})
        if part.content or part.choices:
            deltas.append({"content": part.content})
        for call in part.calls:
            function = {"name": call.name, "arguments": call.arguments} if call.name else {"arguments": call.arguments}
            first = {"id": call.id, "type": "function"} if call.name else {}
            deltas.append({"tool_calls": [{"index": call.index, **first, "function": function}]})
        return b"".join(event_of(self._chunk(index, delta, part)) for delta in deltas)

    def end(self, index: int, done: Done, *, has_calls: bool) -> bytes:
        """Return the last chunk of the choice with this index, which contains its finish reason and timings."""
        chunk = self._chunk(index, {}, finish=finish_reason(done, has_calls=has_calls))
        return event_of({**chunk, "timings": timings_of(done), **warnings_of([done])})

    def close(self, done: Sequence[Done]) -> bytes:
        """Return the end of the stream. It contains the token counts of all choices if the request asks for them."""
        if not self._question.includes_usage:
            return DONE
        usage = {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage_of(done)}
        usage |= {"timings": timings_of(done[-1])} if done else {}
        return event_of(usage) + DONE

    def fail(self, error: ApiError) -> bytes:
        """Return the end of a stream that fails after its first bytes."""
        return event_of(error.document())

    def _chunk(
        self, index: int, delta: Mapping[str, object], part: AnswerDelta | None = None, finish: str | None = None
    ) -> dict[str, object]:
        choice: dict[str, object] = {"index": index, "delta": delta, "finish_reason": finish}
        if part is not None and part.choices and "content" in delta:
            choice["logprobs"] = self._logprobs(part.choices)
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def _logprobs(self, choices: Sequence[Any]) -> dict[str, object]:
        return {"content": logprobs_of(choices, self._question.top_logprobs or 0)}


def _message_out(answer: WrittenAnswer) -> dict[str, object]:
    message: dict[str, object] = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["content"] = answer.content or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments or "{}"}}
            for call in answer.calls
        ]
    return message
