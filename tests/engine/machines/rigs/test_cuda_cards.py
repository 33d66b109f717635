"""Discovery with CUDA cards that a child does not survive: they are hidden from it, and listed all the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from engine.base.errors import WorkerCrashedError
from engine.base.pci import PciId
from engine.base.units import GIB, MIB
from engine.devices.telemetry.cards import NvidiaCard
from engine.machines.rigs import bad_cards
from engine.machines.rigs.bad_cards import CONTEXT_BYTES, list_around_bad_cards, visible_cards
from engine.runtime.protocol.messages import GgmlDevice, ListDevices

REQUEST = ListDevices(endpoints=(), routes={})


def card(number: int, free_bytes: int = 8 * GIB) -> NvidiaCard:
    return NvidiaCard(PciId(0, number + 1, 0), f"GPU-{number}0", f"RTX {number}", 8 * GIB, free_bytes)


CARDS = (card(0), card(1), card(2))


class Engine:
    """A child that aborts if it sees one of the cards `breaks`, and another one besides."""

    def __init__(self, cards: tuple[NvidiaCard, ...], breaks: tuple[int, ...] = ()) -> None:
        self.cards, self.breaks = cards, breaks
        self.seen: list[str | None] = []

    def __call__(self, _request: ListDevices, environment: Mapping[str, str]) -> tuple[GgmlDevice, ...]:
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        self.seen.append(visible)
        shown = [each for each in self.cards if visible is None or each.uuid in visible.split(",")]
        broken = [each for each in shown if self.cards.index(each) in self.breaks]
        if broken and len(shown) > 1:
            raise WorkerCrashedError("SIGABRT")
        return tuple(self._listed(place, each, is_broken=each in broken) for place, each in enumerate(shown))

    def _listed(self, place: int, each: NvidiaCard, *, is_broken: bool) -> GgmlDevice:
        return GgmlDevice(
            name=f"CUDA{place}",
            description=each.name,
            backend="CUDA",
            kind="gpu",
            free_bytes=0 if is_broken else each.free_bytes or 0,
            total_bytes=0 if is_broken else each.total_bytes,
            pci_bus_id=f"0000:{each.slot.bus:02x}:00.0",
            alignment_bytes=128,
        )


def found_by(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    monkeypatch.setattr(bad_cards, "list_nvidia_cards", lambda: engine.cards)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return [(device.name, device.description, device.free_bytes) for device in list_around_bad_cards(engine, REQUEST)]


def test_good_cards_are_asked_for_at_once_and_nothing_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(CARDS)
    assert [name for name, _, _ in found_by(engine, monkeypatch)] == ["CUDA0", "CUDA1", "CUDA2"]
    assert engine.seen == [None]


def test_a_card_without_room_for_a_context_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    full = card(1, CONTEXT_BYTES - MIB)
    engine = Engine((card(0), full, card(2)), breaks=(1,))
    found = found_by(engine, monkeypatch)
    assert engine.seen == ["GPU-00,GPU-20"]
    assert found == [("CUDA0", "RTX 0", 8 * GIB), ("CUDA1", "RTX 1", full.free_bytes), ("CUDA2", "RTX 2", 8 * GIB)]


def test_a_card_that_ends_the_child_costs_its_own_lane_only(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(CARDS, breaks=(0,))
    found = found_by(engine, monkeypatch)
    assert [name for name, _, _ in found] == ["CUDA0", "CUDA1", "CUDA2"]
    assert engine.seen == [None, "GPU-00", "GPU-10", "GPU-20", "GPU-10,GPU-20"]


def test_a_crash_that_no_card_causes_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bad_cards, "list_nvidia_cards", lambda: CARDS[:1])

    def ask(_request: ListDevices, environment: Mapping[str, str]) -> tuple[GgmlDevice, ...]:
        if environment:
            return Engine(CARDS)(REQUEST, environment)
        raise WorkerCrashedError("SIGSEGV")

    with pytest.raises(WorkerCrashedError, match="SIGSEGV"):
        list_around_bad_cards(ask, REQUEST)


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
def test_a_full_card_has_the_facts_of_its_backend(
    others: tuple[NvidiaCard, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine((*others, card(1, 0)))
    monkeypatch.setattr(bad_cards, "list_nvidia_cards", lambda: engine.cards)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    full = list_around_bad_cards(engine, REQUEST)[-1]
    assert (full.description, full.free_bytes, full.pci_bus_id) == ("RTX 1", 0, "0000:02:00.0")
    assert full.alignment_bytes == 128
    assert (full.row_split, full.tensor_split) == ((False, False) if others else (True, True))
