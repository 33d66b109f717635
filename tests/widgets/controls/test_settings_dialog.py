"""The dialog with all settings: shown choices and decisions, and reported changes."""

from __future__ import annotations

from typing import cast

import msgspec
import pytest
from PySide6.QtCore import QPoint, QPointF, Qt
from PySide6.QtGui import QStandardItemModel, QWheelEvent
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QComboBox, QSpinBox, QToolButton
from pytestqt.qtbot import QtBot

from engine.base.values import replace
from engine.planning.plan.decisions.decision import Decision
from engine.planning.settings.context_settings import AUTO_CONTEXT, ContextSettings
from engine.planning.settings.kinds import Real
from engine.planning.settings.table import KEYS, SETTINGS
from widgets.controls.setting_controls import ChoiceControl, LengthControl, NumberControl, RealControl, make_control
from widgets.controls.settings_dialog import AdapterScale, SettingsDialog
from widgets.controls.values import AdapterName, DraftChoice, SideFileNames

DECISIONS = (
    Decision("n_ctx", 32768, "What 24 GiB on devices suggest; more can be chosen."),
    Decision("flash_attn", "on", "Needed by the q8_0 V cache."),
    Decision("load_mode", "none", "Set explicitly: weights are read.", True),
    Decision("op_offload", True, "CUDA0 computes prompts."),
    Decision("threads", 8, "One thread on each of 8 cores."),
)


@pytest.fixture
def dialog(qtbot: QtBot) -> SettingsDialog:
    dialog = SettingsDialog()
    qtbot.addWidget(dialog)
    dialog.set_settings(ContextSettings(), DECISIONS)
    return dialog


def combo(dialog: SettingsDialog, key: str) -> QComboBox:
    control = dialog.controls[key]
    assert isinstance(control, ChoiceControl)
    return control.box


def number(dialog: SettingsDialog, key: str) -> QSpinBox:
    control = dialog.controls[key]
    assert isinstance(control, NumberControl | LengthControl)
    return control.box


def auto_button(dialog: SettingsDialog) -> QToolButton:
    control = dialog.controls["n_ctx"]
    assert isinstance(control, LengthControl)
    return control.auto_button


def turn_wheel(box: QSpinBox) -> None:
    """Turn the wheel one notch upwards over the middle of `box`."""
    spot = box.rect().center()
    turned = QWheelEvent(
        QPointF(spot), QPointF(box.mapToGlobal(spot)), QPoint(), QPoint(0, 120), Qt.MouseButton.NoButton,
        Qt.KeyboardModifier.NoModifier, Qt.ScrollPhase.NoScrollPhase, False,
    )  # fmt: skip
    QApplication.sendEvent(box, turned)


def choose(box: QComboBox, text: str) -> None:
    box.setCurrentText(text)
    box.activated.emit(box.currentIndex())


def test_each_setting_says_what_is_used_and_why(dialog: SettingsDialog) -> None:
    assert dialog.rows.line("flash_attn") == "on: Needed by the q8_0 V cache."
    assert dialog.rows.line("load_mode") == "Set explicitly: weights are read."
    assert dialog.rows.line("op_offload") == "on: CUDA0 computes prompts."
    assert dialog.rows.line("n_ctx") == "32\u202f768: What 24 GiB on devices suggest; more can be chosen."
    assert dialog.rows.line("type_k") == ""


def test_every_choice_is_reported(qtbot: QtBot, dialog: SettingsDialog) -> None:
    told: list[ContextSettings] = []
    dialog.context_changed.connect(told.append)
    choose(combo(dialog, "load_mode"), "mmap")
    choose(combo(dialog, "flash_attn"), "off")
    choose(combo(dialog, "op_offload"), "auto")
    choose(combo(dialog, "type_k"), "q8_0")
    number(dialog, "threads").setValue(6)
    number(dialog, "threads_batch").setValue(12)
    number(dialog, "op_offload_min_batch").setValue(64)
    number(dialog, "n_ctx").setValue(16384)
    assert told[-1] == ContextSettings(
        load_mode="mmap", flash_attn="off", op_offload="auto", type_k="q8_0", threads=6, threads_batch=12,
        op_offload_min_batch=64, n_ctx=16384,
    )  # fmt: skip
    assert len(told) == 8
    choose(combo(dialog, "op_offload"), "off")
    number(dialog, "threads").setValue(0)
    assert (told[-1].op_offload, told[-1].threads) == (False, None)


def test_the_context_may_be_left_open_and_taken_back(dialog: SettingsDialog) -> None:
    told: list[ContextSettings] = []
    dialog.context_changed.connect(told.append)
    QTest.mouseClick(auto_button(dialog), Qt.MouseButton.LeftButton)
    assert told[-1].n_ctx == AUTO_CONTEXT
    dialog.set_settings(told[-1], DECISIONS)
    assert number(dialog, "n_ctx").value() == 32768
    assert not number(dialog, "n_ctx").isEnabled()
    QTest.mouseClick(auto_button(dialog), Qt.MouseButton.LeftButton)
    assert told[-1].n_ctx == 32768
    assert len(told) == 2


