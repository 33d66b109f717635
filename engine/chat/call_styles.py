"""How families of models write a tool call: the marks before calls, and a parser for each form.

The chat template shows which marks a model uses. Some marks are control tokens: `Generate.marks` must contain
`CALL_TAGS`, so that they are part of the text.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

HERMES = "<tool_call>"
PYTHON_TAG = "<|python_tag|>"
MISTRAL = "[TOOL_CALLS]"
DEEPSEEK = "<｜tool▁call▁begin｜>"
GEMMA = "<|tool_call>"
FUNCTION_GEMMA = "<start_function_call>"
HARMONY = "<|channel|>"
_DEEPSEEK_SEPARATOR, _DEEPSEEK_END = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
NOISE = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
"""Marks around the list of all calls of an answer (DeepSeek)."""
CALL_TAGS = frozenset(
    {
        *(HERMES, "</tool_call>", PYTHON_TAG, MISTRAL, "[ARGS]", "[CALL_ID]"),
        *(DEEPSEEK, _DEEPSEEK_SEPARATOR, _DEEPSEEK_END, *NOISE),
        *(GEMMA, "<tool_call|>", '<|"|>', FUNCTION_GEMMA, "<end_function_call>", "<escape>"),
        *("<|start|>", HARMONY, "<|message|>", "<|end|>"),
    }
)
_MAX_HEAD = 400
"""Largest number of characters before the arguments of a call. A longer text is not a call."""


class CallParser(ABC):
    """Base class of the parsers for tool calls. Each subclass parses one form of call.

    `CallReader` creates a parser for each call, and passes each piece of the model's text to `add`.
    `name`: name of the function; set before the first piece of arguments is returned.
    """

    def __init__(self) -> None:
        self.name = ""
        self.text = ""
        """All text of the call so far. It becomes content of the answer if it turns out not to be a call."""

    def add(self, text: str) -> tuple[str, str | None]:
        """Parse the next piece of text; return the call's arguments in this piece, and the text after the call's end.

        The text after the end is None while the call has not ended.
        """
        self.text += text
        arguments, rest = self.read(text)
        if rest:
            self.text = self.text[: len(self.text) - len(rest)]
        return arguments, rest

    @abstractmethod
    def read(self, text: str) -> tuple[str, str | None]:
        """Parse the next piece of text. Implemented by subclasses; `add` calls it and returns its result."""

    def end(self) -> str:
        """Return the arguments that were not returned yet. Called if the model's text ends within the call."""
        return ""


class _Strings:
    """Tracks which characters of a JSON text belong to its strings."""

    def __init__(self) -> None:
        self._is_open = self._is_escaped = False

    def has(self, character: str) -> bool:
        """Return whether the next character is inside a string or is a quote that begins or ends a string."""
        if not self._is_open:
            self._is_open = character == '"'
            return self._is_open
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        else:
            self._is_open = character != '"'
        return True


class JsonCall(CallParser):
    """Parser of a call as a JSON object: `{"name": "look", "arguments": {...}}`; Llama writes `parameters` instead."""

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0
        self._strings = _Strings()
        self._key = ""
        self._token: list[str] = []
        self._is_value = False
        self._held = ""
        """Arguments that the model wrote before the function's name, held back until the name is known."""

    def read(self, text: str) -> tuple[str, str | None]:
        given: list[str] = []
        for index, character in enumerate(text):
            if not self._depth:
                if character == "{":
                    self._depth = 1
                elif not character.isspace() and character != "[":
                    return "", text[index:]
            elif self._strings.has(character):
                self._add(character, given)
            elif self._depth > 1 or character in "{[":
                self._depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(character, 0)
                self._add(character, given)
            elif character == "}":
                self._end_value(given)
                return self._given(given), text[index + 1 :]
            elif character == ":" and not self._is_value:
                self._key, self._token, self._is_value = _text("".join(self._token)), [], True
            elif character == ",":
                self._end_value(given)
            elif not character.isspace():
                self._add(character, given)
        return self._given(given), None

    def _add(self, character: str, given: list[str]) -> None:
        """Add a character to the current key or value of the JSON object.

        If the current value is the object with the arguments, the character is also appended to `given`.
        """
        self._token.append(character)
        if self._is_value and self._key in ("arguments", "parameters") and self._token[0] == "{":
            given.append(character)

    def _end_value(self, given: list[str]) -> None:
        value = "".join(self._token).strip()
        if self._is_value and self._key == "name":
            self.name = _text(value)
        elif self._is_value and value[:1] == '"' and self._key in ("arguments", "parameters"):
            # Arguments as OpenAI has them: the text of an object.
            given.append(_text(value))
        self._token, self._is_value = [], False

    def _given(self, given: list[str]) -> str:
        pieces = self._held + "".join(given)
        self._held = "" if self.name else pieces
        return pieces if self.name else ""


