"""Projectors and adapters in the window: read beside the GUI thread, part of the edit, and kept for each model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from PySide6.QtCore import QObject

from app.background import Background
from app.models.document import LayoutDocument
from app.notices import Notices
from app.settings import KeptAdapter, KeptSideFiles, Settings
from engine.base.errors import EngineError
from engine.base.language import tr
from engine.model.gguf.model_file import FileIdentity, ModelFile, identify
from engine.model.gguf.reader import read_model
from engine.planning.memory.side_files import Adapter, Projector, SideFiles, read_adapter, read_projector
from widgets.controls.settings_dialog import AdapterScale

_Found = TypeVar("_Found", Projector, Adapter)


class SideFileKeeper(QObject):
    """Changes what is loaded beside the model on the table; every change is one step of undo."""

    def __init__(
        self,
        document: LayoutDocument,
        background: Background,
        settings: Settings,
        notices: Notices,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._document, self._background, self._settings, self._notices = document, background, settings, notices
        self._seen: dict[Path, SideFiles] = {}
        document.edit_settled.connect(self._on_edit_settled)

    def choose_projector(self, path: Path) -> None:
        """Load `path` beside the model."""
        self._read(path, partial(read_projector, path), lambda files, found: replace(files, projector=found))

    def remove_projector(self) -> None:
        """Load the model without a projector."""
        self._change(tr("remove the projector"), lambda files: replace(files, projector=None))

    def place_projector(self, device: str) -> None:
        """Run the projector on `device`; empty leaves that open."""

        def place(files: SideFiles) -> SideFiles:
            projector = files.projector
            return files if projector is None else replace(files, projector=replace(projector, device=device or None))

        self._change(tr("place the projector"), place)

    def add_adapter(self, path: Path) -> None:
        """Load the adapter `path` beside the model."""
        model = self._document.model
        if model is not None:
            self._read(
                path,
                partial(read_adapter, path, model),
                lambda files, found: replace(files, adapters=(*files.adapters, found)),
            )

    def remove_adapter(self, index: int) -> None:
        """Load the model without one of its adapters."""

        def remove(files: SideFiles) -> SideFiles:
            return replace(files, adapters=(*files.adapters[:index], *files.adapters[index + 1 :]))

        self._change(tr("remove an adapter"), remove)

    def scale_adapter(self, change: AdapterScale) -> None:
        """Have an adapter count by another scale."""

        def scale(files: SideFiles) -> SideFiles:
            adapters = list(files.adapters)
            adapters[change.index] = replace(adapters[change.index], scale=change.scale)
            return replace(files, adapters=tuple(adapters))

        self._change(tr("scale an adapter"), scale)

    def _read(self, path: Path, read: Callable[[], _Found], put: Callable[[SideFiles, _Found], SideFiles]) -> None:
        model = self._document.model

        def apply(found: _Found) -> None:
            if self._document.model is model:
                self._change(tr("load {name} beside the model", name=path.name), lambda files: put(files, found))

        if model is not None:
            self._background.run(tr("Reading {name}", name=path.name), read, apply, self._notices.tell)

    def _change(self, text: str, change: Callable[[SideFiles], SideFiles]) -> None:
        edit, model = self._document.edit, self._document.model
        if edit is not None and model is not None:
            self._document.set_side_files(change(edit.side_files), text)

    def _on_edit_settled(self) -> None:
        """Keep what somebody changed. What a model begins with is not kept again: a disk may only be away for now."""
        edit, model = self._document.edit, self._document.model
        if edit is None or model is None:
            return
        path = model.paths[0]
        if edit.side_files != self._seen.setdefault(path, edit.side_files):
            self._seen[path] = edit.side_files
            self._settings.keep_side_files(path, _kept(edit.side_files))


@dataclass(frozen=True, slots=True)
class OpenedFile:
    """A model that was read, with what is loaded beside it; `problems`: what was kept and cannot be read."""

    model: ModelFile
    key: FileIdentity
    side_files: SideFiles
    problems: tuple[EngineError, ...]


def open_file(path: Path, kept: KeptSideFiles) -> OpenedFile:
    """Read the model at `path` and what was kept for it.

    Raises:
        ModelFileError: for a model that cannot be read.
    """
    model = read_model(path)
    side_files, problems = read_kept(kept, model)
    return OpenedFile(model, identify(model.paths), side_files, problems)


def read_kept(kept: KeptSideFiles, model: ModelFile) -> tuple[SideFiles, tuple[EngineError, ...]]:
    """Return what was kept for `model` and can still be read, and why the rest cannot."""
    problems: list[EngineError] = []
    files = SideFiles()
    if kept.projector:
        try:
            files = replace(files, projector=read_projector(Path(kept.projector), kept.device))
        except EngineError as error:
            problems.append(error)
    for each in kept.adapters:
        try:
            found = read_adapter(Path(each.path), model, each.scale)
        except EngineError as error:
            problems.append(error)
        else:
            files = replace(files, adapters=(*files.adapters, found))
    return files, tuple(problems)


def _kept(files: SideFiles) -> KeptSideFiles:
    projector = files.projector
    return KeptSideFiles(
        projector="" if projector is None else str(projector.path),
        device=None if projector is None else projector.device,
        adapters=tuple(KeptAdapter(str(each.path), each.scale) for each in files.adapters),
    )
