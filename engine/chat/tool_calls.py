"""Finds tool calls in the streamed text of a model. A piece of the stream may end anywhere, even inside a mark.

A mark is a text such as `<tool_call>` at the beginning or the end of a call.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import Struct

from engine.chat.call_styles import (
    BETWEEN,
    DEEPSEEK,
    GAP,
    HARMONY_HEAD,
    HARMONY_TAGS,
    MISTRAL,
    NOISE,
    PYTHON_TAG,
    STYLES,
    CallParser,
    Headed,
    JsonCall,
    Types,
    begin_tags_of,
    is_harmony,
    is_llama,
)
from engine.chat.thinking import overlap
from engine.runtime.protocol.requests import ToolCall


class CallDelta(Struct, frozen=True):
    """A piece of the tool call with number `index`. Only the first piece of a call has `id` and `name`."""

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""


class Found(NamedTuple):
    """Result of reading a piece of the model's text: content of the answer, and pieces of tool calls."""

    content: str = ""
    calls: tuple[CallDelta, ...] = ()


def calls_with(calls: Sequence[ToolCall], deltas: Iterable[CallDelta]) -> tuple[ToolCall, ...]:
    """Return `calls` extended by `deltas`. A delta with a name begins a new call; any other delta extends the last
    call.
    """
    found = list(calls)
    for delta in deltas:
        if delta.name:
            found.append(ToolCall(delta.id, delta.name, delta.arguments))
        elif found:
            last = found[-1]
            found[-1] = ToolCall(last.id, last.name, last.arguments + delta.arguments)
    return tuple(found)