class _Closed(CallParser):
    """Parser that collects the text of a call up to its end mark, and then parses the text as a whole.

    `parse`: returns name and arguments for the text before the mark.
    """

    def __init__(self, end: str, parse: Callable[[str], tuple[str, str]]) -> None:
        super().__init__()
        self._end, self._parse, self._held = end, parse, ""

    def read(self, text: str) -> tuple[str, str | None]:
        seen = len(self._held) - len(self._end) + 1
        self._held += text
        index = self._held.find(self._end, max(0, seen))
        if index < 0:
            return "", None
        inner, rest = self._held[:index], self._held[index + len(self._end) :]
        self.name, arguments = self._parse(inner)
        return arguments, rest

    def end(self) -> str:
        # A model may leave out the end mark of its last call, or its token ends the answer.
        self.name, arguments = self._parse(self._held)
        return arguments


class _Arguments(CallParser):
    """Parser of the arguments of a call, a JSON object. The function name is already known."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self._depth = 0
        self._strings = _Strings()

    def read(self, text: str) -> tuple[str, str | None]:
        begin = 0
        for index, character in enumerate(text):
            if not self._depth and character != "{":
                if not character.isspace():
                    return "", text[index:]
                begin = index + 1
            elif not self._strings.has(character):
                self._depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(character, 0)
                if not self._depth:
                    return text[begin : index + 1], text[index + 1 :]
        return text[begin:], None


class Headed(CallParser):
    """Parser of a call whose arguments follow a head that names the function: `look[ARGS]{...}`."""

    def __init__(self, head: re.Pattern[str]) -> None:
        super().__init__()
        self._head, self._held = head, ""
        self._body: _Arguments | None = None

    def read(self, text: str) -> tuple[str, str | None]:
        if self._body is None:
            self._held += text
            match = self._head.match(self._held[:_MAX_HEAD])
            if match is None and len(self._held) < _MAX_HEAD:
                return "", None
            if match is None:
                # The head is text, with what begins it: read again, it would be taken for a head for ever.
                return "", self._held[_MAX_HEAD:]
            self.name = next(filter(None, match.groups()), "")
            self._body = _Arguments(self.name)
            text = self._held[match.end() :]
        return self._body.read(text)


class _Choice(CallParser):
    """Parser that recognises the form of a call from its first characters, and passes the text to the parser for this
    form.

    `choose`: returns the parser for the text so far; None: more text is needed.
    """

    def __init__(self, choose: Callable[[str], CallParser | None]) -> None:
        super().__init__()
        self._choose, self._held = choose, ""
        self._chosen: CallParser | None = None

    def read(self, text: str) -> tuple[str, str | None]:
        if self._chosen is None:
            self._held += text
            self._chosen = self._choose(self._held.lstrip())
            if self._chosen is None:
                return "", None
            text = self._held.lstrip()
        arguments, rest = self._chosen.read(text)
        self.name = self._chosen.name
        return arguments, rest

    def end(self) -> str:
        if self._chosen is None:
            return ""
        arguments = self._chosen.end()
        self.name = self._chosen.name
        return arguments


# ------------------------------------------------------------------ how families write calls

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
_NAME = re.compile(r"[\w.:/-]+")
_MISTRAL_HEAD = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\][^\[]*)?\[ARGS\]\s*(?=\{)")
_DEEPSEEK_HEAD = re.compile(
    rf"(?:function{_DEEPSEEK_SEPARATOR}([\w.-]+)\s*```json\s*|([\w.-]+){_DEEPSEEK_SEPARATOR}\s*)(?=\{{)"
)
HARMONY_HEAD = re.compile(r".*?to=functions\.([\w.-]+)(?:(?!<\|message\|>).)*<\|message\|>\s*(?=\{)", re.DOTALL)
_GEMMA_CALL = re.compile(r"\s*call:([\w.-]+)\s*\{(.*)\}\s*", re.DOTALL)

HARMONY_TAGS = ("<|end|>", "<|start|>", HARMONY, "to=functions.")

Types = Mapping[str, Mapping[str, object]]
"""JSON types of parameters, by the name of a tool and the name of a parameter."""


def _hermes(types: Types) -> CallParser:
    def choose(text: str) -> CallParser | None:
        if not text:
            return None
        if text.startswith("{"):
            return JsonCall()
        return _Closed("</tool_call>", lambda inner: _tagged(inner, types))

    return _Choice(choose)


def _tagged(inner: str, types: Types) -> tuple[str, str]:
    """Return function name and arguments (as JSON) of a call with parameters in tags.

    Qwen3-Coder writes `<function=look><parameter=town>`, GLM `look<arg_key>town</arg_key>`.
    `inner`: the text between the marks of the call.
    """
    head = _FUNCTION.match(inner)
    if head is not None:
        name, pairs = head[1].strip(), list(_parameters(inner))
    else:
        name, pairs = inner.partition("<arg_key>")[0].strip(), list(_glm_pairs(inner))
        if _NAME.fullmatch(name) is None:
            return "", ""  # a model that writes about the mark
    known = types.get(name, {})
    return name, json.dumps({key.strip(): _typed(value, known.get(key.strip())) for key, value in pairs})


def _between(text: str, begin: str, end: str, index: int) -> tuple[str, int] | None:
    """Return the text between the next `begin` and `end` marks from `index` on, and the index after the `end`
    mark.

    Return None if there is no such pair. A regular expression would be slow here: for each `begin` mark without an
    `end` mark it would search up to the end of the text.
    """
    first = text.find(begin, index)
    last = text.find(end, first + len(begin)) if first >= 0 else -1
    return None if last < 0 else (text[first + len(begin) : last], last + len(end))


def _parameters(inner: str) -> Iterator[tuple[str, str]]:
    """Yield the parameters of Qwen3-Coder's form, `<parameter=town>\nBonn\n</parameter>`."""
    index = 0
    while (found := _between(inner, "<parameter=", "</parameter>", index)) is not None:
        (key, _, value), index = found[0].partition(">"), found[1]
        yield key, value.removeprefix("\n").removesuffix("\n")


