"""What the window's actions on models and layouts mean: open, propose, load, change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import QObject, Signal

from app.background import Background
from app.calibrator import Calibrator
from app.conversation import Conversation
from app.demo import ensure_demo
from app.document import Edit, LayoutDocument
from app.loading import Loading, ModelState
from app.paths import demo_path
from app.prober import Prober
from app.rig_keeper import RigKeeper
from app.settings import Settings
from app.status_line import Notice
from engine.devices.device import Rig
from engine.errors import EngineError, LayoutError
from engine.fit.initial_layout import initial_layout
from engine.fit.preview import Preview
from engine.fit.strategies.catalogue import auto_layout
from engine.fit.strategies.constraints import AutoLayout
from engine.gguf.file_type import file_type_name
from engine.gguf.model_file import ModelFile
from engine.gguf.reader import read_model
from engine.layout.context_settings import ContextSettings
from engine.layout.engine_parameters import split_members
from engine.layout.layout_file import LayoutFile, read_layout, write_layout
from engine.runner.client import LoadJob
from engine.units import MIB, format_bytes
from widgets.library.recent_model import RecentModel

DEMO_LAB_CAPS = (256 * MIB, 256 * MIB, 512 * MIB)


class Session(QObject):
    """Owns document, rig, loading and conversation. What waits happens elsewhere; answers arrive as signals."""

    model_changed = Signal(object)  # ModelFile | None
    recent_changed = Signal()
    notice = Signal(Notice)

    def __init__(self, settings: Settings, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.settings = settings
        self.background = Background(self)
        self.document = LayoutDocument(self)
        self.rig_keeper = RigKeeper(self.background, self)
        self.calibrator = Calibrator(self.rig_keeper, self.background, parent=self)
        self.loading = Loading(self.rig_keeper, self.calibrator, self)
        self.conversation = Conversation(self.loading, self)
        self.prober = Prober(self.document, self.background, self._may_probe, self)
        self._opening = 0
        self._connect()

    def _connect(self) -> None:
        self.rig_keeper.rig_changed.connect(self._on_rig_changed)
        self.rig_keeper.failed.connect(self._tell)
        self.rig_keeper.said.connect(self._say)
        self.rig_keeper.samples_arrived.connect(self._on_samples)
        self.loading.released.connect(self.prober.restart)

    def close(self) -> None:
        """End every process and thread of ours. Bounded; called once, when the window closes."""
        self.background.close()
        self.prober.close()
        self.loading.close()
        self.rig_keeper.close()
        self.settings.sync()

    # ------------------------------------------------------------------ model and layout

    def open_model(self, path: Path) -> None:
        """Read `path` and begin with its initial layout. What is loaded stays loaded."""
        self._open(f"Reading {path.name}", lambda: read_model(path), path)

    def open_demo(self) -> None:
        """Open the demo model, written first where it is not there yet."""
        self._open("Preparing the demo model", lambda: read_model(ensure_demo()), demo_path())

    def try_demo(self) -> None:
        """A lab rig and the demo model, in one click."""
        self.rig_keeper.start_lab(DEMO_LAB_CAPS, then=self.open_demo)

    def open_layout(self, path: Path) -> None:
        """Replace the edited layout by the one in `path`, as one step of undo."""
        model = self.document.model
        if model is None:
            self._tell(LayoutError("Open the model first; a layout file only says where its layers go."))
            return

        def apply(document: LayoutFile) -> None:
            self.document.replace(Edit(document.layout, document.context), f"open {path.name}")

        self.background.run(
            f"Reading {path.name}", lambda: read_layout(path, n_layers=model.n_layers), apply, self._tell
        )

    def save_layout(self, path: Path) -> None:
        """Write the edited layout to `path`."""
        model, edit = self.document.model, self.document.edit
        if model is None or edit is None:
            return
        document = LayoutFile(model_name=model.name, layout=edit.layout, context=edit.context)
        self.background.run(
            f"Saving {path.name}",
            lambda: write_layout(path, document),
            lambda _: self._say(f"Saved {path.name}"),
            self._tell,
        )

    def use_initial_layout(self) -> None:
        """Go to the layout that is proposed for the devices as they are now."""
        model, edit = self.document.model, self.document.edit
        if model is not None and edit is not None:
            self.document.set_layout(initial_layout(model, self.rig_keeper.rig, edit.context), "propose layout")

    def use_auto_layout(self, strategy: str) -> None:
        """Go to the layout that `strategy` finds for the devices as they are now, and say why it is so."""
        model, edit, rig = self.document.model, self.document.edit, self.rig_keeper.rig
        if model is None or edit is None:
            return

        def apply(found: AutoLayout) -> None:
            if self.document.model is model:
                self.document.replace(Edit(found.layout, found.context), f"auto layout {strategy}")
                self._say(found.explanation, bad=not found.fits)

        self.background.run(
            "Finding a layout", lambda: auto_layout(strategy, model, rig, edit.context), apply, self._tell
        )

    def _open(self, what: str, read: Callable[[], ModelFile], path: Path) -> None:
        """Read a model beside the GUI thread; of several asked for in quick succession the last one counts."""
        self._opening += 1
        number = self._opening

        def show(model: ModelFile) -> None:
            if number == self._opening:
                self._on_model_read(model)

        def failed(error: EngineError) -> None:
            if number == self._opening:
                if not path.exists():
                    self.settings.forget_recent_model(path)
                    self.recent_changed.emit()
                self._tell(error)

        self.background.run(what, read, show, failed)

    def _on_model_read(self, model: ModelFile) -> None:
        if model == self.loading.model and self.loading.model is not None:
            model = self.loading.model  # The same file, read again: what is loaded is still this.
        detail = f"{file_type_name(model)} · {format_bytes(model.size_bytes)} · {model.n_layers} layers"
        self.settings.add_recent_model(RecentModel(model.paths[0], model.name, detail))
        self.recent_changed.emit()
        context = _first_context(model)
        layout = initial_layout(model, self.rig_keeper.rig, context)
        self.document.open(model, self.rig_keeper.rig, Edit(layout, context))
        self.model_changed.emit(model)
        self._say(f"Opened {model.name}")

    def _on_samples(self) -> None:
        if self.loading.state is ModelState.READY and self.rig_keeper.holds_remote:
            self.loading.bridge.query_device_memory()

    def _on_rig_changed(self, rig: Rig) -> None:
        edit, model, before = self.document.edit, self.document.model, self.document.preview
        other_devices = before is not None and before.rig.ids != rig.ids
        untouched = self.document.is_untouched and self.loading.loaded is None
        if (
            other_devices
            and untouched
            and self.loading.state is ModelState.EMPTY
            and edit is not None
            and model is not None
        ):
            # Nobody has touched the proposal, and it was made for other devices.
            self.document.open(model, rig, Edit(initial_layout(model, rig, edit.context), edit.context))
        else:
            self.document.set_rig(rig)

    # ------------------------------------------------------------------ loading

    @property
    def is_edited(self) -> bool:
        """Whether the edited layout is not the loaded one."""
        edit, loaded = self.document.edit, self.loading.loaded
        if loaded is None or edit is None:
            return False
        return self.document.model is not self.loading.model or edit != Edit(loaded.layout, loaded.context)

    def load(self) -> None:
        """Load the edited layout; what is loaded is replaced, once the layout has been checked.

        An answer that is being written is stopped first.
        """
        model, preview = self.document.model, self.document.preview
        if model is None or preview is None or self.loading.is_busy:
            return
        obstacle = self._load_obstacle(preview)
        if obstacle:
            self._say(obstacle, bad=True)
            return
        self.prober.cancel()
        job = LoadJob(
            model=model, rig=preview.rig, layout=preview.layout, context=preview.context, forecast=preview.report.rows
        )
        self.loading.load(job, forecast_is_whole=preview.report.probe_only is None)

    def apply_proposal(self, index: int) -> None:
        """Change layout and settings to a proposal, as one step of undo; it is not loaded yet."""
        if index >= len(self.loading.proposals):
            return
        proposal, model = self.loading.proposals[index], self.loading.proposals_model
        if model is None or self.document.model is not model:
            name = model.name if model is not None else "another model"
            self._say(f"This proposal is for {name}; open that model first.", bad=True)
            return
        self.document.replace(Edit(proposal.layout, proposal.context), proposal.text)
        asked = "; the engine is asked now" if self.rig_keeper.is_real else ""
        self._say(f"{proposal.text}: {proposal.grade} to fit{asked}. Load to try it, Undo to go back.")

    def _load_obstacle(self, preview: Preview) -> str:
        """Return why `preview` cannot be loaded here, with a remedy; empty if it can be tried."""
        if preview.report.violations:
            first = preview.report.violations[0]
            return f"{first.message} {first.remedy}"
        used = {*preview.layout.devices, *split_members(preview.layout)}
        used |= {override.device for override in preview.layout.overrides}
        missing = [device for device in self.rig_keeper.missing_devices if device in used]
        if not missing:
            return ""
        return (
            f"This machine does not have {', '.join(missing)} of the rig file: the layout can be planned, not loaded. "
            "Devices > Refresh goes back to what is here."
        )

    def unload(self) -> None:
        """Free the loaded model."""
        if self.loading.unload():
            self._say("Unloaded")

    def stop_lab(self) -> None:
        """End the lab workers; a model that is on them is unloaded first."""
        if not self.rig_keeper.lab_endpoints.isdisjoint(self.rig_keeper.held_endpoints):
            self.loading.cancel()
            self.unload()
        self.rig_keeper.stop_lab()

    def _may_probe(self) -> bool:
        """A loaded model holds its workers, and devices of a rig file cannot be asked."""
        return self.loading.state is ModelState.EMPTY and self.rig_keeper.is_real

    # ------------------------------------------------------------------ telling

    def _tell(self, error: EngineError) -> None:
        self.notice.emit(Notice(error.summary()))

    def _say(self, text: str, *, bad: bool = False) -> None:
        self.notice.emit(Notice(text, bad))


def _first_context(model: ModelFile) -> ContextSettings:
    """Return our defaults, with the context no longer than the model was trained for."""
    trained = model.hyper_parameter("context_length")
    defaults = ContextSettings()
    if isinstance(trained, int) and 0 < trained < defaults.n_ctx:
        return ContextSettings(n_ctx=trained)
    return defaults
