"""Projectors, LoRA adapters and drafts for the next load: read in the background, undoable, and stored."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from msgspec import Struct
from PySide6.QtCore import QObject

from app.background import Background
from app.models.document import LayoutDocument
from app.notices import Notices
from app.settings import Settings, StoredSideFiles
from engine.base.errors import EngineError
from engine.base.language import tr
from engine.base.values import replace
from engine.model.gguf.model_file import FileIdentity, ModelFile, identify
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import single_device
from engine.planning.layout.layout_file import decode_draft, encode_draft
from engine.planning.memory.drafts import Draft, draft_file, draft_of_file, read_draft
from engine.planning.memory.side_files import Adapter, Projector, SideFiles, read_adapter, read_projector
from engine.planning.settings.table import DRAFTED_TOKENS
from widgets.controls.settings_dialog import AdapterScale
from widgets.controls.values import AdapterName

_Found = TypeVar("_Found", Projector, Adapter, Draft)


class SideFileController(QObject):
    """Changes the side files (projector, adapters, draft) of the next load. Each change is one step of undo."""

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
        document.edit_settled.connect(self._on_edit_settled)

    def choose_projector(self, path: Path) -> None:
        """Read the projector at `path` in the background, and use it for the next load."""
        self._read(path, partial(read_projector, path), lambda files, found: replace(files, projector=found))

    def remove_projector(self) -> None:
        """Use no projector for the next load."""
        self._change(tr("remove the projector"), lambda files: replace(files, projector=None))

    def place_projector(self, device: str) -> None:
        """Set the device of the projector. If `device` is empty, the load decides."""

        def change(files: SideFiles) -> SideFiles:
            projector = files.projector
            return files if projector is None else replace(files, projector=replace(projector, device=device or None))

        self._change(tr("move the projector"), change)

    def add_adapter(self, path: Path) -> None:
        """Read the LoRA adapter at `path` in the background, and add it to the next load."""
        model = self._document.model
        if model is not None:
            self._read(
                path,
                partial(read_adapter, path, model),
                lambda files, found: replace(files, adapters=(*files.adapters, found)),
            )

    def remove_adapter(self, index: int) -> None:
        """Remove the adapter with this index from the next load."""

        def remove(files: SideFiles) -> SideFiles:
            return replace(files, adapters=(*files.adapters[:index], *files.adapters[index + 1 :]))

        self._change(tr("remove an adapter"), remove)

    def scale_adapter(self, change: AdapterScale) -> None:
        """Set the scale of one LoRA adapter of the next load. `change`: index of the adapter, and its new scale."""

        def scale(files: SideFiles) -> SideFiles:
            adapters = list(files.adapters)
            adapters[change.index] = replace(adapters[change.index], scale=change.scale)
            return replace(files, adapters=tuple(adapters))

        self._change(tr("change the scale of an adapter"), scale)

    def choose_draft(self, path: Path) -> None:
        """Read the draft model at `path` in the background, and use it for the next load."""
        model = self._document.model
        if model is not None:
            self._read(path, partial(read_draft, path, model, self._drafted_tokens), _with_draft)

    def draft_by_ngrams(self) -> None:
        """Use n-gram drafting for the next load: it proposes tokens that followed the same n-gram before."""
        draft = Draft("ngram", self._drafted_tokens)
        self._change(tr("choose the draft (speculative decoding)"), lambda files: _with_draft(files, draft))

    def draft_by_mtp(self) -> None:
        """Use the model's own MTP head as the draft of the next load."""
        draft = Draft("mtp", self._drafted_tokens)
        self._change(tr("choose the draft (speculative decoding)"), lambda files: _with_draft(files, draft))

    def remove_draft(self) -> None:
        """Use no draft for the next load."""
        self._change(tr("remove the draft (speculative decoding)"), lambda files: replace(files, draft=None))

    def place_draft(self, device: str) -> None:
        """Set the device of the draft model. If `device` is empty, the load decides."""

        def change(files: SideFiles) -> SideFiles:
            draft = files.draft
            if draft is None or draft.model is None:
                return files
            layout = single_device(draft.model.n_layers, device) if device else None
            return replace(files, draft=replace(draft, layout=layout))

        self._change(tr("move the draft"), change)

    def set_drafted_tokens(self, n_tokens: int) -> None:
        """Set the largest number of tokens that are drafted in one step."""

        def change(files: SideFiles) -> SideFiles:
            return files if files.draft is None else _with_draft(files, replace(files.draft, n_tokens=n_tokens))

        self._change(tr("change the number of drafted tokens"), change)

    @property
    def _drafted_tokens(self) -> int:
        edit = self._document.edit
        draft = None if edit is None else edit.side_files.draft
        return DRAFTED_TOKENS if draft is None else draft.n_tokens

    def _read(self, path: Path, read: Callable[[], _Found], put: Callable[[SideFiles, _Found], SideFiles]) -> None:
        model = self._document.model

        def apply(found: _Found) -> None:
            # Another model may have become current while the file was read.
            if self._document.model is model:
                self._change(tr("load {name} with the model", name=path.name), lambda files: put(files, found))

        if model is not None:
            self._background.run(tr("Reading {name}", name=path.name), read, apply, self._notices.show_error)

    def _change(self, text: str, change: Callable[[SideFiles], SideFiles]) -> None:
        edit, model = self._document.edit, self._document.model
        if edit is not None and model is not None:
            self._document.set_side_files(change(edit.side_files), text)

    def _on_edit_settled(self) -> None:
        """Store the current model's side files in the settings if the user has changed them since the opening.

        Otherwise the stored paths are kept. This includes paths of missing files, because their disk may be unmounted.
        """
        state = self._document.state
        if state is not None and state.edit.side_files != state.stored_side_files:
            # Undo changes side files as well, and is stored like any other edit.
            state.stored_side_files = state.edit.side_files
            self._settings.store_side_files(state.model.paths[0], _stored(state.edit.side_files))


