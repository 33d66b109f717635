"""A damaged page of the database: only messages after the last copy may be lost, and a notice says so."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from msgspec import Struct

from engine.base.errors import ChatError
from engine.chat import database
from engine.chat.conversation import Conversation
from engine.chat.copies import DatabaseCopies
from engine.chat.damaged_rows import add_readable_rows
from engine.chat.message import Attachment, Message
from engine.chat.recovery import damage_record
from engine.chat.store import ChatStore
from engine.chat.tool_calls import CallDelta
from engine.chat.tree import MessageTree, edited, tree_of
from tests.support.patience import DEADLINE_S
from tests.support.selection import examples

PAGE_BYTES = 4096
CONVERSATIONS = 100
LATE = 10
"""So many conversations were written after the last copy: 60 of about 600 messages."""
LONG = 20_000
"""Bytes of some messages: several pages of their own."""
FILE = b"attached " * 2000


def words(ident: str, size: int) -> str:
    """Return text in which `ident` stands at every place, so that each page that has some of it has that."""
    return f"{ident} is said; " * (size // len(f"{ident} is said; ") + 1)


def talk(ident: str, number: int) -> MessageTree:
    """Return turns of some lengths, one with an edited question and one with files."""
    messages: list[Message] = []
    for turn in range(3):
        size = LONG if (number + turn) % 17 == 0 else 300
        question, answer = f"<{ident}-q{turn}>", f"<{ident}-a{turn}>"
        parent = messages[-1].id if messages else None
        text = Attachment(
            id=f"<{ident}-f{turn}>", kind="text", name="a.txt", mime="", sha256="", size_bytes=1,
            text=words(question, size // 2),
        )  # fmt: skip
        messages += [
            Message(
                id=question, role="user", parent=parent, content=words(question, size),
                attachments=(text,) if turn == 1 else (),
            ),
            Message(id=answer, role="assistant", parent=question, content=words(answer, size), reasoning=answer * 3),
        ]  # fmt: skip
    tree = tree_of(messages, messages[-1].id)
    return edited(tree, messages[0].id, words(messages[0].id, 50), created_ms=1) if number % 5 == 0 else tree


class Saved(Struct, frozen=True, dict=True):
    """A database with a copy that is older than its last messages: the bytes of both, and what was in it by time."""

    data: bytes
    copies: Path
    early: dict[str, MessageTree]
    late: dict[str, MessageTree]

    @property
    def n_pages(self) -> int:
        return len(self.data) // PAGE_BYTES

    def put(self, path: Path, place: int, page: bytes) -> None:
        """Write both to a folder, with other bytes in the place of one page."""
        path.parent.mkdir(exist_ok=True)
        shutil.copytree(self.copies, DatabaseCopies(path).folder, dirs_exist_ok=True)
        path.write_bytes(self.data[: place * PAGE_BYTES] + page + self.data[(place + 1) * PAGE_BYTES :])

    def page(self, place: int) -> bytes:
        return self.data[place * PAGE_BYTES : (place + 1) * PAGE_BYTES]

    def place_of(self, text: bytes) -> int:
        """Return the last page with a text: the first ones are of the attachments' table or of earlier versions."""
        return self.data.rindex(text) // PAGE_BYTES


def save(store: ChatStore, trees: Mapping[str, MessageTree]) -> None:
    for ident, tree in trees.items():
        store.save(Conversation(id=ident, title=f"<{ident}> title", settings={"seed": 7}, leaf=tree.leaf))
        store.apply(ident, MessageTree(), tree)
    store.settled().result(DEADLINE_S)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    path = tmp_path_factory.mktemp("kept") / "chats.sqlite3"
    trees = {f"c{number:03}": talk(f"c{number:03}", number) for number in range(CONVERSATIONS)}
    early = dict(list(trees.items())[:-LATE])
    late = {ident: tree for ident, tree in trees.items() if ident not in early}
    with closing(ChatStore(path, makes_copies=False)) as store:
        save(store, early)
        store.apply("c020", early["c020"], MessageTree())
        store.apply("c020", MessageTree(), early["c020"])  # so that pages were free once
        store.keep_file(FILE)[1].result(DEADLINE_S)
        DatabaseCopies(path).make()
        save(store, late)
        early = {ident: store.tree(ident) for ident in early}
        late = {ident: store.tree(ident) for ident in late}
    return Saved(path.read_bytes(), DatabaseCopies(path).folder, early, late)


