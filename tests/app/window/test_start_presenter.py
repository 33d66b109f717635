"""What a model's chat says before it can answer, and what its button does."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.settings import Settings
from app.theme import Theme
from app.wiring import make_window
from engine.session.status import ModelStatus, Phase


def test_without_a_model_the_button_opens_one_and_a_remark_goes_with_its_conversation(
    qtbot: QtBot, qapp: QApplication, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    asked: list[bool] = []
    monkeypatch.setattr("app.window.questions.Questions.open_model", lambda _questions: asked.append(True))
    window = make_window(Settings(tmp_path / "settings.ini"), Theme(qapp, "dark"))
    qtbot.addWidget(window.main)
    pane = window.views.current.chat
    assert pane.empty.title_label.text() == "No model is open"
    pane.empty.button.click()
    assert asked
    pane.show_remark("927 tokens restored: they are not read again.")
    window.views.left.conversation.begin()
    pane.set_status(ModelStatus("Demo", Phase.READY))
    assert pane.status_text == ""
    window.main.close()
    qapp.setStyleSheet("")
