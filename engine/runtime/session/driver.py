"""The driver of a session: executes the effects (actions) that the state machine returns, and reports the results to
it.

Threads: `take` runs the state machine in the caller's thread, under a lock, and puts the effects into a queue. The
session's thread reads the queue: it starts children, sends them requests and ends them, runs the timers, and calls the
receiver (the callback for the session's events). Each effect that takes time, such as a probe, has its own thread and
reports one result. Messages of a child arrive in the reader thread of its `ChildProcess`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from msgspec import Struct

from engine.base.cancellation import CancelToken
from engine.base.engine_log import TENSOR_API_VARIABLE
from engine.base.errors import ArgumentError, EngineError
from engine.base.language import tr
from engine.devices.device import ComputingNeed, Device
from engine.devices.endpoint import greet_all
from engine.devices.telemetry.sample import MemoryHolder
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.reader import read_model
from engine.planning.fit.step_back import step_back
from engine.planning.plan.plan import Plan
from engine.planning.plan.report import FitReport
from engine.runtime.plan_requests import environment, load_request
from engine.runtime.probing.probe import ProbeCache, Probes
from engine.runtime.process.child import DEFAULT_STALL_LIMIT_S, ChildProcess
from engine.runtime.process.outcome import EndReason, ProcessOutcome
from engine.runtime.protocol.media import MediaCache
from engine.runtime.protocol.messages import AnyMessage, DeviceMemoryReadings
from engine.runtime.protocol.requests import AnyModelRequest
from engine.runtime.session import effects, inputs
from engine.runtime.session.events import AnyEvent, Failed, Loaded, RequestEnding, RequestEvent
from engine.runtime.session.load_records import LoadRecorder
from engine.runtime.session.machine import advance
from engine.runtime.session.snapshot import Snapshot, snapshot_of
from engine.runtime.session.state import STOP_TIMEOUT_S, State

_TERMINATE_S = 0.3
_KILL_S = 0.2
"""Seconds reserved for SIGKILL and for reaping the process, so that a stop still ends within `STOP_TIMEOUT_S`."""
_CLOSE_TIMEOUT_S = 10.0
_JOIN_S = 2.0
_MAX_WAITING_MESSAGES = 256
"""Largest number of the child's messages in the queue. At this number its reader thread blocks, which limits memory."""

PROPOSAL_LIMIT_S = 6.0
"""Time limit in seconds for finding and probing proposals after a failed load.

Proposals that were not probed by then keep their estimated numbers.
"""

_log = logging.getLogger("layerdeck.engine")

SessionUpdate = AnyEvent | Snapshot | DeviceMemoryReadings | ComputingNeed
Receiver = Callable[[SessionUpdate], None]


def nothing_to_flush() -> None:
    """Do nothing. The default for a receiver that handles each update at once."""


def no_holders(_device: Device) -> tuple[MemoryHolder, ...]:
    """Return an empty tuple. Used on systems that do not report which processes hold a device's memory."""
    return ()


