"""The life of a runner's child: every transition, in one thread, so that what meets is told apart by who came first."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import msgspec

from engine.errors import ArgumentError, EngineError
from engine.plan.requests import environment, load_request
from engine.runner.board import Board, Receivers
from engine.runner.child import DEFAULT_STALL_TIMEOUT_S, ChildProcess
from engine.runner.events import (
    Cancelled,
    Crashed,
    Failed,
    GenerationEnding,
    LoadEnding,
    Stage,
    Token,
)
from engine.runner.greeter import Greetings
from engine.runner.inbox import Inbox
from engine.runner.load_order import LoadOrder
from engine.runner.outcome import EndReason, ProcessOutcome
from engine.runner.protocol import (
    AllocationFailure,
    AnyMessage,
    DeviceMemoryQuery,
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
    NOTHING_GENERATED,
    crash_event,
    done_event,
    failed_event,
    loaded_event,
    out_of_memory_event,
    refusal,
)
from engine.runner.runs import (
    GenerationRun,
    LoadedInfo,
    LoadPhase,
    LoadRun,
    RunnerState,
    WaitingLoad,
)
from engine.runner.search import Diagnosis, EndpointSearch

STOP_TIMEOUT_S = 2.0
"""From asking for an end until the child has been killed, if that is what it takes."""
_TERMINATE_S = 0.3
_KILL_S = 0.2
"""Reserve for the kill itself and for collecting the process."""
_CLOSE_TIMEOUT_S = 10.0
_MAX_WAITING_MESSAGES = 256
"""More than this and the child's pipe is held up, instead of our memory growing."""


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """`argv` None: our own worker. Times in seconds."""

    stall_timeout_s: float = DEFAULT_STALL_TIMEOUT_S
    stop_timeout_s: float = STOP_TIMEOUT_S
    argv: Sequence[str] | None = None


