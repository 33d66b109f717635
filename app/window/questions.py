"""What the window asks for before something is done: files to open and to write, caps of a lab, a worker's address."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import QObject
from PySide6.QtWidgets import QWidget

from app.models.document import LayoutDocument
from app.models.layouts import Layouts
from app.models.opener import ModelOpener
from app.rig.device_search import DeviceSearch, RigFiles
from app.rig.lab import Lab
from app.settings import Settings
from app.window import dialogs
from app.window.devices.rig_dialogs import ask_lab_caps, ask_remote_endpoint
from engine.base.language import tr


class Questions(QObject):
    """Each ends with nothing done where the answer is to cancel."""

    def __init__(
        self,
        window: QWidget,
        settings: Settings,
        *,
        document: LayoutDocument,
        opener: ModelOpener,
        layouts: Layouts,
        rig_files: RigFiles,
        search: DeviceSearch,
        lab: Lab,
    ) -> None:
        super().__init__(window)
        self._window = window
        self._settings = settings
        self._document = document
        self._opener = opener
        self._layouts = layouts
        self._rig_files = rig_files
        self._search = search
        self._lab = lab

    def open_model(self) -> None:
        """Open a model, by default from where the last one was."""
        recent = self._settings.recent_models
        folder = recent[0].path.parent if recent else None
        path = dialogs.ask_open(self._window, tr("Open a model"), dialogs.MODEL_FILTER, folder)
        if path is not None:
            self._opener.open(path)

    def open_layout(self) -> None:
        """Open a layout file for the edited model."""
        path = dialogs.ask_open(self._window, tr("Open a layout"), dialogs.LAYOUT_FILTER)
        if path is not None:
            self._layouts.open(path)

    def save_layout(self) -> None:
        """Write the edited layout, by default beside the program and named after the model."""
        model = self._document.model
        if model is None:
            return
        proposed = f"{model.paths[0].stem}.layout.json"
        path = dialogs.ask_save(self._window, tr("Save the layout"), dialogs.LAYOUT_FILTER, proposed)
        if path is not None:
            self._layouts.save(path)

    def open_rig(self) -> None:
        """Use the devices of a rig file."""
        path = dialogs.ask_open(self._window, tr("Open a rig"), dialogs.RIG_FILTER)
        if path is not None:
            self._rig_files.open(path)

    def save_rig(self) -> None:
        """Write the devices shown to a rig file."""
        path = dialogs.ask_save(self._window, tr("Save the rig"), dialogs.RIG_FILTER, "rig.json")
        if path is not None:
            self._rig_files.save(path)

    def add_remote(self) -> None:
        """Add a worker on another machine; before the first one people are warned."""

        def remember() -> None:
            self._settings.remote_warning_given = True

        ask_remote_endpoint(
            self._window,
            warn=not self._settings.remote_warning_given,
            on_warned=remember,
            then=self._search.add_remote,
        )

    def start_lab(self) -> None:
        """Start a lab with the caps that people type."""
        ask_lab_caps(self._window, self._lab.start)

    def open_dropped(self, *paths: Path) -> None:
        """Open files that were dropped as what their names say: `.json` is a layout, anything else a model."""
        layouts = [path for path in paths if path.suffix.lower() == ".json"]
        self._opener.open_all([path for path in paths if path not in layouts])
        for path in layouts:
            self._layouts.open(path)
