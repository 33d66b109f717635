"""The capacity search against a table of small cases with known results."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from engine.fit.strategies.capacity_search import Place, Placed, place_layers
from engine.units import MIB


def place(name: str, room_mib: int, rank: int = 0) -> Place:
    return Place(name, room_mib * MIB, rank)


G0_256 = (place("g0", 256),)
G0_128_G1_256 = (place("g0", 128), place("g1", 256))
G0_128_IGPU_256 = (place("g0", 128), place("g1", 256, rank=1))
THREE = (place("g0", 300), place("g1", 200), place("g2", 100))


@dataclass(frozen=True)
class Case:
    name: str
    places: tuple[Place, ...]
    layers_mib: tuple[int, ...]
    expected: Placed
    spread: bool = False


CASES = (
    Case("no device", (), (50,) * 3, ()),
    Case("one device", G0_256, (50,) * 3, (("g0", (0, 1, 2)),)),
    Case("too many layers", G0_256, (100,) * 4, (("g0", (1, 2)),)),
    Case("the larger device alone", G0_128_G1_256, (50,) * 3, (("g1", (0, 1, 2)),)),
    Case("one layer fills a device", G0_128_G1_256, (256, 50, 50), (("g1", (0,)), ("g0", (1, 2)))),
    Case("two layers fill a device", G0_128_G1_256, (256, 256, 50), (("g1", (1,)),)),
    Case("an integrated card", (place("g0", 256, rank=1),), (50,) * 3, (("g0", (0, 1, 2)),)),
    Case("a card before an integrated one", G0_128_IGPU_256, (50,) * 3, (("g1", (0,)), ("g0", (1, 2)))),
    Case("the card is enough", G0_128_IGPU_256, (50,) * 2, (("g0", (0, 1)),)),
    Case("both are too small", G0_128_IGPU_256, (100,) * 4, (("g1", (0, 1)), ("g0", (2,)))),
    Case("spread", (place("g0", 256), place("g1", 256)), (50,) * 4, (("g0", (0, 1)), ("g1", (2, 3))), spread=True),
    Case("not spread", (place("g0", 256), place("g1", 256)), (50,) * 4, (("g0", (0, 1, 2, 3)),)),
    Case("in proportion", G0_128_G1_256, (50,) * 6, (("g1", (0, 1, 2, 3)), ("g0", (4, 5)))),
    Case("a large output layer", G0_256, (50, 50, 50, 300), (("g0", (0, 1, 2)),)),
    Case("two of three", THREE, (50,) * 10, (("g0", (0, 1, 2, 3, 4, 5)), ("g1", (6, 7, 8, 9)))),
    Case("all three", THREE, (50,) * 6, (("g0", (0, 1, 2)), ("g1", (3, 4)), ("g2", (5,))), spread=True),
    Case("one holds no layer", (place("g0", 40), place("g1", 256)), (50,) * 6, (("g1", (0, 1, 2, 3, 4)),)),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_table(case: Case) -> None:
    assert placed(case, case.places) == case.expected


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_the_order_of_the_devices_does_not_matter(order: tuple[int, ...]) -> None:
    places = [G0_128_IGPU_256[1], *THREE]
    case = Case("", tuple(places[index] for index in (*order, 3)), (50,) * 12, ())
    assert placed(case, case.places) == placed(case, tuple(reversed(case.places)))


def placed(case: Case, places: tuple[Place, ...]) -> Placed:
    return place_layers([size * MIB for size in case.layers_mib], places, spread=case.spread)