def _glm_pairs(inner: str) -> Iterator[tuple[str, str]]:
    """Yield the parameters of GLM's form, `<arg_key>town</arg_key><arg_value>Bonn</arg_value>`."""
    index = 0
    while (key := _between(inner, "<arg_key>", "</arg_key>", index)) is not None:
        value = _between(inner, "<arg_value>", "</arg_value>", key[1])
        if value is None:
            return
        yield key[0], value[0]
        index = value[1]


def _typed(value: str, type_: object) -> object:
    """Return the JSON value of a parameter that the model wrote without quotes.

    `type_`: the parameter's JSON type in the tool's schema; for "string" the text is returned unchanged.
    """
    if type_ == "string":
        return value
    try:
        found = json.loads(value)
        # `1e999` is infinite here, and JSON has no word for that.
        json.dumps(found, allow_nan=False)
    except (ValueError, RecursionError):
        return value
    return found


def _mistral(_types: Types) -> CallParser:
    def choose(text: str) -> CallParser | None:
        if not text:
            return None
        if text[0] in "[{":
            return JsonCall()
        return Headed(_MISTRAL_HEAD)

    return _Choice(choose)


def _gemma(inner: str) -> tuple[str, str]:
    """Return name and arguments (as JSON) of a call in Gemma's form: `call:look{town:<escape>Bonn<escape>,days:2}`.

    Gemma 4 uses a different mark than `<escape>` around strings.
    """
    # NUL marks the places of texts below.
    match = _GEMMA_CALL.fullmatch(inner.replace("\0", "\N{REPLACEMENT CHARACTER}"))
    if match is None:
        return "", ""
    texts: list[str] = []

    def keep(found: re.Match[str]) -> str:
        texts.append(found[1])
        return f'"\x00{len(texts) - 1}"'

    body = re.sub(r"<escape>(.*?)<escape>", keep, match[2].replace('<|"|>', "<escape>"), flags=re.DOTALL)
    body = re.sub(r"([{,]|^)\s*([\w.-]+)\s*:", r'\1"\2":', body)
    body = re.sub("\x00(\\d+)", lambda found: json.dumps(texts[int(found[1])])[1:-1], body)
    return match[1], "{" + body + "}"


