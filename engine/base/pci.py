"""PCI addresses as numbers, because libraries write the same address with different widths."""

from __future__ import annotations

import re

from msgspec import Struct

_PCI_ID = re.compile(
    r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.[0-7])?(?:-v(\d{1,3}))?", re.ASCII | re.IGNORECASE
)


class PciId(Struct, frozen=True, order=True):
    """The address of a card on the PCI bus. Addresses sort in the order of CUDA_DEVICE_ORDER=PCI_BUS_ID."""

    domain: int
    bus: int
    device: int


class PciName(Struct, frozen=True):
    """The name of a card, or of a virtual device into which ggml divides a card (`0000:01:00.0-v1`).

    `part`: number of the virtual device; None: the whole card.
    """

    card: PciId
    part: int | None = None


def parse_pci_name(text: str) -> PciName | None:
    """Return the parts of a text such as `0000:01:00.0` or `0000:01:00.0-v1`; None if it is not a PCI address."""
    match = _PCI_ID.fullmatch(text.strip())
    if match is None:
        return None
    domain, bus, device, part = match.groups()
    return PciName(PciId(int(domain or "0", 16), int(bus, 16), int(device, 16)), None if part is None else int(part))


def parse_pci_id(text: str) -> PciId | None:
    """Return the card's address in a text such as `0000:01:00.0`; None if it is not a PCI address."""
    name = parse_pci_name(text)
    return None if name is None else name.card
