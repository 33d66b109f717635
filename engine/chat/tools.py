"""Tools that a model may call: checks of their definitions, and messages with calls and results for the chat template.

A definition is OpenAI's: `{"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from msgspec import Struct

from engine.base.language import tr
from engine.base.texts import show
from engine.base.values import replace
from engine.chat.call_styles import HERMES, MISTRAL, is_harmony, is_llama, types_of
from engine.chat.message import Message, new_id, now_ms
from engine.chat.tool_calls import CallReader
from engine.chat.tree import MessageTree, add
from engine.runtime.protocol.requests import ChatMessage, ToolCall

MAX_TOOLS = 256
MAX_NAME_CHARACTERS = 128
MAX_DEPTH = 64
"""Deepest nesting in definitions of tools and in schemas."""
MAX_SCHEMA_VALUES = 1 << 15
"""Largest number of values in the schemas of all tools of one request."""
MAX_CHARACTERS = 1 << 18
"""Largest number of characters of the text with a conversation's tool definitions."""
_MAX_DIGITS = 9
NO_RESULT = "(no result)"
"""Text that is stored, and sent to the model, as the result of a call for which the user typed no result."""

Document = dict[str, Any]
NO_TEXTS: Mapping[str, str] = MappingProxyType({})


class DefinitionError(ValueError):
    """Error: a tool definition or a JSON schema cannot be used.

    `location`: path of the fault in the document, such as `tools[2]`; empty: unknown.
    """

    def __init__(self, reason: str, location: str = "") -> None:
        super().__init__(reason)
        self.location = location


class ToolUse(Struct, frozen=True):
    """The tools that the model may call while it answers one request.

    `tools`: OpenAI definitions; empty: no tools. `template`: chat template in use.
    """

    tools: tuple[Document, ...] = ()
    template: str = ""

    @property
    def knows_tools(self) -> bool:
        """Whether the chat template can write tool definitions into the prompt."""
        return "tools" in self.template

    @property
    def definitions(self) -> str:
        """The tools as JSON for the chat template; empty if there are no tools, or the template cannot write them."""
        return json.dumps(self.tools, ensure_ascii=False) if self.tools and self.knows_tools else ""

    @property
    def writes_hermes(self) -> bool:
        """Whether the model writes calls in the form of the Hermes models (`<tool_call>` with a JSON object)."""
        template = self.template
        return not self.knows_tools or (HERMES in template and not is_harmony(template) and not is_llama(template))

    def reader(self, *, forced: bool = False) -> CallReader:
        """Return a reader that finds the calls in an answer.

        `forced`: whether a grammar forces the model to write a single call as JSON.
        """
        return CallReader(self.template if self.knows_tools else "", types_of(self.tools), forced=forced)

    def messages(self, messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
        """Return messages in a form that the chat template can write.

        If the template cannot write tools, the system prompt describes them. If there is no system prompt, one is added
        as the first message.
        """
        has_calls = any(each.calls or each.call_id for each in messages)
        if not self.knows_tools and (self.tools or has_calls):
            return self._described(messages)
        if MISTRAL in self.template:
            return tuple(map(_with_short_ids, messages))
        return tuple(messages)

    def _described(self, messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
        """Return the messages with the tools described in the system prompt, and with calls and results as text."""
        texts = [_as_text(each) for each in messages]
        if not self.tools:
            return tuple(texts)
        tools = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in self.tools)
        prompt = _TOOL_PROMPT.format(tools=tools)
        if texts and texts[0].role == "system":
            prompt = f"{texts.pop(0).content}\n\n{prompt}"
        return (ChatMessage("system", prompt), *texts)


NO_TOOLS = ToolUse()

_TOOL_PROMPT = """You can call these functions, given as JSON schemas:
{tools}

To call one, answer with nothing but this, once for each call:
<tool_call>
{{"name": "NAME OF THE FUNCTION", "arguments": {{...}}}}
</tool_call>
The results come in the next message. Answer in plain text when no function is needed."""


def _as_text(message: ChatMessage) -> ChatMessage:
    if message.role == "tool":
        return ChatMessage("user", f"<tool_response>\n{message.content}\n</tool_response>")
    if not message.calls:
        return message
    calls = [
        f'{HERMES}\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}\n</tool_call>'
        for call in message.calls
    ]
    text = "\n".join(filter(None, (message.content, *calls)))
    return ChatMessage(message.role, text, message.media, reasoning=message.reasoning)


def _with_short_ids(message: ChatMessage) -> ChatMessage:
    """Return a message with call ids of nine letters and digits, because Mistral's templates refuse other ids."""
    calls = tuple(ToolCall(_short(call.id), call.name, call.arguments) for call in message.calls)
    return replace(message, calls=calls, call_id=message.call_id and _short(message.call_id))


def _short(call_id: str) -> str:
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode(errors="replace")).hexdigest()[:9]


