"""Cards that are in the machine, and why one of them is not used."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.doctor.report import Check
from engine.packs.listing import ListedPack
from engine.pci import PciId, parse_pci_id

PCI_ROOT = Path("/sys/bus/pci/devices")
MAKERS = {0x10DE: "NVIDIA", 0x1002: "AMD", 0x8086: "Intel"}
_BACKENDS = {"NVIDIA": ("CUDA", "Vulkan"), "AMD": ("HIP", "ROCm", "Vulkan"), "Intel": ("Vulkan", "SYCL")}
_SETTING = {"NVIDIA": "cuda", "AMD": "vulkan", "Intel": "vulkan"}
_DISPLAY, _ACCELERATOR = 0x03, 0x12
"""PCI base classes."""


@dataclass(frozen=True, slots=True)
class Card:
    """A graphics card or accelerator on the bus. `driver`: the kernel's module for it, empty where it has none."""

    slot: PciId
    maker: str
    model: str
    driver: str = ""


def cards_on_bus(root: Path = PCI_ROOT) -> tuple[Card, ...]:
    """Return the cards of makers whose cards the engine can use, as the kernel sees them; none on other systems."""
    found = []
    for folder in sorted(root.glob("*")):
        slot = parse_pci_id(folder.name)
        kind, maker = _number(folder / "class") >> 16, MAKERS.get(_number(folder / "vendor"))
        if slot is not None and maker is not None and kind in (_DISPLAY, _ACCELERATOR):
            driver = folder / "driver"
            name = driver.resolve().name if driver.exists() else ""
            found.append(Card(slot, maker, f"{_number(folder / 'device'):04x}", name))
    return tuple(found)


def card_checks(
    cards: Collection[Card], used: Collection[PciId], backends: Collection[str], packs: Sequence[ListedPack] = ()
) -> Iterable[Check]:
    """Yield a check for each card: used by the engine, or why not. `backends` are those that the engine was built with;
    `used` the slots of its devices. Where one card is used nothing is wrong with leaving another one, as that of the
    processor, aside."""
    has_used = any(card.slot in used for card in cards)
    for card in cards:
        is_used = card.slot in used
        yield Check(
            name="card",
            device=f"{card.slot.domain:04x}:{card.slot.bus:02x}:{card.slot.device:02x}",
            ok=True if is_used else None if has_used else False,
            detail=f"{card.maker} {card.model}" + ("" if is_used else f": {_why_not(card, backends, packs)}"),
            figures={"maker": card.maker, "model": card.model, "driver": card.driver or None},
        )


def _why_not(card: Card, backends: Collection[str], packs: Sequence[ListedPack]) -> str:
    wanted = _BACKENDS[card.maker]
    installed = [pack for pack in packs if pack.backend in wanted]
    idle = next((pack for pack in installed if pack.state != "used"), None)
    if not card.driver:
        return f"no driver has taken it. Install {card.maker}'s driver."
    if card.driver == "vfio-pci":
        return "it is given to a virtual machine."
    if not set(wanted) & {*backends, *(pack.backend for pack in installed if pack.state == "used")}:
        if idle is not None:
            return f"the engine pack {idle.name} is there for it. {idle.words}"
        return (
            f"the engine was built without {' and '.join(wanted)}. Install the engine pack (Devices > Engine Packs), "
            f"or in a checkout the toolkit, then `LAYERDECK_BACKEND={_SETTING[card.maker]} python3 make.py setup`."
        )
    if card.driver == "nouveau":
        return "the free driver nouveau has it, which CUDA cannot use. Install NVIDIA's driver."
    return "the engine's backend does not list it: driver and toolkit may not belong together, or it is too old."


def _number(path: Path) -> int:
    try:
        return int(path.read_text(encoding="ascii").strip(), 16)
    except (OSError, ValueError):
        return 0
