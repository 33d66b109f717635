"""What goes wrong with a copy of the database reaches people as one sentence in the window."""

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
