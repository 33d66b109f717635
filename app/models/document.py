"""The layout being edited: model, rig, layout and context with undo, and the preview that all bars read.

Each model that is open has its sheet: a model that is put aside keeps its edit and its undo.

What takes long is forecast beside the GUI thread (`forecaster`). Until its numbers are here, `plan` and `preview` are
those of before, and `is_behind`; a layout that was changed at one go is drawn at once, with the numbers to follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from PySide6.QtCore import QObject, QTimer, Signal
from PySide6.QtGui import QUndoCommand, QUndoGroup, QUndoStack

from app.background import Background
from app.models.forecaster import Answer, Forecaster, Pace, Question
from engine.devices.device import Rig
from engine.gguf.model_file import ModelFile
from engine.language import tr
from engine.layout.layout import Layout
from engine.layout.moves import Move
from engine.memory.side_files import SideFiles
from engine.plan.edit import Edit
from engine.plan.plan import Plan
from engine.plan.preview import Preview, PreviewTables
from engine.probing.probe import ProbeCache
from engine.settings.context_settings import ContextSettings
from engine.speed.speeds import NO_MEASUREMENTS, Speeds

FRAME_MS = 16
"""At most one preview per frame, however fast the mouse reports."""


UNDO_STEPS = 200
"""As many can be undone: each keeps what was edited before and after."""


class Sheet:
    """One model's edit, with its undo and what its previews share."""

    def __init__(self, tables: PreviewTables, edit: Edit, undo_stack: QUndoStack, pace: Pace) -> None:
        self.model = tables.memory.model
        self.tables = tables
        self.edit = edit
        self.undo_stack = undo_stack
        self.pace = pace
        self.answer: Answer | None = None
        """What was drawn of it last."""


