"""Details of a device in the window: graph of the last hour, marks of models, memory holders, and saving."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from PySide6.QtWidgets import QFileDialog
from pytestqt.qtbot import QtBot

from app.window.devices import details_presenter
from app.wiring import WindowObjects
from engine.base.units import GIB
from engine.devices.device import Device
from engine.devices.telemetry.sample import MemoryHolder, Sample
from engine.runtime.session.events import Done
from tests.support.patience import DEADLINE_S
from tests.support.windows import WindowOpener
from widgets.devices.device_details import DeviceDetails


def read(window: WindowObjects, time_s: float, used_bytes: int = 2 * GIB) -> None:
    host = window.desk.rig.live.rig.host
    window.desk.rig.live.take_samples((Sample(host.id, time_s, used_bytes, host.total_bytes),))


def opened(window: WindowObjects) -> DeviceDetails:
    window.main.device_strip.details_requested.emit(window.desk.rig.live.rig.host)
    (found,) = window.main.findChildren(DeviceDetails)
    assert isinstance(found, DeviceDetails)
    return found


def test_the_details_begin_with_the_past_and_go_on(open_window: WindowOpener, qtbot: QtBot) -> None:
    window = open_window()
    read(window, 1.0)
    read(window, 2.0, 3 * GIB)
    details = opened(window)
    assert "3.00 GiB" in details.reading_text
    assert details.csv_text().count("\n") == 3
    read(window, 3.0, 4 * GIB)
    assert "4.00 GiB" in details.reading_text
    assert details.csv_text().count("\n") == 4
    qtbot.waitUntil(lambda: details.holders.rowCount() > 0)


def test_a_second_click_brings_the_same_window_to_the_front(open_window: WindowOpener, qtbot: QtBot) -> None:
    window = open_window()
    first = opened(window)
    assert opened(window) is first
    first.close()
    qtbot.waitUntil(lambda: not window.main.findChildren(DeviceDetails))
    read(window, 1.0)


def test_readings_of_more_than_an_hour_ago_are_forgotten(open_window: WindowOpener) -> None:
    window = open_window()
    read(window, 1.0)
    read(window, 4000.0)
    assert opened(window).csv_text().count("\n") == 2


def test_answers_are_marks(open_window: WindowOpener) -> None:
    window = open_window()
    read(window, 1.0)
    details = opened(window)
    window.desk.models.current.conversation.answer_finished.emit(
        Done(
            prompt_tokens=1,
            generated_tokens=1,
            prompt_tokens_per_second=1.0,
            generation_tokens_per_second=1.0,
            stop_reason="length",
        )
    )
    assert details.csv_text().count("answered") == 1


def test_the_readings_are_saved_where_the_user_chose(
    open_window: WindowOpener, qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = open_window()
    read(window, 1.0)
    details = opened(window)
    chosen = tmp_path / "readings"
    monkeypatch.setattr(QFileDialog, "getSaveFileName", lambda *_: (str(chosen), ""))
    details.csv_requested.emit()
    qtbot.waitUntil(chosen.with_suffix(".csv").exists)
    details.picture_requested.emit()
    qtbot.waitUntil(chosen.with_suffix(".png").exists)
    said: list[str] = []
    window.desk.notices.given.connect(lambda notice: said.append(str(notice)))
    monkeypatch.setattr(QFileDialog, "getSaveFileName", lambda *_: (str(tmp_path / "none" / "x.csv"), ""))
    details.csv_requested.emit()
    qtbot.waitUntil(lambda: any("choose another place" in each for each in said))


def test_a_driver_that_hangs_is_asked_once(
    open_window: WindowOpener, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    window, answers, asked = open_window(), threading.Event(), list[str]()

    def holders(device: Device) -> tuple[MemoryHolder, ...]:
        asked.append(device.id)
        answers.wait(DEADLINE_S)
        return (MemoryHolder(pid=1, name="init", held_bytes=GIB, ours=False),)

    monkeypatch.setattr(details_presenter, "memory_holders", holders)
    details = opened(window)
    opened(window)
    qtbot.waitUntil(lambda: bool(asked))
    assert len(asked) == 1
    answers.set()
    qtbot.waitUntil(lambda: details.holders.rowCount() > 0)
    opened(window)
    # The dialog also asks by itself every few seconds.
    qtbot.waitUntil(lambda: len(asked) >= 2)
