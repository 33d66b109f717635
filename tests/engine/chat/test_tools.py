"""Tools of conversations: definitions, calls and results in prompts, answers, database and files."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.chat.answer import AnswerOptions, Append, Finish, SendRequest, new_answer
from engine.chat.asking import SYSTEM, chat_messages, messages_by_id
from engine.chat.conversation import Conversation
from engine.chat.exports import as_html, as_json, as_openai, copied_text
from engine.chat.imports import parse_conversations
from engine.chat.llama_ui import as_jsonl
from engine.chat.markdown_file import as_markdown
from engine.chat.message import Message
from engine.chat.store import ChatStore
from engine.chat.tool_calls import CallDelta
from engine.chat.tools import (
    MAX_CHARACTERS,
    MAX_TOOLS,
    DefinitionError,
    ToolUse,
    missing_results,
    pretty_arguments,
    read_tools,
    result_message,
)
from engine.chat.tree import MessageTree, branched, edited_result, tree_of, without_turn
from engine.runtime.protocol.requests import ToolCall
from tests.engine.chat.test_answer import done

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"town": {"type": "string"}}}}}
TOOLS = json.dumps([LOOK])
HERMES = "{% if tools %}<tool_call>{% endif %}"
BONN = ToolCall("c1", "look", '{"town": "Bonn"}')
ULM = ToolCall("c2", "look", '{"town": "Ulm"}')
QUESTION = Message(id="q", role="user", content="Where is it warm?")
CALLED = Message(id="a", role="assistant", content="I look.", parent="q", calls=(BONN, ULM))
OF_ULM = Message(id="r2", role="tool", content="8 degrees", parent="a", call_id="c2")
OF_BONN = Message(id="r1", role="tool", content="12 degrees", parent="r2", call_id="c1")
ANSWER = Message(id="b", role="assistant", content="In Bonn.", parent="r1")
TALK = tree_of((QUESTION, CALLED, OF_ULM, OF_BONN, ANSWER), "b")


# ------------------------------------------------------------------ definitions


def tool(name: str, **parameters: object) -> str:
    return json.dumps([{"type": "function", "function": {"name": name, "parameters": parameters}}])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[{]", "The tools are not JSON: "),
        ("[" * 100_000, "The tools are nested too deeply"),
        ('{"a": 1}', "The tools are not a JSON list"),
        ('[{"type": "function"}]', r"tools\[0\] must be a function with a name of 1 to 128 characters"),
        (json.dumps([LOOK, LOOK]), "Two tools have the name look; rename one of them"),
        (tool("f", **{"$ref": "#"}), "The schema of the tool f contains itself through required properties"),
        (tool("f", **{"$ref": "#/$defs/none"}), "which does not exist"),
        (" " * MAX_CHARACTERS + "[]", "at most 262144 are allowed"),
        (json.dumps([LOOK] * (MAX_TOOLS + 1)), "There are 257 tools"),
        (tool("f", **{"$ref": "#/anyOf/" + "9" * 5000, "anyOf": [{}]}), "which does not exist"),
        (r'[{"function": {"name": "\ud800"}}]', "lone surrogate"),
        ('[{"function": {"name": "f", "description": ' + "[" * 80 + "]" * 80 + "}}]", "more than 64 nested levels"),
        ('[{"function": {"name": "f", "parameters": 1}}]', "parameters is not a JSON schema object"),
    ],
)
def test_definitions_that_cannot_be_used_are_refused_in_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(DefinitionError, match=sentence) as refused:
        read_tools(text)
    assert len(str(refused.value)) < 300


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.just("#") | st.just("#/$defs/a"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["$ref", "$defs", "a", "properties", "required", "items", "minItems", "anyOf", "allOf"]),
            inner,
        )
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["name", "parameters", "description"]), VALUES), st.booleans())
def test_any_definition_is_taken_or_refused(function: dict[str, object], is_named: bool) -> None:
    named = {**function, "name": "f"} if is_named else function
    try:
        (found,) = read_tools(json.dumps([{"type": "function", "function": named}]))
    except DefinitionError:
        return
    assert found["function"]["name"] == named["name"]


def test_a_whole_request_is_taken_for_its_tools() -> None:
    assert read_tools(json.dumps({"model": "x", "tools": [LOOK]})) == (LOOK,)
    assert read_tools(" \n") == ()


# ------------------------------------------------------------------ prompts


def test_a_template_with_tools_gets_calls_and_results_in_the_order_of_the_calls() -> None:
    question, called, *results, answer = chat_messages("", TALK.path, ToolUse((LOOK,), HERMES))
    assert (question.content, called.calls, answer.content) == (QUESTION.content, (BONN, ULM), "In Bonn.")
    assert [(each.role, each.content, each.call_id, each.name) for each in results] == [
        ("tool", "12 degrees", "c1", "look"),
        ("tool", "8 degrees", "c2", "look"),
    ]


def test_a_template_without_tools_gets_them_in_the_system_prompt_and_as_text() -> None:
    found = messages_by_id("", TALK.path, ToolUse((LOOK,), "{{ messages }}"))
    assert list(found) == [SYSTEM, "q", "a", "r1", "r2", "b"]
    assert '"name": "look"' in found[SYSTEM].content
    assert found["a"].content.startswith('I look.\n<tool_call>\n{"name": "look", "arguments": {"town": "Bonn"}}')
    assert (found["r1"].role, found["r1"].content) == ("user", "<tool_response>\n12 degrees\n</tool_response>")
    first = chat_messages("Be brief.", TALK.path, ToolUse((LOOK,), ""))[0]
    assert first.content.startswith("Be brief.\n\nYou can call")


def test_calls_are_in_the_prompt_though_the_tools_were_removed() -> None:
    assert chat_messages("", TALK.path, ToolUse((), HERMES))[1].calls == (BONN, ULM)


def test_a_call_that_was_cut_off_is_in_no_prompt() -> None:
    cut_off = Message(id="a", role="assistant", content="", parent="q", calls=(ToolCall("c1", "look", '{"to'),))
    again = Message(id="q2", role="user", content="Again?", parent="a")
    assert [each.content for each in chat_messages("", (QUESTION, cut_off, again))] == ["Again?"]
    assert missing_results((QUESTION, cut_off)) == ()
    assert pretty_arguments(cut_off.calls[0]) == '{"to'


def test_a_result_without_a_known_call_is_a_question() -> None:
    alone = Message(id="r", role="tool", content="12", parent="q", call_id="c9")
    assert [each.role for each in chat_messages("", (QUESTION, alone), ToolUse((), HERMES))] == ["user", "user"]


# ------------------------------------------------------------------ answers


def test_calls_are_read_from_the_stream_and_stored_piece_by_piece() -> None:
    run = new_answer("c", tree_of((QUESTION,), "q"), AnswerOptions(tools=ToolUse((LOOK,), HERMES)))
    run.begin()
    (ask,) = run.restored()
    assert isinstance(ask, SendRequest)
    assert ask.request.template_input.tools == json.dumps([LOOK])
    assert "<tool_call>" in ask.request.marks
    run.token("<think>hm</think>I look.\n<tool_call>\n")
    run.token('{"name": "look", "arguments": {"town"')
    (piece,) = run.flush()
    assert isinstance(piece, Append)
    assert (piece.content, piece.reasoning, [each.name for each in piece.calls]) == ("I look.", "hm", ["look", ""])
    run.written(piece)
    assert run.message.calls[0].arguments == '{"town"'
    run.token(': "Bonn"}}\n</tool_call>')
    *_, finish = run.done(done())
    assert isinstance(finish, Finish)
    (call,) = finish.message.calls
    assert (call.name, call.arguments, finish.message.content) == ("look", '{"town": "Bonn"}', "I look.")


def test_without_tools_nothing_is_looked_for() -> None:
    run = new_answer("c", tree_of((QUESTION,), "q"), AnswerOptions())
    run.begin()
    run.restored()
    text = '<tool_call>{"name": "look"}</tool_call>'
    run.token(text)
    run.done(done())
    assert (run.message.content, run.message.calls) == (text, ())


def test_a_lost_engine_keeps_the_call_so_far() -> None:
    run = new_answer("c", tree_of((QUESTION,), "q"), AnswerOptions(tools=ToolUse((LOOK,), HERMES)))
    run.begin()
    run.restored()
    run.token('<tool_call>{"name": "look", "arguments": {"to')
    run.fail("The engine ended.")
    assert (run.message.state, run.message.calls[0].arguments) == ("interrupted", '{"to')


# ------------------------------------------------------------------ results and the tree


def test_all_calls_need_a_result() -> None:
    assert missing_results(TALK.path_to("a")) == (BONN, ULM)
    assert missing_results(TALK.path_to("r2")) == (BONN,)
    assert missing_results(TALK.path_to("r1")) == ()
    assert missing_results(TALK.path) == ()
    writing = msgspec.structs.replace(CALLED, state="writing")
    assert missing_results((QUESTION, writing)) == ()


def test_an_edited_result_keeps_the_other_results() -> None:
    tree = edited_result(TALK, "r2", "9 degrees", created_ms=5)
    assert [(each.role, each.content) for each in tree.path[2:]] == [("tool", "9 degrees"), ("tool", "12 degrees")]
    assert missing_results(tree.path) == ()
    assert tree.versions("r2") == ("r2", tree.path[2].id)


def test_a_branch_has_the_calls_and_a_deleted_turn_takes_results_along() -> None:
    copied = branched(TALK, "r1")
    assert [(each.calls, each.call_id) for each in copied.path] == [((), ""), ((BONN, ULM), ""), ((), "c2"), ((), "c1")]
    assert without_turn(TALK, "b").messages == {}


# ------------------------------------------------------------------ database


def test_calls_and_results_are_stored_and_found(tmp_path: Path) -> None:
    chat = Conversation(id="c", title="Weather", tools="[broken", results={"a/c1": "typed"})
    store = ChatStore(tmp_path / "chats.sqlite3", makes_copies=False)
    store.save(chat)
    store.apply("c", MessageTree(), TALK).result()
    assert store.tree("c").path == TALK.path
    assert store.conversation("c") == msgspec.structs.replace(chat, leaf="b", updated_ms=found_time(store))
    (hit,) = store.search('"town": "Ulm"')
    assert (hit.message, hit.snippet[hit.begin : hit.end]) == ("a", '"town": "Ulm"')
    assert [hit.message for hit in store.search("degrees")] == ["r1", "r2"]
    assert [hit.message for hit in store.search("ok")] == ["a"]
    assert store.search("Hamburg") == ()
    store.close()


def found_time(store: ChatStore) -> int:
    found = store.conversation("c")
    assert found is not None
    return found.updated_ms


def test_a_call_that_was_being_written_is_there_after_a_crash(tmp_path: Path) -> None:
    store = ChatStore(tmp_path / "chats.sqlite3", makes_copies=False)
    store.save(Conversation(id="c"))
    writing = Message(id="a", role="assistant", content="", parent="q", state="writing")
    store.apply("c", MessageTree(), tree_of((QUESTION, writing), "a"))
    store.append("a", "I look.", calls=(CallDelta(0, "", "c1", "look"), CallDelta(0, '{"town"')))
    store.append("a", calls=(CallDelta(0, ': "Bonn"}'),)).result()
    found = store.tree("c").path[-1]
    assert (found.content, found.calls) == ("I look.", (BONN,))
    store.close()


# ------------------------------------------------------------------ files

CHAT = Conversation(id="c", title="Weather", system="Be brief.", tools=TOOLS, leaf="b")


def shape(tree: MessageTree) -> list[tuple[object, ...]]:
    return [(each.role, each.content, each.calls, each.call_id) for each in tree.path]


@pytest.mark.parametrize("form", ["json", "jsonl", "md", "openai"])
def test_calls_and_results_survive_export_and_import(form: str) -> None:
    data = {
        "json": lambda: as_json([(CHAT, TALK)]),
        "jsonl": lambda: as_jsonl([(CHAT, TALK)]),
        "md": lambda: as_markdown(CHAT, TALK.path).encode(),
        "openai": lambda: as_openai(CHAT, TALK.path),
    }[form]()
    (found,) = parse_conversations(data, source="a")
    assert shape(found.tree) == shape(TALK)
    assert found.conversation.system == "Be brief."
    if form != "jsonl":  # llama.cpp's web UI has no place for tools
        assert read_tools(found.conversation.tools) == (LOOK,)


def test_openai_s_form_is_that_of_its_api() -> None:
    document = json.loads(as_openai(CHAT, TALK.path))
    assert document["messages"][2] == {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"town": "Bonn"}'}},
            {"id": "c2", "type": "function", "function": {"name": "look", "arguments": '{"town": "Ulm"}'}},
        ],
    }
    assert document["messages"][3] == {"role": "tool", "content": "8 degrees", "tool_call_id": "c2"}
    (found,) = parse_conversations(json.dumps(document["messages"]).encode(), source="a")
    assert shape(found.tree) == shape(TALK)


def test_imported_calls_get_ids_of_their_own() -> None:
    call = {"function": {"name": "look", "arguments": {"town": "Bonn"}}}
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": [call, call]}]
    (found,) = parse_conversations(json.dumps(talk).encode(), source="a")
    first, second = found.tree.path[-1].calls
    assert first.id not in ("", second.id)
    assert found.conversation.title == "Hi"


def test_a_page_and_the_clipboard_have_the_calls() -> None:
    call = ToolCall("c1", "<b>look", '{"town": "<Bonn>"}')
    message = msgspec.structs.replace(CALLED, calls=(call,))
    page = as_html(CHAT, [message])
    assert "<summary>Call &lt;b&gt;look</summary>" in page
    assert "&lt;Bonn&gt;" in page
    assert copied_text(message) == 'I look.\n\nCall of <b>look\n```json\n{\n  "town": "<Bonn>"\n}\n```'
    assert result_message(BONN, "", "a").call_id == "c1"
