"""The chat pane with real key presses: sent text, kept text, and the texts around the messages."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from PySide6.QtCore import QMimeData, QPoint, QPointF, Qt, QUrl
from PySide6.QtGui import QDragEnterEvent, QDropEvent
from PySide6.QtTest import QTest
from pytestqt.qtbot import QtBot

from engine.base.values import replace
from engine.planning.settings.sampling_table import SAMPLING
from engine.runtime.session.status import ModelStatus, Phase
from tests.widgets.chat.conftest import LOADING, READY, STOPPED, exchange
from widgets.chat.attachment_row import AttachedFile
from widgets.chat.banners import Banner
from widgets.chat.chat_heading import ContextSegment
from widgets.chat.chat_pane import ChatPane, chat_start
from widgets.chat.prompt_edit import files_of
from widgets.chat.settings_panel import OF_MODEL, OTHER, SettingChange, SettingRow


def ask(pane: ChatPane, text: str) -> None:
    pane.prompt_edit.setPlainText(text)
    QTest.keyClick(pane.prompt_edit, Qt.Key.Key_Return)


def test_enter_sends_what_was_typed(qtbot: QtBot, pane: ChatPane) -> None:
    QTest.keyClicks(pane.prompt_edit, "first")
    QTest.keyClick(pane.prompt_edit, Qt.Key.Key_Return, Qt.KeyboardModifier.ShiftModifier)
    QTest.keyClicks(pane.prompt_edit, "second")

    with qtbot.waitSignal(pane.send_requested) as sent:
        QTest.keyClick(pane.prompt_edit, Qt.Key.Key_Enter)

    assert sent.args == ["first\nsecond"]
    assert pane.prompt_edit.toPlainText() == ""


def test_the_button_sends_and_becomes_stop(qtbot: QtBot, pane: ChatPane) -> None:
    pane.prompt_edit.setPlainText("hi")
    with qtbot.waitSignal(pane.send_requested):
        QTest.mouseClick(pane.send_button, Qt.MouseButton.LeftButton)

    assert not pane.send_button.isVisible()
    with qtbot.waitSignal(pane.stop_requested):
        QTest.mouseClick(pane.stop_button, Qt.MouseButton.LeftButton)

    pane.set_answering(False)
    assert pane.send_button.isVisible()
    assert not pane.stop_button.isVisible()


@pytest.mark.parametrize("text", ["", "   \n "])
def test_nothing_is_not_sent(qtbot: QtBot, pane: ChatPane, text: str) -> None:
    with qtbot.assertNotEmitted(pane.send_requested):
        ask(pane, text)


def test_text_stays_while_there_is_no_model(qtbot: QtBot, pane: ChatPane) -> None:
    pane.show_messages(exchange())
    pane.set_status(LOADING)

    with qtbot.assertNotEmitted(pane.send_requested):
        ask(pane, "a long question")

    assert pane.prompt_edit.toPlainText() == "a long question"
    assert pane.status_text == "Loading…"
    assert not pane.send_button.isEnabled()
    pane.set_status(READY)
    assert pane.send_button.isEnabled()
    assert pane.status_text == ""


def test_what_is_missing_is_offered_in_the_middle_and_above_the_input_once_something_was_said(
    qtbot: QtBot, pane: ChatPane
) -> None:
    pane.set_status(STOPPED)
    assert pane.empty.title_label.isVisible()
    assert not pane.start_banner.isVisible()
    with qtbot.waitSignal(pane.start_requested):
        QTest.mouseClick(pane.empty.button, Qt.MouseButton.LeftButton)

    pane.show_messages(exchange())
    assert not pane.empty.isVisible()
    assert pane.start_banner.label.text() == "Demo is not loaded."
    with qtbot.waitSignal(pane.start_requested):
        QTest.mouseClick(pane.start_banner.button, Qt.MouseButton.LeftButton)

    pane.set_status(replace(STOPPED, fault="lost"))
    assert not pane.start_banner.isVisible(), "that it was lost is said already"
    pane.set_status(READY)
    assert not pane.start_banner.isVisible()
    pane.show_messages([])
    assert pane.empty.title_label.isVisible()
    assert not pane.empty.button.isVisible()


def test_the_heading_leaves_the_title_room(pane: ChatPane) -> None:
    pane.resize(900, 560)
    words = pane.heading.settings_button.text()
    assert pane.heading.minimumSizeHint().width() < 280, "words do not keep a panel wide"
    pane.resize(280, 560)
    assert pane.heading.settings_button.text() != words
    assert pane.heading.settings_button.accessibleName()
    assert pane.heading.width() <= pane.width()
    pane.resize(900, 560)
    assert pane.heading.settings_button.text() == words


def test_nothing_more_is_sent_while_an_answer_comes(qtbot: QtBot, pane: ChatPane) -> None:
    ask(pane, "one")
    with qtbot.assertNotEmitted(pane.send_requested):
        ask(pane, "too early")
    assert pane.prompt_edit.toPlainText() == "too early"


def test_drafts_are_told_and_shown_without_being_told(qtbot: QtBot, pane: ChatPane) -> None:
    told: list[str] = []
    pane.draft_changed.connect(told.append)
    QTest.keyClicks(pane.prompt_edit, "half a")
    qtbot.waitUntil(lambda: told[-1:] == ["half a"])
    with qtbot.assertNotEmitted(pane.draft_changed, wait=0):
        pane.show_draft("of another one")
        pane.flush()
    assert pane.prompt_edit.toPlainText() == "of another one"
    pane.prompt_edit.insertPlainText(", now")
    pane.flush()
    assert told[-1] == "of another one, now"


@pytest.mark.parametrize("place", ["draft", "system", "template"])
def test_who_types_without_a_pause_is_kept_up_with(qtbot: QtBot, pane: ChatPane, place: str) -> None:
    pane.heading.settings_button.click()
    panel = pane.settings_panel
    assert panel is not None
    field = panel.template_field
    told: list[str] = []
    edit, signal = {
        "draft": (pane.prompt_edit, pane.draft_changed),
        "system": (panel.system_edit, panel.system_changed),
        "template": (field.text_edit, field.template_changed),
    }[place]
    signal.connect(told.append)

    def type_on() -> bool:
        edit.insertPlainText("a")
        return bool(told)

    qtbot.waitUntil(type_on)
    assert told[0].strip("a") == ""


def test_a_full_context_says_what_to_do(qtbot: QtBot, pane: ChatPane) -> None:
    pane.set_context_full(True)
    with qtbot.assertNotEmitted(pane.send_requested):
        ask(pane, "more")
    assert pane.prompt_edit.toPlainText() == "more"
    with qtbot.waitSignal(pane.new_requested):
        QTest.mouseClick(pane.full_banner.button, Qt.MouseButton.LeftButton)
    pane.set_context_full(False)
    assert not pane.full_banner.button.isVisible()


@pytest.mark.parametrize(
    ("parts", "total", "shown"),
    [
        ([ContextSegment("system", 204), ContextSegment("history", 1000)], 16384, "1 204 / 16 384"),
        (None, 8192, "– / 8 192"),
        ([ContextSegment("history", 5)], None, ""),
        ([], 256, "0 / 256"),
    ],
)
def test_the_context_meter(pane: ChatPane, parts: list[ContextSegment] | None, total: int | None, shown: str) -> None:
    pane.show_context(parts, total)
    assert pane.context_text.replace("\N{NARROW NO-BREAK SPACE}", " ") == shown
    assert pane.context_meter.isVisible() is (total is not None)


def test_after_a_crash_a_check_is_offered_beside_the_reload(qtbot: QtBot, pane: ChatPane) -> None:
    pane.set_status(replace(STOPPED, fault="lost"))
    assert pane.lost_banner.isVisible()
    assert not pane.check_button.isVisible(), "a worker may have gone: that is nothing to check for"
    pane.set_status(replace(STOPPED, fault="crashed"))
    with qtbot.waitSignal(pane.check_requested):
        QTest.mouseClick(pane.check_button, Qt.MouseButton.LeftButton)
    with qtbot.waitSignal(pane.reload_requested):
        QTest.mouseClick(pane.lost_banner.button, Qt.MouseButton.LeftButton)
    pane.set_status(READY)
    assert not pane.check_button.isVisible()


def test_a_lost_model_is_reloaded_once_whatever_the_words_for_loading_are(
    pane: ChatPane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("widgets.chat.chat_pane.LOADING", "Das Modell wird geladen")
    pane.show_messages(exchange())
    pane.set_status(replace(LOADING, fault="lost"))
    assert pane.status_text == "Das Modell wird geladen"
    assert pane.lost_banner.isVisible()
    assert not pane.lost_banner.button.isEnabled()
    pane.set_status(replace(STOPPED, fault="lost"))
    assert pane.lost_banner.button.isEnabled()


@pytest.mark.parametrize("phase", list(Phase))
def test_a_button_is_there_only_if_there_is_something_to_do(phase: Phase) -> None:
    start = chat_start(ModelStatus("Demo", phase))
    assert start.title == "Demo"
    assert bool(start.button) == (phase in (Phase.STOPPED, Phase.STARTING, Phase.FAILED))
    assert bool(start.sentence) == bool(start.button)


def test_a_load_that_waits_says_what_for(pane: ChatPane) -> None:
    pane.set_status(replace(STOPPED, waits="Waiting until the memory of CUDA0 is free again"))
    assert pane.empty.hint_label.text() == "Waiting until the memory of CUDA0 is free again"
    assert not pane.empty.button.isVisible()


def test_the_arrow_up_edits_the_last_question(qtbot: QtBot, pane: ChatPane) -> None:
    pane.show_messages([*exchange("first", number=1), *exchange("second", number=2)])
    QTest.keyClick(pane.prompt_edit, Qt.Key.Key_Up)
    bubble = pane.message_list.bubble("q2")
    assert bubble is not None
    assert bubble.edit_box is not None
    assert bubble.edit_box.edit.toPlainText() == "second"
    bubble.edit_box.edit.setPlainText("second, but better")
    with qtbot.waitSignal(pane.acted) as acted:
        QTest.keyClick(bubble.edit_box.edit, Qt.Key.Key_Return)
    assert (acted.args[0].kind, acted.args[0].message, acted.args[0].text) == ("edit", "q2", "second, but better")


def test_the_input_grows_to_a_few_lines(pane: ChatPane) -> None:
    edit = pane.prompt_edit
    heights = []
    for lines in (1, 3, 6, 30):
        edit.setPlainText("\n".join(["line"] * lines))
        heights.append(edit.height())
    assert heights[0] < heights[1] < heights[2] == heights[3]
    edit.clear()
    assert edit.height() == heights[0]


def test_settings_say_where_they_come_from_and_what_is_typed_is_told(qtbot: QtBot, pane: ChatPane) -> None:
    pane.heading.settings_button.click()
    panel = pane.settings_panel
    assert panel is not None
    assert panel.isVisible()
    panel.show_values({each.key: SettingRow(each.kind.text_of(each.default), "default", False) for each in SAMPLING})
    field = panel.fields["temperature"]
    assert field.text == "0.8"
    field.control.setFocus()
    with qtbot.waitSignal(panel.value_changed) as changed:
        QTest.keyClick(field.control, Qt.Key.Key_A, Qt.KeyboardModifier.ControlModifier)
        QTest.keyClicks(field.control, "1.5")
        QTest.keyClick(field.control, Qt.Key.Key_Return)
    assert changed.args == [SettingChange("temperature", "1.5")]
    panel.show_system("be brief", "of the preset")
    with qtbot.waitSignal(panel.system_changed) as system:
        panel.system_edit.setPlainText("be long")
    assert system.args == ["be long"]


def test_files_are_dropped_and_pasted_and_left_out_again(qtbot: QtBot, pane: ChatPane, tmp_path: Path) -> None:
    given: list[tuple[Path, ...]] = []
    pane.files_given.connect(given.append)
    mime = QMimeData()
    mime.setUrls([QUrl.fromLocalFile(str(tmp_path / name)) for name in ("a.py", "b.pdf")])
    inside = QPointF(40, 40)
    entered = QDragEnterEvent(
        inside.toPoint(),
        Qt.DropAction.CopyAction,
        mime,
        Qt.MouseButton.LeftButton,
        Qt.KeyboardModifier.NoModifier,
    )
    pane.dragEnterEvent(entered)
    assert entered.isAccepted()
    pane.dropEvent(
        QDropEvent(inside, Qt.DropAction.CopyAction, mime, Qt.MouseButton.LeftButton, Qt.KeyboardModifier.NoModifier)
    )
    pane.prompt_edit.insertFromMimeData(mime)
    assert given == [(tmp_path / "a.py", tmp_path / "b.pdf")] * 2
    model = QMimeData()
    model.setUrls([QUrl.fromLocalFile(str(tmp_path / "model.gguf"))])
    assert files_of(model) == ()
    pane.show_files([AttachedFile("1", "a.py", "1 KiB"), AttachedFile("2", "b.pdf", "reading…")], is_reading=True)
    assert not pane.send_button.isEnabled()
    pane.show_files([AttachedFile("1", "a.py", "1 KiB, 300 tokens")], is_reading=False)
    assert pane.send_button.isEnabled()
    with qtbot.waitSignal(pane.file_removed) as removed:
        pane.attachments.remove_buttons["1"].click()
    assert removed.args == ["1"]
    pane.show_files([], is_reading=False)
    pane.attachments.show_error("c.bin is not text.")
    assert pane.attachments.isVisible()
    assert not pane.send_button.isEnabled()
    pane.show_context([ContextSegment("history", 100)], 1000)
    pane.context_meter.show_pending(300)
    assert pane.context_text.startswith("400")


def test_a_full_context_is_asked_about_in_place(qtbot: QtBot, pane: ChatPane) -> None:
    banner = pane.overflow_banner
    banner.ask("The context is full by 7 tokens.")
    assert banner.isVisible()
    for button, answer in ((banner.leave_out_button, True), (banner.cancel_button, False)):
        with qtbot.waitSignal(banner.answered) as answered:
            button.click()
        assert answered.args == [answer]
    banner.ask("")
    assert not banner.isVisible()


def test_a_template_is_chosen_and_changed(qtbot: QtBot, pane: ChatPane) -> None:
    pane.heading.settings_button.click()
    panel = pane.settings_panel
    assert panel is not None
    field = panel.template_field
    chosen: list[str] = []
    panel.template_changed.connect(chosen.append)
    assert field.text_edit.isHidden()
    field.choice_box.setCurrentText("ChatML")
    field.choice_box.activated.emit(field.choice_box.currentIndex())
    assert "<|im_start|>" in chosen[-1]
    field.show_template(chosen[-1])
    assert field.choice_box.currentText() == "ChatML"
    with qtbot.waitSignal(panel.template_changed):
        field.text_edit.setPlainText("{{ messages }}")
    field.show_template(chosen[-1])
    assert field.choice_box.currentText() == OTHER
    field.choice_box.setCurrentText(OF_MODEL)
    field.choice_box.activated.emit(0)
    assert chosen[-1] == ""


def test_escape_stops_an_answer(qtbot: QtBot, pane: ChatPane) -> None:
    stopped: list[bool] = []
    pane.stop_requested.connect(lambda: stopped.append(True))
    QTest.keyClick(pane.prompt_edit, Qt.Key.Key_Escape)
    assert not stopped, "nothing is being answered"
    ask(pane, "why?")
    QTest.keyClick(pane.prompt_edit, Qt.Key.Key_Escape)
    assert stopped == [True]
    pane.show_messages(exchange())
    bubble = pane.message_list.bubble("q0")
    assert bubble is not None
    bubble.start_editing()
    assert bubble.edit_box is not None
    QTest.keyClick(bubble.edit_box.edit, Qt.Key.Key_Escape)
    assert stopped == [True], "the editor takes the key first"
    assert bubble.edit_box is None


def test_a_stop_is_shown_until_the_answer_has_ended(pane: ChatPane) -> None:
    ask(pane, "why?")
    assert pane.stop_button.text() == "Stop"
    pane.stop_button.click()
    pane.set_answering(True)
    assert pane.stop_button.text() == "Stopping…"
    pane.set_answering(False)
    ask(pane, "why?")
    assert pane.stop_button.text() == "Stop"


def test_stop_goes_as_soon_as_the_engine_is_lost(pane: ChatPane) -> None:
    ask(pane, "why?")
    assert pane.stop_button.isVisible()
    pane.set_answering(True, is_lost=True)
    assert not pane.stop_button.isVisible()
    assert "Looking for the cause" in pane.status_text
    pane.set_answering(False)
    assert "cause" not in pane.status_text


def test_temperature_and_top_p_come_before_dry_and_xtc(pane: ChatPane) -> None:
    pane.heading.settings_button.click()
    panel = pane.settings_panel
    assert panel is not None
    height = {key: field.mapTo(panel, field.rect().topLeft()).y() for key, field in panel.fields.items()}
    assert height["temperature"] < height["top_p"] < min(height["dry_multiplier"], height["xtc_probability"])
    assert set(height) == {each.key for each in SAMPLING}


def test_without_a_model_the_empty_chat_leaves_opening_one_to_the_welcome_page(pane: ChatPane) -> None:
    pane.set_status(ModelStatus())
    assert pane.empty.title_label.text() == "No model is open"
    assert not pane.empty.button.isVisible()
    pane.show_messages(exchange())
    assert pane.start_banner.button.isVisible()


def test_a_custom_template_without_text_is_not_that_of_another_conversation(pane: ChatPane) -> None:
    pane.heading.settings_button.click()
    panel = pane.settings_panel
    assert panel is not None
    field = panel.template_field
    field.choice_box.setCurrentText(OTHER)
    field.choice_box.activated.emit(field.choice_box.currentIndex())
    field.show_template("", is_same=True)
    assert (field.choice_box.currentText(), field.text_edit.isHidden()) == (OTHER, False)
    field.show_template("")
    assert (field.choice_box.currentText(), field.text_edit.isHidden()) == (OF_MODEL, True)


def has_button_below(banner: Banner) -> bool:
    top_px = banner.button.mapTo(banner, QPoint(0, 0)).y()
    return banner.label.geometry().bottom() < top_px and top_px + banner.button.height() <= banner.height()


def test_what_comes_and_goes_makes_the_panel_no_wider(qtbot: QtBot, pane: ChatPane) -> None:
    pane.resize(264, 700)
    least_px = pane.minimumSizeHint().width()
    banners = (pane.full_banner, pane.lost_banner, pane.start_banner, pane.overflow_banner)
    pane.start_banner.show_words("Load SmolLM2 135M Instruct, the model that you used last.", "Load SmolLM2 135M")
    pane.check_button.show()
    for banner in banners:
        banner.show()
        assert pane.minimumSizeHint().width() == least_px
        qtbot.waitUntil(partial(has_button_below, banner))
        banner.hide()
    pane.reading.show_share(0.5, "reading 120 of 1 300 tokens · 12 tokens/s")
    assert pane.minimumSizeHint().width() == least_px
    pane.reading.show_share(None, "")
    pane.resize(700, 700)
    pane.lost_banner.show()
    lost = pane.lost_banner
    qtbot.waitUntil(lambda: lost.label.geometry().right() < lost.button.mapTo(lost, QPoint(0, 0)).x())
