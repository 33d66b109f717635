"""The child that looks for machines nearby, from its start to its end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from engine.process.child import ChildProcess
from engine.process.outcome import EndReason, ProcessOutcome
from engine.programs import child_argv
from engine.protocol.messages import Failure, Message
from engine.protocol.network import Browse, NearbyMachine, NearbyMachines, TunnelMessage

_ASK_S = 0.2
_END_S = 5.0


class NearbySearch:
    """Calls `on_found` with all machines whenever there are others, and `on_problem` with a sentence where it ends.

    Both in threads of the child.
    """

    def __init__(
        self,
        on_found: Callable[[tuple[NearbyMachine, ...]], None],
        on_problem: Callable[[str], None],
        *,
        interfaces: Sequence[str] = (),
        argv: Sequence[str] | None = None,
    ) -> None:
        self._on_found, self._on_problem = on_found, on_problem
        self._request = Browse(interfaces=tuple(interfaces))
        argv = child_argv("tunnel") if argv is None else argv
        self._child = ChildProcess(self._take, self._take_end, argv=argv, name="nearby", messages=TunnelMessage)
        self._child.watch(False)
        self._lock = threading.Lock()
        self._closed = False

    def start(self) -> None:
        """Begin, once; not where it was closed before."""
        with self._lock:
            if not self._closed:
                self._child.start()
                self._child.send(self._request)

    def close(self) -> None:
        """End it, waiting a bounded time. In every state, any number of times, from any thread."""
        with self._lock:
            self._closed = True
        self._child.stop(ask_s=_ASK_S)
        self._child.wait(_END_S)

    def _take(self, message: Message) -> None:
        if isinstance(message, NearbyMachines):
            self._on_found(message.machines)
        elif isinstance(message, Failure):
            self._on_problem(message.message)

    def _take_end(self, outcome: ProcessOutcome) -> None:
        if outcome.reason is not EndReason.STOPPED:
            self._on_problem(f"The search in the network ended. {outcome.sentence}")
