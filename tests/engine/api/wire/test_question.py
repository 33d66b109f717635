"""From a request to the request of the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.api.wire.errors import ApiError
from engine.api.wire.openai_chat import read_chat
from engine.api.wire.question import Profile, Question, forced_schema, generate_request, keep_alive_seconds
from engine.chat.thinking import TEMPLATE_KEY
from engine.model.gguf.model_file import ModelFile
from engine.runtime.protocol.messages import ChatMessage, ToolCall

NODE = {"type": "object", "properties": {"child": {"$ref": "#/$defs/node"}, "$ref": {"type": "string"}}}
HERMES = "{% if tools %}<tool_call>{% endif %}"


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def profile(template: str = "") -> Profile:
    metadata: Any = {TEMPLATE_KEY: template, "general.sampling.temp": 0.3}
    return Profile(ModelFile((Path("a"),), 3, "llama", "a", metadata, (), (), (), 1, 0))


def question(**fields: Any) -> Question:
    return Question("", (ChatMessage("user", "Hi"),), **fields)


def test_definitions_of_two_tools_stay_apart() -> None:
    tools = (
        tool("f", {"$ref": "#/$defs/node", "$defs": {"node": NODE}}),
        tool("g", {"type": "object", "properties": {"a": {"$ref": "#/properties/b"}, "b": {"type": "integer"}}}),
    )
    schema = forced_schema(question(tools=tools, choice="required"))
    first, second = (each["properties"]["arguments"] for each in schema["oneOf"])
    assert first == {"$ref": "#/$defs/tool0-0"}
    assert schema["$defs"]["tool0-0"]["properties"]["child"] == {"$ref": "#/$defs/tool0-0"}
    assert second["properties"]["a"] == {"$ref": "#/$defs/tool1-0"}
    assert schema["$defs"]["tool1-0"] == {"type": "integer"}


def test_a_reference_to_nothing_is_refused() -> None:
    with pytest.raises(ApiError, match="is not there"):
        forced_schema(question(tools=(tool("f", {"$ref": "#/$defs/none"}),), choice="f"))


def test_a_long_chain_of_references_ends() -> None:
    definitions = {str(number): {"$ref": f"#/$defs/{number + 1}"} for number in range(3000)}
    definitions["3000"] = {"type": "string"}
    parameters = {"$ref": "#/$defs/0", "$defs": definitions}
    assert len(forced_schema(question(tools=(tool("f", parameters),), choice="f"))["$defs"]) == 3001


def test_values_come_from_the_model_and_then_from_the_request() -> None:
    assert generate_request(question(), profile()).sampling.temperature == 0.3  # type: ignore[union-attr]
    asked = generate_request(question(settings={"temperature": 1.0, "seed": 5}), profile(), 2)
    assert asked.sampling is not None
    assert (asked.sampling.temperature, asked.sampling.seed) == (1.0, 7)


def test_tools_go_to_a_template_that_knows_them() -> None:
    asked = generate_request(question(tools=(tool("f", {}),)), profile(HERMES))
    assert json.loads(asked.template_input.tools) == [tool("f", {})]
    assert "<tool_call>" in asked.marks
    assert asked.messages == (ChatMessage("user", "Hi"),)


def test_other_templates_get_tools_as_text() -> None:
    asked = Question(
        "",
        (
            ChatMessage("system", "Be brief."),
            ChatMessage("user", "Hi"),
            ChatMessage("assistant", "", calls=(ToolCall("c", "f", '{"a": 1}'),)),
            ChatMessage("tool", "2", call_id="c"),
        ),
        tools=(tool("f", {}),),
    )
    system, user, assistant, result = generate_request(asked, profile("{{ messages }}")).messages
    assert system.content.startswith("Be brief.\n\n")
    assert '"name": "f"' in system.content
    assert user.content == "Hi"
    assert assistant.content == '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert (result.role, result.content) == ("user", "<tool_response>\n2\n</tool_response>")


def test_ids_of_calls_for_mistral() -> None:
    call = ToolCall("call_0123456789", "f", "{}")
    asked = Question("", (ChatMessage("assistant", "", calls=(call,)), ChatMessage("tool", "2", call_id=call.id)))
    first, second = generate_request(asked, profile("tools [TOOL_CALLS]")).messages
    assert first.calls[0].id == second.call_id
    assert len(second.call_id) == 9


def test_thoughts_make_way_for_a_shape() -> None:
    asked = generate_request(question(schema='{"type": "object"}'), profile("<think></think>"))
    assert json.loads(asked.template_input.values) == {"enable_thinking": False}
    assert asked.begun
    assert asked.sampling is not None
    assert asked.sampling.json_schema == '{"type": "object"}'


def test_no_tool_is_offered_where_none_may_be_called() -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [tool("f", {})], "tool_choice": "none"}
    read = read_chat(json.dumps(body).encode())
    assert not read.uses_tools
    assert generate_request(read, profile(HERMES)).template_input.tools == ""


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("5m", 300),
        ("30s", 30),
        ("2h", 7200),
        (0, 0),
        ("0", 0),
        (-1, float("inf")),
        (90, 90),
        ("1.5", 1.5),
    ],
)
def test_idle_times(value: str | float | None, seconds: float | None) -> None:
    assert keep_alive_seconds(value) == seconds


@pytest.mark.parametrize("value", ["soon", "", "5d", "nan", "m"])
def test_what_is_no_idle_time(value: str) -> None:
    with pytest.raises(ApiError):
        keep_alive_seconds(value)
