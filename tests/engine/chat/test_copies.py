"""Backup copies of the database: made after changes and at the end, consistent, and limited in number."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from engine.base.errors import CancelledError, ChatError
from engine.chat import copies as copies_module
from engine.chat.conversation import Conversation
from engine.chat.copies import DatabaseCopies, kept_of
from engine.chat.message import Message
from engine.chat.store import ChatStore
from engine.chat.tree import MessageTree, tree_of
from tests.support.patience import DEADLINE_S


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chats.sqlite3"


def titles_in(copy: Path) -> list[str]:
    with closing(sqlite3.connect(copy)) as connection:
        return [title for (title,) in connection.execute("SELECT title FROM conversation ORDER BY title")]


def test_closing_makes_a_copy_if_something_has_changed(path: Path) -> None:
    copies = DatabaseCopies(path)
    with closing(ChatStore(path)) as store:
        store.save(Conversation(id="a", title="A"))
    assert [titles_in(copy) for copy in copies.paths()] == [["A"]]
    (first,) = copies.paths()
    assert list(copies.folder.iterdir()) == [first]  # nothing unfinished, no journal
    assert os.name == "nt" or first.stat().st_mode & 0o077 == 0
    with closing(ChatStore(path)) as store:
        store.conversations()
    assert copies.paths() == (first,)
    assert copies.is_current()


def test_a_change_is_copied_in_the_background_while_others_write(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies_module, "FIRST_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(copies_module, "INTERVAL_SECONDS", 0.0)
    made = threading.Event()
    monkeypatch.setattr(DatabaseCopies, "make", _then(DatabaseCopies.make, made.set))
    with closing(ChatStore(path)) as store:
        store.save(Conversation(id="a", title="A")).result(DEADLINE_S)
        made.clear()
        store.save(Conversation(id="b", title="B")).result(DEADLINE_S)
        assert made.wait(DEADLINE_S)
    assert titles_in(DatabaseCopies(path).paths()[0]) == ["A", "B"]


def _then(make: Callable[..., None], after: Callable[[], None]) -> Callable[..., None]:
    def both(copies: DatabaseCopies, cancelled: Callable[[], bool]) -> None:
        make(copies, cancelled)
        after()

    return both


def test_a_copy_at_the_end_that_takes_too_long_is_left_to_the_next_start(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies_module, "LAST_COPY_SECONDS", 0.0)
    said: list[ChatError] = []
    with closing(ChatStore(path, said.append)) as store:
        store.save(Conversation(id="a", title="A"))
    assert list(DatabaseCopies(path).folder.iterdir()) == []
    assert said == []
    monkeypatch.undo()
    with closing(ChatStore(path)):
        pass
    assert [titles_in(copy) for copy in DatabaseCopies(path).paths()] == [["A"]]


def test_a_copy_in_steps_is_of_one_moment_and_can_be_cancelled(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies_module, "_STEP_PAGES", 1)
    copies = DatabaseCopies(path)
    with closing(ChatStore(path, makes_copies=False)) as store:
        store.save(Conversation(id="a", title="A")).result(DEADLINE_S)
        looks: list[int] = []

        def write() -> bool:
            looks.append(len(looks))
            store.save(Conversation(id=f"{looks[-1]}", title="late")).result(DEADLINE_S)
            return False

        copies.make(write)
        assert len(looks) > 1
        (copy,) = copies.paths()
        assert titles_in(copy) == ["A"]
        with pytest.raises(CancelledError):
            copies.make(lambda: True)
        assert list(copies.folder.iterdir()) == [copy]


def test_nothing_waits_for_a_copy(path: Path) -> None:
    """A copy reads in a transaction of its own: what is written meanwhile is on disk before it is done."""
    with closing(ChatStore(path, makes_copies=False)) as store:
        store.save(Conversation(id="a")).result(DEADLINE_S)
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(":memory:")) as target:

            def write(*_progress: int) -> None:
                store.save(Conversation(id=f"n{len(store.conversations())}")).result(DEADLINE_S)

            source.backup(target, pages=-1, progress=write)
        assert len(store.conversations()) == 2


def test_the_last_three_and_one_of_each_of_three_days_are_kept(tmp_path: Path) -> None:
    names = ["24-10", "24-09", "24-08", "24-07", "23-20", "23-10", "20-10", "20-09", "19-10"]
    newest_first = [tmp_path / f"chats-202611{name}0000.sqlite3" for name in names]
    assert {path.stem[12:17] for path in kept_of(newest_first)} == {"24-10", "24-09", "24-08", "23-20", "20-10"}


def test_older_copies_are_removed(path: Path) -> None:
    copies = DatabaseCopies(path)
    copies.folder.mkdir()
    for day in range(1, 9):
        (copies.folder / f"chats-202601{day:02}-120000.sqlite3").touch()
    with closing(ChatStore(path)) as store:
        store.save(Conversation(id="a"))
    assert [copy.stem[6:14] for copy in copies.paths()][1:] == ["20260108", "20260107"]
    assert titles_in(copies.paths()[0]) == [""]


def test_a_copy_that_has_no_room_is_said_once_and_nothing_is_lost(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies_module, "RESERVE_BYTES", 1 << 62)
    said: list[ChatError] = []
    store = ChatStore(path, said.append)
    store.save(Conversation(id="a")).result(DEADLINE_S)
    assert store._copies is not None
    store._copies.make_if_changed()
    store._copies.make_if_changed()
    store.close()
    (error,) = said
    assert "no space left" in error.summary()
    assert "Nothing is lost" in error.summary()
    assert list(DatabaseCopies(path).folder.iterdir()) == []
    with closing(ChatStore(path, makes_copies=False)) as again:
        assert again.conversation("a") is not None


def test_a_folder_that_cannot_be_written_is_said(path: Path) -> None:
    said: list[ChatError] = []
    DatabaseCopies(path).folder.write_text("a file")
    with closing(ChatStore(path, said.append)) as store:
        store.save(Conversation(id="a"))
    assert "check the disk's free space and permissions" in said[0].summary()


def test_a_damaged_database_gives_no_copy_and_is_recovered_at_the_next_start(path: Path) -> None:
    """Damage that nobody has met yet is found when a copy is checked."""
    messages = [
        Message(id=f"m{n}", role="user", content="word " * 300, parent=f"m{n - 1}" if n else None) for n in range(40)
    ]
    with closing(ChatStore(path)) as store:
        store.save(Conversation(id="c"))
        store.apply("c", MessageTree(), tree_of(messages, "m39"))
    before = DatabaseCopies(path).paths()
    place = path.read_bytes().index(b"word word") // 4096 * 4096
    said: list[ChatError] = []
    with closing(ChatStore(path, said.append)) as store:
        store.save(Conversation(id="late", title="late")).result(DEADLINE_S)
        with path.open("r+b") as file:
            file.seek(place)
            file.write(bytes(4096))
    assert "is damaged" in said[0].summary()
    assert DatabaseCopies(path).paths() == before
    with closing(ChatStore(path)) as store:
        assert "No message is lost" in store.notice
        assert len(store.tree("c").path) == 40
        assert store.conversation("late") is not None


def test_a_file_that_is_no_copy_is_left_alone(path: Path) -> None:
    copies = DatabaseCopies(path)
    copies.folder.mkdir(parents=True)
    foreign = copies.folder / "chats-mine.sqlite3"
    foreign.write_bytes(b"somebody's own")
    with closing(ChatStore(path)) as store:
        store.save(Conversation(id="a", title="A"))
    assert copies.is_current()
    assert [titles_in(copy) for copy in copies.paths()] == [["A"]]
    assert foreign.read_bytes() == b"somebody's own"


def test_a_clock_that_was_set_back_makes_no_copy_older_than_the_one_before(path: Path) -> None:
    copies = DatabaseCopies(path)
    with closing(ChatStore(path)) as store:
        store.save(Conversation(id="a", title="A"))
    (first,) = copies.paths()
    ahead = first.rename(first.with_name("chats-20991231-235959.sqlite3"))
    with closing(ChatStore(path)) as store:
        store.save(Conversation(id="b", title="B"))
    assert [titles_in(copy) for copy in copies.paths()] == [["A", "B"], ["A"]]
    assert copies.paths()[1] == ahead
    assert copies.is_current()
