"""The presenters of Layout > Export and Layout > Import, which convert layouts to and from texts of other programs."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from msgspec import Struct
from PySide6.QtWidgets import QWidget

from app.background import Background, Task
from app.models.document import LayoutDocument
from app.notices import Notices
from app.window import dialogs
from app.window.dialogs import OneDialog
from engine.base.errors import ArgumentError, EngineError, LayoutError
from engine.base.files import read_at_most, write_whole
from engine.base.language import tr
from engine.base.texts import capitalised
from engine.base.values import replace
from engine.devices.device import Rig
from engine.model.gguf.model_file import ModelFile
from engine.planning.exchange.exported import Exported
from engine.planning.exchange.exporting import Target, export_plan
from engine.planning.exchange.importing import MAX_TEXT, Imported, arrange, model_names, read_foreign
from engine.planning.memory.drafts import Draft, draft_of_file
from engine.planning.plan.edit import Edit
from widgets.controls.exchange_dialogs import ExportLayoutDialog, ImportLayoutDialog

TITLES: dict[Target, str] = {
    "llama-server": tr("llama-server (a command)"),
    "llama-swap": tr("llama-swap (an entry of config.yaml)"),
    "ollama": tr("ollama (a Modelfile)"),
    "lmstudio": tr("LM Studio (a load configuration)"),
    "python": tr("llama-cpp-python (a script)"),
}
TEXT_FILTER = tr("All files (*)")
_MAX_BYTES = 4 * MAX_TEXT


class ExportPresenter(OneDialog[ExportLayoutDialog]):
    """Shows the edited layout as text of another program, such as a command of llama-server.

    The text is updated after each edit while the dialog is open.
    """

    def __init__(self, document: LayoutDocument, background: Background, notices: Notices, window: QWidget) -> None:
        super().__init__(self._make_dialog, lambda _dialog: self._refresh(), window)
        self._document = document
        self._background = background
        self._notices = notices
        self._window = window
        self._shown: Exported | None = None
        document.preview_changed.connect(lambda _preview: self._on_edited())

    def _make_dialog(self) -> ExportLayoutDialog:
        dialog = ExportLayoutDialog(list(TITLES.items()), self._window)
        dialog.target_changed.connect(lambda _target: self._refresh())
        dialog.save_requested.connect(self._save)
        return dialog

    def _on_edited(self) -> None:
        if self.dialog is not None and self.dialog.isVisible():
            self._refresh()

    def _refresh(self) -> None:
        # The plan of the present edit may still be computed.
        self._document.when_forecast(self._show)

    def _show(self) -> None:
        dialog, plan = self.dialog, self._document.plan
        if dialog is None:
            return
        self._shown = None
        if plan is None:
            dialog.show_error(tr("No model is open."))
            return
        try:
            self._shown = export_plan(plan, next(each for each in get_args(Target) if each == dialog.target))
        except EngineError as error:
            dialog.show_error(error.summary())
        else:
            dialog.show_text(self._shown.text, self._shown.notes)

    def _save(self) -> None:
        shown = self._shown
        if shown is None or self.dialog is None:
            return
        path = dialogs.ask_save(self.dialog, tr("Save the text"), TEXT_FILTER, shown.file_name)
        if path is not None:
            self._background.run(
                tr("Saving {name}", name=path.name),
                lambda: _write(path, shown.text),
                lambda _: self._notices.show(tr("Saved {name}", name=path.name)),
                self._notices.show_error,
            )


class _Read(Struct, frozen=True):
    """The result of reading a text of another program, such as a command of llama-server.

    `names`: names of the models if the text is a configuration of several models; else empty.
    `found`: the layout, or None if there is an error. `fault`: the error as a message for the user.
    `draft`: the draft (speculative decoding) that the text names; None if it names none, or one that does not suit the
    model.
    """

    names: tuple[str, ...]
    found: Imported | None
    fault: str = ""
    draft: Draft | None = None


class ImportPresenter(OneDialog[ImportLayoutDialog]):
    """Replaces the edited layout by one that is read from a text of another program, as one step of undo.

    Texts are read in the background.
    """

    def __init__(self, document: LayoutDocument, background: Background, notices: Notices, window: QWidget) -> None:
        super().__init__(self._make_dialog, self._on_open, window)
        self._document = document
        self._background = background
        self._notices = notices
        self._window = window
        self._reading = background.latest()
        self._found: tuple[ModelFile, _Read, Imported] | None = None
        self._kept_text = ""
        """Text that could not be used before the dialog was closed, to show it at the next opening; else empty."""
        self._read_for: ModelFile | None = None
        """The model that was current when the dialog's text was read last; None before the first time."""
        document.preview_changed.connect(lambda _preview: self._on_document_changed())

    def _on_open(self, dialog: ImportLayoutDialog) -> None:
        kept, self._kept_text = self._kept_text, ""
        dialog.clear()
        dialog.text_edit.setPlainText(kept)

    def _on_document_changed(self) -> None:
        """Read the text again if another model is shown while the dialog is open."""
        is_open = self.dialog is not None and self.dialog.isVisible()
        if is_open and self._document.plan is not None and self._document.plan.model is not self._read_for:
            self._read()

    def _make_dialog(self) -> ImportLayoutDialog:
        dialog = ImportLayoutDialog(self._window)
        dialog.text_changed.connect(self._read)
        dialog.open_requested.connect(self._open)
        dialog.accepted.connect(self._use)
        return dialog

    def _open(self) -> None:
        dialog = self.dialog
        if dialog is None:
            return
        path = dialogs.ask_open(dialog, tr("Open a command or file"), TEXT_FILTER)
        if path is not None:
            self._background.run(
                tr("Reading {name}", name=path.name),
                lambda: _text(path),
                dialog.text_edit.setPlainText,
                self._notices.show_error,
            )

    def _read(self) -> None:
        dialog, plan = self.dialog, self._document.plan
        self._found = None
        if dialog is None:
            return
        text, name = dialog.text, dialog.name
        if plan is None or not text.strip():
            # The result for the former text must not enable OK.
            self._reading.cancel()
            dialog.show_error("" if plan is not None else tr("No model is open."))
            return
        model, rig = plan.model, plan.rig
        self._read_for = model

        def read(_task: Task[None]) -> _Read:
            return _read_text(text, name, model, rig)

        def show(read: _Read) -> None:
            self._show(model, read)

        self._reading.run(tr("Reading a layout"), read, show, self._notices.show_error)

    def _show(self, model: ModelFile, read: _Read) -> None:
        dialog = self.dialog
        if dialog is None:
            return
        dialog.set_names(read.names)
        if read.found is None:
            dialog.show_error(read.fault)
            return
        self._found = model, read, read.found
        layout = read.found.layout
        runs = ", ".join(f"{run.device} {run.length}" for run in layout.runs)
        dialog.show_result(
            tr("Layers: {runs}; output layer: {output}.", runs=runs, output=layout.output_device),
            (*read.found.notes, *_side_file_notes(read.found)),
        )

    def _use(self) -> None:
        if self._found is None:
            return
        model, read, found = self._found
        if self._document.model is not model:
            self._notices.show_error(
                LayoutError(tr("Another model is shown now. Switch back to {model}.", model=model.name))
            )
            self._kept_text = "" if self.dialog is None else self.dialog.text
            self.open()
            return
        edit = self._document.edit
        if edit is not None:
            # Many texts say nothing about a draft; the present one then stays.
            files = edit.side_files if read.draft is None else replace(edit.side_files, draft=read.draft)
            self._document.replace(Edit(found.layout, found.context, files), tr("import layout"))


