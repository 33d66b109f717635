"""A parked model: its next question loads it again, a failed load keeps the text, a restart restores the parking."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from PySide6.QtCore import QCoreApplication
from pytestqt.qtbot import QtBot

from app.chats import attacher
from app.models.open_model import OpenModel
from app.wiring import WindowObjects
from engine.base.errors import ChatError
from engine.chat.attachments import ReadFile, read_attachment
from engine.runtime.session.status import Phase
from tests.support.models import write_tiny_llama
from tests.support.patience import DEADLINE_S
from tests.support.windows import WindowOpener

QUESTION = "hello again"


@pytest.fixture
def window(open_window: WindowOpener) -> WindowObjects:
    return open_window()


def load(window: WindowObjects, qtbot: QtBot, path: Path) -> OpenModel:
    with qtbot.waitSignal(window.desk.opener.model_changed):
        window.desk.opener.open(path)
    window.desk.loader.load()
    model = window.desk.models.current
    qtbot.waitUntil(lambda: model.loading.phase is Phase.READY)
    return model


def park(window: WindowObjects, qtbot: QtBot, model: OpenModel) -> None:
    window.actions["park"].trigger()
    qtbot.waitUntil(lambda: model.loading.phase is Phase.STOPPED and not model.loading.has_child)
    assert model.is_parked
    assert not window.actions["park"].isEnabled()


def ask(window: WindowObjects) -> None:
    pane = window.views.current.chat
    pane.prompt_edit.setPlainText(QUESTION)
    assert pane.send_button.isEnabled()
    pane.send_button.click()


def test_the_next_question_loads_a_parked_model(window: WindowObjects, qtbot: QtBot, tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "ada.gguf", n_layers=2, n_ctx_train=256)
    model = load(window, qtbot, path)
    park(window, qtbot, model)
    settings, pane = window.desk.settings, window.views.current.chat
    assert settings.parked_models == (path,)
    ask(window)
    assert pane.prompt_edit.toPlainText() == QUESTION, "the text stays until the model is loaded"
    qtbot.waitUntil(lambda: [message.content for message in model.conversation.tree.path][:1] == [QUESTION])
    assert pane.prompt_edit.toPlainText() == ""
    assert not model.is_parked
    assert not window.desk.settings.parked_models
    model.loading.stop_answer()
    qtbot.waitUntil(lambda: model.loading.phase is Phase.READY)


def test_a_load_that_fails_keeps_the_question(window: WindowObjects, qtbot: QtBot, tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "ada.gguf", n_layers=2, n_ctx_train=256)
    model = load(window, qtbot, path)
    park(window, qtbot, model)
    path.unlink()
    with qtbot.waitSignal(model.loading.ended):
        ask(window)
    qtbot.waitUntil(lambda: model.loading.phase is Phase.STOPPED)
    assert window.views.current.chat.prompt_edit.toPlainText() == QUESTION
    assert model.is_parked, "another question tries again"
    assert not model.conversation.tree.messages


def test_a_parked_model_is_still_parked_after_a_restart(window: WindowObjects, qtbot: QtBot, tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "ada.gguf", n_layers=2, n_ctx_train=256)
    window.desk.settings.keep_parked(path, parked=True)
    with qtbot.waitSignal(window.desk.opener.model_changed):
        window.desk.opener.open(path)
    assert window.desk.models.current.is_parked
    assert window.views.current.chat.start_banner.button.text() == "Load"
    ask(window)
    model = window.desk.models.current
    qtbot.waitUntil(lambda: bool(model.conversation.tree.messages))
    model.loading.stop_answer()
    qtbot.waitUntil(lambda: model.loading.phase is Phase.READY)
    # Unloading by hand is no parking.
    window.actions["unload"].trigger()
    assert not model.is_parked
    assert window.desk.settings.parked_models == ()


def test_what_is_typed_after_the_question_is_not_sent(window: WindowObjects, qtbot: QtBot, tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "ada.gguf", n_layers=2, n_ctx_train=256)
    model = load(window, qtbot, path)
    park(window, qtbot, model)
    ask(window)
    window.views.current.chat.prompt_edit.setPlainText("half a sen")
    qtbot.waitUntil(lambda: model.loading.phase is Phase.READY)
    QCoreApplication.processEvents()
    assert not model.conversation.tree.messages
    assert window.views.current.chat.prompt_edit.toPlainText() == "half a sen"


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_file_that_is_read_during_the_load_goes_with_the_question(
    window: WindowObjects, qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    may_read = threading.Event()

    def read(path: Path) -> ReadFile:
        assert may_read.wait(DEADLINE_S)
        if is_refused:
            raise ChatError("notes.txt is empty.")
        return read_attachment(path)

    monkeypatch.setattr(attacher, "read_attachment", read)
    model = load(window, qtbot, write_tiny_llama(tmp_path / "ada.gguf", n_layers=2, n_ctx_train=256))
    park(window, qtbot, model)
    ask(window)
    pane, path = window.views.current.chat, tmp_path / "notes.txt"
    path.write_text("notes")
    pane.files_given.emit([path])
    qtbot.waitUntil(lambda: model.loading.phase is Phase.READY)
    QCoreApplication.processEvents()
    assert not model.conversation.tree.messages
    may_read.set()
    if is_refused:
        qtbot.waitUntil(lambda: not pane.attachments.files)
        QCoreApplication.processEvents()
        assert not model.conversation.tree.messages
        assert pane.prompt_edit.toPlainText() == QUESTION
        return
    qtbot.waitUntil(lambda: bool(model.conversation.tree.messages))
    question = model.conversation.tree.path[0]
    assert question.content == QUESTION
    assert [file.name for file in question.attachments] == ["notes.txt"]
    model.loading.stop_answer()
    qtbot.waitUntil(lambda: model.loading.phase is Phase.READY)
