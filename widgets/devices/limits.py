"""What a person may set per device: a cap and a margin."""

from __future__ import annotations

from dataclasses import dataclass

from engine.language import tr
from engine.units import format_bytes, parse_size


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Never plan more than `cap_bytes` on `device` (None: no cap), and leave `margin_bytes` free."""

    device: str
    cap_bytes: int | None
    margin_bytes: int


def parse_limits(device: str, cap: str, margin: str, total_bytes: int) -> DeviceLimits:
    """Return the limits that a person typed; an empty cap is none, an empty margin is nothing.

    Raises:
        ValueError: with a sentence that names the field and the accepted form.
    """
    cap_bytes = _size(tr("Cap"), cap) if cap.strip() else None
    margin_bytes = _size(tr("Margin"), margin) if margin.strip() else 0
    if cap_bytes == 0:
        raise ValueError(tr("A cap of 0 leaves nothing to plan with; leave the field empty for no cap"))
    room_bytes = total_bytes if cap_bytes is None else min(cap_bytes, total_bytes)
    if room_bytes and margin_bytes >= room_bytes:
        raise ValueError(tr("The margin leaves nothing of {size}; make it smaller", size=format_bytes(room_bytes)))
    return DeviceLimits(device, cap_bytes, margin_bytes)


def _size(field: str, text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from error
