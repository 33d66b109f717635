"""Messages through the tunnel about lent devices: a client's request, the lender's answers, and the failure of a call.

The answers state limits, speed and user of each device.

The borrower limits all texts and numbers in these messages with `bounded`.
"""

from __future__ import annotations

import math
from enum import StrEnum

from msgspec import Struct

from engine.base.errors import EngineError
from engine.base.texts import one_line, shorten, show
from engine.base.values import replace
from engine.devices.device import DeviceKind, find_id_error
from engine.devices.endpoint import MAX_ALIGNMENT_BYTES, MAX_DEVICE_BYTES, GreetingStatus
from engine.machines.tunnel.pairings import MAX_NAME

CALL_TIMEOUT_S = 1.7
"""Time-out in seconds for connection, handshake and first answer together.

The greeting of an endpoint through a tunnel has 2 s, in which the whole call must have succeeded or failed.
"""
STRANGER = (
    "does not know this computer (any more), or stopped lending just now; try again, and if that does not help, forget "
    "it and pair with it again"
)
MAX_OFFERED = 16
"""Largest number of devices that one machine lends, the same as llama.cpp uses in total (`llama_max_devices`)."""
MAX_DESCRIPTION = 80
MAX_TYPES = 40
"""Largest number of types of weights with a speed in an offer."""
_SLOWEST, _FASTEST = 1e6, 1e14
"""Bounds of plausible speeds: bytes per second read from memory, or multiply-adds per second of matrix products."""
_LONGEST_OP_S = 1.0
MAX_REFUSED_S = 86_400
"""Largest plausible number of seconds for which a lender refuses a borrower."""


class TunnelError(EngineError):
    """A call to another machine failed.

    `words`: the reason without a subject, such as "is used by Ann now; wait until it is free". The subject of the
    sentence is the machine's name.
    """

    kind = "unreachable"

    def __init__(self, endpoint: str, status: GreetingStatus, words: str) -> None:
        super().__init__(f"{endpoint} {words}.")
        self.endpoint = endpoint
        self.status = status
        self.words = words


class Admission(StrEnum):
    """The listener's answer to a request for a session, one byte.

    `OPEN`: the session begins. `BUSY`: another client uses the device. `NO_WORKER`: the device's worker does not run.
    `UNKNOWN`: no such device is lent.
    """

    OPEN = "O"
    BUSY = "B"
    NO_WORKER = "W"
    UNKNOWN = "N"


class ClientRequest(Struct, frozen=True):
    """A client's request to the listener: a session with a device, or the list of lent devices (the offer).

    `device`: id of the device for the session, None to request the offer.
    """

    device: str | None = None


class Entrance(Struct, frozen=True):
    """The listener's answer to a client that requested a session with a device.

    `admission`: `OPEN` if the session begins directly after this message; otherwise why it does not begin.
    `user`: name of the machine that uses the device; empty if none does.
    `is_yours`: whether the machine that uses the device is the client itself; older releases always send False.
    `refused_s`: seconds for which the client is refused, sent with `NO_WORKER`; 0 if it is not refused (`refusals.py`).
    """

    admission: Admission
    user: str = ""
    is_yours: bool = False
    refused_s: int = 0


class OfferedSpeed(Struct, frozen=True, kw_only=True):
    """Speeds of an offered device that the lender measured.

    `read_bytes_per_second`: bytes of F16 weights that are read per second in a matrix product with one column.
    `by_type`: bytes per second for other types of weights.
    `op_s`: seconds for a graph node that computes next to nothing; None if not measured.
    `products`: multiply-adds per second in a matrix product with many columns, by type of weights.
    """

    read_bytes_per_second: float
    by_type: dict[str, float] = {}
    op_s: float | None = None
    products: dict[str, float] = {}