class WorkRunner(Struct, frozen=True):
    """Executes the effects that take time (`effects.Work`). The driver calls `do` for each of them in a separate
    thread.

    `cache`: results of earlier probes (loads without allocation).
    `holders`: returns the processes that hold a device's memory.
    `proposal_limit_s`: time limit of the search for proposals, in seconds.
    `argv`: command that starts the child process; None for `python -m engine.runtime.child`.
    `sequences`: folder in which children may save KV states; None: children may not save any.
    """

    cache: ProbeCache
    holders: Callable[[Device], tuple[MemoryHolder, ...]] = no_holders
    proposal_limit_s: float = PROPOSAL_LIMIT_S
    argv: Sequence[str] | None = None
    sequences: Path | None = None

    def do(self, work: effects.Work, cancel: CancelToken) -> inputs.Work:
        """Carry out an effect that takes time, and return its result. Blocks.

        After `cancel` the result may be incomplete.
        """
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
        # Other threads go on planning during the load, and a model's tables are for one thread at a time.
        plan = work.plan.with_own_tables()
        # Landlock allows a child to write only to folders that exist when it gives up its rights.
        if self.sequences is not None:
            with suppress(OSError):  # a child that cannot save says so when it is asked to
                self.sequences.mkdir(parents=True, exist_ok=True, mode=0o700)
        if has_changed(plan.model):
            name = plan.model.paths[0].name
            sentence = tr(
                "The model file {name} has changed since it was opened, and the layout was made for the old file.",
                name=name,
            )
            remedy = tr("Open the file again. Layout > Use Last Layout restores the layout if it fits.")
            return inputs.Refused(work.ticket, Failed(kind="model_file", message=f"{sentence} {remedy}"))
        try:
            request = load_request(plan, sequences=self.sequences, is_known=self.cache.is_known_on_host(plan))
        except EngineError as error:
            return inputs.Refused(work.ticket, Failed(kind=error.kind, message=error.summary()))
        # The forecast is computed on first use. Here it may take long; the machine runs under a lock in any thread.
        assert plan.forecast
        return inputs.Prepared(work.ticket, plan, request)

    def _forecast(self, work: effects.Forecast, cancel: CancelToken) -> inputs.Work:
        plan = self._probed(work.plan, cancel) if work.ask_engine else work.plan
        return inputs.Forecasted(work.ticket, plan, FitReport(plan.forecast).fits)

    def _probed(self, plan: Plan, cancel: CancelToken) -> Plan:
        """Return `plan` with the memory that a probe (a load without allocation) reports.

        If the probe fails, return the plan unchanged; the load will report why.
        """
        try:
            with Probes(cache=self.cache, argv=self.argv, cancel=cancel) as probes:
                return probes.probed(plan)
        except EngineError:
            return plan

    def _choose(self, work: effects.Choose) -> inputs.Work:
        return inputs.Chosen(work.ticket, step_back(work.asked.plan, work.tried, work.asked.retry.constraints))

    def _explain(self, work: effects.Explain, cancel: CancelToken) -> inputs.Work:
        # Only a failed load needs the searches. Their modules would delay the start of every window.
        from engine.runtime.probing.proposal_checks import ProposalCheck, missing_bytes

        plan, limit_s = work.plan, self.proposal_limit_s
        with Probes(cache=self.cache, timeout_s=limit_s, argv=self.argv, cancel=cancel) as probes:
            missing = missing_bytes(work.tried)
            proposals = ProposalCheck(plan, missing, probes, cancel, limit_s, work.constraints).run()
        device = plan.rig.device(work.ending.device)
        return inputs.Explained(work.ticket, proposals, () if device is None else self.holders(device))


def _quit_s(timeout_s: float) -> float:
    """Return the part of `timeout_s` in which a child may stop by itself. The rest is for SIGTERM and SIGKILL."""
    return max(0.0, timeout_s - _TERMINATE_S - _KILL_S)


class DriverOptions(Struct, frozen=True):
    """Options of a driver.

    `stall_limit_s`: longest silence of the child, in seconds.
    `stop_timeout_s`: longest time from a stop request to the end of a child that has to be killed, in seconds.
    `argv`: command that starts the child process; None for `python -m engine.runtime.child`.
    `flush`: called in the session's thread when the receiver has all updates of one change.
    """

    stall_limit_s: float = DEFAULT_STALL_LIMIT_S
    stop_timeout_s: float = STOP_TIMEOUT_S
    argv: Sequence[str] | None = None
    flush: Callable[[], None] = nothing_to_flush


class _Result(Struct, frozen=True):
    """What the session's thread has to do after one input of the state machine. It takes these results from a queue.

    `snapshot`: state to report to the receiver before the effects; None if the public state did not change.
    `effects`: actions to execute in their order.
    `is_message`: whether the input was a message of the child; its place in the queue then becomes free.
    """

    snapshot: Snapshot | None
    effects: tuple[effects.Effect, ...]
    is_message: bool


