"""The runner: one loaded model's child, its state, and exactly one ending for everything that is begun."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.runner.board import Receivers
from engine.runner.child import DEFAULT_STALL_TIMEOUT_S
from engine.runner.events import AnyEvent
from engine.runner.lifecycle import STOP_TIMEOUT_S, Lifecycle, RunnerOptions
from engine.runner.load_order import LoadOrder
from engine.runner.protocol import DeviceMemoryReading, Generate
from engine.runner.runs import LoadedInfo, RunnerState

__all__ = ["LoadOrder", "LoadedInfo", "Runner", "RunnerState"]


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
        self._lifecycle = Lifecycle(
            Receivers(on_event, on_state, on_device_memory), RunnerOptions(stall_timeout_s, stop_timeout_s, argv)
        )

    @property
    def state(self) -> RunnerState:
        return self._lifecycle.state

    @property
    def is_ready(self) -> bool:
        return self.state is RunnerState.READY

    @property
    def loaded(self) -> LoadedInfo | None:
        """What is loaded; None before `Loaded` and after the child ended."""
        return self._lifecycle.loaded

    @property
    def context_size(self) -> int | None:
        """Tokens that the loaded context holds."""
        loaded = self._lifecycle.loaded
        return None if loaded is None else loaded.n_ctx

    @property
    def context_used(self) -> int | None:
        """Tokens in the loaded context after the last generation; None before the first."""
        return self._lifecycle.context_used

    def load(self, order: LoadOrder) -> None:
        """Load `order`. Its events end with one of `Loaded, OutOfMemory, Failed, Crashed, Cancelled`.

        Stopped, failed: begins. Ready: what is loaded stays until the layout was checked and the endpoints that it
        does not hold have answered, and is then replaced. Starting, loading, generating, stopping: what runs is
        stopped and gets its ending, then this begins; of several that wait the last does, the others are `Cancelled`.

        Raises:
            ArgumentError: after `close`.
        """
        self._lifecycle.put_load(order)

    def generate(self, request: Generate) -> None:
        """Generate. Ready: `Token`s, then one of `Done, OutOfMemory, Failed, Crashed`.

        Raises:
            ArgumentError: in every other state, with a sentence; then there is no event.
        """
        self._lifecycle.put_generate(request)

    def stop(self) -> None:
        """End the load or the generation that runs: ask, and kill the child when that takes longer than the limit.

        Starting, loading: the load ends with `Cancelled`. Generating: ends with `Done` (`stopped`), the model stays;
        a child that does not stop in time is ended, with `Failed`. Other states: nothing. A second call: nothing.
        """
        self._lifecycle.put_stop()

    def unload(self) -> None:
        """Free the loaded model. Starting, loading, generating: as `stop`, then frees. Stopped, failed: nothing."""
        self._lifecycle.put_unload()

    def query_device_memory(self) -> None:
        """Ask for the live memory of the loaded model's devices. Ready: `on_device_memory` gets it. Others: nothing."""
        self._lifecycle.put_memory_query()

    def close(self) -> None:
        """End everything, wait for it a bounded time; what runs gets its ending. A second call only waits."""
        self._lifecycle.close()