class OfferedDevice(Struct, frozen=True, kw_only=True):
    """The description of a device that a machine lends.

    `name`: id of the device on that machine.
    `total_bytes`: memory of the device, at most the lender's cap.
    `backend`: backend that computes behind the RPC server.
    `free_bytes`: free memory, None if unknown.
    `margin_bytes`: memory that must stay free for the lender.
    `alignment_bytes`, `largest_tensor_bytes`, `largest_buffer_bytes`, `mixes_streams`: limits that ggml reports for
    the device (`BufferFacts`); None if not reported.
    `overhead_bytes`: memory that loads took beyond the engine's buffers, None if it was never measured.
    `user`: name of the machine that uses the device now, empty if none does.
    `is_yours`: whether the client that requested the offer uses the device.
    `refused_s`: seconds for which that client is refused; 0 if it is not.
    """

    name: str
    kind: DeviceKind
    total_bytes: int
    description: str = ""
    backend: str = ""
    free_bytes: int | None = None
    margin_bytes: int = 0
    alignment_bytes: int | None = None
    largest_tensor_bytes: int | None = None
    largest_buffer_bytes: int | None = None
    mixes_streams: bool = True
    overhead_bytes: int | None = None
    speed: OfferedSpeed | None = None
    user: str = ""
    is_yours: bool = False
    refused_s: int = 0


class OfferHeader(Struct, frozen=True):
    """First message of an offer.

    `name`: name of the lender. `count`: number of `OfferedDevice` messages that follow, one for each device.
    """

    name: str
    count: int


class Offer(Struct, frozen=True):
    """All devices that a machine lends now. `name`: name that the machine gives itself."""

    name: str
    devices: tuple[OfferedDevice, ...]


def bounded(device: OfferedDevice) -> OfferedDevice | None:
    """Return `device` with its texts cleaned and its numbers within bounds; None if its name or size is not valid."""
    if find_id_error(device.name) or not 0 < device.total_bytes <= MAX_DEVICE_BYTES:
        return None
    free_bytes = device.free_bytes
    return replace(
        device,
        description=shorten(one_line(show(device.description)), MAX_DESCRIPTION),
        backend=device.backend if not find_id_error(device.backend or "-") else "",
        free_bytes=None if free_bytes is None else min(max(0, free_bytes), device.total_bytes),
        margin_bytes=min(max(0, device.margin_bytes), device.total_bytes),
        alignment_bytes=_alignment(device.alignment_bytes),
        largest_tensor_bytes=_size(device.largest_tensor_bytes),
        largest_buffer_bytes=_size(device.largest_buffer_bytes),
        overhead_bytes=None
        if device.overhead_bytes is None
        else min(max(0, device.overhead_bytes), device.total_bytes),
        speed=None if device.speed is None else _believable(device.speed),
        user=show(" ".join(device.user.split()), MAX_NAME),
        refused_s=min(max(0, device.refused_s), MAX_REFUSED_S),
    )


def _alignment(size_bytes: int | None) -> int | None:
    is_one = size_bytes is not None and size_bytes.bit_count() == 1 and 0 < size_bytes <= MAX_ALIGNMENT_BYTES
    return size_bytes if is_one else None


def _size(size_bytes: int | None) -> int | None:
    return size_bytes if size_bytes is not None and 0 < size_bytes <= MAX_DEVICE_BYTES else None


def _believable(speed: OfferedSpeed) -> OfferedSpeed | None:
    if not _is_speed(speed.read_bytes_per_second):
        return None
    op_s = speed.op_s
    return OfferedSpeed(
        read_bytes_per_second=speed.read_bytes_per_second,
        by_type=_speeds(speed.by_type),
        op_s=op_s if op_s is not None and math.isfinite(op_s) and 0 < op_s <= _LONGEST_OP_S else None,
        products=_speeds(speed.products),
    )


def _speeds(of_types: dict[str, float]) -> dict[str, float]:
    known = list(of_types.items())[:MAX_TYPES]
    return {name: speed for name, speed in known if not find_id_error(name) and _is_speed(speed)}


def _is_speed(value: float) -> bool:
    return math.isfinite(value) and _SLOWEST <= value <= _FASTEST
