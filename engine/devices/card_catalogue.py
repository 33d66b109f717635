"""A catalogue of cards by name, for plans with cards that are not in this computer ("what if I had another card?").

Memory sizes are those that the manufacturers publish. `engine/planning/speed/speeds.py` has the bandwidths by the same
names, and assumes the usual link to the host. The catalogue also has computers with unified memory; such a computer
cannot be combined with other cards.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from engine.base.errors import ArgumentError
from engine.base.language import tr
from engine.base.units import GIB
from engine.devices.device import Device, Rig, make_host

MAX_ADDED = 16
"""Largest number of devices in one layout of llama.cpp (`GGML_SCHED_MAX_BACKENDS`, less the CPU)."""


@dataclass(frozen=True, slots=True)
class KnownCard:
    """A card of the catalogue, or a computer with unified memory.

    `backend`: ggml backend that is used most with cards of its maker.
    `unified`: whether the entry is a whole computer, whose device shares memory with the host.
    """

    name: str
    backend: str
    memory_gib: int
    unified: bool = False

    @property
    def total_bytes(self) -> int:
        return self.memory_gib * GIB


_MEMORY_GIB: Mapping[str, Mapping[str, int]] = {
    "CUDA": {
        "RTX 5090": 32, "RTX 5080": 16, "RTX 5070 Ti": 16, "RTX 5070": 12, "RTX 5060 Ti": 16, "RTX 5060": 8,
        "RTX 4090": 24, "RTX 4080 SUPER": 16, "RTX 4080": 16, "RTX 4070 Ti SUPER": 16, "RTX 4070 Ti": 12,
        "RTX 4070": 12, "RTX 4060 Ti": 16, "RTX 4060": 8,
        "RTX 3090 Ti": 24, "RTX 3090": 24, "RTX 3080 Ti": 12, "RTX 3080": 10, "RTX 3070 Ti": 8, "RTX 3070": 8,
        "RTX 3060 Ti": 8, "RTX 3060": 12, "RTX 3050": 8,
        "RTX 2080 Ti": 11, "RTX 2080": 8, "RTX 2070": 8, "RTX 2060": 6,
        "GTX 1080 Ti": 11, "GTX 1080": 8, "GTX 1070": 8, "GTX 1060": 6, "GTX 1660": 6,
        "RTX 6000 Ada": 48, "RTX A6000": 48, "RTX A5000": 24, "RTX A4000": 16,
        "H200": 141, "H100": 80, "A100": 80, "L40S": 48, "L40": 48, "L4": 24, "A10": 24, "A40": 48, "V100": 32,
        "T4": 16, "P40": 24, "P100": 16,
    },
    "HIP": {
        "RX 7900 XTX": 24, "RX 7900 XT": 20, "RX 7800 XT": 16, "RX 7700 XT": 12, "RX 7600": 8,
        "RX 6900 XT": 16, "RX 6800 XT": 16, "RX 6800": 16, "RX 6700 XT": 12, "RX 6600": 8,
        "RX 9070 XT": 16, "RX 9070": 16, "MI300X": 192, "MI210": 64, "MI100": 32, "MI50": 32,
    },
    "Vulkan": {"Arc B580": 12, "Arc A770": 16, "Arc A750": 8},
}  # fmt: skip
_COMPUTERS_GIB: Mapping[str, Mapping[str, int]] = {
    # Apple: support.apple.com/specs. DGX Spark: docs.nvidia.com/dgx/dgx-spark. Strix Halo is AMD's Ryzen AI Max.
    "Metal": {
        "M1 Max": 64, "M1 Ultra": 128, "M2 Max": 96, "M2 Ultra": 192, "M3 Max": 128, "M3 Ultra": 512, "M4": 32,
        "M4 Pro": 64, "M4 Max": 128,
    },
    "CUDA": {"DGX Spark": 128},
    "Vulkan": {"Strix Halo": 128},
}  # fmt: skip
"""Largest memory of computers with unified memory."""
CARDS: tuple[KnownCard, ...] = tuple(
    KnownCard(name, backend, memory_gib, unified)
    for table, unified in ((_MEMORY_GIB, False), (_COMPUTERS_GIB, True))
    for backend, cards in table.items()
    for name, memory_gib in cards.items()
)
_METAL_SHARE = 0.75
"""Usual part of a Mac's memory that Metal may use (`recommendedMaxWorkingSetSize`)."""
_ID_PREFIXES = {"HIP": "ROCm"}
"""Prefix of device ids by backend, if it differs from the backend's name."""
_SERIES = re.compile(r"^(rtx|gtx|rx|arc)")
_ASKED = re.compile(r"\s*(?:(\d{1,2})\s*x\s*)?(.+?)\s*", re.IGNORECASE)


