"""Faults of database copies: each shows one sentence in the window."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

from app.background import Background
from app.chats.archive import ChatArchive
from app.notices import Notice, Notices
from engine.chat import copies
from engine.chat.conversation import Conversation
from engine.chat.store import ChatStore


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
