"""The one request: to https or this machine, of bounded length and time, and a sentence for all that goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime

import pytest

from engine.errors import EngineError
from engine.hub.errors import HubError
from engine.releases.errors import ReleaseError
from engine.releases.release import MAX_DOCUMENT_BYTES
from engine.releases.source import WHOLE_S, ask, check_address, shipped_source
from tests.support.hub_server import Fault, FaultKind, HubServer, hub_server
from tests.support.signed_releases import PUBLIC_KEY, signed_release


def today() -> date:
    return datetime.now(UTC).date()


@pytest.fixture
def server() -> Iterator[HubServer]:
    with hub_server() as opened:
        opened.plain["release.json"] = signed_release(today())
        yield opened


def address(server: HubServer) -> str:
    return f"{server.url}/plain/release.json"


def test_the_newest_version_is_asked_for_with_nothing_but_the_request(server: HubServer) -> None:
    assert ask(address(server), PUBLIC_KEY).version == "9.1.0"
    (asked,) = server.asked
    assert (asked.path, asked.range, asked.token) == ("/plain/release.json", None, None)


@pytest.mark.parametrize("kind", ["cut", "corrupt", "web_page", "busy", "broken", "no_length", "short"])
def test_whatever_the_server_does_ends_in_one_sentence(server: HubServer, kind: FaultKind) -> None:
    server.faults.append(Fault(kind, after_bytes=20))
    if kind == "no_length":  # all of it comes
        assert ask(address(server), PUBLIC_KEY).serial == 7
        return
    with pytest.raises(EngineError) as caught:
        ask(address(server), PUBLIC_KEY)
    assert isinstance(caught.value, HubError | ReleaseError)
    assert "\n" not in caught.value.summary()


def test_a_silent_server_is_left(server: HubServer) -> None:
    server.faults.append(Fault("stall", after_bytes=20))
    with pytest.raises(HubError) as caught:
        ask(address(server), PUBLIC_KEY, timeout_s=0.2)
    assert caught.value.fault == "timeout"


def test_a_server_that_drips_is_left(server: HubServer) -> None:
    times = iter((0.0, WHOLE_S + 1.0))
    with pytest.raises(ReleaseError) as caught:
        ask(address(server), PUBLIC_KEY, clock=lambda: next(times))
    assert caught.value.fault == "slow"


def test_no_more_is_read_than_a_document_may_have(server: HubServer) -> None:
    server.plain["release.json"] = b" " * (64 * MAX_DOCUMENT_BYTES)
    with pytest.raises(ReleaseError) as caught:
        ask(address(server), PUBLIC_KEY)
    assert caught.value.fault == "size"


@pytest.mark.parametrize("wrong", ["", "http://192.0.2.1/r.json", "ftp://192.0.2.1/r", "https://a b/", "https://u@h/"])
def test_other_addresses_are_not_asked(wrong: str) -> None:
    with pytest.raises(ReleaseError) as caught:
        check_address(wrong)
    assert caught.value.fault == "address"


def test_a_broken_key_is_told_before_anything_is_asked(server: HubServer) -> None:
    with pytest.raises(ReleaseError, match="key"):
        ask(address(server), "AAAA")
    assert server.asked == []


def test_this_copy_asks_nobody_by_itself() -> None:
    assert shipped_source().address == ""
