"""The capacity search against a table of small cases with known results."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from engine.fit.strategies.capacity_search import (
    HostMemory,
    HostRequiredFullError,
    MemoryShortError,
    MemoryView,
    Place,
    Placed,
    RequiredFullError,
    Wishes,
    place_layers,
    search,
)
from engine.units import MIB

PLAIN = Wishes()
HOST = HostMemory(1024 * MIB, 512 * MIB, 256 * MIB)
MINIMUM_BYTES = 457 * MIB


def place(name: str, usable_mib: int, library: str = "CUDA", rank: int = 0) -> Place:
    return Place(name, usable_mib * MIB + MINIMUM_BYTES, library, rank)


G0_256 = (place("g0", 256),)
G0_128_G1_256 = (place("g0", 128), place("g1", 256))
G0_128_IGPU_256 = (place("g0", 128), place("g1", 256, rank=1))
THREE = (place("g0", 300), place("g1", 200), place("g2", 100))


@dataclass(frozen=True)
class Case:
    name: str
    places: tuple[Place, ...]
    layers_mib: tuple[int, ...]
    expected: Placed | None
    wishes: Wishes = PLAIN
    graph_mib: int = 0


CASES = (
    Case("1", (), (50,) * 3, (), Wishes(require_full=True)),
    Case("2", G0_256, (50,) * 3, (("g0", (0, 1, 2)),)),
    Case("3", G0_256, (100,) * 4, (("g0", (1, 2)),)),
    Case("4", G0_256, (50,) * 3, (("g0", (1,)),), Wishes(1)),
    Case("5", G0_256, (50,) * 3, (), Wishes(0)),
    Case("6", G0_256, (100,) * 4, (("g0", (0, 1, 2, 3)),), Wishes(999)),
    Case("7", G0_128_G1_256, (50,) * 3, (("g1", (0, 1, 2)),)),
    Case("8", G0_128_G1_256, (256, 50, 50), (("g1", (0,)), ("g0", (1, 2)))),
    Case("9", G0_128_G1_256, (256, 256, 50), (("g1", (1,)),)),
    Case("10", G0_128_G1_256, (50,) * 3, (("g1", (1,)),), Wishes(1)),
    Case("11", G0_128_G1_256, (256, 50, 50), (("g1", (0,)), ("g0", (1,))), Wishes(2)),
    Case("12", G0_128_G1_256, (256, 256, 50), (("g1", (0, 1)), ("g0", (2,))), Wishes(999)),
    Case("13", (place("g0", 128), place("g1", 256, "ROCm")), (128, 128, 50), (("g1", (0, 1)),)),
    Case("14", G0_256, (100,) * 4, None, Wishes(require_full=True)),
    Case("15", (Place("g0", 256 * MIB),), (100,) * 4, None, Wishes(4, require_full=True)),
    Case("16", (place("g0", 256, rank=1),), (50,) * 3, (("g0", (0, 1, 2)),)),
    Case("17", G0_128_IGPU_256, (50,) * 3, (("g1", (0,)), ("g0", (1, 2)))),
    Case("18", G0_128_IGPU_256, (50,) * 2, (("g0", (0, 1)),)),
    Case("19", G0_128_IGPU_256, (100,) * 4, (("g1", (0, 1)), ("g0", (2,)))),
    Case("20", G0_128_IGPU_256, (100,) * 4, (("g0", (2,)),), Wishes(1)),
    Case("21", G0_128_IGPU_256, (100,) * 4, (("g0", (0,)), ("g1", (1, 2, 3))), Wishes(999)),
    Case("X1", (place("g0", 256), place("g1", 256)), (50,) * 4, (("g0", (0, 1)), ("g1", (2, 3))), Wishes(spread=True)),
    Case("X1 without spread", (place("g0", 256), place("g1", 256)), (50,) * 4, (("g0", (0, 1, 2, 3)),)),
    Case("X2", G0_128_G1_256, (50,) * 6, (("g1", (0, 1, 2, 3)), ("g0", (4, 5)))),
    Case("X3", G0_256, (50,) * 5, (("g0", (1, 2, 3)),), Wishes(backoff=0.1)),
    Case("X4", G0_256, (50,) * 4, (("g0", (0, 1, 2)),), Wishes(overhead_bytes=100 * MIB)),
    Case("X5", G0_256, (50,) * 4, (("g0", (0, 1, 2)),), graph_mib=100),
    Case("X6", G0_128_G1_256, (50,) * 3, (("g1", (0, 1)), ("g0", (2,))), graph_mib=1),
    Case("X7", G0_256, (50, 50, 50, 300), (("g0", (0, 1, 2)),)),
    Case("X8", (place("g0", 128),), (100,) * 3, (("g0", (0, 1)),), Wishes(2)),
    Case("X8 required", (place("g0", 128),), (100,) * 3, None, Wishes(2, require_full=True)),
    Case("X9", (Place("g0", 612 * MIB, "Metal"),), (50,) * 3, (("g0", (0, 1)),)),
    Case("X10", THREE, (50,) * 10, (("g0", (0, 1, 2, 3, 4, 5)), ("g1", (6, 7, 8, 9)))),
    Case("X11", THREE, (50,) * 6, (("g0", (0, 1, 2)), ("g1", (3, 4)), ("g2", (5,))), Wishes(spread=True)),
    Case("X12", (place("g0", 40), place("g1", 256)), (50,) * 6, (("g1", (0, 1, 2, 3, 4)),)),
)


def view_of(case: Case) -> MemoryView:
    return MemoryView(
        tuple(size * MIB for size in case.layers_mib), {each.id: case.graph_mib * MIB for each in case.places}
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_table(case: Case) -> None:
    if case.expected is None:
        with pytest.raises(RequiredFullError, match="full model"):
            search(view_of(case), case.places, HOST, case.wishes)
    else:
        assert search(view_of(case), case.places, HOST, case.wishes) == case.expected


def test_a_required_build_is_kept_before_it_is_refused() -> None:
    case = next(case for case in CASES if case.name == "X8 required")
    assert place_layers(view_of(case), case.places, case.wishes) == (("g0", (1,)),)


def test_host_memory_with_swap_is_checked_and_the_message_has_both_sizes() -> None:
    view = MemoryView((60 * MIB,) * 3, {})
    small = HostMemory(1024 * MIB, 100 * MIB, 50 * MIB)
    with pytest.raises(MemoryShortError, match=r"\(180\.0 MiB\) than is available \(150\.0 MiB\)"):
        search(view, (), small)
    with pytest.raises(RequiredFullError) as caught:
        search(view, (), small, Wishes(require_full=True))
    assert isinstance(caught.value, HostRequiredFullError)


def test_more_than_all_memory_of_a_mac_stays_on_the_cpu() -> None:
    view = MemoryView((600 * MIB,) * 2, {"g0": 0})
    places = (Place("g0", 2048 * MIB, "Metal"),)
    assert search(view, places, HostMemory(4096 * MIB, 2048 * MIB, 0, "darwin")) == (("g0", (0, 1)),)
    assert search(view, places, HostMemory(1024 * MIB, 2048 * MIB, 0, "darwin")) == ()
    assert search(view, places, HostMemory(1024 * MIB, 2048 * MIB, 0, "windows")) == (("g0", (0, 1)),)


def test_a_device_without_a_known_graph_holds_nothing() -> None:
    assert search(MemoryView((MIB,), {}), G0_256, HOST) == ()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_the_order_of_the_devices_does_not_matter(order: tuple[int, ...]) -> None:
    places = [G0_128_IGPU_256[1], *THREE]
    case = Case("", tuple(places[index] for index in (*order, 3)), (50,) * 12, ())
    assert place_layers(view_of(case), case.places) == place_layers(view_of(case), tuple(reversed(case.places)))
