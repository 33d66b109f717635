"""The database of conversations: acknowledged writes are stored in every state, and searches open the right branch."""

from __future__ import annotations

import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest

from engine.base.errors import ChatError, LockedError
from engine.chat import database, writer
from engine.chat import store as store_module
from engine.chat.conversation import Conversation
from engine.chat.database import is_alive, our_name
from engine.chat.message import Attachment, Message, Timings
from engine.chat.recovery import damage_record
from engine.chat.schema import SCRIPTS, VERSION, version_of
from engine.chat.store import ChatStore
from engine.chat.tool_calls import CallDelta
from engine.chat.tree import MessageTree, add, changed, edited, select, tree_of, without_turn
from engine.runtime.protocol.messages import TokenChoice
from engine.runtime.protocol.requests import ToolCall
from tests.support.kept_conversation import CHOICES
from tests.support.patience import DEADLINE_S, wait_until


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChatStore]:
    store = ChatStore(tmp_path / "chats.sqlite")
    yield store
    store.close()


def begin(store: ChatStore, *messages: Message, ident: str = "c", title: str = "Title") -> MessageTree:
    store.save(Conversation(id=ident, title=title, created_ms=1, updated_ms=1)).result(DEADLINE_S)
    tree = tree_of(messages, messages[-1].id if messages else None)
    store.apply(ident, MessageTree(), tree).result(DEADLINE_S)
    return tree


def talk(prefix: str = "") -> tuple[Message, ...]:
    return (
        Message(id=prefix + "q1", role="user", content="What is a trigram?", created_ms=2),
        Message(id=prefix + "a1", role="assistant", parent=prefix + "q1", content="Three letters.", created_ms=3),
    )


def test_all_of_a_message_comes_back(store: ChatStore) -> None:
    file = Attachment(id="f", kind="text", name="a.py", mime="text/x-python", sha256="", size_bytes=3, text="abc")
    sha256, kept = store.keep_file(b"abc")
    kept.result(DEADLINE_S)
    whole = Message(
        id="a",
        role="assistant",
        content="x\ud800y\0z",
        reasoning="hm",
        model="Demo",
        model_identity="1234",
        layout="0-3 on CPU",
        settings={"temperature": 0.5, "stop": ["\n"]},
        timings=Timings(prompt_tokens=9, generated_tokens=4, generation_seconds=2.0),
        stop_reason="length",
        state="stopped",
        note="A sentence.",
        pinned=True,
        attachments=(msgspec.structs.replace(file, sha256=sha256),),
        created_ms=7,
        choices=CHOICES,
    )
    begin(store, whole)
    assert store.tree("c").path == (msgspec.structs.replace(whole, content="x?y\0z"),)
    assert store.file(sha256) == b"abc"


def test_what_is_no_number_does_not_spoil_a_message(store: ChatStore) -> None:
    nan = float("nan")
    timings = Timings(prompt_tokens=9, prompt_seconds=float("inf"))
    answer = Message(
        id="a", role="assistant", content="x", settings={"temperature": nan}, timings=timings,
        choices=(TokenChoice("A", nan, ()),),
    )  # fmt: skip
    begin(store, answer)
    (found,) = store.tree("c").path
    assert (found.settings, found.timings, found.choices) == ({"temperature": None}, Timings(prompt_tokens=9), ())


def test_infinity_that_an_earlier_version_wrote_is_no_damage(store: ChatStore) -> None:
    begin(store, *talk())
    with closing(sqlite3.connect(store.path)) as connection, connection:
        connection.execute('UPDATE conversation SET settings = \'{"temperature": Infinity, "seed": 7}\'')
        connection.execute('UPDATE message SET details = \'{"model": "Demo", "settings": {"top_p": NaN}}\'')
    assert [chat.settings for chat in store.conversations()] == [{"temperature": None, "seed": 7}]
    assert [(found.model, found.settings) for found in store.tree("c").path] == [("Demo", {"top_p": None})] * 2
    assert not damage_record(store.path).exists()


def test_an_answer_is_kept_while_it_is_written(store: ChatStore) -> None:
    tree = begin(store, talk()[0])
    answer = Message(id="a", role="assistant", parent="q1", content="", state="writing")
    store.apply("c", tree, add(tree, answer))
    store.append("a", reasoning="thought ")
    store.append("a", content="some ")
    store.append("a", content="words").result(DEADLINE_S)
    found = store.tree("c").path[-1]
    assert (found.content, found.reasoning, found.state) == ("some words", "thought ", "writing")
    store.finish("c", msgspec.structs.replace(found, state="done")).result(DEADLINE_S)
    assert store.tree("c").path[-1] == msgspec.structs.replace(found, state="done")
    assert [hit.message for hit in store.search("some words")] == ["a"]


