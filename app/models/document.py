"""The layout being edited: model, rig, layout and context with undo, and the preview that all bars read.

Each open model has its edit state: the edit with its undo stack. One is current; the others are put aside.

The document owns the drag: the first `move` starts it, each move is previewed, and `finish_move` or `cancel_move` ends
it. Undo, another edit or other devices end it too; `drag_ended` tells the editor.

Forecasts that take long are computed in the background (`forecaster`). Until they arrive, `plan` and `preview` are the
previous ones and `is_behind` is true. A layout that was changed in one step is drawn at once, without its numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from PySide6.QtCore import QObject, QTimer, Signal
from PySide6.QtGui import QUndoCommand, QUndoGroup, QUndoStack

from app.background import Background
from app.models.forecaster import Forecast, Forecaster, ForecastRequest, Pace
from engine.base.language import tr
from engine.devices.device import Rig
from engine.model.gguf.model_file import ModelFile
from engine.planning.layout.layout import Layout
from engine.planning.layout.moves import Move
from engine.planning.memory.side_files import SideFiles
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.plan.preview import Preview, PreviewTables
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.speed.speeds import NO_MEASUREMENTS, Speeds
from engine.runtime.probing.probe import ProbeCache

FRAME_MS = 16
"""At most one preview per frame (60 Hz), however fast the mouse reports."""
UNDO_STEPS = 200
"""Largest number of undo steps. Each keeps the edit before and after it."""


class EditState:
    """One model's edit, its undo stack, and the tables that its previews share."""

    def __init__(self, tables: PreviewTables, edit: Edit, undo_stack: QUndoStack, pace: Pace) -> None:
        self.model = tables.memory.model
        self.tables = tables
        self.edit = edit
        self.begun = edit
        """The edit that the model was opened with."""
        self.undo_stack = undo_stack
        self.pace = pace
        self.forecast: Forecast | None = None
        """The last forecast that was drawn."""
        self.left: tuple[Layout | None, Layout | None] = None, None
        """The last layout in split mode layer, and the layout that replaced it when the mode was changed."""


