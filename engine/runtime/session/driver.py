"""The driver: it does what the machine decides, in one thread, and tells the machine what comes of it.

Inputs are taken by whoever brings them, under a lock and at once: the machine never waits. The machine's effects stand
in one queue; children are started, spoken to and ended from there, timers ring there, and news are told from there.
Work that takes its time has a thread of its own for each piece, with one answer.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine.base.cancellation import CancelToken
from engine.base.errors import ArgumentError, EngineError
from engine.devices.device import Device
from engine.devices.endpoint import greet_all
from engine.devices.holder import MemoryHolder
from engine.planning.fit.step_back import step_back
from engine.planning.plan.plan import Plan
from engine.planning.plan.report import FitReport
from engine.runtime.probing.probe import ProbeCache, Probes
from engine.runtime.process.child import DEFAULT_STALL_TIMEOUT_S, ChildProcess
from engine.runtime.process.outcome import ProcessOutcome
from engine.runtime.protocol.media import MediaCache
from engine.runtime.protocol.messages import AnyMessage, AnyModelRequest, DeviceMemoryReadings
from engine.runtime.requests import environment, load_request
from engine.runtime.session import effects, inputs
from engine.runtime.session.events import AnyEvent, Failed, RequestEnding, RequestEvent
from engine.runtime.session.machine import advance
from engine.runtime.session.snapshot import Snapshot, snapshot_of
from engine.runtime.session.state import STOP_TIMEOUT_S, State

_TERMINATE_S = 0.3
_KILL_S = 0.2
"""Reserve for the kill itself and for collecting the process."""
_CLOSE_TIMEOUT_S = 10.0
_JOIN_S = 2.0
_MAX_WAITING_MESSAGES = 256
"""More than this and the child's pipe is held up, instead of our memory growing."""

PROPOSAL_LIMIT_S = 6.0
"""A person waits for the report: what has not been asked by then is shown as estimated."""

_log = logging.getLogger("layerdeck.engine")

News = AnyEvent | Snapshot | DeviceMemoryReadings
Receiver = Callable[[News], None]


def nobody(_device: Device) -> tuple[MemoryHolder, ...]:
    """Return no processes: for systems that do not report which processes hold a device's memory."""
    return ()


@dataclass(frozen=True, slots=True)
class Workshop:
    """Does the work that takes time. `holders`: returns the processes that hold a device's memory. `argv`: command of
    the child, None for our own. `proposal_limit_s`: time limit of the search for proposals.

    `sequences`: the folder in which children may save sequences, None for none. It is made before a child starts,
    because a confined child can only write to folders that exist then.
    """

    cache: ProbeCache
    holders: Callable[[Device], tuple[MemoryHolder, ...]] = nobody
    proposal_limit_s: float = PROPOSAL_LIMIT_S
    argv: Sequence[str] | None = None
    sequences: Path | None = None

    def do(self, work: effects.Work, cancel: CancelToken) -> inputs.Work:
        """Return the result of `work`; blocks. After `cancel` the result may be incomplete."""
        match work:
            case effects.Prepare():
                return self._prepare(work)
            case effects.Forecast():
                return self._forecast(work, cancel)
            case effects.Choose():
                return self._choose(work)
            case effects.Greet():
                return inputs.Greeted(work.ticket, greet_all(work.endpoints, routes=work.routes, cancel=cancel))
            case effects.Explain():
                return self._explain(work, cancel)

    def _prepare(self, work: effects.Prepare) -> inputs.Work:
        # Other threads go on planning during the load, so that this plan gets tables of its own.
        plan = work.plan.with_own_tables()
        if self.sequences is not None:
            with suppress(OSError):  # a child that cannot save says so when it is asked to
                self.sequences.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            request = load_request(plan, sequences=self.sequences)
        except EngineError as error:
            return inputs.Refused(work.ticket, Failed(kind=error.kind, message=error.summary()))
        # Computed here because it may take long, and the machine must not.
        assert plan.forecast
        return inputs.Prepared(work.ticket, plan, request)

    def _forecast(self, work: effects.Forecast, cancel: CancelToken) -> inputs.Work:
        plan = self._probed(work.plan, cancel) if work.ask_engine else work.plan
        return inputs.Forecasted(work.ticket, plan, FitReport(plan.forecast).fits)

    def _probed(self, plan: Plan, cancel: CancelToken) -> Plan:
        """Return `plan` with the engine's own forecast; as it is where the engine cannot be asked: a load says why."""
        try:
            with Probes(cache=self.cache, argv=self.argv, cancel=cancel) as probes:
                return probes.probed(plan)
        except EngineError:
            return plan

    def _choose(self, work: effects.Choose) -> inputs.Work:
        return inputs.Chosen(work.ticket, step_back(work.asked.plan, work.tried, work.asked.retry.constraints))

    def _explain(self, work: effects.Explain, cancel: CancelToken) -> inputs.Work:
        # Only a load that failed has any use for the searches: most children and windows never do.
        from engine.runtime.probing.proposal_checks import ProposalCheck, missing_bytes

        plan, limit_s = work.plan, self.proposal_limit_s
        with Probes(cache=self.cache, timeout_s=limit_s, argv=self.argv, cancel=cancel) as probes:
            missing = missing_bytes(work.tried)
            proposals = ProposalCheck(plan, missing, probes, cancel, limit_s, work.constraints).run()
        device = plan.rig.device(work.ending.device)
        return inputs.Explained(work.ticket, proposals, () if device is None else self.holders(device))


