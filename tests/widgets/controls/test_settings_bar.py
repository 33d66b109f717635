"""The settings bar with real clicks and keys."""

from __future__ import annotations

import msgspec
import pytest
from PySide6.QtCore import QPoint, Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QComboBox, QProgressBar, QWidget
from pytestqt.qtbot import QtBot

from engine.base.language import Language, use_language
from engine.planning.layout.layout import SPLIT_MODES
from engine.planning.plan.decisions.decision import Decision
from engine.planning.settings.context_settings import AUTO_CONTEXT, KV_TYPES, ContextSettings
from engine.runtime.session.status import ModelStatus, Phase
from widgets.controls.decided import decided_text
from widgets.controls.settings_bar import SettingsBar
from widgets.controls.values import SplitModeChoice

SETTINGS = ContextSettings(n_ctx=16384, n_ubatch=256, type_k="q8_0", swa_full=True, threads=3)


@pytest.fixture
def bar(qtbot: QtBot) -> SettingsBar:
    bar = SettingsBar()
    qtbot.addWidget(bar)
    bar.set_context(SETTINGS, 32768)
    bar.resize(1280, bar.height())
    bar.show()
    return bar


def plain(text: str) -> str:
    return text.replace("\N{NARROW NO-BREAK SPACE}", " ")


def test_it_shows_what_it_is_told(bar: SettingsBar) -> None:
    bar.set_model_text("Qwen3-30B-A3B", "17.3 GiB · 48 layers")

    assert (bar.model_button.name, bar.model_button.detail) == ("Qwen3-30B-A3B", "17.3 GiB · 48 layers")
    assert plain(bar.context_editor.n_ctx_box.text()) == "16 384"
    assert bar.context_editor.type_k_box.currentText() == "q8_0"
    assert bar.context_editor.type_v_box.currentText() == "f16"
    assert bar.context_editor.flash_box.currentText() == "auto"
    bar.set_model_text("", "")
    assert bar.model_button.name == "Open a model"


def test_telling_it_is_not_an_edit(qtbot: QtBot, bar: SettingsBar) -> None:
    with qtbot.assertNotEmitted(bar.context_changed), qtbot.assertNotEmitted(bar.split_mode_changed):
        bar.set_context(ContextSettings(n_ctx=512, type_v="q4_0", flash_attn="on"), 4096)
        bar.set_split_mode("none", {})


@pytest.mark.parametrize(
    ("typed", "n_ctx"),
    [
        ("32k", 32768),
        ("1.5K", 1536),
        ("1M", 1 << 20),
        ("8192", 8192),
        ("8 192", 8192),
        ("8,192", 8192),
        ("1000", 1024),
        ("1", 256),
        ("131072", 131072),
    ],
)
def test_a_typed_context_length_is_rounded_up_as_the_engine_does(
    qtbot: QtBot, bar: SettingsBar, typed: str, n_ctx: int
) -> None:
    box = bar.context_editor.n_ctx_box
    box.selectAll()
    with qtbot.waitSignal(bar.context_changed) as changed:
        QTest.keyClicks(box, typed)
        QTest.keyClick(box, Qt.Key.Key_Return)

    assert changed.args == [msgspec.structs.replace(SETTINGS, n_ctx=n_ctx)]


def test_nothing_is_reported_while_typing(qtbot: QtBot, bar: SettingsBar) -> None:
    box = bar.context_editor.n_ctx_box
    box.selectAll()
    with qtbot.assertNotEmitted(bar.context_changed):
        QTest.keyClicks(box, "4096")


def test_a_length_is_not_taken_away_while_it_is_typed(qtbot: QtBot, bar: SettingsBar) -> None:
    """The devices' memory is read all the time, and what is edited is shown again after it."""
    box = bar.context_editor.n_ctx_box
    box.selectAll()
    QTest.keyClicks(box, "40")
    bar.set_context(SETTINGS, 32768)
    QTest.keyClicks(box, "96")
    bar.set_context(SETTINGS, 32768)
    with qtbot.waitSignal(bar.context_changed) as changed:
        QTest.keyClick(box, Qt.Key.Key_Return)
    assert changed.args == [msgspec.structs.replace(SETTINGS, n_ctx=4096)]


def test_a_length_left_open_that_moves_is_not_shown_over_what_is_typed(qtbot: QtBot, bar: SettingsBar) -> None:
    settings = msgspec.structs.replace(SETTINGS, n_ctx=AUTO_CONTEXT)

    def decided(value: int) -> tuple[Decision, ...]:
        return (Decision("n_ctx", value, "that is what fits"),)

    bar.set_context(settings, 32768, decided(8192))
    box = bar.context_editor.n_ctx_box
    box.setFocus()
    qtbot.waitUntil(box.hasFocus)
    box.selectAll()
    QTest.keyClicks(box, "40")
    bar.set_context(settings, 32768, decided(8448))
    QTest.keyClicks(box, "96")
    with qtbot.waitSignal(bar.context_changed) as changed:
        QTest.keyClick(box, Qt.Key.Key_Return)
    assert changed.args == [msgspec.structs.replace(SETTINGS, n_ctx=4096)]


