"""The presenter of dialogs that ask for a file, for the memory caps of a lab rig, or for a worker's address."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
from app.window.devices.rig_dialogs import ask_lab_caps, ask_numa_split, ask_remote_endpoint
from engine.base.language import tr
from engine.base.numa import read_nodes


class DialogActions(QObject):
    """Asks for a file, memory caps or an address in a dialog, and then carries out the menu command.

    A cancelled dialog does nothing.
    """

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
        models_folder: Callable[[Iterable[Path]], Path | None],
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
        self._models_folder = models_folder

    def open_model(self) -> None:
        """Ask for a model file and open it.

        The dialog starts in the folder of a recent model, or else in a folder of the library.
        """
        folder = self._models_folder(model.path for model in self._settings.recent_models)
        path = dialogs.ask_open(self._window, tr("Open a model"), dialogs.MODEL_FILTER, folder)
        if path is not None:
            self._opener.open(path)

    def open_layout(self) -> None:
        """Ask for a layout file, and use it for the edited model."""
        path = dialogs.ask_open(self._window, tr("Open a layout"), dialogs.LAYOUT_FILTER)
        if path is not None:
            self._layouts.open(path)

    def save_layout(self) -> None:
        """Ask for a file name, and write the edited layout to the file. The name of the model file is proposed."""
        model = self._document.model
        if model is None:
            return
        proposed = f"{model.paths[0].stem}.layout.json"
        path = dialogs.ask_save(self._window, tr("Save the layout"), dialogs.LAYOUT_FILTER, proposed)
        if path is not None:
            self._layouts.save(path)

    def open_rig(self) -> None:
        """Ask for a rig file, and show its devices."""
        path = dialogs.ask_open(self._window, tr("Open a rig"), dialogs.RIG_FILTER)
        if path is not None:
            self._rig_files.open(path)

    def save_rig(self) -> None:
        """Ask for a file name, and write the devices in the list to this rig file."""
        path = dialogs.ask_save(self._window, tr("Save the rig"), dialogs.RIG_FILTER, "rig.json")
        if path is not None:
            self._rig_files.save(path)

    def add_remote(self) -> None:
        """Ask for the address of a remote worker, and add its devices. The first time, show a warning before that."""

        def remember() -> None:
            self._settings.remote_warning_given = True

        ask_remote_endpoint(
            self._window,
            warn=not self._settings.remote_warning_given,
            on_warned=remember,
            then=self._search.add_remote,
        )

    def start_lab(self) -> None:
        """Ask for the memory caps of a lab rig (RPC workers on this computer), and start it."""
        ask_lab_caps(self._window, self._lab.start)

    def split_numa(self) -> None:
        """Explain the NUMA nodes of this computer, and start a worker for each if the user agrees."""
        ask_numa_split(self._window, read_nodes(), self._lab.start_nodes)

    def open_dropped(self, *paths: Path) -> None:
        """Open files by their extension: `.json` is a layout, anything else a model."""
        # Models first: a layout is for the model that is current when it is opened.
        layouts = [path for path in paths if path.suffix.lower() == ".json"]
        self._opener.open_all([path for path in paths if path not in layouts])
        for path in layouts:
            self._layouts.open(path)
