"""Says in a model's chat who answers there, and offers what is missing for that: opening a model, or loading it."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QObject

from app.load.loader import Loader
from app.models.loading import ModelState
from app.models.open_model import OpenModel
from app.models.opener import ModelOpener
from engine.language import tr
from widgets.chat.chat_pane import ChatPane
from widgets.chat.empty_chat import ChatStart


def start_words(name: str, state: ModelState) -> ChatStart:
    """Return what is said in the chat of a model; `name` empty: of none."""
    if not name:
        return ChatStart(
            tr("No model is open"), tr("Open a model to chat."), tr("Open a model…"), tr("No model is open.")
        )
    match state:
        case ModelState.EMPTY:
            sentence = tr("{name} is not loaded.", name=name)
            return ChatStart(name, tr("It answers once it is loaded."), tr("Load"), sentence)
        case ModelState.LOADING:
            return ChatStart(name, tr("Loading…"))
        case ModelState.STOPPING:
            return ChatStart(name, tr("One moment"))
        case _:
            return ChatStart(name)


class StartPresenter(QObject):
    """One for each open model."""

    def __init__(
        self,
        model: OpenModel,
        pane: ChatPane,
        *,
        opener: ModelOpener,
        loader: Loader,
        open_file: Callable[[], None],
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._model = model
        self._pane = pane
        self._opener = opener
        self._loader = loader
        self._open_file = open_file
        model.loading.state_changed.connect(self._show)
        opener.model_changed.connect(self._show)
        pane.start_requested.connect(self._on_requested)
        self._show()

    def _show(self) -> None:
        self._pane.show_start(start_words(self._model.name, self._model.loading.state))

    def _on_requested(self) -> None:
        if self._model.file is None:
            self._open_file()
            return
        # Beside another chat it need not be the one that is loaded by that.
        self._opener.show(self._model)
        self._loader.load()
