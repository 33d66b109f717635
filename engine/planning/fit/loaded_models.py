"""Several loaded models as values: what is free besides them, who goes when the next does not fit, memory that returns.

Times are seconds of one monotonic clock, handed in by the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import inf

from engine.devices.device import CPU_ID, Device, Holding, Rig
from engine.model.gguf.model_file import FileIdentity
from engine.planning.plan.preview import LoadedLayout
from engine.planning.plan.report import DeviceRow

UNTIL_UNLOADED_S = inf
AFTER_THE_ANSWER_S = 0.0


@dataclass(frozen=True, slots=True)
class HeldModel:
    """A loaded model, what it holds by device, and since when nothing has been asked of it (None: it is at work).

    `keep_alive_s` is how long it may be idle. With `AFTER_THE_ANSWER_S` it goes after its next answer, not before it.
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
        """When it is to be unloaded; infinite where nothing says so."""
        if self.idle_since_s is None or (self.keep_alive_s == AFTER_THE_ANSWER_S and not self.has_answered):
            return inf
        return self.idle_since_s + self.keep_alive_s

    def holding(self, held_bytes: Mapping[str, int], endpoints: frozenset[str]) -> HeldModel:
        """Return the model with these devices and workers."""
        return replace(self, held_bytes=held_bytes, endpoints=endpoints)

    def busy(self) -> HeldModel:
        """Return the model with an answer, or a load, begun: its time stands still."""
        return replace(self, idle_since_s=None)

    def idle(self, now_s: float, *, answered: bool) -> HeldModel:
        """Return the model with its work ended: its time begins anew. `answered`: the work was an answer."""
        return replace(self, idle_since_s=now_s, has_answered=answered)

    def kept_alive(self, keep_alive_s: float, now_s: float) -> HeldModel:
        """Return the model with another keep-alive, which counts from now."""
        idle_since_s = None if self.is_busy else now_s
        return replace(self, keep_alive_s=keep_alive_s, idle_since_s=idle_since_s, has_answered=False)


def expired(models: Iterable[HeldModel], now_s: float) -> tuple[HeldModel, ...]:
    """Return the idle models whose keep-alive is over."""
    return tuple(model for model in models if model.expires_s <= now_s)


def next_expiry_s(models: Iterable[HeldModel]) -> float | None:
    """Return when the first keep-alive is over, None where none ever is."""
    first_s = min((model.expires_s for model in models), default=inf)
    return None if first_s == inf else first_s


def choose_victims(
    models: Sequence[HeldModel], is_enough: Callable[[Sequence[HeldModel]], bool]
) -> tuple[HeldModel, ...] | None:
    """Return which of `models` to unload so that `is_enough` holds for those that go; None where not even all are.

    A busy model goes only where all the idle ones are not enough; then as few of them as possible. Otherwise the
    fewest go, and of as many those with the shortest keep-alive, the longest idle first.
    """
    ordered = sorted(models, key=_eviction_order)
    idle = [model for model in ordered if not model.is_busy]
    busy = [model for model in ordered if model.is_busy]
    if not is_enough(ordered):
        return None
    if is_enough(idle):
        return _fewest(idle, (), is_enough)
    needed = _fewest(busy, idle, is_enough)
    return (*_fewest(idle, needed, is_enough), *needed)


def _fewest(
    models: Sequence[HeldModel],
    also: Sequence[HeldModel],
    is_enough: Callable[[Sequence[HeldModel]], bool],
) -> tuple[HeldModel, ...]:
    """Return the first of the smallest choices that are enough together with `also`; all of them are."""
    choices = (choice for count in range(len(models)) for choice in combinations(models, count))
    return next((choice for choice in choices if is_enough((*choice, *also))), tuple(models))


def _eviction_order(model: HeldModel) -> tuple[float, float, str]:
    return (model.keep_alive_s, inf if model.idle_since_s is None else model.idle_since_s, model.name)


def held_bytes(loaded: LoadedLayout, checkpoint_bytes: int = 0) -> dict[str, int]:
    """Return what a load took by device, those that it uses only, and on the CPU with what its checkpoints take.

    The engine does not tell what its process takes besides its buffers; that is taken from the forecast.
    """
    besides = {row.id: row.overhead_bytes for row in loaded.forecast}
    held = {
        row.id: row.need_bytes + max(0, besides.get(row.id, 0) - row.overhead_bytes)
        for row in loaded.measured
        if row.need_bytes
    }
    if checkpoint_bytes:
        held[CPU_ID] = held.get(CPU_ID, 0) + checkpoint_bytes
    return held


