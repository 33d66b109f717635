"""Conversations that leave and come back: nothing is lost, nothing is run, and nonsense is one sentence."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.chats.conversation import Conversation
from engine.chats.exports import as_html, as_json, as_markdown
from engine.chats.imports import parse_conversations, read_conversations
from engine.chats.llama_ui import as_jsonl
from engine.chats.message import Attachment, Message, Timings
from engine.chats.tree import MessageTree, add, edited, tree_of
from engine.errors import ChatError
from tests.support.pictures import picture

CONVERSATION = Conversation(id="c", title="A <b>title</b>", system="Be kind.", created_ms=5, updated_ms=9)
DATA = b"print(1)"
FILE = Attachment(
    id="f",
    kind="text",
    name="a.py",
    mime="text/x-python",
    sha256=hashlib.sha256(DATA).hexdigest(),
    size_bytes=len(DATA),
    text="print(1)",
)


def tree() -> MessageTree:
    messages = (
        Message(id="q", role="user", content="<script>alert(1)</script>", attachments=(FILE,), created_ms=6),
        Message(
            id="a",
            role="assistant",
            parent="q",
            content="Yes\u202e\u2028",
            reasoning="hm\nso",
            model="Demo",
            timings=Timings(prompt_tokens=3, generated_tokens=2, generation_seconds=0.5),
            created_ms=7,
        ),
    )
    return edited(tree_of(messages, "a"), "q", "Again?", created_ms=8)


def shape(tree: MessageTree) -> list[tuple[object, ...]]:
    places = {message: number for number, message in enumerate(tree.messages)}
    return [
        (
            places.get(message.parent or ""),
            message.role,
            message.content,
            message.reasoning,
            message.model,
            *(each.text for each in message.attachments),
        )
        for message in tree.messages.values()
    ]


def test_our_document_keeps_everything(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(as_json([(CONVERSATION, tree())], {FILE.sha256: DATA}))
    (found,) = read_conversations(path)
    assert shape(found.tree) == shape(tree())
    assert found.tree.path[-1].content == "Again?"
    assert found.conversation.id != "c"
    assert msgspec.structs.replace(found.conversation, id="c", leaf=None) == CONVERSATION
    assert found.files == {FILE.sha256: DATA}


def test_images_go_with_every_form_and_come_back() -> None:
    data = picture()
    sha256 = hashlib.sha256(data).hexdigest()
    image = Attachment(
        id="i",
        kind="image",
        name="a]cat",
        mime="image/png",
        sha256=sha256,
        size_bytes=len(data),
        width_px=40,
        height_px=30,
    )
    message = Message(id="q", role="user", content="What?", attachments=(image,))
    files, found = {sha256: data}, [(CONVERSATION, tree_of((message,), "q"))]
    address = "data:image/png;base64," + base64.b64encode(data).decode()
    assert f"![a\\]cat]({address})" in as_markdown(CONVERSATION, (message,), files)
    assert "Attached: a]cat" in as_markdown(CONVERSATION, (message,))
    page = as_html(CONVERSATION, (message,), files)
    assert f'<img src="{address}" alt="a]cat">' in page
    assert "img-src data:;" in page
    for document, name in ((as_json(found, files), "c.json"), (as_jsonl(found, files), "c.jsonl")):
        (back,) = parse_conversations(document, source=name)
        (attachment,) = back.tree.path[-1].attachments
        assert msgspec.structs.replace(attachment, id="i") == image
        assert back.files == files


def test_images_that_none_can_be_are_refused() -> None:
    data = picture()
    sha256 = hashlib.sha256(data).hexdigest()
    image = Attachment(id="i", kind="image", name="i", mime="image/png", sha256=sha256, size_bytes=1, width_px=40)
    for attachment, held in ((image, data), (msgspec.structs.replace(image, height_px=1), b"no image")):
        named = msgspec.structs.replace(attachment, sha256=hashlib.sha256(held).hexdigest())
        message = Message(id="q", role="user", content="What?", attachments=(named,))
        document = as_json([(CONVERSATION, tree_of((message,), "q"))], {named.sha256: held})
        with pytest.raises(ChatError, match="an attached image"):
            parse_conversations(document, source="c.json")


def test_llama_cpps_lines_keep_the_tree_and_the_system_prompt() -> None:
    data = as_jsonl([(CONVERSATION, tree()), (CONVERSATION, tree())])
    first, second = parse_conversations(data, source="x.jsonl")
    assert next(message.role for message in first.tree.messages.values()) == "system"
    assert [line[1:] for line in shape(first.tree)[1:]] == [line[1:] for line in shape(tree())]
    assert first.tree.path[-1].content == "Again?"
    assert second.conversation.title == CONVERSATION.title
    assert not set(first.tree.messages) & set(second.tree.messages)


def test_lines_have_the_form_that_llama_cpp_reads() -> None:
    records = [json.loads(line) for line in as_jsonl([(CONVERSATION, tree())]).decode().split("\n")[:-1]]
    assert (records[0]["type"], records[0]["harness"]) == ("session", "llama.app")
    messages = [record["message"] for record in records[1:]]
    assert [message["type"] for message in messages[:2]] == ["root", "text"]
    by_id = {message["id"]: message for message in messages}
    assert records[0]["currNode"] in by_id
    for message in messages:
        assert all(by_id[child]["parent"] == message["id"] for child in message["children"])
        assert message["parent"] is None or message["id"] in by_id[message["parent"]]["children"]


def test_an_older_list_of_conversations_is_read() -> None:
    message = {"id": "1", "convId": "c", "type": "text", "timestamp": 5, "role": "user", "content": "Hi", "parent": "0"}
    document = [{"conv": {"id": "c", "name": "N", "currNode": "1", "lastModified": 6}, "messages": [message]}]
    (found,) = parse_conversations(json.dumps(document).encode(), source="x")
    assert [each.content for each in found.tree.path] == ["Hi"]


def test_html_runs_nothing() -> None:
    page = as_html(CONVERSATION, list(tree().messages.values()))
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "\u202e" not in page
    assert "<b>" not in page


def test_markdown_has_all_that_is_shown() -> None:
    text = as_markdown(CONVERSATION, list(tree().messages.values()))
    for part in ("# A <b>title</b>", "Be kind.", "> hm\n> so", "Attached: a.py", "## Answer (Demo)", "Again?"):
        assert part in text


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"[" * 100_000,
        b'{"format": "layerdeck-conversations", "version": 9}',
        b'{"format": "layerdeck-conversations", "version": 1, "conversations": [{"conversation": 3}]}',
        b'{"type": "session"}\n{"type": "message", "message": {"role": "king"}}',
        b'{"type": "session"}\n{broken',
        b'{"type": "session"}\n{"type": "message", "message": 7}',
        b'{"format": "layerdeck-conversations", "version": 1, "conversations": [], "files": {"a": "!"}}',
    ],
)
def test_nonsense_is_one_sentence(data: bytes) -> None:
    with pytest.raises(ChatError, match=r"x\.json"):
        parse_conversations(data, source="x.json")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "type",
                        "message",
                        "id",
                        "role",
                        "parent",
                        "content",
                        "conv",
                        "messages",
                        "extra",
                        "currNode",
                        "format",
                    ]
                ),
                inner | st.sampled_from(["session", "message", "user", "layerdeck-conversations"]),
                max_size=6,
            )
        ),
        max_leaves=12,
    )
)
def test_any_document_is_read_or_refused(document: object) -> None:
    line = json.dumps(document).encode()
    for data in (line, b'{"type": "session"}\n{"type": "message", "message": ' + line + b"}"):
        try:
            found = parse_conversations(data, source="x")
        except ChatError:
            continue
        assert all(isinstance(each.tree, MessageTree) for each in found)


def test_an_imported_tree_goes_on() -> None:
    (found,) = parse_conversations(as_json([(CONVERSATION, tree())]), source="x")
    longer = add(found.tree, Message(id="new", role="assistant", content="", parent=found.tree.leaf))
    assert longer.path[-1].id == "new"
