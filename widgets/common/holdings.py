"""The words for what other models hold of a device."""

from __future__ import annotations

from collections.abc import Iterable

from engine.devices.device import Holding
from engine.language import tr
from engine.units import format_bytes


def holdings_text(holdings: Iterable[Holding]) -> str:
    """Return a line for each model; empty without any."""
    return "\n".join(
        tr("{model} holds {size}", model=each.model, size=format_bytes(each.size_bytes)) for each in holdings
    )