def _read_text(text: str, name: str | None, model: ModelFile, rig: Rig) -> _Read:
    names: tuple[str, ...] = ()
    try:
        names = model_names(text)
        chosen = name if name in names else next(iter(names), None)
        found = arrange(read_foreign(text, name=chosen), model, rig)
    except EngineError as error:
        return _Read(names, None, f"{capitalised(error.summary())}.")
    try:
        return _Read(names, found, draft=draft_of_file(found.draft, model, model.paths[0].parent))
    except EngineError as error:
        note = tr("The draft model was not imported: {reason}.", reason=error.summary())
        return _Read(names, replace(found, notes=(*found.notes, note)))


def _side_file_notes(found: Imported) -> tuple[str, ...]:
    paths = [*([found.projector] if found.projector else []), *(path for path, _ in found.adapters)]
    if not paths:
        return ()
    names = ", ".join(Path(path).name for path in paths)
    return (tr("The text also names these files. Add them in the load settings: {names}.", names=names),)


def _text(path: Path) -> str:
    try:
        # One character too many is kept, so that a text that is too long is refused and not cut.
        return read_at_most(path, _MAX_BYTES).decode("utf-8-sig")[: MAX_TEXT + 1]
    except UnicodeDecodeError:
        raise ArgumentError(
            tr("{name} is not UTF-8 text. Save it as UTF-8, or choose another file.", name=path.name)
        ) from None
    except (OSError, ValueError) as error:
        raise ArgumentError(tr("{name} cannot be read: {error}", name=path.name, error=error)) from None


def _write(path: Path, text: str) -> None:
    try:
        write_whole(path, text.encode())
    except (OSError, ValueError) as error:
        raise ArgumentError(tr("{name} cannot be written: {error}", name=path.name, error=error)) from None
