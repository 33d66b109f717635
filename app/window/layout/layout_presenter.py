"""The layout being edited: shows its preview in editor, shares and bar, and carries moves back."""

from __future__ import annotations

from PySide6.QtCore import QObject

from app.models.document import LayoutDocument
from app.rig.live_rig import LiveRig
from app.window.actions import Actions
from engine.base.language import tr
from engine.planning.layout.layout import SplitMode
from engine.planning.layout.split_modes import layout_in_mode, split_mode_obstacles, split_shares
from engine.planning.plan.decisions.context_length import trained_length
from engine.planning.plan.preview import Preview
from widgets.controls.settings_bar import SettingsBar
from widgets.controls.share_editor import ShareEditor
from widgets.controls.values import SplitModeChoice
from widgets.layout_editor.editor import LayoutEditor


class LayoutPresenter(QObject):
    """Connects the editor and the share editor with the document, which owns the drag."""

    def __init__(
        self,
        document: LayoutDocument,
        live: LiveRig,
        *,
        editor: LayoutEditor,
        share_editor: ShareEditor,
        bar: SettingsBar,
        actions: Actions,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._document = document
        self._live = live
        self._editor = editor
        self._share_editor = share_editor
        self._bar = bar
        document.preview_changed.connect(self._on_preview_changed)
        document.undo_group.canUndoChanged.connect(actions["undo"].setEnabled)
        document.undo_group.canRedoChanged.connect(actions["redo"].setEnabled)
        bar.context_changed.connect(document.set_context)
        bar.split_mode_changed.connect(self._on_split_mode)
        for source in (editor, share_editor):
            source.moved.connect(document.move)
            source.move_finished.connect(document.finish_move)
        editor.move_cancelled.connect(document.cancel_move)
        document.drag_ended.connect(editor.end_drag)

    def _on_preview_changed(self, preview: Preview | None) -> None:
        self._editor.set_preview(preview)
        if preview is not None:
            model = self._document.model
            trained = trained_length(model) if model is not None else None
            self._bar.set_context(preview.context, trained, preview.report.decisions)
            self._bar.set_split_mode(preview.layout.split_mode, split_mode_obstacles(preview.rig, model))
        self._share_editor.set_shares(() if preview is None else split_shares(preview.layout, preview.rig))

    def _on_split_mode(self, choice: SplitModeChoice) -> None:
        edit = self._document.edit
        if edit is None:
            return
        mode: SplitMode = choice.mode
        layout = layout_in_mode(edit.layout, mode, self._live.rig)
        self._document.set_layout(layout, tr("split mode {mode}", mode=mode))
