"""Option `--when-used`: whether a command waits for lent devices that somebody else uses, or runs without them."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable

from app.cli.output import print_notice
from engine.devices.device import Device, Rig
from engine.devices.endpoint import parse_lent_endpoint
from engine.machines.rigs.remote_machines import LendingMachine, away_words, machine_of
from engine.machines.tunnel.offers import Offer

WAIT, SKIP = "wait", "skip"
_ASK_AGAIN_S = 5.0


def settle_used(options: Namespace, rig: Rig) -> Rig:
    """Apply the option `--when-used` to lent devices that others use now, and return the rig for the command.

    With `wait`, the call returns when nobody else uses the devices. With `skip`, it returns the rig without the devices
    in use. Without the option it returns the rig unchanged. A load on a device in use then fails with an error that
    names the user.

    Raises:
        EngineError: if a machine does not answer.
    """
    choice = getattr(options, "when_used", None)
    if choice is None:
        return rig
    return settle(rig, choice, options.tunnels.offer_of)


def settle(
    rig: Rig, choice: str, ask: Callable[[LendingMachine], Offer], pause: Callable[[float], None] = time.sleep
) -> Rig:
    """Wait until nobody else uses the lent devices of `rig`, or leave out those in use; return the rig.

    `choice`: "skip" leaves the devices in use out at once; with any other value the call waits.
    `ask`: returns which devices a machine lends now, and to whom. `pause`: sleeps for a number of seconds.
    """
    printed: dict[str, str] = {}
    while used := _used(rig, ask):
        if choice == SKIP:
            left = tuple(device for device in rig.devices if device.id not in used)
            for words in used.values():
                print_notice(f"{words}; it is left out.")
            return Rig(left, rig.host)
        # Machines are asked again and again; a line is printed only if the users have changed.
        if used != printed:
            printed = used
            for words in used.values():
                print_notice(f"{words}; waiting until it is free. Ctrl+C ends.")
        pause(_ASK_AGAIN_S)
    return rig


def _used(rig: Rig, ask: Callable[[LendingMachine], Offer]) -> dict[str, str]:
    """Return a phrase such as "RPC0 is used by Ann" for each lent device that somebody uses, by device id.

    `ask`: returns which devices a machine lends now, and to whom. It is called once for each machine.
    """
    lent = [(device, machine) for device in rig.devices if (machine := machine_of(device)) is not None]
    offers = {machine: ask(machine) for machine in dict.fromkeys(machine for _, machine in lent)}
    found = {}
    for device, machine in lent:
        offered = next((each for each in offers[machine].devices if each.name == _name(device)), None)
        if offered is not None and (words := away_words(offered)):
            found[device.id] = f"{device.id} is {words}"
    return found


def _name(device: Device) -> str:
    return parse_lent_endpoint(device.endpoint or "")[1]
