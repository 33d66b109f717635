"""Translation of API requests into the engine's requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.api.wire.anthropic import read_messages
from engine.api.wire.api_request import (
    ApiRequest,
    Profile,
    checked_schema,
    forced_schema,
    generate_request,
    keep_alive_seconds,
)
from engine.api.wire.errors import ApiError
from engine.api.wire.media import MAX_FILES
from engine.api.wire.openai_chat import read_chat
from engine.api.wire.responses import read_responses
from engine.chat.thinking import TEMPLATE_KEY
from engine.model.gguf.model_file import ModelFile
from engine.runtime.protocol.requests import ChatMessage, ToolCall

NODE = {"type": "object", "properties": {"child": {"$ref": "#/$defs/node"}, "$ref": {"type": "string"}}}
HERMES = "{% if tools %}<tool_call>{% endif %}"


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def profile(template: str = "") -> Profile:
    metadata: Any = {TEMPLATE_KEY: template, "general.sampling.temp": 0.3}
    return Profile(ModelFile((Path("a"),), 3, "llama", "a", metadata, (), (), (), 1, 0))


def api_request(**fields: Any) -> ApiRequest:
    return ApiRequest("", (ChatMessage("user", "Hi"),), **fields)


def test_definitions_of_two_tools_stay_apart() -> None:
    tools = (
        tool("f", {"$ref": "#/$defs/node", "$defs": {"node": NODE}}),
        tool("g", {"type": "object", "properties": {"a": {"$ref": "#/properties/b"}, "b": {"type": "integer"}}}),
    )
    schema = forced_schema(api_request(tools=tools, choice="required"))
    first, second = (each["properties"]["arguments"] for each in schema["oneOf"])
    assert first == {"$ref": "#/$defs/tool0-0"}
    assert schema["$defs"]["tool0-0"]["properties"]["child"] == {"$ref": "#/$defs/tool0-0"}
    assert second["properties"]["a"] == {"$ref": "#/$defs/tool1-0"}
    assert schema["$defs"]["tool1-0"] == {"type": "integer"}


def test_a_reference_to_nothing_is_refused() -> None:
    with pytest.raises(ApiError, match="does not exist"):
        forced_schema(api_request(tools=(tool("f", {"$ref": "#/$defs/none"}),), choice="f"))


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {
            "type": "object",
            "properties": {"a": {"type": "array", "minItems": 1, "items": {"$ref": "#"}}},
            "required": ["a"],
        },
        {"allOf": [{"anyOf": [{"$ref": "#"}]}]},
    ],
)
def test_a_schema_that_needs_itself_is_refused_in_a_sentence(parameters: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="The schema of the tool f contains itself") as caught:
        forced_schema(api_request(tools=(tool("f", parameters),), choice="f"))
    assert caught.value.status == 400
    with pytest.raises(ApiError, match="contains itself"):
        checked_schema(parameters, "response_format.json_schema.schema")


def test_a_schema_that_may_contain_itself_is_taken() -> None:
    tree = {
        "type": "object",
        "properties": {"child": {"$ref": "#"}, "value": {"type": "integer"}},
        "required": ["value"],
    }
    checked_schema(tree, "response_format")
    list_ = {
        "anyOf": [{"type": "null"}, {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}]
    }
    checked_schema(list_, "response_format")
    schema = forced_schema(api_request(tools=(tool("f", tree),), choice="f"))
    assert schema["$defs"]["tool0-0"]["properties"]["child"] == {"$ref": "#/$defs/tool0-0"}


def test_references_to_overlapping_parts_do_not_multiply() -> None:
    # Each of these means the whole schema, and writing out all of them would take its size squared.
    many = {
        "anyOf": [{"$ref": "#" + "/" * count} for count in range(400)],
        "properties": {str(n): {} for n in range(400)},
    }
    with pytest.raises(ApiError, match="too large to be turned into a grammar"):
        forced_schema(api_request(tools=(tool("f", many),), choice="f"))


@pytest.mark.parametrize(
    ("seed", "kept"),
    [(-1, None), (0, 0), (4294967294, 4294967294), (4294967295, None), (1 << 40, (1 << 40) % 4294967295)],
)
def test_seeds(seed: int, kept: int | None) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "seed": seed, "n": 3}
    read = read_chat(json.dumps(body).encode())
    assert read.settings.get("seed") == kept
    for choice in range(3):
        sampling = generate_request(read, profile(), choice).sampling
        assert sampling is not None
        assert kept is None or sampling.seed == (kept + choice) % 4294967295


def test_too_many_images_are_refused_before_one_is_decoded() -> None:
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    body = {"messages": [{"role": "user", "content": [url] * (MAX_FILES + 1)}]}
    with pytest.raises(ApiError, match=f"{MAX_FILES} at most"):
        read_chat(json.dumps(body).encode())
    item = {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}] * 65}
    with pytest.raises(ApiError, match="at most"):
        read_responses(json.dumps({"input": [item]}).encode())
    source = {"type": "base64", "data": "AAAA"}
    image = {"type": "image", "source": source}
    for content in ([image] * 65, [{"type": "tool_result", "content": [image] * 65}]):
        with pytest.raises(ApiError, match="at most"):
            read_messages(json.dumps({"messages": [{"role": "user", "content": content}]}).encode())


def test_a_long_chain_of_references_ends() -> None:
    definitions = {str(number): {"$ref": f"#/$defs/{number + 1}"} for number in range(3000)}
    definitions["3000"] = {"type": "string"}
    parameters = {"$ref": "#/$defs/0", "$defs": definitions}
    assert len(forced_schema(api_request(tools=(tool("f", parameters),), choice="f"))["$defs"]) == 3001


def test_values_come_from_the_model_and_then_from_the_request() -> None:
    assert generate_request(api_request(), profile()).sampling.temperature == 0.3  # type: ignore[union-attr]
    asked = generate_request(api_request(settings={"temperature": 1.0, "seed": 5}), profile(), 2)
    assert asked.sampling is not None
    assert (asked.sampling.temperature, asked.sampling.seed) == (1.0, 7)


def test_tools_go_to_a_template_that_knows_them() -> None:
    asked = generate_request(api_request(tools=(tool("f", {}),)), profile(HERMES))
    assert json.loads(asked.template_input.tools) == [tool("f", {})]
    assert "<tool_call>" in asked.marks
    assert asked.messages == (ChatMessage("user", "Hi"),)


def test_other_templates_get_tools_as_text() -> None:
    asked = ApiRequest(
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
    asked = ApiRequest("", (ChatMessage("assistant", "", calls=(call,)), ChatMessage("tool", "2", call_id=call.id)))
    first, second = generate_request(asked, profile("tools [TOOL_CALLS]")).messages
    assert first.calls[0].id == second.call_id
    assert len(second.call_id) == 9


def test_thoughts_make_way_for_a_shape() -> None:
    asked = generate_request(api_request(schema='{"type": "object"}'), profile("<think></think>"))
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