class OpenedFile(Struct, frozen=True):
    """A model file that was read, with its side files.

    `key`: identity of the file. `problems`: the errors if stored side files could not be read.
    """

    model: ModelFile
    key: FileIdentity
    side_files: SideFiles
    problems: tuple[EngineError, ...]


def open_file(path: Path, stored: StoredSideFiles) -> OpenedFile:
    """Read the model file `path` and its stored side files (`stored`). Reads the disk: not for the GUI thread.

    Raises:
        ModelFileError: the model cannot be read.
    """
    model = read_model(path)
    side_files, problems = read_stored(stored, model)
    return OpenedFile(model, identify(model.paths), side_files, problems)


def read_stored(stored: StoredSideFiles, model: ModelFile) -> tuple[SideFiles, tuple[EngineError, ...]]:
    """Read `stored`, the stored side files of `model`. Return the readable files, and an error for each other file."""
    problems: list[EngineError] = []
    files = SideFiles()
    if stored.projector:
        try:
            files = replace(files, projector=read_projector(Path(stored.projector), stored.device))
        except EngineError as error:
            problems.append(error)
    # One unreadable adapter must not hide the others.
    for each in stored.adapters:
        try:
            found = read_adapter(Path(each.path), model, each.scale)
        except EngineError as error:
            problems.append(error)
        else:
            files = replace(files, adapters=(*files.adapters, found))
    if stored.draft:
        try:
            files = replace(files, draft=draft_of_file(decode_draft(stored.draft), model, model.paths[0].parent))
        except EngineError as error:
            problems.append(error)
    return files, tuple(problems)


def _with_draft(files: SideFiles, draft: Draft) -> SideFiles:
    return replace(files, draft=draft)


def _stored(files: SideFiles) -> StoredSideFiles:
    projector, draft = files.projector, draft_file(files.draft)
    return StoredSideFiles(
        projector="" if projector is None else str(projector.path),
        device=None if projector is None else projector.device,
        adapters=tuple(AdapterName(str(each.path), each.scale) for each in files.adapters),
        draft="" if draft is None else encode_draft(draft),
    )
