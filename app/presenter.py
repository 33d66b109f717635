"""Carries values from the session to the widgets, and intents from the widgets to the session."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Qt
from PySide6.QtWidgets import QMenu

from app.loading import ModelState
from app.notices import Notice
from app.open_model import OpenModel
from engine.devices.device import Rig
from engine.fit.decisions.defaults import trained_length
from engine.fit.preview import Preview
from engine.fit.strategies.catalogue import STRATEGIES
from engine.gguf.model_file import ModelFile
from engine.layout.layout import SplitMode
from engine.layout.split_modes import layout_in_mode, split_mode_obstacles, split_shares, with_shares
from widgets.controls.share_editor import ShareChange
from widgets.controls.states import LoadState, SplitModeChoice
from widgets.layout_editor.moves import BoundaryMove, OutputMove, RangeMove
from widgets.library.recent_model import ModelChoice

if TYPE_CHECKING:
    from app.main_window import MainWindow

_NO_MODEL_TEXT = "Open a model"


class Presenter(QObject):
    """Connects one window's widgets to its session."""

    def __init__(self, window: MainWindow) -> None:
        super().__init__(window)
        self._window = window
        self._session = window.session
        self._connect_session()
        self._connect_widgets()
        self._on_model_changed(None)
        self._on_rig_changed(self._session.rig.live.rig)
        self._show_load_state()

    # ------------------------------------------------------------------ wiring

    def _connect_session(self) -> None:
        session, window = self._session, self._window
        rig, document, models = session.rig, session.document, session.models
        session.model_changed.connect(self._on_model_changed)
        models.current_changed.connect(self._show_current)
        models.added.connect(self._connect_model)
        self._connect_model(models.current)
        session.loader.memory_return.waiting_changed.connect(self._on_waiting_changed)
        session.recent_changed.connect(self.show_recent_models)
        session.notices.given.connect(window.status_line.show_notice)
        session.background.busy_changed.connect(self._on_busy_changed)
        rig.live.rig_changed.connect(self._on_rig_changed)
        rig.live.samples_arrived.connect(window.device_strip.add_samples)
        session.watchman.alerts_changed.connect(window.device_strip.set_alerts)
        rig.lab.worker_lost.connect(self._on_worker_lost)
        rig.lab.running_changed.connect(self._on_lab_changed)
        document.preview_changed.connect(self._on_preview_changed)
        document.undo_group.canUndoChanged.connect(window.actions_by_name["undo"].setEnabled)
        document.undo_group.canRedoChanged.connect(window.actions_by_name["redo"].setEnabled)

    def _connect_model(self, model: OpenModel) -> None:
        model.loading.state_changed.connect(self._show_current)
        model.loading.loaded_changed.connect(self._show_current)

    def _connect_widgets(self) -> None:
        window, session = self._window, self._session
        bar, editor, strip, panel = (
            window.settings_bar,
            window.editor,
            window.device_strip,
            window.model_panel,
        )
        bar.load_requested.connect(session.loader.load)
        bar.cancel_requested.connect(session.loader.cancel)
        bar.unload_requested.connect(session.unload)
        bar.context_changed.connect(session.document.set_context)
        bar.split_mode_changed.connect(self._on_split_mode)
        bar.model_menu_requested.connect(self._show_model_menu)
        window.share_editor.shares_changed.connect(self._on_shares_changed)
        window.share_editor.shares_finished.connect(session.document.finish_move)
        editor.boundary_moved.connect(self._on_boundary_moved)
        editor.range_moved.connect(self._on_range_moved)
        editor.output_moved.connect(self._on_output_moved)
        editor.move_finished.connect(session.document.finish_move)
        editor.move_cancelled.connect(session.document.cancel_move)
        strip.limits_edited.connect(session.rig.limits.set)
        strip.remove_requested.connect(session.rig.search.remove)
        panel.model_chosen.connect(self._on_model_chosen)
        panel.demo_requested.connect(session.open_demo)
        panel.try_demo_requested.connect(session.try_demo)
        panel.lab_requested.connect(window.start_lab)

    # ------------------------------------------------------------------ model, rig, layout

    def show_recent_models(self) -> None:
        """List the recent models in panel and menu; their files are not touched."""
        recent = self._session.settings.recent_models
        self._window.model_panel.set_recent(recent)
        menu = self._window.recent_menu
        menu.clear()
        self._add_recent(menu)
        menu.addSeparator()
        menu.addAction("&Clear the List", self._forget_recent)
        menu.setEnabled(bool(recent))

    def _add_recent(self, menu: QMenu) -> None:
        for model in self._session.settings.recent_models:
            # An ampersand in a file's name is no shortcut.
            action = menu.addAction(model.title.replace("&", "&&"), partial(self._session.open_model, model.path))
            action.setStatusTip(str(model.path))

    def _forget_recent(self) -> None:
        self._session.settings.forget_recent_models()
        self.show_recent_models()

    def _on_model_changed(self, model: ModelFile | None) -> None:
        window = self._window
        if model is None:
            window.settings_bar.set_model_text(_NO_MODEL_TEXT, "")
        else:
            recent = {each.path: each for each in self._session.settings.recent_models}
            shown = recent.get(model.paths[0])
            window.settings_bar.set_model_text(model.name, "" if shown is None else shown.detail)
            window.model_panel.set_current(model.paths[0])
        self._show_current()
        window.setWindowTitle("Layerdeck" if model is None else f"{model.name} — Layerdeck")
        window.actions_by_name.enable(
            save_layout=model is not None,
            open_layout=model is not None,
            propose=model is not None,
            split_evenly=model is not None,
            pin=model is not None,
            release_pins=model is not None,
            **{f"auto_{name}": model is not None for name in STRATEGIES},
        )
        self._show_load_state()

    def _on_rig_changed(self, rig: Rig) -> None:
        self._window.device_strip.set_devices(rig.all_devices)

    def _on_lab_changed(self, running: bool) -> None:
        self._window.actions_by_name.enable(start_lab=not running, stop_lab=running)

    def _on_preview_changed(self, preview: Preview | None) -> None:
        window = self._window
        window.editor.set_preview(preview)
        if preview is not None:
            model = self._session.document.model
            trained = trained_length(model) if model is not None else None
            window.settings_bar.set_context(preview.context, trained, preview.report.decisions)
            obstacles = split_mode_obstacles(preview.rig, model)
            window.settings_bar.set_split_mode(preview.layout.split_mode, obstacles)
        window.share_editor.set_shares(() if preview is None else split_shares(preview.layout, preview.rig))
        self._show_load_state()

    def _on_shares_changed(self, change: ShareChange) -> None:
        self._session.document.move(lambda layout: with_shares(layout, change.shares))

    def _on_boundary_moved(self, move: BoundaryMove) -> None:
        self._session.document.move(lambda layout: layout.move_boundary(move.index, move.layer))

    def _on_range_moved(self, move: RangeMove) -> None:
        self._session.document.move(lambda layout: layout.move_range(move.first, move.last, move.device))

    def _on_output_moved(self, move: OutputMove) -> None:
        self._session.document.move(lambda layout: layout.move_output(move.device))

    def _on_split_mode(self, choice: SplitModeChoice) -> None:
        edit = self._session.document.edit
        if edit is None:
            return
        mode: SplitMode = choice.mode
        layout = layout_in_mode(edit.layout, mode, self._session.rig.live.rig)
        self._session.document.set_layout(layout, f"split mode {mode}")

    def _on_model_chosen(self, choice: ModelChoice) -> None:
        self._session.open_model(choice.path)

    def _show_model_menu(self) -> None:
        window = self._window
        menu = QMenu(window)
        menu.addAction(window.actions_by_name["open_model"])
        menu.addAction(window.actions_by_name["open_demo"])
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        menu.addSeparator()
        self._add_recent(menu)
        button = window.settings_bar.model_button
        menu.popup(button.mapToGlobal(button.rect().bottomLeft()))

    # ------------------------------------------------------------------ loading

    def _show_current(self) -> None:
        """Show how the current model stands."""
        window, loading = self._window, self._session.loading
        loaded, state = loading.loaded, loading.state
        window.editor.set_loaded(loaded)
        window.device_strip.set_rows(loaded.measured if loaded is not None else ())
        window.actions_by_name.enable(
            cancel=self._load_state() is LoadState.LOADING,
            unload=state in (ModelState.READY, ModelState.GENERATING),
            stop_answer=state is ModelState.GENERATING,
        )
        self._show_load_state()

    def _on_waiting_changed(self, text: str) -> None:
        self._window.status_line.set_busy("memory", text)
        self._show_current()

    def _show_load_state(self) -> None:
        state = self._load_state()
        self._window.settings_bar.set_load_state(state)
        self._window.actions_by_name.enable(load=state in (LoadState.IDLE, LoadState.EDITED))

    def _load_state(self) -> LoadState:
        session = self._session
        if session.loader.is_waiting:
            return LoadState.LOADING
        match session.loading.state:
            case ModelState.LOADING:
                return LoadState.LOADING
            case ModelState.STOPPING:
                return LoadState.BUSY
            case ModelState.READY | ModelState.GENERATING:
                return LoadState.EDITED if session.is_edited else LoadState.LOADED
            case ModelState.EMPTY:
                return LoadState.NO_MODEL if session.document.model is None else LoadState.IDLE

    def _on_worker_lost(self, sentence: str) -> None:
        self._window.status_line.show_notice(Notice(sentence))

    def _on_busy_changed(self, what: str) -> None:
        self._window.status_line.set_busy("work", what)
