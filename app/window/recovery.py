"""Recovery after a crash of the window: its models are opened again, and a report can be saved."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from PySide6.QtCore import QObject
from PySide6.QtWidgets import QMessageBox, QWidget

from app.background import Background, Worker
from app.models.document import LayoutDocument
from app.models.layouts import Layouts
from app.models.open_models import OpenModels
from app.models.opener import ModelOpener
from app.notices import Notices
from app.run_records import EndedRun, OpenedModel, RunRecords
from app.window import dialogs
from engine.base.language import tr
from engine.model.gguf.model_file import ModelFile
from engine.planning.layout.layout_file import encode_layout
from engine.planning.plan.edit import Edit
from widgets.common.delayed_call import DelayedCall

REPORT_FILTER = tr("Reports (*.txt);;All files (*)")
OPENING = tr("Your models are being opened again. Conversations are restored as last saved.")
OPENED = tr("Your models were opened again. Conversations were restored as last saved.")
NOT_OPENED = tr(
    "Your models were not opened again, because Layerdeck crashed the last time it opened them. They are in the list "
    "of models."
)
# Changes in quick succession, as when a model opens, are written once.
_KEEP_AFTER_MS = 1000
_log = logging.getLogger("layerdeck.recovery")


def models_to_reopen(ended: Sequence[EndedRun]) -> tuple[OpenedModel, ...]:
    """Return the models of crashed windows that this window opens again, those of the newest window last.

    If a crashed window had opened models again after an earlier crash, these models are left out: one of them may be
    the cause.
    `ended`: the crashed windows, newest first.
    """
    known = {each.path for run in ended if run.mark.restored for each in run.mark.models}
    models: tuple[OpenedModel, ...] = ()
    for run in ended:
        models = (*(each for each in run.mark.models if each.path not in known), *models)
        known |= {each.path for each in run.mark.models}
    return models


class Recovery(QObject):
    """Updates the run mark of this window (a file with its open models), and looks for crashed windows at the start."""

    def __init__(
        self,
        window: QWidget,
        marks: RunRecords,
        *,
        opener: ModelOpener,
        layouts: Layouts,
        models: OpenModels,
        document: LayoutDocument,
        background: Background,
        notices: Notices,
    ) -> None:
        super().__init__(window)
        self._window, self._marks = window, marks
        self._opener, self._layouts, self._models, self._document = opener, layouts, models, document
        self._background, self._notices = background, notices
        self._restores = False
        self._n_reopened = 0
        # A worker writes marks in the order of the changes.
        self._writer = Worker("run mark")
        self._timer = DelayedCall(self, self._keep, _KEEP_AFTER_MS)
        models.changed.connect(self._timer.start)
        models.current_changed.connect(self._timer.start)
        document.edit_settled.connect(self._timer.start)
        self.box: QMessageBox | None = None

    def begin(self, closed: Callable[[], None] | None = None) -> None:
        """Write the run mark (a file that exists while this window runs), and look for a window that crashed.

        `closed`: called if the last window was closed properly, and no other window runs.
        """

        def look() -> tuple[tuple[EndedRun, ...], bool]:
            try:
                self._marks.begin()
                return self._marks.take_ended(), self._marks.has_others()
            except OSError as error:  # a folder that cannot be written costs the mark and nothing else
                _log.warning("no mark of this window: %s", error)
                return (), False

        def show(found: tuple[tuple[EndedRun, ...], bool]) -> None:
            ended, has_others = found
            if ended:
                self._on_ended(ended)
            elif closed is not None and not has_others:
                closed()

        self._background.run("Looking at the last run", look, show, self._notices.show_error, quiet=True)

    def _on_ended(self, ended: tuple[EndedRun, ...]) -> None:
        models = models_to_reopen(ended)
        had_models = any(run.mark.models for run in ended)
        self._show_box("\n\n".join(run.report for run in ended))
        self._show_event(OPENING if models else NOT_OPENED if had_models else "")
        if models:
            self._restores = True
            left_out = {each.path for run in ended for each in run.mark.models} - {each.path for each in models}
            self._reopen(models, frozenset(), len(models) + len(left_out))

    def _show_event(self, event: str) -> None:
        if self.box is not None:
            self.box.setInformativeText(
                tr(
                    "{event} You can save a report with technical details. The report contains none of your texts and "
                    "is not sent anywhere.",
                    event=event,
                ).strip()
            )

    def _show_box(self, report: str) -> None:
        box = self.box = QMessageBox(self._window)
        box.setIcon(QMessageBox.Icon.Information)
        box.setWindowTitle(tr("Layerdeck did not close properly"))
        box.setText(tr("Layerdeck crashed or was killed last time."))
        box.setDetailedText(report)
        save = box.addButton(tr("Save Report…"), QMessageBox.ButtonRole.ActionRole)
        box.addButton(QMessageBox.StandardButton.Close)
        # Every button of a message box closes it. After this one a file dialog may be cancelled.
        save.clicked.disconnect()
        save.clicked.connect(partial(self._save, report))
        box.setModal(False)
        box.show()

    def _save(self, report: str) -> None:
        path = dialogs.ask_save(self._window, tr("Save the Report"), REPORT_FILTER, "layerdeck-report.txt")
        if path is not None:
            self._background.run(
                tr("Saving {name}", name=path.name),
                partial(dialogs.write_chosen, path, report.encode()),
                lambda _: self._notices.show(tr("Saved {name}", name=path.name)),
                self._notices.show_error,
            )

    # ------------------------------------------------------------------ opening again

    def _reopen(self, models: Sequence[OpenedModel], reopened: frozenset[Path], n_models: int) -> None:
        """Open the models of crashed windows, one after another, with their layouts. Unreadable files are skipped.

        `reopened`: files that previous calls have opened. If `models` has such a file again, it is opened a second
        time, with a layout of its own.
        `n_models`: number of models that the crashed windows had open.
        """
        if not models:
            some = tr(
                "{count} of {total} models were opened again. Conversations were restored as last saved.",
                count=self._n_reopened,
                total=n_models,
            )
            self._show_event(OPENED if self._n_reopened == n_models else some)
            return
        model, *rest = models
        path = Path(model.path)

        def apply() -> None:
            self._n_reopened += 1
            if model.layout:
                self._layouts.use("what was open", model.layout)

        def go_on() -> None:
            self._reopen(rest, reopened | {path}, n_models)

        if path in reopened:
            self._opener.open_copy(path, opened=apply, then=go_on)
        else:
            self._opener.open(path, keep_current=True, opened=apply, then=go_on)

    # ------------------------------------------------------------------ the mark of this window

    def _keep(self) -> None:
        opened = self._opened()
        self._writer.submit(partial(_keep_quietly, self._marks, opened, self._restores))

    def _opened(self) -> tuple[OpenedModel, ...]:
        """Return the open models with their layouts, the current one last."""
        current = self._models.current
        others = [
            OpenedModel(
                str(model.file.paths[0]), _layout_text(model.file, model.edit_state.edit) if model.edit_state else ""
            )
            for model in self._models.all
            if model.file is not None and model is not current
        ]
        if current.file is not None:
            text = "" if self._document.is_untouched else self._layouts.text() or ""
            others.append(OpenedModel(str(current.file.paths[0]), text))
        return tuple(others)


def _keep_quietly(marks: RunRecords, opened: Sequence[OpenedModel], restored: bool) -> None:
    try:
        marks.keep(tuple(opened), restored=restored)
    except OSError as error:
        _log.warning("the mark of this window could not be written: %s", error)


def _layout_text(file: ModelFile, edit: Edit) -> str:
    return encode_layout(edit.as_file(file.name)).decode()
