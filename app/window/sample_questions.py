"""Offers questions in the empty chat of a model of which it is known what it answers well."""

from __future__ import annotations

from PySide6.QtCore import QObject

from app.models.opener import ModelOpener
from app.window.model_views import ModelViews
from engine.demo.speaking import sample_questions
from engine.gguf.model_file import ModelFile


class SampleQuestionPresenter(QObject):
    """Follows which model is shown."""

    def __init__(self, opener: ModelOpener, views: ModelViews, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._views = views
        opener.model_changed.connect(self._on_model_changed)

    def _on_model_changed(self, model: ModelFile | None) -> None:
        questions = () if model is None else sample_questions(model)
        self._views.current.chat.set_sample_questions(questions)