@pytest.mark.parametrize("damaged", [False, True])
def test_calls_that_an_ended_process_was_writing_are_kept(store: ChatStore, damaged: bool) -> None:
    tree = begin(store, talk()[0])
    answer = Message(id="a", role="assistant", parent="q1", content="", state="writing")
    store.apply("c", tree, add(tree, answer))
    store.append("a", content="I look", calls=(CallDelta(0, '{"x"', "id1", "look"),))
    store.append("a", calls=(CallDelta(0, ":1}"), CallDelta(1, "{}", "id2", "see"))).result(DEADLINE_S)
    store.close()
    with closing(sqlite3.connect(store.path)) as connection:
        connection.execute("UPDATE message SET writer = '0:0.00' WHERE writer IS NOT NULL")
        if damaged:
            connection.execute("UPDATE piece SET calls = '[{' WHERE calls LIKE '%look%'")
        connection.commit()
    with closing(ChatStore(store.path)) as again:
        found = again.tree("c").path[-1]
    assert (found.content, found.state) == ("I look", "interrupted")
    whole = (ToolCall("id1", "look", '{"x":1}'), ToolCall("id2", "see", "{}"))
    assert found.calls == (() if damaged else whole)


def test_pieces_after_a_mistaken_end_are_joined(store: ChatStore) -> None:
    tree = begin(store, talk()[0])
    answer = Message(id="a", role="assistant", parent="q1", content="", state="writing")
    store.apply("c", tree, add(tree, answer))
    store.append("a", content="some ").result(DEADLINE_S)
    with closing(sqlite3.connect(store.path)) as connection:
        connection.execute("UPDATE message SET writer = NULL, state = 'interrupted' WHERE writer IS NOT NULL")
        connection.commit()
    store.append("a", content="words").result(DEADLINE_S)
    store.close()
    with closing(ChatStore(store.path)) as again:
        found = again.tree("c").path[-1]
        assert (found.content, found.state) == ("some words", "interrupted")
        assert [hit.message for hit in again.search("some words")] == ["a"]


def test_a_process_is_alive_after_the_clock_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """psutil derives the start of a process from the clock of the system."""
    name = our_name()
    before_s = psutil.Process().create_time()
    monkeypatch.setattr(psutil.Process, "create_time", lambda _process: before_s + 3600)
    assert is_alive(name) is sys.platform.startswith("linux")
    assert not is_alive(name + "0")
    assert not is_alive("0:0.00")


def test_taking_away_is_undone_in_place(store: ChatStore) -> None:
    tree = begin(store, *talk())
    longer = add(tree, Message(id="q2", role="user", parent="a1", content="And then?"))
    longer = edited(longer, "q1", "other", created_ms=1)
    store.apply("c", tree, longer)
    less = without_turn(longer, "a1")
    store.apply("c", longer, less).result(DEADLINE_S)
    assert store.tree("c") == less
    store.apply("c", less, longer).result(DEADLINE_S)
    assert store.tree("c") == longer
    assert list(store.tree("c").messages) == list(longer.messages)


def test_a_conversation_is_renamed_pinned_and_deleted_with_undo(store: ChatStore) -> None:
    begin(store, *talk(), ident="one")
    begin(store, *talk("b"), ident="two")
    first = store.conversations()[-1]
    store.save(msgspec.structs.replace(first, title="New", pinned=True, folder="Work", draft="h"), first).result(
        DEADLINE_S
    )
    assert [found.id for found in store.conversations()] == ["one", "two"]
    kept = store.conversation("one")
    assert kept is not None
    assert (kept.title, kept.pinned, kept.folder, kept.draft) == ("New", True, "Work", "h")
    store.delete("one").result(DEADLINE_S)
    assert [found.id for found in store.conversations()] == ["two"]
    assert [found.id for found in store.conversations(deleted=True)] == ["one"]
    assert all(hit.conversation == "two" for hit in store.search("trigram"))
    store.restore("one").result(DEADLINE_S)
    assert len(store.conversations()) == 2
    store.delete("one")
    store.purge(1 << 60).result(DEADLINE_S)
    assert store.conversation("one") is None
    assert not store.tree("one").messages