class Lifecycle:
    """State and child of a runner. `put_*`, `close` and what is public are for any thread, all else for the inbox's."""

    def __init__(self, receivers: Receivers, options: RunnerOptions) -> None:
        self._board = Board(receivers)
        self._options = options
        self._inbox = Inbox("runner", is_over=self._is_over, on_bug=self._end_after_bug)
        self._search = EndpointSearch(self._inbox)
        self._room = threading.Semaphore(_MAX_WAITING_MESSAGES)
        # Replaced whole, so that they may be read anywhere.
        self.loaded: LoadedInfo | None = None
        self.context_used: int | None = None
        self._child: ChildProcess | None = None
        self._child_order: LoadOrder | None = None
        self._last_child: ChildProcess | None = None
        self._load: LoadRun | None = None
        self._waiting: deque[WaitingLoad] = deque()
        self._unload_wanted = False
        self._closing = False
        self._request_ids = count(1)

    @property
    def state(self) -> RunnerState:
        return self._board.state

    # ------------------------------------------------------------------ from any thread

    def put_load(self, order: LoadOrder) -> None:
        if not self._inbox.put(partial(self._do_load, order)):
            raise ArgumentError("The runner is closed and loads nothing any more.")

    def put_generate(self, request: Generate) -> None:
        self._board.begin_generation(
            lambda generation: self._inbox.put(partial(self._do_generate, generation, request))
        )

    def put_stop(self) -> None:
        self._inbox.put(self._do_stop)

    def put_unload(self) -> None:
        self._inbox.put(self._do_unload)

    def put_memory_query(self) -> None:
        self._inbox.put(self._do_query_memory)

    def close(self) -> None:
        self._inbox.close(self._do_close, _CLOSE_TIMEOUT_S)
        if self._inbox.is_own_thread():
            return
        if self._last_child is not None:
            self._last_child.wait(1.0)
        self._search.join()

    # ------------------------------------------------------------------ commands

    def _is_idle(self) -> bool:
        return self._load is None and self._board.generation is None and not self._search.is_diagnosing

    def _is_over(self) -> bool:
        return self._closing and self._is_idle() and self._child is None and not self._waiting

    def _do_load(self, order: LoadOrder) -> None:
        self._waiting.append(WaitingLoad(order))
        self._end_what_runs()
        self._advance()

    def _do_generate(self, generation: GenerationRun, request: Generate) -> None:
        if generation is not self._board.generation or self._search.is_diagnosing:
            return  # The child ended in between; that was, or is about to be, this generation's end as well.
        if generation.stopping:
            self._finish_generation(NOTHING_GENERATED)
            return
        assert self._child is not None
        self._board.tell_state(RunnerState.GENERATING)
        generation.sent = True
        self._child.watch(True)
        self._child.send(msgspec.structs.replace(request, id=next(self._request_ids)))

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

    def _kill_generation(self, generation: GenerationRun) -> None:
        if generation is self._board.generation and self._child is not None:
            generation.killed = True
            self._child.stop(ask_s=0.0, terminate_s=_TERMINATE_S)

    # ------------------------------------------------------------------ what comes next

    def _end_what_runs(self) -> None:
        """Ask what runs to end. Its ending comes when the child has answered or is gone; a diagnosis ends at once."""
        if self._search.cut_short():
            return  # That was all that ran; with its ending a load that waited may have begun, and is not meant.
        load, generation = self._load, self._board.generation
        if load is not None and not load.cancelled:
            load.cancelled = True
            if load.phase is LoadPhase.CHECKING:
                self._finish_load(Cancelled(stage=load.tracker.stage))
            elif load.phase is LoadPhase.RUNNING:
                self._board.set_state(RunnerState.STOPPING)
                self._stop_child(Stop())
        if generation is not None and not generation.stopping:
            generation.stopping = True
            self._board.set_state(RunnerState.STOPPING)
            if generation.sent and self._child is not None:
                self._inbox.call_later(self._ask_s(), partial(self._kill_generation, generation))
                self._child.send(Stop())

    def _stop_child(self, *requests: Stop) -> None:
        if self._child is not None:
            for request in requests:
                self._child.send(request)
            self._child.stop(ask_s=self._ask_s(), terminate_s=_TERMINATE_S)

    def _ask_s(self) -> float:
        """How long a child may take to stop by itself, so that killing it still ends within the limit."""
        return max(0.0, self._options.stop_timeout_s - _TERMINATE_S - _KILL_S)

    def _advance(self) -> None:
        """Go on to what was asked for, once nothing runs: unload, close, or the load that waits."""
        if not self._is_idle():
            return
        if self._child is None:
            self._unload_wanted = False
        elif self._unload_wanted or self._closing:
            if self._board.claim(RunnerState.STOPPING):
                self._stop_child()
            else:
                self._end_what_runs()
            return
        while self._waiting:
            if self._waiting[0].cancelled or len(self._waiting) > 1:
                self._waiting.popleft()
                self._board.tell(Cancelled(stage="header"))
            elif self._board.claim(RunnerState.STARTING):
                self._begin(self._waiting.popleft().order)
                return
            else:
                self._end_what_runs()
                return

    # ------------------------------------------------------------------ loading

    def _begin(self, order: LoadOrder) -> None:
        load = self._load = LoadRun(order)
        self._board.tell(load.tracker.enter("header"))
        self._board.tell(load.tracker.enter("fit"))
        try:
            load.request = load_request(order.plan)
        except EngineError as error:
            self._finish_load(Failed(kind=error.kind, message=error.summary()))
            return
        endpoints = order.plan.used_endpoints
        held = {}
        if self._child is not None and self._child_order is not None:
            held = self._child_order.plan.used_endpoints
        load.unchecked = tuple(endpoint for endpoint in endpoints if endpoint in held)
        self._check(load, [endpoint for endpoint in endpoints if endpoint not in held])

    def _check(self, load: LoadRun, endpoints: Sequence[str]) -> None:
        if endpoints:
            self._search.greet(endpoints, partial(self._on_checked, load))
        else:
            self._on_checked(load, {})

    def _on_checked(self, load: LoadRun, greetings: Greetings) -> None:
        if load is not self._load or load.phase is not LoadPhase.CHECKING:
            return
        refused = refusal(greetings, load.order.plan.used_endpoints)
        if refused is not None:
            self._finish_load(refused)
        elif self._child is not None:
            load.phase = LoadPhase.REPLACING
            self.loaded = self.context_used = None
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
            lambda message: self._receive(child, message),
            lambda outcome: self._inbox.put_result(partial(self._on_child_ended, child, outcome)),
            argv=self._options.argv,
            stall_timeout_s=self._options.stall_timeout_s,
            environment=environment(load.order.plan),
        )
        self._child = self._last_child = child
        self._child_order = load.order
        child.start()
        child.send(load.request)

    def _conclude(self, load: LoadRun, ending: LoadEnding) -> None:
        """Keep the child's last word on this load and end it; the ending follows when its memory is free again."""
        if load.ending is None:
            load.ending = ending
            self._board.set_state(RunnerState.STOPPING)
            self._stop_child()

    def _finish_load(self, ending: LoadEnding) -> None:
        self._load = None
        if self._child is not None:
            self._board.set_state(RunnerState.READY)  # Refused before it replaced what is loaded.
        else:
            self._board.set_state(RunnerState.STOPPED if isinstance(ending, Cancelled) else RunnerState.FAILED)
        self._board.tell(ending)
        self._advance()

    # ------------------------------------------------------------------ the child's messages

    def _receive(self, child: ChildProcess, message: AnyMessage) -> None:
        """Take a message over in the child's reader thread, which waits while too many are unread."""
        self._room.acquire()
        self._inbox.put_result(partial(self._take, child, message))

    def _take(self, child: ChildProcess, message: AnyMessage) -> None:
        self._room.release()
        if child is not self._child:
            return  # Its end was already taken; what runs now is another child's.
        load = self._load
        if load is not None and load.phase is LoadPhase.RUNNING:
            if not load.cancelled:
                self._take_loading(load, message)
        elif self._board.generation is not None and self._board.generation.sent and not self._board.generation.killed:
            self._take_generating(message)
        if isinstance(message, DeviceMemoryReadings):
            self._board.tell_device_memory(message.readings)

    def _take_loading(self, load: LoadRun, message: AnyMessage) -> None:
        match message:
            case Hello():
                self._board.set_state(RunnerState.LOADING)
            case StageProgress():
                progress = load.tracker.advance(message)
                if progress is not None and load.ending is None:
                    self._board.tell(progress)
            case LoadedModel() if load.ending is None:
                self._become_ready(load, message)
            case AllocationFailure():
                self._conclude(load, out_of_memory_event(load.order.plan.rig, message))
            case Failure():
                self._conclude(load, failed_event(message))
            case Stopped():
                self._conclude(load, Cancelled(stage=message.stage))

    def _become_ready(self, load: LoadRun, message: LoadedModel) -> None:
        event = loaded_event(load.order.plan, message)
        self.loaded = LoadedInfo(
            order=load.order,
            n_ctx=message.n_ctx,
            n_vocab=message.n_vocab,
            chat_template=message.chat_template,
            flash_attention=message.flash_attention,
            layer_devices=message.layer_devices,
            kv_devices=message.kv_devices,
            context=load.order.plan.settings if load.request is None else load.request.context,
        )
        self.context_used = None
        self._load = None
        if self._child is not None:
            self._child.watch(False)
        self._board.set_state(RunnerState.READY)
        self._board.tell(event)
        self._advance()

    def _take_generating(self, message: AnyMessage) -> None:
        match message:
            case Piece():
                self._board.tell(Token(text=message.text))
            case Generated():
                self.context_used = message.context_used
                self._finish_generation(done_event(message))
            case AllocationFailure() if self._child_order is not None:
                self._finish_generation(out_of_memory_event(self._child_order.plan.rig, message, generating=True))
            case Failure():
                self._finish_generation(failed_event(message))

    def _finish_generation(self, ending: GenerationEnding) -> None:
        self._inbox.forget_later()
        if self._child is not None:
            self._child.watch(False)
        state = RunnerState.FAILED if self._child is None else RunnerState.READY
        self._board.end_generation(state)
        self._board.tell(ending)
        self._advance()

    # ------------------------------------------------------------------ the child's end

    def _on_child_ended(self, child: ChildProcess, outcome: ProcessOutcome) -> None:
        if child is not self._child:
            return
        self._child = None
        self.loaded = self.context_used = None
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
        generation = self._board.generation
        if self._board.claim(RunnerState.STOPPED if wanted else RunnerState.STOPPING):
            if wanted:
                self._advance()
            else:
                self._diagnose(outcome, None, self._lose_idle)
        elif generation is not None and generation.killed and outcome.reason is EndReason.STOPPED:
            self._finish_generation(
                Failed(
                    kind="stalled",
                    message=f"The answer did not stop within {self._options.stop_timeout_s:g} s, so the engine process "
                    "was ended. Load the model again.",
                )
            )
        else:
            self._diagnose(outcome, None, self._finish_generation)

    def _lose_idle(self, ending: Failed | Crashed) -> None:
        self._board.set_state(RunnerState.FAILED)
        self._board.tell(ending)
        self._advance()

    def _diagnose(
        self, outcome: ProcessOutcome, stage: Stage | None, finish: Callable[[Failed | Crashed], None]
    ) -> None:
        """Find out which device is to blame, where one can be, then finish with that."""
        devices = self._child_order.plan.used_endpoints if self._child_order is not None else {}
        if not devices or not (outcome.lost_rpc or outcome.reason is EndReason.STALLED):
            finish(crash_event(outcome))
            return
        self._board.set_state(RunnerState.STOPPING)
        self._search.diagnose(Diagnosis(outcome, stage, devices, finish))
        if self._closing:
            self._search.cut_short()

    def _end_after_bug(self) -> None:
        """Give what runs its ending after an error of ours, and go on without the child."""
        ending = Failed(kind="internal", message="An internal error ended this. The log has the details.")
        load = self._load
        if load is not None and (load.phase is not LoadPhase.RUNNING or self._child is None):
            self._finish_load(ending)
        elif load is not None:
            self._conclude(load, ending)
        elif self._board.generation is not None:
            self._unload_wanted = True
            self._finish_generation(ending)
