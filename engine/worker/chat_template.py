"""The prompt of a conversation: the model's own template, rendered as untrusted text, or a plain one of ours."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from types import FrameType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from engine.runner.protocol import ChatMessage

RENDER_SECONDS = 2.0
MAX_TEMPLATE_CHARACTERS = 1 << 20
MAX_GROWTH_CHARACTERS = 1 << 20
"""How much longer than the conversation a prompt may be."""
MAX_REPEAT = 1 << 16
MAX_EXPONENT = 64


class TemplateError(Exception):
    """A chat template that cannot be used, with the reason."""


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox that also refuses to make huge values with one operator."""

    intercepted_binops = frozenset(["*", "**", "%"])

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (isinstance(right, int | float) and abs(right) <= MAX_EXPONENT):
            raise TemplateError("it raises to a large power")
        if operator == "*":
            _check_repeat(left, right)
            _check_repeat(right, left)
        if operator == "%" and isinstance(left, str):
            raise TemplateError("it formats text with %")
        return super().call_binop(context, operator, left, right)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's part for training and means nothing here."""

    tags = {"generation"}  # noqa: RUF012 - declared by the base class

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render_chat(template: str, messages: Sequence[ChatMessage], *, beginning_of_text: str, end_of_text: str) -> str:
    """Return the prompt that asks the assistant to go on, by the model's own template.

    Raises:
        TemplateError: the template is broken, refuses the conversation or takes too much time or space.
    """
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise TemplateError("it is too long")
    limit = MAX_GROWTH_CHARACTERS + sum(len(message.content) for message in messages)
    values = {
        "messages": [{"role": message.role, "content": message.content} for message in messages],
        "add_generation_prompt": True,
        "bos_token": beginning_of_text,
        "eos_token": end_of_text,
        "tools": None,
        "documents": None,
        "raise_exception": _refuse,
        "strftime_now": lambda pattern: datetime.now().strftime(pattern),
    }
    try:
        with _time_limit(RENDER_SECONDS):
            return _joined(_environment().from_string(template).generate(values), limit)
    except TemplateError:
        raise
    except (RecursionError, MemoryError) as error:
        raise TemplateError(f"it takes too much ({type(error).__name__})") from None
    except Exception as error:
        # whatever a foreign template does wrong is that template's error
        raise TemplateError(f"{type(error).__name__}: {error}") from None


def render_plain_chat(messages: Sequence[ChatMessage]) -> str:
    """Return a prompt in the form that many models know, for those without a usable template."""
    turns = [f"<|im_start|>{message.role}\n{message.content}<|im_end|>\n" for message in messages]
    return "".join(turns) + "<|im_start|>assistant\n"


def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    for name in ("center", "indent", "format", "wordwrap", "xmlattr", "pprint", "filesizeformat", "urlize"):
        # none is of use in a prompt; some pad or format without limit
        if name != "indent":
            environment.filters.pop(name, None)
    return environment


def _to_json(value: Any, indent: int | None = None, **_options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=min(indent, 8) if indent else None)


def _refuse(reason: str) -> str:
    raise TemplateError(str(reason))


def _check_repeat(sequence: Any, times: Any) -> None:
    if isinstance(sequence, str | bytes | list | tuple) and isinstance(times, int) and times > MAX_REPEAT:
        raise TemplateError("it repeats a value too often")


def _joined(pieces: Iterator[str], limit: int) -> str:
    length, kept = 0, []
    for piece in pieces:
        length += len(piece)
        if length > limit:
            raise TemplateError("its prompt grows without end")
        kept.append(piece)
    return "".join(kept)


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Let Python code inside run for `seconds` at most: every executed line looks at the clock."""
    deadline = time.monotonic() + seconds

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > deadline:
            raise TemplateError("it takes too long")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