class CallReader:
    """Separates tool calls from the other text of one streamed answer. The thought must have been removed before."""

    def __init__(self, template: str, types: Types | None = None, *, forced: bool = False) -> None:
        """Create a reader for a model's chat template.

        `types`: JSON types of the tools' parameters (`types_of`).
        `forced`: whether a grammar forces the model to write a single call as JSON.
        """
        self._types = types or {}
        self._marks = begin_tags_of(template)
        self._harmony = is_harmony(template)
        self._bare = is_llama(template) or forced
        self._between = (*BETWEEN, "```") if DEEPSEEK in self._marks else BETWEEN
        self._id_length = 9 if MISTRAL in template else 0
        self._held = ""
        self._call: CallParser | None = None
        self._is_bare = False
        self._index = 0
        self._named = self._arguments_given = False
        self._has_content = False
        self._is_between = False
        """Whether a tool call has ended, and no other text of the answer has come since then."""

    @property
    def has_calls(self) -> bool:
        """Whether the answer has a call, even an incomplete one."""
        return self._index > 0

    def add(self, text: str) -> Found:
        """Add a piece of the model's text. Return the text of the answer and the parts of tool calls found so far.

        Text that may still become the mark of a call is held back.
        """
        content: list[str] = []
        calls: list[CallDelta] = []
        self._held += text
        while self._held:
            before = len(self._held), self._call
            if self._call is not None:
                self._read_call(content, calls)
            else:
                content.append(self._read_content())
            self._has_content = self._has_content or bool(content and content[-1])
            if (len(self._held), self._call) == before:
                break
        return self._found(content, calls)

    def end(self) -> Found:
        """Return the content and calls that were held back. Call it when the answer has ended."""
        content: list[str] = []
        calls: list[CallDelta] = []
        if self._call is not None:
            arguments = self._call.end()
            if not self._give(arguments, calls) and not self._named and self._call.text.strip() not in STYLES:
                content.append(self._after_calls(self._call.text))
            self._call = None
        elif not self._is_between:
            content.append(self._held)
        self._held = ""
        return self._found(content, calls)

    def _found(self, content: Sequence[str], calls: Sequence[CallDelta]) -> Found:
        text = "".join(content)
        if self._is_between and not text.strip():
            text = ""
        self._has_content = self._has_content or bool(text)
        return Found(text, tuple(calls))

    def _read_content(self) -> str:
        held = self._held
        if self._is_between:
            held = held.lstrip()
            for between in self._between:
                if held.startswith(between):
                    self._held = held[len(between) :]
                    return ""
            if any(between.startswith(held) for between in self._between):
                return ""
            if self._continues_list(held):
                self._call, self._held = JsonCall(), held
                return ""
        if self._bare and not self._has_content and not self.has_calls and held.lstrip()[:1] == "{":
            self._call, self._is_bare, self._held = JsonCall(), True, held.lstrip()
            return ""
        if self._bare and not self._has_content and not held.strip():
            return ""
        if self._harmony:
            return self._read_harmony()
        held = _without_noise(held)
        indices = {mark: held.find(mark) for mark in self._marks}
        mark = min((each for each in indices if indices[each] >= 0), key=indices.__getitem__, default=None)
        if mark is not None:
            content = held[: indices[mark]].rstrip()
            end = indices[mark] + len(mark)
            self._call, self._held = STYLES[mark](self._types), held[end:]
            self._call.text = held[len(content) : end]
            return self._after_calls(content)
        # White space before a call belongs to neither content nor call, so it is held back until more text comes.
        clear = len(held) - max(overlap(held, each) for each in (*self._marks, *NOISE))
        clear = len(held[:clear].rstrip()) if self._types else clear
        content, self._held = held[:clear], held[clear:]
        return self._after_calls(content)

    def _after_calls(self, content: str) -> str:
        """Return `content`, a piece of the answer's text, with the separator `GAP` before it if necessary.

        The separator is needed between the text before a tool call and the text after it.
        """
        if not content or not self._is_between:
            return content
        self._is_between = False
        return f"{GAP if self._has_content else ''}{content}"

    def _continues_list(self, held: str) -> bool:
        """Return whether `held`, the text after a call, begins another call of the same list.

        Mistral and Llama models write a mark only before the first call of a list.
        """
        return held.startswith("{") and (self._is_bare or MISTRAL in self._marks or PYTHON_TAG in self._marks)

    def _read_harmony(self) -> str:
        """Read the next piece of the unread text (`_held`) in gpt-oss's format (harmony).

        Return text of the answer without marks; "" if the piece is a mark or a header. If a header begins a tool call,
        set `_call` to a parser for it.
        """
        held = self._held.lstrip() if not self._has_content or self._is_between else self._held
        if held.startswith("<|end|>"):
            self._held = held[len("<|end|>") :]
            return ""
        if held.startswith(HARMONY_TAGS):
            header, message, text = held.partition("<|message|>")
            if "to=functions." in header:
                self._call, self._held = Headed(HARMONY_HEAD), held
            else:
                self._held = text if message else held
            return ""
        index = min((at for mark in HARMONY_TAGS if (at := held.find(mark)) >= 0), default=-1)
        clear = index if index >= 0 else len(held) - max(overlap(held, mark) for mark in HARMONY_TAGS)
        content, self._held = held[:clear], held[clear:]
        return self._after_calls(content)

    def _read_call(self, content: list[str], calls: list[CallDelta]) -> None:
        assert self._call is not None
        arguments, rest = self._call.add(self._held)
        self._held = rest or ""
        given = self._give(arguments, calls)
        if rest is None:
            return
        if not given and not self._named:
            # It looked like a call: a bare object, or a mark without one.
            content.append(self._after_calls(self._call.text))
            self._bare = False
        else:
            self._is_between = True
            # Clients parse the arguments as JSON, so a call without parameters gets an empty object.
            if not self._arguments_given:
                calls.append(CallDelta(self._index - 1, "{}"))
        self._call, self._named = None, False

    def _give(self, arguments: str, calls: list[CallDelta]) -> bool:
        """Append the new part of the current call to `calls`; return False if it is too early for that.

        The first part of a call has its id and the name of its function. It is too early while the name is incomplete,
        or while a JSON object without a mark before it may still be ordinary text.

        `arguments`: new text of the call's arguments; may be empty.
        """
        assert self._call is not None
        if not self._call.name:
            return False
        # `{"name": "Ada", "born": 1815}` is no call: it has no arguments, and no tool has this name.
        if self._is_bare and not self._named and not arguments and self._call.name not in self._types:
            return False
        if not self._named:
            self._named, self._arguments_given = True, False
            calls.append(CallDelta(self._index, "", new_call_id(self._id_length), self._call.name))
            self._index += 1
        if arguments:
            self._arguments_given = True
            calls.append(CallDelta(self._index - 1, arguments))
        return True


def new_call_id(length: int = 0) -> str:
    """Return a new call id.

    `length`: 9 for Mistral's templates, which accept only nine letters and digits; 0: the usual length.
    """
    return secrets.token_hex(length)[:length] if length else f"call_{secrets.token_hex(12)}"


def _without_noise(text: str) -> str:
    for mark in NOISE:
        text = text.replace(mark, "")
    return text
