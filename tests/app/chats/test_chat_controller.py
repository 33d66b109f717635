"""Which conversation is shown after commands that overtake each other, and by which model."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from PySide6.QtCore import Qt

from engine.chat.conversation import Conversation as Chat
from engine.chat.message import Message
from engine.chat.tree import MessageTree, tree_of
from tests.app.chats.bench import SHORT, Bench


def keep(bench: Bench, *titles: str) -> list[str]:
    """Store a conversation with one question for each title; return their ids."""
    bench.wait(lambda: bench.desk.archive._store is not None)
    kept = []
    for title in titles:
        bench.conversation.begin()
        bench.conversation.change_chat(msgspec.structs.replace(bench.conversation.chat, title=title))
        bench.conversation.restore(tree_of((Message(id=f"q {title}", role="user", content=title),), f"q {title}"))
        kept.append(bench.conversation.chat.id)
    return kept


def hold_reads(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Let reads of conversations wait. Return the list of functions that deliver them."""
    waiting: list[Callable[[], None]] = []
    archive = bench.desk.archive
    read = archive.read

    def wait(chat: str, on_read: Callable[[Chat, MessageTree], None]) -> None:
        read(chat, lambda kept, tree: waiting.append(lambda: on_read(kept, tree)))

    monkeypatch.setattr(archive, "read", wait)
    return waiting


def test_the_newest_command_wins_over_conversations_that_are_still_read(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = keep(bench, "first", "second")
    conversation, controller = bench.conversation, bench.desk.chat_controller
    conversation.begin()
    reads = hold_reads(bench, monkeypatch)

    def deliver(count: int) -> None:
        bench.wait(lambda: len(reads) == count)
        while reads:
            reads.pop()()

    controller.open(first)
    bench.wait(lambda: len(reads) == 1)
    controller.open(second)
    deliver(2)
    assert conversation.chat.id == second
    controller.open(first)
    controller.new()
    deliver(1)
    assert conversation.is_empty
    controller.open(second)
    controller.delete(second)
    deliver(1)
    assert conversation.is_empty, "a deleted conversation is not shown"
    (third,) = keep(bench, "third")
    controller.open(first)
    controller.delete(third)
    deliver(1)
    assert conversation.chat.id == first, "another one was deleted"
    conversation.begin()
    # Text that is typed while a conversation is read is stored with the one before.
    before, typed = conversation.chat.id, "typed meanwhile"
    controller.open(first)
    controller.leaving.connect(
        lambda: conversation.change_chat(msgspec.structs.replace(conversation.chat, draft=typed)),
        Qt.ConnectionType.SingleShotConnection,
    )
    deliver(1)
    assert conversation.chat.id == first
    stored = bench.desk.archive.chat(before)
    assert stored is not None
    assert stored.draft == typed


def test_two_models_do_not_open_one_conversation(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.load(n_ctx=1 << 16)
    loaded, controller = bench.model, bench.desk.chat_controller
    conversation = loaded.conversation
    (other,) = keep(bench, "other")
    conversation.begin()
    conversation.change_chat(msgspec.structs.replace(conversation.chat, settings={**SHORT, "max_tokens": 60_000}))
    conversation.send("a long answer")
    answered = conversation.chat.id
    controller.open(other)
    bench.wait(lambda: conversation.chat.id == other)
    # The first model still writes an answer in the conversation that a second model opens.
    bench.desk.opener.open_again()
    bench.wait(lambda: bench.model is not loaded)
    copy = bench.model
    controller.open(answered)
    assert bench.model is loaded
    bench.wait(lambda: conversation.chat.id == answered)
    assert conversation.open_message is not None
    assert copy.conversation.chat.id != answered
    conversation.answering.stop()
    bench.answered()
    # Both models open a conversation, and the first read ends last.
    conversation.begin()
    reads = hold_reads(bench, monkeypatch)
    controller.open(other)
    bench.wait(lambda: len(reads) == 1)
    bench.desk.opener.show(copy)
    controller.open(other)
    bench.wait(lambda: len(reads) == 2)
    while reads:
        reads.pop()()
    assert copy.conversation.chat.id == other
    assert conversation.chat.id != other
