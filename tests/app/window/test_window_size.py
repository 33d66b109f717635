"""The size of the window: it fits a small or scaled screen, and later contents do not enlarge it."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import QSize
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.settings import Settings
from app.window.main_window import MIN_SIZE, SCREEN_ROOM, MainWindow
from app.wiring import WindowObjects
from engine.devices.device import Device
from engine.runtime.session.status import ModelStatus, Phase

SCALED_SCREEN = QSize(1280 * 2 // 3, 800 * 2 // 3)
"""What 1280x800 leaves at a scale of 150 %."""


def test_it_fits_a_screen_of_1280_by_800_at_150_percent() -> None:
    room = SCALED_SCREEN - SCREEN_ROOM
    assert (MIN_SIZE.width() <= room.width(), MIN_SIZE.height() <= room.height()) == (True, True)


def test_what_is_shown_later_does_not_make_it_larger(window: WindowObjects) -> None:
    main = window.main
    main.resize(MIN_SIZE)
    QApplication.processEvents()
    assert main.size() == MIN_SIZE

    main.settings_bar.set_status(ModelStatus(name="a model", phase=Phase.LOADING))
    main.settings_bar.set_progress(0.5, "Reading the weights")
    main.status_line.set_busy("test", "a long sentence about what is going on " * 8)
    main.device_strip.set_devices([Device(f"GPU{number}", "RTX 3090", "CUDA", "gpu", 1 << 34) for number in range(8)])
    main.chat_view.show_list(True)
    main.open_report()
    window.actions["side_by_side"].trigger()
    for arrangement in ("arrange_chat", "arrange_place", "arrange_both", "library"):
        window.actions[arrangement].trigger()
        QApplication.processEvents()
        assert main.size() == MIN_SIZE, arrangement


def test_a_window_that_was_saved_on_a_larger_screen_is_shrunk(qtbot: QtBot, tmp_path: Path) -> None:
    settings = Settings(tmp_path / "settings.ini")
    large = MainWindow(settings)
    qtbot.addWidget(large)
    free = large.screen().availableGeometry()
    large.resize(free.size() + QSize(400, 300))
    settings.save_window_state(large.saveGeometry(), large.saveState(1))

    again = MainWindow(settings)
    qtbot.addWidget(again)
    again.restore()
    room = (free.size() - SCREEN_ROOM).expandedTo(MIN_SIZE)
    assert again.size().boundedTo(room) == again.size()
    assert free.contains(again.pos())


def test_a_low_window_gives_the_room_of_the_graphs_to_the_lanes(window: WindowObjects, qtbot: QtBot) -> None:
    main = window.main
    main.device_strip.set_devices([Device("GPU0", "RTX 3090", "CUDA", "gpu", 1 << 34)])
    main.resize(1000, 740)
    (card,) = main.device_strip.cards()
    qtbot.waitUntil(card.plot.isVisible)
    tall = main.device_strip.height()

    main.resize(1000, 500)
    qtbot.waitUntil(lambda: main.device_strip.height() < tall)
    assert not card.plot.isVisible()
    qtbot.waitUntil(lambda: card.height() <= main.device_strip.height())
