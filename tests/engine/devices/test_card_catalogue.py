"""The catalogue of cards: names, devices made from it, and a published bandwidth for each."""

from __future__ import annotations

import pytest

from engine.base.errors import ArgumentError
from engine.base.units import GIB
from engine.devices.card_catalogue import CARDS, KnownCard, find_card, with_cards
from engine.devices.device import Device, Rig, find_id_error, make_host
from engine.planning.speed.speeds import NO_MEASUREMENTS, bandwidth, source

HERE = Rig(
    (Device("CUDA0", "RTX 4070", "CUDA", "gpu", 12 * GIB), Device("BLAS", "OpenBLAS", "BLAS", "accel", 0)),
    make_host("host", 32 * GIB),
)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("RTX 3090", "RTX 3090"),
        ("nvidia geforce rtx 3090", "RTX 3090"),
        ("rtx3090ti", "RTX 3090 Ti"),
        ("7900 xtx", "RX 7900 XTX"),
        ("Radeon RX 7900 XT", "RX 7900 XT"),
        ("b580", "Arc B580"),
        ("4070", "RTX 4070"),
        ("4070 ti super", "RTX 4070 Ti SUPER"),
    ],
)
def test_a_card_is_found_by_its_name(text: str, name: str) -> None:
    assert find_card(text).name == name


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("RTX 9999", "There is no graphics card"),
        ("super", "RTX 4080 SUPER, RTX 4070 Ti SUPER"),
        ("100", "H100, A100"),
        ("", "There is no graphics card"),
        ("\x1b[31m" * 50, "There is no graphics card"),
    ],
)
def test_an_unknown_or_unclear_name_is_refused(text: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        with_cards(HERE, [text])


def test_cards_get_free_ids_and_stand_before_accelerators() -> None:
    rig = with_cards(HERE, ["2 x RTX 3090", "RX 7900 XTX"])
    assert rig.ids == ("CUDA0", "CUDA1", "CUDA2", "ROCm0", "BLAS", "CPU")
    added = rig.device("CUDA2")
    assert added is not None
    assert (added.name, added.total_bytes, added.free_bytes) == ("RTX 3090 (not present)", 24 * GIB, None)
    assert all(find_id_error(device_id) is None for device_id in rig.ids)


@pytest.mark.parametrize("asked", [["0 x T4"], ["17 x T4"], ["16 x T4", "T4"]])
def test_more_cards_than_a_layout_can_use_are_refused(asked: list[str]) -> None:
    with pytest.raises(ArgumentError, match="At most 16"):
        with_cards(HERE, asked)


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_each_card_has_a_published_bandwidth(card: KnownCard) -> None:
    (device,) = with_cards(Rig((), HERE.host), [card.name]).devices
    assert source(device, NO_MEASUREMENTS) == "card"
    assert bandwidth(device) == card.bandwidth * 1e9


def test_a_computer_with_unified_memory_takes_the_place_of_the_rig() -> None:
    rig = with_cards(HERE, ["m4 max"])
    assert rig.ids == ("Metal0", "CPU")
    assert (rig.devices[0].total_bytes, rig.host.total_bytes) == (96 * GIB, 128 * GIB)
    assert rig.pool is not None
    assert with_cards(HERE, ["DGX Spark"]).devices[0].kind == "igpu"


@pytest.mark.parametrize("asked", [["2 x M4 Max"], ["M4 Max", "RTX 3090"], ["RTX 3090", "Strix Halo"]])
def test_a_whole_computer_is_chosen_alone(asked: list[str]) -> None:
    with pytest.raises(ArgumentError, match="is a whole computer"):
        with_cards(HERE, asked)
