"""Discovery of CUDA cards: listed by the driver; cards that crash the child are hidden from it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from engine.base.errors import WorkerCrashedError
from engine.base.pci import PciId
from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.telemetry.cards import NvidiaCard
from engine.machines.rigs import cuda_cards
from engine.machines.rigs.cuda_cards import list_all_devices, visible_cards
from engine.planning.memory.backends import TRAITS
from engine.runtime.protocol.messages import GgmlDevice
from engine.runtime.protocol.requests import ListDevices

REQUEST = ListDevices(endpoints=(), routes={})


def card(number: int, free_bytes: int = 8 * GIB) -> NvidiaCard:
    return NvidiaCard(PciId(0, number + 1, 0), f"GPU-{number}0", f"RTX {number}", 8 * GIB, free_bytes)


CARDS = (card(0), card(1), card(2))


class Engine:
    """A child that aborts if it sees one of the cards `breaks`, and another one besides.

    `names_cards`: it can tell which cards its devices are, and asks the driver for none of them that is known.
    """

    def __init__(
        self, cards: tuple[NvidiaCard, ...], breaks: tuple[int, ...] = (), *, names_cards: bool = True
    ) -> None:
        self.cards, self.breaks, self.names_cards = cards, breaks, names_cards
        self.seen: list[str | None] = []
        self.contexts: set[str] = set()

    def __call__(self, request: ListDevices, environment: Mapping[str, str]) -> tuple[GgmlDevice, ...]:
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        self.seen.append(visible)
        shown = [each for each in self.cards if visible is None or each.uuid in visible.split(",")]
        known = {each.uuid for each in shown if self.names_cards and each.uuid in request.known_cards}
        asked = [each for each in shown if each.uuid not in known]
        self.contexts |= {each.uuid for each in asked}
        broken = [each for each in asked if self.cards.index(each) in self.breaks]
        if broken and len(shown) > 1:
            raise WorkerCrashedError("SIGABRT")
        return tuple(
            self._listed(place, each, known=each.uuid in known, is_broken=each in broken)
            for place, each in enumerate(shown)
        )

    def _listed(self, place: int, each: NvidiaCard, *, known: bool, is_broken: bool) -> GgmlDevice:
        return GgmlDevice(
            name=f"CUDA{place}",
            description=each.name,
            backend="CUDA",
            kind="gpu",
            free_bytes=0 if is_broken or known else max(0, (each.free_bytes or 0) - CONTEXT_BYTES),
            total_bytes=0 if is_broken else 8 * GIB,
            pci_bus_id=f"0000:{each.slot.bus:02x}:00.0",
            alignment_bytes=128,
            uuid=each.uuid if known else None,
        )


CONTEXT_BYTES = 300 * MIB
"""Context of the child, of which nobody knows the size."""


def found_by(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    monkeypatch.setattr(cuda_cards, "list_nvidia_cards", lambda: engine.cards)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return [(device.name, device.description, device.free_bytes) for device in list_all_devices(engine, REQUEST)]


def test_the_driver_tells_the_free_memory_and_no_card_gets_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine((card(0), card(1, 64 * MIB), card(2, 3 * GIB)), breaks=(1,))
    assert found_by(engine, monkeypatch) == [
        ("CUDA0", "RTX 0", 8 * GIB),
        ("CUDA1", "RTX 1", 64 * MIB),
        ("CUDA2", "RTX 2", 3 * GIB),
    ]
    assert (engine.seen, engine.contexts) == ([None], set())


@pytest.mark.parametrize("kept", ["sliced", "unnamed"])
def test_a_child_that_asked_itself_has_its_context_counted_once(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forecast of a load adds as much as is added here."""
    cards = (card(0, 4 * GIB), replace(card(1, 4 * GIB), is_sliced=kept == "sliced"))
    engine = Engine(cards, names_cards=kept == "sliced")
    free = [free_bytes for _, _, free_bytes in found_by(engine, monkeypatch)]
    told = 4 * GIB - CONTEXT_BYTES + TRAITS["CUDA"].overhead_bytes
    assert free == [4 * GIB if kept == "sliced" else told, told]
    assert engine.contexts == ({"GPU-10"} if kept == "sliced" else {"GPU-00", "GPU-10"})


def test_a_card_that_ends_the_child_costs_its_own_lane_only(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(CARDS, breaks=(0,), names_cards=False)
    found = found_by(engine, monkeypatch)
    assert [name for name, _, _ in found] == ["CUDA0", "CUDA1", "CUDA2"]
    assert engine.seen == [None, "GPU-00", "GPU-10", "GPU-20", "GPU-10,GPU-20"]


def test_a_crash_that_no_card_causes_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_cards, "list_nvidia_cards", lambda: CARDS[:1])

    def ask(_request: ListDevices, environment: Mapping[str, str]) -> tuple[GgmlDevice, ...]:
        if environment:
            return Engine(CARDS)(REQUEST, environment)
        raise WorkerCrashedError("SIGSEGV")

    with pytest.raises(WorkerCrashedError, match="SIGSEGV"):
        list_all_devices(ask, REQUEST)


@pytest.mark.parametrize(
    ("environ", "numbers"),
    [
        ({}, [0, 1, 2]),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, [2, 0]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1"}, [1]),
        ({"CUDA_VISIBLE_DEVICES": "0,9,1"}, [0]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, []),
    ],
)
def test_the_environment_of_the_user_is_respected(environ: dict[str, str], numbers: list[int]) -> None:
    assert visible_cards(CARDS, environ) == tuple(CARDS[number] for number in numbers)


def test_a_card_whose_driver_tells_no_memory_is_not_taken_for_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards that share the memory of the host, such as GB10."""
    engine = Engine((replace(card(0), total_bytes=0, free_bytes=None),))
    assert [name for name, _, _ in found_by(engine, monkeypatch)] == ["CUDA0"]
    assert engine.seen == [None]


@pytest.mark.parametrize("others", [(card(0),), ()])
def test_a_card_that_was_hidden_has_the_facts_of_its_backend(
    others: tuple[NvidiaCard, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine((*others, card(1, 0), card(2)), breaks=(len(others), len(others) + 1), names_cards=False)
    monkeypatch.setattr(cuda_cards, "list_nvidia_cards", lambda: engine.cards)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    full = list_all_devices(engine, REQUEST)[-2]
    assert (full.description, full.free_bytes, full.pci_bus_id) == ("RTX 1", 0, "0000:02:00.0")
    assert full.alignment_bytes == 128
    assert (full.row_split, full.tensor_split) == ((False, False) if others else (True, True))
