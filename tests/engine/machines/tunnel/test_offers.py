"""Devices lent through one port: the offer, sessions by device, and the messages to several users."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from engine.devices.endpoint import GreetingStatus
from engine.machines.tunnel import listener
from engine.machines.tunnel.calling import ask_offer
from engine.machines.tunnel.offers import MAX_OFFERED, Offer, OfferedDevice, OfferedSpeed, TunnelError, bounded
from tests.support import tunnels
from tests.support.patience import DEADLINE_S
from tests.support.tunnels import Attic, Home, attic, described, echoing

NAMES = ("CUDA0", "CUDA1", "CPU")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Attic]:
    with echoing() as reach, attic(tmp_path / "attic", reach, NAMES) as machine:
        yield machine


@pytest.fixture
def laptop(tmp_path: Path) -> Home:
    return Home(tmp_path / "laptop")


def offer_to(home: Home, served: Attic) -> Offer:
    return ask_offer(served.endpoint, served.home.identity.certificate, home.identity, DEADLINE_S)


def users(offer: Offer) -> dict[str, tuple[str, bool]]:
    return {each.name: (each.user, each.is_yours) for each in offer.devices}


def test_one_pairing_brings_all_devices(served: Attic, laptop: Home) -> None:
    served.pair(laptop)
    offer = offer_to(laptop, served)
    assert offer.name == "attic"
    assert tuple(each.name for each in offer.devices) == NAMES
    assert all(each.total_bytes == 64 << 20 for each in offer.devices)


def test_devices_have_sessions_at_the_same_time(served: Attic, laptop: Home) -> None:
    served.pair(laptop)
    sessions = [served.open(laptop, name) for name in NAMES]
    for number, session in enumerate(sessions):
        session.send(b"%d" % number)
    assert [session.receive(1) for session in sessions] == [b"0", b"1", b"2"]
    assert users(offer_to(laptop, served)) == dict.fromkeys(NAMES, ("laptop", True))
    for session in sessions:
        session.close()


def test_a_second_user_is_told_who_is_there_and_may_take_what_is_left(
    served: Attic, laptop: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    garden = Home(tmp_path / "garden")
    served.pair(laptop)
    served.pair(garden, "garden")
    first = served.open(laptop, "CUDA0")
    assert users(offer_to(garden, served))["CUDA0"] == ("laptop", False)
    with pytest.raises(TunnelError, match="is used by laptop now; wait until it is free") as caught:
        served.open(garden, "CUDA0")
    assert caught.value.status is GreetingStatus.BUSY
    second = served.open(garden, "CUDA1")
    first.close()
    # Its place is free for whoever has waited, on a busy machine longer than usual.
    monkeypatch.setattr(listener, "BUSY_S", DEADLINE_S)
    waited = served.open(garden, "CUDA0")
    waited.send(b"x")
    assert waited.receive(1) == b"x"
    waited.close()
    second.close()


def test_a_device_whose_worker_has_ended_for_good_is_offered_no_more(
    tmp_path: Path, laptop: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnels, "described", lambda name: None if name == "CUDA0" else described(name))
    with echoing() as echo, attic(tmp_path / "attic anew", echo, ("CUDA0", "CPU")) as served:
        served.pair(laptop)
        assert [each.name for each in offer_to(laptop, served).devices] == ["CPU"]


def test_a_device_that_is_not_offered_is_told(served: Attic, laptop: Home) -> None:
    served.pair(laptop)
    with pytest.raises(TunnelError, match="is not lent there"):
        served.open(laptop, "CUDA7")


def test_a_caller_that_names_none_gets_the_first_device(served: Attic, laptop: Home) -> None:
    """Machines of older releases do, and rig files that they wrote."""
    served.pair(laptop)
    session = served.open(laptop)
    assert users(offer_to(laptop, served))["CUDA0"] == ("laptop", True)
    session.close()


def test_who_is_not_paired_hears_of_no_device(served: Attic, laptop: Home) -> None:
    with pytest.raises(TunnelError) as caught:
        offer_to(laptop, served)
    assert caught.value.status is GreetingStatus.UNTRUSTED


def test_an_offer_of_too_many_devices_is_refused(laptop: Home, tmp_path: Path) -> None:
    names = [f"CUDA{number}" for number in range(MAX_OFFERED + 1)]
    with echoing() as reach, attic(tmp_path / "attic", reach, names) as served:
        served.pair(laptop)
        with pytest.raises(TunnelError) as caught:
            offer_to(laptop, served)
    assert caught.value.status is GreetingStatus.NOT_RPC


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"name": "a/b"}, None),
        ({"total_bytes": 0}, None),
        ({"total_bytes": 1 << 60}, None),
        ({"free_bytes": 1 << 60}, {"free_bytes": 64 << 20}),
        ({"free_bytes": -1}, {"free_bytes": 0}),
        ({"margin_bytes": 1 << 60}, {"margin_bytes": 64 << 20}),
        ({"alignment_bytes": 96}, {"alignment_bytes": None}),
        ({"alignment_bytes": 1 << 40}, {"alignment_bytes": None}),
        ({"largest_buffer_bytes": -5}, {"largest_buffer_bytes": None}),
        ({"overhead_bytes": 1 << 60}, {"overhead_bytes": 64 << 20}),
        ({"backend": "CUDA\x1b[2J"}, {"backend": ""}),
        ({"speed": OfferedSpeed(read_bytes_per_second=math.inf)}, {"speed": None}),
        (
            {"speed": OfferedSpeed(read_bytes_per_second=1e10, by_type={"Q4_0": 1e99, "F16": 1e9}, op_s=-1.0)},
            {"speed": OfferedSpeed(read_bytes_per_second=1e10, by_type={"F16": 1e9})},
        ),
    ],
)
def test_what_is_told_is_trusted_within_bounds_only(
    wrong: dict[str, object], expected: dict[str, object] | None
) -> None:
    found = bounded(msgspec.structs.replace(described("CUDA0"), **wrong))
    if expected is None:
        assert found is None
    else:
        assert isinstance(found, OfferedDevice)
        assert {key: getattr(found, key) for key in expected} == expected


def test_texts_of_a_device_are_cleaned() -> None:
    found = bounded(msgspec.structs.replace(described("CUDA0"), description="a\x1b[2J\n" * 99, user="b\n" * 99))
    assert found is not None
    assert found.description.isprintable()
    assert found.user.isprintable()
    assert len(found.description) <= 80
    assert len(found.user) <= 41
