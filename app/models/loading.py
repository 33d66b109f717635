"""One model's child, as the window sees it: its loads, its state, and what it holds."""

from __future__ import annotations

from dataclasses import dataclass

from PySide6.QtCore import QObject, Signal

from app.models.engine_bridge import EngineBridge
from app.rig.calibrator import Calibrator
from engine.base.language import tr
from engine.chat.answer import loss_words
from engine.model.gguf.model_file import ModelFile
from engine.planning.fit.proposal import Proposal
from engine.planning.plan.edit import Edit
from engine.planning.plan.preview import LoadedLayout
from engine.runtime.protocol.messages import (
    AnyModelRequest,
    CountTokens,
    Generate,
    RenderTemplate,
    RestoreSequence,
    SaveSequence,
    Tokenise,
)
from engine.runtime.session.events import Cancelled, Crashed, Done, Failed, Loaded, OutOfMemory
from engine.runtime.session.load_order import LoadOrder
from engine.runtime.session.snapshot import Snapshot
from engine.runtime.session.state import LoadedInfo
from engine.runtime.session.status import Fault, Phase

ENGINE_ENDED = tr("The engine ended in the middle of this answer: Last load says how.")
"""The report has all of it; beside an answer it would push the words away."""

_BESIDE = (CountTokens, RenderTemplate, RestoreSequence, SaveSequence, Tokenise)
"""Requests of ours that take a moment, and beside which a model may be asked."""


@dataclass(frozen=True, slots=True)
class StepBack:
    """What was asked for, and what was loaded instead because it did not fit."""

    asked: Edit
    loaded: Edit


@dataclass(frozen=True, slots=True)
class AnswerLost:
    """The answer to a request has no good end; the sentence says why."""

    request: int
    sentence: str


