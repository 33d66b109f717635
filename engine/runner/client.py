"""The runner: one loaded model's child, its state, and exactly one ending for everything that is begun.

Calls put a command into an inbox; one thread takes commands, messages of the child and results of greetings in order.
That thread alone changes anything, so that a cancel, a crash and a success that meet are told apart by who came first.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from engine.cancellation import CancelToken
from engine.devices.endpoint import DEFAULT_TIMEOUT_S, Greeting, greet_all
from engine.errors import ArgumentError, EngineError
from engine.runner.child import DEFAULT_STALL_TIMEOUT_S, ChildProcess
from engine.runner.events import (
    AnyEvent,
    Cancelled,
    Crashed,
    Done,
    Failed,
    GenerationEnding,
    LoadEnding,
    Stage,
    Token,
)
from engine.runner.job import LoadJob
from engine.runner.outcome import EndReason, ProcessOutcome
from engine.runner.protocol import (
    AllocationFailure,
    AnyMessage,
    DeviceMemoryQuery,
    DeviceMemoryReading,
    DeviceMemoryReadings,
    Failure,
    Generate,
    Generated,
    Hello,
    LoadedModel,
    Piece,
    StageProgress,
    Stop,
    Stopped,
)
from engine.runner.reports import (
    crash_event,
    done_event,
    loaded_event,
    lost_event,
    out_of_memory_event,
    refusal,
)
from engine.runner.runs import (
    Diagnosis,
    GenerationRun,
    LoadedInfo,
    LoadPhase,
    LoadRun,
    RunnerState,
    WaitingLoad,
)

__all__ = ["LoadJob", "LoadedInfo", "Runner", "RunnerState"]

STOP_TIMEOUT_S = 2.0
"""From asking for an end until the child has been killed, if that is what it takes."""
_TERMINATE_S = 0.3
_KILL_S = 0.2
"""Reserve for the kill itself and for collecting the process."""
_CLOSE_TIMEOUT_S = 10.0
_MAX_WAITING_MESSAGES = 256
"""More than this and the child's pipe is held up, instead of our memory growing."""

_log = logging.getLogger("layerdeck.engine")


