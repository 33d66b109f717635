"""Device discovery on a machine where CUDA fails on some cards.

llama.cpp asks every visible card for its memory. That makes a CUDA context, and a card that is full or broken aborts
the process. So such a card is hidden from the child by CUDA_VISIBLE_DEVICES, and described by the driver instead (NVML,
which needs no context).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from engine.base.errors import WorkerCrashedError
from engine.base.pci import PciId, parse_pci_id
from engine.base.units import MIB
from engine.devices.telemetry.cards import NvidiaCard, list_nvidia_cards
from engine.runtime.protocol.messages import GgmlDevice, ListDevices
from engine.runtime.requests import CUDA_VARIABLE

CONTEXT_BYTES = 200 * MIB
"""A card with less free memory has no room for a CUDA context. Contexts take 200 to 600 MiB by card and driver
[unverified on a card]; if one does not fit that is found by trying."""
ORDER_VARIABLE = "CUDA_DEVICE_ORDER"
_BY_SLOT = "PCI_BUS_ID"
_log = logging.getLogger("layerdeck.discovery")

_CUDA_DEVICE = GgmlDevice(
    name="CUDA0",
    description="",
    backend="CUDA",
    kind="gpu",
    free_bytes=0,
    total_bytes=0,
    row_split=True,
    tensor_split=True,
    alignment_bytes=128,
    host_alignment_bytes=32,
)
"""A card as ggml-cuda.cu reports it. Its host buffers have the alignment of the CPU's; no size is too large."""

AskDevices = Callable[[ListDevices, Mapping[str, str]], Sequence[GgmlDevice]]
"""Asks a new child with an environment for its devices."""


def list_around_bad_cards(ask: AskDevices, request: ListDevices) -> tuple[GgmlDevice, ...]:
    """Return the devices that `request` lists, with bad CUDA cards as the driver describes them.

    Raises:
        EngineError: the child failed, and hiding cards does not help.
    """
    cards = visible_cards(list_nvidia_cards(), os.environ)
    bad = {card.slot for card in cards if card.free_bytes is not None and card.free_bytes < CONTEXT_BYTES}
    try:
        found = ask(request, _without(cards, bad))
    except WorkerCrashedError:
        # Cards are tried alone only after a crash, since each takes a child of its own.
        added = {card.slot for card in cards if card.slot not in bad and not _works(ask, card)}
        if not added:
            raise
        bad |= added
        found = ask(request, _without(cards, bad))
    if not bad:
        return tuple(found)
    _log.info("CUDA was not used on %s", ", ".join(card.uuid for card in cards if card.slot in bad))
    return tuple(_numbered(found, cards, bad))


def visible_cards(cards: Sequence[NvidiaCard], environ: Mapping[str, str]) -> tuple[NvidiaCard, ...]:
    """Return the cards that the user's environment leaves visible to CUDA, in CUDA's order; none if that is not known.

    The driver stops at the first entry that names no card.
    """
    # Children use the order of slots, which is NVML's, unless the user's environment names another one
    # (engine/runtime/child/native/bindings.py).
    if environ.get(ORDER_VARIABLE, _BY_SLOT) != _BY_SLOT:
        return ()
    entries = environ.get(CUDA_VARIABLE)
    if entries is None:
        return tuple(cards)
    visible: list[NvidiaCard] = []
    for entry in map(str.strip, entries.split(",")):
        # CUDA takes numbers and the beginnings of UUIDs.
        by_number = cards[int(entry)] if entry.isdecimal() and int(entry) < len(cards) else None
        card = by_number or next((each for each in cards if entry and each.uuid.startswith(entry)), None)
        if card is None:
            break
        visible.append(card)
    return tuple(visible)


def _without(cards: Iterable[NvidiaCard], bad: set[PciId]) -> dict[str, str]:
    return {CUDA_VARIABLE: ",".join(card.uuid for card in cards if card.slot not in bad)} if bad else {}


def _works(ask: AskDevices, card: NvidiaCard) -> bool:
    """Return whether a child that sees this card alone can read its memory. With one card a failure need not abort."""
    try:
        found = ask(ListDevices(endpoints=(), routes={}), {CUDA_VARIABLE: card.uuid})
    except WorkerCrashedError:
        return False
    return any(parse_pci_id(device.pci_bus_id or "") == card.slot and device.total_bytes for device in found)


@dataclass(frozen=True, slots=True)
class _Place:
    number: int
    device: GgmlDevice


def _numbered(found: Iterable[GgmlDevice], cards: Sequence[NvidiaCard], bad: set[PciId]) -> Iterator[GgmlDevice]:
    """Yield the devices with the names that all cards together would have, and the bad cards among them."""
    numbers = {card.slot: number for number, card in enumerate(cards)}
    found = tuple(found)
    # ggml's CUDA backend answers alike for all cards of a machine, apart from their memory.
    like = next((device for device in found if device.backend == "CUDA"), _CUDA_DEVICE)
    places = [
        _Place(numbers[card.slot], _described(card, numbers[card.slot], like)) for card in cards if card.slot in bad
    ]
    others = []
    for device in found:
        slot = parse_pci_id(device.pci_bus_id or "")
        if device.backend == "CUDA" and slot in numbers:
            named = msgspec.structs.replace(device, name=f"CUDA{numbers[slot]}")
            places.append(_Place(numbers[slot], named))
        else:
            others.append(device)
    yield from (place.device for place in sorted(places, key=lambda place: place.number))
    yield from others


def _described(card: NvidiaCard, number: int, like: GgmlDevice) -> GgmlDevice:
    slot = card.slot
    return msgspec.structs.replace(
        like,
        name=f"CUDA{number}",
        description=card.name,
        free_bytes=card.free_bytes or 0,
        total_bytes=card.total_bytes,
        pci_bus_id=f"{slot.domain:04x}:{slot.bus:02x}:{slot.device:02x}.0",
    )
