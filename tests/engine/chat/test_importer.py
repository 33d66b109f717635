"""Import of conversations in a child process: a large file blocks no thread of ours."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from engine.base.errors import ChatError, LockedError
from engine.chat import database, importer, imports, writer
from engine.chat import store as store_module
from engine.chat.conversation import Conversation
from engine.chat.exports import as_json
from engine.chat.importer import import_file
from engine.chat.imports import Imported
from engine.chat.message import Attachment, Message
from engine.chat.store import ChatStore
from engine.chat.tree import MessageTree, tree_of
from engine.runtime.process import decoders
from tests.support.kept_conversation import CHAT, DATA, kept_tree
from tests.support.patience import DEADLINE_S


def test_all_of_a_file_is_there_with_its_attachments(tmp_path: Path) -> None:
    path, database = tmp_path / "ex\udcffport.json", tmp_path / "data" / "chats.sqlite3"
    tree = kept_tree()
    names = {each.sha256 for message in tree.messages.values() for each in message.attachments if each.sha256}
    path.write_bytes(as_json([(CHAT, tree)], dict.fromkeys(names, DATA)))
    with closing(ChatStore(database)) as store:
        (found,) = import_file(database, path)
        assert [chat.id for chat in store.conversations()] == [found.id]
        assert (found.title, found.system) == (CHAT.title, CHAT.system)
        back = store.tree(found.id)
        assert [message.content for message in back.path] == [message.content for message in tree.path]
        assert {name: store.file(name) for name in names} == dict.fromkeys(names, DATA)


def test_what_is_wrong_is_the_same_sentence(tmp_path: Path) -> None:
    path, database = tmp_path / "bad.json", tmp_path / "chats.sqlite3"
    with pytest.raises(ChatError, match=r"^bad.json cannot be read \(No such file"):
        import_file(database, path)
    path.write_text("{}")
    with pytest.raises(ChatError, match=r"^bad.json cannot be imported"):
        import_file(database, path)
    path.write_text(json.dumps([{"conv": {"name": "a"}, "messages": []}]))
    (tmp_path / "file").touch()
    with pytest.raises(ChatError, match="check the folder"):
        import_file(tmp_path / "file" / "chats.sqlite3", path)


def test_nothing_is_parsed_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser holds up all threads of its process for as long as a file takes."""
    monkeypatch.setattr(imports, "parse_conversations", None)
    path, database = tmp_path / "old.json", tmp_path / "chats.sqlite3"
    message = {"id": "a", "role": "user", "content": "x"}
    path.write_text(json.dumps([{"conv": {"name": str(number)}, "messages": [message]} for number in range(300)]))
    assert [chat.title for chat in import_file(database, path)] == [str(number) for number in range(300)]
    with closing(ChatStore(database)) as store:
        assert len(store.conversations()) == 300


def test_an_answer_that_is_being_written_stays_open(tmp_path: Path) -> None:
    """The import runs in a confined process, which took all other processes for ended: text was lost with a kill."""
    path, database = tmp_path / "one.json", tmp_path / "chats.sqlite3"
    path.write_bytes(as_json([(CHAT, kept_tree())], {}))
    question = Message(id="q", role="user", content="Why?")
    answer = Message(id="a", role="assistant", parent="q", content="", state="writing")
    with closing(ChatStore(database)) as store:
        store.save(Conversation(id="c"))
        store.apply("c", MessageTree(), tree_of([question, answer], "a"))
        store.append("a", content="some ").result()
        import_file(database, path)
        store.append("a", content="words").result()
        found = store.tree("c").path[-1]
        assert (found.content, found.state) == ("some words", "writing")


def test_numbers_and_texts_that_cannot_be_stored_are_replaced(tmp_path: Path) -> None:
    """Some were reported as imported and lost their messages, others were imported and reported as failed."""
    path, database = tmp_path / "odd.json", tmp_path / "chats.sqlite3"
    big = 1 << 70
    file = Attachment(id="f", kind="text", name="f", mime="", sha256="", size_bytes=big, width_px=big, length_ms=-1)
    message = Message(id="q", role="user", content="Why?", attachments=(file,), created_ms=big)
    chats = [Conversation(id=title, title=title, updated_ms=big) for title in ("first", "second")]
    document = as_json([(chat, tree_of((message,), "q")) for chat in chats])
    path.write_bytes(document.replace(b'"system": ""', b'"system": "be nice \\ud83d"'))
    imported = import_file(database, path)
    with closing(ChatStore(database)) as store:
        assert {chat.id: chat for chat in store.conversations()} == {chat.id: chat for chat in imported}
        assert [(chat.title, chat.system, chat.updated_ms) for chat in imported] == [
            ("first", "be nice ?", 0),
            ("second", "be nice ?", 0),
        ]
        for chat in imported:
            (found,) = store.tree(chat.id).path
            (kept,) = found.attachments
            assert (found.created_ms, kept.size_bytes, kept.width_px, kept.length_ms) == (0, 0, 0, 0)


