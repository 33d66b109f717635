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
from app.run_marks import EndedRun, OpenedModel, RunMarks
from app.window import dialogs
from engine.base.language import tr
from engine.model.gguf.model_file import ModelFile
from engine.planning.layout.layout_file import encode_layout
from engine.planning.plan.edit import Edit
from widgets.common.delayed_call import DelayedCall

REPORT_FILTER = tr("Reports (*.txt);;All files (*)")
OPENED = tr("Your models were opened again. Conversations were restored as last saved.")
NOT_OPENED = tr(
    "Your models were not opened again, because Layerdeck crashed the last time it opened them. They are in the list "
    "of models."
)
# Changes in quick succession, as when a model opens, are written once.
_KEEP_AFTER_MS = 1000
_log = logging.getLogger("layerdeck.recovery")


class Recovery(QObject):
    """Updates the run mark of this window (a file with its open models), and looks for crashed windows at the start."""

    def __init__(
        self,
        window: QWidget,
        marks: RunMarks,
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
        # A worker writes marks in the order of the changes.
        self._writer = Worker("run mark")
        self._timer = DelayedCall(self, self._keep, _KEEP_AFTER_MS)
        models.changed.connect(self._timer.start)
        models.current_changed.connect(self._timer.start)
        document.edit_settled.connect(self._timer.start)
        self.box: QMessageBox | None = None

    def begin(self, closed: Callable[[], None] | None = None) -> None:
        """Write the run mark of this window, and look for a window that crashed.

        `closed`: called if no window crashed and no other window runs.
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

        self._background.run("Looking at the last run", look, show, self._notices.tell, quiet=True)

    def _on_ended(self, ended: tuple[EndedRun, ...]) -> None:
        last = ended[0]
        # Not twice in a row: one of the models may be the cause.
        again = bool(last.mark.models) and not last.mark.restored
        if again:
            self._restores = True
            self._reopen(last.mark.models, frozenset())
        self._tell(last.report, OPENED if again else NOT_OPENED if last.mark.models else "")

    def _tell(self, report: str, what: str) -> None:
        box = self.box = QMessageBox(self._window)
        box.setIcon(QMessageBox.Icon.Information)
        box.setWindowTitle(tr("Layerdeck did not close properly"))
        box.setText(tr("Layerdeck crashed or was killed last time."))
        box.setInformativeText(
            tr(
                "{event} You can save a report with technical details. The report contains none of your texts and is "
                "not sent anywhere.",
                event=what,
            ).strip()
        )
        box.setDetailedText(report)
        save = box.addButton(tr("Save Report…"), QMessageBox.ButtonRole.ActionRole)
        box.addButton(QMessageBox.StandardButton.Close)
        save.clicked.connect(partial(self._save, report))
        box.setModal(False)
        box.show()

    def _save(self, report: str) -> None:
        path = dialogs.ask_save(self._window, tr("Save the Report"), REPORT_FILTER, "layerdeck-report.txt")
        if path is not None:
            self._background.run(
                tr("Saving {name}", name=path.name),
                partial(dialogs.write_chosen, path, report.encode()),
                lambda _: self._notices.say(tr("Saved {name}", name=path.name)),
                self._notices.tell,
            )

    # ------------------------------------------------------------------ opening again

    def _reopen(self, models: Sequence[OpenedModel], reopened: frozenset[Path]) -> None:
        """Open the models of a crashed window, one after another, with their layouts. Unreadable files are skipped.

        `reopened`: files that were opened already; a file that was open twice is then opened as a copy.
        """
        if not models:
            return
        model, *rest = models
        path = Path(model.path)

        def apply() -> None:
            if model.layout:
                self._layouts.use("what was open", model.layout)

        def go_on() -> None:
            self._reopen(rest, reopened | {path})

        if path in reopened:
            self._opener.open_copy(path, opened=apply, then=go_on)
        else:
            self._opener.open(path, beside=True, opened=apply, then=go_on)

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


def _keep_quietly(marks: RunMarks, opened: Sequence[OpenedModel], restored: bool) -> None:
    try:
        marks.keep(tuple(opened), restored=restored)
    except OSError as error:
        _log.warning("the mark of this window could not be written: %s", error)


def _layout_text(file: ModelFile, edit: Edit) -> str:
    return encode_layout(edit.as_file(file.name)).decode()
