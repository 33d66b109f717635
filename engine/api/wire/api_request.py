"""A chat request in one form for all chat APIs (`ApiRequest`), and its translation to requests to the engine."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from msgspec import Struct, field

from engine.api.wire.errors import invalid
from engine.base.values import replace
from engine.chat.asking import MAX_SENT_BYTES, answer_request
from engine.chat.call_styles import HERMES
from engine.chat.presets import chat_sampling, chat_template
from engine.chat.thinking import think_tags_of
from engine.chat.tool_calls import CallReader
from engine.chat.tools import (
    MAX_TOOLS,
    DefinitionError,
    Document,
    SchemaBudget,
    ToolUse,
    check_depth,
    check_finite,
    target_of,
)
from engine.chat.tools import check_tool as checked_tool
from engine.model.gguf.model_file import ModelFile
from engine.planning.settings.sampling_table import MAX_SEED, SAMPLING_BY_KEY
from engine.runtime.protocol.requests import ChatMessage, CountTokens, Generate, TemplateInput

MAX_CHOICES = 16
"""Largest number of answers to one request (`n`)."""
MAX_MESSAGES = 10_000
AUTO, NONE, REQUIRED = "auto", "none", "required"


class ApiRequest(Struct, frozen=True):
    """A chat request in a form that is the same for all chat APIs.

    `model`: name of the model; empty: the request names none.
    `tools`: OpenAI tool definitions.
    `choice`: `AUTO`, `NONE`, `REQUIRED`, or the name of the tool that the model must call.
    `settings`: sampling settings of the request, by the names of `SamplingSettings`.
    `schema`: JSON schema of the answer as text; empty: none.
    `values`: further variables of the chat template.
    `n`: number of answers.
    `includes_usage`: whether a stream ends with the token counts.
    `top_logprobs`: number of most probable tokens to return for each token; None: no probabilities.
    `keep_alive_s`: idle time in seconds after which the model is unloaded; None: unchanged.
    """

    model: str
    messages: tuple[ChatMessage, ...]
    tools: tuple[Document, ...] = ()
    choice: str = AUTO
    settings: Mapping[str, object] = field(default_factory=dict)
    schema: str = ""
    values: Mapping[str, object] = field(default_factory=dict)
    n: int = 1
    streams: bool = False
    includes_usage: bool = False
    top_logprobs: int | None = None
    keep_alive_s: float | None = None

    @property
    def uses_tools(self) -> bool:
        """Whether the model may call tools."""
        return bool(self.tools) and self.choice != NONE

    @property
    def is_forced(self) -> bool:
        """Whether the answer must be a tool call."""
        return self.uses_tools and self.choice != AUTO


class Profile(Struct, frozen=True):
    """What a request takes from the answering model's file: the chat template and default sampling settings."""

    file: ModelFile

    @property
    def template(self) -> str:
        """The model's chat template; empty if it has none."""
        return chat_template(self.file)


def generate_request(api_request: ApiRequest, profile: Profile, choice: int = 0) -> Generate:
    """Return the engine request for one of the answers to `api_request`.

    `choice`: number of the answer, counted from 0; a question may ask for several (`n`).
    """
    settings = dict(api_request.settings)
    begun, schema = "", api_request.schema
    values = dict(api_request.values)
    if api_request.is_forced:
        schema = json.dumps(forced_schema(api_request), ensure_ascii=False)
        # The answer then goes on after the mark that the model was trained to write before a call.
        begun = f"{HERMES}\n" if tool_use(api_request, profile).writes_hermes else ""
    if schema:
        settings["json_schema"] = schema
        if think_tags_of(profile.template) is not None:
            # The grammar leaves no room for a thought. One that the template has begun is ended before the answer.
            values.setdefault("enable_thinking", False)
            begun = begun or "\n"
    # One seed for all would give the same answer n times.
    seed = settings.get("seed")
    if isinstance(seed, int) and choice:
        settings["seed"] = (seed + choice) % (MAX_SEED + 1)
    sampling = chat_sampling(profile.file, None, settings).settings
    messages = messages_for(api_request, profile)
    if not begun and _is_begun(messages):
        # As with Anthropic and llama.cpp: the answer goes on from a last message that is the assistant's own.
        messages, begun = messages[:-1], messages[-1].content
    request = answer_request(messages, sampling, begun=begun, tools=tool_use(api_request, profile))
    return replace(request, template_input=template_input(api_request, profile, values))


