"""One load from the first layout to its ending, in a thread of its own that may wait: attempts, then proposals."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence

import msgspec

from engine.cancellation import CancelToken
from engine.devices.device import Device
from engine.devices.holder import MemoryHolder
from engine.fit.proposals import Proposal
from engine.fit.step_back import Tried
from engine.plan.plan import Plan
from engine.runner.attempts import Attempts, LoadAttempt, refusal_of
from engine.runner.events import AnyEvent, Failed, Loaded, LoadEnding, OutOfMemory, Progress, Stage
from engine.runner.load_order import LoadOrder
from engine.runner.probe import Probes
from engine.runner.probe_cache import ProbeCache
from engine.runner.proposal_checks import ProposalCheck, missing_bytes
from engine.runner.runs import LoadedInfo

_log = logging.getLogger("layerdeck.engine")
_JOIN_S = 1.0

INTERNAL_FAILURE = Failed(kind="internal", message="An internal error ended this load. The log has the details.")


class Campaign:
    """A load that runs. Its calls never wait, but `join`; `load`, `tell` and `end` are called in its own thread.

    `load` hands over one layout for a real load, whose ending comes back through `take`; `end` gets the one ending.
    `held` is what is loaded when it begins: workers that it uses cannot be asked.
    """

    def __init__(
        self,
        order: LoadOrder,
        *,
        held: LoadedInfo | None,
        load: Callable[[Campaign, LoadOrder], None],
        tell: Callable[[AnyEvent], None],
        end: Callable[[Campaign, LoadEnding], None],
        holders: Callable[[Device], tuple[MemoryHolder, ...]],
        cache: ProbeCache,
        proposal_limit_s: float,
        argv: Sequence[str] | None,
    ) -> None:
        self._proposal_limit_s = proposal_limit_s
        self._order, self._held = order, held
        self._load, self._tell, self._end = load, tell, end
        self._holders, self._cache, self._argv = holders, cache, argv
        self._endings: queue.SimpleQueue[LoadEnding] = queue.SimpleQueue()
        self._cancel = CancelToken()
        self._thread = threading.Thread(target=self._run, name="load-campaign", daemon=True)
        self._attempts: Attempts | None = None
        self.proposals: tuple[Proposal, ...] = ()
        self.stage: Stage = "header"
        self.is_loading = False
        """Whether a layout was handed to the runner and has not ended; `has_begun`: the runner has turned to it."""
        self.has_begun = False
        self.has_loaded = False

    @property
    def log(self) -> tuple[LoadAttempt, ...]:
        """What was tried, where more than one layout may be."""
        return () if self._attempts is None else self._attempts.log

    @property
    def is_stopped(self) -> bool:
        return self._cancel.cancelled

    def start(self) -> None:
        """Begin, in a thread of its own."""
        self._thread.start()

    def join(self) -> None:
        """Wait for its thread, which has told the ending and does nothing more."""
        self._thread.join(_JOIN_S)

    def stop(self) -> None:
        """Try no other layout and ask the engine nothing more."""
        self._cancel.cancel()

    def take(self, ending: LoadEnding) -> None:
        """Take the ending of the layout that was handed over."""
        self.is_loading = self.has_begun = False
        self.has_loaded = isinstance(ending, Loaded)
        self._endings.put(ending)

    def note(self, event: AnyEvent) -> None:
        """Take notice of an event on the way."""
        if isinstance(event, Progress):
            self.stage = event.stage

    # ------------------------------------------------------------------ in its thread

    def _run(self) -> None:
        try:
            ending = self._steps()
        except Exception:
            _log.exception("a load failed with an error of ours")
            ending = INTERNAL_FAILURE
        self._end(self, ending)

    def _steps(self) -> LoadEnding:
        # Its thread plans on while others do: the tables are its own.
        order = self._order.with_plan(self._order.plan.with_own_tables())
        plan = order.plan
        if not order.retry.retries:
            ending = self._load_really(order)
            if isinstance(ending, OutOfMemory):
                return self._explained(plan, ending, (Tried(plan.edit.layout, plan.forecast, refusal_of(ending)),))
            return ending
        if plan.violations:
            return self._load_really(order)  # It says which rule, and no other layout was asked for.
        for stage in ("header", "fit"):
            self._tell(Progress(stage=stage))
        with Probes(cache=self._cache, argv=self._argv, cancel=self._cancel) as probes:
            can_ask = self._held is None or not self._held.order.plan.used_endpoints.keys() & self._endpoints()
            self._attempts = Attempts(order, probes if can_ask else None, self._load_really, self._tell, self._cancel)
            ending = self._attempts.run()
        return self._explained(plan, ending, self._attempts.tried) if isinstance(ending, OutOfMemory) else ending

    def _endpoints(self) -> set[str]:
        return {device.endpoint for device in self._order.plan.rig.devices if device.endpoint is not None}

    def _load_really(self, order: LoadOrder) -> LoadEnding:
        self._load(self, order)
        return self._endings.get()

    def _explained(self, plan: Plan, ending: OutOfMemory, tried: Sequence[Tried]) -> OutOfMemory:
        """Return `ending` with what to change and who holds the memory."""
        missing, limit_s = missing_bytes(tried), self._proposal_limit_s
        with Probes(cache=self._cache, timeout_s=limit_s, argv=self._argv, cancel=self._cancel) as probes:
            self.proposals = ProposalCheck(plan, missing, probes, self._cancel, limit_s).run()
        device = plan.rig.device(ending.device)
        return msgspec.structs.replace(
            ending,
            proposals=tuple(each.text for each in self.proposals),
            holders=() if device is None else self._holders(device),
        )
