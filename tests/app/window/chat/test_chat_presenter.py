"""The chat of a model: what it says before it can answer, and how much of a question has been read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

from app.wiring import WindowParts
from engine.base.units import GIB
from engine.devices.device import Rig, make_host
from engine.model.gguf.model_file import identify
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import single_device
from engine.planning.plan.edit import Edit
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.session.status import ModelStatus, Phase
from tests.support.models import write_tiny_llama
from tests.support.windows import WindowOpener

CONTEXT = ContextSettings(n_ctx=4096, n_batch=32, n_ubatch=32, threads=1, threads_batch=1)
QUESTION = "abc " * 700


@pytest.fixture
def reading(open_window: WindowOpener, qtbot: QtBot, tmp_path: Path) -> WindowParts:
    """A window with a loaded model that reads a question in small batches."""
    opened = open_window()
    opened.desk.prober.close()
    path = write_tiny_llama(tmp_path / "tiny.gguf", n_embd=256, n_head=4, n_ff=768, n_ctx_train=4096)
    model = read_model(path)
    place = opened.desk.models.place(model, identify(model.paths))
    rig = Rig((), make_host("host", 16 * GIB, 8 * GIB))
    opened.desk.document.open(model, rig, Edit(single_device(model.n_layers, "CPU"), CONTEXT))
    opened.desk.loader.load()
    qtbot.waitUntil(lambda: place.loading.phase is Phase.READY)
    return opened


def shown(window: WindowParts) -> Callable[[], bool]:
    return lambda: window.main.status_line.text().startswith("Reading the question: ")


def test_how_much_is_read_is_told_until_the_first_word(
    reading: WindowParts, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.models.reading_pace.KNOWN_AFTER_S", 0.0)
    seen: list[str] = []
    in_chat: list[str] = []
    model = reading.desk.models.current
    chat = reading.views.current.chat

    def note() -> None:
        seen.append(reading.main.status_line.text())
        in_chat.append(chat.reading.label.text())

    model.loading.bridge.reading.connect(note)
    model.conversation.send(QUESTION)
    qtbot.waitUntil(lambda: bool(seen))
    qtbot.waitUntil(lambda: not shown(reading)())
    assert any(text.startswith("Reading the question: ") and " of " in text for text in seen)
    for texts in (seen, in_chat):
        assert any(" s left" in text for text in texts)
    model.loading.stop_answer()
    qtbot.waitUntil(lambda: model.loading.phase is Phase.READY)


def test_a_question_that_is_stopped_is_told_of_no_more(reading: WindowParts, qtbot: QtBot) -> None:
    model = reading.desk.models.current
    model.conversation.send(QUESTION)
    qtbot.waitUntil(shown(reading))
    model.loading.stop_answer()
    qtbot.waitUntil(lambda: model.loading.phase is Phase.READY)
    assert not shown(reading)()


def test_without_a_model_the_button_opens_one_and_a_remark_goes_with_its_conversation(
    open_window: WindowOpener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    asked: list[bool] = []
    monkeypatch.setattr("app.window.questions.Questions.open_model", lambda _questions: asked.append(True))
    window = open_window()
    pane = window.views.current.chat
    assert pane.empty.title_label.text() == "No model is open"
    pane.empty.button.click()
    assert asked
    pane.show_remark("927 tokens restored: they are not read again.")
    window.views.left.conversation.begin()
    pane.set_status(ModelStatus("Demo", Phase.READY))
    assert pane.status_text == ""
