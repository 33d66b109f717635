"""The functions that a program gives to a model pool (`PoolFunctions`), and memory of loaded models (`Holdings`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from msgspec import Struct

from engine.api.wire.names import ModelEntry
from engine.devices.device import ComputingNeed, Device, Rig
from engine.devices.telemetry.sample import MemoryHolder
from engine.planning.fit.loaded_models import HeldModel
from engine.runtime.session.load_spec import LoadSpec


def _no_rig() -> Rig:
    raise NotImplementedError


def _learn_nothing(_need: ComputingNeed) -> None:
    """Ignore the memory that a model needs while it computes; default of `PoolFunctions.learn`."""


def _no_plan(_entry: ModelEntry, _rig: Rig) -> LoadSpec:
    raise NotImplementedError


class PoolFunctions(Struct, frozen=True):
    """The functions that a pool calls to find, plan and load models.

    They may block and are called in threads, except as noted.
    `entries`: returns the models that requests may name.
    `rig`: returns the devices in their present state.
    `plan`: plans the load of a model on these devices; raises `EngineError`.
    `holders`: returns the processes that hold memory of a device.
    `learn`: saves how much memory a model needs besides llama.cpp's buffers while it computes, so that `rig` includes
    it. Called in the session's thread after a model ran out of memory.
    `load`: loads a model outside the pool and passes it to `ModelPool.lend`. Called in the event loop. Raises
    `ApiError`. Cancelled if no request waits for the model any more. None: the pool loads models itself. With `load`,
    the functions `rig` and `plan` are used only for forecasts.
    `keep_alive`: sets the idle time in seconds of a model that was passed to `lend`. Called in the event loop.
    """

    entries: Callable[[], Sequence[ModelEntry]]
    rig: Callable[[], Rig] = _no_rig
    plan: Callable[[ModelEntry, Rig], LoadSpec] = _no_plan
    holders: Callable[[Device], tuple[MemoryHolder, ...]] = lambda _device: ()
    learn: Callable[[ComputingNeed], None] = _learn_nothing
    load: Callable[[ModelEntry], Awaitable[None]] | None = None
    keep_alive: Callable[[ModelEntry, float], None] = lambda _entry, _keep_alive_s: None


class Holdings(Struct, frozen=True):
    """The memory of loaded models.

    `own`: models that may be unloaded for another load. `lent`: models that only their owner may unload.
    """

    own: tuple[HeldModel, ...]
    lent: tuple[HeldModel, ...]

    @property
    def all(self) -> tuple[HeldModel, ...]:
        return (*self.own, *self.lent)