class Driver:
    """Runs the state machine of one session, and executes its effects (actions that it returns).

    `take`, `ask` and `close` pass an input to the state machine, which runs under a lock in the caller's thread. The
    thread of the session executes the effects, and owns the child process, timers and worker threads. It also calls the
    receiver, the callback for the session's events.
    """

    def __init__(self, receiver: Receiver, runner: WorkRunner, options: DriverOptions) -> None:
        self._receiver, self._runner, self._options = receiver, runner, options
        self._lock = threading.Lock()
        # Guarded by the lock; state and snapshot are replaced whole, so that they may be read anywhere.
        self._state = State(stop_timeout_s=options.stop_timeout_s)
        self.snapshot = snapshot_of(self._state)
        self._thread: threading.Thread | None = None
        self._results: queue.SimpleQueue[_Result] = queue.SimpleQueue()
        self._streams: dict[int, Callable[[RequestEvent], None]] = {}
        """Receiver of each open stream, by the number of its request."""
        self._room = threading.Semaphore(_MAX_WAITING_MESSAGES)
        # From here on: used by the session's thread only.
        self._children: dict[int, ChildProcess] = {}
        self._timers: dict[int, float] = {}
        self._works: dict[int, tuple[CancelToken, threading.Thread]] = {}
        self._last_child: ChildProcess | None = None
        self._recorder = LoadRecorder()
        self._plan: Plan | None = None

    # ------------------------------------------------------------------ from any thread

    def take(self, event: inputs.Input) -> State:
        """Pass an input to the state machine, and return the new state.

        Raises:
            ArgumentError: the state machine refuses the command, for example because no model is loaded.
        """
        with self._lock:
            return self._advance(event)

    def ask(self, request: AnyModelRequest, receiver: Callable[[RequestEvent], None] | None = None) -> int:
        """Send a request to the loaded model, and return its number.

        `receiver`: called in the session's thread for each event of the request; None for the receiver of the session.

        Raises:
            ArgumentError: no model is ready.
        """
        with self._lock:
            number = self._advance(inputs.SubmitRequest(request)).asked - 1
            if receiver is not None:
                # Messages of the child are taken under the same lock: no event can come before its receiver is known.
                self._streams[number] = receiver
            return number

    def close(self) -> None:
        """Close the session: end its load, its requests and its child. A second call only waits.

        Blocks a bounded time until that is done, except in the session's thread.
        """
        with self._lock:
            self._advance(inputs.Close())
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        # In this order: the session's thread ends the child, and the child's end reports to the session.
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
            # The state before is still sound, because `advance` is pure. `Bug` ends what runs with an ending.
            _log.exception("the machine failed with %s", type(event).__name__)
            self._state, wanted = advance(before, inputs.Bug())
        # Many inputs change nothing public, such as most messages: then there is no new snapshot to report.
        number = self.snapshot.number + 1
        snapshot = self.snapshot if self._state is before else snapshot_of(self._state, number)
        shown = None if snapshot == self.snapshot else snapshot
        self.snapshot = snapshot
        if shown is not None or wanted or is_message or self._state.is_over:
            self._results.put(_Result(shown, wanted, is_message))
            self._start()
        return self._state

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="session", daemon=True)
            self._thread.start()

    def _on_message(self, child: int, message: AnyMessage) -> None:
        """Pass a message of the child to the state machine.

        Called in the child's reader thread; blocks if the queue is full.
        """
        # Wait here, not in the lock: back-pressure for a child that writes faster than the receiver reads.
        self._room.acquire()
        with self._lock:
            self._advance(inputs.ChildMessage(child, message), is_message=True)

    def _on_child_ended(self, child: int, outcome: ProcessOutcome) -> None:
        self.take(inputs.ChildEnded(child, outcome))

    # ------------------------------------------------------------------ the driver's thread

    def _run(self) -> None:
        over = False
        while not over:
            result = self._next_result()
            if result is not None:
                self._perform(result)
            over = self._state.is_over and self._results.empty()

    def _next_result(self) -> _Result | None:
        """Wait for the next result in the queue and return it.

        If a timer expires first, pass `TimerExpired` to the state machine and return None.
        """
        if not self._timers:
            return self._results.get()
        timer, due_s = min(self._timers.items(), key=lambda item: item[1])
        # The queue is the only thing that this thread waits for, so that a timer is a time limit on that wait.
        left_s = due_s - time.monotonic()
        if left_s > 0:
            try:
                return self._results.get(timeout=left_s)
            except queue.Empty:
                pass
        del self._timers[timer]
        self.take(inputs.TimerExpired(timer))
        return None

    def _perform(self, result: _Result) -> None:
        # The message has left the queue: the child's reader thread may add another one.
        if result.is_message:
            self._room.release()
        if result.snapshot is not None:
            self._report(result.snapshot)
        for effect in result.effects:
            if isinstance(effect, effects.StartChild):
                _call(self._options.flush)  # The start of a process takes a while; updates do not wait for it.
            try:
                self._do(effect)
            except Exception as error:
                _log.exception("%s of a session failed", type(effect).__name__)
                if isinstance(effect, effects.StartChild):
                    # A child that never ran reports no end, for which the load would wait.
                    outcome = ProcessOutcome(EndReason.NOT_STARTED, detail=f"{type(error).__name__}: {error}")
                    self._on_child_ended(effect.child, outcome)
                else:
                    self.take(inputs.Bug())
        _call(self._options.flush)

    def _do(self, effect: effects.Effect) -> None:
        match effect:
            case effects.Report():
                self._report(effect.event)
            case effects.ReportMemory():
                self._report(effect.readings)
            case effects.ReportNeed():
                self._report(effect.need)
            case effects.StartChild():
                self._start_child(effect)
            case effects.Send():
                self._children[effect.child].send(effect.request)
            case effects.Watch():
                self._children[effect.child].watch(effect.active)
            case effects.StopChild():
                self._children[effect.child].stop(
                    quit_s=_quit_s(self._options.stop_timeout_s), terminate_s=_TERMINATE_S
                )
            case effects.KillChild():
                self._children[effect.child].stop(quit_s=0.0, terminate_s=_TERMINATE_S)
            case effects.SetTimer():
                self._timers[effect.timer] = time.monotonic() + _quit_s(effect.timeout_s)
            case effects.CancelTimer():
                self._timers.pop(effect.timer, None)
            case effects.CancelWork():
                self._works[effect.ticket][0].cancel()
            case _:
                self._start_work(effect)

    def _report(self, news: SessionUpdate) -> None:
        if isinstance(news, Loaded) and self._plan is not None:
            self._runner.cache.note_loaded(self._plan)
        news = self._recorder.take(news)
        # A stream is removed with its ending, before it gets it, because its receiver may raise.
        if isinstance(news, RequestEvent) and news.request in self._streams:
            assert news.request is not None
            receiver = self._streams[news.request]
            if isinstance(news, RequestEnding):
                del self._streams[news.request]
            _call(partial(receiver, news))
        else:
            _call(partial(self._receiver, news))

    def _start_child(self, effect: effects.StartChild) -> None:
        child = ChildProcess(
            partial(self._on_message, effect.child),
            partial(self._on_child_ended, effect.child),
            argv=self._options.argv,
            stall_limit_s=effect.stall_limit_s or self._options.stall_limit_s,
            environment=environment(effect.plan) | ({TENSOR_API_VARIABLE: "1"} if effect.without_tensor_api else {}),
            about=effect.plan.mark,
            # A new cache for each child: a new one has no files yet.
            before_send=MediaCache().shorten,
        )
        # There is one child at a time: the one before has ended, and all effects for it were carried out.
        self._children = {effect.child: child}
        self._recorder.begin_child(effect.plan)
        self._plan = effect.plan
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
            answer = self._runner.do(work, cancel)
        except Exception:
            _log.exception("%s of a session failed", type(work).__name__)
            answer = inputs.WorkFailed(work.ticket)
        self.take(answer)


def _call(receiver: Callable[[], None]) -> None:
    """Call `receiver`. An exception is only logged: a bug of a receiver must not stop the session."""
    try:
        receiver()
    except Exception:
        _log.exception("a receiver of a session's news failed")


def has_changed(model: ModelFile) -> bool:
    """Return whether the tensors in the file of `model` have changed since its header was read. Blocks.

    Return False if the file cannot be read; the child then reports why.
    """
    try:
        now = read_model(model.paths[0])
    except EngineError:
        return False
    return (now.n_layers, now.tensors) != (model.n_layers, model.tensors)
