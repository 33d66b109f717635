"""The presenter of Layout > Compare Two Layouts: it finds the layouts of both sides, and copies one to the editor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from msgspec import Struct
from PySide6.QtWidgets import QWidget

from app.background import Background, Task
from app.library.named_layouts import NamedLayouts
from app.load.comparer import LayoutComparer
from app.models.auto_layouts import AutoLayouts
from app.models.document import LayoutDocument
from app.models.open_models import OpenModels
from app.models.speeds import SpeedRepository
from app.rig.device_search import RigFiles
from app.rig.live_rig import LiveRig
from app.theme import Theme
from app.window import dialogs
from app.window.dialogs import OneDialog
from app.window.layout.compare_presenter import TITLES
from engine.base.cancellation import CancelToken
from engine.base.errors import EngineError, LayoutError
from engine.base.language import tr
from engine.base.values import replace
from engine.devices.device import Rig
from engine.devices.rig_file import read_rig
from engine.machines.bench.results import BenchResults, layout_of
from engine.model.gguf.model_file import ModelFile
from engine.planning.fit.strategies.fastest import initial_layout
from engine.planning.layout.layout_file import LayoutFile, parse_layout, read_layout
from engine.planning.memory.side_files import SideFiles
from engine.planning.plan.comparison import Side, compare_plans, side_of
from engine.planning.plan.edit import Edit, edit_of_file
from engine.planning.plan.plan import Plan
from engine.planning.plan.preview import Preview, PreviewCache, make_preview
from engine.planning.speed.speeds import Speeds
from widgets.layout_editor.comparison_dialog import ComparisonDialog, ShownSide, SideOption

_FILE, _RIG = "choose a file", "choose a rig"
"""Keys of two options in the list of layouts. They open a file dialog for a layout file, and for a rig file."""


class _Found(Struct, frozen=True):
    """The content of one side of the comparison: the plan of a layout, and what is drawn of the plan (`preview`).

    `title`: name of the layout. `side`: memory, speed and other values of the layout.
    `kind`: first part of the layout's key, such as "auto" or "named".
    """

    title: str
    plan: Plan
    preview: Preview
    side: Side
    kind: str

    @property
    def is_other_rig(self) -> bool:
        """Whether the layout is for the devices of a rig file instead of the present devices."""
        return self.kind == "rig"

    def edit_with(self, files: SideFiles) -> Edit:
        """Return the layout and settings of this side for the editor, with the side files that belong to them.

        An automatic layout gets `files`, the editor's present side files. So does a layout from a file, except that its
        draft (speculative decoding) is the draft in that file. The layout of the last load keeps all side files of that
        load.
        """
        edit = self.plan.edit
        if self.kind in ("named", "file"):
            return replace(edit, side_files=replace(files, draft=edit.side_files.draft))
        return replace(edit, side_files=files) if self.kind in ("auto", "rig") else edit


class _Base(Struct, frozen=True):
    """What a background thread needs to make the plan of one side of the comparison.

    `plan`: plan of the edited layout. `rig`: the present devices.
    `speeds_of`: returns the known speeds of the devices of a rig.
    `find`: finds layout and settings (`Edit`) with the strategy of the given name; it blocks.
    """

    plan: Plan
    rig: Rig
    speeds_of: Callable[[Rig], Speeds]
    find: Callable[[str, Plan, CancelToken], Edit]

    def with_file(self, file: LayoutFile, folder: Path | None = None) -> Plan:
        """Return the plan of the layout in `file` for the model of `plan` on `rig`.

        Reads the draft model that the file names, so it must not be called in the GUI thread.
        `folder`: folder of the file, where the draft model is searched; None: the folder of the model.
        """
        model = self.plan.model
        edit = edit_of_file(file, model, folder or model.paths[0].parent, self.plan.edit.side_files)
        return Plan(self.plan.memory, self.rig, edit)


class ComparisonPresenter(OneDialog[ComparisonDialog]):
    """Fills the dialog that compares two layouts of the current model. The layouts are found in the background."""

    def __init__(
        self,
        document: LayoutDocument,
        live: LiveRig,
        *,
        models: OpenModels,
        named: NamedLayouts,
        auto_layouts: AutoLayouts,
        speeds: SpeedRepository,
        comparer: LayoutComparer,
        files: RigFiles,
        background: Background,
        theme: Theme,
        window: QWidget,
    ) -> None:
        super().__init__(self._make_dialog, lambda _dialog: self._fill(), window)
        self._document, self._live, self._models, self._named = document, live, models, named
        self._auto_layouts, self._speeds, self._files, self._theme = auto_layouts, speeds, files, theme
        self._window = window
        self._finding = (background.latest(), background.latest())
        self._keys = ["current", ""]
        self._found: list[_Found | None] = [None, None]
        self._asked: list[tuple[object, ...]] = [(), ()]
        """For each side, what its shown layout depends on. If that has changed, the layout is found again."""
        self._chosen_files: list[tuple[str, Path]] = []
        """The layout files and rig files that the user has chosen, as pairs of option key and path."""
        self._model: ModelFile | None = None
        self._results: BenchResults | None = None
        comparer.finished.connect(self._take_results)
        for changed in (document.preview_changed, auto_layouts.pins_changed, auto_layouts.options_changed):
            changed.connect(lambda _value: self._follow())
        named.changed.connect(self._on_named_changed)

    def _make_dialog(self) -> ComparisonDialog:
        dialog = ComparisonDialog(self._window)
        dialog.apply_palette(self._theme.palette)
        self._theme.palette_changed.connect(dialog.apply_palette)
        dialog.chosen.connect(self._choose)
        dialog.take_requested.connect(self._take)
        return dialog

    def _fill(self) -> None:
        self._named.refresh()
        self._follow_model()
        self._show_options()
        self._find_all()

    def _on_named_changed(self) -> None:
        self._show_options()
        if self.dialog is not None and self.dialog.isVisible():
            # The layout of a side may have been replaced, renamed or deleted.
            self._find_all()

    def _take_results(self, results: BenchResults) -> None:
        self._results = results

    # ------------------------------------------------------------------ what can be chosen

    def _options(self) -> list[SideOption]:
        if self._document.model is None:
            return []
        options = [SideOption("current", tr("current layout"))]
        if self._models.current.loading.last_loaded is not None:
            options.append(SideOption("loaded", tr("last load")))
        options += [SideOption(f"named:{each.name}", each.name) for each in self._named.documents]
        options += [SideOption(f"auto:{name}", title) for name, title in TITLES.items()]
        options += [SideOption(key, path.stem) for key, path in self._chosen_files]
        options.append(SideOption(_FILE, tr("Layout file…")))
        options.append(SideOption(_RIG, tr("Devices of a rig file…")))
        return options

    def _show_options(self) -> None:
        if self.dialog is not None:
            options = self._options()
            known = {option.key for option in options}
            # A layout that was renamed or deleted is not a choice any more.
            self._keys = [key if key in known else "current" for key in self._keys]
            self.dialog.set_options(options, (self._keys[0], self._keys[1]))

    def _first_other(self) -> str:
        """Return the key of the layout that the dialog compares with the edited layout when it opens.

        It is the loaded layout if that differs from the edited one, else an automatic layout.
        """
        loaded, edit = self._models.current.loading.last_loaded, self._document.edit
        if loaded is not None and edit is not None and loaded.edit != edit:
            return "loaded"
        return f"auto:{self._auto_layouts.options.strategy}"

    def _choose(self, side: int, key: str) -> None:
        if key not in (_FILE, _RIG):
            self._use(side, key)
            return
        dialog = self.dialog
        if dialog is None:
            return
        is_rig = key == _RIG
        title = tr("Compare with the devices of a rig file") if is_rig else tr("Compare with a layout")
        path = dialogs.ask_open(dialog, title, dialogs.RIG_FILTER if is_rig else dialogs.LAYOUT_FILTER)
        if path is None:
            self._show_options()
            return
        chosen = f"{'rig' if is_rig else 'file'}:{path}"
        if chosen not in (known for known, _ in self._chosen_files):
            self._chosen_files.append((chosen, path))
        self._use(side, chosen)

    def _use(self, side: int, key: str) -> None:
        self._keys[side] = key
        self._show_options()
        self._asked[side] = ()
        self._find_all()

    # ------------------------------------------------------------------ finding

    def _follow_model(self) -> None:
        model = self._document.model
        if model is not self._model:
            # Layout files are for a number of layers, and named layouts for a model.
            self._model, self._results = model, None
            self._chosen_files = [(key, path) for key, path in self._chosen_files if key.startswith("rig:")]
            self._keys = ["current", self._first_other()]
            self._found, self._asked = [None, None], [(), ()]
            for side in (0, 1):
                # A search for the other model would be shown here when it ends.
                self._finding[side].cancel()
                if self.dialog is not None:
                    self.dialog.show_side(side, None)
            self._named.refresh()
            self._show_options()

    def _follow(self) -> None:
        if self.dialog is not None and self.dialog.isVisible() and not self._document.is_dragging:
            self._follow_model()
            self._find_all()

    def _find_all(self) -> None:
        # The plan of the present edit may still be computed.
        self._document.when_forecast(self._find_both)
        if self._document.model is None and self.dialog is not None:
            for side in (0, 1):
                self.dialog.show_status(side, tr("No model is open.") if side == 0 else "")

    def _find_both(self) -> None:
        for side in (0, 1):
            self._find(side)

    def _find(self, side: int) -> None:
        dialog, plan = self.dialog, self._document.plan
        if dialog is None or plan is None:
            return
        key, rig = self._keys[side], self._live.rig
        asked: tuple[object, ...] = (key, plan.model, plan.edit, rig)
        if key != "current":
            # Forecasts of other layouts follow devices, but not each change of free memory.
            asked = (key, plan.model, plan.edit.context, plan.edit.side_files, rig.ids, self._named_text(key))
        if key.startswith("auto:"):
            asked = (*asked, self._auto_layouts.constraints(plan.model))
        if asked == self._asked[side]:
            return
        self._asked[side] = asked
        title = next((option.title for option in self._options() if option.key == key), key)
        base = _Base(plan.with_own_tables(), rig, self._speeds.known_speeds, self._finder(plan.model))
        make = self._maker(key)
        measured_of = self._measured_of(plan.model)

        def find(task: Task[None]) -> _Found:
            found = make(base, task.token)
            speeds = base.speeds_of(found.rig)
            preview = make_preview(PreviewCache(found.memory), found, speeds)
            measured = measured_of(found.edit)
            return _Found(title, found, preview, side_of(found, speeds, measured), key.partition(":")[0])

        def show(found: _Found) -> None:
            self._found[side] = found
            self._show_side(side, found)

        def failed(error: EngineError) -> None:
            self._found[side] = None
            if self.dialog is not None:
                self.dialog.show_side(side, None)
                self.dialog.show_status(side, error.summary(), bad=True)

        dialog.show_status(side, tr("Computing…"))
        self._finding[side].run(tr("Comparing layouts"), find, show, failed, quiet=True)

    def _maker(self, key: str) -> Callable[[_Base, CancelToken], Plan]:
        """Return a function for background threads that makes the plan of the layout with this key.

        `key`: key of an option of the dialog, such as "loaded" or "named:" with the name of a layout.
        """
        kind, _, name = key.partition(":")
        n_layers = 0 if self._document.model is None else self._document.model.n_layers
        loaded = self._models.current.loading.last_loaded
        if kind == "loaded" and loaded is not None:
            edit = loaded.edit
            return lambda base, _token: Plan(base.plan.memory, base.rig, edit)
        if kind == "named":
            text = self._named_text(key)
            return lambda base, _token: base.with_file(parse_layout(text, source=name, n_layers=n_layers))
        if kind == "auto":
            return lambda base, token: base.plan.on(base.rig).with_edit(base.find(name, base.plan, token))
        if kind == "file":
            return lambda base, _token: base.with_file(read_layout(Path(name), n_layers=n_layers), Path(name).parent)
        if kind == "rig":
            return lambda base, _token: _on_other_rig(base, Path(name))
        return lambda base, _token: base.plan

    def _named_text(self, key: str) -> str:
        """Return the content of the named layout with this key; empty if no named layout has this key."""
        return next((each.text for each in self._named.documents if f"named:{each.name}" == key), "")

    def _finder(self, model: ModelFile) -> Callable[[str, Plan, CancelToken], Edit]:
        constraints, speeds_of = self._auto_layouts.constraints(model), self._speeds.known_speeds

        def find(strategy: str, plan: Plan, token: CancelToken) -> Edit:
            # Imported here: the strategies take time to import, and the window opens without them.
            from engine.planning.fit.strategies.catalogue import auto_layout
            from engine.planning.fit.strategies.constraints import SearchLimit, check_constraints

            edit = plan.edit
            check_constraints(constraints, plan.rig, model.n_layers)
            wanted = replace(
                constraints,
                side_files=edit.side_files,
                speeds=speeds_of(plan.rig),
                watch=SearchLimit(token, lambda _n: None),
            )
            found = auto_layout(strategy, plan.memory, plan.rig, edit.context, wanted)
            return Edit(found.layout, found.context, edit.side_files)

        return find

    def _measured_of(self, model: ModelFile) -> Callable[[Edit], float | None]:
        """Return a function that looks up the measured tokens per second of `model` with an edit (layout and settings).

        The function looks at the last answer, then at the results of Compare Speed, then in the library's database. It
        reads the disk, so it must not run in the GUI thread.
        """
        path, n_layers, results = model.paths[0], model.n_layers, self._results
        answered, noted = self._speeds.answered_per_second, self._named.noted_speed

        def measured(edit: Edit) -> float | None:
            last = answered(path, edit)
            if last is not None:
                return last
            benched = None if results is None else _benched(results, edit, n_layers)
            return noted(path, edit.layout) if benched is None else benched

        return measured

    def _show_side(self, side: int, found: _Found) -> None:
        dialog = self.dialog
        if dialog is None:
            return
        dialog.show_side(side, ShownSide(found.preview, found.side))
        words = tr("Forecast for the devices of the rig file.") if found.is_other_rig else ""
        dialog.show_status(side, words)
        one, other = self._found
        if one is not None and other is not None and one.plan.model is other.plan.model:
            dialog.show_differences(compare_plans(one.plan, other.plan))

    # ------------------------------------------------------------------ taking

    def _take(self, side: int) -> None:
        """Replace the edited layout by the layout of `side` (0 or 1), as one undo step."""
        found, dialog, now = self._found[side], self.dialog, self._document.edit
        if found is None or dialog is None or now is None:
            return
        if self._document.model is not found.plan.model:
            dialog.show_status(
                side, tr("The layout was not used, because the editor shows another model now."), bad=True
            )
            return
        if found.is_other_rig:
            self._files.imagine(found.plan.rig)
        self._document.replace(found.edit_with(now.side_files), tr("use layout {name}", name=found.title))
        dialog.show_status(side, tr("The layout editor now has this layout: {name}.", name=found.title))


def _on_other_rig(base: _Base, path: Path) -> Plan:
    """Return the plan of an automatic layout for the model of `base` on the devices of the rig file `path`."""
    rig, edit = read_rig(path), base.plan.edit
    if not rig.ids:
        raise LayoutError(tr("The rig file {name} lists no devices. Choose another rig file.", name=path.name))
    layout = initial_layout(base.plan.memory, rig, edit.context, edit.side_files, base.speeds_of(rig))
    return Plan(base.plan.memory, rig, replace(edit, layout=layout))


def _benched(results: BenchResults, edit: Edit, n_layers: int) -> float | None:
    """Return the tokens per second that Compare Speed measured with the layout and settings of `edit`.

    None if Compare Speed did not measure them. `n_layers`: number of layers of the model.
    """
    for measured in results.layouts:
        try:
            file = layout_of(measured, n_layers)
        except LayoutError:
            continue
        if (file.layout, file.context) == (edit.layout, edit.context):
            return measured.middle("generation", 0)
    return None
