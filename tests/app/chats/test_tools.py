"""Tools in the window: a real model calls them by a grammar, a person enters results, and a restart keeps them."""

from __future__ import annotations

import json
from collections.abc import Mapping

import msgspec
import pytest

from app.chats.shown_messages import shown_messages
from engine.chat.message import Message
from engine.chat.tools import NO_RESULT
from engine.chat.tree import tree_of
from engine.runtime.protocol.requests import ToolCall
from tests.app.chats.bench import SHORT, Bench
from widgets.chat.shown import ShownMessage

TOOLS = json.dumps(
    [{"type": "function", "function": {"name": "look", "parameters": {"properties": {"town": {"type": "string"}}}}}]
)


def call(town: str) -> str:
    return f'<tool_call>{{"name": "look", "arguments": {{"town": "{town}"}}}}</tool_call>'


def forced(*towns: str) -> Mapping[str, object]:
    """Return settings with which every answer is these calls."""
    text = json.dumps("".join(map(call, towns)))
    return {**SHORT, "max_tokens": 400, "grammar": f"root ::= {text}"}


@pytest.fixture
def called(bench: Bench) -> Bench:
    """A loaded model that has called a tool twice in one answer, and will not do so again."""
    bench.load(n_ctx=4096)
    change(bench, tools=TOOLS, settings=forced("Bonn", "Ulm"))
    bench.say("Where is it warm?")
    change(bench, settings=dict(SHORT))
    return bench


def change(bench: Bench, **values: object) -> None:
    bench.conversation.change_chat(msgspec.structs.replace(bench.conversation.chat, **values))


def towns(message: Message) -> list[str]:
    return [json.loads(each.arguments)["town"] for each in message.calls]


def test_calls_wait_for_all_results_and_the_model_goes_on(called: Bench) -> None:
    conversation = called.conversation
    answer = called.path[-1]
    assert (answer.content, towns(answer)) == ("", ["Bonn", "Ulm"])
    first, second = conversation.missing_results
    assert conversation.give_result(second.id, "8 degrees")
    assert not conversation.is_answering
    assert [each.id for each in conversation.missing_results] == [first.id]
    assert not conversation.give_result(second.id, "9 degrees"), "it has its result"
    assert conversation.give_result(first.id, "12 degrees")
    reply = called.answered()
    assert [each.role for each in called.path] == ["user", "assistant", "tool", "tool", "assistant"]
    assert reply.state == "done", reply.note
    asked = conversation.prompt_messages()
    assert [each.content for each in asked if "degrees" in each.content] == [
        "<tool_response>\n12 degrees\n</tool_response>",
        "<tool_response>\n8 degrees\n</tool_response>",
    ], "in the order of the calls; the small model's template knows no tools"
    assert called.reopened(conversation.chat.id) == called.path


def test_another_question_or_a_wish_fills_in_what_is_missing(called: Bench) -> None:
    conversation = called.conversation
    answer = called.path[-1]
    conversation.type_result(answer.id, answer.calls[0].id, "12 degr")
    conversation.answer_results()
    called.answered()
    assert [each.content for each in called.path[2:4]] == ["12 degr", NO_RESULT]
    assert conversation.chat.results == {}
    conversation.select(answer.id)
    conversation.regenerate(answer.id)
    called.answered()


def test_a_question_while_calls_wait_comes_after_results(called: Bench) -> None:
    called.say("Never mind. And now?")
    assert [(each.role, each.content) for each in called.path[2:5]] == [
        ("tool", NO_RESULT),
        ("tool", NO_RESULT),
        ("user", "Never mind. And now?"),
    ]


def test_typed_results_and_calls_are_there_after_a_restart(called: Bench) -> None:
    conversation, answer = called.conversation, called.path[-1]
    chat = conversation.chat.id
    conversation.type_result(answer.id, answer.calls[1].id, "8 deg")
    called.restart()
    called.wait(lambda: called.desk.archive.chat(chat) is not None)
    called.open_chat(chat)
    assert list(called.conversation.chat.results.values()) == ["8 deg"]
    assert called.conversation.missing_results == answer.calls
    assert called.conversation.chat.tools == TOOLS
    first, second = answer.calls
    assert called.conversation.give_result(first.id, "12"), "one of two needs no model"
    assert not called.conversation.give_result(second.id, "8"), "the last one needs a loaded model"
    assert list(called.conversation.chat.results.values()) == ["8 deg"]


def test_an_edited_result_is_another_version_with_another_answer(called: Bench) -> None:
    conversation = called.conversation
    for each in conversation.missing_results:
        conversation.give_result(each.id, "12 degrees")
    called.answered()
    before = called.path
    conversation.edit_result(before[2].id, "30 degrees")
    called.answered()
    assert [each.content for each in called.path[2:4]] == ["30 degrees", "12 degrees"]
    assert conversation.tree.versions(before[2].id) == (before[2].id, called.path[2].id)
    conversation.step_version(called.path[2].id, -1)
    assert called.path == before


def test_a_branch_and_the_next_conversation_have_the_tools(called: Bench) -> None:
    conversation = called.conversation
    conversation.branch(called.path[-1].id)
    assert conversation.chat.tools == TOOLS
    assert towns(called.path[-1]) == ["Bonn", "Ulm"]
    conversation.begin()
    assert conversation.chat.tools == TOOLS


def test_faulty_tools_are_kept_and_not_used(bench: Bench) -> None:
    change(bench, tools='[{"type"')
    assert bench.conversation.tools_error.startswith("The tools are not JSON: ")
    assert bench.conversation.tools.tools == ()
    assert bench.conversation.counted_chat().tools == ""


def test_calls_and_results_are_shown(called: Bench) -> None:
    conversation = called.conversation
    first, second = conversation.missing_results
    conversation.type_result(called.path[-1].id, second.id, "8 deg")
    conversation.give_result(first.id, "12 **degrees**")

    def shown() -> tuple[ShownMessage, ...]:
        return shown_messages(conversation.tree, conversation.open_message, (), conversation.chat.results)

    _, answer, result = shown()
    assert [(each.name, each.wants_result, each.draft) for each in answer.calls] == [
        ("look", False, ""),
        ("look", True, "8 deg"),
    ]
    assert answer.source.startswith("Call of look\n```json\n")
    assert not answer.can_continue
    assert (result.role, result.speaker, result.text) == ("tool", "Result 1 of look", "```\n12 **degrees**\n```")
    assert (result.source, result.can_answer) == ("12 **degrees**", False)


def test_a_conversation_that_ends_with_results_can_be_answered() -> None:
    talk = tree_of(
        (
            Message(id="q", role="user", content="Where?"),
            Message(id="a", role="assistant", content="", parent="q", calls=(ToolCall("c1", "look", "{}"),)),
            Message(id="r", role="tool", content="", parent="a", call_id="c1"),
        ),
        "r",
    )
    *_, result = shown_messages(talk, None)
    assert (result.speaker, result.can_answer) == ("Result of look", True)
