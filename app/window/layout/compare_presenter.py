"""The presenter of Layout > Compare Speed: it fills the dialog that measures layouts, and carries out its commands."""

from __future__ import annotations

from functools import partial

from PySide6.QtWidgets import QWidget

from app.load.comparer import LayoutComparer, NamedEdit
from app.models.auto_layouts import STRATEGY_TEXTS
from app.models.document import LayoutDocument
from app.theme import Theme
from app.window import dialogs
from app.window.dialogs import OneDialog
from engine.base.errors import LayoutError
from engine.base.language import tr
from engine.base.values import replace
from engine.machines.bench.results import BenchModel, BenchResults, import_note, layout_of
from engine.machines.bench.runner import BenchProgress
from engine.machines.bench.tables import winner_text, with_titles
from engine.model.gguf.model_file import ModelFile
from engine.planning.memory.side_files import SideFiles
from engine.planning.plan.edit import Edit
from widgets.bench.compare_dialog import CompareDialog

RESULTS_FILTER = tr("Results (*.json);;All files (*)")
CURRENT = tr("current layout")
TITLES = {words.name: tr("Auto Layout: {title}", title=words.title.replace("&", "")) for words in STRATEGY_TEXTS}
"""Titles of the strategies for automatic layouts, by the name of the strategy."""


