"""Check whether a model fits beside the loaded models, and the choice of the models to unload if it does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.devices.device import Rig
from engine.planning.fit.loaded_models import HeldModel, choose_victims, rows_fit
from engine.planning.plan.report import DeviceRow, missing_bytes

_Leaving = Sequence[HeldModel]


@dataclass(frozen=True, slots=True)
class Room:
    """The loaded models that prevent another load.

    `victims`: models to unload first; empty if the load can begin.
    `short`: (device id, missing bytes) while they are loaded.
    `still_short`: the same after they were unloaded.
    `workers`: ids of RPC workers of the layout that loaded models use.
    """

    victims: tuple[HeldModel, ...] = ()
    short: tuple[tuple[str, int], ...] = ()
    still_short: tuple[tuple[str, int], ...] = ()
    workers: tuple[str, ...] = ()


def find_room(rows: Sequence[DeviceRow], others: Sequence[HeldModel], rig_without: Callable[[_Leaving], Rig]) -> Room:
    """Return the models to unload before a load that needs the memory of `rows`.

    If unloading all of them is not enough, the result has all models that hold memory on short devices. The user may
    load all the same, because a forecast may be wrong.

    `others`: loaded models that the load does not replace.
    `rig_without`: returns the rig with the free memory after the given models were unloaded.
    """
    beside = rig_without(())
    if rows_fit(rows, beside):
        return Room()
    victims = choose_victims(others, lambda leaving: rows_fit(rows, rig_without(leaving)))
    short = tuple(missing_bytes(rows, beside).items())
    # A forecast may be wrong, so people may still load: they see what would have to go.
    if victims is None:
        ids = {device for device, _ in short}
        endpoints = {device.endpoint for device in beside.devices if device.id in ids}
        victims = tuple(model for model in others if ids & model.held_bytes.keys() or endpoints & model.endpoints)
    still_short = tuple(missing_bytes(rows, rig_without(victims)).items())
    used = {row.id for row in rows if row.need_bytes}
    workers = tuple(each.id for each in beside.devices if each.is_rpc and each.holdings and each.id in used)
    return Room(victims, short, still_short, workers)
