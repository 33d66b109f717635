"""Accessibility of the whole window: names for screen readers, and use by keyboard alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from PySide6.QtCore import QRect, QSize, Qt
from PySide6.QtGui import QAccessible, QImage
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QDialog, QLabel, QPushButton, QScrollArea, QWidget
from pytestqt.qtbot import QtBot

from app.bug_report import BugDialog
from app.window.about_dialog import AboutContents, AboutDialog
from app.window.devices.doctor_dialog import DoctorDialog
from app.window.devices.lend_dialog import LendDialog
from app.window.devices.nearby_dialog import NearbyDialog
from app.window.devices.packs_dialog import PacksDialog
from app.window.main_window import SCREEN_ROOM
from app.window.preferences import PreferencesDialog
from app.wiring import WindowObjects
from engine.devices.rig_file import encode_rig
from engine.model.demo.speaking import SAMPLE_PROMPTS
from engine.runtime.session.events import Cancelled
from tests.support.accessibility import interface_of, name_of, nameless, walk
from tests.support.models import write_tiny_llama
from tests.support.previews import make_gpu, make_rig
from tests.support.windows import WindowOpener
from widgets.bench.compare_dialog import CompareDialog
from widgets.chat.chat_heading import ContextSegment
from widgets.chat.saved_kv_states_dialog import SavedKvStatesDialog
from widgets.chat.token_dialogs import ChoicesDialog, PromptDialog
from widgets.common.elided_label import ElidedLabel
from widgets.common.palette import DARK
from widgets.controls.exchange_dialogs import ExportLayoutDialog, ImportLayoutDialog
from widgets.controls.named_layouts_dialog import NamedLayoutsDialog
from widgets.controls.settings_bar import ModelButton
from widgets.devices.device_details import DeviceDetails
from widgets.devices.limits import LimitsDialog
from widgets.devices.other_cards import OtherCardsDialog
from widgets.layout_editor.comparison_dialog import ComparisonDialog
from widgets.library.together_dialog import ModelToChoose, TogetherDialog
from widgets.serve.request_table import RequestRow
from widgets.serve.serve_pane import ServePane

DIALOGS = ("keys", "start_lab", "add_remote", "auto_layout", "settings")
"""Commands that open one."""
MADE: dict[str, Callable[[WindowObjects], QDialog]] = {
    "AboutDialog": lambda window: AboutDialog(
        window.main, AboutContents((("Qt", "6"),), (("Log", "~"),), "MIT", "others")
    ),
    "BugDialog": lambda window: BugDialog("Traceback", window.main),
    "ChoicesDialog": lambda window: ChoicesDialog(window.main),
    "CompareDialog": lambda window: CompareDialog(window.main),
    "ComparisonDialog": lambda window: ComparisonDialog(window.main),
    "DeviceDetails": lambda window: DeviceDetails(make_gpu("CUDA0", 12), DARK, window.main),
    "DoctorDialog": lambda window: DoctorDialog(window.main, window.desk.examiner),
    "ExportLayoutDialog": lambda window: ExportLayoutDialog([("python", "Python")], window.main),
    "ImportLayoutDialog": lambda window: ImportLayoutDialog(window.main),
    "SavedKvStatesDialog": lambda window: SavedKvStatesDialog(window.main),
    "LendDialog": lambda window: LendDialog(window.main, window.desk.rig.lender, window.desk.rig.live),
    "LimitsDialog": lambda window: LimitsDialog(make_gpu("CUDA0", 12), window.main),
    "NamedLayoutsDialog": lambda window: NamedLayoutsDialog(window.main),
    "NearbyDialog": lambda window: NearbyDialog(window.main, window.desk.rig.peers),
    "OtherCardsDialog": lambda window: OtherCardsDialog(("RTX 3090",), ("fits",), window.main),
    "PacksDialog": lambda window: PacksDialog(window.main, window.desk.rig.packs),
    "PreferencesDialog": lambda window: PreferencesDialog(
        window.actions, window.theme, window.desk.settings, lambda _seconds: None, window.main
    ),
    "PromptDialog": lambda window: PromptDialog(window.main),
    "TogetherDialog": lambda window: TogetherDialog((ModelToChoose("chat", Path("chat.gguf")),), window.main),
}
"""The others: as they are before anything is looked for."""
OPENED = {"AutoLayoutDialog", "KeysDialog", "LineDialog", "SettingsDialog"}
"""What `DIALOGS` open."""


@pytest.fixture
def window(monkeypatch: pytest.MonkeyPatch, open_window: WindowOpener, qtbot: QtBot, tmp_path: Path) -> WindowObjects:
    """A window with two cards and a model."""
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    for name in ("LLAMA_CACHE", "OLLAMA_MODELS", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "rig.json").write_bytes(encode_rig(make_rig(make_gpu("CUDA0", 12), make_gpu("CUDA1", 16))))
    model = write_tiny_llama(tmp_path / "m.gguf", n_layers=4)
    opened = open_window()
    with qtbot.waitSignal(opened.desk.rig.live.rig_changed):
        opened.desk.rig.files.open(tmp_path / "rig.json")
    with qtbot.waitSignal(opened.desk.opener.model_changed):
        opened.desk.opener.open(model)
    return opened


def show_library(window: WindowObjects) -> None:
    window.actions["library"].trigger()


def show_find(window: WindowObjects) -> None:
    window.actions["library"].trigger()
    window.desk.finder.access.set_offline(True)
    window.library_presenter.page.view.show_find()


def show_chat(window: WindowObjects) -> None:
    window.actions["arrange_chat"].trigger()
    window.views.current.chat.heading.settings_button.click()


def show_server(window: WindowObjects, tab: int) -> None:
    window.actions["arrange_both"].trigger()
    window.actions["serve"].trigger()
    pane = window.main.findChildren(ServePane)[0]
    pane.show_requests([RequestRow(1, ("12:00:00", "127.0.0.1", "m", "7", "8", "9.0", "0.10 s", "200"))])
    pane.tabs.setCurrentIndex(tab)


PLACES: dict[str, Callable[[WindowObjects], None]] = {
    "layers": lambda window: window.actions["arrange_place"].trigger(),
    "both": lambda window: window.actions["arrange_both"].trigger(),
    "chat": show_chat,
    "requests": partial(show_server, tab=0),
    "address": partial(show_server, tab=1),
    "programs": partial(show_server, tab=2),
    "library": show_library,
    "find": show_find,
}


def dialog_of(window: WindowObjects, name: str) -> QWidget:
    """Return the dialog that a command opens, or a presenter."""
    if name == "settings":
        window.settings_presenter.show()
    else:
        window.actions[name].trigger()
    return next(dialog for dialog in window.main.findChildren(QDialog) if dialog.isVisible())


def test_every_control_says_what_it_is(window: WindowObjects) -> None:
    found = {}
    for place, show in PLACES.items():
        show(window)
        roles = {each.role() for each in walk(interface_of(window.main))}
        assert {QAccessible.Role.MenuItem, QAccessible.Role.Button} <= roles
        found[place] = nameless(window.main)
    window.actions["library"].trigger()
    for name in DIALOGS:
        dialog = dialog_of(window, name)
        assert name_of(interface_of(dialog))
        found[name] = nameless(dialog)
        dialog.close()
    lines = [f"{place}: {each}" for place, names in found.items() for each in names]
    assert lines == [], "\n".join(lines)


def test_every_other_dialog_says_what_its_controls_are(window: WindowObjects) -> None:
    found = {}
    for name, make in MADE.items():
        dialog = make(window)
        dialog.show()
        assert name_of(interface_of(dialog))
        found[name] = nameless(dialog)
        dialog.close()
    assert {name: names for name, names in found.items() if names} == {}


def test_no_dialog_is_left_out() -> None:
    root = Path(__file__).resolve().parents[3]
    sources = [path for folder in ("app", "widgets") for path in (root / folder).rglob("*.py")]
    found = [pair for path in sources for pair in re.findall(r"class (\w+)\((\w*Dialog)\)", path.read_text("utf-8"))]
    # Classes that others are made of are no dialogs themselves.
    assert {name for name, _ in found} - {base for _, base in found} == OPENED | MADE.keys()


def focusable(window: WindowObjects) -> list[QWidget]:
    """Return what Tab reaches, as people see it now."""
    return [
        widget
        for widget in window.main.findChildren(QWidget)
        if widget.focusPolicy() & Qt.FocusPolicy.TabFocus
        and widget.focusProxy() is None
        and widget.isVisibleTo(window.main)
        and widget.isEnabled()
        and widget.window() is window.main
    ]


def picture(widget: QWidget, frame: QRect) -> QImage:
    """Return how the window looks at `widget`, with its surroundings."""
    return widget.window().grab(frame).toImage()


def changed_pixels(before: QImage, after: QImage) -> int:
    return sum(
        before.pixel(x, y) != after.pixel(x, y)
        for x in range(min(before.width(), after.width()))
        for y in range(min(before.height(), after.height()))
    )


def scroll_to(widget: QWidget) -> None:
    """Do what the Tab key does where something is out of sight."""
    around = widget.parentWidget()
    while around is not None:
        if isinstance(around, QScrollArea):
            around.ensureWidgetVisible(widget)
        around = around.parentWidget()


LEAST_CHANGE = 40
"""Pixels: more than a blinking cursor, less than the frame of the smallest button."""


def test_what_has_the_keyboard_is_seen(window: WindowObjects, qapp: QApplication, qtbot: QtBot) -> None:
    main = window.main
    main.activateWindow()
    qtbot.waitUntil(main.isActiveWindow)
    unseen = []
    for widget in focusable(window):
        elsewhere = main.statusBar()
        elsewhere.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        elsewhere.setFocus()
        scroll_to(widget)
        qapp.processEvents()
        corner = widget.mapTo(main, widget.rect().topLeft())
        frame = QRect(corner, widget.size()).adjusted(-3, -3, 3, 3)
        before = picture(widget, frame)
        widget.setFocus(Qt.FocusReason.TabFocusReason)
        qapp.processEvents()
        if widget.hasFocus() and changed_pixels(before, picture(widget, frame)) < LEAST_CHANGE:
            unseen.append(f"{type(widget).__name__} {name_of(interface_of(widget))!r}")
    assert unseen == []


def test_a_layout_is_made_by_keyboard_alone(window: WindowObjects, qapp: QApplication) -> None:
    """From wherever the keyboard is, Tab leads to the editor; keys give layers away and Load is a key."""
    main = window.main
    main.model_panel.search_edit.setFocus()
    for _ in range(100):
        focus = main.focusWidget()
        assert focus is not None
        if focus is main.editor.view:
            break
        QTest.keyClick(focus, Qt.Key.Key_Tab)
    assert main.focusWidget() is main.editor.view
    view = main.editor.view
    before = window.desk.document.edit
    assert before is not None
    QTest.keyClick(view, Qt.Key.Key_Home)
    QTest.keyClick(view, Qt.Key.Key_Right, Qt.KeyboardModifier.ShiftModifier)
    source = before.layout.device_of(0)
    keys = (Qt.Key.Key_Down,) if source == "CUDA0" else (Qt.Key.Key_Up,)
    for key in keys:
        QTest.keyClick(view, key, Qt.KeyboardModifier.ControlModifier)
    after = window.desk.document.edit
    assert after is not None
    assert after.layout.device_of(0) == after.layout.device_of(1) != source
    assert "layers 0–1 on" in view.accessibleName()
    for _ in range(100):
        focus = main.focusWidget()
        assert focus is not None
        if focus is main.settings_bar.load_buttons.load_button:
            break
        QTest.keyClick(focus, Qt.Key.Key_Tab)
    assert main.focusWidget() is main.settings_bar.load_buttons.load_button


SMALL_SCREEN = QSize(1024, 700)
"""The smallest that is promised, with the frame of the window."""


def cut_texts(window: WindowObjects) -> list[str]:
    """Return texts in sight that have less room than they need; what is elided says all of it in a tooltip."""
    found = []
    for widget in window.main.findChildren(QWidget):
        if not widget.isVisibleTo(window.main) or widget.visibleRegion().isEmpty():
            continue
        if isinstance(widget, QLabel) and not isinstance(widget, ElidedLabel) and not widget.wordWrap():
            needed = widget.fontMetrics().horizontalAdvance(widget.text())
            is_cut = widget.contentsRect().width() < needed
        elif isinstance(widget, QLabel) and not isinstance(widget, ElidedLabel):
            is_cut = widget.heightForWidth(widget.width()) > widget.height()
        elif isinstance(widget, QPushButton) and not isinstance(widget, ModelButton):
            is_cut = widget.width() < widget.minimumSizeHint().width()
        else:
            continue
        if is_cut:
            found.append(f"{type(widget).__name__} in {type(widget.parent()).__name__}: {widget.text()!r}")
    return found


def test_a_small_screen_cuts_nothing(window: WindowObjects, qtbot: QtBot) -> None:
    main, chat = window.main, window.views.current.chat
    chat.set_sample_prompts(SAMPLE_PROMPTS)
    chat.show_context((ContextSegment("conversation", 4096),), 8192)
    main.open_report()
    room = SMALL_SCREEN - SCREEN_ROOM
    for place, show in PLACES.items():
        show(window)
        main.resize(room)

        def nothing_is_cut(place: str = place) -> None:
            assert main.width() <= room.width(), place
            assert main.height() <= room.height(), place
            assert cut_texts(window) == [], place

        qtbot.waitUntil(nothing_is_cut)


def test_the_tab_key_goes_as_people_read(window: WindowObjects) -> None:
    main = window.main
    window.views.current.report.show_cancelled(Cancelled(stage="fit"))  # before a load there is nothing to stop at
    main.settings_bar.model_button.setFocus()
    areas = (main.settings_bar, main.model_panel, main.device_strip, main.editor, main.chat_view, main.reports)
    seen: list[QWidget] = []
    for _ in range(100):
        focus = main.focusWidget()
        assert focus is not None
        area = next(each for each in areas if each is focus or each.isAncestorOf(focus))
        if area not in seen[-1:]:
            seen.append(area)
        if len(seen) > len(areas):
            break
        QTest.keyClick(focus, Qt.Key.Key_Tab)
    assert tuple(seen[:-1]) == areas
    assert seen[-1] is main.settings_bar