def test_purged_text_is_not_in_the_text_index(store: ChatStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_MERGED_PAGES", 1)
    for number in range(20):
        begin(store, Message(id=f"m{number}", role="user", content=f"gardens {number}"), ident=f"c{number}")
    begin(store, Message(id="secret", role="user", content="qzwxvj"), ident="old")
    store.delete("old")
    with closing(sqlite3.connect(store.path)) as connection:

        def is_indexed() -> bool:
            return any(b"zwx" in block for (block,) in connection.execute("SELECT block FROM message_text_data"))

        store.settled().result(DEADLINE_S)
        assert is_indexed()
        store.purge(1 << 60).result(DEADLINE_S)
        wait_until(lambda: not is_indexed())
    assert len(store.search("gardens")) == 20


def test_a_file_is_not_purged_while_another_window_may_bring_its_message_back(store: ChatStore) -> None:
    sha256, _ = store.keep_file(b"abc")
    file = Attachment(id="f", kind="text", name="a", mime="", sha256=sha256, size_bytes=3)
    tree = begin(store, Message(id="q", role="user", content="x", attachments=(file,)))
    store.apply("c", tree, MessageTree()).result(DEADLINE_S)
    with closing(ChatStore(store.path)) as other:
        other.purge(0).result(DEADLINE_S)
    store.apply("c", MessageTree(), tree).result(DEADLINE_S)
    assert store.file(sha256) == b"abc"
    store.apply("c", tree, MessageTree())
    store.close()
    with closing(ChatStore(store.path)) as later:
        later.purge(0).result(DEADLINE_S)
        assert later.file(sha256) is None


def test_two_changes_of_one_conversation_do_not_undo_each_other(store: ChatStore) -> None:
    begin(store, *talk())
    seen = store.conversation("c")
    assert seen is not None
    store.save(msgspec.structs.replace(seen, title="Name"), seen)
    store.save(msgspec.structs.replace(seen, pinned=True), seen).result(DEADLINE_S)
    kept = store.conversation("c")
    assert kept is not None
    assert (kept.title, kept.pinned) == ("Name", True)


@pytest.mark.parametrize("text", ["über", "ÜBER", "日本", "語", "f(x", "(", "100%", "a_b", '"q"', "def f(x):\n"])
def test_search_finds_any_text_in_any_branch(store: ChatStore, text: str) -> None:
    content = 'Viel über 日本語 and def f(x):\n  return a_b * 100% "q"'
    tree = begin(store, *talk(), Message(id="old", role="user", parent="a1", content=content, created_ms=4))
    store.apply("c", tree, edited(tree, "old", "nothing here", created_ms=5)).result(DEADLINE_S)
    (hit,) = store.search(text)
    assert hit.message == "old"
    assert hit.snippet[hit.begin : hit.end].casefold() == " ".join(text.casefold().splitlines()) or "\n" in text
    shown = select(store.tree("c"), hit.message or "")
    assert shown.path[-1].id == "old"


def test_search_ignores_case_in_titles_and_marks_the_right_characters(store: ChatStore) -> None:
    content = "İİİİ \U0001f468\u200d\U0001f469 and\tthe Needle"  # the lower case of İ is two characters
    begin(store, Message(id="q", role="user", content=content), title="Übung")
    (title,) = store.search("übung")
    assert (title.message, title.snippet[title.begin : title.end]) == (None, "Übung")
    (hit,) = store.search("needle")
    assert (hit.message, hit.snippet[hit.begin : hit.end]) == ("q", "Needle")
    assert hit.snippet == "İİİİ \U0001f468\u200d\U0001f469 and the Needle"


@pytest.mark.parametrize("text", ["", "  ", "%", "a%b", "zzz", '"', "a" * 5000, "NOT", "\0\0\0"])
def test_search_of_what_is_not_there_finds_nothing(store: ChatStore, text: str) -> None:
    begin(store, *talk())
    assert store.search(text) == ()


def test_search_finds_titles_and_forgets_changed_text(store: ChatStore) -> None:
    tree = begin(store, *talk(), title="Grüße an Ada")
    assert [hit.message for hit in store.search("an ada")] == [None]
    store.apply("c", tree, changed(tree, msgspec.structs.replace(tree.messages["a1"], content="Else."))).result(
        DEADLINE_S
    )
    assert store.search("letters") == ()
    assert len(store.search("Else")) == 1


def test_a_write_that_cannot_be_done_says_so_and_spoils_no_other(store: ChatStore) -> None:
    begin(store, *talk())
    lost = store.append("nobody", content="x")
    other = store.save(Conversation(id="d"))
    with pytest.raises(ChatError, match="cannot be saved"):
        lost.result(DEADLINE_S)
    other.result(DEADLINE_S)
    assert store.conversation("d") is not None


def test_what_waits_for_the_end_of_a_lock_is_read_when_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading did not find it meanwhile: the conversation on the screen was taken for another one."""
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.0)
    monkeypatch.setattr(writer, "RETRY_SECONDS", 0.01)
    seen: list[bool] = []
    with closing(ChatStore(tmp_path / "chats.sqlite", makes_copies=False)) as store:
        with closing(sqlite3.connect(store.path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(LockedError, match="Another program is writing"):
                store.save(Conversation(id="c")).result(DEADLINE_S)
            with pytest.raises(LockedError):
                store._writer.do(lambda _connection: seen.append(store.is_behind)).result(DEADLINE_S)
            with pytest.raises(LockedError):
                store.conversation("c")
            with pytest.raises(LockedError):
                ChatStore(store.path)
            other.execute("COMMIT")
        wait_until(lambda: not store.is_behind)
        assert seen[-1], "a read during the attempt has to wait for it"
        assert store.conversation("c") is not None


def test_only_the_first_and_the_last_attempt_wait_for_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt waited for 10 s. Meanwhile all pieces of an answer stayed invisible."""
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.2)
    monkeypatch.setattr(writer, "RETRY_SECONDS", 0.01)
    with closing(ChatStore(tmp_path / "chats.sqlite", makes_copies=False)) as store:
        waits = _waits(store)
        with closing(sqlite3.connect(store.path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(LockedError):
                store.save(Conversation(id="c")).result(DEADLINE_S)
            wait_until(lambda: len(waits) > 2)
            with pytest.raises(LockedError):
                store.conversation("c")
            assert (waits[0], set(waits[1:])) == (200, {100})
            monkeypatch.setattr(database, "BUSY_SECONDS", DEADLINE_S)
            end = threading.Thread(target=store.close)
            end.start()
            wait_until(lambda: waits[-1] > 200)
            other.execute("COMMIT")
            end.join(DEADLINE_S)
    with closing(ChatStore(store.path, makes_copies=False)) as again:
        assert again.conversation("c") is not None


@pytest.mark.parametrize(("closes_during_attempt", "last_ms"), [(True, 100), (False, 200)])
def test_who_closes_waits_for_a_lock_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closes_during_attempt: bool, last_ms: int
) -> None:
    """A change whose first attempt had failed before the end was dropped after 0.1 s."""
    now_s = [1000.0]
    monkeypatch.setattr(writer, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.2)
    monkeypatch.setattr(writer, "RETRY_SECONDS", DEADLINE_S)
    with closing(ChatStore(tmp_path / "chats.sqlite", makes_copies=False)) as store:
        end = threading.Thread(target=store._writer.close)

        def close_and_wait() -> None:
            if closes_during_attempt:
                end.start()
                wait_until(lambda: store._writer._closing_s > 0)
                now_s[0] += 0.2

        waits = _waits(store, close_and_wait)
        with closing(sqlite3.connect(store.path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(LockedError):
                store.save(Conversation(id="c")).result(DEADLINE_S)
            if not closes_during_attempt:
                end.start()
            end.join(DEADLINE_S)
        assert waits == [200, last_ms]


def test_upkeep_that_cannot_be_done_does_not_stop_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.0)
    with closing(ChatStore(tmp_path / "chats.sqlite", makes_copies=False)) as store:
        begin(store, *talk())
        with closing(sqlite3.connect(store.path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(LockedError):
                store.purge(0).result(DEADLINE_S)
            assert not store.written_by_others()
            assert not store.is_behind
            assert len(store.tree("c").messages) == 2
            other.execute("ROLLBACK")


def _waits(store: ChatStore, then: Callable[[], None] = lambda: None) -> list[int]:
    """Return a list to which SQLite's time limit for locks is appended, in ms, before each attempt to write.

    `then`: called after the first one is appended.
    """
    waits: list[int] = []

    def trace(statement: str) -> None:
        if statement.startswith("PRAGMA busy_timeout = "):
            waits.append(int(statement.removeprefix("PRAGMA busy_timeout = ")))
            if len(waits) == 1:
                then()

    store._writer._connection.set_trace_callback(trace)
    return waits


def test_two_stores_share_a_database(store: ChatStore) -> None:
    other = ChatStore(store.path)
    try:
        begin(other, *talk())
        assert len(store.tree("c").messages) == 2
    finally:
        other.close()


def test_what_another_store_wrote_is_noticed_once(store: ChatStore) -> None:
    begin(store, *talk())
    assert not store.written_by_others()
    with closing(ChatStore(store.path)) as other:
        other.save(Conversation(id="d", title="from elsewhere")).result(DEADLINE_S)
    assert store.written_by_others()
    assert not store.written_by_others()


def test_what_is_closed_keeps_and_tells_nothing_more(tmp_path: Path) -> None:
    store = ChatStore(tmp_path / "chats.sqlite")
    waiting = store.save(Conversation(id="c"))
    store.close()
    assert waiting.result(DEADLINE_S) is None
    with pytest.raises(ChatError, match="closed"):
        store.save(Conversation(id="d")).result(DEADLINE_S)
    with pytest.raises(ChatError, match="closed"):
        store.conversations()


@pytest.mark.parametrize("version", range(1, VERSION))
def test_a_database_of_an_earlier_version_is_read(tmp_path: Path, version: int) -> None:
    path = tmp_path / "chats.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        for statement in (statement for script in SCRIPTS[:version] for statement in script):
            connection.execute(statement)
        values = {
            "conversation": ("c", "Title", "", 0, "q", "", "", "{}", "", "", None, 1, 1, None),
            "message": (1, "q", "c", 0, None, "user", "What is in it?", "", "{}", "done", None, 0, 2),
            "attachment": (1, "f", "q", "text", "a.py", "text/x-python", "", 3, "abc", *[0] * (0, 2, 3)[version - 1]),
        }
        for table, row in values.items():
            connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)
        connection.execute(f"PRAGMA user_version = {version}")
        connection.commit()
    with closing(ChatStore(path)) as store:
        assert [chat.title for chat in store.conversations()] == ["Title"]
        (message,) = store.tree("c").messages.values()
        (file,) = message.attachments
        assert (message.content, file.name, file.text) == ("What is in it?", "a.py", "abc")
        assert (file.width_px, file.height_px, file.length_ms) == (0, 0, 0)
        begin(store, *talk("later "), ident="d")
        assert len(store.search("trigram")) == 1
    with closing(sqlite3.connect(path)) as connection:
        assert version_of(connection) == VERSION


def newer(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def overwrite(path: Path) -> None:
    path.write_bytes(b"something else entirely" * 300)


@pytest.mark.parametrize(("damage", "word"), [(newer, "version 99"), (cut, "damaged"), (overwrite, "damaged")])
def test_what_cannot_be_read_is_kept_aside(tmp_path: Path, damage: object, word: str) -> None:
    path = tmp_path / "chats.sqlite"
    store = ChatStore(path)
    begin(store, *talk())
    store.close()
    assert store.notice == ""
    assert callable(damage)
    damage(path)
    kept = path.read_bytes()
    again = ChatStore(path)
    try:
        (aside,) = list(tmp_path.glob("chats-*.sqlite"))
        assert aside.name in again.notice
        assert word in again.notice
        assert aside.read_bytes() == kept
        # a newer program's conversations stay with it; of a damaged database the copy is opened
        assert [chat.id for chat in again.conversations()] == ([] if damage is newer else ["c"])
        begin(again, *talk("more "), ident="d")
        assert len(again.tree("d").messages) == 2
    finally:
        again.close()


def test_a_newer_database_that_is_in_use_stays_in_its_place(tmp_path: Path) -> None:
    """An older command line renamed it under the newer window, which went on writing to the renamed file."""
    path = tmp_path / "chats.sqlite"
    ChatStore(path).close()
    newer(path)
    with closing(sqlite3.connect(path)) as window:
        window.execute("SELECT * FROM conversation").fetchall()
        with pytest.raises(ChatError, match=r"version 99.*Another program has the database open"):
            ChatStore(path)
    assert not list(tmp_path.glob("chats-kept*"))


def test_a_place_that_cannot_hold_it_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ChatError, match="check the folder"):
        ChatStore(tmp_path / "file" / "chats.sqlite")


def test_a_text_of_any_length_is_looked_for(tmp_path: Path) -> None:
    with closing(ChatStore(tmp_path / "chats.db")) as store:
        store.save(Conversation(id="a" * 32, title="x" * 900)).result()
        assert store.search("x" * 60_000) == ()
        assert store.search("%" * 60_000) == ()
