"""The session of one model as a Qt object: its loads, its phase, its loaded layout, and requests to it."""

from __future__ import annotations

from msgspec import Struct
from PySide6.QtCore import QObject, Signal

from app.models.engine_bridge import EngineBridge
from app.rig.calibrator import Calibrator
from engine.base.language import tr
from engine.chat.answer import loss_text
from engine.model.gguf.model_file import ModelFile
from engine.planning.fit.proposal import Proposal
from engine.planning.plan.edit import Edit
from engine.planning.plan.preview import LoadedLayout
from engine.runtime.protocol.requests import (
    AnyModelRequest,
    CountTokens,
    Generate,
    RenderTemplate,
    RestoreSequence,
    SaveSequence,
    Tokenise,
)
from engine.runtime.session.events import Cancelled, Crashed, Done, Failed, Loaded, OutOfMemory
from engine.runtime.session.load_spec import LoadSpec
from engine.runtime.session.snapshot import Snapshot
from engine.runtime.session.state import LoadedInfo
from engine.runtime.session.status import LossKind, Phase

ENGINE_ENDED = tr("The engine ended during this answer. Details are under Last load.")
"""Text below an answer during which the child crashed; the load report has the whole message."""

_SHORT_REQUESTS = (CountTokens, RenderTemplate, RestoreSequence, SaveSequence, Tokenise)
"""Requests of the window that take only a moment. While only such requests run, the model is shown as ready."""


class StepBack(Struct, frozen=True):
    """A load of another layout, because the requested one did not fit.

    `asked`, `loaded`: the edits (layout and settings) that were requested and loaded.
    """

    asked: Edit
    loaded: Edit


class RequestLost(Struct, frozen=True):
    """The failure of a request to the loaded model.

    `request`: number of the request. `sentence`: the reason, for people.
    `kind`: kind of the error that the model's child reported (`Failed.kind`); empty for other failures.
    `goes_on`: whether the model is loaded again with another layout, and then continues the answer.
    """

    request: int
    sentence: str
    kind: str = ""
    goes_on: bool = False


