"""Discovery of CUDA devices without a CUDA context on each card, and on machines where CUDA fails on some cards.

llama.cpp reads the memory of every visible card. That creates a CUDA context of several hundred MiB, and a card that is
full or broken aborts the process. So NVIDIA's driver (NVML) is asked for the memory instead, and the child process that
lists the devices skips the cards whose memory the driver reports. The child itself reads the memory of other cards:
slices of a card (MIG), cards that share the host's memory, and all cards if there is no NVML. A card on which the child
aborts is hidden from it by CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from engine.base.errors import WorkerCrashedError
from engine.base.pci import PciId, parse_pci_id
from engine.base.values import replace
from engine.devices.telemetry.cards import NvidiaCard, list_nvidia_cards
from engine.planning.memory.backends import TRAITS
from engine.runtime.plan_requests import CUDA_VARIABLE
from engine.runtime.protocol.messages import GgmlDevice
from engine.runtime.protocol.requests import ListDevices

ORDER_VARIABLE = "CUDA_DEVICE_ORDER"
_BY_SLOT = "PCI_BUS_ID"
_HAVE_CONTEXTS = ("CUDA", "HIP")
"""Backends that create a context on a card to read its free memory."""
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
"""Description of a CUDA card as ggml-cuda.cu would report it, for a card on which CUDA fails.

Host buffers have the alignment of CPU buffers (32), and the size of a buffer has no limit.
"""

AskDevices = Callable[[ListDevices, Mapping[str, str]], Sequence[GgmlDevice]]
"""Function that starts a child process with additional environment variables, sends a request and returns devices."""


def list_all_devices(ask: AskDevices, request: ListDevices) -> tuple[GgmlDevice, ...]:
    """Return the devices that a child lists for `request`. Memory that the child itself uses counts as free.

    `ask`: starts the child and returns its devices.

    Raises:
        EngineError: if the child fails. After a crash it is started once more, with the cards hidden on which CUDA
            fails.
    """
    cards = list_nvidia_cards()
    known = tuple(card.uuid for card in cards if card.free_bytes is not None and not card.is_sliced)
    request = replace(request, known_cards=known)
    try:
        return tuple(_free_of_contexts(ask(request, {}), cards))
    except WorkerCrashedError:
        # Cards are tried alone only after a crash, since each takes a child of its own.
        shown = visible_cards(cards, os.environ)
        bad = {card.slot for card in shown if not _works(ask, card)}
        if not bad:
            raise
    found = _free_of_contexts(ask(request, _without(shown, bad)), cards)
    _log.info("CUDA was not used on %s", ", ".join(card.uuid for card in shown if card.slot in bad))
    return tuple(_numbered(found, shown, bad))


def _free_of_contexts(found: Iterable[GgmlDevice], cards: Iterable[NvidiaCard]) -> Iterator[GgmlDevice]:
    """Yield the devices of `found`, with the memory that the child's own CUDA contexts took counted as free.

    For cards in `cards`, the free memory is that of NVML. For other cards, the usual size of a context is added.

    `found`: devices as a child process listed them. The child has ended since.
    `cards`: cards with their memory by NVML.
    """
    free = {card.uuid: card.free_bytes for card in cards}
    for device in found:
        free_bytes = device.free_bytes
        if device.uuid is not None:
            free_bytes = free.get(device.uuid) or 0
        elif device.backend in _HAVE_CONTEXTS and device.endpoint is None:
            # The context of the child used memory while it was read, and has ended with the child. A forecast adds the
            # same estimate for its own context, so that an error of the estimate cancels out.
            free_bytes += TRAITS[device.backend].overhead_bytes
        yield replace(device, free_bytes=min(free_bytes, device.total_bytes))


def visible_cards(cards: Sequence[NvidiaCard], environ: Mapping[str, str]) -> tuple[NvidiaCard, ...]:
    """Return the cards that the user's environment leaves visible to CUDA, in CUDA's order.

    Empty if CUDA's order is not known. CUDA stops at the first entry of CUDA_VISIBLE_DEVICES that names no card.
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
    """Return whether CUDA works on a card: a child process that sees only this card lists it with its memory.

    If CUDA fails on the card, the child either crashes or lists no card.
    """
    try:
        found = ask(ListDevices(endpoints=(), routes={}), {CUDA_VARIABLE: card.uuid})
    except WorkerCrashedError:
        return False
    return any(parse_pci_id(device.pci_bus_id or "") == card.slot and device.total_bytes for device in found)


class _NumberedDevice(Struct, frozen=True):
    number: int
    device: GgmlDevice


def _numbered(found: Iterable[GgmlDevice], cards: Sequence[NvidiaCard], bad: set[PciId]) -> Iterator[GgmlDevice]:
    """Yield all devices including the bad cards, named and ordered as if all cards worked.

    `found`: devices that a child has listed without the bad cards.
    `cards`: all visible cards in CUDA's order.
    `bad`: PCI addresses of the cards on which CUDA fails.
    """
    numbers = {card.slot: number for number, card in enumerate(cards)}
    found = tuple(found)
    # ggml's CUDA backend answers alike for all cards of a machine, apart from their memory.
    like = next((device for device in found if device.backend == "CUDA"), _CUDA_DEVICE)
    numbered = [
        _NumberedDevice(numbers[card.slot], _described(card, numbers[card.slot], like))
        for card in cards
        if card.slot in bad
    ]
    others = []
    for device in found:
        slot = parse_pci_id(device.pci_bus_id or "")
        if device.backend == "CUDA" and slot in numbers:
            named = replace(device, name=f"CUDA{numbers[slot]}")
            numbered.append(_NumberedDevice(numbers[slot], named))
        else:
            others.append(device)
    yield from (each.device for each in sorted(numbered, key=lambda each: each.number))
    yield from others


def _described(card: NvidiaCard, number: int, like: GgmlDevice) -> GgmlDevice:
    slot = card.slot
    return replace(
        like,
        name=f"CUDA{number}",
        description=card.name,
        free_bytes=card.free_bytes or 0,
        total_bytes=card.total_bytes,
        pci_bus_id=f"{slot.domain:04x}:{slot.bus:02x}:{slot.device:02x}.0",
    )
