"""Each open model's chat and report: they stay as they are while another model's are shown."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject
from PySide6.QtWidgets import QStackedWidget

from app.chat_presenter import ChatPresenter
from app.load_presenter import LoadPresenter
from app.open_model import OpenModel
from widgets.chat.chat_pane import ChatPane
from widgets.common.palette import DARK, Palette
from widgets.load_report.load_report import LoadReport

if TYPE_CHECKING:
    from app.main_window import MainWindow


@dataclass(frozen=True, slots=True)
class ModelView:
    """What is shown of one model only."""

    chat: ChatPane
    report: LoadReport


class ModelViews(QObject):
    """Makes a view for each model that is opened, and shows that of the current one."""

    def __init__(self, window: MainWindow) -> None:
        super().__init__(window)
        self._window = window
        self._palette = DARK
        self._views: dict[OpenModel, ModelView] = {}
        self.chats = QStackedWidget()
        self.reports = QStackedWidget()

    def follow_models(self) -> None:
        """Begin; the window's other parts are there by now."""
        models = self._window.session.models
        for model in models.all:
            self._add(model)
        models.added.connect(self._add)
        models.current_changed.connect(self._show)

    @property
    def current(self) -> ModelView:
        return self._views[self._window.session.models.current]

    def apply_palette(self, palette: Palette) -> None:
        """Use the colours of `palette`."""
        self._palette = palette
        for view in self._views.values():
            view.report.apply_palette(palette)

    def _add(self, model: OpenModel) -> None:
        view = self._views[model] = ModelView(ChatPane(), LoadReport())
        view.report.apply_palette(self._palette)
        self.chats.addWidget(view.chat)
        self.reports.addWidget(view.report)
        ChatPresenter(model, view.chat, self)
        view.chat.reload_requested.connect(partial(self._window.session.loader.reload, model))
        LoadPresenter(model, view.report, self._window, self)

    def _show(self, model: OpenModel) -> None:
        self.chats.setCurrentWidget(self._views[model].chat)
        self.reports.setCurrentWidget(self._views[model].report)
