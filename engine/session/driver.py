"""The driver: it does what the machine decides, in one thread, and tells the machine what comes of it.

Inputs are taken by whoever brings them, under a lock and at once: the machine never waits. What it wants done stands in
one queue; children are started, spoken to and ended from there, timers ring there, and news are told from there.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from engine.cancellation import CancelToken
from engine.errors import ArgumentError
from engine.plan.requests import environment
from engine.process.child import DEFAULT_STALL_TIMEOUT_S, ChildProcess
from engine.process.outcome import ProcessOutcome
from engine.protocol.media import MediaCache
from engine.protocol.messages import AnyMessage, DeviceMemoryReadings
from engine.session import effects, inputs
from engine.session.events import AnyEvent
from engine.session.machine import advance
from engine.session.snapshot import Snapshot, snapshot_of
from engine.session.state import STOP_TIMEOUT_S, State
from engine.session.work import Workshop

_TERMINATE_S = 0.3
_KILL_S = 0.2
"""Reserve for the kill itself and for collecting the process."""
_CLOSE_TIMEOUT_S = 10.0
_JOIN_S = 2.0
_MAX_WAITING_MESSAGES = 256
"""More than this and the child's pipe is held up, instead of our memory growing."""

_log = logging.getLogger("layerdeck.engine")

News = AnyEvent | Snapshot | DeviceMemoryReadings
Receiver = Callable[[News], None]


@dataclass(frozen=True, slots=True)
class DriverOptions:
    """`argv` None: our own worker. Times in seconds."""

    stall_timeout_s: float = DEFAULT_STALL_TIMEOUT_S
    stop_timeout_s: float = STOP_TIMEOUT_S
    argv: Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class _Turn:
    """What one input led to: done in the driver's thread, the snapshot (where it is a new one) told first."""

    snapshot: Snapshot | None
    effects: tuple[effects.Effect, ...]
    is_message: bool


class Driver:
    """`take` and `close` are for any thread, all else is for the driver's own."""

    def __init__(self, receiver: Receiver, workshop: Workshop, options: DriverOptions) -> None:
        self._receiver, self._workshop, self._options = receiver, workshop, options
        self._lock = threading.Lock()
        # Guarded by the lock; state and snapshot are replaced whole, so that they may be read anywhere.
        self._state = State(stop_timeout_s=options.stop_timeout_s)
        self.snapshot = snapshot_of(self._state)
        self._thread: threading.Thread | None = None
        self._turns: queue.SimpleQueue[_Turn] = queue.SimpleQueue()
        self._room = threading.Semaphore(_MAX_WAITING_MESSAGES)
        # The driver's own from here.
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

    def close(self) -> None:
        """End everything and wait for it a bounded time; from the driver's own thread it only begins. Again: waits."""
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
        """Take a message over in the child's reader thread, which waits while too many are unread."""
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
        """Return the next turn, None after a timer that rang, even when turns keep coming."""
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
        """How long a child may take to stop by itself, so that killing it still ends within the limit."""
        return max(0.0, self._options.stop_timeout_s - _TERMINATE_S - _KILL_S)

    def _tell(self, news: News) -> None:
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
        # There is one at a time: the one before has ended, and what was meant for it has been done.
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
