"""A process that holds memory of a device, as a value."""

from __future__ import annotations

import msgspec

from engine.base.language import tr
from engine.base.units import format_bytes


class MemoryHolder(msgspec.Struct, frozen=True, kw_only=True):
    """A process that holds memory of a device.

    `held_bytes`: bytes that the process holds; None: the driver does not report them.
    `ours`: whether it is this process or one of its children.
    """

    pid: int
    name: str
    held_bytes: int | None = None
    ours: bool = False


def holder_words(holder: MemoryHolder) -> str:
    """Return a process as text, such as "firefox (1234) 1.20 GiB", with a remark if the process is ours."""
    size = tr("an unknown amount") if holder.held_bytes is None else format_bytes(holder.held_bytes)
    return f"{holder.name} ({holder.pid}) {size}{tr(', this program') if holder.ours else ''}"
