"""Cases of llama-server's own tests that our server must also pass, with small models.

README.md has the table. Cases that other tests here cover are not repeated.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gguf
import msgspec
import openai
import pytest

from engine.api.wire.names import ModelEntry
from engine.devices.device import Rig
from engine.planning.plan.decisions.context_length import default_context
from engine.runtime.session.load_spec import LoadSpec
from tests.support.api_server import CONTEXT, RunningServer, entry_of, plan_on_cpu, running
from tests.support.models import write_tiny_encoder, write_tiny_llama

STORY = "There was a boat with a red sail. "
TALK: Any = [{"role": "system", "content": "Sea"}, {"role": "user", "content": "Which boat is the best one?"}]
THINKING = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}{% endfor %}<assistant>"
)


def plan(entry: ModelEntry, rig: Rig) -> LoadSpec:
    from engine.model.gguf.reader import read_model

    if entry.id == "encoder":
        return plan_on_cpu(entry, rig, default_context(read_model(entry.path)))
    # One slot: what is cached then depends on the last request alone.
    context = msgspec.structs.replace(CONTEXT, n_ctx=512, n_seq_max=1) if entry.id == "single" else CONTEXT
    return plan_on_cpu(entry, rig, context)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    tiny, single = (write_tiny_llama(folder / f"{name}.gguf", n_layers=2) for name in ("tiny", "single"))
    thinker = write_tiny_llama(
        folder / "thinker.gguf", n_layers=1, extra_metadata={"tokenizer.chat_template": THINKING}
    )
    encoder = write_tiny_encoder(folder / "encoder.gguf", pooling=gguf.PoolingType.MEAN)
    with running([*map(entry_of, (tiny, single, thinker, encoder))], plan=plan) as started:
        started.warm("tiny", "single", "thinker")
        assert started.post("/v1/embeddings", {"model": "encoder", "input": "a"}).status == 200
        yield started


def chat(server: RunningServer, **further: Any) -> Any:
    asked = {"model": "tiny", "messages": TALK, "max_tokens": 8, "temperature": 0, **further}
    reply = server.post("/v1/chat/completions", asked)
    assert reply.status == 200, reply.body
    return reply.document


# ------------------------------------------------------------------ chat


def test_parts_of_a_text_are_one_message(server: RunningServer) -> None:
    parts = [{"type": "text", "text": "Which boat"}, {"type": "text", "text": "is the best one?"}]
    whole = chat(server, messages=[TALK[0], {"role": "user", "content": parts}])
    assert whole["usage"] == chat(server)["usage"] | {"prompt_tokens_details": whole["usage"]["prompt_tokens_details"]}


def test_cached_tokens_are_the_common_beginning(server: RunningServer) -> None:
    def cached(text: str) -> tuple[int, int]:
        usage = chat(server, model="single", messages=[{"role": "user", "content": text}])["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    n_tokens, _ = cached("1 2 3 4 5 6")
    again, all_but_one = cached("1 2 3 4 5 6")
    _, fewer = cached("1 2 3 9 9 9")
    assert (again, all_but_one) == (n_tokens, n_tokens - 1)
    assert 0 < fewer < all_but_one


def test_an_answer_goes_on_from_a_last_message_of_the_assistant(server: RunningServer) -> None:
    begun = [*TALK, {"role": "assistant", "content": "It is the"}]
    prompt = chat(server)["usage"]["prompt_tokens"]
    # No further turn begins: the prompt grows by the letters alone, each of which is a token of this model.
    assert chat(server, messages=begun)["usage"]["prompt_tokens"] == prompt + len("It is the")
    parts = [{"type": "text", "text": "It is"}, {"type": "text", "text": "the"}]
    chat(server, messages=[*TALK, {"role": "assistant", "content": parts}])
    message = {"model": "tiny", "max_tokens": 4, "messages": begun[1:]}
    assert server.post("/v1/messages", message).document["content"][0]["type"] == "text"


@pytest.mark.parametrize(
    ("format_", "text"),
    [
        ({"type": "json_object", "schema": {"const": "42"}}, '"42"'),
        ({"type": "json_schema", "json_schema": {"schema": {"const": "ahoy"}}}, '"ahoy"'),
        ({"type": "json_schema", "schema": {"enum": [7]}}, "7"),
    ],
)
def test_a_format_has_its_schema_at_any_of_these_places(
    server: RunningServer, format_: dict[str, Any], text: str
) -> None:
    assert chat(server, response_format=format_, max_tokens=12)["choices"][0]["message"]["content"].strip() == text


def test_a_schema_or_a_grammar_of_its_own(server: RunningServer) -> None:
    assert chat(server, json_schema={"const": "42"})["choices"][0]["message"]["content"].strip() == '"42"'
    assert chat(server, grammar='root ::= "a"{5,5}')["choices"][0]["message"]["content"] == "aaaaa"


@pytest.mark.parametrize(
    "wrong",
    [
        {"grammar": "root ::= this is (not a grammar"},
        {"response_format": {"type": "sound"}},
        {"response_format": {"type": "json_object", "schema": 123}},
        {"response_format": {"type": "json_object", "schema": {"type": 123}}},
        {"response_format": {"type": "json_object", "schema": {"type": "hiccup"}}},
        {"messages": None},
        {"messages": "text"},
        {"messages": [123]},
        {"messages": [{}]},
        {"messages": [{"role": 123}]},
        {"messages": [{"role": "system", "content": 123}]},
        {"messages": [{"role": "system", "content": "a"}, {}]},
    ],
)
def test_what_is_no_request(server: RunningServer, wrong: dict[str, Any]) -> None:
    reply = server.post("/v1/chat/completions", {"model": "tiny", "messages": TALK, "max_tokens": 4, **wrong})
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")


def test_tokens_with_probabilities_are_the_whole_text(server: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        asked: Any = {"model": "tiny", "messages": TALK, "max_tokens": 5, "temperature": 0, "logprobs": True}
        whole = client.chat.completions.create(**asked, top_logprobs=10)
        entries: Any = whole.choices[0].logprobs
        assert "".join(each.token for each in entries.content) == whole.choices[0].message.content
        assert all(each.logprob <= 0 and each.bytes and len(each.top_logprobs) == 10 for each in entries.content)
        streamed: Any = client.chat.completions.create(**asked, top_logprobs=10, stream=True)
        choices = [chunk.choices[0] for chunk in streamed]
        tokens = [each.token for choice in choices if choice.logprobs for each in choice.logprobs.content]
        assert tokens == [each.token for each in entries.content]


def test_a_stream_with_usage_has_timings_at_its_end(server: RunningServer) -> None:
    asked = {"model": "tiny", "messages": TALK, "max_tokens": 4, "stream": True}
    reply = server.post("/v1/chat/completions", {**asked, "stream_options": {"include_usage": True}})
    first, *_, usage, done = reply.events
    assert "timings" not in first
    assert done == "[DONE]"
    assert (usage["choices"], usage["usage"]["completion_tokens"], usage["timings"]["predicted_n"]) == ([], 4, 4)
    assert usage["timings"]["predicted_per_second"] > 0


def test_addresses_without_v1(server: RunningServer) -> None:
    assert server.get("/models").document["data"]
    assert server.post("/chat/completions", {"model": "tiny", "messages": TALK, "max_tokens": 1}).status == 200
    assert server.post("/responses", {"model": "tiny", "input": "Hi", "max_output_tokens": 1}).status == 200
    assert server.post("/embeddings", {"model": "encoder", "input": "Hi"}).status == 200


# ------------------------------------------------------------------ completions


def complete(server: RunningServer, **further: Any) -> Any:
    asked = {"model": "tiny", "prompt": STORY, "max_tokens": 8, "temperature": 0, **further}
    reply = server.post("/v1/completions", asked)
    assert reply.status == 200, reply.body
    return reply.document


def test_one_seed_is_one_answer_and_others_are_others(server: RunningServer) -> None:
    same = {complete(server, seed=42, temperature=1.0)["choices"][0]["text"] for _ in range(4)}
    others = {complete(server, seed=seed, temperature=1.0)["choices"][0]["text"] for seed in range(4)}
    assert len(same) == 1
    assert len(others) == 4


def test_tokens_as_a_prompt_are_its_text(server: RunningServer) -> None:
    tokens = server.post("/tokenize", {"model": "tiny", "content": STORY}).document["tokens"]
    texts = [each["text"] for each in complete(server, prompt=[tokens, STORY])["choices"]]
    assert texts[0] == texts[1] == complete(server, prompt=tokens)["choices"][0]["text"]


@pytest.mark.parametrize("count", [2, 4, 6])
def test_more_requests_than_slots_are_all_answered(server: RunningServer, count: int) -> None:
    prompts = [f"{STORY}{number}" for number in range(count)]
    alone = [complete(server, prompt=prompt)["choices"][0]["text"] for prompt in prompts]
    with ThreadPoolExecutor(count) as threads:
        together = list(threads.map(lambda prompt: complete(server, prompt=prompt)["choices"][0]["text"], prompts))
    assert together == alone


def test_prompts_that_come_and_go_are_counted_whole(server: RunningServer) -> None:
    maker = random.Random(3)
    for _ in range(12):
        # One token for each letter, and one that begins the text.
        text = " ahoy" * (20 + maker.randrange(5))
        found = complete(server, prompt=text, max_tokens=maker.randrange(1, 6))
        timings = found["timings"]
        assert timings["prompt_n"] + timings["cache_n"] == found["usage"]["prompt_tokens"]
        assert timings["predicted_n"] == found["usage"]["completion_tokens"]


def test_an_answer_ends_where_the_context_does(server: RunningServer) -> None:
    found = complete(server, model="single", prompt="Hi", max_tokens=-1)
    assert found["choices"][0]["finish_reason"] == "length"
    # The last token is in the answer, and needs no place in the context.
    assert found["usage"]["total_tokens"] == 512 + 1
    long = server.post("/v1/completions", {"model": "single", "prompt": STORY * 30})
    assert (long.status, long.error["type"], long.error["n_ctx"]) == (400, "exceed_context_size_error", 512)


# ------------------------------------------------------------------ tokens and vectors


def test_tokens_with_a_beginning_and_with_pieces(server: RunningServer) -> None:
    text = "A string with 媽 and 🤗"
    plain = server.post("/tokenize", {"model": "tiny", "content": text}).document["tokens"]
    begun = server.post("/tokenize", {"model": "tiny", "content": text, "add_special": True}).document["tokens"]
    assert begun == [1, *plain]
    pieces = server.post("/tokenize", {"model": "tiny", "content": text, "with_pieces": True}).document["tokens"]
    assert [each["id"] for each in pieces] == plain
    assert all(each["piece"] for each in pieces)


def test_tokens_of_texts_are_counted(server: RunningServer) -> None:
    def usage(texts: Any) -> dict[str, int]:
        document = server.post("/v1/embeddings", {"model": "encoder", "input": texts}).document
        return dict(document["usage"])

    one = usage("ahoy")
    assert one["prompt_tokens"] == one["total_tokens"] > 0
    assert usage(["ahoy", "ahoy"])["prompt_tokens"] == 2 * one["prompt_tokens"]


def test_one_text_has_one_vector(server: RunningServer) -> None:
    data = server.post("/v1/embeddings", {"model": "encoder", "input": ["ahoy"] * 5}).document["data"]
    assert [each["index"] for each in data] == list(range(5))
    assert all(each["embedding"] == pytest.approx(data[0]["embedding"], abs=1e-5) for each in data)


# ------------------------------------------------------------------ Anthropic's and Responses


def test_a_message_begins_with_the_size_of_its_prompt(server: RunningServer) -> None:
    asked = {"model": "tiny", "max_tokens": 4, "messages": TALK[1:], "stream": True}
    start, *_, delta, _ = server.post("/v1/messages", asked).events
    usage = start["message"]["usage"]
    counted = server.post("/v1/messages/count_tokens", {**asked, "stream": False}).document["input_tokens"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted
    assert delta["usage"]["output_tokens"] == 4


def test_thoughts_of_the_history_are_in_the_prompt(server: RunningServer) -> None:
    call = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "fog"}]}

    def counted(blocks: list[dict[str, Any]]) -> int:
        messages = [{"role": "user", "content": "Look"}, {"role": "assistant", "content": blocks}, result]
        asked = {"model": "thinker", "messages": messages}
        return int(server.post("/v1/messages/count_tokens", asked).document["input_tokens"])

    thought = {"type": "thinking", "thinking": "I should look first.", "signature": ""}
    assert counted([thought, call]) == counted([call]) + len("<think>I should look first.</think>")


@pytest.mark.parametrize("further", [{}, {"is_error": True}])
def test_results_of_tools_beside_a_text(server: RunningServer, further: dict[str, Any]) -> None:
    call = {"type": "tool_use", "id": "c1", "name": "look", "input": {"town": "Ulm"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "fog", **further}
    messages = [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "text", "text": "Here it is:"}, result]},
    ]
    asked = {"model": "tiny", "max_tokens": 4, "messages": messages, "metadata": {"user_id": "a"}, "top_k": 5}
    assert server.post("/v1/messages", asked).document["content"][0]["type"] == "text"


def test_a_stream_of_a_response_ends_with_what_it_said(server: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        stream: Any = client.responses.create(model="tiny", input=TALK, max_output_tokens=8, stream=True)
        events = list(stream)
    ids = {event.response.id for event in events if hasattr(event, "response")}
    items = {event.item_id for event in events if hasattr(event, "item_id")}
    assert len(ids) == len(items) == 1
    assert items.pop().startswith("msg_")
    # The limit cut it: OpenAI's word for that is incomplete, where llama.cpp says completed.
    assert events[-1].type == "response.incomplete"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert events[-1].response.output_text == text
