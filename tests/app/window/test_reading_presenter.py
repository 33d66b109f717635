"""How much of a question has been read is on the status line until the first word, or until it is stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.settings import Settings
from app.theme import Theme
from app.wiring import WindowParts, make_window
from engine.devices.device import Rig, make_host
from engine.gguf.model_file import identify
from engine.gguf.reader import read_model
from engine.layout.layout import single_device
from engine.plan.edit import Edit
from engine.session.status import Phase
from engine.settings.context_settings import ContextSettings
from engine.units import GIB
from tests.support.models import write_tiny_llama

DEADLINE_MS = 60_000
CONTEXT = ContextSettings(n_ctx=4096, n_batch=32, n_ubatch=32, threads=1, threads_batch=1)
QUESTION = "abc " * 700


@pytest.fixture
def window(qtbot: QtBot, qapp: QApplication, tmp_path: Path) -> Iterator[WindowParts]:
    """A window with a loaded model that reads a question in small batches."""
    opened = make_window(Settings(tmp_path / "settings.ini"), Theme(qapp, "dark"))
    opened.desk.prober.close()
    qtbot.addWidget(opened.main)
    path = write_tiny_llama(tmp_path / "tiny.gguf", n_embd=256, n_head=4, n_ff=768, n_ctx_train=4096)
    model = read_model(path)
    place = opened.desk.models.place(model, identify(model.paths))
    rig = Rig((), make_host("host", 16 * GIB, 8 * GIB))
    opened.desk.document.open(model, rig, Edit(single_device(model.n_layers, "CPU"), CONTEXT))
    opened.desk.loader.load()
    qtbot.waitUntil(lambda: place.loading.phase is Phase.READY, timeout=DEADLINE_MS)
    yield opened
    opened.main.close()
    qapp.setStyleSheet("")


def shown(window: WindowParts) -> Callable[[], bool]:
    return lambda: window.main.status_line.text().startswith("Reading the question: ")


def test_it_is_told_until_the_first_word(window: WindowParts, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.models.reading_pace.KNOWN_AFTER_S", 0.0)
    seen: list[str] = []
    in_chat: list[str] = []
    model = window.desk.models.current
    chat = window.views.current.chat

    def note() -> None:
        seen.append(window.main.status_line.text())
        in_chat.append(chat.reading.label.text())

    model.loading.bridge.reading.connect(note)
    model.conversation.send(QUESTION)
    qtbot.waitUntil(lambda: bool(seen), timeout=DEADLINE_MS)
    qtbot.waitUntil(lambda: not shown(window)(), timeout=DEADLINE_MS)
    assert any(text.startswith("Reading the question: ") and " of " in text for text in seen)
    for texts in (seen, in_chat):
        assert any(" s left" in text for text in texts)
    model.loading.stop_answer()
    qtbot.waitUntil(lambda: model.loading.phase is Phase.READY, timeout=DEADLINE_MS)


def test_one_that_is_stopped_is_told_of_no_more(window: WindowParts, qtbot: QtBot) -> None:
    model = window.desk.models.current
    model.conversation.send(QUESTION)
    qtbot.waitUntil(shown(window), timeout=DEADLINE_MS)
    model.loading.stop_answer()
    qtbot.waitUntil(lambda: model.loading.phase is Phase.READY, timeout=DEADLINE_MS)
    assert not shown(window)()