class LayoutDocument(QObject):
    """Owns the current edit state, its drag and its plan.

    No process is involved: a plan is arithmetic, and probed numbers from `probes` replace estimated ones. Without
    `background` everything is computed at once.
    """

    preview_changed = Signal(object)  # Preview | None
    drag_ended = Signal()  # finished, cancelled, or overtaken by undo, a change of the edit or other devices
    edit_settled = Signal()  # an edit is complete: a probe may check it

    def __init__(self, background: Background | None = None, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.undo_group = QUndoGroup(self)
        """Undo and redo of the current edit state."""
        self._state: EditState | None = None
        self._rig: Rig | None = None
        self._speeds = NO_MEASUREMENTS
        self._answered: Mapping[tuple[Path, Edit], float] = {}
        self._drag_start: Edit | None = None
        self._move_text = ""
        self.probes = ProbeCache()
        """Probed numbers of plans, valid for the key of a plan whatever memory is free."""
        self.plan: Plan | None = None
        """The plan of the edit on the devices as they are now; the previous one while `is_behind`."""
        self.preview: Preview | None = None
        """The plan as drawn."""
        self._forecaster = Forecaster(self.probes, self._on_forecast, background)
        self._then: list[Callable[[], None]] = []
        self._frame = QTimer(self)
        self._frame.setSingleShot(True)
        self._frame.setInterval(FRAME_MS)
        self._frame.timeout.connect(self._on_frame)

    @property
    def model(self) -> ModelFile | None:
        return None if self._state is None else self._state.model

    @property
    def edit(self) -> Edit | None:
        return None if self._state is None else self._state.edit

    @property
    def left(self) -> tuple[Layout | None, Layout | None]:
        """The `left` of the current edit state."""
        return (None, None) if self._state is None else self._state.left

    @left.setter
    def left(self, layouts: tuple[Layout | None, Layout | None]) -> None:
        if self._state is not None:
            self._state.left = layouts

    @property
    def is_untouched(self) -> bool:
        """Whether nothing was edited since the model was opened."""
        return self._state is None or self._state.undo_stack.count() == 0

    @property
    def has_first_edit(self) -> bool:
        """Whether the edit is the one that the model was opened with."""
        return self._state is None or self._state.edit == self._state.begun

    @property
    def has_first_layout(self) -> bool:
        """Whether the layout is the one that the model was opened with, as after undo, or back from another mode."""
        return self._state is None or self._state.edit.layout == self._state.begun.layout

    @property
    def is_dragging(self) -> bool:
        return self._drag_start is not None

    @property
    def is_behind(self) -> bool:
        """Whether the numbers of the edit are still being computed."""
        return self._forecaster.is_behind

    def when_forecast(self, do: Callable[[], None]) -> None:
        """Call `do` as soon as `plan` is the plan of the edit: now, unless it `is_behind`."""
        if self.is_behind:
            self._then.append(do)
        else:
            do()

    def open(self, model: ModelFile | PreviewTables, rig: Rig, edit: Edit, pace: Pace | None = None) -> None:
        """Replace the current edit state by a new one with `edit` of a model and an empty undo stack.

        `model`: may be tables that have computed the first preview, which is the longest computation.
        `pace`: the time that took.
        """
        old = self.put_aside()
        if old is not None:
            self.undo_group.removeStack(old.undo_stack)
            # A group does not own its stacks, and the document, the parent, would keep this one.
            old.undo_stack.deleteLater()
        tables = model if isinstance(model, PreviewTables) else PreviewTables(model)
        self.show(self.make_state(tables, edit, pace or Pace()), rig)

    def make_state(self, tables: PreviewTables, edit: Edit, pace: Pace) -> EditState:
        """Return a new edit state with an empty undo stack, for a later `show`."""
        stack = QUndoStack(self)
        stack.setUndoLimit(UNDO_STEPS)
        self.undo_group.addStack(stack)
        return EditState(tables, edit, stack, pace)

    def restart(self, rig: Rig, edit: Edit) -> None:
        """Start again with `edit` of the current model; undo starts empty."""
        if self._state is not None:
            self.open(self._state.tables, rig, edit, self._state.pace)

    def put_aside(self) -> EditState | None:
        """Cancel a drag, and return the current edit state for a later `show`; None if there is none."""
        # Calls that wait for a forecast of this edit would get one of another model.
        self.cancel_move()
        self._then.clear()
        state, self._state = self._state, None
        return state

    def show(self, state: EditState, rig: Rig) -> None:
        """Make an edit state current that was put aside. The current one is lost."""
        self._state, self._rig = state, rig
        self._end_drag()
        self.undo_group.setActiveStack(state.undo_stack)
        self._recompute()
        self.edit_settled.emit()

    def set_rig(self, rig: Rig) -> None:
        """Forecast against `rig` from now on."""
        if rig == self._rig:
            return
        # Most updates change free memory only, and must not end a drag.
        devices_changed = self._rig is None or rig.ids != self._rig.ids
        self._rig = rig
        if devices_changed:
            self.cancel_move()
        if self._state is not None:
            self._recompute()
            if devices_changed:
                self.edit_settled.emit()

    @property
    def speeds(self) -> Speeds:
        """The speeds that forecasts use."""
        return self._speeds

    def set_speeds(self, speeds: Speeds, answered: Mapping[tuple[Path, Edit], float]) -> None:
        """Predict with `speeds` from now on; `answered`: tokens per second of the last answers, by model and edit."""
        self._speeds, self._answered = speeds, answered
        if self._state is not None:
            self._recompute()

    def show_probed(self) -> None:
        """Show probed numbers, if `probes` has some of the current plan."""
        if self.plan is not None and self.probes.over(self.plan) is not self.plan:
            self._recompute()

    # ------------------------------------------------------------------ editing

    def move(self, move: Move) -> None:
        """Preview `move`, applied to the layout at the start of the drag. The first move starts the drag."""
        if self._state is None:
            return
        # All moves refer to the start of the drag, so that moving back restores it exactly.
        start = self._drag_start or self._state.edit
        self._move_text = move.text
        self._state.edit = replace(start, layout=move.apply(start.layout))
        self._drag_start = start
        # Moves between two frames need no preview of their own.
        if not self._frame.isActive():
            self._frame.start()

    def finish_move(self) -> None:
        """End the drag and make it one step of undo. Without a drag, or if it changed nothing, there is no step."""
        start = self._end_drag()
        if start is None or self._state is None:
            return
        # The drag ended where it began: the last preview may be of a move in between.
        if start == self._state.edit:
            self._recompute()
            return
        self._push(self._state, start, self._state.edit, self._move_text)

    def cancel_move(self) -> None:
        """End the drag and restore the edit from its start."""
        start = self._end_drag()
        if start is not None and self._state is not None:
            self._state.edit = start
            self._recompute()

    def _end_drag(self) -> Edit | None:
        """End the drag and return the edit at its start; None if there was no drag."""
        start, self._drag_start = self._drag_start, None
        # Emitted in any case: the editor may have begun a drag that has not moved anything yet.
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
        """Replace layout and settings as one step of undo; side files stay."""
        if self.edit is not None:
            self.replace(replace(self.edit, layout=layout, context=context), text)

    def set_side_files(self, side_files: SideFiles, text: str) -> None:
        """Replace the side files as one step of undo."""
        if self.edit is not None:
            self.replace(replace(self.edit, side_files=side_files), text)

    def replace(self, edit: Edit, text: str) -> None:
        """Replace the edit as one step of undo named `text`."""
        self.cancel_move()
        if self._state is not None and edit != self._state.edit:
            self._push(self._state, self._state.edit, edit, text)

    def _push(self, state: EditState, before: Edit, after: Edit, text: str) -> None:
        def restore(edit: Edit) -> None:
            # Only the current state is undone. A drag would continue from a layout that no longer exists.
            self._end_drag()
            state.edit = edit
            self._recompute()
            self.edit_settled.emit()

        # `push` calls `redo`, which applies the edit.
        state.undo_stack.push(_EditCommand(restore, before, after, text))

    # ------------------------------------------------------------------ preview

    def _on_frame(self) -> None:
        self._recompute()

    def _recompute(self) -> None:
        # The preview that is requested here is newer than the one for which the timer waits.
        self._frame.stop()
        state = self._state
        if state is None or self._rig is None:
            self._forecaster.forget()
            self._then.clear()
            self._draw(None, None)
            return
        answered = self._answered.get((state.model.paths[0], state.edit)) if self._answered else None
        self._forecaster.request(
            ForecastRequest(state, state.tables, state.pace, self._rig, state.edit, self._speeds, answered)
        )
        if self.is_behind:
            self._draw_meanwhile(state)

    def _draw_meanwhile(self, state: EditState) -> None:
        """Draw the edited layout, or the model's last preview, until the forecast arrives."""
        drawn = self.preview
        if state.forecast is not None and (self.plan is None or self.plan.memory is not state.tables.memory):
            # Another model was shown before, so the last preview of this model is drawn.
            self._draw(state.forecast.plan, state.forecast.preview)
        elif (
            drawn is not None
            and self._rig is not None
            and drawn.rig.ids == self._rig.ids
            and not self.is_dragging
            and _differ_in_cuts(drawn.edit, state.edit)
        ):
            # The next arrow key moves a boundary of the drawn layout, so it must be the edited one.
            self._draw(self.plan, replace(drawn, edit=state.edit, answered_per_second=None))

    def _on_forecast(self, forecast: Forecast) -> None:
        state = self._state
        if state is None or forecast.request.owner is not state:
            return
        if self.is_behind and not self.is_dragging:
            return  # The drawn layout is newer than this forecast.
        state.forecast = forecast
        self._draw(forecast.plan, forecast.preview)
        if not self.is_behind:
            waiting, self._then = self._then, []
            for do in waiting:
                do()

    def _draw(self, plan: Plan | None, preview: Preview | None) -> None:
        self.plan, self.preview = plan, preview
        self.preview_changed.emit(preview)


def _differ_in_cuts(drawn: Edit, edit: Edit) -> bool:
    """Return whether `edit` differs from `drawn` only in the places of layers, so that only numbers are missing."""
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