def test_showing_settings_reports_nothing(dialog: SettingsDialog) -> None:
    told: list[ContextSettings] = []
    dialog.context_changed.connect(told.append)
    settings = ContextSettings(
        n_ctx=AUTO_CONTEXT, threads=3, threads_batch=4, op_offload=False, op_offload_min_batch=9, load_mode="mlock",
        type_k="q8_0", type_v="q4_0", flash_attn="on",
    )  # fmt: skip
    dialog.set_settings(settings, DECISIONS)
    dialog.set_settings(ContextSettings(), ())
    assert told == []
    assert number(dialog, "threads").text() == "auto"
    assert dialog.rows.line("flash_attn") == ""


def test_cache_types_that_cannot_be_had_are_grey_and_say_why(dialog: SettingsDialog) -> None:
    settings = msgspec.structs.replace(ContextSettings(), type_v="q5_0")
    dialog.set_settings(settings, (), {"type_v": {"q8_0": "Heads are 16 wide.", "q5_0": "Heads are 16 wide."}})
    model = cast(QStandardItemModel, combo(dialog, "type_v").model())
    enabled = {
        combo(dialog, "type_v").itemText(index): model.item(index).isEnabled() for index in range(model.rowCount())
    }
    assert enabled["f16"]
    assert not enabled["q8_0"]
    assert enabled["q5_0"]  # It is set, and stays to be seen.
    tip = model.item(combo(dialog, "type_v").findText("q8_0")).data(Qt.ItemDataRole.ToolTipRole)
    assert "16 wide" in tip


def test_numbers_being_typed_stay_while_forecasts_come(qtbot: QtBot, dialog: SettingsDialog) -> None:
    names = SideFileNames(
        adapters=(AdapterName("/a/x.gguf", 0.5),), draft=DraftChoice("model", "/a/d.gguf", 4, "CUDA0")
    )
    dialog.set_side_files(names, ("CUDA0",))
    control = dialog.controls["rope_freq_base"]
    assert isinstance(control, RealControl)
    dialog.show()
    for box in (control.box, dialog.side_files.adapter_rows[0].scale_box, dialog.side_files.draft.tokens_box):
        box.setFocus()
        box.selectAll()
        QTest.keyClicks(box, "7")
        dialog.set_settings(ContextSettings(), DECISIONS)
        dialog.set_side_files(names, ("CUDA0",))
        assert box.text() == "7"


def test_a_device_of_the_projector_that_has_gone_away_is_shown(qtbot: QtBot, dialog: SettingsDialog) -> None:
    dialog.set_side_files(SideFileNames("/a/mmproj.gguf", "attic-CUDA0"), ("CUDA0", "CPU"))
    assert dialog.side_files.device_box.currentText() == "attic-CUDA0"


def test_files_beside_the_model(qtbot: QtBot, dialog: SettingsDialog) -> None:
    form = dialog.side_files
    assert form.projector_label.text() == "none"
    assert form.device_box.isHidden()
    names = SideFileNames("/a/mmproj.gguf", "CUDA1", (AdapterName("/a/x.gguf", 0.5), AdapterName("/a/y.gguf", 1.0)))
    dialog.set_side_files(names, ("CUDA0", "CUDA1", "CPU"), (Decision("projector", "CUDA1", "Set explicitly.", True),))
    assert form.projector_label.text() == "mmproj.gguf"
    assert form.projector_line.text() == "Set explicitly."
    assert form.device_box.currentText() == "CUDA1"
    assert [row.name_label.text() for row in form.adapter_rows] == ["x.gguf", "y.gguf"]
    with qtbot.waitSignal(form.projector_device_chosen) as placed:
        choose(form.device_box, "auto")
    assert placed.args == [""]
    with qtbot.waitSignal(form.projector_device_chosen) as placed:
        choose(form.device_box, "CPU")
    assert placed.args == ["CPU"]
    with qtbot.waitSignal(form.adapter_scaled) as scaled:
        form.adapter_rows[1].scale_box.setValue(0.25)
    assert scaled.args == [AdapterScale(1, 0.25)]
    with qtbot.waitSignal(form.adapter_removed) as removed:
        QTest.mouseClick(form.adapter_rows[0].remove_button, Qt.MouseButton.LeftButton)
    assert removed.args == [0]
    for button, signal in (
        (form.choose_button, form.projector_requested),
        (form.remove_button, form.projector_removed),
        (form.add_button, form.adapter_requested),
    ):
        with qtbot.waitSignal(signal):
            QTest.mouseClick(button, Qt.MouseButton.LeftButton)
    dialog.set_side_files(SideFileNames(), ())
    assert form.adapter_rows == []


