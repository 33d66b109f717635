"""Anthropic's API: translates between the JSON of `/v1/messages` and `/v1/messages/count_tokens` and engine
requests.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from engine.api.wire.answer import CUT, AnswerDelta, WrittenAnswer, event_of, warnings_of
from engine.api.wire.api_request import (
    AUTO,
    NONE,
    REQUIRED,
    ApiRequest,
    check_api_request,
    check_tool,
    checked_settings,
    keep_alive_seconds,
)
from engine.api.wire.errors import ApiError, invalid
from engine.api.wire.media import check_files, image_of_base64, image_of_url
from engine.api.wire.openai_chat import decode
from engine.api.wire.segments import Segment, Segments, Step, segments_of
from engine.runtime.protocol.requests import ChatMessage, MediaFile, ToolCall
from engine.runtime.session.events import Done, Reading


class ImageSource(Struct):
    """The source of an image block. Only base64 data and data URLs are accepted."""

    type: str
    data: str | None = None
    url: str | None = None


class Block(Struct):
    """A content block of a message; `type` decides which other fields are used."""

    type: str
    text: str | None = None
    source: ImageSource | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Any = None
    thinking: str | None = None


class MessageIn(Struct):
    """A message of a `/v1/messages` request."""

    role: str
    content: str | list[Block]


class ToolIn(Struct):
    """The definition of a tool. A tool without `input_schema` runs on Anthropic's servers, and is refused."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None


class ToolChoice(Struct):
    """Whether the model must call a tool, and which tool."""

    type: str
    name: str | None = None


class Thinking(Struct):
    """Whether the model thinks before it answers. Anthropic's token budget for the thought is ignored."""

    type: str


class MessagesRequest(Struct, kw_only=True):
    """The body of a `/v1/messages` request. Fields that are not listed are ignored."""

    messages: list[MessageIn]
    model: str | None = None
    max_tokens: int | None = None
    system: str | list[Block] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[ToolIn] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    keep_alive: str | float | None = None


def read_messages(body: bytes) -> ApiRequest:
    """Return the body of a `/v1/messages` request as an `ApiRequest`.

    Images are decoded in a child process, which takes a moment.

    Raises:
        ApiError: the request is invalid or not supported.
    """
    request = decode(body, MessagesRequest)
    settings = checked_settings(
        {
            "max_tokens": request.max_tokens,
            "stop": [text for text in request.stop_sequences if text] if request.stop_sequences else None,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
        }
    )
    check_files(sum(map(_images, request.messages)))
    system = _system(request.system)
    messages = [message for index, each in enumerate(request.messages) for message in _messages(each, index)]
    thinks = None if request.thinking is None else request.thinking.type != "disabled"
    if not request.messages:
        raise invalid("messages is empty; send at least one.", "messages")
    return check_api_request(
        ApiRequest(
            model=request.model or "",
            messages=(*((ChatMessage("system", system),) if system else ()), *messages),
            tools=tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools or ())),
            choice=_choice(request.tool_choice),
            settings=settings,
            values={} if thinks is None else {"enable_thinking": thinks},
            streams=bool(request.stream),
            keep_alive_s=keep_alive_seconds(request.keep_alive),
        )
    )


def _system(system: str | list[Block] | None) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    return "\n\n".join(block.text or "" for block in system)


def _tool(tool: ToolIn, param: str) -> dict[str, Any]:
    if tool.input_schema is None:
        raise invalid(f"{param} has no input_schema; tools of Anthropic's servers do not run here.", param)
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return check_tool({"type": "function", "function": function}, param)


def _choice(choice: ToolChoice | None) -> str:
    if choice is None:
        return AUTO
    match choice.type:
        case "auto":
            return AUTO
        case "any":
            return REQUIRED
        case "none":
            return NONE
        case "tool" if choice.name:
            return choice.name
    raise invalid('tool_choice.type must be "auto", "any", "none", or "tool" with a name.', "tool_choice")


def _images(message: MessageIn) -> int:
    """Return the number of images in a message, including those in tool results."""
    blocks = message.content if isinstance(message.content, list) else []
    results = [part for block in blocks if isinstance(block.content, list) for part in block.content]
    in_results = sum(isinstance(part, dict) and part.get("source") is not None for part in results)
    return sum(block.source is not None for block in blocks) + in_results


def _messages(message: MessageIn, number: int) -> list[ChatMessage]:
    """Return a message as messages for the chat template, where each tool result is a message of the role `tool`.

    `number`: index of the message in the request, for errors.
    """
    param = f"messages[{number}]"
    if message.role not in ("user", "assistant", "system"):
        raise invalid(f"{param}.role is {message.role[:40]}; use user or assistant.", f"{param}.role")
    if isinstance(message.content, str):
        return [ChatMessage(message.role, message.content)]  # type: ignore[arg-type]
    found: list[ChatMessage] = []
    texts: list[str] = []
    media: list[MediaFile] = []
    calls: list[ToolCall] = []
    thoughts: list[str] = []
    for at, block in enumerate(message.content):
        where = f"{param}.content[{at}]"
        match block.type:
            case "text":
                texts.append(block.text or "")
            case "image" if block.source is not None:
                media.append(_image(block.source, where))
            case "tool_use" if block.name:
                arguments = json.dumps(block.input or {}, ensure_ascii=False)
                calls.append(ToolCall(block.id or "", block.name, arguments))
            case "tool_result":
                text, images = _result(block.content, where)
                # Messages of the role `tool` are text only; images of the result go to the user's message after it.
                found.append(ChatMessage("tool", text, call_id=block.tool_use_id or ""))
                media += images
            case "thinking":
                thoughts.append(block.thinking or "")
            # Encrypted by Anthropic, so no other model can use it.
            case "redacted_thinking":
                continue
            case _:
                raise _unsupported(block, where)
    if texts or media or calls or not found:
        found.append(
            ChatMessage(
                message.role,  # type: ignore[arg-type]
                "\n".join(texts),
                tuple(media),
                reasoning="\n".join(thoughts) if message.role == "assistant" else "",
                calls=tuple(calls) if message.role == "assistant" else (),
            )
        )
    return found


