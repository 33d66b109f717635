"""Layouts that use devices of one backend only: each backend is planned separately, and the best one is used.

llama.cpp can mix backends in one load. ollama never does: it plans each library separately, since a transfer between
two backends goes through host memory and each backend has its own fixed memory cost.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from engine.base.language import tr
from engine.base.values import replace
from engine.devices.device import CPU_ID, Rig
from engine.planning.fit.strategies.choosing import count_layers
from engine.planning.fit.strategies.constraints import AutoLayout, Constraints, pinned_backends
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.speed.prediction import CostModel, SpeedForecast
from engine.planning.speed.work import TokenWork


def rigs_by_backend(rig: Rig, constraints: Constraints) -> dict[str, Rig]:
    """Return, for each backend that may hold layers, a rig (list of devices) with only this backend's devices.

    The keys are the names of the backends, in the order of the devices.
    A card that two backends list is in both rigs. Accelerators such as BLAS belong to the CPU and are in all rigs. If
    layers are pinned, only the backend of their devices is included.
    """
    usable = [device for device in rig.devices if device.kind != "accel" and device.id not in constraints.off]
    names = pinned_backends(constraints, rig) or tuple(dict.fromkeys(device.backend for device in usable))
    return {
        name: Rig(tuple(device for device in rig.devices if device.kind == "accel" or device.backend == name), rig.host)
        for name in names
    }


class _Planned(Struct, frozen=True):
    """The layout that was found for one backend.

    `n_layers`: number of layers on the backend's devices, including the output layer.
    `splits`: False only if the user requested a split, but the layout uses one device.
    """

    backend: str
    found: AutoLayout
    n_layers: int
    speed: SpeedForecast
    splits: bool = True

    @property
    def rank(self) -> tuple[bool, int, int, bool, float]:
        """Key for comparing backends, larger is better: fits, context length, number of layers, `splits`, speed.

        Context lengths differ only with strategy "context", which searches for the longest one.
        """
        # Five digits, as in strategy fastest: what differs after them is rounding.
        seconds = float(f"{self.speed.token_s:.5g}")
        return self.found.fits, self.found.context.n_ctx, self.n_layers, self.splits, -seconds


def best_backend(
    find: Callable[[Rig], AutoLayout], memory: ModelMemory, rig: Rig, constraints: Constraints
) -> AutoLayout:
    """Search with the devices of each backend alone, and return the best layout.

    The criteria, the most important first: whether the layout fits, context length, number of layers on the backend's
    devices, use of several devices if a split was requested, and predicted speed.

    `find`: searches for a layout on the given rig.
    """
    rigs = rigs_by_backend(rig, constraints)
    if not rigs:
        return find(rig)
    planned = []
    for backend, each in rigs.items():
        found = find(each)
        costs = CostModel(
            TokenWork(memory.model), each, found.context, memory.for_context(found.context), constraints.speeds
        )
        layout = found.layout
        n_layers = sum(device != CPU_ID for device in (*layout.assignment(), layout.output_device))
        splits = not constraints.split or len({*layout.devices} - {CPU_ID}) > 1
        planned.append(_Planned(backend, found, n_layers, costs.answer(layout), splits))
    # `max` returns the first of equal ones, which is the backend of the earlier device.
    best = max(planned, key=lambda each: each.rank)
    others = [each for each in planned if each is not best]
    if not others:
        return best.found
    return replace(best.found, explanation=f"{best.found.explanation} {_reason(best, others)}")


def _reason(best: _Planned, others: list[_Planned]) -> str:
    """Return a sentence on why the backend of `best` is used: its advantage over the second best backend."""
    second = max(others, key=lambda each: each.rank)
    if best.found.context.n_ctx != second.found.context.n_ctx:
        return tr(
            "Only {backend} is used, because it allows a longer context than {other}.",
            backend=best.backend,
            other=second.backend,
        )
    if (best.found.fits, best.n_layers) != (second.found.fits, second.n_layers):
        counts = (f"{each.backend} {count_layers(each.n_layers)}" for each in others)
        return tr(
            "Only {backend} is used: its devices hold {layers}, including the output layer. Another backend alone "
            "would hold: {others}.",
            backend=best.backend,
            layers=count_layers(best.n_layers),
            others=", ".join(counts),
        )
    if best.splits != second.splits:
        return tr(
            "Only {backend} is used: a split over several devices was requested, and the layout for {other} uses only "
            "one device.",
            backend=best.backend,
            other=second.backend,
        )
    return tr(
        "Only {backend} is used: {other} has room for just as many layers, but {backend} is predicted to be faster "
        "({text}; {other}: {other_text}).",
        backend=best.backend,
        other=second.backend,
        text=best.speed.text(),
        other_text=second.speed.text(),
    )