def _is_begun(messages: Sequence[ChatMessage]) -> bool:
    last = messages[-1]
    return len(messages) > 1 and last.role == "assistant" and bool(last.content) and not (last.calls or last.media)


def count_request(api_request: ApiRequest, profile: Profile) -> CountTokens:
    """Return the engine request that counts the tokens of the prompt."""
    return CountTokens(
        messages=messages_for(api_request, profile),
        template_input=template_input(api_request, profile, api_request.values),
    )


def prompt_characters(request: CountTokens) -> int:
    """Return how many characters of `request` the chat template can copy into the prompt.

    They are the characters of messages, tool calls, tool definitions and template variables.
    """
    found = len(request.template_input.tools) + len(request.template_input.values)
    for message in request.messages:
        found += len(message.content) + len(message.reasoning) + len(message.call_id) + len(message.name)
        found += sum(len(call.id) + len(call.name) + len(call.arguments) for call in message.calls)
    return found


def call_reader(api_request: ApiRequest, profile: Profile) -> CallReader:
    """Return the reader that finds tool calls in an answer."""
    return tool_use(api_request, profile).reader(forced=api_request.is_forced)


def template_input(api_request: ApiRequest, profile: Profile, values: Mapping[str, object]) -> TemplateInput:
    """Return the chat template's input besides the messages: the tool definitions, and `values` as variables."""
    return TemplateInput(
        tools=tool_use(api_request, profile).definitions,
        values=json.dumps(dict(values), ensure_ascii=False) if values else "",
    )


def tool_use(api_request: ApiRequest, profile: Profile) -> ToolUse:
    """Return the tools that the model may call, with the chat template that defines the format of calls."""
    return ToolUse(api_request.tools if api_request.uses_tools else (), profile.template)


def messages_for(api_request: ApiRequest, profile: Profile) -> tuple[ChatMessage, ...]:
    """Return the messages in the form that this model's chat template needs."""
    return tool_use(api_request, profile).messages(api_request.messages)


@contextmanager
def _refusing() -> Iterator[None]:
    """Context manager that converts a `DefinitionError` to an `ApiError` with status 400."""
    try:
        yield
    except DefinitionError as error:
        raise invalid(str(error), error.location or None) from None


@_refusing()
def forced_schema(api_request: ApiRequest) -> Document:
    """Return the JSON schema that a forced tool call must match: a call of the chosen tool, or of any tool.

    Raises:
        ApiError: the schema of a tool cannot be used.
    """
    tools = [each for each in api_request.tools if api_request.choice in (REQUIRED, each["function"]["name"])]
    definitions: Document = {}
    budget = SchemaBudget()
    calls = []
    for number, tool in enumerate(tools):
        parameters = tool["function"].get("parameters") or {"type": "object"}
        check_finite(parameters, f"The schema of the tool {tool['function']['name']}")
        arguments = _with_own_definitions(parameters, f"tool{number}", definitions, budget)
        properties = {"name": {"const": tool["function"]["name"]}, "arguments": arguments}
        calls.append({"type": "object", "properties": properties, "required": ["name", "arguments"]})
    body = calls[0] if len(calls) == 1 else {"oneOf": calls}
    return {**body, "$defs": definitions}


def _with_own_definitions(parameters: Document, prefix: str, definitions: Document, budget: SchemaBudget) -> Document:
    """Return a tool's schema (`parameters`) with its `$ref`s renamed, so that schemas of several tools can be in one
    document.

    The targets of the references are added to `definitions`, under unique names that begin with `prefix`.
    llama-cpp-python's converter from schemas to grammars names a rule after the last part of a reference's path only,
    so equal names would clash. It also ignores `$defs` in the same object as a `$ref`.
    If targets contain each other, their common part is copied for each of them, so `budget` limits the size.

    Raises:
        DefinitionError: a reference has no target, or the schema is too long.
    """
    names: dict[str, str] = {}
    pending: list[str] = []

    def moved(value: Any) -> Any:
        budget.take()
        if isinstance(value, list):
            return [moved(each) for each in value]
        if not isinstance(value, dict):
            return value
        reference = value.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return {key: moved(each) for key, each in value.items()}
        if reference not in names:
            names[reference] = f"{prefix}-{len(names)}"
            pending.append(reference)
        return {"$ref": f"#/$defs/{names[reference]}"}

    body = moved({key: value for key, value in parameters.items() if key not in ("$defs", "definitions")})
    while pending:
        reference = pending.pop()
        definitions[names[reference]] = moved(target_of(parameters, reference))
    return dict(body)


