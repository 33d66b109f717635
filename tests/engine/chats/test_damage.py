"""One damaged page of the database loses what was on it and nothing else, whichever page it is; and it is said."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import pytest

from engine.chats import database
from engine.chats.conversation import Conversation
from engine.chats.message import Attachment, Message
from engine.chats.repair import mark_of
from engine.chats.store import ChatStore
from engine.chats.tree import MessageTree, edited, tree_of
from engine.errors import ChatError
from tests.support.patience import DEADLINE_S
from tests.support.selection import examples

PAGE_BYTES = 4096
CONVERSATIONS = 60
LONG = 20_000
"""Bytes of some messages: several pages of their own."""


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


@dataclass(frozen=True)
class Kept:
    """What was in a database: its bytes, trees by conversation, and which of those were deleted."""

    data: bytes
    trees: Mapping[str, MessageTree]
    deleted: frozenset[str]

    @property
    def n_pages(self) -> int:
        return len(self.data) // PAGE_BYTES


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    path = tmp_path_factory.mktemp("kept") / "chats.sqlite3"
    trees = {ident: talk(ident, number) for number in range(CONVERSATIONS) for ident in [f"c{number:03}"]}
    with closing(ChatStore(path)) as store:
        for ident, tree in trees.items():
            store.save(Conversation(id=f"{ident}", title=f"<{ident}> title", settings={"seed": 7}, leaf=tree.leaf))
            done = store.apply(ident, MessageTree(), tree)
        for gone in ("c013", "c014"):
            done = store.delete(gone)
        store.apply("c020", trees["c020"], MessageTree())
        done = store.apply("c020", MessageTree(), trees["c020"])  # so that pages were free once
        done.result(DEADLINE_S)
        read = {ident: store.tree(ident) for ident in trees}
    return Kept(path.read_bytes(), read, frozenset({"c013", "c014"}))


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
    with closing(ChatStore(path)) as store:

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
def test_what_was_on_a_damaged_page_is_all_that_is_lost(
    tmp_path: Path,
    kept: Kept,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[bytes, random.Random], bytes],
    is_large: bool,
) -> None:
    """Damage of a small database is found at the start, of a large one where it is met."""
    if is_large:
        monkeypatch.setattr(database, "CHECKED_WHOLE_BYTES", 0)
    numbers = random.Random(damage.__name__)
    places = [0, *numbers.sample(range(1, kept.n_pages), examples(40) // 2)]
    for place in places:
        path = tmp_path / str(place) / "chats.sqlite3"
        path.parent.mkdir()
        page = kept.data[place * PAGE_BYTES : (place + 1) * PAGE_BYTES]
        bad = damage(page, numbers)
        path.write_bytes(kept.data[: place * PAGE_BYTES] + bad + kept.data[(place + 1) * PAGE_BYTES :])
        notice, said = use(path, kept.trees, "first")
        assert all("is damaged" in sentence for sentence in said), (place, said)
        if said:
            assert is_large or damage is half, place
            assert not notice, (place, notice)
            notice, said = use(path, kept.trees, "second")
            assert "copied" in notice, place
        assert said == [], (place, notice)
        assert use(path, {}, "third") == ("", []), place
        assert not mark_of(path).exists()
        aside = path.with_name("chats-kept-1.sqlite3")
        assert aside.exists() == bool(notice)
        assert not notice or aside.name in notice
        with closing(ChatStore(path)) as store:
            there = {chat.id: chat for chat in store.conversations()}
            for ident, tree in kept.trees.items():
                assert (ident in there) == (ident not in kept.deleted) or ident.encode() in page, (place, ident)
                now = store.tree(ident).messages
                for message in tree.messages.values():
                    if f"{ident}-".encode() in page or message.content[:8].encode() in page:
                        continue
                    assert now.get(message.id) == message, (place, message.id)
            assert set(there) - set(kept.trees) <= {"first", "second", "third"}


def long_talk(path: Path, kept: Kept) -> tuple[bytes, Message]:
    message = next(each for each in kept.trees["c017"].messages.values() if len(each.content) >= LONG)
    path.write_bytes(kept.data)
    return kept.data, message


def test_a_long_message_loses_the_damaged_page_alone(tmp_path: Path, kept: Kept) -> None:
    path = tmp_path / "chats.sqlite3"
    data, message = long_talk(path, kept)
    text = message.content.encode()
    first = data.index(text[4000:4100]) // PAGE_BYTES  # its first page that is no leaf; others follow
    assert text[-2000:-1900] in data[(first + 1) * PAGE_BYTES :]
    damaged = first + 1
    path.write_bytes(data[: damaged * PAGE_BYTES] + b"\7" * PAGE_BYTES + data[(damaged + 1) * PAGE_BYTES :])
    notice, said = use(path, kept.trees, "first")
    assert ("copied" in notice, said) == (True, [])
    with closing(ChatStore(path)) as store:
        found = store.tree("c017").messages[message.id]
    before, _, after = found.content.partition("\ufffd")
    assert message.content.startswith(before)
    assert message.content.endswith(after)
    assert len(before) + len(after) >= len(message.content) - PAGE_BYTES
    assert "was lost" in found.note
    assert msgspec.structs.replace(found, content=message.content, note="") == message


def test_what_was_lost_leaves_the_rest_in_its_order(tmp_path: Path, kept: Kept) -> None:
    """A leaf with some messages of a conversation: what follows them still follows what came before."""
    path = tmp_path / "chats.sqlite3"

    def page_of(message: str) -> int:
        return kept.data.index(words(message, 300).encode()) // PAGE_BYTES

    parted = next(
        ident
        for number, ident in enumerate(kept.trees)
        if number % 5 and ident not in kept.deleted and page_of(f"<{ident}-q0>") < page_of(f"<{ident}-q2>")
    )
    damaged = page_of(f"<{parted}-q0>")
    path.write_bytes(kept.data[: damaged * PAGE_BYTES] + bytes(PAGE_BYTES) + kept.data[(damaged + 1) * PAGE_BYTES :])
    with closing(ChatStore(path)) as store:
        tree = store.tree(parted)
        assert {"assistant": "user", "user": "assistant"}[tree.path[0].role] == tree.path[1].role
        assert ["was lost" in message.content for message in tree.path] == [True] + [False] * (len(tree.path) - 1)
        assert tree.path[1:] == kept.trees[parted].path[-len(tree.path) + 1 :]


def test_a_database_that_another_program_has_open_is_repaired_later(tmp_path: Path, kept: Kept) -> None:
    path = tmp_path / "chats.sqlite3"
    path.write_bytes(kept.data)
    with closing(ChatStore(path)) as window:
        mark_of(path).touch()
        with closing(ChatStore(path)) as command_line:
            assert "another program" in command_line.notice
            command_line.save(Conversation(id="new")).result(DEADLINE_S)
        assert window.conversation("new") is not None
    with closing(ChatStore(path)) as store:
        assert "copied" in store.notice
        assert store.conversation("new") is not None


def test_a_repair_that_was_killed_is_done_again(tmp_path: Path, kept: Kept) -> None:
    path = tmp_path / "chats.sqlite3"
    path.with_name("chats-new.sqlite3").write_bytes(b"half of it")
    path.write_bytes(kept.data)
    mark_of(path).touch()
    with closing(ChatStore(path)) as store:
        assert len(store.conversations()) == CONVERSATIONS - 2
    assert not path.with_name("chats-new.sqlite3").exists()
    path.rename(path.with_name("chats-new.sqlite3"))
    mark_of(path).touch()
    with closing(ChatStore(path)) as store:
        assert (store.notice, len(store.conversations())) == ("", CONVERSATIONS - 2)
    assert not mark_of(path).exists()