def is_whole(call: ToolCall) -> bool:
    """Return whether the arguments of a call are a complete JSON object; if not, the answer ended inside the call."""
    try:
        return isinstance(json.loads(call.arguments), dict)
    except (ValueError, RecursionError):
        return False


def pretty_arguments(call: ToolCall) -> str:
    """Return the arguments of a call for people: as indented JSON, or unchanged if they are not JSON."""
    try:
        return json.dumps(json.loads(call.arguments), ensure_ascii=False, indent=2)
    except (ValueError, RecursionError):
        return call.arguments


def in_order_of_calls(path: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages, with the tool results after each answer sorted by the order of its calls."""
    positions: dict[str, tuple[int, int]] = {}
    order: dict[str, int] = {}
    first = 0
    for index, message in enumerate(path):
        if message.role != "tool":
            first, order = index + 1, {call.id: number for number, call in enumerate(message.calls)}
            positions[message.id] = index, 0
        else:
            positions[message.id] = first, order.get(message.call_id, len(order))
    return tuple(sorted(path, key=lambda message: positions[message.id]))


def answer_waiting_for_results(path: Sequence[Message]) -> Message | None:
    """Return the last answer of a path if it has tool calls and only tool results follow it; else None."""
    last = next((message for message in reversed(path) if message.role != "tool"), None)
    return last if last is not None and last.calls else None


def missing_results(path: Sequence[Message]) -> tuple[ToolCall, ...]:
    """Return the complete tool calls of the last answer in `path` that have no result yet; none while the answer is
    written.
    """
    answer = answer_waiting_for_results(path)
    if answer is None or answer.state == "writing":
        return ()
    given = {message.call_id for message in path[path.index(answer) + 1 :]}
    return tuple(call for call in answer.calls if call.id not in given and is_whole(call))


def with_results(tree: MessageTree, texts: Mapping[str, str] = NO_TEXTS) -> MessageTree:
    """Return the tree with a result message added for each call of the last answer that has no result.

    Chat templates expect a result for each call.
    `texts`: results by call id; a call that is not in `texts` gets `NO_RESULT`.
    """
    for call in missing_results(tree.path):
        tree = add(tree, result_message(call, texts.get(call.id) or NO_RESULT, tree.leaf))
    return tree


def result_message(call: ToolCall, text: str, parent: str | None) -> Message:
    """Return a message with the result `text` of a tool call. It follows the message `parent`."""
    return Message(id=new_id(), role="tool", content=text, parent=parent, call_id=call.id, created_ms=now_ms())


# ------------------------------------------------------------------ definitions


def read_tools(text: str) -> tuple[Document, ...]:
    """Return the tool definitions in a JSON list that a person typed; none if the text is blank.

    Raises:
        DefinitionError: the text is not a list of valid definitions.
    """
    if not text.strip():
        return ()
    if len(text) > MAX_CHARACTERS:
        raise DefinitionError(
            tr(
                "The tools have {count} characters; at most {most} are allowed. Leave some tools out.",
                count=len(text),
                most=MAX_CHARACTERS,
            )
        )
    try:
        found = json.loads(text)
        # JSON can write half of a surrogate pair as an escape, which cannot be sent to the engine.
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        half = tr("the text contains a lone surrogate, which is half of a character; remove it")
        raise DefinitionError(tr("The tools are not JSON: {error}.", error=half)) from None
    except RecursionError:
        raise DefinitionError(tr("The tools are nested too deeply; use simpler tools.")) from None
    except ValueError as error:
        raise DefinitionError(tr("The tools are not JSON: {error}.", error=error)) from None
    if isinstance(found, dict) and isinstance(found.get("tools"), list):
        found = found["tools"]  # a request that was copied as a whole
    if not isinstance(found, list):
        raise DefinitionError(tr("The tools are not a JSON list; put [ and ] around the definitions."))
    if len(found) > MAX_TOOLS:
        raise DefinitionError(
            tr(
                "There are {count} tools; at most {most} tools are allowed. Leave some tools out.",
                count=len(found),
                most=MAX_TOOLS,
            )
        )
    tools = tuple(check_tool(each, f"tools[{number}]") for number, each in enumerate(found))
    names = [str(tool["function"]["name"]) for tool in tools]
    for tool, name in zip(tools, names, strict=True):
        if names.count(name) > 1:
            raise DefinitionError(tr("Two tools have the name {name}; rename one of them.", name=show(name)))
        check_finite(tool["function"].get("parameters") or {}, tr("The schema of the tool {name}", name=show(name)))
    return tools


def check_tool(tool: object, location: str) -> Document:
    """Return the definition of a function, reduced to the known keys.

    `location`: path of the definition in the document, for errors.

    Raises:
        DefinitionError: the value is not a valid definition.
    """
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARACTERS:
        raise DefinitionError(
            tr(
                "{location} must be a function with a name of 1 to {most} characters.",
                location=location,
                most=MAX_NAME_CHARACTERS,
            ),
            location,
        )
    assert isinstance(function, dict)
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise DefinitionError(
            tr("{location}.function.parameters is not a JSON schema object.", location=location), location
        )
    kept = {key: function[key] for key in ("name", "description", "parameters") if function.get(key) is not None}
    for value in kept.values():
        check_depth(value, location)
    return {"type": "function", "function": kept}


def check_depth(value: object, location: str) -> None:
    """Raise `DefinitionError` if a value is nested deeper than `MAX_DEPTH`.

    `location`: path of the value in the document, for the error.
    """
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for each in level
            if isinstance(each, dict | list)
            for child in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise DefinitionError(
        tr("{location} has more than {most} nested levels; remove some levels.", location=location, most=MAX_DEPTH),
        location,
    )


class SchemaBudget:
    """Limits how many values of a JSON schema may be visited or written.

    The limit is needed because references may overlap, so a small schema can expand hugely.
    """

    def __init__(self) -> None:
        self._left = MAX_SCHEMA_VALUES

    def take(self) -> None:
        """Count one visited value of the schema.

        Raises:
            DefinitionError: the limit is exceeded.
        """
        self._left -= 1
        if self._left < 0:
            raise DefinitionError(tr("The schema is too large to be turned into a grammar; use a simpler schema."))


def check_finite(schema: Document, location: str) -> None:
    """Raise an error for a schema that always requires itself, because no finite value matches it.

    Example: a list with at least one item, where each item is again such a list. A schema that may contain itself but
    need not, such as a tree, is accepted.

    `location`: path of the schema in the document, for the error.

    Raises:
        DefinitionError: the schema requires itself, or a reference has no target.
    """
    needed: dict[str, tuple[str, ...]] = {}
    budget = SchemaBudget()
    pending = ["#"]
    while pending:
        reference = pending.pop()
        if reference not in needed:
            needed[reference] = tuple(_needs(target_of(schema, reference), budget))
            pending += needed[reference]
    # Depth-first search for a cycle. False: the reference is on the present path; True: it leads to no cycle.
    is_clear: dict[str, bool] = {}
    for begin, first in needed.items():
        path: list[tuple[str, Iterator[str]]] = [(begin, iter(first))]
        is_clear.setdefault(begin, False)
        while path:
            current, rest = path[-1]
            following = next((each for each in rest if not is_clear.get(each)), None)
            if following is None:
                is_clear[current] = True
                path.pop()
            elif following in is_clear:
                shown = following[:200]
                raise DefinitionError(
                    tr(
                        "{location} contains itself through required properties ({shown}), so no value is possible; "
                        "make one of these properties optional, or remove a reference.",
                        location=location,
                        shown=shown,
                    ),
                    location,
                )
            else:
                is_clear[following] = False
                path.append((following, iter(needed[following])))


def _needs(schema: object, budget: SchemaBudget) -> Iterator[str]:
    """Yield the references (`$ref`) that apply to every value that matches the schema.

    References in optional parts are left out, such as references in properties that are not required.

    `budget`: limits the number of visited values.
    """
    pending = [schema]
    while pending:
        value = pending.pop()
        budget.take()
        if not isinstance(value, dict):
            continue
        reference = value.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            yield reference
        properties, required = value.get("properties"), value.get("required")
        if isinstance(properties, dict) and isinstance(required, list):
            pending += [properties[key] for key in required if isinstance(key, str) and key in properties]
        least = value.get("minItems", 0)
        if isinstance(least, int) and least > 0:
            pending.append(value.get("items"))
        parts = value.get("allOf")
        pending += parts if isinstance(parts, list) else []
        for key in ("anyOf", "oneOf"):
            ways = value.get(key)
            pending += ways if isinstance(ways, list) and len(ways) == 1 else []


def target_of(schema: Document, reference: str) -> Any:
    """Return the part of a schema to which a reference (`$ref`) points.

    `reference`: JSON pointer, such as `#/$defs/town`.

    Raises:
        DefinitionError: the pointer has no target.
    """
    found: Any = schema
    for word in filter(None, reference[1:].split("/")):
        key = word.replace("~1", "/").replace("~0", "~")
        # Python refuses to read numbers of many digits.
        number = int(key) if key.isascii() and key.isdigit() and len(key) <= _MAX_DIGITS else -1
        if isinstance(found, list) and 0 <= number < len(found):
            found = found[number]
        elif isinstance(found, dict) and key in found:
            found = found[key]
        else:
            raise DefinitionError(
                tr(
                    "A schema refers to {reference}, which does not exist; correct the reference.",
                    reference=reference[:200],
                ),
                "tools",
            )
    return found
