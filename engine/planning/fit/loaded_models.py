"""Models that are loaded at the same time: the memory that they leave free, models to unload, and keep-alive times.

All classes are immutable and all functions pure. Times are in seconds of one monotonic clock; the caller passes them
in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import combinations
from math import inf

from msgspec import Struct, field

from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Holding, Rig
from engine.model.gguf.model_file import FileIdentity
from engine.planning.plan.preview import LoadedLayout
from engine.planning.plan.report import DeviceRow, missing_bytes

UNTIL_UNLOADED_S = inf
AFTER_THE_ANSWER_S = 0.0


class HeldModel(Struct, frozen=True):
    """A loaded model and the memory that it holds.

    `held_bytes`: bytes by device id.
    `endpoints`: RPC workers that it uses.
    `keep_alive_s`: idle seconds after which it is unloaded; `AFTER_THE_ANSWER_S` for directly after its next answer.
    `idle_since_s`: time at which its last request ended; None while it is busy.
    `has_answered`: whether its last work was an answer.
    """

    key: FileIdentity
    name: str
    held_bytes: Mapping[str, int] = field(default_factory=dict)
    endpoints: frozenset[str] = frozenset()
    keep_alive_s: float = UNTIL_UNLOADED_S
    idle_since_s: float | None = None
    has_answered: bool = False

    @property
    def is_busy(self) -> bool:
        return self.idle_since_s is None

    @property
    def expires_s(self) -> float:
        """Time in seconds at which the model is to be unloaded; infinite if it stays loaded or is busy."""
        if self.idle_since_s is None or (self.keep_alive_s == AFTER_THE_ANSWER_S and not self.has_answered):
            return inf
        return self.idle_since_s + self.keep_alive_s

    def holding(self, held_bytes: Mapping[str, int], endpoints: frozenset[str]) -> HeldModel:
        """Return the model, which now holds `held_bytes` (bytes by device id) and uses the RPC workers `endpoints`."""
        return replace(self, held_bytes=held_bytes, endpoints=endpoints)

    def busy(self) -> HeldModel:
        """Return the model marked as busy, so that its keep-alive time does not run.

        Called at the start of an answer or a load.
        """
        return replace(self, idle_since_s=None)

    def idle(self, now_s: float, *, answered: bool) -> HeldModel:
        """Return the model marked as idle; its keep-alive time starts at `now_s`.

        Called at the end of an answer or a load.

        `answered`: True after an answer, False after a load.
        """
        return replace(self, idle_since_s=now_s, has_answered=answered)

    def kept_alive(self, keep_alive_s: float, now_s: float) -> HeldModel:
        """Return the model with another keep-alive time, which starts now."""
        # Counted from now, or a shorter keep-alive could unload the model at once.
        idle_since_s = None if self.is_busy else now_s
        return replace(self, keep_alive_s=keep_alive_s, idle_since_s=idle_since_s, has_answered=False)


def expired(models: Iterable[HeldModel], now_s: float) -> tuple[HeldModel, ...]:
    """Return the idle models whose keep-alive time has ended at `now_s`."""
    return tuple(model for model in models if model.expires_s <= now_s)


def next_expiry_s(models: Iterable[HeldModel]) -> float | None:
    """Return the earliest time at which a keep-alive time ends; None if all models stay loaded or are busy."""
    first_s = min((model.expires_s for model in models), default=inf)
    return None if first_s == inf else first_s


def choose_victims(
    models: Sequence[HeldModel], is_enough: Callable[[Sequence[HeldModel]], bool]
) -> tuple[HeldModel, ...] | None:
    """Return the models to unload so that there is enough memory; None if unloading all models is not enough.

    Busy models are only chosen if unloading all idle models is not enough, and then as few as possible. Otherwise the
    fewest models are chosen. Of several choices with equally many models, the one with the shortest keep-alive times is
    used, then the one whose models are idle longest.

    `is_enough`: returns whether there is enough memory after the given models were unloaded.
    """
    ordered = sorted(models, key=eviction_order)
    idle = [model for model in ordered if not model.is_busy]
    busy = [model for model in ordered if model.is_busy]
    if not is_enough(ordered):
        return None
    if is_enough(idle):
        return _fewest(idle, (), is_enough)
    needed = _fewest(busy, idle, is_enough)
    # Busy models first: with these, some idle ones may be able to stay.
    return (*_fewest(idle, needed, is_enough), *needed)


def _fewest(
    models: Sequence[HeldModel],
    also: Sequence[HeldModel],
    is_enough: Callable[[Sequence[HeldModel]], bool],
) -> tuple[HeldModel, ...]:
    """Return the fewest of `models` to unload, in addition to all of `also`, so that there is enough memory.

    The caller has checked that unloading all `models` and all of `also` is enough.

    `is_enough`: returns whether there is enough memory after the given models were unloaded.
    """
    # Few models are loaded at a time, so all combinations can be tried. The smallest come first.
    choices = (choice for count in range(len(models)) for choice in combinations(models, count))
    return next((choice for choice in choices if is_enough((*choice, *also))), tuple(models))


def eviction_order(model: HeldModel) -> tuple[float, float, str]:
    """Return the sort key of an idle model; the model with the smallest key is unloaded first.

    Models with a shorter keep-alive time come first; among equal ones, the one that is idle longest.
    """
    # The name comes last, so that equal models are always unloaded in the same order.
    return (model.keep_alive_s, inf if model.idle_since_s is None else model.idle_since_s, model.name)


def held_bytes(loaded: LoadedLayout, checkpoint_bytes: int = 0) -> dict[str, int]:
    """Return the bytes that a loaded model holds on each device that it uses, by device id.

    llama.cpp does not report the overhead (memory beyond its buffers), so it is taken from the forecast.
    `checkpoint_bytes`: host memory of the checkpoints of all sequences, in addition to the measured memory.
    """
    # A measured row may contain a part of these bytes already; only the difference is added.
    besides = {row.id: row.overhead_bytes + row.answering_bytes for row in loaded.forecast}
    held = {
        row.id: row.need_bytes + max(0, besides.get(row.id, 0) - row.overhead_bytes - row.answering_bytes)
        for row in loaded.measured
        if row.need_bytes
    }
    if checkpoint_bytes:
        held[CPU_ID] = held.get(CPU_ID, 0) + checkpoint_bytes
    return held


_Others = Sequence[HeldModel]


def rig_after_unload(
    rig: Rig,
    models: Collection[HeldModel],
    leaving: Collection[HeldModel] = (),
    seen_bytes: Mapping[str, int] | None = None,
) -> Rig:
    """Return `rig` with the free memory that the next load will find if the models in `leaving` are unloaded first.

    The free memory of a device is what it reports now plus the bytes of the unloaded models. It is at most the total
    memory (or cap) less the bytes of the models that stay loaded. An RPC worker that serves one of these has no free
    memory, because a worker serves one client at a time.

    `rig`: devices with the free memory that they report while all of `models` are loaded.
    `models`: all loaded models, including those in `leaving`.
    `seen_bytes`: bytes that this program's processes hold on each device according to its driver; no more than these
    bytes count as freed there.
    """
    leaving_keys = {model.key for model in leaving}
    staying = [model for model in models if model.key not in leaving_keys]
    seen = seen_bytes or {}

    def after_unload(device: Device) -> Device:
        returned_bytes = sum(model.held_bytes.get(device.id, 0) for model in leaving)
        returned_bytes = min(returned_bytes, seen.get(device.id, returned_bytes))
        if not device.is_host:
            return _device_after_unload(device, staying, returned_bytes)
        # The driver does not count buffers of a device with unified memory as memory of our processes.
        shared = [each.id for each in rig.devices if each.unified]
        returned_bytes += sum(model.held_bytes.get(name, 0) for model in leaving for name in shared)
        taken_bytes = sum(model.held_bytes.get(name, 0) for model in staying for name in shared)
        return _device_after_unload(device, staying, returned_bytes, taken_bytes)

    return Rig(tuple(map(after_unload, rig.devices)), after_unload(rig.host))


def _device_after_unload(device: Device, staying: _Others, returned_bytes: int, taken_bytes: int = 0) -> Device:
    holdings = tuple(
        Holding(model.name, model.held_bytes.get(device.id, 0), model.key)
        for model in staying
        if model.held_bytes.get(device.id, 0) or device.endpoint in model.endpoints
    )
    staying_bytes = sum(holding.size_bytes for holding in holdings) + taken_bytes
    limit_bytes = device.total_bytes if device.cap_bytes is None else min(device.total_bytes, device.cap_bytes)
    free_bytes = device.free_bytes
    if free_bytes is not None:
        free_bytes = max(0, min(free_bytes + returned_bytes, device.total_bytes))
    if any(device.endpoint in model.endpoints for model in staying):
        # An RPC worker serves one client at a time, so its memory is out of reach however much it reports.
        free_bytes = 0
    elif staying_bytes:
        room_bytes = max(0, limit_bytes - staying_bytes)
        free_bytes = room_bytes if free_bytes is None else min(free_bytes, room_bytes)
    return replace(device, free_bytes=free_bytes, holdings=holdings)


def rows_fit(rows: Iterable[DeviceRow], rig: Rig) -> bool:
    """Return whether every device has enough available memory for the need of its row and for its margin.

    A row that needs no memory always fits.
    """
    return not missing_bytes(rows, rig)


RECOVERED_SHARE = 0.75
LIMIT_S = 5.0
"""Longest wait in seconds until the memory of an unloaded model is free; another program may have allocated it."""


class Recovery(Struct, frozen=True):
    """The wait for the memory of an unloaded model: a driver may free it some time after the process has ended.

    `began_s`: time of the unload.
    `free_before_bytes`: free bytes before the unload, by id of each device whose memory is waited for.
    `held_bytes`: bytes that the model held, by device id.
    """

    began_s: float
    free_before_bytes: Mapping[str, int]
    held_bytes: Mapping[str, int]

    def is_over(self, free_bytes: Mapping[str, int], now_s: float) -> bool:
        """Return whether the wait is over: the model's memory is free again, or `LIMIT_S` seconds have passed.

        It counts as free if the free memory of every device has grown by more than `RECOVERED_SHARE` of the bytes that
        the model held there. `free_bytes`: free bytes by device id, at `now_s`.
        """
        # Drivers free memory some time after the process has ended. A load that starts too early would fail for no
        # reason.
        if now_s - self.began_s >= LIMIT_S:
            return True
        return all(
            free_bytes.get(device, 0) - before > RECOVERED_SHARE * self.held_bytes[device]
            for device, before in self.free_before_bytes.items()
        )

    @property
    def devices(self) -> tuple[str, ...]:
        """Ids of the devices on which the unloaded model held memory that their drivers may free with a delay."""
        return tuple(self.free_before_bytes)


def begin_recovery(
    rig: Rig, free_bytes: Mapping[str, int], held_bytes: Mapping[str, int], now_s: float
) -> Recovery | None:
    """Return a `Recovery`, which tells when drivers have freed a model's memory; None if no device needs a wait.

    Call this just before the model is unloaded. The CPU, integrated devices and Metal need no wait: they use the host's
    memory, which is free as soon as the process has ended.

    `free_bytes`: present free bytes by device id. There is no wait for devices that do not report them.
    `held_bytes`: bytes that the model holds, by device id.
    """
    before = {
        device.id: free_bytes[device.id]
        for device in rig.devices
        if device.kind == "gpu" and device.backend != "Metal" and device.id in free_bytes and held_bytes.get(device.id)
    }
    return Recovery(now_s, before, dict(held_bytes)) if before else None
