"""Lists the loaded models in the model panel, and asks when one of them is in the way of another."""

from __future__ import annotations

from PySide6.QtCore import QObject
from PySide6.QtWidgets import QWidget

from app.load.loader import Loader
from app.load.room import idle_text
from app.models.loading import ModelState
from app.models.open_model import OpenModel
from app.models.open_models import OpenModels
from app.models.opener import ModelOpener
from app.models.unloader import Unloader
from app.rig.live_rig import LiveRig
from engine.language import tr
from engine.units import format_bytes
from widgets.devices.device_strip import DeviceStrip
from widgets.library.load_question import LoadQuestion, LoadQuestionBar
from widgets.library.loaded_models import KeepAliveChoice, LoadedEntry
from widgets.library.model_panel import ModelPanel

LOW_WINDOW_PX = 860
"""Below this height a question and the devices' graphs do not both fit above the lanes."""


class LoadedPresenter(QObject):
    """Idle times are told anew with every sample."""

    def __init__(
        self,
        models: OpenModels,
        loader: Loader,
        live: LiveRig,
        *,
        opener: ModelOpener,
        unloader: Unloader,
        window: QWidget,
        panel: ModelPanel,
        question: LoadQuestionBar,
        strip: DeviceStrip,
    ) -> None:
        super().__init__(window)
        self._models = models
        self._opener = opener
        self._unloader = unloader
        self._window = window
        self._list = loaded_list = panel.loaded_list
        self._question = question
        self._strip = strip
        models.changed.connect(self._show_entries)
        models.current_changed.connect(self._show_entries)
        live.samples_arrived.connect(self._show_entries)
        loaded_list.chosen.connect(self._on_chosen)
        loaded_list.end_requested.connect(self._on_end)
        loaded_list.keep_alive_chosen.connect(self._on_keep_alive)
        loader.question_changed.connect(self._show_question)
        question.answered.connect(loader.answer)

    def _show_question(self, question: LoadQuestion | None) -> None:
        # Before the question takes its place: the lanes that it is about are to stay in sight on a low window.
        self._strip.set_compact(question is not None and self._window.height() < LOW_WINDOW_PX)
        self._question.set_question(question)

    def _show_entries(self) -> None:
        self._list.set_entries([self._entry(model) for model in self._models.all if model.held is not None])

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
            state=words.get(state) or idle_text(held, self._models.now_s()),
            keep_alive_s=held.keep_alive_s,
            is_current=model is self._models.current,
            end_text=tr("Cancel") if model.loading.is_busy else tr("Unload"),
            may_end=state is not ModelState.STOPPING,
            tool_tip="\n".join([held.name, *where, *_checkpoint_words(model.loading.checkpoint_bytes)]),
        )

    def _on_chosen(self, number: int) -> None:
        self._opener.show(self._model(number))

    def _on_end(self, number: int) -> None:
        model = self._model(number)
        if model.loading.is_busy:
            model.loading.cancel()
        else:
            self._unloader.unload(model)

    def _on_keep_alive(self, choice: KeepAliveChoice) -> None:
        self._model(choice.number).keep_alive(choice.keep_alive_s)

    def _model(self, number: int) -> OpenModel:
        return next(model for model in self._models.all if model.number == number)


def _checkpoint_words(size_bytes: int) -> list[str]:
    return [tr("of which checkpoints of conversations: {size}", size=format_bytes(size_bytes))] if size_bytes else []
