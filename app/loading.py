"""One model's child: its loads, its state, and what it holds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from PySide6.QtCore import QObject, Signal

from app.calibrator import Calibrator
from app.engine_bridge import EngineBridge
from engine.fit.preview import LoadedLayout
from engine.fit.proposals import Proposal
from engine.gguf.model_file import ModelFile
from engine.plan.edit import Edit
from engine.runner.client import LoadOrder, RunnerState
from engine.runner.events import Cancelled, Crashed, Done, Failed, Loaded, OutOfMemory, Progress
from engine.runner.protocol import Generate

ENGINE_ENDED = "The engine ended in the middle of this answer: Last load says how."
"""The report has all of it; beside an answer it would push the words away."""


class ModelState(Enum):
    """What the child of a model does."""

    EMPTY = auto()
    LOADING = auto()
    READY = auto()
    GENERATING = auto()
    STOPPING = auto()


@dataclass(frozen=True, slots=True)
class StepBack:
    """What was asked for, and what was loaded instead because it did not fit."""

    asked: Edit
    loaded: Edit


class Loading(QObject):
    """Owns the bridge to a child. Calls return at once; what becomes of them arrives as signals, in the GUI thread."""

    state_changed = Signal(ModelState)
    loaded_changed = Signal(object)  # LoadedLayout | None
    ended = Signal(object)  # OutOfMemory | Failed | Crashed | Cancelled: a load, or the idle child
    answered = Signal(Done)
    answer_lost = Signal(str)
    """The answer that was being written has no good end: the sentence says why."""
    stepped_back = Signal(StepBack)
    released = Signal()
    """The child holds nothing any more."""
    lost_changed = Signal(bool)
    """Whether a model was lost that nobody unloaded, and which `reload` brings back."""

    def __init__(self, calibrator: Calibrator, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.bridge = EngineBridge(self)
        self.state = ModelState.EMPTY
        self.loaded: LoadedLayout | None = None
        self.model: ModelFile | None = None
        """The model that is loaded."""
        self.proposals: tuple[Proposal, ...] = ()
        """What to change after the load that ran out of memory, if that is what became of the last one."""
        self.proposals_model: ModelFile | None = None
        self._calibrator = calibrator
        self._order: LoadOrder | None = None
        self._pending: LoadOrder | None = None
        self._waiting: tuple[LoadOrder, bool] | None = None
        """A load that begins when the answer being written has ended."""
        self._lost: LoadOrder | None = None
        self._orphans = 0
        """Endings still to come of answers that were given up with their model: nobody waits for them."""
        self._connect()

    def _connect(self) -> None:
        bridge = self.bridge
        bridge.loaded.connect(self._on_loaded)
        bridge.progress.connect(self._on_progress)
        for ended in (bridge.out_of_memory, bridge.failed, bridge.crashed, bridge.cancelled):
            ended.connect(self._on_ended)
        bridge.done.connect(self._on_done)

    def close(self) -> None:
        """End the child, waiting a bounded time."""
        self._waiting = None
        self.bridge.close()

    # ------------------------------------------------------------------ what is asked for

    @property
    def is_busy(self) -> bool:
        """Whether a load runs or is being cancelled."""
        return self.state in (ModelState.LOADING, ModelState.STOPPING)

    @property
    def endpoints(self) -> frozenset[str]:
        """Workers that the child holds, or is about to."""
        held = frozenset() if self._order is None else frozenset(self._order.plan.used_endpoints)
        return held if self._pending is None else held | self._pending.possible_endpoints()

    @property
    def has_child(self) -> bool:
        """Whether there is a process, be it one that is ending."""
        return self.bridge.runner.state not in (RunnerState.STOPPED, RunnerState.FAILED)

    def load(self, order: LoadOrder, *, forecast_is_whole: bool = True) -> None:
        """Load `order`; what is loaded is replaced once the layout has been checked. An answer is stopped first.

        `forecast_is_whole`: whether the arithmetic knows all of it, so that a load tells what it left out.
        """
        if self.is_busy:
            return
        if self.state is ModelState.GENERATING:
            self._waiting = (order, forecast_is_whole)
            self.stop_answer()
            return
        if order is not self._lost:
            self._set_lost(None)
        self._pending = order
        self._set_state(ModelState.LOADING)
        self._calibrator.begin(nothing_loaded=self.loaded is None, forecast_is_whole=forecast_is_whole)
        self.bridge.load(order)

    def reload(self) -> None:
        """Load what was lost as it was; nothing where nothing was lost."""
        if self._lost is not None:
            self.load(self._lost, forecast_is_whole=False)

    def cancel(self) -> None:
        """End the load that is running."""
        if self.state is ModelState.LOADING:
            self._set_state(ModelState.STOPPING)
            self.bridge.stop()

    def unload(self) -> bool:
        """Free the loaded model; return whether there was one."""
        if self.state not in (ModelState.READY, ModelState.GENERATING):
            return False
        self._waiting = None
        if self.state is ModelState.GENERATING:
            self.answer_lost.emit("The model was unloaded.")
            self._orphans += 1
        self.bridge.unload()
        self._forget_child()
        return True

    def generate(self, request: Generate) -> None:
        """Begin an answer: tokens come from the bridge, then `answered` or `answer_lost`.

        Raises:
            ArgumentError: when the child was lost a moment ago; the event that says so is on its way.
        """
        self._set_state(ModelState.GENERATING)
        try:
            self.bridge.generate(request)
        except Exception:
            self._set_state(ModelState.READY)
            raise

    def stop_answer(self) -> None:
        """End the answer that is being written; what is there stays."""
        if self.state is ModelState.GENERATING:
            self.bridge.stop()

    # ------------------------------------------------------------------ what becomes of it

    def _on_loaded(self, event: Loaded) -> None:
        asked, self._pending = self._pending, None
        if asked is None:
            return
        info = self.bridge.runner.loaded
        order = self._order = asked if info is None else info.order  # Stepping back may have led to another layout.
        plan = order.plan
        self._set_lost(None)
        loaded = LoadedLayout(
            plan.edit,
            event.devices,
            plan.forecast,
            None if info is None else info.context,
            None if info is None else info.flash_attention,
        )
        self._set_loaded(loaded, plan.model)
        self._set_state(ModelState.READY)
        self._calibrator.finish(plan.rig, event)
        if plan.edit != asked.plan.edit:
            self.stepped_back.emit(StepBack(asked.plan.edit, plan.edit))

    def _on_progress(self, event: Progress) -> None:
        if event.stage == "allocate" and self.loaded is not None:
            self._order = None
            self._set_loaded(None, None)

    def _on_done(self, event: Done) -> None:
        if self._is_orphan():
            return
        self._set_state(ModelState.READY)
        self.answered.emit(event)
        self._load_waiting()

    def _load_waiting(self) -> None:
        """Begin the load that waited for the answer to end, however it ended."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self.load(waiting[0], forecast_is_whole=waiting[1])

    def _on_ended(self, event: OutOfMemory | Failed | Crashed | Cancelled) -> None:
        """A load or a generation ended badly, or the idle child was lost. What was loaded before may still be there."""
        if self._is_orphan():
            return
        self.proposals = self.bridge.runner.proposals
        self.proposals_model = self._pending.plan.model if self._pending is not None else None
        still_loaded = self.loaded is not None and self.bridge.runner.is_ready
        answering = self.state is ModelState.GENERATING
        if not (still_loaded and answering):
            self.ended.emit(event)  # Else it is about an answer only, and is told there.
        if answering and not isinstance(event, Cancelled):
            self.answer_lost.emit(ENGINE_ENDED if isinstance(event, Crashed) else event.message)
        replaces, self._pending = self._pending is not None, None
        if still_loaded:
            self._set_state(ModelState.READY)
        else:
            lost = None if replaces or self._waiting is not None else self._order
            self._forget_child()
            self._set_lost(lost or self._lost)
        self._load_waiting()

    def _is_orphan(self) -> bool:
        orphan = self._orphans > 0
        self._orphans -= orphan
        return orphan

    def _forget_child(self) -> None:
        self._calibrator.forget()
        self._order = None
        self.state = ModelState.EMPTY  # Told below: nobody is to meet a ready model that holds nothing.
        self._set_loaded(None, None)
        self._set_state(ModelState.EMPTY)
        self.released.emit()

    def _set_loaded(self, loaded: LoadedLayout | None, model: ModelFile | None) -> None:
        self.loaded, self.model = loaded, model
        self.loaded_changed.emit(loaded)

    def _set_lost(self, order: LoadOrder | None) -> None:
        self._lost = order
        self.lost_changed.emit(order is not None)

    def _set_state(self, state: ModelState) -> None:
        self.state = state
        self.state_changed.emit(state)
