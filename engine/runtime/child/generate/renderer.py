"""`python -m engine.runtime.child.generate.renderer`: the child that renders chat templates.

A chat template comes with the model's file and is an untrusted program (Jinja). The sandbox refuses operations that
make a huge value in one step. A template may still stay in one C call for a minute, which no limit inside the
interpreter can interrupt. So the kernel ends this process after a time limit (SIGALRM). The process also has a limited
address space and no access to files, and never loads llama.cpp.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from engine.base.confinement import RENDERER
from engine.runtime.child.generate.chat_template import MAX_TEMPLATE_CHARACTERS, Render, RenderedChat, TemplateError
from engine.runtime.process.decoders import run_decoder
from engine.runtime.protocol.requests import NO_INPUT, ChatMessage, TemplateInput

MAX_GROWTH_CHARACTERS = 1 << 20
"""Largest number of characters by which a prompt may be longer than the conversation."""
MAX_REPEAT = 1 << 16
MAX_FACTOR = 1 << 64
# Methods and filters that make a text of any length from a number, in one step.
PADDING_METHODS = frozenset({"center", "expandtabs", "format", "format_map", "ljust", "rjust", "zfill"})
PADDING_FILTERS = ("center", "format", "pprint", "urlize", "wordwrap", "xmlattr")


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A Jinja sandbox that also refuses operations that make a huge value in one step."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise TemplateError("it raises to a power")
        if operator == "%" and isinstance(left, str):
            raise TemplateError("it formats text with %")
        if operator == "*":
            _check_product(left, right)
            _check_product(right, left)
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in PADDING_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)


class _GenerationTag(jinja2.ext.Extension):
    """Jinja extension for the tag `{% generation %}`, which marks the assistant's text for training.

    It does not change a prompt.
    """

    tags = {"generation"}  # noqa: RUF012 - declared by the base class

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render_chat(
    template: str,
    messages: Sequence[ChatMessage],
    template_input: TemplateInput = NO_INPUT,
    *,
    beginning_of_text: str,
    end_of_text: str,
) -> str:
    """Return the rendered prompt, which ends with the generation prompt. Time and memory are not limited here.

    Templates of some vision models expect the content of a message as a list of parts, and drop a plain string. If the
    last question is missing in the result, the template is rendered again with such lists.

    Raises:
        TemplateError: the template is invalid, refuses the conversation, or makes too long a prompt.
    """
    values = _values(template_input, beginning_of_text, end_of_text)
    limit = MAX_GROWTH_CHARACTERS + len(template_input.tools) + sum(map(_length, messages))
    plain = [each.content for each in messages]
    try:
        text = _render(template, _documents(messages, plain), values, limit)
    except TemplateError:
        if not any(each.calls for each in messages):
            raise
        # DeepSeek's templates join the arguments of a call with text; all others take an object.
        text = _render(template, _documents(messages, plain, arguments_as_text=True), values, limit)
    if _has_question(text, messages):
        return text
    parts = [[{"type": "text", "text": each.content}] for each in messages]
    with suppress(TemplateError):
        of_parts = _render(template, _documents(messages, parts), values, limit)
        if _has_question(of_parts, messages):
            return of_parts
    return text


def _length(message: ChatMessage) -> int:
    return len(message.content) + len(message.reasoning) + sum(len(call.arguments) for call in message.calls)


def _values(template_input: TemplateInput, beginning_of_text: str, end_of_text: str) -> dict[str, Any]:
    """Return the variables of a template except the messages.

    Variables of the request cannot replace ours, such as BOS.
    """
    further = json.loads(template_input.values) if template_input.values else {}
    return {
        **further,
        "add_generation_prompt": True,
        "bos_token": beginning_of_text,
        "eos_token": end_of_text,
        "tools": json.loads(template_input.tools) if template_input.tools else None,
        "documents": None,
        "raise_exception": _refuse,
        "strftime_now": lambda pattern: datetime.now().strftime(pattern),
    }


def _documents(
    messages: Sequence[ChatMessage], contents: Sequence[object], *, arguments_as_text: bool = False
) -> list[dict[str, Any]]:
    """Return messages in OpenAI's format, which templates expect. Keys that have no value are left out.

    `contents`: content of each message.
    `arguments_as_text`: whether arguments of tool calls stay JSON text instead of objects.
    """
    return [_document(each, content, arguments_as_text) for each, content in zip(messages, contents, strict=True)]


def _document(message: ChatMessage, content: object, arguments_as_text: bool) -> dict[str, Any]:
    document: dict[str, Any] = {"role": message.role, "content": content}
    if message.reasoning:
        document["reasoning_content"] = message.reasoning
    if message.calls:
        document["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": call.arguments if arguments_as_text else _parsed(call.arguments),
                },
            }
            for call in message.calls
        ]
    if message.call_id:
        document["tool_call_id"] = message.call_id
    if message.name:
        document["name"] = message.name
    return document


def _parsed(arguments: str) -> object:
    """Return the arguments of a tool call as a JSON value; as text if the model has written invalid JSON."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _has_question(text: str, messages: Sequence[ChatMessage]) -> bool:
    question = next((each.content.strip() for each in reversed(messages) if each.role == "user"), "")
    return question in text


def _render(template: str, documents: Sequence[dict[str, Any]], values: dict[str, Any], limit: int) -> str:
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise TemplateError("it is too long")
    try:
        text = _joined(_compiled(template).generate({**values, "messages": list(documents)}), limit)
        # A template can make lone surrogates, which cannot be sent; this raises.
        text.encode()
        return text
    except TemplateError:
        raise
    except (MemoryError, RecursionError):
        raise TemplateError("it takes too much memory") from None
    except Exception as error:
        # A template can raise any exception of Jinja and of the functions that it calls.
        raise TemplateError(_described(error), type(error).__name__) from None


@lru_cache(maxsize=1)
def _compiled(template: str) -> jinja2.Template:
    """Return the compiled template. The last template is cached, because a model uses the same one for each request."""
    return _environment().from_string(template)


def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    for name in PADDING_FILTERS:
        environment.filters.pop(name, None)
    return environment


def _described(error: Exception) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        # The message may quote a value of the template, whose conversion to text fails.
        return type(error).__name__


def _to_json(value: Any, indent: int | None = None, **_options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=min(indent, 8) if indent else None)


def _refuse(reason: str) -> str:
    raise TemplateError(str(reason), "it refuses this conversation")


def _check_product(value: Any, factor: Any) -> None:
    if not isinstance(factor, int):
        return
    if isinstance(value, int) and abs(value) > MAX_FACTOR:
        raise TemplateError("it computes with huge numbers")
    if isinstance(value, str | bytes | list | tuple) and factor > MAX_REPEAT:
        raise TemplateError("it repeats a value too often")


def _joined(pieces: Iterator[str], limit: int) -> str:
    length, kept = 0, []
    for piece in pieces:
        length += len(piece)
        if length > limit:
            raise TemplateError("its prompt grows without end")
        kept.append(piece)
    return "".join(kept)


def main() -> None:
    """Run as the child that renders templates until the parent ends it."""
    run_decoder(Render, _answer, RENDERER)


def _answer(request: Render) -> RenderedChat:
    try:
        text = render_chat(
            request.template,
            request.messages,
            request.template_input,
            beginning_of_text=request.beginning_of_text,
            end_of_text=request.end_of_text,
        )
    except TemplateError as error:
        return RenderedChat(fault=str(error), for_log=error.for_log)
    return RenderedChat(text=text)


if __name__ == "__main__":
    main()