class Runner:
    """Loads a model into a child, generates with it, and ends it. Thread-safe; no call but `close` waits.

    `on_event` gets every event, `on_state` every change of state, both in the runner's thread and state first; both
    should return soon. A load and a generation each get exactly one ending. A loaded model that is lost while idle is
    told by one more `Crashed` or `Failed`, with state FAILED.
    """

    def __init__(
        self,
        on_event: Callable[[AnyEvent], None],
        *,
        on_state: Callable[[RunnerState], None] | None = None,
        on_device_memory: Callable[[tuple[DeviceMemoryReading, ...]], None] | None = None,
        stall_timeout_s: float = DEFAULT_STALL_TIMEOUT_S,
        stop_timeout_s: float = STOP_TIMEOUT_S,
        argv: Sequence[str] | None = None,
    ) -> None:
        self._on_event = on_event
        self._on_state = on_state
        self._on_device_memory = on_device_memory
        self._stall_timeout_s = stall_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._argv = argv
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._room = threading.Semaphore(_MAX_WAITING_MESSAGES)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        # Guarded by the lock, because `generate` claims the loaded model in the caller's thread.
        self._state = RunnerState.STOPPED
        self._generation: GenerationRun | None = None
        # Everything below belongs to the runner's thread; the two values are replaced whole and may be read anywhere.
        self._loaded: LoadedInfo | None = None
        self._context_used: int | None = None
        self._child: ChildProcess | None = None
        self._child_job: LoadJob | None = None
        self._load: LoadRun | None = None
        self._waiting: deque[WaitingLoad] = deque()
        self._diagnosis: Diagnosis | None = None
        self._unload_wanted = False
        self._closing = False
        self._timer_due_s: float | None = None
        self._greeting_cancel = CancelToken()
        self._greeters: list[threading.Thread] = []
        self._last_child: ChildProcess | None = None

    # ------------------------------------------------------------------ calls

    @property
    def state(self) -> RunnerState:
        with self._lock:
            return self._state

    @property
    def is_ready(self) -> bool:
        return self.state is RunnerState.READY

    @property
    def loaded(self) -> LoadedInfo | None:
        """What is loaded; None before `Loaded` and after the child ended."""
        return self._loaded

    @property
    def context_size(self) -> int | None:
        """Tokens that the loaded context holds."""
        loaded = self._loaded
        return None if loaded is None else loaded.n_ctx

    @property
    def context_used(self) -> int | None:
        """Tokens in the loaded context after the last generation; None before the first."""
        return self._context_used

    def load(self, job: LoadJob) -> None:
        """Load `job`. Its events end with one of `Loaded, OutOfMemory, Failed, Crashed, Cancelled`.

        Stopped, failed: begins. Ready: what is loaded stays until the layout was checked and the endpoints that it
        does not hold have answered, and is then replaced. Starting, loading, generating, stopping: what runs is
        stopped and gets its ending, then this begins; of several that wait the last does, the others are `Cancelled`.

        Raises:
            ArgumentError: after `close`.
        """
        if not self._post(partial(self._do_load, job)):
            raise ArgumentError("The runner is closed and loads nothing any more.")

    def generate(self, request: Generate) -> None:
        """Generate. Ready: `Token`s, then one of `Done, OutOfMemory, Failed, Crashed`.

        Raises:
            ArgumentError: in every other state, with a sentence; then there is no event.
        """
        with self._lock:
            if self._state is not RunnerState.READY or self._closed:
                busy = self._state is RunnerState.GENERATING
                raise ArgumentError(
                    "An answer is being written; stop it first." if busy else "No model is loaded; load one first."
                )
            generation = self._generation = GenerationRun()
            self._state = RunnerState.GENERATING
        self._post(partial(self._do_generate, generation, request))

    def stop(self) -> None:
        """End the load or the generation that runs: ask, and kill the child when that takes longer than the limit.

        Starting, loading: the load ends with `Cancelled`. Generating: ends with `Done` (`stopped`), the model stays;
        a child that does not stop in time is ended, with `Failed`. Other states: nothing. A second call: nothing.
        """
        self._post(self._do_stop)

    def unload(self) -> None:
        """Free the loaded model. Starting, loading, generating: as `stop`, then frees. Stopped, failed: nothing."""
        self._post(self._do_unload)

    def query_device_memory(self) -> None:
        """Ask for the live memory of the loaded model's devices. Ready: `on_device_memory` gets it. Others: nothing."""
        self._post(self._do_query_memory)

    def close(self) -> None:
        """End everything, wait for it a bounded time; what runs gets its ending. A second call only waits."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._inbox.put(self._do_close)
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(_CLOSE_TIMEOUT_S)
        if self._last_child is not None:
            self._last_child.wait(1.0)
        for greeter in self._greeters:
            greeter.join(DEFAULT_TIMEOUT_S)

    # ------------------------------------------------------------------ the runner's thread

    def _post(self, command: Callable[[], None]) -> bool:
        with self._lock:
            if self._closed:
                return False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="runner", daemon=True)
                self._thread.start()
            self._inbox.put(command)
        return True

    def _run(self) -> None:
        while not (self._closing and self._is_idle() and self._child is None and not self._waiting):
            try:
                command = self._inbox.get(timeout=self._timer_s())
            except queue.Empty:
                command = self._on_timer
            try:
                command()
            except Exception:
                _log.exception("the runner failed")
                self._end_after_bug()

    def _timer_s(self) -> float | None:
        return None if self._timer_due_s is None else max(0.0, self._timer_due_s - time.monotonic())

    def _is_idle(self) -> bool:
        return self._load is None and self._generation is None and self._diagnosis is None

    def _set_state(self, state: RunnerState) -> None:
        with self._lock:
            changed, self._state = self._state is not state, state
        if changed:
            self._tell_state(state)

    def _claim(self, state: RunnerState) -> bool:
        """Leave READY for `state`, unless a caller has just claimed the model for a generation."""
        with self._lock:
            if self._generation is not None:
                return False
            self._state = state
        self._tell_state(state)
        return True

    def _tell_state(self, state: RunnerState) -> None:
        if self._on_state is not None:
            try:
                self._on_state(state)
            except Exception:
                _log.exception("the receiver of states failed")

    def _emit(self, event: AnyEvent) -> None:
        try:
            self._on_event(event)
        except Exception:
            _log.exception("the receiver of events failed")

    # ------------------------------------------------------------------ commands

    def _do_load(self, job: LoadJob) -> None:
        self._waiting.append(WaitingLoad(job))
        self._end_what_runs()
        self._advance()

    def _do_generate(self, generation: GenerationRun, request: Generate) -> None:
        if generation is not self._generation:
            return  # The child ended in between; that was this generation's end as well.
        if generation.stopping or self._child is None:
            self._finish_generation(_NOTHING_GENERATED)
            return
        self._tell_state(RunnerState.GENERATING)
        generation.sent = True
        self._child.watch(True)
        self._child.send(request)

    def _do_stop(self) -> None:
        for waiting in self._waiting:
            waiting.cancelled = True
        self._end_what_runs()

    def _do_unload(self) -> None:
        self._do_stop()
        self._unload_wanted = self._child is not None or self._load is not None
        self._advance()

    def _do_query_memory(self) -> None:
        if self.state is RunnerState.READY and self._child is not None:
            self._child.send(DeviceMemoryQuery())

    def _do_close(self) -> None:
        self._do_stop()
        self._closing = True
        self._advance()

    def _on_timer(self) -> None:
        self._timer_due_s = None
        if self._generation is not None and self._child is not None:
            self._generation.killed = True
            self._child.stop(ask_s=0.0, terminate_s=_TERMINATE_S)

    # ------------------------------------------------------------------ what comes next

    def _end_what_runs(self) -> None:
        """Ask what runs to end. Its ending comes when the child has answered or is gone; a diagnosis ends at once."""
        self._greeting_cancel.cancel()
        if self._diagnosis is not None:
            self._on_diagnosed(self._diagnosis, {})
        load, generation = self._load, self._generation
        if load is not None and not load.cancelled:
            load.cancelled = True
            if load.phase is LoadPhase.CHECKING:
                self._finish_load(Cancelled(stage=load.tracker.stage))
            elif load.phase is LoadPhase.RUNNING:
                self._set_state(RunnerState.STOPPING)
                self._stop_child(Stop())
        if generation is not None and not generation.stopping:
            generation.stopping = True
            self._set_state(RunnerState.STOPPING)
            if generation.sent and self._child is not None:
                self._timer_due_s = time.monotonic() + self._ask_s()
                self._child.send(Stop())

    def _stop_child(self, *requests: Stop) -> None:
        if self._child is not None:
            for request in requests:
                self._child.send(request)
            self._child.stop(ask_s=self._ask_s(), terminate_s=_TERMINATE_S)

    def _ask_s(self) -> float:
        """How long a child may take to stop by itself, so that killing it still ends within the limit."""
        return max(0.0, self._stop_timeout_s - _TERMINATE_S - _KILL_S)

    def _advance(self) -> None:
        """Go on to what was asked for, once nothing runs: unload, close, or the load that waits."""
        if not self._is_idle():
            return
        if self._child is None:
            self._unload_wanted = False
        elif self._unload_wanted or self._closing:
            if self._claim(RunnerState.STOPPING):
                self._stop_child()
            else:
                self._end_what_runs()
            return
        while self._waiting:
            if self._waiting[0].cancelled or len(self._waiting) > 1:
                self._waiting.popleft()
                self._emit(Cancelled(stage="header"))
            elif self._claim(RunnerState.STARTING):
                self._begin(self._waiting.popleft().job)
                return
            else:
                self._end_what_runs()
                return

    # ------------------------------------------------------------------ loading

    def _begin(self, job: LoadJob) -> None:
        load = self._load = LoadRun(job)
        self._emit(load.tracker.enter("header"))
        self._emit(load.tracker.enter("fit"))
        try:
            load.request = job.load_request()
        except EngineError as error:
            self._finish_load(Failed(kind=error.kind, message=error.summary()))
            return
        endpoints = job.used_endpoints()
        held = self._child_job.used_endpoints() if self._child is not None and self._child_job is not None else {}
        load.unchecked = tuple(endpoint for endpoint in endpoints if endpoint in held)
        self._check(load, [endpoint for endpoint in endpoints if endpoint not in held])

    def _check(self, load: LoadRun, endpoints: Sequence[str]) -> None:
        if endpoints:
            self._greet(endpoints, partial(self._on_checked, load))
        else:
            self._on_checked(load, {})

    def _on_checked(self, load: LoadRun, greetings: Mapping[str, Greeting]) -> None:
        if load is not self._load or load.phase is not LoadPhase.CHECKING:
            return
        refused = refusal(greetings, load.job.used_endpoints())
        if refused is not None:
            self._finish_load(refused)
        elif self._child is not None:
            load.phase = LoadPhase.REPLACING
            self._loaded = self._context_used = None
            self._stop_child()
        elif load.unchecked:
            endpoints, load.unchecked = load.unchecked, ()
            self._check(load, endpoints)
        else:
            self._spawn(load)

    def _spawn(self, load: LoadRun) -> None:
        assert load.request is not None
        load.phase = LoadPhase.RUNNING
        child = ChildProcess(
            self._receive, self._receive_end, argv=self._argv, stall_timeout_s=self._stall_timeout_s, name="worker"
        )
        self._child = self._last_child = child
        self._child_job = load.job
        child.start()
        child.send(load.request)

    def _conclude(self, load: LoadRun, ending: LoadEnding) -> None:
        """Keep the child's last word on this load and end it; the ending follows when its memory is free again."""
        if load.ending is None:
            load.ending = ending
            self._set_state(RunnerState.STOPPING)
            self._stop_child()

    def _finish_load(self, ending: LoadEnding) -> None:
        self._load = None
        if self._child is not None:
            self._set_state(RunnerState.READY)  # Refused before it replaced what is loaded.
        else:
            self._set_state(RunnerState.STOPPED if isinstance(ending, Cancelled) else RunnerState.FAILED)
        self._emit(ending)
        self._advance()

    # ------------------------------------------------------------------ the child's messages

    def _receive(self, message: AnyMessage) -> None:
        """Take a message over in the child's reader thread, which waits while too many are unread."""
        self._room.acquire()
        self._inbox.put(partial(self._take, message))

    def _take(self, message: AnyMessage) -> None:
        self._room.release()
        load = self._load
        if load is not None and load.phase is LoadPhase.RUNNING:
            if not load.cancelled:
                self._take_loading(load, message)
        elif self._generation is not None and self._generation.sent and not self._generation.killed:
            self._take_generating(message)
        if isinstance(message, DeviceMemoryReadings) and self._on_device_memory is not None:
            self._on_device_memory(message.readings)

    def _take_loading(self, load: LoadRun, message: AnyMessage) -> None:
        match message:
            case Hello():
                self._set_state(RunnerState.LOADING)
            case StageProgress():
                progress = load.tracker.advance(message)
                if progress is not None and load.ending is None:
                    self._emit(progress)
            case LoadedModel() if load.ending is None:
                self._become_ready(load, message)
            case AllocationFailure():
                self._conclude(load, out_of_memory_event(load.job.rig, message))
            case Failure():
                self._conclude(load, Failed(kind=message.kind, message=message.message))
            case Stopped():
                self._conclude(load, Cancelled(stage=message.stage))

    def _become_ready(self, load: LoadRun, message: LoadedModel) -> None:
        event = loaded_event(load.job, message)
        self._loaded = LoadedInfo(
            job=load.job,
            n_ctx=message.n_ctx,
            n_vocab=message.n_vocab,
            chat_template=message.chat_template,
            flash_attention=message.flash_attention,
            layer_devices=message.layer_devices,
            kv_devices=message.kv_devices,
        )
        self._context_used = None
        self._load = None
        if self._child is not None:
            self._child.watch(False)
        self._set_state(RunnerState.READY)
        self._emit(event)
        self._advance()

    def _take_generating(self, message: AnyMessage) -> None:
        match message:
            case Piece():
                self._emit(Token(text=message.text))
            case Generated():
                self._context_used = message.context_used
                self._finish_generation(done_event(message))
            case AllocationFailure() if self._child_job is not None:
                self._finish_generation(out_of_memory_event(self._child_job.rig, message, generating=True))
            case Failure():
                self._finish_generation(Failed(kind=message.kind, message=message.message))

    def _finish_generation(self, ending: GenerationEnding) -> None:
        self._timer_due_s = None
        if self._child is not None:
            self._child.watch(False)
        state = RunnerState.FAILED if self._child is None else RunnerState.READY
        with self._lock:
            self._generation = None
            self._state = state
        self._tell_state(state)
        self._emit(ending)
        self._advance()

    # ------------------------------------------------------------------ the child's end

    def _receive_end(self, outcome: ProcessOutcome) -> None:
        self._inbox.put(partial(self._on_child_ended, outcome))

    def _on_child_ended(self, outcome: ProcessOutcome) -> None:
        self._child = None
        self._loaded = self._context_used = None
        load = self._load
        if load is not None and load.phase is LoadPhase.RUNNING:
            self._end_load(load, outcome)
        elif load is not None and load.phase is LoadPhase.REPLACING:
            load.phase = LoadPhase.CHECKING
            if load.cancelled:
                self._finish_load(Cancelled(stage=load.tracker.stage))
            else:
                self._on_checked(load, {})
        elif load is None:
            self._end_loaded(outcome)

    def _end_load(self, load: LoadRun, outcome: ProcessOutcome) -> None:
        if load.cancelled:
            self._finish_load(Cancelled(stage=load.tracker.stage))
        elif load.ending is not None:
            self._finish_load(load.ending)
        else:
            self._diagnose(outcome, load.tracker.stage, self._finish_load)

    def _end_loaded(self, outcome: ProcessOutcome) -> None:
        """The child of a loaded model ended: on our wish, while generating, or without being asked."""
        wanted = self._unload_wanted or self._closing
        if self._claim(RunnerState.STOPPED if wanted else RunnerState.STOPPING):
            if wanted:
                self._advance()
            else:
                self._diagnose(outcome, None, self._lose_idle)
        elif self._generation is not None and self._generation.killed and outcome.reason is EndReason.STOPPED:
            self._finish_generation(
                Failed(
                    kind="stalled",
                    message=f"The answer did not stop within {self._stop_timeout_s:g} s, so the engine process was "
                    "ended. Load the model again.",
                )
            )
        else:
            self._diagnose(outcome, None, self._finish_generation)

    def _lose_idle(self, ending: Failed | Crashed) -> None:
        self._set_state(RunnerState.FAILED)
        self._emit(ending)
        self._advance()

    def _diagnose(
        self, outcome: ProcessOutcome, stage: Stage | None, finish: Callable[[Failed | Crashed], None]
    ) -> None:
        """Find out which device is to blame, where one can be, then finish with that."""
        devices = self._child_job.used_endpoints() if self._child_job is not None else {}
        if not devices or not (outcome.lost_rpc or outcome.reason is EndReason.STALLED):
            finish(crash_event(outcome))
            return
        self._diagnosis = diagnosis = Diagnosis(outcome, stage, devices, finish)
        self._set_state(RunnerState.STOPPING)
        if self._closing:
            self._on_diagnosed(diagnosis, {})
        else:
            self._greet(list(devices), partial(self._on_diagnosed, diagnosis))

    def _on_diagnosed(self, diagnosis: Diagnosis, greetings: Mapping[str, Greeting]) -> None:
        if diagnosis is self._diagnosis:
            self._diagnosis = None
            diagnosis.finish(lost_event(diagnosis.outcome, diagnosis.stage, diagnosis.devices, greetings))

    def _greet(self, endpoints: Sequence[str], then: Callable[[Mapping[str, Greeting]], None]) -> None:
        """Say hello in a thread of its own; `then` is called in ours."""
        cancel = self._greeting_cancel = CancelToken()

        def greet() -> None:
            greetings = greet_all(endpoints, cancel=cancel)
            self._inbox.put(partial(then, greetings))

        thread = threading.Thread(target=greet, name="runner-greeter", daemon=True)
        self._greeters = [*(each for each in self._greeters if each.is_alive()), thread]
        thread.start()

    def _end_after_bug(self) -> None:
        """Give what runs its ending after an error of ours, and go on without the child."""
        ending = Failed(kind="internal", message="An internal error ended this. The log has the details.")
        load = self._load
        if load is not None and (load.phase is not LoadPhase.RUNNING or self._child is None):
            self._finish_load(ending)
        elif load is not None:
            self._conclude(load, ending)
        elif self._generation is not None:
            self._unload_wanted = True
            self._finish_generation(ending)


_NOTHING_GENERATED = Done(
    prompt_tokens=0,
    generated_tokens=0,
    prompt_tokens_per_second=0.0,
    generation_tokens_per_second=0.0,
    stop_reason="stopped",
)