def _image(source: ImageSource, param: str) -> MediaFile:
    if source.type == "base64" and source.data is not None:
        return image_of_base64(source.data, param)
    return image_of_url(source.url or "", param)


def _result(content: object, param: str) -> tuple[str, list[MediaFile]]:
    if content is None or isinstance(content, str):
        return content or "", []
    try:
        blocks = msgspec.convert(content, list[Block])
    except msgspec.ValidationError as error:
        raise invalid(f"{param}.content: {error}.", param) from None
    texts: list[str] = []
    images: list[MediaFile] = []
    for at, block in enumerate(blocks):
        match block.type:
            case "text":
                texts.append(block.text or "")
            case "image" if block.source is not None:
                images.append(_image(block.source, param))
            case _:
                raise _unsupported(block, f"{param}.content[{at}]")
    return "\n".join(texts), images


def _unsupported(block: Block, param: str) -> ApiError:
    return invalid(f"{param} is of type {block.type[:40]}, which is not supported.", param)


# ------------------------------------------------------------------ answers


def stop_reason(done: Done | None, *, has_calls: bool) -> str:
    """Return why an answer ended, as Anthropic's `stop_reason`."""
    if done is not None and done.stop_reason in CUT:
        return "max_tokens"
    if has_calls:
        return "tool_use"
    return "stop_sequence" if done is not None and done.stop_text else "end_turn"


def _stop_sequence(done: Done | None) -> str | None:
    return None if done is None else done.stop_text or None


def _usage(known: Done | Reading | None) -> dict[str, int]:
    cached = 0 if known is None else known.cached_tokens
    # In Anthropic's usage the input tokens do not include those that were read from the cache.
    return {
        "input_tokens": 0 if known is None else known.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": known.generated_tokens if isinstance(known, Done) else 0,
    }


class MessageWriter:
    """The `AnswerWriter` of `/v1/messages`: makes JSON documents and server-sent events. A request has one answer."""

    def __init__(self, id: str, model: str) -> None:
        self._head = {"id": f"msg_{id}", "type": "message", "role": "assistant", "model": model}
        self._segments = Segments()

    def whole(self, answers: Sequence[WrittenAnswer]) -> dict[str, object]:
        (answer,) = answers
        return {
            **self._head,
            "content": [_block(each, whole=True) for each in segments_of(answer)],
            "stop_reason": stop_reason(answer.done, has_calls=bool(answer.calls)),
            "stop_sequence": _stop_sequence(answer.done),
            "usage": _usage(answer.done),
            **warnings_of([] if answer.done is None else [answer.done]),
        }

    def begin(self, index: int, prompt: Reading | None) -> bytes:
        message: dict[str, object] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(prompt),
        }
        return _event("message_start", message=message)

    def part(self, index: int, part: AnswerDelta) -> bytes:
        return b"".join(map(_written, self._segments.take(part)))

    def end(self, index: int, done: Done, *, has_calls: bool) -> bytes:
        delta = {"stop_reason": stop_reason(done, has_calls=has_calls), "stop_sequence": _stop_sequence(done)}
        ends = b"".join(map(_written, self._segments.end()))
        return ends + _event("message_delta", delta=delta, usage=_usage(done), **warnings_of([done]))

    def close(self, done: Sequence[Done]) -> bytes:
        return _event("message_stop")

    def fail(self, error: ApiError) -> bytes:
        return event_of(error.anthropic_document(), "error")


def _event(name: str, **fields: object) -> bytes:
    return event_of({"type": name, **fields}, name)


def _block(segment: Segment, *, whole: bool) -> dict[str, object]:
    text = segment.text if whole else ""
    match segment.kind:
        case "reasoning":
            return {"type": "thinking", "thinking": text, "signature": ""}
        case "content":
            return {"type": "text", "text": text}
    return {"type": "tool_use", "id": segment.id, "name": segment.name, "input": _object(text)}


def _object(arguments: str) -> object:
    """Return the arguments of a call as an object for Anthropic's `input`; an empty object if they are incomplete."""
    try:
        found = json.loads(arguments) if arguments else {}
    except (ValueError, RecursionError):
        found = {}
    return found if isinstance(found, dict) else {}


def _written(step: Step) -> bytes:
    segment = step.segment
    match step.verb:
        case "begin":
            block = _block(segment, whole=False)
            return _event("content_block_start", index=segment.number, content_block=block)
        case "end":
            end = _event("content_block_stop", index=segment.number)
            if segment.kind != "reasoning":
                return end
            # Clients keep it with the thought and send it back; nothing here signs one.
            signature = {"type": "signature_delta", "signature": ""}
            return _event("content_block_delta", index=segment.number, delta=signature) + end
    delta = {
        "reasoning": {"type": "thinking_delta", "thinking": step.text},
        "content": {"type": "text_delta", "text": step.text},
        "call": {"type": "input_json_delta", "partial_json": step.text},
    }[segment.kind]
    return _event("content_block_delta", index=segment.number, delta=delta)
