"""Memory of a device that stays free unless people say otherwise."""

from __future__ import annotations

import re

from engine.devices.device import Device
from engine.language import tr
from engine.units import MIB, format_bytes

REMOTE_MARGIN_BYTES = 256 * MIB
"""On another machine: what its system and other programs take between our look at it and a load."""
_REMOTE_PART = 20
"""Of small machines at most one part in this many."""
_LOOPBACK = re.compile(r"(127\.|localhost|\[::1\])")


def is_on_this_machine(device: Device) -> bool:
    """Return whether `device` is an RPC worker of this machine, such as those of a lab."""
    return device.endpoint is not None and _LOOPBACK.match(device.endpoint) is not None


def remote_margin_bytes(device: Device) -> int:
    """Return the usual margin of an RPC worker: none on this machine, where caps are what people set."""
    if device.endpoint is None or is_on_this_machine(device):
        return 0
    return min(REMOTE_MARGIN_BYTES, device.total_bytes // _REMOTE_PART)


def margin_words(device: Device) -> str:
    """Return how large the margin of an RPC worker is and where it is from, a line; empty where it has none."""
    if not device.is_rpc or not device.margin_bytes:
        return ""
    usual = device.margin_bytes == remote_margin_bytes(device)
    why = tr("as is usual for a worker on another machine") if usual else tr("as was set for this worker")
    return tr("{margin} stay free, {why}.", margin=format_bytes(device.margin_bytes), why=why)
