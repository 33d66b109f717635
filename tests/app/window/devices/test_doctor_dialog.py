"""Help > Check This Computer: rows as checks end, summary, cancel and file; the window never blocks."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QWidget
from pytestqt.qtbot import QtBot

from app.background import Background
from app.notices import Notices
from app.rig.device_search import DeviceSearch
from app.rig.examiner import Examiner
from app.rig.lab import Lab
from app.rig.limit_store import LimitStore
from app.rig.live_rig import LiveRig
from app.window.devices.doctor_dialog import DoctorDialog, DoctorPresenter
from engine.machines.doctor.machine import MachineSteps
from engine.machines.doctor.report import Check, Report, Step
from tests.support.patience import DEADLINE_S

FIRST = Check(name="device", device="CPU", detail="a processor")
WRONG = Check(name="weights", device="CPU", ok=False, detail="It dies (SIGSEGV) with Q4_0 weights.")


class Gate:
    """A step that waits in the middle until the test lets it go on."""

    def __init__(self) -> None:
        self.is_open = threading.Event()

    def look(self) -> Iterable[Check]:
        yield FIRST
        assert self.is_open.wait(DEADLINE_S)
        yield WRONG


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    steps = [Step("engine check", "Checking weights on CPU", gate.look), Step("load", "Loading", lambda: [FIRST])]
    monkeypatch.setattr(MachineSteps, "steps", lambda _machine: steps)
    yield gate
    gate.is_open.set()


@pytest.fixture
def window(qtbot: QtBot) -> QWidget:
    widget = QWidget()
    qtbot.addWidget(widget)
    widget.show()
    return widget


@pytest.fixture
def examiner(window: QWidget, monkeypatch: pytest.MonkeyPatch) -> Iterator[Examiner]:
    background, notices, live = Background(window), Notices(window), LiveRig(window)
    search = DeviceSearch(live, LimitStore(), Lab(live, background, notices), background, notices, parent=window)
    monkeypatch.setattr(search, "judge_again", lambda: None)
    examiner = Examiner(live, search, lambda: (), background, notices, window)
    yield examiner
    background.close()
    examiner.close()


def click(dialog: DoctorDialog, name: str) -> None:
    QTest.mouseClick(getattr(dialog, f"{name}_button"), Qt.MouseButton.LeftButton)


def rows(dialog: DoctorDialog) -> list[str]:
    table = dialog.table
    items = [[table.item(row, column) for column in range(4)] for row in range(table.rowCount())]
    return [" ".join(item.text() for item in row if item is not None and item.text()) for row in items]


def open_dialog(qtbot: QtBot, window: QWidget, examiner: Examiner) -> DoctorDialog:
    presenter = DoctorPresenter(examiner, window)
    presenter.show()
    dialog = presenter.dialog
    assert dialog is not None
    presenter.show()
    assert presenter.dialog is dialog
    qtbot.waitUntil(lambda: rows(dialog) == ["device CPU ok a processor"])
    return dialog


def test_rows_come_one_by_one_and_the_report_is_saved(
    qtbot: QtBot, window: QWidget, examiner: Examiner, gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialog = open_dialog(qtbot, window, examiner)
    assert not dialog.isModal()
    assert dialog.text == "Checking weights on CPU…"
    assert not dialog.save_button.isEnabled()
    gate.is_open.set()
    qtbot.waitUntil(dialog.again_button.isVisible)
    assert rows(dialog)[1:] == ["weights CPU WRONG It dies (SIGSEGV) with Q4_0 weights.", "device CPU ok a processor"]
    assert dialog.text == "1 of 3 checks failed: CPU weights."

    path = tmp_path / "report.json"
    monkeypatch.setattr("app.window.dialogs.ask_save", lambda *_: path)
    click(dialog, "save")
    qtbot.waitUntil(path.exists)
    assert [check["name"] for check in json.loads(path.read_bytes())["checks"]] == ["device", "weights", "device"]
    click(dialog, "close")


def test_a_cancel_keeps_what_was_found_and_it_can_begin_again(
    qtbot: QtBot, window: QWidget, examiner: Examiner, gate: Gate
) -> None:
    dialog = open_dialog(qtbot, window, examiner)
    click(dialog, "cancel")
    assert dialog.text == "Cancelling…"
    gate.is_open.set()
    qtbot.waitUntil(dialog.again_button.isVisible)
    assert "cancelled before its end" in dialog.text
    assert len(rows(dialog)) == 2
    click(dialog, "again")
    qtbot.waitUntil(lambda: dialog.text == "1 of 3 checks failed: CPU weights.")
    click(dialog, "close")


def test_closing_the_dialog_ends_the_check(qtbot: QtBot, window: QWidget, examiner: Examiner, gate: Gate) -> None:
    dialog = open_dialog(qtbot, window, examiner)
    click(dialog, "close")
    gate.is_open.set()
    qtbot.waitUntil(lambda: not examiner.is_running)


def test_opened_again_the_dialog_begins_a_new_check_after_the_cancelled_one(
    qtbot: QtBot, window: QWidget, examiner: Examiner, gate: Gate
) -> None:
    presenter = DoctorPresenter(examiner, window)
    first = presenter.open()
    qtbot.waitUntil(lambda: bool(rows(first)))
    click(first, "close")
    second = presenter.open()
    assert second is not first
    finished: list[Report] = []
    examiner.finished.connect(finished.append)
    gate.is_open.set()
    qtbot.waitUntil(second.again_button.isVisible)
    assert second.text == "1 of 3 checks failed: CPU weights."
    assert len(finished) == 1
    click(second, "close")
