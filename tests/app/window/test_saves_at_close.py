"""The closing window waits for KV states that are being saved, and shows a dialog if that takes long."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
from PySide6.QtCore import QObject, QTimer, Signal
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.models.open_models import OpenModels
from app.window import saves_at_close
from engine.runtime.session.events import Saving
from widgets.common.dialog import StatusDialog

GIB = 1 << 30


class Bridge(QObject):
    saving = Signal(Saving)


class SavingModel:
    """A model whose KV state is being saved from `prepare_close` until `is_saving` is set to False."""

    def __init__(self) -> None:
        self.bridge, self.is_saving, self.loading = Bridge(), False, self

        self.is_stopped = False

    def prepare_close(self) -> None:
        self.is_saving = True

    def stop_saving(self) -> None:
        self.is_stopped = self.is_saving


def wait_with(model: SavingModel, act: Callable[[StatusDialog], None]) -> None:
    """Call `wait_for_saves`, and meanwhile `act` once with the dialog that it shows."""

    def look() -> None:
        shown = [each for each in QApplication.topLevelWidgets() if isinstance(each, StatusDialog) and each.isVisible()]
        if shown:
            timer.stop()
            act(shown[0])

    timer = QTimer()
    timer.timeout.connect(look)
    timer.start(0)
    saves_at_close.wait_for_saves(cast("OpenModels", SimpleNamespace(all=[model])))
    assert not timer.isActive(), "no dialog was shown"


@pytest.fixture
def model(qtbot: QtBot, monkeypatch: pytest.MonkeyPatch) -> SavingModel:
    monkeypatch.setattr(saves_at_close, "SHOW_AFTER_S", 0.0)
    return SavingModel()


def test_the_dialog_shows_the_progress_until_the_state_is_saved(model: SavingModel) -> None:
    said: list[str] = []

    def act(dialog: StatusDialog) -> None:
        said.append(dialog.text)
        model.bridge.saving.emit(Saving(request=0, saved_bytes=3 * GIB, size_bytes=12 * GIB))
        said.append(dialog.text)
        model.is_saving = False

    wait_with(model, act)
    assert not model.is_stopped
    assert said == [
        "Saving the KV state of the conversation…",
        "Saving the KV state of the conversation… (3.00 GiB of 12.00 GiB)",
    ]


@pytest.mark.parametrize("end", [lambda dialog: dialog.close_button.click(), StatusDialog.close])
def test_the_dialog_ends_the_wait(model: SavingModel, end: Callable[[StatusDialog], object]) -> None:
    def act(dialog: StatusDialog) -> None:
        assert dialog.close_button.text() == "Close Now"
        end(dialog)

    wait_with(model, act)
    assert model.is_stopped


def test_a_save_that_does_not_progress_ends_the_wait(model: SavingModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the model computes a long batch, or waits for a worker that is lost."""
    monkeypatch.setattr(saves_at_close, "SILENT_S", 0.0)
    saves_at_close.wait_for_saves(cast("OpenModels", SimpleNamespace(all=[model])))
    assert model.is_stopped


def test_without_a_save_nothing_is_waited_for(model: SavingModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "prepare_close", lambda: None)
    saves_at_close.wait_for_saves(cast("OpenModels", SimpleNamespace(all=[model])))
