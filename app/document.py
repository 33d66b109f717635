"""The layout being edited: model, rig, layout and context with undo, and the preview that all bars read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from PySide6.QtCore import QObject, QTimer, Signal
from PySide6.QtGui import QUndoCommand, QUndoStack

from engine.devices.device import Rig
from engine.fit.preview import Preview, PreviewTables, make_preview
from engine.fit.report import FitReport
from engine.gguf.model_file import ModelFile
from engine.layout.context_settings import ContextSettings
from engine.layout.layout import Layout

FRAME_MS = 16
"""At most one preview per frame, however fast the mouse reports."""


@dataclass(frozen=True, slots=True)
class Edit:
    """What undo goes back to."""

    layout: Layout
    context: ContextSettings


class LayoutDocument(QObject):
    """Owns the edit and its undo stack. No process is involved: previews are arithmetic."""

    preview_changed = Signal(object)  # Preview | None
    edit_settled = Signal()  # an edit is complete: a probe may check it

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.undo_stack = QUndoStack(self)
        self._model: ModelFile | None = None
        self._tables: PreviewTables | None = None
        self._rig: Rig | None = None
        self._edit: Edit | None = None
        self._drag_start: Edit | None = None
        self._preview: Preview | None = None
        self._frame = QTimer(self)
        self._frame.setSingleShot(True)
        self._frame.setInterval(FRAME_MS)
        self._frame.timeout.connect(self._on_frame)

    @property
    def model(self) -> ModelFile | None:
        return self._model

    @property
    def edit(self) -> Edit | None:
        return self._edit

    @property
    def preview(self) -> Preview | None:
        return self._preview

    @property
    def is_dragging(self) -> bool:
        return self._drag_start is not None

    def open(self, model: ModelFile, rig: Rig, edit: Edit) -> None:
        """Begin with `edit` of `model`; undo starts anew."""
        self._model, self._tables, self._rig, self._edit = model, PreviewTables(model), rig, edit
        self._drag_start = None
        self.undo_stack.clear()
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
        if self._model is not None:
            self._recompute()
            if devices_changed:
                self.edit_settled.emit()

    def show_probed(self, edit: Edit, report: FitReport) -> None:
        """Show probed numbers, unless the edit has moved on since."""
        if self._preview is not None and edit == self._edit and not self.is_dragging:
            self._publish(replace(self._preview, report=report))

    # ------------------------------------------------------------------ editing

    def move(self, change: Callable[[Layout], Layout]) -> None:
        """Show what `change` does to the layout at the start of the drag; nothing is kept until `finish_move`."""
        if self._edit is None:
            return
        if self._drag_start is None:
            self._drag_start = self._edit
        self._edit = replace(self._drag_start, layout=change(self._drag_start.layout))
        if not self._frame.isActive():
            self._frame.start()

    def finish_move(self) -> None:
        """Make the drag one step of undo."""
        start, self._drag_start = self._drag_start, None
        if start is None or self._edit is None:
            return
        if start == self._edit:
            self._recompute()
            return
        self._push(start, self._edit, "move layers")

    def cancel_move(self) -> None:
        """Go back to how it was before the drag."""
        if self._drag_start is not None:
            self._edit, self._drag_start = self._drag_start, None
            self._recompute()

    def set_layout(self, layout: Layout, text: str) -> None:
        """Replace the layout as one step of undo named `text`."""
        if self._edit is not None:
            self.replace(replace(self._edit, layout=layout), text)

    def set_context(self, context: ContextSettings) -> None:
        """Replace the context settings as one step of undo."""
        if self._edit is not None:
            self.replace(replace(self._edit, context=context), "change settings")

    def replace(self, edit: Edit, text: str) -> None:
        """Replace layout and settings as one step of undo named `text`."""
        self.cancel_move()
        if self._edit is not None and edit != self._edit:
            self._push(self._edit, edit, text)

    def _push(self, before: Edit, after: Edit, text: str) -> None:
        self.undo_stack.push(_EditCommand(self._restore, before, after, text))

    def _restore(self, edit: Edit) -> None:
        self._drag_start = None
        self._edit = edit
        self._recompute()
        self.edit_settled.emit()

    # ------------------------------------------------------------------ preview

    def _on_frame(self) -> None:
        self._recompute()

    def _recompute(self) -> None:
        self._frame.stop()
        if self._tables is None or self._rig is None or self._edit is None:
            self._publish(None)
            return
        self._publish(make_preview(self._tables, self._rig, self._edit.layout, self._edit.context))

    def _publish(self, preview: Preview | None) -> None:
        self._preview = preview
        self.preview_changed.emit(preview)


class _EditCommand(QUndoCommand):
    def __init__(self, restore: Callable[[Edit], None], before: Edit, after: Edit, text: str) -> None:
        super().__init__(text)
        self._restore, self._before, self._after = restore, before, after

    def undo(self) -> None:
        self._restore(self._before)

    def redo(self) -> None:
        self._restore(self._after)