class ComparePresenter(OneDialog[CompareDialog]):
    """Fills the dialog for speed comparisons and carries out its commands.

    If the edited layout is among the measured ones, the speeds of the others are compared with it.
    """

    def __init__(self, document: LayoutDocument, comparer: LayoutComparer, theme: Theme, window: QWidget) -> None:
        super().__init__(self._make_dialog, lambda _dialog: self._fill(), window)
        self._document = document
        self._comparer = comparer
        self._theme = theme
        self._window = window
        self._model: ModelFile | None = None
        self._files: list[tuple[str, Edit]] = []
        document.preview_changed.connect(lambda _preview: self._on_preview_changed())
        comparer.progressed.connect(self._on_progressed)
        comparer.finished.connect(self._on_finished)
        comparer.failed.connect(self._on_failed)

    def _make_dialog(self) -> CompareDialog:
        dialog = CompareDialog(self._window, TITLES)
        dialog.apply_palette(self._theme.palette)
        self._theme.palette_changed.connect(dialog.apply_palette)
        dialog.compare_requested.connect(self._start)
        dialog.unload_requested.connect(self._unload)
        dialog.cancel_requested.connect(self._cancel)
        dialog.add_requested.connect(self._add_file)
        dialog.keep_requested.connect(self._keep_winner)
        dialog.export_requested.connect(self._export)
        dialog.import_requested.connect(self._import)
        # Closing the dialog ends a comparison, which would go on unseen.
        dialog.finished.connect(lambda _result: self._comparer.cancel())
        return dialog

    def _on_preview_changed(self) -> None:
        self._follow_model()
        self._show_kept()

    def _show_kept(self) -> None:
        """Disable the button Keep the Winner while the edited layout is the winner."""
        dialog, edit, model = self.dialog, self._document.edit, self._document.model
        results = None if dialog is None else dialog.results
        winner = None if results is None else results.layout(results.winner)
        if dialog is None or winner is None or edit is None or model is None or not dialog.isVisible():
            return
        try:
            file = layout_of(winner, model.n_layers)
        except LayoutError:
            dialog.set_kept(False)
            return
        kept = self._with_draft_of(winner.name, Edit(file.layout, file.context, edit.side_files))
        dialog.set_kept(kept == edit)

    def _follow_model(self) -> None:
        """Drop the layout files that were added for another model, if the current model has changed.

        Measured results stay in the dialog, with a note that they are of another model.
        """
        if self._document.model is self._model:
            return
        # Layout files are for a number of layers.
        self._model, self._files = self._document.model, []
        self._show_layouts()
        if self.dialog is not None and self.dialog.results is not None and not self._comparer.is_running:
            self._show_outcome(self.dialog.results)

    def _fill(self) -> None:
        self._follow_model()
        self._show_layouts()
        if self.dialog is not None:
            self.dialog.show_running(self._comparer.is_running)
            self._show_kept()
            self.dialog.show_status("" if self._model is not None else tr("No model is open."))

    def _show_layouts(self) -> None:
        if self.dialog is not None:
            names = [] if self._model is None else [CURRENT, *(name for name, _ in self._files)]
            self.dialog.set_layouts(names)

    # ------------------------------------------------------------------ the comparison

    def _start(self) -> None:
        # The plan of the present edit may still be computed.
        self._document.when_forecast(self._start_now)

    def _start_now(self) -> None:
        dialog, plan = self.dialog, self._document.plan
        # It may have been closed meanwhile: the comparison would run unseen.
        if dialog is None or not dialog.isVisible() or plan is None:
            return
        if obstacle := self._comparer.obstacle:
            dialog.show_status(obstacle, bad=True, can_unload=self._comparer.can_park)
            return
        edit = plan.edit
        named = [NamedEdit(CURRENT, edit)]
        named += [NamedEdit(name, _with_side_files(each, edit.side_files)) for name, each in self._files]
        chosen = tuple(named[at] for at in dialog.chosen if at < len(named))
        if not chosen:
            return
        dialog.show_results(None)
        dialog.show_running(True)
        dialog.show_progress(tr("Looking for layouts"), 0, 0)
        self._comparer.start(plan, chosen, dialog.preset, automatic=dialog.is_automatic)

    def _unload(self) -> None:
        """Unload the models and save their KV states, then start the comparison, unless the dialog was closed."""
        dialog = self.dialog
        if dialog is not None and self._comparer.can_park:
            dialog.show_status(tr("Waiting until the loaded models have been unloaded…"))
            self._comparer.park_all(self._start)
        else:
            # It has begun to answer meanwhile.
            self._start()

    def _cancel(self) -> None:
        if self.dialog is not None:
            self.dialog.show_cancelling()
        self._comparer.cancel()

    def _on_progressed(self, progress: BenchProgress) -> None:
        if self.dialog is not None and self._comparer.is_running:
            self.dialog.show_progress(progress.words + progress.left_words, progress.done, progress.total)
            self.dialog.show_results(progress.results)

    def _on_finished(self, results: BenchResults) -> None:
        dialog = self.dialog
        if dialog is None:
            return
        dialog.show_running(False)
        dialog.show_results(results)
        self._show_kept()
        self._show_outcome(results)

    def _show_outcome(self, results: BenchResults) -> None:
        dialog = self.dialog
        if dialog is None:
            return
        note = "" if self._model is None else import_note(_bench_model(self._model), results.model)
        if note:
            dialog.show_status(note, bad=True)
        elif results.ended:
            dialog.show_status(results.ended)
        elif not results.winner:
            dialog.show_status(tr("No layout could be measured. The notes below say why."))
        elif len(results.layouts) == 1:
            dialog.show_status(tr("One layout was measured. Add other layouts to compare."))
        else:
            dialog.show_status(winner_text(with_titles(results, TITLES)))

    def _on_failed(self, sentence: str) -> None:
        if self.dialog is not None:
            self.dialog.show_running(False)
            self.dialog.show_status(sentence, bad=True)

    # ------------------------------------------------------------------ files and the winner

    def _add_file(self) -> None:
        model, dialog = self._model, self.dialog
        if model is None or dialog is None:
            return
        path = dialogs.ask_open(dialog, tr("Add a layout"), dialogs.LAYOUT_FILTER)
        if path is not None:
            self._comparer.read_layout(path, model, partial(self._add, model))

    def _add(self, model: ModelFile, name: str, edit: Edit) -> None:
        # It was read in the background: another model may be shown by now.
        if model is not self._document.model:
            return
        taken = {CURRENT, *(known for known, _ in self._files)}
        free = next(each for number in range(1, len(taken) + 2)
                    if (each := name if number == 1 else f"{name} {number}") not in taken)  # fmt: skip
        self._files.append((free, edit))
        self._show_layouts()

    def _keep_winner(self) -> None:
        """Replace the edited layout by the fastest layout of the comparison, as one step of undo."""
        dialog, model = self.dialog, self._document.model
        results = None if dialog is None else dialog.results
        winner, edit = None if results is None else results.layout(results.winner), self._document.edit
        if dialog is None or winner is None or model is None or edit is None:
            return
        try:
            file = layout_of(winner, model.n_layers)
        except LayoutError as error:
            dialog.show_status(error.summary(), bad=True)
            return
        found = self._with_draft_of(winner.name, Edit(file.layout, file.context, edit.side_files))
        self._document.replace(found, tr("use fastest layout {name}", name=winner.name))
        dialog.show_status(tr("The layout editor now has this layout: {name}.", name=winner.name))

    def _with_draft_of(self, name: str, edit: Edit) -> Edit:
        """Return `edit` (layout, settings and side files) with the draft (speculative decoding) of a layout file.

        `name`: name of the layout file in the dialog. If no file has this name, `edit` is returned unchanged.
        """
        added = next((each for known, each in self._files if known == name), None)
        return edit if added is None else _with_side_files(replace(edit, side_files=added.side_files), edit.side_files)

    def _export(self) -> None:
        if self.dialog is not None and self.dialog.results is not None:
            path = dialogs.ask_save(self.dialog, tr("Save the results"), RESULTS_FILTER, "layerdeck-speeds.json")
            if path is not None:
                self._comparer.save(path, self.dialog.results)

    def _import(self) -> None:
        if self.dialog is not None:
            path = dialogs.ask_open(self.dialog, tr("Open results"), RESULTS_FILTER)
            if path is not None:
                self._comparer.open(path)


def _with_side_files(edit: Edit, current: SideFiles) -> Edit:
    """Return `edit` (layout, settings and side files) with the projector and adapters of `current`.

    `edit` is from a layout file. Such a file may name a draft (speculative decoding), but no projector and no adapters.
    """
    return replace(edit, side_files=replace(current, draft=edit.side_files.draft))


def _bench_model(model: ModelFile) -> BenchModel:
    """Return name, architecture, bytes and layers of `model`, which are stored with the results of a comparison."""
    return BenchModel(model.name, model.architecture, model.size_bytes, model.n_layers)
