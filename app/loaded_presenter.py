"""Lists the loaded models in the model panel, and asks when one of them is in the way of another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from PySide6.QtCore import QObject

from app.load_plan import idle_text
from app.loading import ModelState
from app.open_model import OpenModel
from engine.units import format_bytes
from widgets.library.load_question import LoadQuestion
from widgets.library.loaded_entry import KeepAliveChoice, LoadedEntry

if TYPE_CHECKING:
    from app.main_window import MainWindow

LOW_WINDOW_PX = 860
"""Below this height a question and the devices' graphs do not both fit above the lanes."""


class LoadedPresenter(QObject):
    """Idle times are told anew with every sample."""

    def __init__(self, window: MainWindow) -> None:
        super().__init__(window)
        self._window = window
        self._session = window.session
        models, loader, loaded_list = self._session.models, self._session.loader, window.model_panel.loaded_list
        models.changed.connect(self._show_entries)
        models.current_changed.connect(self._show_entries)
        self._session.rig.live.samples_arrived.connect(self._show_entries)
        loaded_list.chosen.connect(self._on_chosen)
        loaded_list.end_requested.connect(self._on_end)
        loaded_list.keep_alive_chosen.connect(self._on_keep_alive)
        loader.question_changed.connect(self._show_question)
        window.load_question.answered.connect(loader.answer)

    def _show_question(self, question: LoadQuestion | None) -> None:
        window = self._window
        # Before the question takes its place: the lanes that it is about are to stay in sight on a low window.
        window.device_strip.set_compact(question is not None and window.height() < LOW_WINDOW_PX)
        window.load_question.set_question(question)

    def _show_entries(self) -> None:
        models = self._session.models
        entries = [self._entry(model) for model in models.all if model.held is not None]
        self._window.model_panel.loaded_list.set_entries(entries)

    def _entry(self, model: OpenModel) -> LoadedEntry:
        held, state = model.held, model.loading.state
        assert held is not None
        held_bytes = held.held_bytes
        detail = f"{format_bytes(sum(held_bytes.values()))} · {', '.join(held_bytes)}" if held_bytes else "…"
        words = {ModelState.LOADING: "loading", ModelState.STOPPING: "cancelling"}
        where = [f"{device}: {format_bytes(size_bytes)}" for device, size_bytes in held_bytes.items()]
        return LoadedEntry(
            number=model.number,
            title=held.name,
            detail=detail,
            state=words.get(state) or idle_text(held, self._session.models.now_s()),
            keep_alive_s=held.keep_alive_s,
            is_current=model is self._session.models.current,
            end_text="Cancel" if model.loading.is_busy else "Unload",
            may_end=state is not ModelState.STOPPING,
            tool_tip="\n".join([held.name, *where]),
        )

    def _on_chosen(self, number: int) -> None:
        self._session.show_model(self._model(number))

    def _on_end(self, number: int) -> None:
        model = self._model(number)
        if model.loading.is_busy:
            model.loading.cancel()
        else:
            self._session.unload_model(model)

    def _on_keep_alive(self, choice: KeepAliveChoice) -> None:
        self._model(choice.number).keep_alive(choice.keep_alive_s)

    def _model(self, number: int) -> OpenModel:
        return next(model for model in self._session.models.all if model.number == number)