def byte(page: bytes, numbers: random.Random) -> bytes:
    return bytes([numbers.randrange(256)]) * len(page)


def zeros(page: bytes, _numbers: random.Random) -> bytes:
    return bytes(len(page))


def noise(page: bytes, numbers: random.Random) -> bytes:
    return numbers.randbytes(len(page))


def half(page: bytes, numbers: random.Random) -> bytes:
    return page[: len(page) // 2] + numbers.randbytes(len(page) - len(page) // 2)


def use(path: Path, trees: Mapping[str, MessageTree], new: str) -> tuple[str, list[str]]:
    """Do all that people do with conversations; return what is said at the start and what went wrong."""
    said = []
    with closing(ChatStore(path, makes_copies=False)) as store:

        def tried(work: Callable[[], object]) -> None:
            try:
                work()
            except ChatError as error:
                said.append(error.summary())

        tried(store.conversations)
        for ident in trees:
            tried(partial(store.tree, ident))
        tried(lambda: store.search("is said; <c05"))
        tried(lambda: store.save(Conversation(id=new, title="new")).result(DEADLINE_S))
        tried(lambda: store.apply(new, MessageTree(), talk(new, 0)).result(DEADLINE_S))
        return store.notice, said


@pytest.mark.parametrize(
    ("damage", "is_large"), [(byte, False), (byte, True), (zeros, True), (noise, True), (half, False)]
)
def test_a_damaged_page_loses_messages_after_the_last_copy_at_most(
    tmp_path: Path,
    saved: Saved,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[bytes, random.Random], bytes],
    is_large: bool,
) -> None:
    """Damage of a small database is found at the start, of a large one when it is met."""
    if is_large:
        monkeypatch.setattr(database, "CHECKED_WHOLE_BYTES", 0)
    numbers = random.Random(damage.__name__)
    lost = []
    for place in [0, *numbers.sample(range(1, saved.n_pages), examples(150) // 5 - 1)]:
        path = tmp_path / str(place) / "chats.sqlite3"
        saved.put(path, place, damage(saved.page(place), numbers))
        notice, said = use(path, saved.early | saved.late, "first")
        assert all("is damaged" in sentence for sentence in said), (place, said)
        if said:
            assert is_large or damage is half, place
            assert not notice, (place, notice)
            notice, said = use(path, saved.early | saved.late, "second")
        assert said == [], (place, notice)
        assert use(path, {}, "third") == ("", []), place
        assert not damage_record(path).exists()
        aside = path.with_name("chats-kept-1.sqlite3")
        assert aside.exists() == bool(notice)
        if not notice:
            continue  # the page was of an index, a free one, or nobody notices
        assert aside.name in notice
        assert "the copy of" in notice
        assert "lost" in notice
        with closing(ChatStore(path, makes_copies=False)) as store:
            for ident, tree in saved.early.items():
                assert store.tree(ident) == tree, (place, ident)
            found = [
                store.tree(ident).messages.get(message.id) == message
                for ident, tree in saved.late.items()
                for message in tree.messages.values()
            ]
            assert store.file(store.keep_file(FILE)[0]) == FILE
            there = {chat.id for chat in store.conversations()}
            assert there <= {*saved.early, *saved.late, "first", "second", "third"}
        lost.append(found.count(False))
        if "No message is lost" in notice:
            assert all(found), (place, notice)
        shutil.rmtree(path.parent)
    print(f"{damage.__name__}: messages written after the copy and lost, by page: {sorted(lost)}")


def test_a_lost_message_is_named_in_its_place_and_the_rest_keeps_its_order(tmp_path: Path, saved: Saved) -> None:
    """Without a copy: what plain SQL can read of the damaged file is in a new one."""
    path = tmp_path / "chats.sqlite3"
    parted = next(
        ident
        for ident in saved.early
        if not ident.endswith(("0", "5"))
        and saved.place_of(words(f"<{ident}-q0>", 300).encode()) < saved.place_of(words(f"<{ident}-q2>", 300).encode())
    )
    place = saved.place_of(words(f"<{parted}-q0>", 300).encode())
    saved.put(path, place, bytes(PAGE_BYTES))
    shutil.rmtree(DatabaseCopies(path).folder)
    with closing(ChatStore(path, makes_copies=False)) as store:
        assert "There was no backup" in store.notice
        tree = store.tree(parted)
        assert {"assistant": "user", "user": "assistant"}[tree.path[0].role] == tree.path[1].role
        assert ["was lost" in message.content for message in tree.path] == [True] + [False] * (len(tree.path) - 1)
        assert tree.path[1:] == saved.early[parted].path[-len(tree.path) + 1 :]


def test_messages_without_their_conversation_are_listed_again(tmp_path: Path, saved: Saved) -> None:
    path = tmp_path / "chats.sqlite3"
    last = max(saved.late)
    saved.put(path, 0, saved.page(0))
    page = saved.place_of(f"<{last}> title".encode())
    saved.put(path, page, bytes(PAGE_BYTES))
    with closing(ChatStore(path, makes_copies=False)) as store:
        assert "No message is lost" in store.notice
        titles = {chat.id: chat.title for chat in store.conversations()}
        assert titles[last].startswith(f"<{last}-q0> is said")
        assert store.tree(last).messages == saved.late[last].messages


def test_an_answer_that_went_on_after_the_copy_is_whole(tmp_path: Path) -> None:
    """Also one of which the copy has only pieces; and the copy's text stays if the damaged file has another one."""
    path = tmp_path / "chats.sqlite3"
    question = Message(id="q", role="user", content="Why?")
    begun = Message(id="a", role="assistant", parent="q", content="", state="writing")
    with closing(ChatStore(path, makes_copies=False)) as store:
        store.save(Conversation(id="c"))
        store.apply("c", MessageTree(), tree_of([question, begun], "a"))
        store.append("a", "Because ").result(DEADLINE_S)
        DatabaseCopies(path).make()
        whole = Message(id="a", role="assistant", parent="q", content="Because it is.", created_ms=1)
        store.finish("c", whole).result(DEADLINE_S)
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE message SET content = 'garbage' WHERE id = 'q'")
    damage_record(path).touch()
    with closing(ChatStore(path, makes_copies=False)) as store:
        assert "1 later message" in store.notice
        assert store.tree("c").path == (question, whole)


def test_a_database_that_another_program_has_open_is_recovered_later(tmp_path: Path, saved: Saved) -> None:
    path = tmp_path / "chats.sqlite3"
    saved.put(path, 0, saved.page(0))
    with closing(ChatStore(path, makes_copies=False)) as window:
        damage_record(path).touch()
        with closing(ChatStore(path, makes_copies=False)) as command_line:
            assert "Another program" in command_line.notice
            command_line.save(Conversation(id="new")).result(DEADLINE_S)
        assert window.conversation("new") is not None
    with closing(ChatStore(path, makes_copies=False)) as store:
        assert "No message is lost" in store.notice
        assert store.conversation("new") is not None


def test_a_recovery_that_was_killed_is_done_again(tmp_path: Path, saved: Saved) -> None:
    path = tmp_path / "chats.sqlite3"
    saved.put(path, 0, saved.page(0))
    path.with_name("chats-new.sqlite3").write_bytes(b"half of it")
    damage_record(path).touch()
    with closing(ChatStore(path, makes_copies=False)) as store:
        assert len(store.conversations()) == CONVERSATIONS
    assert not path.with_name("chats-new.sqlite3").exists()
    path.rename(path.with_name("chats-new.sqlite3"))
    damage_record(path).touch()
    with closing(ChatStore(path, makes_copies=False)) as store:
        assert (store.notice, len(store.conversations())) == ("", CONVERSATIONS)
    assert not damage_record(path).exists()


def test_a_damaged_copy_is_passed_over(tmp_path: Path, saved: Saved) -> None:
    path = tmp_path / "chats.sqlite3"
    saved.put(path, 0, bytes(PAGE_BYTES))
    copies = DatabaseCopies(path)
    (sound,) = copies.paths()
    newer = sound.with_name("chats-99990101-000000.sqlite3")
    newer.write_bytes(sound.read_bytes()[:PAGE_BYTES] + bytes(20 * PAGE_BYTES))
    with closing(ChatStore(path, makes_copies=False)) as store:
        assert f"{copies.time_of(sound):%Y-%m-%d %H:%M}" in store.notice
        assert {chat.id for chat in store.conversations()} == set(saved.early)


def test_a_cell_that_the_copy_cannot_read_either_is_emptied(tmp_path: Path) -> None:
    """Each start recovered the database anew, and all conversations stayed unreadable."""
    path = tmp_path / "chats.sqlite3"
    with closing(ChatStore(path, makes_copies=False)) as store:
        save(store, {"good": talk("good", 1), "bad": talk("bad", 1)})
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE conversation SET settings = '{\"seed\": ' WHERE id = 'bad'")
            connection.execute("UPDATE message SET details = '[]' WHERE id = '<bad-a0>'")
        DatabaseCopies(path).make()
        with pytest.raises(ChatError, match="is damaged"):
            store.conversations()
    with closing(ChatStore(path, makes_copies=False)) as store:
        assert "No message is lost" in store.notice
        assert {chat.id: chat.settings for chat in store.conversations()} == {"good": {"seed": 7}, "bad": {}}
        assert store.tree("bad") == talk("bad", 1)


def test_what_cannot_be_read_of_tools_is_not_taken_into_the_new_database(tmp_path: Path) -> None:
    damaged, new = tmp_path / "damaged.sqlite", tmp_path / "new.sqlite"
    with closing(ChatStore(damaged)) as store:
        for ident in ("good", "bad"):
            store.save(Conversation(id=ident, title=ident, results={"a/b": "typed"}))
            question = Message(id=f"{ident}-q", role="user", content="Where?")
            answer = Message(id=f"{ident}-a", role="assistant", content="", parent=f"{ident}-q", state="writing")
            store.apply(ident, MessageTree(), tree_of((question, answer), answer.id))
            store.append(answer.id, content="I ", calls=(CallDelta(0, "{}", "id1", "look"),))
            store.append(answer.id, content="look").result(DEADLINE_S)
    with closing(sqlite3.connect(damaged)) as connection:
        connection.execute("UPDATE conversation SET results = '{\"a/b\": 1}' WHERE id = 'bad'")
        connection.execute("UPDATE piece SET calls = '[{' WHERE calls <> '' AND message = 'bad-a'")
        connection.commit()
    ChatStore(new).close()
    with closing(sqlite3.connect(new, isolation_level=None)) as connection:
        add_readable_rows(damaged, connection)
    with closing(ChatStore(new)) as store:
        assert {chat.title: chat.results for chat in store.conversations()} == {"good": {"a/b": "typed"}, "bad": {}}
        found = {ident: store.tree(ident).messages[f"{ident}-a"] for ident in ("good", "bad")}
    assert (found["good"].content, [call.name for call in found["good"].calls]) == ("I look", ["look"])
    assert (found["bad"].content, found["bad"].calls) == ("I look", ())
