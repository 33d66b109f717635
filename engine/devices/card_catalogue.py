"""A catalogue of cards by name, for plans with cards that are not in this computer ("what if I had another card?").

Memory sizes and bandwidths are those that the manufacturers publish. Plans assume the usual link to the host. The
catalogue also has computers with unified memory; such a computer cannot be combined with other cards.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from msgspec import Struct

from engine.base.errors import ArgumentError
from engine.base.language import tr
from engine.base.units import GIB
from engine.base.values import replace
from engine.devices.device import Device, Rig, make_host

MAX_ADDED = 16
"""Largest number of cards that can be added: the length of llama.cpp's `tensor_split` array (`llama_max_devices`)."""


class KnownCard(Struct, frozen=True):
    """A card of the catalogue, or a computer with unified memory.

    `backend`: ggml backend that most users of this maker's cards choose.
    `bandwidth`: memory bandwidth in GB/s.
    `unified`: whether the entry is a whole computer, whose device shares memory with the host.
    """

    name: str
    backend: str
    memory_gib: int
    bandwidth: int
    unified: bool = False

    @property
    def total_bytes(self) -> int:
        return self.memory_gib * GIB


_CARDS: Mapping[str, Mapping[str, tuple[int, int]]] = {
    "CUDA": {
        "RTX 5090": (32, 1792), "RTX 5080": (16, 960), "RTX 5070 Ti": (16, 896), "RTX 5070": (12, 672),
        "RTX 5060 Ti": (16, 448), "RTX 5060": (8, 448), "RTX 4090": (24, 1008), "RTX 4080 SUPER": (16, 736),
        "RTX 4080": (16, 717), "RTX 4070 Ti SUPER": (16, 672), "RTX 4070 Ti": (12, 504), "RTX 4070": (12, 504),
        "RTX 4060 Ti": (16, 288), "RTX 4060": (8, 272), "RTX 3090 Ti": (24, 1008), "RTX 3090": (24, 936),
        "RTX 3080 Ti": (12, 912), "RTX 3080": (10, 760), "RTX 3070 Ti": (8, 608), "RTX 3070": (8, 448),
        "RTX 3060 Ti": (8, 448), "RTX 3060": (12, 360), "RTX 3050": (8, 224), "RTX 2080 Ti": (11, 616),
        "RTX 2080": (8, 448), "RTX 2070": (8, 448), "RTX 2060": (6, 336), "GTX 1080 Ti": (11, 484),
        "GTX 1080": (8, 320), "GTX 1070": (8, 256), "GTX 1060": (6, 192), "GTX 1660": (6, 192),
        "RTX 6000 Ada": (48, 960), "RTX A6000": (48, 768), "RTX A5000": (24, 768), "RTX A4000": (16, 448),
        "H200": (141, 4800), "H100": (80, 3350), "A100": (80, 1935), "L40S": (48, 864), "L40": (48, 864),
        "L4": (24, 300), "A10": (24, 600), "A40": (48, 696), "V100": (32, 900), "T4": (16, 320), "P40": (24, 347),
        "P100": (16, 732),
    },
    "HIP": {
        "RX 7900 XTX": (24, 960), "RX 7900 XT": (20, 800), "RX 7800 XT": (16, 624), "RX 7700 XT": (12, 432),
        "RX 7600": (8, 288), "RX 6900 XT": (16, 512), "RX 6800 XT": (16, 512), "RX 6800": (16, 512),
        "RX 6700 XT": (12, 384), "RX 6600": (8, 224), "RX 9070 XT": (16, 640), "RX 9070": (16, 640),
        "MI300X": (192, 5300), "MI210": (64, 1638), "MI100": (32, 1228), "MI50": (32, 1024),
    },
    "Vulkan": {
        "Arc B580": (12, 456), "Arc A770": (16, 560), "Arc A750": (8, 512),
    },
}  # fmt: skip
"""Memory in GiB and bandwidth in GB/s of each card, by backend."""
_COMPUTERS: Mapping[str, Mapping[str, tuple[int, int]]] = {
    # Apple: support.apple.com/specs. DGX Spark: docs.nvidia.com/dgx/dgx-spark. Strix Halo is AMD's Ryzen AI Max.
    "Metal": {
        "M1 Max": (64, 400), "M1 Ultra": (128, 800), "M2 Max": (96, 400), "M2 Ultra": (192, 800),
        "M3 Max": (128, 400), "M3 Ultra": (512, 819), "M4": (32, 120), "M4 Pro": (64, 273), "M4 Max": (128, 546),
    },
    "CUDA": {"DGX Spark": (128, 273)},
    "Vulkan": {"Strix Halo": (128, 256)},
}  # fmt: skip
"""Memory in GiB (the largest size that is sold) and bandwidth in GB/s of computers with unified memory, by backend."""
CARDS: tuple[KnownCard, ...] = tuple(
    KnownCard(name, backend, memory_gib, bandwidth, unified)
    for table, unified in ((_CARDS, False), (_COMPUTERS, True))
    for backend, cards in table.items()
    for name, (memory_gib, bandwidth) in cards.items()
)
BANDWIDTHS: Mapping[str, int] = {
    **{card.name: card.bandwidth for card in CARDS},
    "H100 PCIe": 2000, "A100-PCIE-40GB": 1555, "M1 Pro": 200, "M1": 68, "M2 Pro": 200, "M2": 100, "GB10": 273,
    "Radeon 8060S": 256, "M3 Pro": 150, "M3": 100,
}  # fmt: skip
"""Published bandwidth in GB/s, by a part of the device's name; the longest matching part is used.

The keys are the names in the catalogue, other names that drivers report, and devices that the catalogue lacks.
"""
_METAL_SHARE = 0.75
"""Usual share of a Mac's memory that Metal may use (`recommendedMaxWorkingSetSize`)."""
_ID_PREFIXES = {"HIP": "ROCm"}
"""Prefix of ggml's device ids by backend, for backends whose name is not the prefix."""
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
                '"{name}" matches several graphics cards: {cards}. Write one of these names.',
                name=name[:60],
                cards=", ".join(near[:8]),
            )
        )
    names = ", ".join(card.name for card in CARDS[:6])
    raise ArgumentError(
        tr(
            'There is no graphics card "{name}" in the catalogue; the catalogue has {names} and other cards.',
            name=name[:60],
            names=names,
        )
    )


def with_cards(rig: Rig, asked: Sequence[str]) -> Rig:
    """Return `rig` with cards of the catalogue added; if a computer is named, return the rig of this computer.

    A computer is an entry of the catalogue with unified memory. Cards are added after all other devices, but before
    those of kind `accel` (accelerators that belong to the CPU).

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
            raise ArgumentError(tr("At most {most} graphics cards can be added.", most=MAX_ADDED))
        if card.unified:
            if count > 1 or len(asked) > 1:
                raise ArgumentError(
                    tr(
                        "{card} is a whole computer with its own memory; it cannot be combined with graphics cards or "
                        "other computers.",
                        card=card.name,
                    )
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