class LayoutDocument(QObject):
    """Owns the sheet on the table and its plan. No process is involved: a plan is arithmetic, and what `probes` keeps
    of it is laid over. Without `background` everything is computed at once."""

    preview_changed = Signal(object)  # Preview | None
    drag_ended = Signal()  # finished, cancelled, or overtaken by undo, a change of the edit or other devices
    edit_settled = Signal()  # an edit is complete: a probe may check it

    def __init__(self, background: Background | None = None, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.undo_group = QUndoGroup(self)
        """Undo and redo of whichever sheet is on the table."""
        self._sheet: Sheet | None = None
        self._rig: Rig | None = None
        self._speeds = NO_MEASUREMENTS
        self._answered: Mapping[tuple[Path, Edit], float] = {}
        self._drag_start: Edit | None = None
        self.probes = ProbeCache()
        """What the engine told of plans; it holds for as long as their key does, whatever memory is free."""
        self.plan: Plan | None = None
        """What is edited, on the devices as they are now; what was edited before while `is_behind`."""
        self.preview: Preview | None = None
        """The plan as it is drawn."""
        self._forecaster = Forecaster(self.probes, self._on_answer, background)
        self._then: list[Callable[[], None]] = []
        self._frame = QTimer(self)
        self._frame.setSingleShot(True)
        self._frame.setInterval(FRAME_MS)
        self._frame.timeout.connect(self._on_frame)

    @property
    def model(self) -> ModelFile | None:
        return None if self._sheet is None else self._sheet.model

    @property
    def edit(self) -> Edit | None:
        return None if self._sheet is None else self._sheet.edit

    @property
    def is_untouched(self) -> bool:
        """Whether nothing was edited since the model was opened."""
        return self._sheet is None or self._sheet.undo_stack.count() == 0

    @property
    def is_dragging(self) -> bool:
        return self._drag_start is not None

    @property
    def is_behind(self) -> bool:
        """Whether the numbers of what is edited are still being computed."""
        return self._forecaster.is_behind

    def when_forecast(self, do: Callable[[], None]) -> None:
        """Call `do` as soon as `plan` is that of what is edited: now, unless it `is_behind`."""
        if self.is_behind:
            self._then.append(do)
        else:
            do()

    def open(self, model: ModelFile | PreviewTables, rig: Rig, edit: Edit, pace: Pace | None = None) -> None:
        """Begin with `edit` of a model in place of the sheet on the table; undo starts anew.

        Tables that have seen the first preview spare this thread its longest computation; `pace`: how long that took.
        """
        old = self.put_aside()
        if old is not None:
            self.undo_group.removeStack(old.undo_stack)
            old.undo_stack.deleteLater()
        stack = QUndoStack(self)
        stack.setUndoLimit(UNDO_STEPS)
        self.undo_group.addStack(stack)
        tables = model if isinstance(model, PreviewTables) else PreviewTables(model)
        self.show(Sheet(tables, edit, stack, pace or Pace()), rig)

    def restart(self, rig: Rig, edit: Edit) -> None:
        """Begin anew with `edit` of the model on the table."""
        if self._sheet is not None:
            self.open(self._sheet.tables, rig, edit, self._sheet.pace)

    def put_aside(self) -> Sheet | None:
        """Take the sheet off the table, for `show` later; None where there is none. A drag is given up."""
        self.cancel_move()
        self._then.clear()
        sheet, self._sheet = self._sheet, None
        return sheet

    def show(self, sheet: Sheet, rig: Rig) -> None:
        """Go on with a sheet that was put aside; one that is on the table is lost."""
        self._sheet, self._rig = sheet, rig
        self._end_drag()
        self.undo_group.setActiveStack(sheet.undo_stack)
        self._recompute()
        self.edit_settled.emit()

    def set_rig(self, rig: Rig) -> None:
        """Forecast against `rig` from now on."""
        if rig == self._rig:
            return
        devices_changed = self._rig is None or rig.ids != self._rig.ids
        self._rig = rig
        if devices_changed:
            self.cancel_move()
        if self._sheet is not None:
            self._recompute()
            if devices_changed:
                self.edit_settled.emit()

    def set_speeds(self, speeds: Speeds, answered: Mapping[tuple[Path, Edit], float]) -> None:
        """Predict with `speeds` from now on; `answered`: tokens per second of the last answers, by model and edit."""
        self._speeds, self._answered = speeds, answered
        if self._sheet is not None:
            self._recompute()

    def show_probed(self) -> None:
        """Show what `probes` has got, where it is of what is edited now."""
        if self.plan is not None and self.probes.over(self.plan) is not self.plan:
            self._recompute()

    # ------------------------------------------------------------------ editing

    def move(self, move: Move) -> None:
        """Preview `move`, applied to the layout at the start of the drag. The first move starts the drag."""
        if self._sheet is None:
            return
        start = self._drag_start or self._sheet.edit
        self._sheet.edit = replace(start, layout=move.apply(start.layout))
        self._drag_start = start
        if not self._frame.isActive():
            self._frame.start()

    def finish_move(self) -> None:
        """End the drag and make it one step of undo. Without a drag, or if it changed nothing, there is no step."""
        start = self._end_drag()
        if start is None or self._sheet is None:
            return
        if start == self._sheet.edit:
            self._recompute()
            return
        self._push(self._sheet, start, self._sheet.edit, tr("move layers"))

    def cancel_move(self) -> None:
        """End the drag and restore the edit from its start."""
        start = self._end_drag()
        if start is not None and self._sheet is not None:
            self._sheet.edit = start
            self._recompute()

    def _end_drag(self) -> Edit | None:
        """Forget the drag and return the edit at its start, None if there was no drag."""
        start, self._drag_start = self._drag_start, None
        if start is not None:
            self.drag_ended.emit()
        return start

    def set_layout(self, layout: Layout, text: str) -> None:
        """Replace the layout as one step of undo named `text`."""
        if self.edit is not None:
            self.replace(replace(self.edit, layout=layout), text)

    def set_context(self, context: ContextSettings) -> None:
        """Replace the context settings as one step of undo."""
        if self.edit is not None:
            self.replace(replace(self.edit, context=context), tr("change settings"))

    def set_edit(self, layout: Layout, context: ContextSettings, text: str) -> None:
        """Replace layout and settings as one step of undo; what is loaded beside the model stays."""
        if self.edit is not None:
            self.replace(replace(self.edit, layout=layout, context=context), text)

    def set_side_files(self, side_files: SideFiles, text: str) -> None:
        """Replace what is loaded beside the model as one step of undo."""
        if self.edit is not None:
            self.replace(replace(self.edit, side_files=side_files), text)

    def replace(self, edit: Edit, text: str) -> None:
        """Replace the edit as one step of undo named `text`."""
        self.cancel_move()
        if self._sheet is not None and edit != self._sheet.edit:
            self._push(self._sheet, self._sheet.edit, edit, text)

    def _push(self, sheet: Sheet, before: Edit, after: Edit, text: str) -> None:
        def restore(edit: Edit) -> None:
            # Only the sheet on the table is undone. A drag would go on from a layout that is no longer there.
            self._end_drag()
            sheet.edit = edit
            self._recompute()
            self.edit_settled.emit()

        sheet.undo_stack.push(_EditCommand(restore, before, after, text))

    # ------------------------------------------------------------------ preview

    def _on_frame(self) -> None:
        self._recompute()

    def _recompute(self) -> None:
        self._frame.stop()
        sheet = self._sheet
        if sheet is None or self._rig is None:
            self._forecaster.forget()
            self._then.clear()
            self._draw(None, None)
            return
        answered = self._answered.get((sheet.model.paths[0], sheet.edit)) if self._answered else None
        self._forecaster.ask(Question(sheet, sheet.tables, sheet.pace, self._rig, sheet.edit, self._speeds, answered))
        if self.is_behind:
            self._draw_meanwhile(sheet)

    def _draw_meanwhile(self, sheet: Sheet) -> None:
        """Draw what can be drawn before the numbers are here."""
        drawn = self.preview
        if sheet.answer is not None and (self.plan is None or self.plan.memory is not sheet.tables.memory):
            # Another model was shown: this one as it was, not that one.
            self._draw(sheet.answer.plan, sheet.answer.preview)
        elif (
            drawn is not None
            and self._rig is not None
            and drawn.rig.ids == self._rig.ids
            and not self.is_dragging
            and _differ_in_cuts(drawn.edit, sheet.edit)
        ):
            # The next key goes on from what is drawn.
            self._draw(self.plan, replace(drawn, edit=sheet.edit, answered_per_second=None))

    def _on_answer(self, answer: Answer) -> None:
        sheet = self._sheet
        if sheet is None or answer.question.owner is not sheet:
            return
        if self.is_behind and not self.is_dragging:
            return  # What is drawn is newer.
        sheet.answer = answer
        self._draw(answer.plan, answer.preview)
        if not self.is_behind:
            waiting, self._then = self._then, []
            for do in waiting:
                do()

    def _draw(self, plan: Plan | None, preview: Preview | None) -> None:
        self.plan, self.preview = plan, preview
        self.preview_changed.emit(preview)


def _differ_in_cuts(drawn: Edit, edit: Edit) -> bool:
    """Return whether `edit` only has the layers of `drawn` elsewhere, so that its numbers alone are missing."""
    if drawn == edit or drawn.layout.split_mode != edit.layout.split_mode:
        return False
    return replace(drawn, layout=edit.layout) == edit


class _EditCommand(QUndoCommand):
    def __init__(self, restore: Callable[[Edit], None], before: Edit, after: Edit, text: str) -> None:
        super().__init__(text)
        self._restore, self._before, self._after = restore, before, after

    def undo(self) -> None:
        self._restore(self._before)

    def redo(self) -> None:
        self._restore(self._after)
