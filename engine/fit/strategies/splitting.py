"""Several devices where they were asked for, although a strategy's own way leads to one."""

from __future__ import annotations

from dataclasses import replace

from engine.devices.device import CPU_ID
from engine.fit.strategies.constraints import AutoLayout
from engine.fit.strategies.workbench import Workbench
from engine.language import tr
from engine.layout.layout import Layout


def split_over_devices(bench: Workbench, found: AutoLayout) -> AutoLayout:
    """Return `found` with a layer on a second device, where it fits on one only and several were asked for.

    One layer is the least that changes what the strategy meant; where it fits nowhere else, the explanation says so.
    """
    used = {*found.layout.devices} - {CPU_ID}
    if not bench.constraints.split or not found.fits or len(used) != 1:
        return found
    for device in bench.devices:
        moved = None if device.id in used else _with_one_layer(bench, found.layout, device.id)
        if moved is not None:
            layout, layer = moved
            why = tr("Splitting was asked for, so {id} takes layer {layer}.", id=device.id, layer=layer)
            return replace(found, layout=layout, explanation=f"{found.explanation} {why}")
    why = tr("Splitting was asked for, but no other device has room for a layer.")
    return replace(found, explanation=f"{found.explanation} {why}")


def _with_one_layer(bench: Workbench, layout: Layout, device_id: str) -> tuple[Layout, int] | None:
    """Return `layout` with its first or last layer that may move on the device, and which; None: it does not fit."""
    places = layout.assignment()
    free = [index for index, place in enumerate(places) if place != CPU_ID and index not in bench.pinned]
    for layer in dict.fromkeys((*free[:1], *free[-1:])):
        moved = layout.assign(layer, device_id)
        # A device that gave its only layer away would leave one device again.
        if len({*moved.devices} - {CPU_ID}) > 1 and bench.report(moved).fits:
            return moved, layer
    return None