STYLES: Mapping[str, Callable[[Types], CallParser]] = {
    HERMES: _hermes,
    PYTHON_TAG: lambda _types: JsonCall(),
    MISTRAL: _mistral,
    DEEPSEEK: lambda _types: Headed(_DEEPSEEK_HEAD),
    GEMMA: lambda _types: _Closed("<tool_call|>", _gemma),
    FUNCTION_GEMMA: lambda _types: _Closed("<end_function_call>", _gemma),
}
BETWEEN = (*NOISE, "</tool_call>", _DEEPSEEK_END, "]", ",", ";")
"""Marks and separators between calls or after the last call, which are ignored."""
GAP = "\n\n"
"""Separator in the answer between the text before a tool call and the text after it."""


def begin_tags_of(template: str) -> tuple[str, ...]:
    """Return the marks in a chat template at which tool calls begin, such as `[TOOL_CALLS]`.

    If there are none, return the Hermes mark `<tool_call>`. Layerdeck's own system prompt asks for this mark if the
    template cannot describe tools. For gpt-oss's format (harmony), return none.
    """
    found = tuple(mark for mark in STYLES if mark in template)
    if not found and HARMONY not in template:
        return (HERMES,)
    return found


def is_llama(template: str) -> bool:
    """Return whether a chat template writes calls as bare JSON, without marks, as Llama 3's template does."""
    return "<|start_header_id|>" in template and '"parameters"' in template


def is_harmony(template: str) -> bool:
    """Return whether a chat template is in gpt-oss's format (harmony), where calls are messages to `functions.NAME`."""
    return HARMONY in template and "to=functions." in template


def types_of(tools: Sequence[Mapping[str, Any]]) -> Types:
    """Return the JSON types of the parameters in OpenAI tool definitions, by tool name and parameter name."""
    found: dict[str, dict[str, object]] = {}
    for tool in tools:
        function = tool.get("function") or {}
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        named = properties if isinstance(properties, dict) else {}
        found[str(function.get("name", ""))] = {
            key: value.get("type") if isinstance(value, dict) else None for key, value in named.items()
        }
    return found


def _text(token: str) -> str:
    """Return the value of a JSON string in a call; `token` unchanged if it is not a JSON string."""
    try:
        value = json.loads(token, strict=False)
    except (ValueError, RecursionError):
        return token.strip().strip('"')
    # Models write halves of surrogate pairs as escapes, and UTF-8 cannot encode them.
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else str(token).strip()
