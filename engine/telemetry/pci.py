"""PCI ids as numbers: libraries write the same id with different widths."""

from __future__ import annotations

import re
from dataclasses import dataclass

_PCI_ID = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.[0-7])?", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PciId:
    """Where a card sits."""

    domain: int
    bus: int
    device: int


def parse_pci_id(text: str) -> PciId | None:
    """Return the numbers of `0000:01:00.0`, None if it is not a PCI id."""
    match = _PCI_ID.fullmatch(text.strip())
    if match is None:
        return None
    domain, bus, device = match.groups()
    return PciId(int(domain or "0", 16), int(bus, 16), int(device, 16))