def test_another_length_is_shown_even_where_one_is_typed(bar: SettingsBar) -> None:
    box = bar.context_editor.n_ctx_box
    box.selectAll()
    QTest.keyClicks(box, "40")
    bar.set_context(msgspec.structs.replace(SETTINGS, n_ctx=2048), 32768)
    assert plain(box.text()) == "2 048"


def test_letters_of_no_count_cannot_be_typed(bar: SettingsBar) -> None:
    box = bar.context_editor.n_ctx_box
    box.selectAll()
    QTest.keyClicks(box, "4x0y96")

    assert box.text() == "4096"


def test_arrow_keys_step_by_256(qtbot: QtBot, bar: SettingsBar) -> None:
    with qtbot.waitSignal(bar.context_changed) as changed:
        QTest.keyClick(bar.context_editor.n_ctx_box, Qt.Key.Key_Up)

    assert changed.args == [msgspec.structs.replace(SETTINGS, n_ctx=16384 + 256)]


def test_presets_end_at_what_the_model_was_trained_for(qtbot: QtBot, bar: SettingsBar) -> None:
    actions = bar.context_editor.presets_button.menu().actions()
    assert actions[0].text().startswith("Auto")
    assert actions[1].isSeparator()
    assert plain(actions[2].text()) == "2 048"
    assert plain(actions[-1].text()) == "32 768  (trained length)"

    with qtbot.waitSignal(bar.context_changed) as changed:
        actions[-1].trigger()

    assert changed.args == [msgspec.structs.replace(SETTINGS, n_ctx=32768)]


def test_a_longer_context_than_trained_for_is_allowed_and_said(bar: SettingsBar) -> None:
    box = bar.context_editor.n_ctx_box
    assert "trained with 32" in box.toolTip()

    box.setValue(65536)

    assert "answers may get worse" in box.toolTip()


def choose(box: QComboBox, text: str) -> None:
    """Step with the keyboard to `text`, as a person would."""
    while box.currentText() != text:
        before = box.currentIndex()
        QTest.keyClick(box, Qt.Key.Key_Down if before < box.findText(text) else Qt.Key.Key_Up)
        assert box.currentIndex() != before


def test_cache_types_and_flash_attention(qtbot: QtBot, bar: SettingsBar) -> None:
    editor = bar.context_editor
    seen: list[ContextSettings] = []
    bar.context_changed.connect(seen.append)

    choose(editor.type_k_box, "f16")
    choose(editor.type_v_box, "q4_0")
    choose(editor.flash_box, "on")

    assert seen[-1] == msgspec.structs.replace(SETTINGS, type_k="f16", type_v="q4_0", flash_attn="on")
    assert tuple(editor.type_k_box.itemText(index) for index in range(editor.type_k_box.count())) == KV_TYPES


def test_split_modes_that_cannot_be_had_say_why(qtbot: QtBot, bar: SettingsBar) -> None:
    reason = "RPC0's backend has no split buffers"
    bar.set_split_mode("layer", {"row": reason, "tensor": "not yet"})
    chooser = bar.split_chooser

    assert [chooser.button(mode).isEnabled() for mode in SPLIT_MODES] == [True, True, False, False]
    assert "split buffers" in chooser.button("row").toolTip()
    with qtbot.assertNotEmitted(bar.split_mode_changed):
        QTest.mouseClick(chooser.button("row"), Qt.MouseButton.LeftButton)
    with qtbot.waitSignal(bar.split_mode_changed) as changed:
        QTest.mouseClick(chooser.button("none"), Qt.MouseButton.LeftButton)

    assert changed.args == [SplitModeChoice("none")]
    bar.set_split_mode("layer", {})
    assert [chooser.button(mode).isChecked() for mode in SPLIT_MODES] == [True, False, False, False]
    assert chooser.button("row").isEnabled()


@pytest.mark.parametrize(
    ("status", "load", "cancel", "unload"),
    [
        (ModelStatus(), False, False, False),
        (ModelStatus("m"), True, False, False),
        (ModelStatus("m", waits="Waiting for memory"), False, True, False),
        (ModelStatus("m", Phase.LOADING), False, True, False),
        (ModelStatus("m", Phase.READY), False, False, True),
        (ModelStatus("m", Phase.ANSWERING, is_edited=True), True, False, True),
        (ModelStatus("m", Phase.STOPPING), False, False, False),
    ],
)
def test_buttons_offer_what_the_state_allows(
    qtbot: QtBot, bar: SettingsBar, status: ModelStatus, *, load: bool, cancel: bool, unload: bool
) -> None:
    bar.set_status(status)
    buttons = bar.load_buttons

    for button, signal, offered in (
        (buttons.load_button, bar.load_requested, load),
        (buttons.cancel_button, bar.cancel_requested, cancel),
        (buttons.unload_button, bar.unload_requested, unload),
    ):
        assert (button.isVisible() and button.isEnabled()) is offered
        if offered:
            with qtbot.waitSignal(signal):
                QTest.mouseClick(button, Qt.MouseButton.LeftButton)


