"""The main window as a whole, without devices or children: names for screen readers, menus, theme."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from PySide6.QtCore import QPoint, Qt
from PySide6.QtGui import QAccessible, QAction
from PySide6.QtWidgets import QApplication, QWidget
from pytestqt.qtbot import QtBot

from app.settings import Settings
from app.theme import THEME_NAMES
from app.window.help import KeysDialog
from app.wiring import WindowObjects
from engine.chat.conversation import Conversation as Chat
from engine.chat.message import Message
from engine.chat.tree import tree_of
from engine.devices.device import Device
from tests.support.models import write_tiny_llama
from tests.support.windows import WindowOpener
from widgets.devices.readings import CardAlert
from widgets.library.recent_models import RecentModel


@pytest.fixture
def window(open_window: WindowOpener, tmp_path: Path) -> WindowObjects:
    settings = Settings(tmp_path / "settings.ini")
    settings.add_recent_model(RecentModel(tmp_path / "a&b.gguf", "a & b", "F16"))
    settings.sync()
    opened = open_window()
    opened.model_presenter.show_recent_models()
    return opened


def focusable(window: QWidget) -> list[QWidget]:
    return [
        widget
        for widget in window.findChildren(QWidget)
        if widget.focusPolicy() & Qt.FocusPolicy.TabFocus and widget.isVisibleTo(window) and widget.focusProxy() is None
    ]


def test_everything_that_takes_the_keyboard_has_a_name(window: WindowObjects) -> None:
    found = focusable(window.main)
    assert len(found) > 15
    nameless = []
    for widget in found:
        interface = QAccessible.queryAccessibleInterface(widget)
        if interface is None or not interface.text(QAccessible.Text.Name):
            nameless.append(f"{type(widget).__name__} in {type(widget.parent()).__name__}")
    assert nameless == []


def test_the_menus_know_recent_models_and_the_theme(window: WindowObjects) -> None:
    recent = window.main.recent_menu
    assert [action.text() for action in recent.actions() if action.text()] == ["a && b", "&Clear the List"]
    window.actions["theme_light"].trigger()
    assert window.theme.palette.name == "light"
    assert [name for name in THEME_NAMES if window.actions[f"theme_{name}"].isChecked()] == ["light"]
    assert window.desk.settings.theme == "light"
    recent.actions()[-1].trigger()
    assert not recent.isEnabled()


@pytest.mark.parametrize(
    ("name", "preference"),
    [
        ("step_back", "steps_back"),
        ("reload_lost", "reload_lost"),
        ("drop_oldest_turns", "drops_oldest_turns"),
        ("ask_when_full", "asks_when_full"),
    ],
)
def test_a_switch_of_the_menus_is_a_preference(window: WindowObjects, name: str, preference: str) -> None:
    action, settings = window.actions[name], window.desk.settings
    for _ in range(2):
        wanted = not action.isChecked()
        action.trigger()
        assert action.isChecked() is getattr(settings, preference) is wanted


def test_a_theme_switch_restyles_pictures_too(window: WindowObjects, qapp: QApplication) -> None:
    window.actions["theme_light"].trigger()
    light = window.main.grab().toImage()
    assert "arrow-light.svg" in qapp.styleSheet()
    window.actions["theme_dark"].trigger()
    dark = window.main.grab().toImage()
    assert "arrow-dark.svg" in qapp.styleSheet()
    changed = 0
    points = [(x, y) for x in range(5, dark.width(), 40) for y in range(5, dark.height(), 40)]
    for x, y in points:
        assert dark.pixelColor(x, y).lightness() < 128 or light.pixelColor(x, y) != dark.pixelColor(x, y)
        changed += light.pixelColor(x, y) != dark.pixelColor(x, y)
    assert changed > 0.95 * len(points)


def test_the_table_of_keys_names_every_shortcut_once(window: WindowObjects, qtbot: QtBot) -> None:
    shortcuts = window.actions.shortcuts()
    assert shortcuts["Ctrl+Return"] == "Load"
    window.actions["keys"].trigger()
    dialog = window.main.findChild(KeysDialog)
    assert dialog is not None
    dialog.close()


def test_no_key_is_given_to_two_actions(window: WindowObjects) -> None:
    keys = [action.shortcut().toString() for action in window.main.findChildren(QAction)]
    assert [key for key, count in Counter(filter(None, keys)).items() if count > 1] == []


def test_panels_come_back_where_they_were(window: WindowObjects) -> None:
    for dock in window.main.docks.values():
        dock.hide()
    window.main.reset_docks()
    assert all(dock.isVisible() for dock in window.main.docks.values())


@pytest.mark.parametrize("covered_by", ["arrange_chat", "library"])
def test_panels_come_back_from_pages_that_cover_them(window: WindowObjects, covered_by: str) -> None:
    main = window.main
    main.docks["models"].hide()
    window.actions[covered_by].trigger()
    window.actions["reset_docks"].trigger()
    assert not window.library_presenter.page.is_shown
    assert main.editor.isVisible()
    assert all(dock.isVisible() for dock in main.docks.values())
    window.actions["arrange_both"].trigger()
    assert all(dock.isVisible() for dock in main.docks.values())


def test_three_arrangements_a_key_away_and_remembered(window: WindowObjects, open_window: WindowOpener) -> None:
    main = window.main
    window.actions["arrange_chat"].trigger()
    assert main.chat_view.isVisible()
    assert main.device_strip.line.isVisible()
    assert main.chat_view.conversations.isVisible()
    assert not main.editor.isVisible()
    assert not main.model_panel.isVisible()
    window.actions["arrange_place"].trigger()
    assert main.editor.isVisible()
    assert main.model_panel.isVisible()
    assert not main.device_strip.line.isVisible()
    assert not main.chat_view.isVisible()
    window.actions["arrange_both"].trigger()
    assert main.editor.isVisible()
    assert main.chat_view.isVisible()
    window.actions["arrange_chat"].trigger()
    main.close()
    again = open_window()
    assert again.main.device_strip.line.isVisible()
    assert not again.main.editor.isVisible()
    again.actions["arrange_both"].trigger()
    assert all(dock.isVisible() for dock in again.main.docks.values())
    again.main.close()


def test_the_chat_beside_the_layers_is_as_wide_as_before(window: WindowObjects, qapp: QApplication) -> None:
    chat, models = window.main.docks["chat"], window.main.docks["models"]
    window.actions["arrange_both"].trigger()
    qapp.processEvents()
    widths = chat.width(), models.width()
    for name in ("chat", "both", "place", "chat", "place", "both"):
        window.actions[f"arrange_{name}"].trigger()
        qapp.processEvents()
    assert (chat.width(), models.width()) == widths


def test_the_chat_alone_and_a_new_conversation_wait_for_words(window: WindowObjects, qapp: QApplication) -> None:
    prompt = window.views.current.chat.prompt_edit
    window.main.settings_bar.setFocus()
    window.actions["arrange_chat"].trigger()
    assert window.main.focusWidget() is prompt
    window.actions["arrange_both"].trigger()
    window.main.model_panel.setFocus()
    window.actions["new_chat"].trigger()
    assert window.main.focusWidget() is prompt


def test_an_alert_is_seen_while_the_chat_is_alone(window: WindowObjects) -> None:
    strip = window.main.device_strip
    device = Device("GPU0", "card", "CUDA", "gpu", 8 << 30)
    strip.set_devices([device])
    window.actions["arrange_chat"].trigger()
    strip.set_alerts({"GPU0": CardAlert("nearly full", "GPU0 has 100 MiB left; unload something.")})
    assert "nearly full" in strip.line.accessibleDescription()
    assert "unload something" in strip.line.toolTip()


def test_an_empty_report_leaves_the_room_to_the_editor(window: WindowObjects) -> None:
    main = window.main
    assert main.reports.height() <= 52
    main.open_report()
    assert main.reports.maximumHeight() > 10_000


def test_two_models_beside_each_other(window: WindowObjects, qtbot: QtBot, tmp_path: Path) -> None:
    notices: list[str] = []
    window.desk.notices.given.connect(lambda notice: notices.append(notice.text))
    window.actions["side_by_side"].trigger()
    assert "open a second model, or open this model a second time" in notices[-1]
    models = window.desk.models
    for name in ("ada", "bob"):
        window.desk.opener.open(write_tiny_llama(tmp_path / f"{name}.gguf", n_layers=2))
        qtbot.waitUntil(lambda name=name: models.current.name == name)  # type: ignore[misc]
        # else the next one takes its place
        models.current.conversation.open(Chat(id=name), tree_of((Message(id="q", role="user", content="Hello"),), "q"))
    ada, bob = models.all
    window.actions["side_by_side"].trigger()
    chats = {model.name: window.views.of(model).chat for model in models.all}
    assert all(chat.isVisible() for chat in chats.values())
    assert not window.main.editor.isVisible()
    QApplication.processEvents()
    left = chats["bob"].mapToGlobal(QPoint(0, 0)).x()
    assert left < chats["ada"].mapToGlobal(QPoint(0, 0)).x()
    for name in ("ada", "bob"):
        chats[name].prompt_edit.setFocus()
        qtbot.waitUntil(lambda name=name: models.current.name == name)  # type: ignore[misc]
        assert all(chat.isVisible() for chat in chats.values())
        assert window.desk.document.model is models.current.file
        assert chats["bob"].mapToGlobal(QPoint(0, 0)).x() == left
    chats["ada"].prompt_edit.setFocus()
    qtbot.waitUntil(lambda: models.current is ada)
    window.main.chat_view.close_button.click()
    assert chats["ada"].isVisible()
    assert not chats["bob"].isVisible()
    assert window.main.editor.isVisible(), "the arrangement from before is back"
    window.desk.opener.show(bob)
    assert chats["bob"].isVisible()
    window.actions["side_by_side"].trigger()
    assert chats["ada"].isVisible()
    window.actions["arrange_both"].trigger()
    assert not chats["ada"].isVisible()
    assert chats["bob"].isVisible()