class Loading(QObject):
    """Shows the session of one model. Calls return at once; what becomes of them arrives as signals.

    Phase and what is loaded follow the session's snapshots, and are up to date when a call returns.
    """

    phase_changed = Signal(Phase)
    loaded_changed = Signal(object)  # LoadedLayout | None
    ended = Signal(object)  # OutOfMemory | Failed | Crashed | Cancelled: a load, or the child that was loaded
    held_changed = Signal()
    """It takes another amount of memory than before."""
    answered = Signal(Done)
    answer_lost = Signal(AnswerLost)
    stepped_back = Signal(StepBack)
    released = Signal()
    """The child holds nothing any more."""
    leaving = Signal()
    """What is loaded goes next: the last moment to ask it something."""
    lost_changed = Signal(bool)
    """Whether a model was lost that nobody unloaded, and which `reload` brings back."""

    def __init__(self, calibrator: Calibrator, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.bridge = EngineBridge(self)
        self.snapshot = Snapshot()
        """The latest that is shown."""
        self.phase = Phase.STOPPED
        """As `ModelStatus.phase`."""
        self.loaded: LoadedLayout | None = None
        self.model: ModelFile | None = None
        """The model that is loaded."""
        self.checkpoint_bytes = 0
        """What the child keeps of conversations whose memory cannot be cut back, beside what was measured."""
        self.proposals: tuple[Proposal, ...] = ()
        """What to change after the load that ran out of memory, if that is what became of the last one."""
        self.proposals_model: ModelFile | None = None
        self._calibrator = calibrator
        self._asked: LoadOrder | None = None
        """What the load that has not ended was asked to load."""
        self._held: LoadOrder | None = None
        """What was loaded last, for as long as nobody has replaced or unloaded it."""
        self._lost: LoadOrder | None = None
        self._has_crashed = False
        """Whether the last load, or the child that was loaded, ended by a crash of the engine."""
        self._connect()

    def _connect(self) -> None:
        bridge = self.bridge
        bridge.snapshot.connect(self._show)
        bridge.loaded.connect(self._on_loaded)
        for ended in (bridge.out_of_memory, bridge.failed, bridge.crashed, bridge.cancelled):
            ended.connect(self._on_ended)
        bridge.done.connect(self._on_done)

    def prepare_close(self) -> None:
        """Say that what is loaded goes, in the GUI thread; then `close`."""
        self._leave()

    def close(self) -> None:
        """End the child, waiting a bounded time; for any thread."""
        self.bridge.close()

    # ------------------------------------------------------------------ what is asked for

    @property
    def is_busy(self) -> bool:
        """Whether a load runs, waits or is being cancelled."""
        return self.phase in (Phase.LOADING, Phase.STOPPING)

    @property
    def fault(self) -> Fault:
        """Why the model is gone that `reload` brings back; empty if there is none."""
        if self._lost is None:
            return ""
        return "crashed" if self._has_crashed else "lost"

    @property
    def endpoints(self) -> frozenset[str]:
        """Workers that the child holds, or is about to."""
        loaded, pending = self.snapshot.loaded, self.snapshot.pending
        held = frozenset() if loaded is None else frozenset(loaded.order.plan.used_endpoints)
        return held if pending is None else held | pending.order.possible_endpoints()

    @property
    def has_child(self) -> bool:
        """Whether there is a process, be it one that is ending."""
        return self.bridge.session.snapshot.holds_child

    def load(self, order: LoadOrder, *, forecast_is_whole: bool = True) -> None:
        """Load `order`; what is loaded is replaced once the layout has been checked. An answer is stopped first.

        `forecast_is_whole`: whether the arithmetic knows all of it, so that a load tells what it left out.
        """
        if self.is_busy:
            return
        if order is not self._lost:
            self._set_lost(None)
        self._leave()
        self._asked = order
        self._calibrator.begin(nothing_loaded=self.loaded is None, forecast_is_whole=forecast_is_whole)
        self.bridge.session.load(order)
        self._show_now()

    def reload(self) -> None:
        """Load what was lost as it was; nothing where nothing was lost."""
        if self._lost is not None:
            self.load(self._lost, forecast_is_whole=False)

    def cancel(self) -> None:
        """End the load that runs or waits."""
        if self.phase is Phase.LOADING:
            self.bridge.session.stop()
            self._show_now()

    def unload(self) -> bool:
        """Free the loaded model; return whether there was one."""
        if self.phase not in (Phase.READY, Phase.ANSWERING):
            return False
        self._leave()
        requests = self.snapshot.requests
        self._held = None
        self.bridge.session.unload()
        for run in (each for each in requests if not isinstance(each.request, _BESIDE)):
            self.answer_lost.emit(AnswerLost(run.id, tr("The model was unloaded.")))
        self._show_now()
        return True

    def ask(self, request: AnyModelRequest) -> int:
        """Ask something and return its number; the bridge tells what is answered. Raises as `generate` does."""
        number = self.bridge.session.ask(request)
        self._show_now()
        return number

    def generate(self, request: Generate) -> int:
        """Begin an answer and return its number: tokens come from the bridge, then `answered` or `answer_lost`.

        Raises:
            ArgumentError: when the child was lost a moment ago; the event that says so is on its way.
        """
        return self.ask(request)

    def stop_answer(self) -> None:
        """End the answers that are being written; what is there stays."""
        if self.phase is Phase.ANSWERING:
            self.bridge.session.stop()

    # ------------------------------------------------------------------ what becomes of it

    def _leave(self) -> None:
        if self.phase in (Phase.READY, Phase.ANSWERING):
            self.leaving.emit()

    def _show_now(self) -> None:
        """Show how the session stands now; snapshots that are still on their way tell nothing new then."""
        self._show(self.bridge.session.snapshot)

    def _show(self, snapshot: Snapshot) -> None:
        if snapshot.number < self.snapshot.number:
            return
        before, self.snapshot = self.snapshot, snapshot
        # Changed before any signal: no slot may see a model that is ready and holds nothing.
        phase_before, self.phase = self.phase, _phase_of(snapshot)
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
            self.model = info.order.plan.model
            self.loaded = LoadedLayout(
                info.order.plan.edit, info.measured, info.forecast, info.context, info.flash_attention
            )
        self.loaded_changed.emit(self.loaded)

    def _on_loaded(self, event: Loaded) -> None:
        asked, self._asked = self._asked, None
        info = self.snapshot.loaded
        if asked is None or info is None:
            return  # Lost again, which is told next.
        self._set_lost(None)
        self._held = info.order
        plan = info.order.plan
        self._calibrator.finish(plan.rig, event)
        if plan.edit != asked.plan.edit:
            self.stepped_back.emit(StepBack(asked.plan.edit, plan.edit))

    def _on_ended(self, event: OutOfMemory | Failed | Crashed | Cancelled) -> None:
        """A load or an answer ended badly, or the child was lost. What was loaded before may still be there."""
        if event.request is not None:
            self.answer_lost.emit(
                AnswerLost(event.request, ENGINE_ENDED if isinstance(event, Crashed) else loss_words(event))
            )
            if self.snapshot.loaded is not None or self.snapshot.is_unloading or isinstance(event, Cancelled):
                return  # It is about a request only, and was told there.
        self._tell_end(event)

    def _tell_end(self, event: OutOfMemory | Failed | Crashed | Cancelled) -> None:
        asked = None
        self._has_crashed = isinstance(event, Crashed)
        if event.request is None:
            asked, self._asked = self._asked, None
        self.proposals = self.snapshot.proposals
        self.proposals_model = None if asked is None else asked.plan.model
        self.ended.emit(event)
        if self.snapshot.loaded is None:
            held, self._held = self._held, None
            self._set_lost(self._lost if asked is not None or self._asked is not None else held or self._lost)

    def forget_lost(self) -> None:
        """Forget the model that was lost: another file takes its place."""
        self._held, self._has_crashed = None, False
        self._set_lost(None)

    def _set_lost(self, order: LoadOrder | None) -> None:
        self._lost = order
        self.lost_changed.emit(order is not None)


def _loaded_of(snapshot: Snapshot) -> LoadedInfo | None:
    """What is loaded and stays: what is being unloaded is no reason not to load it again."""
    return None if snapshot.is_unloading else snapshot.loaded


def _phase_of(snapshot: Snapshot) -> Phase:
    if snapshot.pending is not None:
        return Phase.STOPPING if snapshot.pending.cancelled else Phase.LOADING
    if snapshot.is_unloading:
        return Phase.STOPPED
    if not all(isinstance(run.request, _BESIDE) for run in snapshot.requests):
        return Phase.ANSWERING
    return Phase.READY if snapshot.loaded is not None else Phase.STOPPED
