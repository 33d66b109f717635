"""The archive: the order of its list, and faults of the database, each with one sentence in the window."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from pytestqt.qtbot import QtBot

from app.background import Background
from app.chats import archive as archive_module
from app.chats.archive import ChatArchive
from app.notices import Notice, Notices
from engine.chat import copies, database, writer
from engine.chat.answer import Append
from engine.chat.conversation import Conversation
from engine.chat.message import Message
from engine.chat.store import ChatStore
from engine.chat.tree import MessageTree, tree_of
from tests.support.patience import DEADLINE_S


def test_a_copy_that_has_no_room_is_told_once(qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "FIRST_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(copies, "INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(copies, "RESERVE_BYTES", 1 << 62)
    notices, background = Notices(), Background()
    told: list[Notice] = []
    notices.given.connect(told.append)
    archive = ChatArchive(tmp_path / "chats.sqlite3", background, notices)
    archive.start()
    with qtbot.waitSignal(archive.is_open_now):
        archive.save(Conversation(id="a", title="A"), None)
    qtbot.waitUntil(lambda: bool(told))
    archive.close()
    background.close()
    assert [("Nothing is lost" in notice.text, notice.bad) for notice in told] == [(True, True)]
    store = ChatStore(tmp_path / "chats.sqlite3", makes_copies=False)
    assert store.conversation("a") is not None
    store.close()


def test_work_that_is_asked_for_while_the_database_opens_is_done(qtbot: QtBot, tmp_path: Path) -> None:
    """An import right after the start was refused."""
    notices, background = Notices(), Background()
    told: list[Notice] = []
    notices.given.connect(told.append)
    archive = ChatArchive(tmp_path / "chats.sqlite3", background, notices)
    archive.start()
    done: list[int] = []
    archive.work("Counting", lambda store: len(store.conversations()), done.append)
    qtbot.waitUntil(lambda: done == [0])
    archive.close()
    background.close()
    assert told == []


def test_work_is_refused_if_the_database_cannot_be_opened(qtbot: QtBot, tmp_path: Path) -> None:
    notices, background = Notices(), Background()
    told: list[Notice] = []
    notices.given.connect(told.append)
    (tmp_path / "file").write_bytes(b"")
    archive = ChatArchive(tmp_path / "file" / "chats.sqlite3", background, notices)
    archive.start()
    archive.work("Counting", lambda _store: 1, lambda _count: None)
    qtbot.waitUntil(lambda: len(told) == 2)
    archive.close()
    background.close()
    assert [notice.bad for notice in told] == [True, True]
    assert told[1].text == "The conversations cannot be read."


def test_a_window_that_closes_while_the_database_opens_stores_what_waits(
    qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_module, "CLOSE_SECONDS", DEADLINE_S)
    background = Background()
    archive = ChatArchive(tmp_path / "chats.sqlite3", background, Notices())
    archive.start()
    archive.save(Conversation(id="a", draft="typed"), None)
    background.close()
    archive.close()
    with closing(ChatStore(tmp_path / "chats.sqlite3", makes_copies=False)) as store:
        assert [chat.draft for chat in store.conversations()] == ["typed"]


def test_a_database_that_is_locked_at_the_start_is_opened_later(
    qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was stored until the next start."""
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.0)
    monkeypatch.setattr(archive_module, "RETRY_SECONDS", 0.01)
    path, notices, background = tmp_path / "chats.sqlite3", Notices(), Background()
    told: list[Notice] = []
    notices.given.connect(told.append)
    ChatStore(path, makes_copies=False).close()
    archive = ChatArchive(path, background, notices)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        archive.start()
        archive.save(Conversation(id="a", title="A"), None)
        qtbot.waitUntil(lambda: bool(told))
        with qtbot.waitSignal(archive.is_open_now):
            other.execute("COMMIT")
    archive.close()
    background.close()
    assert [("Another program" in notice.text, "saved again" in notice.text) for notice in told] == [
        (True, False),
        (False, True),
    ]
    with closing(ChatStore(path, makes_copies=False)) as store:
        assert store.conversation("a") is not None


def test_a_conversation_that_cannot_be_read_before_the_database_is_open_is_told(tmp_path: Path) -> None:
    notices, background, read = Notices(), Background(), list[str]()
    told: list[str] = []
    notices.given.connect(lambda notice: told.append(notice.text))
    archive = ChatArchive(tmp_path / "chats.sqlite3", background, notices)
    archive.save(Conversation(id="a", title="A"), None)
    assert [chat.id for chat in archive.chats] == ["a"], "the list shows it"
    archive.read("a", lambda chat, _tree: read.append(chat.id))
    archive.close()
    background.close()
    assert told == [
        "This conversation cannot be shown, because the database of conversations is not open. "
        "Try again in a moment. If it stays closed, restart Layerdeck."
    ]
    assert not read


def test_text_is_shown_while_the_database_is_locked_at_the_start(
    qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer stayed invisible as long as the lock lasted, and the notice said that new messages are shown."""
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.0)
    monkeypatch.setattr(archive_module, "RETRY_SECONDS", 0.01)
    path, notices, background = tmp_path / "chats.sqlite3", Notices(), Background()
    ChatStore(path, makes_copies=False).close()
    archive = ChatArchive(path, background, notices)
    question = Message(id="q", role="user", content="Why?")
    answer = Message(id="a", role="assistant", parent="q", content="", state="writing")
    shown: list[str] = []
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with qtbot.waitSignal(notices.given):
            archive.start()
            archive.save(Conversation(id="c", title="C"), None)
            archive.apply("c", MessageTree(), tree_of([question, answer], "a"))
            archive.append(Append("a", "some "), lambda: shown.append("before"))
        qtbot.waitUntil(lambda: shown == ["before"])
        archive.append(Append("a", "words"), lambda: shown.append("after"))
        assert shown == ["before", "after"]
        with qtbot.waitSignal(archive.is_open_now):
            other.execute("COMMIT")
    archive.close()
    background.close()
    assert shown == ["before", "after"]
    with closing(ChatStore(path, makes_copies=False)) as store:
        assert store.tree("c").path[-1].content == "some words"


def test_another_fault_is_told_after_the_first_one(
    qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.0)
    monkeypatch.setattr(writer, "RETRY_SECONDS", 0.01)
    path, notices, background = tmp_path / "chats.sqlite3", Notices(), Background()
    told: list[Notice] = []
    notices.given.connect(told.append)
    archive = ChatArchive(path, background, notices)
    with qtbot.waitSignal(archive.is_open_now):
        archive.start()
    for _ in range(2):
        archive.append(Append("nobody", "x"), lambda: None)
    qtbot.waitUntil(lambda: bool(told))
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        archive.save(Conversation(id="a", title="A"), None)
        qtbot.waitUntil(lambda: len(told) == 2)
    archive.close()
    background.close()
    assert "FOREIGN KEY" in told[0].text
    assert "Another program" in told[1].text


def test_a_draft_does_not_change_the_order_of_the_list(tmp_path: Path) -> None:
    """The open conversation knows the time of its last message only after it was opened again."""
    archive = ChatArchive(tmp_path / "chats.sqlite3", Background(), Notices())
    shown = Conversation(id="a", title="Old", updated_ms=1)
    archive.save(shown, None)
    archive.save(Conversation(id="b", title="New", updated_ms=2), None)
    archive.apply("a", MessageTree(), MessageTree())
    assert [chat.title for chat in archive.chats] == ["Old", "New"]
    archive.save(msgspec.structs.replace(shown, draft="typed"), shown)
    assert [chat.title for chat in archive.chats] == ["Old", "New"]
