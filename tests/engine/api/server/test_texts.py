"""Completions, embeddings, JSON by a schema and tool calls, with small models."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from typing import Any

import gguf
import msgspec
import openai
import pytest

from engine.api.server import app as app_module
from engine.api.wire.names import ModelEntry
from engine.devices.device import Rig
from engine.planning.plan.decisions.context_length import default_context
from engine.runtime.session.load_spec import LoadSpec
from tests.support.api_server import CONTEXT, RunningServer, entry_of, plan_on_cpu, running
from tests.support.models import write_tiny_encoder, write_tiny_llama

LONG = msgspec.structs.replace(CONTEXT, n_ctx=16384)
HI: Any = [{"role": "user", "content": "Hello, how are you today?"}]
LOOK: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at the weather",
        "parameters": {
            "type": "object",
            "properties": {"town": {"enum": ["Bonn", "Ulm"]}},
            "required": ["town"],
            "additionalProperties": False,
        },
    },
}
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def plan(entry: ModelEntry, rig: Rig) -> LoadSpec:
    from engine.model.gguf.reader import read_model

    context = default_context(read_model(entry.path)) if entry.id == "encoder" else LONG
    return plan_on_cpu(entry, rig, context)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    tiny = write_tiny_llama(folder / "tiny.gguf", n_layers=2)
    encoder = write_tiny_encoder(folder / "encoder.gguf", pooling=gguf.PoolingType.MEAN)
    with running([entry_of(tiny), entry_of(encoder)], plan=plan) as started:
        started.warm("tiny")
        assert started.post("/v1/embeddings", {"model": "encoder", "input": "a"}).status == 200
        yield started


@pytest.fixture
def client(server: RunningServer) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


# ------------------------------------------------------------------ completions


def test_a_completion_and_its_stream_are_the_same(client: Any) -> None:
    asked = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "logprobs": 2}
    whole = client.completions.create(**asked)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 8
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-1].usage.completion_tokens == 8
    tokens = [token for chunk in chunks[:-1] for token in chunk.choices[0].logprobs.tokens]
    assert tokens == whole.choices[0].logprobs.tokens
    assert len(whole.choices[0].logprobs.token_logprobs) == 8


def test_several_prompts_of_all_forms(client: Any, server: RunningServer) -> None:
    tokens = server.post("/tokenize", {"model": "tiny", "content": "abc"}).document["tokens"]
    asked = {"model": "tiny", "max_tokens": 3, "temperature": 0, "echo": True}
    texts = client.completions.create(**asked, prompt=["abc", "def"])
    assert [choice.text[:3] for choice in texts.choices] == ["abc", "def"]
    assert [choice.index for choice in texts.choices] == [0, 1]
    as_tokens = client.completions.create(**asked, prompt=tokens)
    assert as_tokens.choices[0].text == texts.choices[0].text
    lists = client.completions.create(**asked, prompt=[tokens, tokens], n=2)
    assert [choice.text for choice in lists.choices] == [texts.choices[0].text] * 4
    assert lists.usage.prompt_tokens == 2 * as_tokens.usage.prompt_tokens


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": [-1]},
        {"prompt": {"a": 1}},
        {},
        {"prompt": "a", "suffix": "b"},
        {"prompt": "a", "best_of": 3},
        {"prompt": ["a"] * 100},
        {"prompt": "a", "n": 1000},
        {"prompt": "a", "logprobs": 100},
        {"prompt": "a", "max_tokens": 1.5},
    ],
)
def test_completions_that_cannot_be(server: RunningServer, wrong: dict[str, object]) -> None:
    reply = server.post("/v1/completions", {"model": "tiny", **wrong})
    assert reply.status == 400, reply.body
    assert reply.error["message"]


def test_a_prompt_that_is_too_long(server: RunningServer) -> None:
    reply = server.post("/v1/completions", {"model": "tiny", "prompt": "a " * 6000})
    assert (reply.status, reply.error["type"]) == (400, "exceed_context_size_error")


@pytest.mark.parametrize(("path", "field"), [("/v1/completions", "prompt"), ("/v1/embeddings", "input")])
def test_a_prompt_of_too_many_tokens_is_not_detokenised(
    server: RunningServer, path: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_arguments: object) -> None:
        raise AssertionError("the model was asked")

    monkeypatch.setattr(app_module, "ask", refuse)
    model = "tiny" if field == "prompt" else "encoder"
    reply = server.post(path, {"model": model, field: [[9] * 100_000]})
    assert (reply.status, reply.error["type"]) == (400, "exceed_context_size_error")
    assert reply.error["n_prompt_tokens"] == 100_000


LONG_TEXT = "a b " * 300_000
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": json.dumps({"town": LONG_TEXT})}}


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [*HI, {"role": "assistant", "content": "", "reasoning_content": LONG_TEXT}, *HI]},
        {"messages": [*HI, {"role": "assistant", "tool_calls": [CALL]}, *HI]},
        {"messages": HI, "tools": [{"type": "function", "function": {"name": "look", "description": LONG_TEXT}}]},
        {"messages": HI, "chat_template_kwargs": {"date": LONG_TEXT}},
    ],
)
def test_all_texts_of_a_chat_count_for_its_length(server: RunningServer, fields: dict[str, object]) -> None:
    reply = server.post("/v1/chat/completions", {"model": "tiny", "max_tokens": 1, **fields})
    assert (reply.status, reply.error["type"]) == (400, "exceed_context_size_error")
    # A lower bound: nothing was tokenised.
    assert "at least" in reply.error["message"]


# ------------------------------------------------------------------ embeddings


def test_vectors(client: Any) -> None:
    one = client.embeddings.create(model="encoder", input="Hello", encoding_format="float")
    assert len(one.data[0].embedding) == 32
    assert sum(value * value for value in one.data[0].embedding) == pytest.approx(1.0, abs=1e-5)
    several = client.embeddings.create(model="encoder", input=["Hello", "there", "Hello"])
    assert [each.index for each in several.data] == [0, 1, 2]
    assert several.data[2].embedding == pytest.approx(one.data[0].embedding, abs=1e-5)
    assert several.usage.prompt_tokens > one.usage.prompt_tokens > 0


def test_vectors_in_base64(server: RunningServer) -> None:
    asked = {"model": "encoder", "input": "Hello"}
    plain = server.post("/v1/embeddings", asked).document["data"][0]["embedding"]
    packed = server.post("/v1/embeddings", {**asked, "encoding_format": "base64"}).document["data"][0]["embedding"]
    assert struct.unpack(f"<{len(plain)}f", base64.b64decode(packed)) == pytest.approx(plain, abs=1e-7)


@pytest.mark.parametrize(
    "wrong",
    [
        {"input": []},
        {"input": ""},
        {"input": ["a", ""]},
        {"input": "a", "dimensions": 8},
        {"input": "a", "encoding_format": "int8"},
        {"input": ["a"] * 3000},
        {"input": "word " * 5000},
        {"input": "a", "model": "tiny"},
    ],
)
def test_vectors_that_cannot_be(server: RunningServer, wrong: dict[str, object]) -> None:
    reply = server.post("/v1/embeddings", {"model": "encoder", **wrong})
    assert reply.status == 400, reply.body


def test_a_model_for_vectors_answers_no_chat(server: RunningServer) -> None:
    reply = server.post("/v1/chat/completions", {"model": "encoder", "messages": HI})
    assert reply.status == 400


# ------------------------------------------------------------------ shapes and tools


def test_an_answer_obeys_a_schema(client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"mood": {"enum": ["good", "bad"]}, "likes": {"type": "array", "items": {"$ref": "#/$defs/t"},
                                                                     "minItems": 1, "maxItems": 2}},
        "required": ["mood", "likes"],
        "additionalProperties": False,
        "$defs": {"t": {"enum": ["tea", "milk"]}},
    }  # fmt: skip
    whole = client.chat.completions.create(
        model="tiny",
        messages=HI,
        max_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "mood", "schema": schema, "strict": True}},
    )
    document = json.loads(whole.choices[0].message.content)
    assert document["mood"] in ("good", "bad")
    assert set(document["likes"]) <= {"tea", "milk"}
    assert whole.choices[0].finish_reason == "stop"


def test_a_required_tool_is_called(client: Any) -> None:
    whole = client.chat.completions.create(
        model="tiny", messages=HI, max_tokens=200, tools=[LOOK], tool_choice="required"
    )
    (call,) = whole.choices[0].message.tool_calls
    assert call.function.name == "look"
    assert json.loads(call.function.arguments)["town"] in ("Bonn", "Ulm")
    assert whole.choices[0].finish_reason == "tool_calls"
    assert whole.choices[0].message.content is None


def test_a_named_tool_is_called_in_a_stream(server: RunningServer) -> None:
    reply = server.post(
        "/v1/chat/completions",
        {
            "model": "tiny",
            "messages": HI,
            "max_tokens": 200,
            "tools": [ADD, LOOK],
            "tool_choice": {"type": "function", "function": {"name": "look"}},
            "stream": True,
        },
    )
    role, *chunks, last, done = reply.events
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": None}
    pieces = [chunk["choices"][0]["delta"]["tool_calls"][0] for chunk in chunks]
    assert set(pieces[0]) == {"index", "id", "type", "function"}
    assert pieces[0]["function"]["name"] == "look"
    assert all(set(piece) == {"index", "function"} and set(piece["function"]) == {"arguments"} for piece in pieces[1:])
    assert json.loads("".join(piece["function"]["arguments"] for piece in pieces))["town"] in ("Bonn", "Ulm")
    assert last["choices"][0]["finish_reason"] == "tool_calls"
    assert done == "[DONE]"


def test_a_tool_whose_schema_recurses(client: Any) -> None:
    node = {
        "type": "object",
        "properties": {"name": {"enum": ["a", "b"]}, "child": {"$ref": "#/$defs/node"}},
        "required": ["name"],
        "additionalProperties": False,
    }
    parameters = {"$ref": "#/$defs/node", "$defs": {"node": node}}
    whole = client.chat.completions.create(
        model="tiny",
        messages=HI,
        max_tokens=300,
        tools=[{"type": "function", "function": {"name": "grow", "parameters": parameters}}],
        tool_choice="required",
    )
    (call,) = whole.choices[0].message.tool_calls
    assert call.function.name == "grow"


def test_tools_and_their_results_in_a_conversation(client: Any) -> None:
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"town": "Bonn"}'}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]  # fmt: skip
    whole = client.chat.completions.create(model="tiny", messages=messages, max_tokens=4, tools=[LOOK])
    assert whole.choices[0].message.role == "assistant"
    without = client.chat.completions.create(model="tiny", messages=messages, max_tokens=4)
    assert without.usage.prompt_tokens < whole.usage.prompt_tokens


@pytest.mark.parametrize(
    "schema", [{"type": "nothing"}, {"$ref": "#/$defs/none"}, {"type": "string", "pattern": "((((("}, {"minItems": "a"}]
)
def test_schemas_that_cannot_be_used(server: RunningServer, schema: dict[str, object]) -> None:
    asked = {
        "model": "tiny",
        "messages": HI,
        "max_tokens": 5,
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
    }
    reply = server.post("/v1/chat/completions", asked)
    assert reply.status in (200, 400), reply.body
