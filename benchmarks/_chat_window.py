"""Part of `chat_view`: how long one change blocks the event loop of a window with many stored conversations."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

SIZE = 1440, 900
DEADLINE_S = 120.0
MESSAGES = 2


def measure(application: Any, theme: Any, count: int) -> dict[str, float]:
    """Return the longest turn of the event loop for each action, in milliseconds of the GUI thread's processor time.

    First the list of conversations is hidden: reading the archive, a question, a rename. `into_sight` shows the list.
    Then a question and a rename follow with the list shown, and a conversation is opened. `XDG_DATA_HOME` must be a
    temporary folder, since `count` conversations are written there.
    """
    from app.paths import chats_path, settings_path
    from app.settings import Settings
    from app.wiring import make_window

    _fill(count)
    window = make_window(Settings(settings_path()), theme)
    window.main.resize(*SIZE)
    window.main.show()
    _turns(application, 1.0)
    archive, controller = window.desk.archive, window.desk.chat_controller
    found: dict[str, float] = {}

    found["archive"] = _longest(application, archive.start, lambda: len(archive.chats) == count)
    _measure_changes(application, window, found, "hidden", count // 2)
    found["into_sight"] = _longest(application, window.actions["arrange_chat"].trigger, lambda: True)
    _measure_changes(application, window, found, "shown", count // 3)
    middle = f"c{count // 4}"
    conversation = window.desk.models.current.conversation
    found["open"] = _longest(application, lambda: controller.open(middle), lambda: conversation.chat.id == middle)
    window.main.close()
    _turns(application, 0.5)
    assert chats_path().exists()
    return {name: round(milliseconds, 1) for name, milliseconds in found.items()}


def _measure_changes(application: Any, window: Any, found: dict[str, float], where: str, number: int) -> None:
    from engine.chat.message import Message
    from engine.chat.tree import MessageTree, add

    archive, controller, chat = window.desk.archive, window.desk.chat_controller, f"c{number}"
    question = Message(id=f"question in {chat}", role="user", content="And then?")
    found[f"question_{where}"] = _longest(
        application,
        lambda: archive.apply(chat, MessageTree(), add(MessageTree(), question)),
        lambda: archive.chats[0].id == chat,
    )
    found[f"rename_{where}"] = _longest(
        application,
        lambda: controller.rename(chat, "Another title"),
        lambda: archive.chat(chat).title == "Another title",
    )


def _fill(count: int) -> None:
    from app.paths import chats_path
    from engine.chat.conversation import Conversation
    from engine.chat.message import Message
    from engine.chat.store import ChatStore
    from engine.chat.tree import MessageTree, tree_of

    store = ChatStore(chats_path())
    for number in range(count):
        ident = f"c{number}"
        store.save(
            Conversation(
                id=ident, title=f"Conversation {number} about something", created_ms=number, updated_ms=number + 1
            )
        )
        messages = [
            Message(id=f"{ident}.0", role="user", content="What is a layer?"),
            Message(id=f"{ident}.1", role="assistant", content="One step.", parent=f"{ident}.0"),
        ]
        store.apply(ident, MessageTree(), tree_of(messages, messages[-1].id))
    store.settled().result()
    store.close()


def _longest(application: Any, act: Callable[[], object], is_done: Callable[[], bool]) -> float:
    """Return the longest of `act` and all turns of the event loop, in milliseconds of the GUI thread's processor time.

    The turns end half a second after `is_done` returns true.
    """
    used = time.thread_time()
    act()
    longest = time.thread_time() - used
    deadline_s, end_s = time.perf_counter() + DEADLINE_S, None
    while end_s is None or time.perf_counter() < end_s:
        used = time.thread_time()
        application.processEvents()
        longest = max(longest, time.thread_time() - used)
        now_s = time.perf_counter()
        if end_s is None and is_done():
            end_s = now_s + 0.5
        if now_s > deadline_s:
            raise TimeoutError
        time.sleep(0.002)
    return longest * 1000


def _turns(application: Any, seconds: float) -> None:
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        application.processEvents()
        time.sleep(0.005)