def test_what_is_loaded_was_loaded_with(dialog: SettingsDialog) -> None:
    assert dialog.loaded_label.isHidden()
    dialog.set_loaded("Loaded with 4096 tokens.")
    assert not dialog.loaded_label.isHidden()
    dialog.set_loaded("")
    assert dialog.loaded_label.isHidden()


def test_numbers_beyond_what_a_box_takes_stay_unless_they_are_edited(dialog: SettingsDialog) -> None:
    told: list[ContextSettings] = []
    dialog.context_changed.connect(told.append)
    dialog.set_settings(ContextSettings(n_ctx=100, op_offload_min_batch=1 << 30))
    choose(combo(dialog, "flash_attn"), "off")
    assert told == [ContextSettings(n_ctx=100, op_offload_min_batch=1 << 30, flash_attn="off")]


def test_enter_in_a_field_takes_its_value_and_presses_no_button(qtbot: QtBot, dialog: SettingsDialog) -> None:
    dialog.show()
    number(dialog, "threads").setFocus()
    number(dialog, "threads").selectAll()
    QTest.keyClick(number(dialog, "threads"), Qt.Key.Key_6)
    form = dialog.side_files
    with qtbot.assertNotEmitted(form.projector_requested), qtbot.assertNotEmitted(form.adapter_requested):
        QTest.keyClick(number(dialog, "threads"), Qt.Key.Key_Return)
    assert number(dialog, "threads").value() == 6


def test_every_key_has_a_row_that_shows_and_reports_it(dialog: SettingsDialog) -> None:
    told: list[ContextSettings] = []
    dialog.context_changed.connect(told.append)
    assert list(dialog.controls) == list(ContextSettings.__struct_fields__)
    for setting in SETTINGS:
        dialog.set_settings(ContextSettings(), ())
        told.clear()
        control = dialog.controls[setting.key]
        if isinstance(control, ChoiceControl):
            other = (control.box.currentIndex() + 1) % control.box.count()
            choose(control.box, control.box.itemText(other))
        elif isinstance(control, RealControl):
            control.box.setValue(control.box.minimum() if setting.default == control.box.maximum() else 1e18)
        else:
            number(dialog, setting.key).setValue(512 if setting.default != 512 else 256)
        (edited,) = told
        changed = [key for key in KEYS if getattr(edited, key) != getattr(ContextSettings(), key)]
        # More requests at a time keep the context that each has.
        assert changed == (["n_ctx", "n_seq_max"] if setting.key == "n_seq_max" else [setting.key])
        dialog.set_settings(ContextSettings(), ())
        dialog.set_settings(edited, ())
        assert control.value() == getattr(edited, setting.key)


def test_the_wheel_over_a_form_changes_nothing_that_nobody_is_in(qtbot: QtBot, dialog: SettingsDialog) -> None:
    dialog.show()
    box = number(dialog, "n_ubatch")
    dialog.loaded_label.setFocus()
    with qtbot.assertNotEmitted(dialog.context_changed):
        turn_wheel(box)
    assert box.value() == ContextSettings().n_ubatch
    dialog.activateWindow()
    box.setFocus()
    qtbot.waitUntil(box.hasFocus)
    turn_wheel(box)
    assert box.value() != ContextSettings().n_ubatch


def test_an_entered_number_may_go_back_to_what_was_shown(dialog: SettingsDialog) -> None:
    told: list[ContextSettings] = []
    dialog.context_changed.connect(told.append)
    most = number(dialog, "n_batch").maximum()
    dialog.set_settings(ContextSettings(n_batch=1 << 30))
    number(dialog, "n_batch").setValue(64)
    number(dialog, "n_batch").setValue(most)
    assert [each.n_batch for each in told] == [64, most]


def test_a_number_is_not_taken_away_while_it_is_typed(qtbot: QtBot, dialog: SettingsDialog) -> None:
    settings = ContextSettings(n_ctx=4096, n_batch=512, n_ubatch=128)
    dialog.set_settings(settings)
    box = number(dialog, "n_ubatch")
    box.selectAll()
    QTest.keyClicks(box, "64")
    dialog.set_settings(settings)
    with qtbot.waitSignal(dialog.context_changed) as changed:
        QTest.keyClick(box, Qt.Key.Key_Return)
    assert changed.args == [msgspec.structs.replace(settings, n_ubatch=64)]


def test_a_number_with_a_fraction_has_a_box_that_keeps_what_nobody_changed(qtbot: QtBot) -> None:
    setting = replace(SETTINGS[0], kind=Real(0, 2, 0.25))
    control = make_control(setting)
    assert isinstance(control, RealControl)
    qtbot.addWidget(control.box)
    with qtbot.assertNotEmitted(control.edited):
        control.show_value(0.12345, None)
    assert control.value() == 0.12345
    with qtbot.waitSignal(control.edited):
        control.box.setValue(0.5)
    assert control.value() == 0.5