_Others = Sequence[HeldModel]


def rig_beside(
    rig: Rig,
    models: Collection[HeldModel],
    leaving: Collection[HeldModel] = (),
    seen_bytes: Mapping[str, int] | None = None,
) -> Rig:
    """Return `rig` as the next load finds it, with `models` loaded and those of them in `leaving` unloaded.

    `rig` has the free memory that its devices report while all of `models` are loaded. A device has no more free than
    its total (or cap) less what stays there, whatever it reports; what leaves counts as free. A worker that a staying
    model holds has nothing free: it serves one client at a time. `seen_bytes` is what our processes are seen to hold
    of a device, where that is known: no more than this comes back.
    """
    gone = {model.key for model in leaving}
    staying = [model for model in models if model.key not in gone]
    seen = seen_bytes or {}

    def beside(device: Device) -> Device:
        returned_bytes = sum(model.held_bytes.get(device.id, 0) for model in leaving)
        return _device_beside(device, staying, min(returned_bytes, seen.get(device.id, returned_bytes)))

    return Rig(tuple(map(beside, rig.devices)), beside(rig.host))


def _device_beside(device: Device, staying: _Others, returned_bytes: int) -> Device:
    holdings = tuple(
        Holding(model.name, model.held_bytes.get(device.id, 0), model.key)
        for model in staying
        if model.held_bytes.get(device.id, 0) or device.endpoint in model.endpoints
    )
    staying_bytes = sum(holding.size_bytes for holding in holdings)
    limit_bytes = device.total_bytes if device.cap_bytes is None else min(device.total_bytes, device.cap_bytes)
    free_bytes = device.free_bytes
    if free_bytes is not None:
        free_bytes = max(0, min(free_bytes + returned_bytes, device.total_bytes))
    if any(device.endpoint in model.endpoints for model in staying):
        free_bytes = 0
    elif staying_bytes:
        room_bytes = max(0, limit_bytes - staying_bytes)
        free_bytes = room_bytes if free_bytes is None else min(free_bytes, room_bytes)
    return replace(device, free_bytes=free_bytes, holdings=holdings)


def rows_fit(rows: Iterable[DeviceRow], rig: Rig) -> bool:
    """Return whether the needs of `rows`, with the devices' margins, are free in `rig`. Where nothing goes all is."""
    devices = {device.id: device for device in rig.all_devices}
    return all(
        row.need_bytes + devices[row.id].margin_bytes <= devices[row.id].available_bytes
        for row in rows
        if row.need_bytes and row.id in devices
    )


RECOVERED_SHARE = 0.75
LIMIT_S = 5.0
"""Nobody waits longer than this: another program may have taken what came back."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """What was free on each device before the unload, and what the model held there. `began_s` is monotonic."""

    began_s: float
    free_before_bytes: Mapping[str, int]
    held_bytes: Mapping[str, int]

    def is_over(self, free_bytes: Mapping[str, int], now_s: float) -> bool:
        """Return whether more than three quarters are free again on every device, or the limit has passed."""
        if now_s - self.began_s >= LIMIT_S:
            return True
        return all(
            free_bytes.get(device, 0) - before > RECOVERED_SHARE * self.held_bytes[device]
            for device, before in self.free_before_bytes.items()
        )

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that are waited for."""
        return tuple(self.free_before_bytes)


def begin_recovery(
    rig: Rig, free_bytes: Mapping[str, int], held_bytes: Mapping[str, int], now_s: float
) -> Recovery | None:
    """Return what to wait for once a model that holds `held_bytes` goes; None: nothing.

    `free_bytes` are live readings. The CPU, integrated devices and Metal share the host's memory, which is free as
    soon as the process has ended; a device without a reading cannot be waited for.
    """
    before = {
        device.id: free_bytes[device.id]
        for device in rig.devices
        if device.kind == "gpu" and device.backend != "Metal" and device.id in free_bytes and held_bytes.get(device.id)
    }
    return Recovery(now_s, before, dict(held_bytes)) if before else None
