"""The load loop: a runner whose loads may step back to other layouts, and whose failures bring checked proposals."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from engine.devices.device import Device
from engine.devices.holder import MemoryHolder
from engine.errors import ArgumentError, EngineError
from engine.fit.proposals import Proposal
from engine.runner.attempts import LoadAttempt
from engine.runner.board import Receivers
from engine.runner.campaign import INTERNAL_FAILURE, Campaign
from engine.runner.child import DEFAULT_STALL_TIMEOUT_S
from engine.runner.client import Runner
from engine.runner.events import AnyEvent, Cancelled, Crashed, Done, Failed, Loaded, LoadEnding, OutOfMemory
from engine.runner.inbox import Inbox
from engine.runner.lifecycle import STOP_TIMEOUT_S
from engine.runner.load_order import LoadOrder
from engine.runner.probe_cache import ProbeCache
from engine.runner.proposal_checks import LIMIT_S
from engine.runner.protocol import DeviceMemoryReading, Generate
from engine.runner.runs import LoadedInfo, RunnerState, WaitingLoad

_CLOSE_TIMEOUT_S = 10.0
_BUSY = (RunnerState.STARTING, RunnerState.LOADING, RunnerState.STOPPING)


def nobody(_device: Device) -> tuple[MemoryHolder, ...]:
    """Tell of no process, where nothing can tell who holds a device's memory."""
    return ()


