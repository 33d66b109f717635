"""`/v1/responses`: OpenAI's newer API, which coding agents use. The server stores nothing between two requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

from engine.api.wire.answer import CUT, AnswerDelta, WrittenAnswer, event_of, warnings_of
from engine.api.wire.api_request import (
    AUTO,
    ApiRequest,
    check_api_request,
    check_tool,
    checked_schema,
    checked_settings,
    keep_alive_seconds,
)
from engine.api.wire.errors import ApiError, invalid
from engine.api.wire.media import check_files, image_of_url
from engine.api.wire.openai_chat import choice_of, decode, effort_values
from engine.api.wire.segments import Segment, Segments, Step, segments_of
from engine.base.values import replace
from engine.runtime.protocol.requests import ChatMessage, MediaFile, ToolCall
from engine.runtime.session.events import Done, Reading


class ResponsesRequest(Struct, kw_only=True):
    """The body of a `/v1/responses` request. Fields that are not listed are ignored."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    stream: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    metadata: dict[str, Any] | None = None
    keep_alive: str | float | None = None


def read_responses(body: bytes) -> tuple[ApiRequest, ResponsesRequest]:
    """Return the body of a `/v1/responses` request, both as an `ApiRequest` and as the decoded JSON object.

    Images are decoded in a child process, which takes a moment.

    Raises:
        ApiError: the request is invalid or not supported.
    """
    request = decode(body, ResponsesRequest)
    if request.previous_response_id or request.conversation:
        raise invalid("Responses are not stored: send the whole conversation as input.", "previous_response_id")
    if request.background:
        raise invalid("background is not supported; leave it out.", "background")
    settings = checked_settings(
        {"max_tokens": request.max_output_tokens, "temperature": request.temperature, "top_p": request.top_p}
    )
    messages = [ChatMessage("system", request.instructions)] if request.instructions else []
    if isinstance(request.input, str):
        messages.append(ChatMessage("user", request.input))
    else:
        check_files(sum(map(_images, request.input)))
        messages += _Items().messages(request.input)
        if not request.input:
            raise invalid("input is empty; send at least one item.", "input")
    api_request = ApiRequest(
        model=request.model or "",
        messages=tuple(messages),
        tools=_tools(request.tools or ()),
        choice=choice_of(request.tool_choice),
        settings=settings,
        schema=_schema((request.text or {}).get("format")),
        values=effort_values((request.reasoning or {}).get("effort")),
        streams=bool(request.stream),
        keep_alive_s=keep_alive_seconds(request.keep_alive),
    )
    return check_api_request(api_request), request


def _images(item: dict[str, Any]) -> int:
    parts = item.get("content") or item.get("output")
    if not isinstance(parts, list):
        return 0
    return sum(isinstance(part, dict) and part.get("type") == "input_image" for part in parts)


