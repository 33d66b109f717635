"""How the current model stands: whether it can be loaded, is loaded, is edited since, or answers."""

from __future__ import annotations

from PySide6.QtCore import QObject

from app.load.loader import Loader
from app.models.document import LayoutDocument
from app.models.edited import is_edited
from app.models.loading import ModelState
from app.models.open_model import OpenModel
from app.models.open_models import OpenModels
from app.models.opener import ModelOpener
from app.models.unloader import Unloader
from app.window.actions import Actions
from app.window.status_line import StatusLine
from widgets.controls.settings_bar import SettingsBar
from widgets.controls.values import LoadState
from widgets.devices.device_strip import DeviceStrip
from widgets.layout_editor.editor import LayoutEditor


class StatePresenter(QObject):
    """Carries the bar's buttons to the loader, and enables them and their actions."""

    def __init__(
        self,
        models: OpenModels,
        document: LayoutDocument,
        loader: Loader,
        *,
        opener: ModelOpener,
        unloader: Unloader,
        bar: SettingsBar,
        editor: LayoutEditor,
        strip: DeviceStrip,
        status_line: StatusLine,
        actions: Actions,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._models = models
        self._document = document
        self._loader = loader
        self._bar = bar
        self._editor = editor
        self._strip = strip
        self._status_line = status_line
        self._actions = actions
        opener.model_changed.connect(self._show_current)
        models.current_changed.connect(self._show_current)
        models.added.connect(self._follow)
        for model in models.all:
            self._follow(model)
        loader.memory_return.waiting_changed.connect(self._on_waiting_changed)
        document.preview_changed.connect(self._show_load_state)
        bar.load_requested.connect(loader.load)
        bar.cancel_requested.connect(loader.cancel)
        bar.unload_requested.connect(unloader.unload_current)
        self._show_current()

    def _follow(self, model: OpenModel) -> None:
        model.loading.state_changed.connect(self._show_current)
        model.loading.loaded_changed.connect(self._show_current)

    def _show_current(self) -> None:
        """Show how the current model stands."""
        loading = self._models.current.loading
        loaded, state = loading.loaded, loading.state
        self._editor.set_loaded(loaded)
        self._strip.set_rows(loaded.measured if loaded is not None else ())
        self._actions.enable(
            cancel=self._load_state() is LoadState.LOADING,
            unload=state in (ModelState.READY, ModelState.GENERATING),
            stop_answer=state is ModelState.GENERATING,
        )
        self._show_load_state()

    def _on_waiting_changed(self, text: str) -> None:
        self._status_line.set_busy("memory", text)
        self._show_current()

    def _show_load_state(self) -> None:
        state = self._load_state()
        self._bar.set_load_state(state)
        self._actions.enable(load=state in (LoadState.IDLE, LoadState.EDITED))

    def _load_state(self) -> LoadState:
        if self._loader.is_waiting:
            return LoadState.LOADING
        loading = self._models.current.loading
        match loading.state:
            case ModelState.LOADING:
                return LoadState.LOADING
            case ModelState.STOPPING:
                return LoadState.BUSY
            case ModelState.READY | ModelState.GENERATING:
                return LoadState.EDITED if is_edited(self._document, loading.loaded) else LoadState.LOADED
            case ModelState.EMPTY:
                return LoadState.NO_MODEL if self._document.model is None else LoadState.IDLE
