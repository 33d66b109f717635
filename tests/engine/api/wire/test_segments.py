"""Streamed answers as sequences of reasoning, text and tool calls, in the forms of Anthropic and Responses."""

from __future__ import annotations

import json

import msgspec

from engine.api.wire.answer import AnswerDelta, WrittenAnswer, finish_reason, warnings_of
from engine.api.wire.anthropic import MessageWriter, stop_reason
from engine.api.wire.api_request import ApiRequest
from engine.api.wire.completions import CompletionRequest, CompletionWriter
from engine.api.wire.openai_chat import read_chat
from engine.api.wire.responses import ResponsesRequest, ResponseWriter
from engine.chat.tool_calls import CallDelta
from engine.runtime.protocol.requests import ChatMessage
from engine.runtime.session.events import Done

PARTS = (
    AnswerDelta(reasoning="Hm"),
    AnswerDelta(reasoning="m."),
    AnswerDelta(content="I "),
    AnswerDelta(content="look.", calls=(CallDelta(0, "", "c1", "look"),)),
    AnswerDelta(calls=(CallDelta(0, '{"a"'), CallDelta(0, ":1}"), CallDelta(1, "", "c2", "look"), CallDelta(1, "{}"))),
)
DONE = Done(
    prompt_tokens=5,
    generated_tokens=7,
    prompt_tokens_per_second=1.0,
    generation_tokens_per_second=1.0,
    stop_reason="end_of_text",
    cached_tokens=2,
)
QUESTION = ApiRequest("", (ChatMessage("user", "Hi"),))


def events(data: bytes) -> list[dict[str, object]]:
    found = []
    for block in data.decode().removesuffix("\n\n").split("\n\n"):
        name, line = block.split("\n")
        document = json.loads(line.removeprefix("data: "))
        assert name == f"event: {document['type']}"
        found.append(document)
    return found


def whole() -> WrittenAnswer:
    answer = WrittenAnswer()
    for part in PARTS:
        answer.add(part)
    answer.done = DONE
    return answer


def test_a_message_with_all_kinds_of_blocks() -> None:
    writer = MessageWriter("1", "m")
    told = [writer.begin(0, None), *(writer.part(0, part) for part in PARTS), writer.end(0, DONE, has_calls=True)]
    blocks: dict[object, str] = {}
    kinds = []
    for event in events(b"".join([*told, writer.close([DONE])])):
        if event["type"] == "content_block_start":
            kinds.append(event["content_block"]["type"])  # type: ignore[index]
            blocks[event["index"]] = ""
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            assert isinstance(delta, dict)
            blocks[event["index"]] += next(str(value) for key, value in delta.items() if key != "type")
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert list(blocks.values()) == ["Hmm.", "I look.", '{"a":1}', "{}"]
    document = MessageWriter("1", "m").whole([whole()])
    assert document["stop_reason"] == "tool_use"
    assert document["usage"] == {
        "input_tokens": 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 2, "output_tokens": 7,
    }  # fmt: skip
    assert [block["type"] for block in document["content"]] == kinds  # type: ignore[attr-defined]


def test_a_response_with_all_kinds_of_items() -> None:
    request = ResponsesRequest(input="Hi")
    writer = ResponseWriter("1", "m", 0, QUESTION, request)
    told = [writer.begin(0, None), *(writer.part(0, part) for part in PARTS), writer.end(0, DONE, has_calls=True)]
    found = events(b"".join([*told, writer.close([DONE])]))
    added = [event["item"]["id"] for event in found if event["type"] == "response.output_item.added"]  # type: ignore[index]
    done = [event["item"]["id"] for event in found if event["type"] == "response.output_item.done"]  # type: ignore[index]
    assert added == done == ["rs_10", "msg_11", "fc_12", "fc_13"]
    last = found[-1]
    assert last["type"] == "response.completed"
    document = ResponseWriter("1", "m", 0, QUESTION, request).whole([whole()])
    assert last["response"] == document


def test_a_call_without_whole_arguments() -> None:
    answer = WrittenAnswer()
    answer.add(AnswerDelta(calls=(CallDelta(0, '{"a": ', "c", "look"),)))
    answer.done = DONE
    document = json.loads(json.dumps(MessageWriter("1", "m").whole([answer])))
    assert document["content"][0]["input"] == {}


def test_an_endless_repetition_is_an_answer_that_was_cut_with_a_warning() -> None:
    """OpenAI's and Anthropic's clients know no word of their own for it."""
    repeated = msgspec.structs.replace(DONE, stop_reason="repetition")
    assert finish_reason(repeated, has_calls=False) == "length"
    assert stop_reason(repeated, has_calls=False) == "max_tokens"
    (warning,) = warnings_of([repeated, DONE, repeated])["warnings"]
    assert "repeating itself" in warning
    assert warnings_of([DONE]) == {}
    document = ResponseWriter("1", "m", 0, QUESTION, ResponsesRequest(input="Hi")).whole(
        [WrittenAnswer(content="ha ha", done=repeated)]
    )
    assert document["status"] == "incomplete"
    completion = CompletionWriter("1", "m", 0, CompletionRequest(prompt="ha"), ["ha"])
    assert completion.whole([WrittenAnswer(content="ha ha", done=repeated)])["warnings"] == [warning]
    assert json.loads(completion.end(0, repeated, has_calls=False).removeprefix(b"data: "))["warnings"] == [warning]
    body = b'{"messages": [{"role": "user", "content": "Hi"}], "repetition": "continue"}'
    assert read_chat(body).settings["repetition"] == "continue"