def _tools(tools: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return the functions among the tools. Tools that run on OpenAI's servers, which agents always send, are left out.

    Agents send the tools of an MCP server in a namespace; these functions get a qualified name.
    """
    found = []
    for index, tool in enumerate(tools):
        if tool.get("type") == "function":
            found.append(check_tool({"type": "function", "function": tool}, f"tools[{index}]"))
    for where, namespace, tool in _namespaced(tools):
        function = {**tool, "name": _qualified(namespace, tool.get("name"))}
        found.append(check_tool({"type": "function", "function": function}, where))
    return tuple(found)


def _namespaced(tools: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """For each function in a namespace, yield its path in the request, the namespace's name, and its definition.

    Raises:
        ApiError: a namespace has no name, or no list of tools.
    """
    for number, tool in enumerate(tools):
        if tool.get("type") != "namespace":
            continue
        name, inner = tool.get("name"), tool.get("tools")
        if not isinstance(name, str) or not name or not isinstance(inner, list):
            raise invalid(f"tools[{number}] is a namespace without a name, or without a list of tools.", "tools")
        for index, each in enumerate(inner):
            if isinstance(each, dict) and each.get("type") == "function":
                yield f"tools[{number}].tools[{index}]", name, each


def _qualified(namespace: object, name: object) -> object:
    """Return the name of a function in the prompt, made from its namespace and name.

    If the namespace or the name is not a text, `name` is returned unchanged; `check_tool` refuses a wrong name.
    """
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace and isinstance(name, str) else name


def _schema(wanted: object) -> str:
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind in (None, "text"):
        return ""
    assert isinstance(wanted, dict)
    if kind == "json_object":
        return '{"type": "object"}'
    if kind == "json_schema":
        return checked_schema(wanted.get("schema"), "text.format.schema")
    raise invalid('text.format.type must be "text", "json_object" or "json_schema".', "text")


class _Items:
    """Builds chat messages from the input items of a `/v1/responses` request.

    A reasoning item becomes part of the assistant's next message. A call item is added to the last message if that is
    the assistant's and no reasoning came after it. Otherwise the call becomes a message of its own.
    """

    def __init__(self) -> None:
        self._found: list[ChatMessage] = []
        self._thoughts: list[str] = []

    def messages(self, items: Sequence[dict[str, Any]]) -> list[ChatMessage]:
        """Return the messages of all input items.

        Raises:
            ApiError: an item cannot be used.
        """
        for number, item in enumerate(items):
            param = f"input[{number}]"
            match item.get("type", "message"):
                case "message":
                    self._message(item, param)
                case "function_call":
                    self._call(item, param)
                case "function_call_output":
                    text, media = _content(item.get("output"), param)
                    self._found.append(ChatMessage("tool", text, media, call_id=str(item.get("call_id") or "")))
                case "reasoning":
                    parts = item.get("content") or item.get("summary") or []
                    if not isinstance(parts, list):
                        raise invalid(f"{param} has no list of parts.", param)
                    self._thoughts += [str(part.get("text", "")) for part in parts if isinstance(part, dict)]
                case other:
                    raise invalid(f"{param} is of type {str(other)[:40]}, which is not supported.", param)
        return self._found

    def _message(self, item: dict[str, Any], param: str) -> None:
        roles = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
        role = roles.get(str(item.get("role")))
        if role is None:
            raise invalid(f"{param}.role must be one of {', '.join(roles)}.", param)
        text, media = _content(item.get("content"), param)
        thoughts = self._taken_thoughts() if role == "assistant" else ""
        self._found.append(ChatMessage(role, text, media, reasoning=thoughts))  # type: ignore[arg-type]

    def _call(self, item: dict[str, Any], param: str) -> None:
        name, arguments = _qualified(item.get("namespace"), item.get("name")), item.get("arguments")
        if not isinstance(name, str) or not isinstance(arguments, str):
            raise invalid(f"{param} has no name, or no arguments as text.", param)
        call = ToolCall(str(item.get("call_id") or ""), name, arguments or "{}")
        last = self._found[-1] if self._found else None
        if last is not None and last.role == "assistant" and not self._thoughts:
            self._found[-1] = replace(last, calls=(*last.calls, call))
        else:
            self._found.append(ChatMessage("assistant", "", reasoning=self._taken_thoughts(), calls=(call,)))

    def _taken_thoughts(self) -> str:
        thoughts, self._thoughts = "\n".join(self._thoughts), []
        return thoughts


def _content(content: object, param: str) -> tuple[str, tuple[MediaFile, ...]]:
    if content is None or isinstance(content, str):
        return content or "", ()
    if not isinstance(content, list):
        raise invalid(f"{param} has no text and no list of parts.", param)
    texts: list[str] = []
    media: list[MediaFile] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("input_text", "output_text", "text") and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind == "refusal":
            texts.append(str(part.get("refusal") or ""))
        elif kind == "input_image" and isinstance(part.get("image_url"), str):
            media.append(image_of_url(part["image_url"], param))
        else:
            raise invalid(f"{param} has a part of type {str(kind)[:40]}; use input_text or input_image.", param)
    return "\n".join(texts), tuple(media)


# ------------------------------------------------------------------ answers


class ResponseWriter:
    """The `AnswerWriter` of `/v1/responses`: makes JSON documents and server-sent events. A request has one answer."""

    def __init__(self, id: str, model: str, created: int, api_request: ApiRequest, request: ResponsesRequest) -> None:
        self._id, self._model, self._created = id, model, created
        self._question, self._request = api_request, request
        self._in_namespaces = {
            _qualified(namespace, tool.get("name")): {"name": tool.get("name"), "namespace": namespace}
            for _, namespace, tool in _namespaced(request.tools or ())
        }
        """Name and namespace of each function in a namespace, by its qualified name."""
        self._segments = Segments()
        self._sequence = 0
        self._done: Done | None = None

    def whole(self, answers: Sequence[WrittenAnswer]) -> dict[str, object]:
        (answer,) = answers
        return self._response(segments_of(answer), answer.done)

    def begin(self, index: int, prompt: Reading | None) -> bytes:
        response = {**self._response([], None), "status": "in_progress"}
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def part(self, index: int, part: AnswerDelta) -> bytes:
        return b"".join(map(self._written, self._segments.take(part)))

    def end(self, index: int, done: Done, *, has_calls: bool) -> bytes:
        self._done = done
        return b"".join(map(self._written, self._segments.end()))

    def close(self, done: Sequence[Done]) -> bytes:
        response = self._response(self._segments.all, self._done)
        return self._event(f"response.{response['status']}", response=response)

    def fail(self, error: ApiError) -> bytes:
        response = self._response(self._segments.all, self._done)
        error_document = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", response={**response, "status": "failed", "error": error_document})

    def _event(self, event: str, /, **fields: object) -> bytes:
        document = {"type": event, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event_of(document, event)

    def _response(self, segments: Sequence[Segment], done: Done | None) -> dict[str, object]:
        is_cut = done is not None and done.stop_reason in CUT
        request = self._request
        prompt, answer = (0, 0) if done is None else (done.prompt_tokens, done.generated_tokens)
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0 if done is None else done.cached_tokens},
            "output_tokens": answer,
            # The engine does not count the tokens of thoughts on their own.
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + answer,
        }
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "status": "incomplete" if is_cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self._model,
            "output": [self._item(each, done=done is not None) for each in segments],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": request.reasoning or {},
            "store": False,
            "temperature": request.temperature,
            "text": request.text or {"format": {"type": "text"}},
            "tool_choice": request.tool_choice or AUTO,
            "tools": [{**tool["function"], "type": "function"} for tool in self._question.tools],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None if done is None else usage,
            **warnings_of([] if done is None else [done]),
        }

    def _item_id(self, segment: Segment) -> str:
        prefix = {"reasoning": "rs", "content": "msg", "call": "fc"}[segment.kind]
        return f"{prefix}_{self._id}{segment.number}"

    def _item(self, segment: Segment, *, done: bool) -> dict[str, object]:
        head = {"id": self._item_id(segment), "status": "completed" if done else "in_progress"}
        match segment.kind:
            case "reasoning":
                content = [{"type": "reasoning_text", "text": segment.text}] if done else []
                return {**head, "type": "reasoning", "summary": [], "content": content}
            case "content":
                return {**head, "type": "message", "role": "assistant", "content": [_text(segment)] if done else []}
        arguments = (segment.text or "{}") if done else ""
        named = self._in_namespaces.get(segment.name, {"name": segment.name})
        return {**head, "type": "function_call", "call_id": segment.id, **named, "arguments": arguments}

    def _written(self, step: Step) -> bytes:
        segment = step.segment
        ids = {"item_id": self._item_id(segment), "output_index": segment.number}
        at = {**ids, "content_index": 0}
        if step.verb == "begin":
            added = self._event(
                "response.output_item.added", output_index=segment.number, item=self._item(segment, done=False)
            )
            if segment.kind != "content":
                return added
            return added + self._event("response.content_part.added", **at, part={**_text(segment), "text": ""})
        if step.verb == "add":
            return self._delta(segment, step.text)
        return self._ended(segment) + self._event(
            "response.output_item.done", output_index=segment.number, item=self._item(segment, done=True)
        )

    def _delta(self, segment: Segment, text: str) -> bytes:
        ids: dict[str, object] = {"item_id": self._item_id(segment), "output_index": segment.number}
        match segment.kind:
            case "reasoning":
                return self._event("response.reasoning_text.delta", **ids, content_index=0, delta=text)
            case "content":
                return self._event("response.output_text.delta", **ids, content_index=0, delta=text, logprobs=[])
        return self._event("response.function_call_arguments.delta", **ids, delta=text)

    def _ended(self, segment: Segment) -> bytes:
        ids: dict[str, object] = {"item_id": self._item_id(segment), "output_index": segment.number}
        match segment.kind:
            case "reasoning":
                return self._event("response.reasoning_text.done", **ids, content_index=0, text=segment.text)
            case "content":
                done = self._event("response.output_text.done", **ids, content_index=0, text=segment.text, logprobs=[])
                return done + self._event("response.content_part.done", **ids, content_index=0, part=_text(segment))
        arguments = segment.text or "{}"
        name = self._in_namespaces.get(segment.name, {}).get("name", segment.name)
        return self._event("response.function_call_arguments.done", **ids, name=name, arguments=arguments)


def _text(segment: Segment) -> dict[str, object]:
    return {"type": "output_text", "text": segment.text, "annotations": [], "logprobs": []}
