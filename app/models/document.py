"""The document: the edited layout of a model on a rig, with undo, and the preview from which the editor is drawn.

Each open model has an edit state: its edit (layout and settings) with an undo stack. The document has the edit state of
the current model; the other models keep their own.

The document owns the drag of layers with the mouse: the first `move` starts the drag, each move is previewed, and
`finish_move` or `cancel_move` ends it. Undo, another edit or other devices end a drag too; then `drag_ended` is
emitted.

Slow forecasts are computed in the background (`forecaster`). Until they arrive, `is_behind` is true, and `plan` and
`preview` have the previous forecast. If only the layout has changed, and not by a drag, `preview` has the new layout at
once, with the memory and speed of the previous one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from PySide6.QtCore import QObject, Signal
from PySide6.QtGui import QUndoCommand, QUndoGroup, QUndoStack

from app.background import Background
from app.models.forecaster import Forecast, Forecaster, ForecastRequest, Pace
from engine.base.language import tr
from engine.base.values import replace
from engine.devices.device import Rig
from engine.model.gguf.model_file import ModelFile
from engine.planning.layout.layout import Layout
from engine.planning.layout.moves import Move
from engine.planning.memory.side_files import SideFiles
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.plan.preview import MeasuredAnswer, Preview, PreviewCache
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.speed.prediction import LastAnswer
from engine.planning.speed.speeds import NO_MEASUREMENTS, Speeds
from engine.runtime.probing.probe import ProbeCache
from widgets.common.delayed_call import DelayedCall

FRAME_MS = 16
"""Milliseconds between two previews during a drag: at most one per frame (60 Hz), however fast mouse events arrive."""
UNDO_STEPS = 200
"""Largest number of undo steps. Each step stores two edits: from before and from after the change."""


class EditState:
    """One model's edit (layout and settings) with its undo stack.

    `tables`: values of the model that all its previews share. `pace`: durations of the last forecasts for this model.
    """

    def __init__(self, tables: PreviewCache, edit: Edit, undo_stack: QUndoStack, pace: Pace) -> None:
        self.model = tables.memory.model
        self.tables = tables
        self.edit = edit
        self.begun = edit
        """Layout and settings (the edit) when the model was opened."""
        self.stored_side_files = edit.side_files
        """The side files when the model was opened, or those that were stored since then."""
        self.undo_stack = undo_stack
        self.pace = pace
        self.forecast: Forecast | None = None
        """The last forecast that was drawn; None before the first one."""
        self.layouts_for_mode_layer: tuple[Layout | None, Layout | None] = None, None
        """The last layout in split mode `layer`, and the layout that replaced it when the user chose another mode.

        Each may be None. If the second one is not edited, choosing mode `layer` again restores the first.
        """


class LayoutDocument(QObject):
    """Owns the edit state of the current model, the drag in progress and the plan. Use it in the GUI thread only.

    Forecasts are computed in this process. Numbers in `probes`, which llama.cpp has reported, replace estimated ones.
    If `background` is None, each forecast is computed before the call returns.
    """

    preview_changed = Signal(object)  # Preview | None
    drag_ended = Signal()  # finished, cancelled, or overtaken by undo, a change of the edit or other devices
    edit_settled = Signal()  # an edit is complete: a probe may check it

    def __init__(self, background: Background | None = None, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.undo_group = QUndoGroup(self)
        """The undo stacks of all edit states; the undo stack of the current model is active."""
        self._state: EditState | None = None
        self._rig: Rig | None = None
        self._speeds = NO_MEASUREMENTS
        self._answered: Mapping[tuple[Path, Edit], LastAnswer] = {}
        self._drag_start: Edit | None = None
        self._move_text = ""
        self.probes = ProbeCache()
        """Memory numbers from probes, by plan. The numbers do not depend on the amount of free memory."""
        self.plan: Plan | None = None
        """The plan of the edited layout and settings on the present devices; None if no model is open.

        While `is_behind` is true, this is the previous plan.
        """
        self.preview: Preview | None = None
        """The plan as it was drawn last; None if no model is open."""
        self._forecaster = Forecaster(self.probes, self._on_forecast, background)
        self._then: list[Callable[[], None]] = []
        self._frame = DelayedCall(self, self._recompute, FRAME_MS)

    @property
    def state(self) -> EditState | None:
        """The edit state of the current model; None if no model is open."""
        return self._state

    @property
    def model(self) -> ModelFile | None:
        return None if self._state is None else self._state.model

    @property
    def edit(self) -> Edit | None:
        return None if self._state is None else self._state.edit

    @property
    def rig(self) -> Rig | None:
        """The devices for which forecasts are made; None before the first model is opened."""
        return self._rig

    @property
    def layouts_for_mode_layer(self) -> tuple[Layout | None, Layout | None]:
        """The last layout in split mode `layer`, and the layout that replaced it when the user chose another mode.

        If the user chooses mode `layer` again and has not edited the second layout, the first one is restored. Both
        are None before the user has chosen another mode.
        """
        return (None, None) if self._state is None else self._state.layouts_for_mode_layer

    @layouts_for_mode_layer.setter
    def layouts_for_mode_layer(self, layouts: tuple[Layout | None, Layout | None]) -> None:
        if self._state is not None:
            self._state.layouts_for_mode_layer = layouts

    @property
    def is_untouched(self) -> bool:
        """Whether nothing was edited since the model was opened: the undo stack is empty."""
        return self._state is None or self._state.undo_stack.count() == 0

    @property
    def has_first_edit(self) -> bool:
        """Whether layout and settings are the same as when the model was opened, for example after undo."""
        return self._state is None or self._state.edit == self._state.begun

    @property
    def has_first_layout(self) -> bool:
        """Whether the layout is the same as when the model was opened, for example after undo."""
        return self._state is None or self._state.edit.layout == self._state.begun.layout

    @property
    def is_dragging(self) -> bool:
        return self._drag_start is not None

    @property
    def is_behind(self) -> bool:
        """Whether the forecast for the edited layout and settings is still being computed."""
        return self._forecaster.is_behind

    def when_forecast(self, do: Callable[[], None]) -> None:
        """Call `do` when the forecast of the edited layout and settings is ready: now, or after the running one."""
        if self.is_behind:
            self._then.append(do)
        else:
            do()

    def open(self, model: ModelFile | PreviewCache, rig: Rig, edit: Edit, pace: Pace | None = None) -> None:
        """Make `model` the current model, with the layout and settings `edit` and an empty undo stack.

        The layout and the undo stack of the previous model are lost, unless `put_aside` was called before.
        `model`: the model, or its preview tables (values that all its previews share) if they exist already.
        `pace`: durations of earlier forecasts for this model; None if there are none.
        """
        old = self.put_aside()
        if old is not None:
            self.undo_group.removeStack(old.undo_stack)
            # A group does not own its stacks, and the document, the parent, would keep this one.
            old.undo_stack.deleteLater()
        tables = model if isinstance(model, PreviewCache) else PreviewCache(model)
        self.show(self.make_state(tables, edit, pace or Pace()), rig)

    def make_state(self, tables: PreviewCache, edit: Edit, pace: Pace) -> EditState:
        """Return a new edit state with an empty undo stack. The caller passes it to `show` to make it current.

        `tables`: values that all previews of the model share. `pace`: durations of earlier forecasts with these tables.
        """
        stack = QUndoStack(self)
        # Before the first command: Qt ignores the limit for a stack that is not empty.
        stack.setUndoLimit(UNDO_STEPS)
        self.undo_group.addStack(stack)
        return EditState(tables, edit, stack, pace)

    def restart(self, rig: Rig, edit: Edit) -> None:
        """Replace layout and settings of the current model by `edit`, with an empty undo stack."""
        if self._state is not None:
            self.open(self._state.tables, rig, edit, self._state.pace)

    def put_aside(self) -> EditState | None:
        """Remove the current edit state and return it, for a later `show`; None if there is none.

        A drag is cancelled first.
        """
        # Calls that wait for a forecast of this edit would get one of another model.
        self.cancel_move()
        self._then.clear()
        state, self._state = self._state, None
        return state

    def show(self, state: EditState, rig: Rig) -> None:
        """Make `state` the current edit state, and compute its forecast for the devices of `rig`.

        The previous edit state is lost, unless the caller has fetched it with `put_aside`.
        """
        self._state, self._rig = state, rig
        self._end_drag()
        self.undo_group.setActiveStack(state.undo_stack)
        self._recompute()
        self.edit_settled.emit()

    def set_rig(self, rig: Rig) -> None:
        """Forecast for the devices of `rig` from now on."""
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
        """The measured speeds from which forecasts predict tokens per second."""
        return self._speeds

    def set_speeds(self, speeds: Speeds, answered: Mapping[tuple[Path, Edit], LastAnswer]) -> None:
        """Set the speeds from which tokens per second are predicted, and compute the forecast again.

        `answered`: speed of the last measured answer, by the model's path and its edit (layout and settings).
        """
        self._speeds, self._answered = speeds, answered
        if self._state is not None:
            self._recompute()

    def show_probed(self) -> None:
        """Draw the forecast again if a probe (load without allocating memory) has new numbers for the current plan."""
        if self.plan is not None and self.probes.over(self.plan) is not self.plan:
            self._recompute()

    # ------------------------------------------------------------------ editing

    def move(self, move: Move) -> None:
        """Apply `move` to the layout from the start of the drag, and draw a preview. The first call starts the drag."""
        if self._state is None:
            return
        # All moves refer to the start of the drag, so that moving back restores it exactly.
        start = self._drag_start or self._state.edit
        self._move_text = move.text
        self._state.edit = start.after(move)
        self._drag_start = start
        # Moves between two frames need no preview of their own.
        self._frame.begin()

    def finish_move(self) -> None:
        """End the drag, and add it as one step to the undo stack if it has changed the layout."""
        start = self._end_drag()
        if start is None or self._state is None:
            return
        # The drag ended where it began: the last preview may be of a move in between.
        if start == self._state.edit:
            self._recompute()
            return
        self._push(self._state, start, self._state.edit, self._move_text)

    def cancel_move(self) -> None:
        """End the drag and restore the layout from the start of the drag."""
        start = self._end_drag()
        if start is not None and self._state is not None:
            self._state.edit = start
            self._recompute()

    def _end_drag(self) -> Edit | None:
        """End the drag. Return layout and settings from the start of the drag, or None if there is no drag."""
        start, self._drag_start = self._drag_start, None
        # Emitted in any case: the editor may have begun a drag that has not moved anything yet.
        self.drag_ended.emit()
        return start

    def set_layout(self, layout: Layout, text: str) -> None:
        """Replace the layout as one step of undo; `text` is the name of the step."""
        if self.edit is not None:
            self.replace(replace(self.edit, layout=layout), text)

    def set_context(self, context: ContextSettings) -> None:
        """Replace the edited context settings as one step of undo."""
        if self.edit is not None:
            self.replace(replace(self.edit, context=context), tr("change settings"))

    def set_edit(self, layout: Layout, context: ContextSettings, text: str) -> None:
        """Replace layout and context settings as one step of undo named `text`; side files are not changed."""
        if self.edit is not None:
            self.replace(replace(self.edit, layout=layout, context=context), text)

    def set_side_files(self, side_files: SideFiles, text: str) -> None:
        """Replace the side files (projector, adapters) as one step of undo named `text`."""
        if self.edit is not None:
            self.replace(replace(self.edit, side_files=side_files), text)

    def replace(self, edit: Edit, text: str) -> None:
        """Replace layout, settings and side files by `edit`, as one step of undo named `text`."""
        self.cancel_move()
        if self._state is not None and edit != self._state.edit:
            self._push(self._state, self._state.edit, edit, text)

    def replace_in(self, state: EditState, edit: Edit, text: str) -> None:
        """Replace layout and settings of a model other than the current one by `edit`, as one undo step named `text`.

        `state`: the edit state of that model.
        """
        if edit != state.edit:
            self._push(state, state.edit, edit, text)

    def _push(self, state: EditState, before: Edit, after: Edit, text: str) -> None:
        def restore(edit: Edit) -> None:
            if state is not self._state:
                state.edit = edit
                return
            # A drag would continue from a layout that no longer exists.
            self._end_drag()
            state.edit = edit
            self._recompute()
            self.edit_settled.emit()

        # `push` calls `redo`, which applies the edit.
        state.undo_stack.push(_EditCommand(restore, before, after, text))

    # ------------------------------------------------------------------ preview

    def _recompute(self) -> None:
        # The preview that is requested here is newer than the one for which the timer waits.
        self._frame.stop()
        state = self._state
        if state is None or self._rig is None:
            self._forecaster.forget()
            self._then.clear()
            self._draw(None, None)
            return
        answered = self._last_answer(state.model.paths[0], state.edit)
        self._forecaster.request(
            ForecastRequest(state, state.tables, state.pace, self._rig, state.edit, self._speeds, answered)
        )
        if self.is_behind:
            self._draw_meanwhile(state)

    def _last_answer(self, path: Path, edit: Edit) -> MeasuredAnswer | None:
        """Return the measured speed of the last answer of the model at `path` with layout and settings `edit`.

        Without such an answer, return the speed of the model's last answer with another edit but the same draft
        (speculative decoding). Return None if there was none either.
        """
        same = self._answered.get((path, edit))
        if same is not None:
            return MeasuredAnswer(edit, same)
        # The newest is at the end. What a draft gains says nothing about answers without it.
        draft = edit.side_files.draft
        others = (
            MeasuredAnswer(other, answer)
            for (of, other), answer in reversed(tuple(self._answered.items()))
            if of == path and other.side_files.draft == draft
        )
        return next(others, None)

    def _draw_meanwhile(self, state: EditState) -> None:
        """Draw a provisional preview until the new forecast arrives.

        If another model was shown before, the last preview of the current model is drawn. If only the layout has
        changed, the edited layout is drawn with the memory and speed of the previous preview. Otherwise nothing is
        drawn.

        `state`: the current edit state.
        """
        drawn = self.preview
        if state.forecast is not None and (self.plan is None or self.plan.memory is not state.tables.memory):
            # Another model was shown before, so the last preview of this model is drawn.
            self._draw(state.forecast.plan, state.forecast.preview)
        elif (
            drawn is not None
            and self._rig is not None
            and drawn.rig.ids == self._rig.ids
            and not self.is_dragging
            and _differ_in_layout_only(drawn.edit, state.edit)
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


def _differ_in_layout_only(drawn: Edit, edit: Edit) -> bool:
    """Return whether the layout is the only difference of two edits, and the split mode is the same.

    The new layout can then be drawn at once, with the numbers of the previous one.
    """
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
