"""Who holds a device's memory: a process, with what it has there."""

from __future__ import annotations

import msgspec

from engine.base.language import tr
from engine.base.units import format_bytes


class MemoryHolder(msgspec.Struct, frozen=True, kw_only=True):
    """`held_bytes` None: the driver does not tell it. `ours`: it is this program or a child of it."""

    pid: int
    name: str
    held_bytes: int | None = None
    ours: bool = False


def holder_words(holder: MemoryHolder) -> str:
    """Return "firefox (1234) 1.20 GiB", with a remark where it is ours."""
    size = tr("an unknown amount") if holder.held_bytes is None else format_bytes(holder.held_bytes)
    return f"{holder.name} ({holder.pid}) {size}{tr(', this program') if holder.ours else ''}"
