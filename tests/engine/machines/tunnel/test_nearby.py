"""Announcements of machines, on the loopback interface only, and their validation."""

from __future__ import annotations

import queue
import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.base.errors import EngineError
from engine.base.units import GIB
from engine.devices.endpoint import MAX_DEVICE_BYTES, parse_endpoint
from engine.machines.tunnel.local_network import MAX_DEVICE, Announcement, read_machine
from engine.machines.tunnel.pairings import MAX_NAME
from engine.machines.tunnel.tunnels import NearbySearch
from engine.runtime.protocol.network import NearbyMachine
from tests.support.patience import DEADLINE_S

FINGERPRINT = "ab" * 32
TEXTS = {b"v": b"1", b"name": b"attic", b"device": b"CUDA0", b"memory": b"1024", b"fingerprint": FINGERPRINT.encode()}


def test_a_machine_that_announces_itself_is_found_and_lost_again() -> None:
    fingerprint = secrets.token_hex(32)
    told: queue.SimpleQueue[tuple[NearbyMachine, ...]] = queue.SimpleQueue()
    problems: list[str] = []
    search = NearbySearch(told.put, problems.append, interfaces=("127.0.0.1",))
    search.start()
    try:
        assert told.get(timeout=DEADLINE_S) == ()
        announcement = Announcement(
            "attic.room", "127.0.0.1", 50052, device="CPU", total_bytes=8 * GIB, fingerprint=fingerprint
        )
        with announcement:
            # Other tests may announce themselves on this machine meanwhile.
            while not (found := [each for each in told.get(timeout=DEADLINE_S) if each.fingerprint == fingerprint]):
                pass
            assert found == [NearbyMachine("attic.room", "127.0.0.1:50052", "CPU", 8 * GIB, fingerprint)]
        while any(each.fingerprint == fingerprint for each in told.get(timeout=DEADLINE_S)):
            pass
    finally:
        search.close()
    assert problems == []


def test_machines_of_one_name_that_start_at_the_same_time_are_all_listed() -> None:
    """While none has announced itself, each finds the name free."""
    fingerprints = [secrets.token_hex(32) for _ in range(4)]
    told: queue.SimpleQueue[tuple[NearbyMachine, ...]] = queue.SimpleQueue()
    problems: list[str] = []
    with ExitStack() as stack:
        announcements = [
            Announcement("attic", f"127.0.0.{number + 2}", 50052, device="CPU", total_bytes=GIB, fingerprint=each)
            for number, each in enumerate(fingerprints)
        ]
        with ThreadPoolExecutor(len(announcements)) as pool:
            list(pool.map(stack.enter_context, announcements))
        search = NearbySearch(told.put, problems.append, interfaces=("127.0.0.1",))
        stack.callback(search.close)
        search.start()
        found: list[NearbyMachine] = []
        while len(found) < len(fingerprints):
            found = [each for each in told.get(timeout=DEADLINE_S) if each.fingerprint in fingerprints]
        assert {each.name for each in found} == {"attic"}
        assert len({each.endpoint for each in found}) == len(fingerprints)
    assert problems == []


def test_what_is_no_address_of_a_machine_announces_nothing() -> None:
    announcement = Announcement("a", "attic", 1, device="CPU", total_bytes=0, fingerprint=FINGERPRINT)
    with pytest.raises(EngineError, match="cannot announce itself on attic"), announcement:
        pass


def test_what_is_announced_well_is_taken() -> None:
    machine = read_machine(["192.0.2.7"], 50052, dict(TEXTS))
    assert machine == NearbyMachine("attic", "192.0.2.7:50052", "CUDA0", 1024, FINGERPRINT)


@pytest.mark.parametrize(
    ("key", "value"),
    [(b"v", b"2"), (b"v", None), (b"fingerprint", b"AB" * 32), (b"fingerprint", b"ab"), (b"fingerprint", None)],
)
def test_what_is_of_another_version_or_nobody_is_left(key: bytes, value: bytes | None) -> None:
    assert read_machine(["192.0.2.7"], 50052, {**TEXTS, key: value}) is None


def test_a_machine_without_an_address_is_left() -> None:
    assert read_machine([], 50052, dict(TEXTS)) is None
    assert read_machine(["192.0.2.7"], None, dict(TEXTS)) is None
    assert read_machine(["192.0.2.7"], 0, dict(TEXTS)) is None


@given(
    st.lists(st.text(max_size=20), max_size=3),
    st.none() | st.integers(-1, 1 << 17),
    st.dictionaries(
        st.sampled_from([*TEXTS]) | st.binary(max_size=8), st.none() | st.binary(max_size=400), max_size=40
    ),
)
def test_whatever_is_announced_stays_within_bounds(
    addresses: list[str], port: int | None, texts: dict[bytes, bytes | None]
) -> None:
    known: dict[bytes, bytes | None] = {**TEXTS}
    known |= {key: texts[key] for key in (b"name", b"device", b"memory") if key in texts}
    for given_texts in (texts, known):
        machine = read_machine([*addresses, "192.0.2.7"][-1:] if port else addresses, port, given_texts)
        if machine is None:
            continue
        assert 0 < len(machine.name) <= MAX_NAME
        assert machine.name.isprintable()
        assert len(machine.device) <= MAX_DEVICE
        assert machine.device.isprintable()
        assert 0 <= machine.total_bytes <= MAX_DEVICE_BYTES
        assert parse_endpoint(machine.endpoint)
