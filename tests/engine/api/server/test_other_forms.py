"""Anthropic's messages and OpenAI's responses, through their own clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import openai
import pytest

from engine.api.wire.names import ModelEntry
from engine.api.wire.responses import read_responses
from engine.devices.device import Rig
from engine.runtime.session.load_spec import LoadSpec
from tests.support.api_server import CONTEXT, RunningServer, entry_of, plan_on_cpu, running
from tests.support.models import write_tiny_llama

HI: Any = [{"role": "user", "content": "Hello, how are you today?"}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"town": {"enum": ["Bonn", "Ulm"]}},
    "required": ["town"],
    "additionalProperties": False,
}


def plan(entry: ModelEntry, rig: Rig) -> LoadSpec:
    return plan_on_cpu(entry, rig, msgspec.structs.replace(CONTEXT, n_ctx=16384))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny.gguf", n_layers=2)
    with running([entry_of(path)], plan=plan) as started:
        started.warm("tiny")
        yield started


@pytest.fixture
def claude(server: RunningServer) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def client(server: RunningServer) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


# ------------------------------------------------------------------ messages


def test_a_message_and_its_stream_are_the_same(claude: Any) -> None:
    asked: Any = {"model": "tiny", "messages": HI, "system": "Be brief.", "max_tokens": 10}
    # This version of the client has no temperature any more.
    asked["extra_body"] = {"temperature": 0}
    whole = claude.messages.create(**asked)
    assert whole.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == 10
    assert whole.usage.input_tokens + whole.usage.cache_read_input_tokens > 0
    with claude.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.usage.output_tokens == 10
    assert final.stop_reason == "max_tokens"


def test_the_events_of_a_message(server: RunningServer) -> None:
    reply = server.post("/v1/messages", {"messages": HI, "max_tokens": 3, "stream": True, "temperature": 0})
    kinds = [event["type"] for event in reply.events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_a_tool_of_a_message_is_called(claude: Any) -> None:
    asked = {
        "model": "tiny",
        "messages": HI,
        "max_tokens": 300,
        "tools": [{"name": "look", "description": "Look", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any"},
    }
    whole = claude.messages.create(**asked)
    (block,) = whole.content
    assert (block.type, block.name, whole.stop_reason) == ("tool_use", "look", "tool_use")
    assert block.input["town"] in ("Bonn", "Ulm")
    with claude.messages.stream(**asked) as stream:
        (streamed,) = stream.get_final_message().content
    assert streamed.input["town"] in ("Bonn", "Ulm")
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "rain"}]}
    called = {"type": "tool_use", "id": block.id, "name": block.name, "input": block.input}
    messages = [*HI, {"role": "assistant", "content": [called]}, {"role": "user", "content": [result]}]
    later = claude.messages.create(**{**asked, "messages": messages, "tool_choice": {"type": "auto"}, "max_tokens": 3})
    assert later.usage.output_tokens == 3


def test_tokens_of_a_message(claude: Any) -> None:
    short = claude.messages.count_tokens(model="tiny", messages=HI)
    longer = claude.messages.count_tokens(model="tiny", messages=HI, system="Be brief.")
    assert 0 < short.input_tokens < longer.input_tokens
    whole = claude.messages.create(model="tiny", messages=HI, max_tokens=1)
    assert whole.usage.input_tokens + whole.usage.cache_read_input_tokens == short.input_tokens


def test_errors_have_anthropics_form(claude: Any, server: RunningServer) -> None:
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="other", messages=HI, max_tokens=1)
    reply = server.post("/v1/messages", {"messages": [], "max_tokens": 1})
    assert reply.status == 400
    assert reply.document["type"] == "error"
    assert reply.document["error"]["type"] == "invalid_request_error"
    long = server.post("/v1/messages", {"messages": [{"role": "user", "content": "a " * 6000}], "max_tokens": 1})
    assert (long.status, long.document["error"]["n_ctx"]) == (400, 4096)


@pytest.mark.parametrize(
    "wrong",
    [
        {"messages": [{"role": "judge", "content": "a"}]},
        {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
        {"messages": [{"role": "user", "content": [
            {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/a.png"}}]}]},
        {"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "search_result", "text": "fog"}]}]}]},
        {"tools": [{"name": "web_search", "type": "web_search_20250305"}]},
        {"tool_choice": {"type": "tool"}},
        {"temperature": -1},
        {"max_tokens": "many"},
    ],
)  # fmt: skip
def test_messages_that_cannot_be(server: RunningServer, wrong: dict[str, object]) -> None:
    assert server.post("/v1/messages", {"messages": HI, "max_tokens": 1, **wrong}).status == 400


# ------------------------------------------------------------------ responses


def test_a_response_and_its_stream_are_the_same(client: Any) -> None:
    asked = {"model": "tiny", "input": "Hello there", "instructions": "Be brief.", "max_output_tokens": 10}
    whole = client.responses.create(**asked, temperature=0)
    assert whole.status == "incomplete"
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage.output_tokens == 10
    with client.responses.stream(**asked, temperature=0) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response() if "response.completed" in kinds else None
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-1] == "response.incomplete"
    assert final is None


def test_the_events_of_a_response(server: RunningServer) -> None:
    schema = {"type": "json_schema", "name": "town", "schema": SCHEMA}
    asked = {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Where?"}]}], "stream": True}
    events = server.post("/v1/responses", {**asked, "text": {"format": schema}}).events
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert json.loads(text)["town"] in ("Bonn", "Ulm")
    last = events[-1]
    assert last["type"] == "response.completed"
    assert last["response"]["output"][0]["content"][0]["text"] == text
    assert last["response"]["usage"]["output_tokens"] > 0


def test_a_function_of_a_response_is_called(client: Any) -> None:
    tools = [
        {"type": "function", "name": "look", "parameters": SCHEMA, "strict": True},
        {"type": "web_search"},
    ]
    first = client.responses.create(model="tiny", input="Hi", tools=tools, tool_choice="required")
    (call,) = first.output
    assert (call.type, call.name) == ("function_call", "look")
    assert json.loads(call.arguments)["town"] in ("Bonn", "Ulm")
    items = [
        {"role": "user", "content": "Hi"},
        call.model_dump(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
    ]
    second = client.responses.create(model="tiny", input=items, tools=tools, max_output_tokens=3)
    assert second.usage.output_tokens == 3
    with client.responses.stream(model="tiny", input="Hi", tools=tools, tool_choice="required") as stream:
        (streamed,) = stream.get_final_response().output
    assert json.loads(streamed.arguments)["town"] in ("Bonn", "Ulm")


def test_a_function_in_a_namespace_is_called(client: Any, server: RunningServer) -> None:
    """Agents send the tools of MCP servers so, and look for the function by namespace and name."""
    function = {"type": "function", "name": "look", "parameters": SCHEMA}
    tools = [{"type": "namespace", "name": "weather", "description": "Weather", "tools": [function]}]
    asked = {"model": "tiny", "tools": tools, "tool_choice": "required"}
    (call,) = client.responses.create(input="Hi", **asked).output
    assert (call.type, call.namespace, call.name) == ("function_call", "weather", "look")
    assert json.loads(call.arguments)["town"] in ("Bonn", "Ulm")
    events = server.post("/v1/responses", {**asked, "input": "Hi", "stream": True}).events
    items = [event["item"] for event in events if event["type"].startswith("response.output_item.")]
    assert [(item["namespace"], item["name"]) for item in items] == [("weather", "look")] * 2
    assert [event["name"] for event in events if event["type"].endswith("arguments.done")] == ["look"]


def test_a_call_in_the_history_has_the_name_that_the_model_uses() -> None:
    call = {"type": "function_call", "call_id": "c", "namespace": "weather", "name": "look", "arguments": "{}"}
    function = {"type": "function", "name": "look"}
    tools = [{"type": "namespace", "name": "weather", "tools": [function, {"type": "custom", "name": "free"}]}]
    api_request, _ = read_responses(json.dumps({"input": [call], "tools": tools}).encode())
    assert api_request.messages[0].calls[0].name == "weather__look"
    assert [tool["function"]["name"] for tool in api_request.tools] == ["weather__look"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"input": []},
        {"input": "a", "tools": [{"type": "namespace", "tools": []}]},
        {"input": "a", "tools": [{"type": "namespace", "name": "weather"}]},
        {"input": "a", "tools": [{"type": "namespace", "name": "weather", "tools": [{"type": "function"}]}]},
        {"input": 3},
        {"input": [{"type": "item_reference", "id": "a"}]},
        {"input": [{"type": "reasoning", "content": 5}, {"role": "user", "content": "a"}]},
        {"input": [{"role": "judge", "content": "a"}]},
        {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://127.0.0.1/a.png"}]}]},
        {"input": "a", "previous_response_id": "resp_1"},
        {"input": "a", "background": True},
        {"input": "a", "tool_choice": "required"},
        {"input": "a", "text": {"format": {"type": "json_schema"}}},
    ],
)
def test_responses_that_cannot_be(server: RunningServer, wrong: dict[str, object]) -> None:
    reply = server.post("/v1/responses", wrong)
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")


def test_a_stop_sequence_is_named(server: RunningServer) -> None:
    asked: Any = {"model": "tiny", "messages": HI, "max_tokens": 12, "temperature": 0}
    text = server.post("/v1/messages", asked).document["content"][0]["text"]
    stop = text[4:6]
    sequences = ["never written", stop]
    whole = server.post("/v1/messages", {**asked, "stop_sequences": sequences}).document
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", stop)
    assert whole["content"][0]["text"] == text[: text.index(stop)]
    events = server.post("/v1/messages", {**asked, "stop_sequences": sequences, "stream": True}).events
    (last,) = [event for event in events if event["type"] == "message_delta"]
    assert last["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": stop}


def test_a_template_that_is_not_used_is_told(tmp_path: Path) -> None:
    template = "{{ raise_exception('No conversation.') }}"
    path = write_tiny_llama(
        tmp_path / "odd.gguf", n_layers=1,
        extra_metadata={"tokenizer.chat_template": template},
    )  # fmt: skip
    with running([entry_of(path)]) as server:
        asked: Any = {"messages": HI, "max_tokens": 1}
        whole = server.post("/v1/chat/completions", asked).document
        assert "chat template is not used" in whole["warnings"][0]
        events = server.post("/v1/chat/completions", {**asked, "stream": True}).events
        assert events[-2]["warnings"] == whole["warnings"]
        assert server.post("/v1/messages", asked).document["warnings"] == whole["warnings"]
        assert server.post("/v1/responses", {"input": "Hi", "max_output_tokens": 1}).document["warnings"]