def find_card(name: str) -> KnownCard:
    """Return the card with this name. Case, spaces, the maker's name, and RTX, RX or Arc are ignored.

    Raises:
        ArgumentError: no card or several cards match; the message names possible cards.
    """
    wanted = _key(name)
    exact = [card for card in CARDS if wanted in (_key(card.name), _SERIES.sub("", _key(card.name)))]
    if exact:
        return exact[0]
    near = [card.name for card in CARDS if wanted and wanted in _key(card.name)]
    if len(near) == 1:
        return next(card for card in CARDS if card.name == near[0])
    if near:
        raise ArgumentError(
            tr(
                '"{name}" matches several cards: {cards}. Write one of these names.',
                name=name[:60],
                cards=", ".join(near[:8]),
            )
        )
    names = ", ".join(card.name for card in CARDS[:6])
    raise ArgumentError(
        tr('There is no card "{name}" in the catalogue; it has {names} and others.', name=name[:60], names=names)
    )


def with_cards(rig: Rig, asked: Sequence[str]) -> Rig:
    """Return `rig` with cards of the catalogue added before devices of kind `accel` (accelerators that belong to the
    CPU).

    A computer with unified memory replaces the whole rig.

    `asked`: names in the catalogue; "2 x RTX 3090" adds two cards.

    Raises:
        ArgumentError: a name is unknown, there are too many cards, or a whole computer is named together with others.
    """
    added: list[Device] = []
    for text in asked:
        found = _ASKED.fullmatch(text)
        count, name = (int(found[1] or 1), found[2]) if found is not None else (1, text)
        card = find_card(name)
        if not 1 <= count <= MAX_ADDED - len(added):
            raise ArgumentError(tr("At most {most} cards can be added.", most=MAX_ADDED))
        if card.unified:
            if count > 1 or len(asked) > 1:
                raise ArgumentError(
                    tr("{card} is a whole computer with memory of its own; choose it alone.", card=card.name)
                )
            return _computer(card)
        for _ in range(count):
            added.append(_absent(card, Rig((*rig.devices, *added), rig.host)))
    cards = tuple(device for device in rig.devices if device.kind != "accel")
    return replace(rig, devices=(*cards, *added, *(device for device in rig.devices if device.kind == "accel")))


def _absent(card: KnownCard, rig: Rig) -> Device:
    prefix = _ID_PREFIXES.get(card.backend, card.backend)
    number = next(number for number in range(len(rig.devices) + 1) if f"{prefix}{number}" not in rig.ids)
    return Device(
        f"{prefix}{number}", tr("{card} (not present)", card=card.name), card.backend, "gpu", card.total_bytes
    )


def _computer(card: KnownCard) -> Rig:
    """Return the rig of a computer with unified memory: one device that shares memory with the host."""
    name, is_metal = tr("{card} (not present)", card=card.name), card.backend == "Metal"
    device = Device(
        f"{card.backend}0",
        name,
        card.backend,
        "gpu" if is_metal else "igpu",
        int(card.total_bytes * _METAL_SHARE) if is_metal else card.total_bytes,
        unified=True,
    )
    return Rig((device,), make_host(name, card.total_bytes))


def _key(name: str) -> str:
    words = re.sub(r"[^a-z0-9]+", " ", name.casefold()).split()
    return "".join(word for word in words if word not in ("nvidia", "geforce", "amd", "radeon", "intel", "graphics"))
