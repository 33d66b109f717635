"""The presenter of the edited layout: it shows layout and forecast in editor, share editor and settings bar.

It also applies the changes that the user makes in these widgets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from PySide6.QtCore import QObject

from app.models.document import LayoutDocument
from app.models.expert_placing import ExpertPlacing
from app.window.actions import Actions
from engine.base.errors import EngineError
from engine.base.language import tr
from engine.base.texts import capitalised
from engine.base.units import format_bytes
from engine.base.values import replace
from engine.planning.layout.layout import Layout, SplitMode
from engine.planning.layout.split_modes import split_mode_obstacles, split_shares
from engine.planning.plan.plan import Plan
from engine.planning.plan.preview import Preview
from engine.planning.speed.texts import predicted_rate_text
from widgets.controls.settings_bar import SettingsBar
from widgets.controls.share_editor import ShareEditor
from widgets.controls.values import SplitModeChoice
from widgets.layout_editor.editor import LayoutEditor

if TYPE_CHECKING:
    from engine.planning.fit.expert_moves import ExpertOutcome


def outcome_text(found: ExpertOutcome) -> str:
    """Return the effect of a move of experts as text: moved bytes, and predicted speeds before and after the move.

    If the layout does not fit after the move, the text says so instead of speeds. It is empty if no experts would move.
    """
    if not found.n_layers:
        return ""
    size = format_bytes(found.moved_bytes)
    if not found.fits:
        return tr("moves {size}; does not fit", size=size)
    if found.after is None:
        return size
    after = predicted_rate_text(found.after.tokens_per_second)
    if found.before is None:
        return tr("moves {size}; would fit, with roughly {after} tokens/s", size=size, after=after)
    before = predicted_rate_text(found.before.tokens_per_second)
    return tr("moves {size}; roughly {before} → {after} tokens/s", size=size, before=before, after=after)


class LayoutPresenter(QObject):
    """Connects layout editor, share editor and settings bar with the `LayoutDocument`, which holds the edited layout.

    All moves of one drag are one undo step.
    """

    def __init__(
        self,
        document: LayoutDocument,
        *,
        editor: LayoutEditor,
        share_editor: ShareEditor,
        bar: SettingsBar,
        actions: Actions,
        experts: ExpertPlacing,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._document = document
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
        editor.expert_outcomes_requested.connect(experts.look)
        editor.experts_requested.connect(experts.use)
        experts.outcomes_found.connect(
            lambda found: editor.show_expert_outcomes({kind: outcome_text(each) for kind, each in found.items()})
        )
        editor.numbers.experts_entered.connect(lambda wanted: experts.place(wanted.device, wanted.count))
        editor.numbers.line_entered.connect(lambda text: document.when_forecast(lambda: self._take_line(text)))
        editor.overrides_drop_requested.connect(lambda: document.when_forecast(self._drop_overrides))
        document.drag_ended.connect(editor.end_drag)

    def _on_preview_changed(self, preview: Preview | None) -> None:
        # The editor first: during a drag this runs once a frame, and its lanes are what people look at.
        self._editor.set_preview(preview)
        if preview is not None:
            model = self._document.model
            trained = model.n_ctx_train if model is not None else None
            self._bar.set_context(preview.context, trained, preview.report.decisions)
            self._bar.set_split_mode(preview.layout.split_mode, split_mode_obstacles(preview.rig, model))
        self._share_editor.set_shares(() if preview is None else split_shares(preview.layout, preview.rig))

    def _take_line(self, text: str) -> None:
        """Change the edited layout and its settings by a typed or pasted line, as one step of undo.

        `text`: the line, with a share for each device such as `3,1,2`, or with options of llama.cpp. A label below the
        input field then shows the new layout, the options that were ignored, or the error.
        """
        from engine.planning.exchange.typed_line import take_line

        plan, numbers = self._document.plan, self._editor.numbers
        if plan is None:
            return
        edit = plan.edit
        try:
            taken = take_line(text, edit.layout, edit.context, plan.model, plan.rig)
        except EngineError as error:
            # The line stays, so that it can be corrected.
            numbers.show_answer(f"{capitalised(error.summary())}.", bad=True)
            return
        is_new = (taken.layout, taken.context) != (edit.layout, edit.context)
        if taken.notes and not is_new:
            # Nothing was taken: the line stays, so that it can be corrected.
            numbers.show_answer(" ".join((tr("The layout was not changed."), *taken.notes)), bad=True)
            return
        self._document.set_edit(taken.layout, taken.context, tr("place layers by numbers"))
        numbers.clear_line()
        runs = ", ".join(f"{run.device} {run.length}" for run in taken.layout.runs)
        answer = (
            tr("Layers: {runs}.", runs=runs) if is_new else tr("The layout already matches these shares or options.")
        )
        numbers.show_answer(" ".join((answer, *taken.notes)))

    def _on_split_mode(self, choice: SplitModeChoice) -> None:
        # The layout in another mode is derived from the plan, which has to be the plan of the current edit.
        self._document.when_forecast(lambda: self._set_mode(choice.mode))

    def _set_mode(self, mode: SplitMode) -> None:
        plan = self._document.plan
        if plan is not None:
            self._document.set_layout(self._in_mode(plan, mode), tr("split mode {mode}", mode=mode))

    def _drop_overrides(self) -> None:
        """Remove the tensor overrides that the split mode does not support, as one step of undo."""
        from engine.planning.fit.mode_layouts import without_refused_overrides

        plan = self._document.plan
        found = None if plan is None else without_refused_overrides(plan.with_own_tables())
        if found is not None:
            self._document.replace(found.edit, found.text)

    def _in_mode(self, plan: Plan, mode: SplitMode) -> Layout:
        """Return the layout of `plan`, converted to split mode `mode`.

        When the user leaves mode `layer`, its layout is stored. When the user returns to `layer`, the stored layout is
        restored, together with tensor overrides that were added meanwhile. After any other edit it is not restored.
        """
        # Strategies and forecasts are imported later than the window: see `tests/app/test_opening.py`.
        from engine.planning.fit.mode_layouts import layout_in_split_mode

        now, (left, shown) = plan.edit.layout, self._document.layouts_for_mode_layer
        # Overrides that a mode does not allow are dropped there; mode layer can have them again.
        is_kept = shown is not None and replace(now, overrides=shown.overrides) == shown
        if mode == "layer" and left is not None and shown is not None and is_kept:
            if all(each in shown.overrides for each in now.overrides):
                return left
            dropped = (each for each in left.overrides if each not in shown.overrides)
            return replace(left, overrides=(*now.overrides, *dropped))
        layout = layout_in_split_mode(plan, mode, self._document.speeds)
        if now.split_mode == "layer":
            left = now
        elif not is_kept:
            left = None
        self._document.layouts_for_mode_layer = left, layout
        return layout
