"""The list of conversations in the whole window: no work while it is hidden, and no typed question is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtWidgets import QAbstractItemView
from pytestqt.qtbot import QtBot

from app.paths import chats_path
from app.wiring import WindowObjects
from engine.chat.conversation import Conversation as Chat
from engine.chat.message import Message
from engine.chat.store import ChatStore
from engine.chat.tree import MessageTree, add
from tests.support.models import write_tiny_llama
from tests.support.windows import WindowOpener
from widgets.chat.settings_panel import OTHER


@pytest.fixture
def window(monkeypatch: pytest.MonkeyPatch, open_window: WindowOpener, tmp_path: Path) -> WindowObjects:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return open_window("light")


def titles(window: WindowObjects) -> list[str]:
    view = window.main.chat_view.conversations.findChild(QAbstractItemView)
    assert isinstance(view, QAbstractItemView)
    model = view.model()
    return [model.index(row, 0).data() for row in range(model.rowCount())]


def test_a_hidden_list_is_filled_when_it_comes_into_sight(window: WindowObjects) -> None:
    archive = window.desk.archive
    window.actions["arrange_place"].trigger()
    for number in range(3):
        archive.save(Chat(id=f"c{number}", title=f"Chat {number}", created_ms=1, updated_ms=number), None)
    assert titles(window) == []
    window.actions["arrange_chat"].trigger()
    assert titles(window) == ["Chat 2", "Chat 1", "Chat 0"]
    window.actions["arrange_place"].trigger()
    window.desk.chat_controller.rename("c1", "Another\u202e")
    window.desk.chat_controller.toggle_pin("c0")
    assert titles(window) == ["Chat 2", "Chat 1", "Chat 0"]
    window.actions["arrange_chat"].trigger()
    assert titles(window) == ["Chat 0", "Chat 2", "Another\\u202e"]


def test_what_is_asked_comes_first_among_its_own(window: WindowObjects) -> None:
    archive = window.desk.archive
    window.actions["arrange_chat"].trigger()
    for number in range(4):
        archive.save(
            Chat(id=f"c{number}", title=f"Chat {number}", created_ms=1, updated_ms=number, pinned=number == 3), None
        )
    heard: list[None] = []
    archive.changed.connect(lambda: heard.append(None))
    question = Message(id="q", role="user", content="And then?")
    for chat in ("c0", "c0", "c3"):
        archive.apply(chat, MessageTree(), add(MessageTree(), question))
        assert titles(window)[0] == "Chat 3"
    assert titles(window) == ["Chat 3", "Chat 0", "Chat 2", "Chat 1"]
    assert len(heard) == 1


def test_what_is_typed_is_kept_when_another_is_begun_and_when_the_window_closes(
    window: WindowObjects, qtbot: QtBot
) -> None:
    archive, pane = window.desk.archive, window.views.current.chat
    with qtbot.waitSignal(archive.is_open_now):
        archive.start()
    window.actions["arrange_chat"].trigger()
    pane.prompt_edit.setPlainText("half a question")
    window.actions["new_chat"].trigger()
    assert [chat.draft for chat in archive.chats] == ["half a question"]
    assert pane.prompt_edit.toPlainText() == ""
    pane.prompt_edit.setPlainText("and anoth")
    pane.heading.settings_button.click()
    panel = pane.settings_panel
    assert panel is not None
    panel.system_edit.setPlainText("Be brief.")
    panel.template_field.choice_box.setCurrentText(OTHER)
    panel.template_field.text_edit.setPlainText("{{ messages }}")
    window.main.close()
    store = ChatStore(chats_path())
    kept = {chat.draft: chat for chat in store.conversations()}
    store.close()
    assert set(kept) == {"half a question", "and anoth"}
    assert kept["and anoth"].system == "Be brief."
    assert kept["and anoth"].template == "{{ messages }}"


def test_what_is_typed_is_kept_if_another_model_came_to_the_front(
    window: WindowObjects, qtbot: QtBot, tmp_path: Path
) -> None:
    archive, pane = window.desk.archive, window.views.current.chat
    with qtbot.waitSignal(archive.is_open_now):
        archive.start()
    for name in ("one", "two"):
        with qtbot.waitSignal(window.desk.opener.model_changed):
            window.desk.opener.open(write_tiny_llama(tmp_path / f"{name}.gguf"), keep_current=True)
    pane.prompt_edit.setPlainText("half a question")
    assert window.views.current.chat is not pane
    window.desk.chat_controller.leaving.emit()
    assert [chat.draft for chat in archive.chats] == ["half a question"]
