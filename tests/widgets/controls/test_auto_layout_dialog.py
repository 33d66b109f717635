"""The dialog for automatic layouts: it reports the chosen values."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from pytestqt.qtbot import QtBot

from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import make_host
from tests.support.previews import make_gpu
from widgets.controls.auto_layout_dialog import AutoLayoutDialog
from widgets.controls.values import AutoOptions, StrategyText

WORDS = (
    StrategyText("fewest", "Fewest Devices", "Use few"),
    StrategyText("priority", "One Device after Another", "Fill in order", uses_order=True),
    StrategyText("context", "Longest Context", "Find the longest", uses_kv_types=True),
)
DEVICES = (make_gpu("CUDA0", 24), replace(make_gpu("CUDA1", 12), margin_bytes=512 * MIB), make_host("host", GIB))
MakeDialog = Callable[[], AutoLayoutDialog]


@pytest.fixture
def make_dialog(qtbot: QtBot) -> MakeDialog:
    def make() -> AutoLayoutDialog:
        dialog = AutoLayoutDialog(WORDS)
        qtbot.addWidget(dialog)
        dialog.set_devices(DEVICES)
        dialog.show()
        return dialog

    return make


def listed(dialog: AutoLayoutDialog) -> list[tuple[str, bool]]:
    items = [dialog.device_list.item(row) for row in range(dialog.device_list.count())]
    return [(item.text().split(" ")[0], item.checkState() is Qt.CheckState.Checked) for item in items]


def test_devices_are_switched_off_and_ordered(make_dialog: MakeDialog, qtbot: QtBot) -> None:
    dialog = make_dialog()
    assert listed(dialog) == [("CUDA0", True), ("CUDA1", True)], "the host is not for choosing"
    assert "leaves 512.0 MiB free" in dialog.device_list.item(1).text()
    with qtbot.waitSignal(dialog.options_changed):
        dialog.device_list.item(0).setCheckState(Qt.CheckState.Unchecked)
    assert dialog.options.off == {"CUDA0"}
    dialog.device_list.setCurrentRow(1)
    assert not dialog.down_button.isEnabled()
    with qtbot.waitSignal(dialog.options_changed):
        dialog.up_button.click()
    assert dialog.options.order == ("CUDA1", "CUDA0")
    assert listed(dialog) == [("CUDA1", True), ("CUDA0", False)]
    assert dialog.device_list.currentRow() == 0
    with qtbot.waitSignal(dialog.options_changed):
        dialog.down_button.click()
    assert dialog.options.order == ("CUDA0", "CUDA1")


def test_devices_that_are_not_here_keep_their_place(make_dialog: MakeDialog, qtbot: QtBot) -> None:
    dialog = make_dialog()
    options = AutoOptions("priority", ("RPC0", "CUDA1"), frozenset({"RPC0"}))
    dialog.set_options(options)
    assert listed(dialog) == [("CUDA1", True), ("CUDA0", True)]
    with qtbot.waitSignal(dialog.options_changed):
        dialog.split_box.click()
    assert dialog.options.off == {"RPC0"}
    assert set(dialog.options.order) == {"CUDA0", "CUDA1", "RPC0"}
    dialog.set_devices((*DEVICES, replace(make_gpu("RPC0", 8), backend="RPC")))
    assert ("RPC0", False) in listed(dialog)


def test_cache_types_are_for_the_longest_context(make_dialog: MakeDialog, qtbot: QtBot) -> None:
    dialog = make_dialog()
    assert not dialog.type_boxes["q8_0"].isVisible()
    with qtbot.waitSignal(dialog.options_changed):
        dialog.strategy_box.setCurrentIndex(2)
    assert dialog.type_boxes["q8_0"].isVisible()
    for name in ("q8_0", "f16"):
        with qtbot.waitSignal(dialog.options_changed):
            dialog.type_boxes[name].click()
    assert dialog.options == msgspec.structs.replace(
        AutoOptions(), strategy="context", order=("CUDA0", "CUDA1"), kv_types=("f16", "q8_0")
    )


def test_shown_options_are_not_reported_back(make_dialog: MakeDialog) -> None:
    dialog = make_dialog()
    reported: list[AutoOptions] = []
    dialog.options_changed.connect(reported.append)
    dialog.set_options(AutoOptions("context", ("CUDA1",), frozenset({"CUDA0"}), ("q4_0",), split=True))
    assert reported == []
    assert listed(dialog) == [("CUDA1", True), ("CUDA0", False)]
    assert dialog.split_box.isChecked()
    assert dialog.type_boxes["q4_0"].isChecked()


def test_what_is_found_is_explained(make_dialog: MakeDialog, qtbot: QtBot) -> None:
    dialog = make_dialog()
    with qtbot.waitSignal(dialog.layout_requested):
        dialog.find_button.click()
    dialog.set_explanation("CUDA0 <b>holds</b> everything.", bad=True)
    assert dialog.explanation_label.text() == "CUDA0 <b>holds</b> everything."
    assert dialog.explanation_label.textFormat() is Qt.TextFormat.PlainText
    dialog.set_ready(False)
    assert not dialog.find_button.isEnabled()


def test_pins_are_told_and_let_go(make_dialog: MakeDialog, qtbot: QtBot) -> None:
    dialog = make_dialog()
    dialog.set_pins_text("")
    assert "press P" in dialog.pins_label.text()
    assert not dialog.release_button.isEnabled()
    dialog.set_pins_text("Pinned: layers 0-3 on CUDA0.")
    with qtbot.waitSignal(dialog.pins_released):
        dialog.release_button.click()


def test_the_list_is_as_tall_as_its_devices(make_dialog: MakeDialog) -> None:
    dialog = make_dialog()
    few_px = dialog.device_list.height()
    rows = dialog.device_list.count()
    assert few_px < (rows + 1) * max(dialog.device_list.sizeHintForRow(0), 1)
    dialog.set_devices([replace(DEVICES[0], id=f"CUDA{number}") for number in range(12)])
    assert few_px < dialog.device_list.height() < 10 * dialog.device_list.sizeHintForRow(0)


@pytest.mark.parametrize("name", ["strategy_box", "device_list", "split_box"])
def test_enter_finds_a_layout_and_moves_nothing(make_dialog: MakeDialog, qtbot: QtBot, name: str) -> None:
    dialog = make_dialog()
    dialog.device_list.setCurrentRow(1)
    before = listed(dialog)
    focused = getattr(dialog, name)
    focused.setFocus()
    with qtbot.waitSignal(dialog.layout_requested):
        QTest.keyClick(focused, Qt.Key.Key_Return)
    assert listed(dialog) == before


def test_one_backend_is_a_choice(make_dialog: MakeDialog, qtbot: QtBot) -> None:
    dialog = make_dialog()
    with qtbot.waitSignal(dialog.options_changed):
        dialog.one_backend_box.click()
    assert dialog.options == msgspec.structs.replace(dialog.options, one_backend=True)
    dialog.set_options(AutoOptions())
    assert not dialog.one_backend_box.isChecked()
    dialog.set_options(AutoOptions(one_backend=True))
    assert dialog.one_backend_box.isChecked()
