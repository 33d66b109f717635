"""The dialog about weights that workers keep: their size, and their removal."""

from __future__ import annotations

import shutil

import pytest
from PySide6.QtWidgets import QMessageBox, QWidget
from pytestqt.qtbot import QtBot

from app.background import Background
from app.notices import Notices
from app.paths import weight_cache_path
from app.window.devices.rig_presenter import CachedWeightsPresenter
from tests.support.windows import WindowOpener


def open_box(presenter: CachedWeightsPresenter, window: QWidget, qtbot: QtBot) -> QMessageBox:
    before = window.findChildren(QMessageBox)
    presenter.show()
    qtbot.waitUntil(lambda: len(window.findChildren(QMessageBox)) > len(before))
    return next(box for box in window.findChildren(QMessageBox) if box not in before)


def test_weights_are_counted_and_removed_when_asked(qtbot: QtBot) -> None:
    shutil.rmtree(weight_cache_path(), ignore_errors=True)  # what other tests of this process kept
    folder = weight_cache_path() / "50052"
    folder.mkdir(parents=True)
    file = folder / f"{7:016x}"
    file.write_bytes(b"w" * (3 << 20))
    window = QWidget()
    qtbot.addWidget(window)
    notices = Notices(window)
    presenter = CachedWeightsPresenter(Background(window), notices, window)
    box = open_box(presenter, window, qtbot)
    assert "3.0 MiB" in box.text()
    remove = next(button for button in box.buttons() if "Clear Cache" in button.text())
    with qtbot.waitSignal(notices.given) as told:
        remove.click()
    assert told.args is not None
    assert "Removed 3.0 MiB of cached weights." in told.args[0].text
    assert not file.exists()
    last = open_box(presenter, window, qtbot)
    assert [button.text() for button in last.buttons()] == ["Close"]
    last.close()
    qtbot.waitUntil(lambda: not window.findChildren(QMessageBox))


def test_the_devices_name_variables_that_hide_some(open_window: WindowOpener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEAPI_DEVICE_SELECTOR", "level_zero:1")
    window = open_window()
    live = window.desk.rig.live
    live.set_devices(live.devices)
    note = window.main.device_strip.note_label
    assert 'ONEAPI_DEVICE_SELECTOR="level_zero:1" can hide devices of SYCL' in note.text()


def test_a_lab_rig_that_does_not_run_cannot_be_stopped(open_window: WindowOpener) -> None:
    actions = open_window().actions
    assert actions["start_lab"].isEnabled()
    assert not actions["stop_lab"].isEnabled()
    assert not actions["restart_lab"].isEnabled()
