"""`python -m engine.runtime.child.generate.renderer`: the child that renders chat templates.

Templates of models are untrusted programs.

What would take a huge step is refused with a reason. A template may also stay in one C call for a minute, where no
limit inside the interpreter reaches it: so this process has an alarm that the kernel rings, a limited address space,
and nothing to lose. It never loads the engine.
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

from engine.runtime.child.generate.chat_template import MAX_TEMPLATE_CHARACTERS, Render, RenderedChat, TemplateError
from engine.runtime.process.decoders import run_decoder
from engine.runtime.protocol.messages import ChatMessage

MEMORY_BYTES = 256 << 20
MAX_GROWTH_CHARACTERS = 1 << 20
"""How much longer than the conversation a prompt may be."""
MAX_REPEAT = 1 << 16
MAX_FACTOR = 1 << 64
PADDING_METHODS = frozenset({"center", "expandtabs", "format", "format_map", "ljust", "rjust", "zfill"})
PADDING_FILTERS = ("center", "format", "pprint", "urlize", "wordwrap", "xmlattr")


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox that also refuses what makes a huge value in one step, where no time limit could interrupt it."""

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
    """`{% generation %}` marks the assistant's part for training and means nothing here."""

    tags = {"generation"}  # noqa: RUF012 - declared by the base class

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render_chat(template: str, messages: Sequence[ChatMessage], *, beginning_of_text: str, end_of_text: str) -> str:
    """Return the prompt that asks the assistant to go on, by the model's own template. It may take any time.

    Templates of models for images may want contents as lists of parts, and write nothing of a text: then they get such.

    Raises:
        TemplateError: the template is broken, refuses the conversation or takes too much space.
    """
    text = _render(template, messages, [each.content for each in messages], beginning_of_text, end_of_text)
    if _has_question(text, messages):
        return text
    parts = [[{"type": "text", "text": each.content}] for each in messages]
    with suppress(TemplateError):
        of_parts = _render(template, messages, parts, beginning_of_text, end_of_text)
        if _has_question(of_parts, messages):
            return of_parts
    return text


def _has_question(text: str, messages: Sequence[ChatMessage]) -> bool:
    question = next((each.content.strip() for each in reversed(messages) if each.role == "user"), "")
    return question in text


def _render(
    template: str,
    messages: Sequence[ChatMessage],
    contents: Sequence[object],
    beginning_of_text: str,
    end_of_text: str,
) -> str:
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise TemplateError("it is too long")
    limit = MAX_GROWTH_CHARACTERS + sum(len(message.content) for message in messages)
    values = {
        "messages": [
            {"role": message.role, "content": content} for message, content in zip(messages, contents, strict=True)
        ],
        "add_generation_prompt": True,
        "bos_token": beginning_of_text,
        "eos_token": end_of_text,
        "tools": None,
        "documents": None,
        "raise_exception": _refuse,
        "strftime_now": lambda pattern: datetime.now().strftime(pattern),
    }
    try:
        text = _joined(_compiled(template).generate(values), limit)
        text.encode()
        return text
    except TemplateError:
        raise
    except (MemoryError, RecursionError):
        raise TemplateError("it takes too much memory") from None
    except Exception as error:
        # whatever a foreign template does wrong is that template's error
        raise TemplateError(_described(error), type(error).__name__) from None


@lru_cache(maxsize=1)
def _compiled(template: str) -> jinja2.Template:
    """Compile once per model."""
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
        # describing it may fail as well, of what a template made
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
    """Render templates until the parent ends."""
    run_decoder(Render, _answer, MEMORY_BYTES)


def _answer(request: Render) -> RenderedChat:
    try:
        text = render_chat(
            request.template,
            request.messages,
            beginning_of_text=request.beginning_of_text,
            end_of_text=request.end_of_text,
        )
    except TemplateError as error:
        return RenderedChat(fault=str(error), for_log=error.for_log)
    return RenderedChat(text=text)


if __name__ == "__main__":
    main()