def test_progress_is_shown_while_loading(bar: SettingsBar) -> None:
    progress = bar.load_buttons.findChild(QProgressBar)
    assert progress is not None
    assert not progress.isVisible()

    bar.set_status(ModelStatus("m", Phase.LOADING))
    bar.set_progress(0.25, "reading the weights")
    assert progress.isVisible()
    assert progress.value() / progress.maximum() == pytest.approx(0.25)
    assert "reading the weights" in bar.load_buttons.cancel_button.toolTip()
    bar.set_progress(None)
    assert progress.maximum() == 0

    bar.set_status(ModelStatus("m", Phase.READY))
    assert not progress.isVisible()


def test_the_model_button_asks_for_its_menu(qtbot: QtBot, bar: SettingsBar) -> None:
    with qtbot.waitSignal(bar.model_menu_requested):
        QTest.mouseClick(bar.model_button, Qt.MouseButton.LeftButton, pos=QPoint(20, 10))


def test_cache_types_and_flash_attention_are_shown_after_details(qtbot: QtBot, bar: SettingsBar) -> None:
    editor = bar.context_editor
    assert not editor.type_k_box.isVisible()
    assert not editor.flash_box.isVisible()
    with qtbot.waitSignal(bar.details_toggled) as toggled:
        editor.details_button.click()
    assert toggled.args == [True]
    assert editor.type_k_box.isVisible()
    assert editor.flash_box.isVisible()
    with qtbot.assertNotEmitted(bar.details_toggled):
        bar.show_details(False)
    assert not editor.flash_box.isVisible()


@pytest.mark.parametrize("width", [1280, 900, 620])
def test_every_control_is_inside_at_any_width(qtbot: QtBot, bar: SettingsBar, width: int) -> None:
    bar.set_model_text("A model with a name that is much too long for any button", "123.4 GiB · 126 layers")
    bar.set_status(ModelStatus("m", Phase.READY, is_edited=True))
    bar.show_details(True)
    bar.resize(width, bar.height())
    buttons = bar.load_buttons
    editor = bar.context_editor
    controls: list[QWidget] = [bar.model_button, bar.split_chooser, *editor.groups, buttons.load_button]
    controls += [editor.flash_box, editor.type_v_box, editor.presets_button, buttons.unload_button]

    def places() -> list[bool]:
        rects = [control.rect().translated(control.mapTo(bar, QPoint(0, 0))) for control in controls]
        return [bar.rect().contains(rect) for rect in rects]

    qtbot.waitUntil(lambda: all(places()))
    columns = [bar.model_button, bar.split_chooser, *editor.groups, buttons]
    rects = [column.geometry() for column in columns]
    assert not any(first.intersects(second) for index, first in enumerate(rects) for second in rects[index + 1 :])


def test_one_line_is_enough_at_1280(qtbot: QtBot, bar: SettingsBar) -> None:
    one_line = bar.load_buttons.sizeHint().height() + 8

    qtbot.waitUntil(lambda: bar.height() <= one_line)


def test_a_context_below_the_range_of_the_box_stays_unless_it_is_edited(qtbot: QtBot, bar: SettingsBar) -> None:
    settings = msgspec.structs.replace(SETTINGS, n_ctx=100)
    bar.set_context(settings, None)
    with qtbot.waitSignal(bar.context_changed) as changed:
        choose(bar.context_editor.flash_box, "on")
    assert changed.args == [msgspec.structs.replace(settings, flash_attn="on")]


def test_the_context_is_that_of_each_request(qtbot: QtBot, bar: SettingsBar) -> None:
    bar.set_context(ContextSettings(n_ctx=16384, n_seq_max=4), 32768)
    editor = bar.context_editor
    assert plain(editor.n_ctx_box.text()) == "4 096"
    assert editor.context_label.text() == "Context per request (×4)"
    assert "each of 4 parallel requests" in plain(editor.n_ctx_box.toolTip())
    editor.n_ctx_box.selectAll()
    with qtbot.waitSignal(bar.context_changed) as changed:
        QTest.keyClicks(editor.n_ctx_box, "8192")
        QTest.keyClick(editor.n_ctx_box, Qt.Key.Key_Return)
    assert changed.args == [ContextSettings(n_ctx=32768, n_seq_max=4)]


def test_requests_that_share_a_cache_share_the_context(bar: SettingsBar) -> None:
    bar.set_context(ContextSettings(n_ctx=16384, n_seq_max=4, kv_unified=True), 32768)
    assert plain(bar.context_editor.n_ctx_box.text()) == "16 384"
    assert bar.context_editor.context_label.text() == "Context"


def test_a_decided_switch_is_told_in_the_language_of_people() -> None:
    use_language(Language("xx", {"on": "an", "off": "aus"}))
    try:
        texts = [decided_text(Decision("op_offload", value, "why")) for value in (True, False)]
    finally:
        use_language(Language())
    assert texts == ["an: why", "aus: why"]
