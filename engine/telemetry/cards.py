"""What driver and kernel tell of a card besides its memory: whether a screen hangs on it, how it is connected."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from engine.devices.device import Device, Rig
from engine.pci import PciId, parse_pci_id
from engine.telemetry.amd import DRM_ROOT
from engine.telemetry.nvml import Nvml, ask
from engine.units import GIB

DISPLAY_MARGIN_BYTES = GIB
"""Kept free by default on a card that draws a desktop: what is open there grows and shrinks."""
_LANE_BYTES_PER_SECOND = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.56e9}
_REACHED = 0.8
"""What copies reach of a link's raw speed."""


@dataclass(frozen=True, slots=True)
class CardFacts:
    """`drives_display`: a screen shows what the card draws; `link_bytes_per_second`: to and from the host, None where
    nobody tells."""

    drives_display: bool = False
    link_bytes_per_second: float | None = None


def read_card_facts(devices: Iterable[Device], *, drm_root: Path = DRM_ROOT) -> dict[str, CardFacts]:
    """Return what is known of the local cards among `devices`, by device id. Takes a moment where there is a driver."""
    slots = {
        device.id: pci
        for device in devices
        if not device.is_rpc and (pci := parse_pci_id(device.pci_bus_id or "")) is not None
    }
    nvml = Nvml()
    try:
        return {device_id: _nvidia(nvml, pci) or _kernel(pci, drm_root) for device_id, pci in slots.items()}
    finally:
        nvml.close()


def with_display_margins(rig: Rig, facts: Mapping[str, CardFacts]) -> Rig:
    """Return `rig` with the larger margin on cards that drive a display."""

    def with_margin(device: Device) -> Device:
        known = facts.get(device.id)
        if known is None or not known.drives_display:
            return device
        return replace(device, margin_bytes=max(device.margin_bytes, DISPLAY_MARGIN_BYTES))

    return Rig(tuple(map(with_margin, rig.devices)), rig.host)


def link_speed(generation: int, lanes: int) -> float | None:
    """Return the bytes per second that copies reach over a PCIe link, None for one that is not known."""
    lane = _LANE_BYTES_PER_SECOND.get(generation)
    return None if lane is None or lanes < 1 else lane * lanes * _REACHED


def _nvidia(nvml: Nvml, pci: PciId) -> CardFacts | None:
    handle = nvml.handle(pci)
    library = nvml.library
    if handle is None or library is None:
        return None
    # The generation falls while a card idles, the width does not: a narrow slot shows in the current one.
    generation = ask(library, library.nvmlDeviceGetMaxPcieLinkGeneration, handle)
    lanes = ask(library, library.nvmlDeviceGetCurrPcieLinkWidth, handle)
    speed = None if generation is None or lanes is None else link_speed(int(generation), int(lanes))
    return CardFacts(bool(ask(library, library.nvmlDeviceGetDisplayActive, handle)), speed)


def _kernel(pci: PciId, drm_root: Path) -> CardFacts:
    """Return what the kernel's files tell of a card of any maker."""
    for link in sorted(drm_root.glob("card*/device")):
        if parse_pci_id(link.resolve().name) == pci:
            outputs = sorted(drm_root.glob(f"{link.parent.name}-*/enabled"))
            return CardFacts(any(_text(output) == "enabled" for output in outputs), _kernel_link(link))
    return CardFacts()


def _kernel_link(card: Path) -> float | None:
    transfers, lanes = _text(card / "max_link_speed").split(" "), _text(card / "current_link_width")
    generations = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
    generation = generations.get(transfers[0])
    return None if generation is None or not lanes.isdecimal() else link_speed(generation, int(lanes))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