class Loading(QObject):
    """The session of one model, for the GUI thread. Calls do not block; results arrive as signals.

    A session (`ModelSession`) owns the child process that loads the model and answers requests. It publishes its state
    as snapshots. `phase` and `loaded` have the values of the newest snapshot. `load`, `cancel`, `unload` and `ask`
    update both before they return.
    """

    phase_changed = Signal(Phase)
    loaded_changed = Signal(object)  # LoadedLayout | None
    ended = Signal(object)  # OutOfMemory | Failed | Crashed | Cancelled: a load, or the child that was loaded
    held_changed = Signal()
    """Emitted when the amount of memory that the model uses has changed."""
    answered = Signal(Done)
    request_lost = Signal(RequestLost)
    stepped_back = Signal(StepBack)
    released = Signal()
    """Emitted when `phase` becomes `STOPPED`: the model uses no memory any more, or is being unloaded."""
    leaving = Signal()
    """Emitted before the loaded model is replaced or unloaded. Requests to it are still possible."""
    lost_changed = Signal(bool)
    """Emitted when `reload` becomes possible (True) or impossible (False).

    A reload is possible for a lost model: its child ended although the model was not unloaded.
    """

    def __init__(self, calibrator: Calibrator, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.bridge = EngineBridge(self)
        self.snapshot = Snapshot()
        """The newest snapshot (public state) of the session."""
        self.phase = Phase.STOPPED
        """The phase of the model: stopped, loading, cancelling, ready or answering."""
        self.loaded: LoadedLayout | None = None
        self.last_loaded: LoadedLayout | None = None
        """The layout of the last successful load, also after the model was unloaded; None before the first one."""
        self.model: ModelFile | None = None
        """The loaded model; None if none is loaded."""
        self.checkpoint_bytes = 0
        """Bytes of the child's checkpoints, which the measured numbers of `loaded` do not include."""
        self.proposals: tuple[Proposal, ...] = ()
        """Changes of the layout or settings that should fit, if the last load ran out of memory."""
        self.proposals_model: ModelFile | None = None
        self.short_bytes = 0
        """Missing bytes on the device that ran out of memory in the last load, according to the forecast.

        0 if no load ran out of memory, or if the forecast found enough memory.
        """
        self._calibrator = calibrator
        self._asked: LoadSpec | None = None
        """The load spec of the running load; None if none runs."""
        self._held: LoadSpec | None = None
        """The load spec of the last successful load; None after an unload."""
        self._lost: LoadSpec | None = None
        self.steps_back = False
        """Whether the model was lost because memory ran out, so that `reload` tries other layouts."""
        self._has_crashed = False
        """Whether the last load, or the loaded model's child, ended with a crash of the engine."""
        self._has_question = False
        """Whether the window's chat waits for an answer, perhaps before its request is sent."""
        self._own: frozenset[int] = frozenset()
        """Numbers of requests of the window. Requests with other numbers came from clients of the API server, which
        uses the same session."""
        self._connect()

    def _connect(self) -> None:
        bridge = self.bridge
        bridge.snapshot.connect(self._show)
        bridge.loaded.connect(self._on_loaded)
        for ended in (bridge.out_of_memory, bridge.failed, bridge.crashed, bridge.cancelled):
            ended.connect(self._on_ended)
        bridge.done.connect(self._on_done)
        bridge.need_found.connect(self._calibrator.learn_need)

    def prepare_close(self) -> None:
        """Emit `leaving` if a model is loaded, so that its KV state is saved.

        Called in the GUI thread before `close`.
        """
        self._leave()

    def close(self) -> None:
        """End the session and its child within a bounded time. May be called in any thread."""
        self.bridge.close()

    # ------------------------------------------------------------------ what is asked for

    @property
    def is_busy(self) -> bool:
        """Whether a load of this model runs, waits or is being cancelled."""
        return self.phase in (Phase.LOADING, Phase.STOPPING)

    @property
    def fault(self) -> LossKind:
        """How the model was lost: "crashed" if the engine crashed, else "lost"; empty if no model was lost."""
        if self._lost is None:
            return ""
        return "crashed" if self._has_crashed else "lost"

    @property
    def endpoints(self) -> frozenset[str]:
        """Endpoints of RPC workers that the child uses, or that the running load may use."""
        loaded, pending = self.snapshot.loaded, self.snapshot.pending
        held = frozenset() if loaded is None else frozenset(loaded.spec.plan.used_endpoints)
        return held if pending is None else held | pending.spec.possible_endpoints()

    @property
    def is_saving(self) -> bool:
        """Whether KV states of the model are being saved."""
        return any(isinstance(run.request, SaveSequence) for run in self.bridge.session.snapshot.requests)

    def stop_saving(self) -> None:
        """Stop saving KV states of the model; unfinished ones are lost."""
        for run in self.bridge.session.snapshot.requests:
            if isinstance(run.request, SaveSequence):
                self.bridge.session.stop(run.id)

    @property
    def has_child(self) -> bool:
        """Whether a child process exists, running or exiting."""
        return self.bridge.session.snapshot.holds_child

    def load(self, spec: LoadSpec, *, forecast_is_whole: bool = True) -> None:
        """Load the plan of `spec` in the model's child process.

        A running answer is stopped. The loaded model is replaced after the new layout has been checked.
        `forecast_is_whole`: whether the forecast covers all memory. Only then are memory overheads of devices measured.
        """
        if self.is_busy:
            return
        # Loading anything else means that the lost model is not wanted back.
        if spec is not self._lost:
            self._set_lost(None)
        self._leave()
        # Kept until the load ends, to compare it with what was loaded.
        self._asked = spec
        self._calibrator.begin(nothing_loaded=self.loaded is None, forecast_is_whole=forecast_is_whole)
        self.bridge.session.load(spec)
        self._show_now()

    def reload(self) -> None:
        """Load the model that was lost, for example by a crash, again with its last `LoadSpec`.

        Do nothing if no model was lost.
        """
        if self._lost is not None:
            self.load(self._lost, forecast_is_whole=False)

    def cancel(self) -> None:
        """Cancel this model's load, whether it runs or still waits."""
        if self.phase is Phase.LOADING:
            self.bridge.session.stop()
            self._show_now()

    def unload(self) -> bool:
        """Unload the model; return whether one was loaded."""
        if not self.phase.is_loaded:
            return False
        self._leave()
        requests = self.snapshot.requests
        self._held = None
        self.bridge.session.unload()
        # Reported at once: the session's own events of these requests arrive later.
        for run in (each for each in requests if not isinstance(each.request, _SHORT_REQUESTS)):
            self.request_lost.emit(RequestLost(run.id, tr("The model was unloaded.")))
        self._show_now()
        return True

    def ask(self, request: AnyModelRequest) -> int:
        """Send a request to the child and return the request's number. `EngineBridge` emits its result as a signal.

        Raises:
            ArgumentError: the model cannot accept requests, for example because its child has just died.
        """
        number = self.bridge.session.ask(request)
        self._own |= {number}
        self._show_now()
        return number

    def generate(self, request: Generate) -> int:
        """Request an answer and return the number of the request.

        `EngineBridge` emits the tokens as signals. When the answer ends, `answered` or `request_lost` is emitted.

        Raises:
            ArgumentError: the model cannot accept requests, for example because its child has just died.
        """
        return self.ask(request)

    def set_question(self, is_open: bool) -> None:
        """Set whether the window's chat waits for an answer of this model.

        The request for the answer is sent later, for example after a saved KV state was restored. The model counts as
        answering meanwhile, so that its keep-alive time does not run and the answer can be stopped.
        """
        self._has_question = is_open
        self._show(self.snapshot)

    def stop_answer(self) -> None:
        """Stop the answers of the window; if there are none, the answers of the API server.

        The text of the answers until then is not lost.
        """
        if self.phase is not Phase.ANSWERING:
            return
        answers = {run.id for run in self.snapshot.requests if not isinstance(run.request, _SHORT_REQUESTS)}
        if answers <= self._own or not answers & self._own:
            self.bridge.session.stop()
            return
        for number in answers & self._own:
            self.bridge.session.stop(number)

    def stop_requests_of_programs(self) -> None:
        """Stop the requests that came through the API server. Answers of the window continue."""
        for run in self.bridge.session.snapshot.requests:
            if run.id not in self._own:
                self.bridge.session.stop(run.id)

    # ------------------------------------------------------------------ what becomes of it

    def _leave(self) -> None:
        if self.phase.is_loaded:
            self.leaving.emit()

    def _show_now(self) -> None:
        """Take over the session's newest snapshot at once: update `phase` and `loaded`, and emit signals of changes.

        Older snapshots that arrive later are ignored.
        """
        self._show(self.bridge.session.snapshot)

    def _show(self, snapshot: Snapshot) -> None:
        # Snapshots are queued; `_show_now` may have shown a newer one already.
        if snapshot.number < self.snapshot.number:
            return
        before, self.snapshot = self.snapshot, snapshot
        self._own &= {run.id for run in snapshot.requests}
        # Both attributes change before any signal: no slot may see a ready model without a loaded layout.
        phase_before, self.phase = self.phase, _phase_of(snapshot, has_question=self._has_question)
        if _loaded_of(snapshot) is not _loaded_of(before):
            self._show_loaded(_loaded_of(snapshot))
        if self.phase is phase_before:
            return
        if self.phase is Phase.STOPPED:
            self._calibrator.forget()
        self.phase_changed.emit(self.phase)
        if self.phase is Phase.STOPPED:
            self.released.emit()

    def _on_done(self, event: Done) -> None:
        if self.checkpoint_bytes != event.checkpoint_bytes:
            self.checkpoint_bytes = event.checkpoint_bytes
            self.held_changed.emit()
        self.answered.emit(event)

    def _show_loaded(self, info: LoadedInfo | None) -> None:
        self.checkpoint_bytes = 0
        if info is None:
            self.loaded = self.model = None
        else:
            self.model = info.spec.plan.model
            self.loaded = LoadedLayout(
                info.spec.plan.edit,
                info.measured,
                info.forecast,
                info.context,
                info.flash_attention,
                info.elsewhere,
            )
            self.last_loaded = self.loaded
        self.loaded_changed.emit(self.loaded)

    def _on_loaded(self, event: Loaded) -> None:
        asked, self._asked = self._asked, None
        info = self.snapshot.loaded
        if asked is None or info is None:
            return  # It was lost again; that event comes next.
        self._set_lost(None)
        self._held = info.spec
        plan = info.spec.plan
        self._calibrator.finish(plan.rig, event)
        if plan.edit != asked.plan.edit:
            self.stepped_back.emit(StepBack(asked.plan.edit, plan.edit))

    def _on_ended(self, event: OutOfMemory | Failed | Crashed | Cancelled) -> None:
        """Handle the failure of a load or request, or the loss of the child.

        After a failed load, the model that was loaded before may still be loaded.
        """
        if event.request is not None:
            sentence = ENGINE_ENDED if isinstance(event, Crashed) else loss_text(event)
            kind = event.kind if isinstance(event, Failed) else ""
            self.request_lost.emit(RequestLost(event.request, sentence, kind, self._goes_on(event)))
            if self.snapshot.loaded is not None or self.snapshot.is_unloading or isinstance(event, Cancelled):
                return  # Only the request failed; the model stays loaded.
        self._emit_end(event)

    def _goes_on(self, event: OutOfMemory | Failed | Crashed | Cancelled) -> bool:
        """Return whether `event` says that the loaded model ran out of memory, and other layouts may be tried."""
        was_loaded = isinstance(event, OutOfMemory) and self._asked is None and self.snapshot.loaded is None
        return was_loaded and self._held is not None and self._held.retry.retries > 0

    def _emit_end(self, event: OutOfMemory | Failed | Crashed | Cancelled) -> None:
        asked = None
        self._has_crashed = isinstance(event, Crashed)
        self.steps_back = self._goes_on(event)
        if event.request is None:
            asked, self._asked = self._asked, None
        self.proposals = self.snapshot.proposals
        # Proposals after an answer are for the model that was loaded.
        failed = asked or (self._held if isinstance(event, OutOfMemory) else None)
        self.proposals_model = None if failed is None else failed.plan.model
        self.short_bytes = 0
        if asked is not None and isinstance(event, OutOfMemory):
            row = next((row for row in asked.plan.forecast if row.id == event.device), None)
            self.short_bytes = row.shortfall_bytes if row is not None and row.is_short else 0
        self.ended.emit(event)
        if self.snapshot.loaded is None:
            held, self._held = self._held, None
            self._set_lost(self._lost if asked is not None or self._asked is not None else held or self._lost)

    def forget_lost(self) -> None:
        """Forget the model that was lost, for example by a crash, so that `reload` does nothing.

        Called when another file takes its place in the window.
        """
        self._held, self._has_crashed, self.last_loaded = None, False, None
        self._set_lost(None)

    def _set_lost(self, spec: LoadSpec | None) -> None:
        self._lost = spec
        self.lost_changed.emit(spec is not None)


def _loaded_of(snapshot: Snapshot) -> LoadedInfo | None:
    """Return the loaded model of `snapshot`; None if no model is loaded, or if it is being unloaded."""
    return None if snapshot.is_unloading else snapshot.loaded


def _phase_of(snapshot: Snapshot, *, has_question: bool) -> Phase:
    if snapshot.pending is not None:
        return Phase.STOPPING if snapshot.pending.cancelled else Phase.LOADING
    # Shown as stopped at once: the process may take seconds to end.
    if snapshot.is_unloading:
        return Phase.STOPPED
    # A short request must not flicker between ready and answering.
    if not all(isinstance(run.request, _SHORT_REQUESTS) for run in snapshot.requests):
        return Phase.ANSWERING
    if snapshot.loaded is None:
        return Phase.STOPPED
    return Phase.ANSWERING if has_question else Phase.READY