def test_an_import_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """Also if its first conversation is at fault, and if the error is not about the file."""
    path, database = tmp_path / "two.json", tmp_path / "chats.sqlite3"
    message = Message(id="q", role="user", content="Why?")
    path.write_bytes(as_json([(Conversation(id=ident), tree_of((message,), "q")) for ident in ("a", "b")]))
    first, second = imports.read_conversations(path)
    with closing(ChatStore(database)) as store:
        for fault in ({"draft": 1 << 70}, {"id": first.conversation.id}):
            faulty = Imported(msgspec.structs.replace(second.conversation, **fault), second.tree)
            for found in ((faulty, first), (first, faulty)):
                with pytest.raises((ChatError, OverflowError)):
                    importer._take_in(database, found)
                assert store.conversations() == ()


def test_an_import_that_fails_in_its_last_step_leaves_nothing(tmp_path: Path) -> None:
    """The conversations came into the list in several transactions, so that some stayed there."""
    path, database = tmp_path / "two.json", tmp_path / "chats.sqlite3"
    path.write_bytes(as_json([(Conversation(id=ident), MessageTree()) for ident in ("a", "b")]))
    found = imports.read_conversations(path)
    with closing(ChatStore(database, makes_copies=False)) as store:
        with closing(sqlite3.connect(database)) as connection:
            connection.execute(
                "CREATE TRIGGER fault BEFORE UPDATE ON conversation"
                f" WHEN new.id = '{found[-1].conversation.id}' AND new.deleted_ms IS NULL"
                " BEGIN SELECT RAISE(ABORT, 'not this one'); END"
            )
        with pytest.raises(ChatError, match="not this one"):
            importer._take_in(database, found)
        assert store.conversations() == ()


def test_an_import_that_failed_because_of_a_lock_is_not_stored_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step waited in memory, and closing the database wrote it."""
    path, file = tmp_path / "chats.sqlite3", tmp_path / "one.json"
    file.write_bytes(as_json([(Conversation(id="a"), MessageTree())]))
    ChatStore(path, makes_copies=False).close()
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.0)
    monkeypatch.setattr(writer, "RETRY_SECONDS", DEADLINE_S)
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:

        class LockedInTheLastStep(ChatStore):
            def save_all(self, changes: Sequence[tuple[Conversation, Conversation]]) -> Future[None]:
                if self.is_behind:
                    return super().save_all(changes)
                other.execute("BEGIN IMMEDIATE")
                done = super().save_all(changes)
                assert isinstance(done.exception(DEADLINE_S), LockedError)
                other.execute("ROLLBACK")
                return done

        monkeypatch.setattr(store_module, "ChatStore", LockedInTheLastStep)
        with pytest.raises(LockedError):
            importer._take_in(path, imports.read_conversations(file))
    with closing(ChatStore(path, makes_copies=False)) as store:
        assert store.conversations() == ()
        assert len(store.conversations(deleted=True)) == 1


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("import os; os.abort()", "Importing big.json takes too much time or memory"),
        ("raise ValueError", "big.json cannot be imported. The engine process"),
    ],
)
def test_a_process_that_does_not_answer_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, sentence: str
) -> None:
    monkeypatch.setattr(decoders, "child_argv", lambda _child: [sys.executable, "-c", code])
    with pytest.raises(ChatError, match=rf"^{sentence}"):
        import_file(tmp_path / "chats.sqlite3", tmp_path / "big.json")


def test_the_database_engine_is_told_its_folder_before_it_begins() -> None:
    """It asks once where temporary files may be, and a confined process can write in one folder alone."""
    code = "import sys, engine.chat.importer; sys.exit('sqlite3' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
