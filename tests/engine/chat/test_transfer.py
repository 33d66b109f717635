"""Export and import of conversations: nothing is lost, nothing is executed, and invalid files give one error."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.base.errors import ChatError
from engine.chat.exports import as_html, as_json
from engine.chat.imports import MAX_LABEL_CHARACTERS, parse_conversations, read_conversations
from engine.chat.llama_ui import as_jsonl
from engine.chat.markdown_file import as_markdown
from engine.chat.message import Attachment, Message, Role
from engine.chat.tree import MessageTree, add, tree_of
from engine.runtime.media.sounds.recordings import MAX_LENGTH_MS
from tests.support.kept_conversation import CHAT, CHOICES, DATA, FILE, QUESTION, kept_tree
from tests.support.pictures import picture
from tests.support.sounds import tone


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
    path.write_bytes(as_json([(CHAT, kept_tree())], {FILE.sha256: DATA}))
    (found,) = read_conversations(path)
    assert shape(found.tree) == shape(kept_tree())
    assert found.tree.path[-1].content == "What else?"
    assert found.conversation.id != CHAT.id
    assert msgspec.structs.replace(found.conversation, id=CHAT.id, leaf=None) == CHAT
    assert [message.choices for message in found.tree.messages.values()] == [(), CHOICES, ()]
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
    files, found = {sha256: data}, [(CHAT, tree_of((message,), "q"))]
    address = "data:image/png;base64," + base64.b64encode(data).decode()
    assert f"![a\\]cat]({address})" in as_markdown(CHAT, (message,), files)
    assert "Attached: a]cat" in as_markdown(CHAT, (message,))
    page = as_html(CHAT, (message,), files)
    assert f'<img src="{address}" alt="a]cat">' in page
    assert "img-src data:;" in page
    markdown = as_markdown(CHAT, (message,), files).encode()
    documents = {"c.json": as_json(found, files), "c.jsonl": as_jsonl(found, files), "c.md": markdown}
    for name, document in documents.items():
        (back,) = parse_conversations(document, source=name)
        (attachment,) = back.tree.path[-1].attachments
        assert msgspec.structs.replace(attachment, id="i") == image
        assert back.files == files


def test_sounds_go_with_what_has_a_form_for_them_and_come_back() -> None:
    data = tone()
    sha256 = hashlib.sha256(data).hexdigest()
    sound = Attachment(
        id="s", kind="audio", name="hello.wav", mime="audio/wav", sha256=sha256, size_bytes=len(data), length_ms=400
    )
    message = Message(id="q", role="user", content="What?", attachments=(sound,))
    files, found = {sha256: data}, [(CHAT, tree_of((message,), "q"))]
    assert "Attached: hello.wav" in as_markdown(CHAT, (message,), files)
    assert "<p>Attached: hello.wav</p>" in as_html(CHAT, (message,), files)
    markdown = as_markdown(CHAT, (message,), files).encode()
    documents = {"c.json": as_json(found, files), "c.jsonl": as_jsonl(found, files), "c.md": markdown}
    for name, document in documents.items():
        (back,) = parse_conversations(document, source=name)
        (attachment,) = back.tree.path[-1].attachments
        assert msgspec.structs.replace(attachment, id="s") == sound
        assert back.files == files


@pytest.mark.parametrize(
    ("length_ms", "held", "words"),
    [
        (400, b"no sound", "not a sound"),
        (0, tone(), "an invalid length"),
        (MAX_LENGTH_MS + 1, tone(), "an invalid length"),
    ],
)
def test_sounds_that_none_can_be_are_refused(length_ms: int, held: bytes, words: str) -> None:
    sha256 = hashlib.sha256(held).hexdigest()
    sound = Attachment(
        id="s", kind="audio", name="s", mime="audio/wav", sha256=sha256, size_bytes=1, length_ms=length_ms
    )
    message = Message(id="q", role="user", content="What?", attachments=(sound,))
    document = as_json([(CHAT, tree_of((message,), "q"))], {sha256: held})
    with pytest.raises(ChatError, match=f"an attached sound .*{words}"):
        parse_conversations(document, source="c.json")


def test_images_that_none_can_be_are_refused() -> None:
    data = picture()
    sha256 = hashlib.sha256(data).hexdigest()
    image = Attachment(id="i", kind="image", name="i", mime="image/png", sha256=sha256, size_bytes=1, width_px=40)
    for attachment, held in ((image, data), (msgspec.structs.replace(image, height_px=1), b"no image")):
        named = msgspec.structs.replace(attachment, sha256=hashlib.sha256(held).hexdigest())
        message = Message(id="q", role="user", content="What?", attachments=(named,))
        document = as_json([(CHAT, tree_of((message,), "q"))], {named.sha256: held})
        with pytest.raises(ChatError, match="an attached image"):
            parse_conversations(document, source="c.json")


def test_llama_cpps_lines_keep_the_tree_and_the_system_prompt() -> None:
    data = as_jsonl([(CHAT, kept_tree()), (CHAT, kept_tree())])
    first, second = parse_conversations(data, source="x.jsonl")
    assert first.conversation.system == CHAT.system
    assert shape(first.tree) == shape(kept_tree())
    assert first.tree.path[-1].content == "What else?"
    assert second.conversation.title == CHAT.title
    assert not set(first.tree.messages) & set(second.tree.messages)


@pytest.mark.parametrize("roles", [["system"], ["system", "user"], ["user", "system"], ["user"]])
def test_only_a_system_prompt_that_all_hangs_on_is_the_conversations(roles: list[Role]) -> None:
    messages = [Message(id=str(place), role=role, content=role) for place, role in enumerate(roles)]
    messages.append(Message(id="last", role="user", content="And?", parent="0"))
    bare = msgspec.structs.replace(CHAT, system="")
    (found,) = parse_conversations(as_jsonl([(bare, tree_of(messages, "last"))]), source="x.jsonl")
    is_alone = roles == ["system"]
    assert found.conversation.system == ("system" if is_alone else "")
    assert [each.role for each in found.tree.messages.values()] == (["user"] if is_alone else [*roles, "user"])
    assert [each.content for each in found.tree.path] == (["And?"] if is_alone else [roles[0], "And?"])


def test_labels_from_elsewhere_steer_nothing_and_fill_no_screen() -> None:
    odd, long = "A\u202etxt.exe\x1b[31m", "x" * 100_000
    message = Message(
        id="q", role="assistant", content="", model=long, layout=odd, note=odd, stop_reason=long, model_identity=odd
    )
    chat = msgspec.structs.replace(CHAT, title=odd, folder=long, preset=odd)
    (found,) = parse_conversations(as_json([(chat, tree_of([message], "q"))]), source="c.json")
    (lines,) = parse_conversations(as_jsonl([(chat, tree_of([message], "q"))]), source="c.jsonl")
    (kept,) = found.tree.messages.values()
    chat = found.conversation
    assert chat.title == lines.conversation.title == "A\\u202etxt.exe\\x1b[31m"
    assert chat.preset == kept.layout == kept.note == kept.model_identity == chat.title
    assert len(chat.folder) == len(kept.model) == len(kept.stop_reason) == MAX_LABEL_CHARACTERS
    assert len(lines.tree.path[0].model) == MAX_LABEL_CHARACTERS


def test_lines_have_the_form_that_llama_cpp_reads() -> None:
    records = [json.loads(line) for line in as_jsonl([(CHAT, kept_tree())]).decode().split("\n")[:-1]]
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
    page = as_html(CHAT, list(kept_tree().messages.values()))
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "\u202e" not in page
    assert "<b>" not in page


def test_html_keeps_spaces_and_joiners_of_all_scripts() -> None:
    text = "Bonjour\u00a0! \u65e5\u3000\u672c \U0001f468\u200d\U0001f469 \u0645\u200c\u062e soft\u00adhyphen"
    assert text in as_html(CHAT, [Message(id="m", role="user", content=text)])
    page = as_html(CHAT, [Message(id="m", role="user", content="a\0b\x1bc\u202ed\ud800e")])
    assert "a\ufffdb\ufffdc\ufffdd\ufffde" in page


def test_markdown_has_all_that_is_shown() -> None:
    text = as_markdown(CHAT, list(kept_tree().messages.values()))
    for part in ("# Ships: a/b <b>", "Be kind.", "> hm\n> so", "Attached: quay.py", "## Answer (Demo)", "What else?"):
        assert part in text


def test_markdown_comes_back_as_it_was() -> None:
    path = kept_tree().path
    markdown = as_markdown(CHAT, path)
    (found,) = parse_conversations(markdown.encode(), source="c.md")
    assert msgspec.structs.replace(found.conversation, id=CHAT.id, leaf=None) == CHAT
    assert shape(found.tree) == shape(tree_of(path, path[-1].id))
    for before, after in zip(path, found.tree.path, strict=True):
        same = {"id": before.id, "parent": before.parent, "choices": before.choices, "attachments": before.attachments}
        assert msgspec.structs.replace(after, **same) == before


@given(
    st.text(),
    st.lists(st.tuples(st.text(), st.text(), st.lists(st.text(), max_size=2)), max_size=4),
)
def test_any_texts_come_back_from_markdown(system: str, turns: list[tuple[str, str, list[str]]]) -> None:
    messages: list[Message] = []
    for number, (content, reasoning, texts) in enumerate(turns):
        files = tuple(
            Attachment(id=f"f{place}", kind="text", name="n", mime="text/plain", sha256="", size_bytes=1, text=text)
            for place, text in enumerate(texts)
        )
        parent = messages[-1].id if messages else None
        messages.append(
            Message(
                id=str(number),
                role="assistant" if number % 2 else "user",
                content=content,
                reasoning=reasoning,
                parent=parent,
                attachments=files,
            )
        )
    chat = msgspec.structs.replace(CHAT, system=system)
    text = as_markdown(chat, messages)
    # A file holds UTF-8, which has no lone surrogates; hypothesis makes none.
    (found,) = parse_conversations(text.encode(), source="c.md")
    assert found.conversation.system == system
    assert shape(found.tree) == shape(tree_of(messages, messages[-1].id if messages else None))


def test_a_text_that_looks_like_our_markdown_is_a_text() -> None:
    inner = as_markdown(CHAT, kept_tree().path)
    message = Message(id="a", role="user", content=inner)
    outer = as_markdown(CHAT, (message,))
    (found,) = parse_conversations(outer.encode(), source="c.md")
    assert [each.content for each in found.tree.path] == [inner]


def test_markdown_may_be_edited_by_hand_and_saved_on_windows() -> None:
    message = Message(id="a", role="user", content="Where is the quay?\n\nOn the left?")
    text = as_markdown(CHAT, (message,)).replace("quay", "harbour").replace("# Ships", "# Boats").replace("\n", "\r\n")
    (found,) = parse_conversations(text.encode(), source="c.md")
    assert found.tree.path[0].content == "Where is the harbour?\n\nOn the left?"
    assert found.conversation.title.startswith("Boats")


def test_markdown_from_elsewhere_is_refused_with_a_sentence() -> None:
    with pytest.raises(ChatError, match=r"^notes.md cannot be imported. Choose a file that Layerdeck or llama.cpp"):
        parse_conversations(b"# Notes\n\n## You\n\nhello\n", source="notes.md")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"attachments": ["a"]}, "the list of attachments of a message is damaged; export the conversation again"),
        ({"attachments": 7}, "the list of attachments of a message is damaged; export the conversation again"),
        (
            {"attachments": [{"lines": "many"}]},
            "a message states an invalid number of lines; export the conversation again",
        ),
        ({"reasoning_lines": "x"}, "a message states an invalid number of lines; export the conversation again"),
    ],
)
def test_damaged_markdown_is_refused_with_its_fault(values: dict[str, object], reason: str) -> None:
    values = {"id": "m", "role": "user", **values}
    text = (
        f"# a\n<!-- layerdeck-conversation 1 ab {{}} -->\n\n## You\n<!-- ab {json.dumps(values)} -->\n\nAttached: x\n"
    )
    with pytest.raises(ChatError, match=rf"^c\.md cannot be imported: {reason}\.$"):
        parse_conversations(text.encode(), source="c.md")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"# a\n<!-- layerdeck-conversation 9 ab {} -->\n",
        b'# a\n<!-- layerdeck-conversation 1 ab {"folder": 3} -->\n',
        b'# a\n<!-- layerdeck-conversation 1 ab {} -->\n\n## You\n<!-- ab {"role": "king"} -->\n\nhello\n',
        b'# a\n<!-- layerdeck-conversation 1 ab {"settings": {"seed": NaN}} -->\n',
        b'# a\n<!-- layerdeck-conversation 1 ab {} -->\n\n## You\n<!-- ab {"id": "a", "call_lines": 1} -->\n\nhello\n',
        b'{"format": "layerdeck-conversations", "version": 1,'
        b' "conversations": [{"conversation": {"id": "a", "settings": {"temperature": 1e999}}, "messages": []}]}',
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


def test_settings_from_elsewhere_are_taken_if_they_are_usable() -> None:
    """Others may be nested so deeply that the database cannot be read back."""
    settings: dict[str, object] = {"temperature": 0.5, "seed": 1 << 100, "unknown": [[[]]]}
    message = msgspec.structs.replace(QUESTION, settings=settings)
    document = as_json([(msgspec.structs.replace(CHAT, settings=settings), tree_of((message,), "q"))])
    (found,) = parse_conversations(document, source="c.json")
    assert found.conversation.settings == found.tree.path[0].settings == {"temperature": 0.5}


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
    (found,) = parse_conversations(as_json([(CHAT, kept_tree())]), source="x")
    longer = add(found.tree, Message(id="new", role="assistant", content="", parent=found.tree.leaf))
    assert longer.path[-1].id == "new"
