"""Tells on the status line how much of a question has been read, and how long the rest takes: a long one takes a while
before the first word."""

from __future__ import annotations

from PySide6.QtCore import QObject

from app.models.open_model import OpenModel
from app.models.open_models import OpenModels
from app.models.reading_pace import ReadingPace, left_words
from app.window.status_line import StatusLine
from engine.language import tr
from engine.session.events import Reading
from engine.session.state import RequestState
from widgets.common.counts import format_count


class ReadingPresenter(QObject):
    """One model's; it is named wherever another one is current."""

    def __init__(
        self, model: OpenModel, models: OpenModels, status_line: StatusLine, parent: QObject | None = None
    ) -> None:
        super().__init__(parent)
        self._model = model
        self._models = models
        self._status_line = status_line
        self._pace = ReadingPace()
        model.loading.bridge.reading.connect(self._on_reading)
        model.loading.bridge.snapshot.connect(self._on_snapshot)

    def _on_reading(self, event: Reading) -> None:
        # What is said of a request that was stopped or lost meanwhile comes too late.
        if event.prompt_tokens and event.request in self._being_read():
            read, whole = format_count(event.read_tokens), format_count(event.prompt_tokens)
            text = tr("Reading the question: {read} of {whole} tokens", read=read, whole=whole) + left_words(
                self._pace.left_s(event)
            )
            self._show(text if self._models.current is self._model else f"{self._model.name}: {text}")

    def _on_snapshot(self) -> None:
        if not self._being_read():
            self._show("")

    def _being_read(self) -> list[int]:
        return [run.id for run in self._model.loading.snapshot.requests if run.state is RequestState.READING]

    def _show(self, text: str) -> None:
        self._status_line.set_busy(f"reading {self._model.number}", text)