# ------------------------------------------------------------------ checks that all forms share


def checked_settings(values: Mapping[str, object]) -> dict[str, object]:
    """Return the sampling settings that are not None, after a check of their ranges.

    Raises:
        ApiError: a value is out of range.
    """
    found: dict[str, object] = {}
    for key, value in values.items():
        if value is None:
            continue
        try:
            found[key] = SAMPLING_BY_KEY[key].kind.checked(value)
        except ValueError as error:
            raise invalid(f"{key}: {error}.", key) from None
    return found


def check_api_request(api_request: ApiRequest) -> ApiRequest:
    """Check a chat request and return it. In the result `choice` is `NONE` if the request uses no tools.

    Raises:
        ApiError: there are no messages, or too many messages, answers, tools or bytes of images and sounds; or
            `choice` needs a tool that is missing, or does not go with `schema`.
    """
    if not api_request.messages:
        raise invalid("messages is empty; send at least one.", "messages")
    if len(api_request.messages) > MAX_MESSAGES:
        raise invalid(f"messages has more than {MAX_MESSAGES} entries.", "messages")
    if not 1 <= api_request.n <= MAX_CHOICES:
        raise invalid(f"n is {api_request.n}; use 1 to {MAX_CHOICES}.", "n")
    if len(api_request.tools) > MAX_TOOLS:
        raise invalid(f"tools has more than {MAX_TOOLS} entries.", "tools")
    names = [tool["function"]["name"] for tool in api_request.tools]
    if api_request.choice == REQUIRED and not names:
        raise invalid("tool_choice is required, but there are no tools.", "tool_choice")
    if api_request.choice not in (AUTO, NONE, REQUIRED, *names):
        raise invalid(f"tool_choice names {api_request.choice[:80]}, which is not among the tools.", "tool_choice")
    if api_request.schema and api_request.is_forced:
        raise invalid("response_format and a required tool exclude each other; leave one of them out.", "tool_choice")
    if sum(len(file.data) for message in api_request.messages for file in message.media) > MAX_SENT_BYTES:
        raise invalid(f"The images and sounds are larger than {MAX_SENT_BYTES >> 20} MiB in total.", "messages")
    return api_request if api_request.uses_tools else replace(api_request, choice=NONE)


def check_tool(tool: object, param: str) -> Document:
    """Return the checked definition of a function. `param`: path of the definition in the request, for the error.

    Raises:
        ApiError: the tool is not a valid function definition.
    """
    with _refusing():
        return checked_tool(tool, param)


def checked_schema(schema: object, param: str) -> str:
    """Return a JSON schema as text. `param`: path of the schema in the request, for the error.

    Raises:
        ApiError: the schema is not an object, is nested too deeply, or no finite value matches it.
    """
    if not isinstance(schema, dict):
        raise invalid(f"{param} is not a JSON schema object.", param)
    with _refusing():
        check_depth(schema, param)
        check_finite(schema, param)
    return json.dumps(schema, ensure_ascii=False)


def keep_alive_seconds(value: str | float | None) -> float | None:
    """Return the idle time in seconds after which a model is unloaded.

    `value`: a text such as "5m", "30s" or "2h", or a number of seconds. For a negative value the result is infinity:
    the model stays loaded until its memory is needed. For None the result is None.

    Raises:
        ApiError: the value has none of these forms.
    """
    if value is None:
        return None
    text = str(value).strip()
    factor = {"s": 1, "m": 60, "h": 3600}.get(text[-1:], 0)
    try:
        seconds = float(text[:-1]) * factor if factor else float(text)
    except ValueError:
        raise invalid('keep_alive must be a time such as "5m", seconds, 0, or -1 for as long as possible.') from None
    if math.isnan(seconds):
        raise invalid("keep_alive is not a number.", "keep_alive")
    return float("inf") if seconds < 0 else seconds
