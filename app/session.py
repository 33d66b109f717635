"""The load and chat session: what the window's actions mean, and what became of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Literal

from PySide6.QtCore import QObject, QTimer, Signal

from app.background import Background
from app.calibrator import Calibrator
from app.demo import ensure_demo
from app.document import Edit, LayoutDocument
from app.engine_bridge import EngineBridge
from app.rig_keeper import RigKeeper
from app.settings import Settings, demo_path
from app.status_line import Notice
from engine.devices.device import Rig
from engine.errors import EngineError, LayoutError
from engine.fit.initial_layout import initial_layout
from engine.fit.preview import LoadedLayout, Preview
from engine.fit.proposals import Proposal
from engine.fit.report import FitReport
from engine.fit.strategies.catalogue import auto_layout
from engine.fit.strategies.constraints import AutoLayout
from engine.gguf.file_type import file_type_name
from engine.gguf.model_file import ModelFile
from engine.gguf.reader import read_model
from engine.layout.context_settings import ContextSettings
from engine.layout.engine_parameters import split_members
from engine.layout.layout_file import LayoutFile, read_layout, write_layout
from engine.runner.client import LoadJob
from engine.runner.events import Cancelled, Crashed, Done, Failed, Loaded, OutOfMemory, Progress, Token
from engine.runner.probe import ProbeRun
from engine.runner.probe_cache import ProbeCache
from engine.runner.protocol import ChatMessage, Generate
from engine.units import MIB, format_bytes
from widgets.library.recent_model import RecentModel

_log = logging.getLogger("layerdeck.session")

PROBE_PAUSE_MS = 500
"""A probe starts when nothing was edited for this long."""
DEMO_LAB_CAPS = (256 * MIB, 256 * MIB, 512 * MIB)


class SessionState(Enum):
    """What the child of the loaded model does."""

    EMPTY = auto()
    LOADING = auto()
    READY = auto()
    GENERATING = auto()
    STOPPING = auto()


@dataclass(frozen=True, slots=True)
class ContextUse:
    """Tokens of the loaded context; `used` None when nothing was said yet."""

    used: int | None
    total: int | None


class Session(QObject):
    """Owns document, rig, child and conversation. What waits happens elsewhere; answers arrive as signals."""

    model_changed = Signal(object)  # ModelFile | None
    recent_changed = Signal()
    state_changed = Signal(SessionState)
    loaded_changed = Signal(object)  # LoadedLayout | None
    ended = Signal(object)  # OutOfMemory | Failed | Crashed | Cancelled: a load, an answer, or the idle child
    notice = Signal(Notice)
    answer_started = Signal(str)
    answer_text = Signal(str)
    answer_finished = Signal(Done)
    answer_failed = Signal(str)
    context_use_changed = Signal(ContextUse)
    conversation_cleared = Signal()

    def __init__(self, settings: Settings, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.settings = settings
        self.background = Background(self)
        self.document = LayoutDocument(self)
        self.rig_keeper = RigKeeper(self.background, self)
        self.bridge = EngineBridge(self)
        self.calibrator = Calibrator(self.rig_keeper, self.background, parent=self)
        self.state = SessionState.EMPTY
        self.loaded: LoadedLayout | None = None
        self.loaded_model: ModelFile | None = None
        self.proposals: tuple[Proposal, ...] = ()
        """What to change after the load that ran out of memory, if that is what became of the last one."""
        self._proposals_model: ModelFile | None = None
        self._pending: LoadJob | None = None
        self._probe: ProbeRun | None = None
        self._probe_cache = ProbeCache()
        self._messages: list[ChatMessage] = []
        self._answer: list[str] = []
        self._discard_answer = False
        self._load_wanted = False
        self._orphans = 0
        """Endings still to come of answers that were given up with their model: nobody waits for them."""
        self._opening = 0
        self._probe_timer = QTimer(self)
        self._probe_timer.setSingleShot(True)
        self._probe_timer.setInterval(PROBE_PAUSE_MS)
        self._probe_timer.timeout.connect(self._start_probe)
        self._connect()

    def _connect(self) -> None:
        self.rig_keeper.rig_changed.connect(self._on_rig_changed)
        self.rig_keeper.failed.connect(self._tell)
        self.rig_keeper.said.connect(self._say)
        self.rig_keeper.samples_arrived.connect(self._on_samples)
        self.bridge.device_memory.connect(self.rig_keeper.show_engine_memory)
        self.document.edit_settled.connect(self._probe_timer.start)
        bridge = self.bridge
        bridge.loaded.connect(self._on_loaded)
        bridge.progress.connect(self._on_progress)
        for ended in (bridge.out_of_memory, bridge.failed, bridge.crashed, bridge.cancelled):
            ended.connect(self._on_ended)
        bridge.token.connect(self._on_token)
        bridge.done.connect(self._on_done)

    def close(self) -> None:
        """End every process and thread of ours. Bounded; called once, when the window closes."""
        self._probe_timer.stop()
        self.background.close()
        self._cancel_probe()
        self.bridge.close()
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
        if model == self.loaded_model and self.loaded_model is not None:
            model = self.loaded_model  # The same file, read again: what is loaded is still this.
        detail = f"{file_type_name(model)} · {format_bytes(model.size_bytes)} · {model.n_layers} layers"
        self.settings.add_recent_model(RecentModel(model.paths[0], model.name, detail))
        self.recent_changed.emit()
        context = _first_context(model)
        layout = initial_layout(model, self.rig_keeper.rig, context)
        self.document.open(model, self.rig_keeper.rig, Edit(layout, context))
        self.model_changed.emit(model)
        self._say(f"Opened {model.name}")

    def _on_samples(self) -> None:
        if self.state is SessionState.READY and self.rig_keeper.holds_remote:
            self.bridge.query_device_memory()

    def _on_rig_changed(self, rig: Rig) -> None:
        edit, model, before = self.document.edit, self.document.model, self.document.preview
        other_devices = before is not None and before.rig.ids != rig.ids
        untouched = self.document.undo_stack.count() == 0 and self.loaded is None
        if other_devices and untouched and self.state is SessionState.EMPTY and edit is not None and model is not None:
            # Nobody has touched the proposal, and it was made for other devices.
            self.document.open(model, rig, Edit(initial_layout(model, rig, edit.context), edit.context))
        else:
            self.document.set_rig(rig)

    # ------------------------------------------------------------------ loading

    @property
    def is_edited(self) -> bool:
        """Whether the edited layout is not the loaded one."""
        edit = self.document.edit
        if self.loaded is None or edit is None:
            return False
        same_model = self.document.model is self.loaded_model
        return not same_model or edit != Edit(self.loaded.layout, self.loaded.context)

    def load(self) -> None:
        """Load the edited layout; what is loaded is replaced, once the layout has been checked.

        An answer that is being written is stopped first.
        """
        model, preview = self.document.model, self.document.preview
        if model is None or preview is None or self.state in (SessionState.LOADING, SessionState.STOPPING):
            return
        obstacle = self._load_obstacle(preview)
        if obstacle:
            self._say(obstacle, bad=True)
            return
        if self.state is SessionState.GENERATING:
            self._load_wanted = True
            self.stop_answer()
            return
        self._cancel_probe()
        self._pending = LoadJob(
            model=model, rig=preview.rig, layout=preview.layout, context=preview.context, forecast=preview.report.rows
        )
        self._set_state(SessionState.LOADING)
        whole = preview.report.probe_only is None
        self.calibrator.begin(nothing_loaded=self.loaded is None, forecast_is_whole=whole)
        self.rig_keeper.set_held_endpoints(preview.rig, preview.layout)
        self.bridge.load(self._pending)

    def apply_proposal(self, index: int) -> None:
        """Change layout and settings to a proposal, as one step of undo; it is not loaded yet."""
        if index >= len(self.proposals):
            return
        proposal, model = self.proposals[index], self._proposals_model
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

    def cancel(self) -> None:
        """End the load that is running."""
        if self.state is SessionState.LOADING:
            self._set_state(SessionState.STOPPING)
            self.bridge.stop()

    def unload(self) -> None:
        """Free the loaded model."""
        if self.state in (SessionState.READY, SessionState.GENERATING):
            if self.state is SessionState.GENERATING:
                self._end_answer("The model was unloaded.")
                self._orphans += 1
            self.bridge.unload()
            self._forget_child()
            self._say("Unloaded")

    def stop_lab(self) -> None:
        """End the lab workers; a model that is on them is unloaded first."""
        if not self.rig_keeper.lab_endpoints.isdisjoint(self.rig_keeper.held_endpoints):
            self.cancel()
            self.unload()
        self.rig_keeper.stop_lab()

    def _on_loaded(self, event: Loaded) -> None:
        job, self._pending = self._pending, None
        if job is None:
            return
        self._set_loaded(LoadedLayout(job.layout, job.context, event.devices, event.forecast), job.model)
        self._set_state(SessionState.READY)
        self.calibrator.finish(job, event)
        self.context_use_changed.emit(ContextUse(0, self.bridge.runner.context_size or job.context.n_ctx))

    def _on_progress(self, event: Progress) -> None:
        if event.stage == "allocate" and self.loaded is not None:
            self._set_loaded(None, None)

    def _on_ended(self, event: OutOfMemory | Failed | Crashed | Cancelled) -> None:
        """A load or a generation ended badly, or the idle child was lost. What was loaded before may still be there."""
        if self._is_orphan():
            return
        self._load_wanted = False
        self.proposals = self.bridge.runner.proposals
        self._proposals_model = self._pending.model if self._pending is not None else None
        still_loaded = self.loaded is not None and self.bridge.runner.is_ready
        if not (still_loaded and self.state is SessionState.GENERATING):
            self.ended.emit(event)  # Else it is about an answer only, and is told there.
        if self.state is SessionState.GENERATING and not isinstance(event, Cancelled):
            self._end_answer(event.message)
        self._pending = None
        if still_loaded:
            self._set_state(SessionState.READY)
        else:
            self._forget_child()

    def _is_orphan(self) -> bool:
        orphan = self._orphans > 0
        self._orphans -= orphan
        return orphan

    def _forget_child(self) -> None:
        self.calibrator.forget()
        self._set_loaded(None, None)
        self._set_state(SessionState.EMPTY)
        self._release()

    def _release(self) -> None:
        self.rig_keeper.release_endpoints()
        self.context_use_changed.emit(ContextUse(None, None))
        self._probe_timer.start()

    def _set_loaded(self, loaded: LoadedLayout | None, model: ModelFile | None) -> None:
        self.loaded, self.loaded_model = loaded, model
        self.rig_keeper.set_measured(loaded.measured if loaded is not None else ())
        self.loaded_changed.emit(loaded)

    def _set_state(self, state: SessionState) -> None:
        self.state = state
        self.state_changed.emit(state)

    # ------------------------------------------------------------------ probing

    def _start_probe(self) -> None:
        edit, model, preview = self.document.edit, self.document.model, self.document.preview
        if edit is None or model is None or preview is None or self.document.is_dragging or preview.report.violations:
            return
        if self.state is not SessionState.EMPTY or not self.rig_keeper.is_real:
            return
        self._cancel_probe()
        run = self._probe = ProbeRun(model, preview.rig, edit.layout, edit.context, self._probe_cache)

        def show(report: FitReport) -> None:
            if self._probe is run:
                self._probe = None
                self.document.show_probed(edit, report)

        def skip(error: EngineError) -> None:
            if self._probe is run:
                self._probe = None
                _log.info("probe: %s", error.summary())

        self.background.run("probe", run.run, show, skip, quiet=True)

    def _cancel_probe(self) -> None:
        run, self._probe = self._probe, None
        if run is not None:
            run.cancel()

    # ------------------------------------------------------------------ chat

    def send(self, text: str) -> None:
        """Answer `text` in the conversation so far."""
        if self.state is not SessionState.READY or self.loaded_model is None:
            return
        self._messages.append(ChatMessage(role="user", content=text))
        self._answer = []
        self._discard_answer = False
        self._set_state(SessionState.GENERATING)
        self.answer_started.emit(self.loaded_model.name)
        try:
            self.bridge.generate(Generate(messages=tuple(self._messages)))
        except EngineError as error:
            # The child was lost a moment ago; the event that says so is on its way.
            self._end_answer(error.summary())
            self._set_state(SessionState.READY)

    def stop_answer(self) -> None:
        """End the answer that is being written; what is there stays."""
        if self.state is SessionState.GENERATING:
            self.bridge.stop()

    def clear_conversation(self) -> None:
        """Forget the conversation; a running answer ends first."""
        self._discard_answer = self.state is SessionState.GENERATING
        self.stop_answer()
        self._messages.clear()
        self._answer.clear()
        self.conversation_cleared.emit()
        if self.state is SessionState.READY:
            self.context_use_changed.emit(ContextUse(0, self.bridge.runner.context_size))

    def restore_conversation(self, messages: tuple[tuple[Literal["user", "assistant"], str], ...]) -> None:
        """Go on with a conversation that had been cleared."""
        self._messages = [ChatMessage(role=role, content=text) for role, text in messages]

    def _on_token(self, event: Token) -> None:
        if self._discard_answer or self.state is not SessionState.GENERATING:
            return
        self._answer.append(event.text)
        self.answer_text.emit(event.text)

    def _on_done(self, event: Done) -> None:
        if self._is_orphan():
            return
        self._keep_answer()
        self._set_state(SessionState.READY)
        used = 0
        if not self._discard_answer:
            self.answer_finished.emit(event)
            used = self.bridge.runner.context_used or 0
        self.context_use_changed.emit(ContextUse(used, self.bridge.runner.context_size))
        if self._load_wanted:
            self._load_wanted = False
            self.load()

    def _end_answer(self, message: str) -> None:
        """Take the question back: what came of the answer stays on the screen, not in the conversation."""
        self._answer = []
        if self._messages and self._messages[-1].role == "user":
            self._messages.pop()
        if not self._discard_answer:
            self.answer_failed.emit(message)

    def _keep_answer(self) -> None:
        """Make the answer so far part of the conversation; a question without any answer is taken back."""
        text = "".join(self._answer)
        self._answer = []
        if text and self._messages:
            self._messages.append(ChatMessage(role="assistant", content=text))
        elif self._messages and self._messages[-1].role == "user":
            self._messages.pop()

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