class LoadLoop:
    """A `Runner` that asks the engine before it loads, and loads again: same calls, same events, same guarantees.

    Thread-safe; no call but `close` waits. Every load gets exactly one ending, however many layouts were tried for it,
    and can be stopped at every moment. What is tried beyond the layout that was asked for says `LoadOrder.retry`.
    `holders` tells, in a thread of ours, who holds a device's memory when a load has run out of it.
    """

    def __init__(
        self,
        on_event: Callable[[AnyEvent], None],
        *,
        on_state: Callable[[RunnerState], None] | None = None,
        on_device_memory: Callable[[tuple[DeviceMemoryReading, ...]], None] | None = None,
        holders: Callable[[Device], tuple[MemoryHolder, ...]] = nobody,
        cache: ProbeCache | None = None,
        stall_timeout_s: float = DEFAULT_STALL_TIMEOUT_S,
        stop_timeout_s: float = STOP_TIMEOUT_S,
        proposal_limit_s: float = LIMIT_S,
        argv: Sequence[str] | None = None,
    ) -> None:
        self._proposal_limit_s = proposal_limit_s
        self._receivers = Receivers(on_event, on_state, on_device_memory)
        self._inbox = Inbox("load-loop", is_over=self._is_over, on_bug=self._end_after_bug)
        self._runner = Runner(
            lambda event: self._inbox.put_result(partial(self._take_event, event)),
            on_state=lambda state: self._inbox.put_result(partial(self._take_state, state)),
            on_device_memory=self._receivers.tell_device_memory,
            stall_timeout_s=stall_timeout_s,
            stop_timeout_s=stop_timeout_s,
            argv=argv,
        )
        self._holders, self._cache, self._argv = holders, cache if cache is not None else ProbeCache(), argv
        self._lock = threading.Lock()
        # Guarded by the lock: loads and generations that have begun (or wait) and not ended.
        self._loads = 0
        self._generations = 0
        self._closed = False
        # The inbox's from here; `_state` and `_campaign` are replaced whole and read anywhere.
        self._state = RunnerState.STOPPED
        self._campaign: Campaign | None = None
        self._last: Campaign | None = None
        self._waiting: deque[WaitingLoad] = deque()
        self._later: list[AnyEvent] = []
        self._closing = False

    # ------------------------------------------------------------------ what is known

    @property
    def state(self) -> RunnerState:
        """What the child does; while layouts are probed and compared there is none, and this is still a load."""
        return self._runner.state if self._campaign is None else self._state

    @property
    def is_ready(self) -> bool:
        return self.state is RunnerState.READY

    @property
    def loaded(self) -> LoadedInfo | None:
        """What is loaded, with the order whose layout it was in the end; None before `Loaded` and after the child."""
        return self._runner.loaded

    @property
    def context_size(self) -> int | None:
        """Tokens that the loaded context holds."""
        return self._runner.context_size

    @property
    def context_used(self) -> int | None:
        """Tokens in the loaded context after the last generation; None before the first."""
        return self._runner.context_used

    @property
    def proposals(self) -> tuple[Proposal, ...]:
        """What to change after the last load ran out of memory; empty after every other ending."""
        return () if self._last is None else self._last.proposals

    @property
    def attempts(self) -> tuple[LoadAttempt, ...]:
        """The layouts that the last load tried, the one it tries now included; empty where it may only try one."""
        return () if self._last is None else self._last.log

    # ------------------------------------------------------------------ calls

    def load(self, order: LoadOrder) -> None:
        """Load `order`, or what its retries allow. Ends with one of `Loaded, OutOfMemory, Failed, Crashed, Cancelled`.

        Stopped, failed, ready: begins; what is loaded stays until a layout is loaded for real. Else what runs is
        stopped and gets its ending, then this begins; of several that wait the last does, the others are `Cancelled`.

        Raises:
            ArgumentError: after `close`.
        """
        with self._lock:
            if self._closed or not self._inbox.put(partial(self._do_load, order)):
                raise ArgumentError("The runner is closed and loads nothing any more.")
            self._loads += 1

    def generate(self, request: Generate) -> None:
        """Generate. Ready: `Token`s, then one of `Done, OutOfMemory, Failed, Crashed`.

        Raises:
            ArgumentError: in every other state, with a sentence; then there is no event.
        """
        with self._lock:
            if self._loads:
                raise ArgumentError("A model is being loaded; wait until it is ready.")
            self._runner.generate(request)
            self._generations += 1

    def stop(self) -> None:
        """End the load or the generation that runs, as `Runner.stop`; proposals being checked come as they are."""
        self._inbox.put(self._do_stop)

    def unload(self) -> None:
        """Free the loaded model, as `Runner.unload`."""
        self._inbox.put(self._do_unload)

    def query_device_memory(self) -> None:
        """Ask for the live memory of the loaded model's devices, as `Runner.query_device_memory`."""
        self._runner.query_device_memory()

    def close(self) -> None:
        """End everything, wait for it a bounded time; what runs gets its ending. A second call only waits."""
        with self._lock:
            self._closed = True
        self._inbox.put(self._do_stop)
        self._runner.close()
        self._inbox.close(self._do_close, _CLOSE_TIMEOUT_S)

    # ------------------------------------------------------------------ in the inbox's thread

    def _is_over(self) -> bool:
        return self._closing and self._campaign is None and not self._waiting

    def _do_load(self, order: LoadOrder) -> None:
        self._waiting.append(WaitingLoad(order))
        self._stop_campaign()
        self._advance()

    def _do_stop(self) -> None:
        for waiting in self._waiting:
            waiting.cancelled = True
        self._stop_campaign()
        self._runner.stop()
        self._advance()

    def _do_unload(self) -> None:
        self._do_stop()
        self._runner.unload()

    def _do_close(self) -> None:
        self._closing = True
        self._do_stop()

    def _stop_campaign(self) -> None:
        campaign = self._campaign
        if campaign is not None:
            campaign.stop()
            self._show_state(RunnerState.STOPPING)
            self._runner.stop()

    def _advance(self) -> None:
        """Begin the load that waits, once nothing else runs."""
        while self._waiting and self._campaign is None:
            if self._waiting[0].cancelled or len(self._waiting) > 1:
                self._waiting.popleft()
                self._end_load(Cancelled(stage="header"))
            elif self._answers():
                self._runner.stop()  # Its ending comes first, and leads here again.
                return
            else:
                self._begin(self._waiting.popleft().order)

    def _answers(self) -> bool:
        with self._lock:
            return self._generations > 0

    def _begin(self, order: LoadOrder) -> None:
        self._campaign = self._last = Campaign(
            order,
            held=self._runner.loaded,
            load=lambda campaign, each: self._inbox.put_result(partial(self._load_now, campaign, each)),
            tell=lambda event: self._inbox.put_result(partial(self._receivers.tell, event)),
            end=lambda campaign, ending: self._inbox.put_result(partial(self._finish, campaign, ending)),
            holders=self._holders,
            cache=self._cache,
            proposal_limit_s=self._proposal_limit_s,
            argv=self._argv,
        )
        if order.retry.retries:
            self._show_state(RunnerState.STARTING)
        self._campaign.start()

    def _load_now(self, campaign: Campaign, order: LoadOrder) -> None:
        """Load one layout for real, unless the load was stopped a moment ago."""
        if campaign.is_stopped:
            campaign.take(Cancelled(stage=campaign.stage))
            return
        campaign.is_loading = True
        try:
            self._runner.load(order)
        except EngineError:  # Closed in the meantime.
            campaign.take(Cancelled(stage=campaign.stage))

    def _take_event(self, event: AnyEvent) -> None:
        if self._campaign is not None:
            self._take_loading(self._campaign, event)
            return
        self._receivers.tell(event)
        if isinstance(event, Done | OutOfMemory | Failed | Crashed):
            with self._lock:
                self._generations = max(0, self._generations - 1)
            self._advance()

    def _take_loading(self, campaign: Campaign, event: AnyEvent) -> None:
        """Take an event while a load runs. What was loaded before may be lost while layouts are probed: that is no
        ending of this load, and nobody waits for it any more."""
        if not isinstance(event, Loaded | OutOfMemory | Failed | Crashed | Cancelled):
            campaign.note(event)
            self._receivers.tell(event)
        elif campaign.has_begun or (campaign.is_loading and isinstance(event, Cancelled)):
            campaign.take(event)
        elif campaign.has_loaded:
            self._later.append(event)  # Lost before anybody was told that it is loaded.

    def _take_state(self, state: RunnerState) -> None:
        campaign = self._campaign
        if campaign is None:
            self._show_state(state)
        elif state in _BUSY:
            campaign.has_begun = campaign.has_begun or (campaign.is_loading and state is RunnerState.STARTING)
            self._show_state(state)

    def _show_state(self, state: RunnerState) -> None:
        changed, self._state = self._state is not state, state
        if changed:
            self._receivers.tell_state(state)

    def _finish(self, campaign: Campaign, ending: LoadEnding) -> None:
        campaign.join()
        self._campaign = None
        self._show_state(self._runner.state)
        self._end_load(ending)
        later, self._later = self._later, []
        for event in later:
            self._receivers.tell(event)
        self._advance()

    def _end_load(self, ending: LoadEnding) -> None:
        with self._lock:
            self._loads -= 1
        self._receivers.tell(ending)

    def _end_after_bug(self) -> None:
        """Give the load that runs its ending after an error of ours."""
        if self._campaign is not None:
            self._campaign.stop()
            self._campaign.take(INTERNAL_FAILURE)
            self._runner.unload()
