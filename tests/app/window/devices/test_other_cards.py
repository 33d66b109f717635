"""Devices > Plan with Other Cards: forecasts with cards that this machine lacks, and these cards in the editor."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

from app.wiring import WindowObjects
from tests.support.models import write_tiny_llama
from tests.support.windows import WindowOpener
from widgets.devices.other_cards import OtherCardsDialog


@pytest.fixture
def window(open_window: WindowOpener) -> WindowObjects:
    return open_window()


def opened(window: WindowObjects) -> OtherCardsDialog:
    window.actions["other_cards"].trigger()
    (dialog,) = window.main.findChildren(OtherCardsDialog)
    assert isinstance(dialog, OtherCardsDialog)
    return dialog


def add(dialog: OtherCardsDialog, name: str) -> None:
    dialog.card_box.setCurrentText(name)
    dialog.add_card_button.click()


def cells(dialog: OtherCardsDialog, column: int) -> list[str]:
    items = [dialog.figures.item(row, column) for row in range(dialog.figures.rowCount())]
    return [item.text() for item in items if item is not None]


def test_without_a_model_it_asks_for_one(window: WindowObjects) -> None:
    dialog = opened(window)
    assert dialog.text == "Open a model to see the forecast for these graphics cards."
    assert not dialog.use_button.isEnabled()


def test_the_figures_follow_the_chosen_cards(window: WindowObjects, qtbot: QtBot, tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model.gguf", n_layers=4)
    with qtbot.waitSignal(window.desk.opener.model_changed):
        window.desk.opener.open(model)
    qtbot.waitUntil(lambda: window.desk.document.plan is not None)
    dialog = opened(window)
    add(dialog, "RTX 3090")
    qtbot.waitUntil(lambda: dialog.text == "model: the graphics cards add 24.00 GiB of memory.")
    assert cells(dialog, 0)[:2] == ["fits", "layers on the CPU"]
    assert cells(dialog, 1)[:2] == ["yes", "4 of 4"]
    assert cells(dialog, 2)[:2] == ["yes", "0 of 4"]
    add(dialog, "RTX 3090")
    qtbot.waitUntil(lambda: dialog.text == "model: the graphics cards add 48.00 GiB of memory.")
    dialog.remove_button.click()
    dialog.remove_button.click()
    qtbot.waitUntil(lambda: cells(dialog, 2)[:2] == ["yes", "4 of 4"])


def test_the_cards_are_shown_in_the_editor(window: WindowObjects, qtbot: QtBot) -> None:
    live = window.desk.rig.live
    real = live.rig.ids
    for expected in (("CUDA0",), ("CUDA0", "CUDA1")):
        dialog = opened(window)
        add(dialog, "RTX 3090")
        dialog.use_button.click()
        assert tuple(device for device in live.rig.ids if device not in real) == expected
        assert live.missing_devices == expected
        assert not live.is_real
        qtbot.waitUntil(lambda: not window.main.findChildren(OtherCardsDialog))
    card = window.main.device_strip.card("CUDA1")
    assert card is not None
    assert card.device.name == "RTX 3090 (not present)"


def test_too_many_cards_are_refused_in_the_dialog(window: WindowObjects) -> None:
    dialog = opened(window)
    for _ in range(17):
        add(dialog, "T4")
    assert dialog.text == "At most 16 graphics cards can be added."
    assert not dialog.use_button.isEnabled()


def test_figures_that_come_late_leave_the_refusal(window: WindowObjects, qtbot: QtBot, tmp_path: Path) -> None:
    with qtbot.waitSignal(window.desk.opener.model_changed):
        window.desk.opener.open(write_tiny_llama(tmp_path / "model.gguf", n_layers=4))
    qtbot.waitUntil(lambda: window.desk.document.plan is not None)
    dialog = opened(window)
    with qtbot.waitSignal(window.desk.background.busy_changed, check_params_cb=lambda words: words == ""):
        for _ in range(17):
            add(dialog, "RTX 3090")
    assert dialog.text == "At most 16 graphics cards can be added."
    assert not dialog.use_button.isEnabled()