@dataclass(frozen=True, slots=True)
class DriverOptions:
    """`argv`: command of the child, None for our own. Times in seconds."""

    stall_timeout_s: float = DEFAULT_STALL_TIMEOUT_S
    stop_timeout_s: float = STOP_TIMEOUT_S
    argv: Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class _Turn:
    """The result of one input, for the driver's thread: a new snapshot, which is reported first, and effects."""

    snapshot: Snapshot | None
    effects: tuple[effects.Effect, ...]
    is_message: bool


class Driver:
    """`take`, `ask` and `close` may be called from any thread; all else runs in the driver's own."""

    def __init__(self, receiver: Receiver, workshop: Workshop, options: DriverOptions) -> None:
        self._receiver, self._workshop, self._options = receiver, workshop, options
        self._lock = threading.Lock()
        # Guarded by the lock; state and snapshot are replaced whole, so that they may be read anywhere.
        self._state = State(stop_timeout_s=options.stop_timeout_s)
        self.snapshot = snapshot_of(self._state)
        self._thread: threading.Thread | None = None
        self._turns: queue.SimpleQueue[_Turn] = queue.SimpleQueue()
        self._streams: dict[int, queue.SimpleQueue[RequestEvent]] = {}
        """Queues of requests whose events do not go to the receiver, by number."""
        self._room = threading.Semaphore(_MAX_WAITING_MESSAGES)
        # From here on only the driver's thread uses them.
        self._children: dict[int, ChildProcess] = {}
        self._timers: dict[int, float] = {}
        self._works: dict[int, tuple[CancelToken, threading.Thread]] = {}
        self._last_child: ChildProcess | None = None

    # ------------------------------------------------------------------ from any thread

    def take(self, event: inputs.Input) -> State:
        """Give the machine an input, and return the state after it.

        Raises:
            ArgumentError: for a command that is refused.
        """
        with self._lock:
            return self._advance(event)

    def ask(self, request: AnyModelRequest, events: queue.SimpleQueue[RequestEvent] | None = None) -> int:
        """Ask the loaded model, and return the number of the request; raises as `take` does.

        Its events go to the queue `events` if there is one, and to the receiver otherwise.
        """
        with self._lock:
            number = self._advance(inputs.Ask(request)).asked - 1
            if events is not None:
                # Messages of the child are taken under this lock, so that no event of the request can come before.
                self._streams[number] = events
            return number

    def close(self) -> None:
        """End everything and wait a bounded time; a second call only waits. The driver's own thread does not wait."""
        with self._lock:
            self._advance(inputs.Close())
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(_CLOSE_TIMEOUT_S)
        if self._last_child is not None:
            self._last_child.wait(_JOIN_S)
        for _, worker in tuple(self._works.values()):
            worker.join(_JOIN_S)

    def _advance(self, event: inputs.Input, *, is_message: bool = False) -> State:
        before = self._state
        try:
            self._state, wanted = advance(before, event)
        except ArgumentError:
            raise
        except Exception:
            _log.exception("the machine failed with %s", type(event).__name__)
            self._state, wanted = advance(before, inputs.Bug())
        number = self.snapshot.number + 1
        snapshot = self.snapshot if self._state is before else snapshot_of(self._state, number)
        shown = None if snapshot == self.snapshot else snapshot
        self.snapshot = snapshot
        if shown is not None or wanted or is_message or self._state.is_over:
            self._turns.put(_Turn(shown, wanted, is_message))
            self._start()
        return self._state

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="session", daemon=True)
            self._thread.start()

    def _on_message(self, child: int, message: AnyMessage) -> None:
        """Take a message in the child's reader thread, which waits while too many messages are unread."""
        self._room.acquire()
        with self._lock:
            self._advance(inputs.ChildSaid(child, message), is_message=True)

    def _on_child_ended(self, child: int, outcome: ProcessOutcome) -> None:
        self.take(inputs.ChildEnded(child, outcome))

    # ------------------------------------------------------------------ the driver's thread

    def _run(self) -> None:
        over = False
        while not over:
            turn = self._next_turn()
            if turn is not None:
                self._perform(turn)
            over = self._state.is_over and self._turns.empty()

    def _next_turn(self) -> _Turn | None:
        """Return the next turn; None after a timer has rung, which goes first."""
        if not self._timers:
            return self._turns.get()
        timer, due_s = min(self._timers.items(), key=lambda item: item[1])
        left_s = due_s - time.monotonic()
        if left_s > 0:
            try:
                return self._turns.get(timeout=left_s)
            except queue.Empty:
                pass
        del self._timers[timer]
        self.take(inputs.TimerRang(timer))
        return None

    def _perform(self, turn: _Turn) -> None:
        if turn.is_message:
            self._room.release()
        if turn.snapshot is not None:
            self._tell(turn.snapshot)
        for effect in turn.effects:
            try:
                self._do(effect)
            except Exception:
                _log.exception("%s of a session failed", type(effect).__name__)
                self.take(inputs.Bug())

    def _do(self, effect: effects.Effect) -> None:
        match effect:
            case effects.Tell():
                self._tell(effect.event)
            case effects.TellMemory():
                self._tell(effect.readings)
            case effects.StartChild():
                self._start_child(effect)
            case effects.Send():
                self._children[effect.child].send(effect.request)
            case effects.Watch():
                self._children[effect.child].watch(effect.active)
            case effects.StopChild():
                self._children[effect.child].stop(ask_s=self._ask_s, terminate_s=_TERMINATE_S)
            case effects.KillChild():
                self._children[effect.child].stop(ask_s=0.0, terminate_s=_TERMINATE_S)
            case effects.SetTimer():
                self._timers[effect.timer] = time.monotonic() + self._ask_s
            case effects.CancelTimer():
                self._timers.pop(effect.timer, None)
            case effects.Abandon():
                self._works[effect.ticket][0].cancel()
            case _:
                self._start_work(effect)

    @property
    def _ask_s(self) -> float:
        """Time that a child has to stop by itself, so that killing it still ends within the limit."""
        return max(0.0, self._options.stop_timeout_s - _TERMINATE_S - _KILL_S)

    def _tell(self, news: News) -> None:
        if isinstance(news, RequestEvent) and news.request in self._streams:
            assert news.request is not None
            self._streams[news.request].put(news)
            if isinstance(news, RequestEnding):
                del self._streams[news.request]
            return
        try:
            self._receiver(news)
        except Exception:
            _log.exception("a receiver of a session's news failed")

    def _start_child(self, effect: effects.StartChild) -> None:
        child = ChildProcess(
            partial(self._on_message, effect.child),
            partial(self._on_child_ended, effect.child),
            argv=self._options.argv,
            stall_timeout_s=self._options.stall_timeout_s,
            environment=environment(effect.plan),
            about=effect.plan.mark,
            before_send=MediaCache().shorten,
        )
        # There is one child at a time: the one before has ended, and its effects have been carried out.
        self._children = {effect.child: child}
        self._last_child = child
        child.start()
        child.send(effect.request)

    def _start_work(self, work: effects.Work) -> None:
        self._works = {ticket: each for ticket, each in self._works.items() if each[1].is_alive()}
        cancel = CancelToken()
        thread = threading.Thread(target=self._work, args=(work, cancel), name="session-work", daemon=True)
        self._works[work.ticket] = (cancel, thread)
        thread.start()

    def _work(self, work: effects.Work, cancel: CancelToken) -> None:
        answer: inputs.Work
        try:
            answer = self._workshop.do(work, cancel)
        except Exception:
            _log.exception("%s of a session failed", type(work).__name__)
            answer = inputs.WorkFailed(work.ticket)
        self.take(answer)
