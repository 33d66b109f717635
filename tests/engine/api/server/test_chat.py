"""Chat completions over HTTP with a small model: by OpenAI's client, and as raw bytes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import psutil
import pytest

from engine.api.server import exchange as exchange_module
from engine.runtime.protocol.requests import Generate
from tests.support.api_server import RunningServer, entry_of, running
from tests.support.models import write_tiny_llama
from tests.support.patience import wait_until

HI: Any = [{"role": "user", "content": "Hello, how are you today?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny.gguf", n_layers=2)
    with running([entry_of(path)]) as started:
        started.warm("tiny")
        yield started


@pytest.fixture
def client(server: RunningServer) -> Iterator[Any]:
    # The types of the client are about what it sends; the tests are about what comes back.
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_whole_answer_and_its_stream_are_the_same(client: Any) -> None:
    asked: Any = {"model": "tiny", "messages": HI, "max_tokens": 12, "seed": 3, "temperature": 1.0}
    whole = client.chat.completions.create(**asked)
    assert whole.object == "chat.completion"
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 12
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 12
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == 1
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0


def test_a_stream_byte_for_byte(server: RunningServer) -> None:
    reply = server.post("/v1/chat/completions", {"messages": HI, "max_tokens": 4, "temperature": 0, "stream": True})
    first, *middle, last, done = reply.events
    assert done == "[DONE]"
    assert first["choices"] == [{"index": 0, "delta": {"role": "assistant", "content": None}, "finish_reason": None}]
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in middle)
    assert all(list(chunk["choices"][0]["delta"]) == ["content"] for chunk in middle)
    assert last["choices"] == [{"index": 0, "delta": {}, "finish_reason": "length"}]
    assert last["timings"]["predicted_n"] == 4
    assert {chunk["object"] for chunk in (first, *middle, last)} == {"chat.completion.chunk"}


def test_several_answers_to_one_question(client: Any) -> None:
    asked: Any = {"model": "tiny", "messages": HI, "max_tokens": 8, "n": 3, "seed": 1, "temperature": 2.0}
    whole = client.chat.completions.create(**asked)
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 3
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    collected = ["", "", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        collected[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert collected == texts


def test_probabilities(client: Any) -> None:
    whole = client.chat.completions.create(
        model="tiny",
        messages=HI,
        max_tokens=3,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 3
    for token in logprobs.content:
        assert token.top_logprobs[0].token == token.token
        assert len(token.top_logprobs) == 2
        assert token.logprob <= 0


@pytest.mark.parametrize("count", [1, 4, 16])
def test_requests_at_the_same_time_get_their_own_answers(server: RunningServer, count: int) -> None:
    def ask(number: int) -> tuple[int, object]:
        messages = [{"role": "user", "content": f"Number {number}"}]
        asked = {"messages": messages, "max_tokens": 6, "temperature": 0}
        reply = server.post("/v1/chat/completions", asked)
        return reply.status, reply.document["choices"][0]["message"]["content"]

    alone = [ask(number) for number in range(count)]
    with ThreadPoolExecutor(count) as threads:
        together = list(threads.map(ask, range(count)))
    assert {status for status, _ in together} == {200}
    assert together == alone


def test_a_client_that_goes_away_ends_its_answer(server: RunningServer) -> None:
    pool = server.server.pool
    (child,) = [each for each in psutil.Process().children() if "engine.runtime.child" in each.cmdline()]
    journal = server.server.journal
    body = b'{"messages": [{"role": "user", "content": "Hi"}], "stream": true, "max_tokens": 400}'
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"

    def leave() -> int:
        """Close the connection in the middle of an answer, and return the status of the answer."""
        ended = len(journal.ended)
        try:
            with server.raw() as connection:
                connection.sendall(head.encode() + body)
                received = b""
                while b"content" not in received:
                    received += connection.recv(4096)
                # Otherwise the answer could be complete before the server notices that the client has gone.
                child.suspend()
            wait_until(lambda: len(journal.ended) > ended)
        finally:
            child.resume()
        return journal.ended[-1].status

    # On a busy machine the child may have completed the answer before it is suspended. Such a try shows nothing.
    assert any(leave() == 499 for _ in range(20))

    def generates() -> bool:
        snapshots = [model.snapshot for model in pool._models.values()]
        return any(isinstance(run.request, Generate) for each in snapshots for run in each.requests)

    wait_until(lambda: not generates())


def test_a_prompt_that_is_too_long_is_told_with_both_numbers(server: RunningServer) -> None:
    reply = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 400}]})
    assert reply.status == 400
    assert reply.error["type"] == "exceed_context_size_error"
    assert reply.error["n_ctx"] == 512
    assert reply.error["n_prompt_tokens"] > 512
    streamed = server.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 400}], "stream": True}
    )
    assert (streamed.status, streamed.error) == (400, reply.error)


WRONG = {
    "no JSON": b"{",
    "no object": b"[]",
    "no messages": b"{}",
    "empty messages": b'{"messages": []}',
    "role": b'{"messages": [{"role": "judge", "content": "a"}]}',
    "content": b'{"messages": [{"role": "user", "content": 3}]}',
    "no content": b'{"messages": [{"role": "user"}]}',
    "part": b'{"messages": [{"role": "user", "content": [{"type": "video"}]}]}',
    "remote image": b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url":'
    b' {"url": "http://127.0.0.1/a.png"}}]}]}',
    "file image": b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url":'
    b' {"url": "file:///etc/passwd"}}]}]}',
    "broken image": b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url":'
    b' {"url": "data:image/png;base64,AAAA"}}]}]}',
    "n": b'{"messages": [{"role": "user", "content": "a"}], "n": 1000}',
    "n is 0": b'{"messages": [{"role": "user", "content": "a"}], "n": 0}',
    "temperature": b'{"messages": [{"role": "user", "content": "a"}], "temperature": -1}',
    "top_p": b'{"messages": [{"role": "user", "content": "a"}], "top_p": 7}',
    "top_logprobs": b'{"messages": [{"role": "user", "content": "a"}], "top_logprobs": 3}',
    "logit_bias": b'{"messages": [{"role": "user", "content": "a"}], "logit_bias": {"5": 1}}',
    "functions": b'{"messages": [{"role": "user", "content": "a"}], "functions": [{"name": "f"}]}',
    "audio": b'{"messages": [{"role": "user", "content": "a"}], "modalities": ["audio"]}',
    "tool": b'{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}',
    "tool_choice": b'{"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"}',
    "named tool": b'{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function":'
    b' {"name": "f"}}], "tool_choice": {"type": "function", "function": {"name": "g"}}}',
    "schema": b'{"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_schema"}}',
    "format": b'{"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "xml"}}',
    "deep schema": b'{"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_schema",'
    b' "json_schema": {"schema": ' + b'{"items":' * 200 + b"{}" + b"}" * 200 + b"}}}",
    "deep body": b'{"messages": ' + b"[" * 100_000,
    "half a surrogate pair": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "no UTF-8": b'{"messages": [{"role": "user", "content": "\xff"}]}',
    "keep_alive": b'{"messages": [{"role": "user", "content": "a"}], "keep_alive": "soon"}',
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_followed(server: RunningServer, case: str) -> None:
    reply = server.post("/v1/chat/completions", WRONG[case])
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error"), reply.body
    assert reply.error["message"]


def test_models(client: Any, server: RunningServer) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny"
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="other", messages=HI)
    assert caught.value.code == "model_not_found"
    assert server.get("/v1/models/a/b").status == 404
    assert server.get("/v1/nothing").status == 404
    assert server.get("/v1/chat/completions").status == 405


def test_health_status_and_metrics(server: RunningServer) -> None:
    assert server.get("/health").document == {"status": "ok"}
    server.post("/v1/chat/completions", {"messages": HI, "max_tokens": 2})
    status = server.get("/v1/layerdeck/status").document
    state = status["models"]["tiny"]
    assert state["state"] == "loaded"
    assert state["n_ctx_seq"] == 512
    assert state["layout"]["runs"] == [{"device": "CPU", "layers": "0-1"}]
    assert state["devices"][0]["grade"] == "measured"
    text = server.get("/metrics").body.decode()
    assert "layerdeck_models_loaded 1\n" in text
    assert 'layerdeck_device_bytes{model="tiny",device="CPU"} ' in text
    assert "Hi" not in text


def test_tokens_and_back(server: RunningServer) -> None:
    reply = server.post("/tokenize", {"content": "Grüße", "with_pieces": True}).document
    assert "".join(each["piece"] for each in reply["tokens"])
    tokens = server.post("/tokenize", {"content": "Grüße"}).document["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).document == {"content": "Grüße"}
    assert server.post("/detokenize", {"tokens": [1 << 30]}).status == 400
    assert server.post("/detokenize", {"tokens": [-1]}).status == 400


def test_a_stream_in_which_nothing_happens_has_pings(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "PING_S", 0.05)
    (child,) = [each for each in psutil.Process().children() if "engine.runtime.child" in each.cmdline()]
    body = b'{"messages": [{"role": "user", "content": "Hi"}], "stream": true, "max_tokens": 2}'
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    with server.raw() as connection:
        child.suspend()
        try:
            connection.sendall(head.encode() + body)
            received = b""
            while received.count(b": ping\n\n") < 3:
                received += connection.recv(4096)
        finally:
            child.resume()
        assert b"content-type: text/event-stream" in received
        while b"[DONE]" not in received:
            received += connection.recv(4096)
    assert b'"finish_reason":"length"' in received
