"""HTTP requests: only https or this machine, tokens only to their hub, and bounded answers."""

from __future__ import annotations

from collections.abc import Iterator
from email.message import Message

import pytest

from engine.library.hub.settings import HubError
from engine.library.hub.web import error_of_status, open_range, open_url, retry_after
from tests.support.hub_server import Fault, HubServer, Repo, hub_server

DATA = bytes(range(256)) * 64


@pytest.fixture
def server() -> Iterator[HubServer]:
    with hub_server(Repo("org/m", {"m.gguf": DATA}), Repo("org/g", {"m.gguf": DATA}, gated=True)) as found:
        yield found


def test_a_range_and_what_the_hub_says_of_it(server: HubServer) -> None:
    url = server.file_url("org/m", "m.gguf")
    assert open_range(url, 10, 300) == DATA[10:300]
    with open_url(url, first=16_000) as response:
        head = response.head
        assert response.read_whole(1000) == DATA[16_000:]
    assert (head.first, head.end, head.size_bytes) == (16_000, len(DATA), len(DATA))
    assert len(head.etag or "") == 64, "the hub's own, not the store's"


def test_the_token_does_not_follow_a_redirect_elsewhere(server: HubServer) -> None:
    with hub_server() as elsewhere:
        elsewhere.plain["m.gguf"] = DATA
        server.faults.append(Fault("redirect", target=f"{elsewhere.url}/plain/m.gguf"))
        with open_url(server.file_url("org/g", "m.gguf"), token="hf_right") as response:
            assert response.read_whole(len(DATA)) == DATA
        assert [asked.token for asked in elsewhere.asked] == [None]
    assert server.asked[0].token == "hf_right"


@pytest.mark.parametrize(
    "target", ["http://192.0.2.1/m.gguf", "ftp://192.0.2.1/m", "file:///etc/passwd", "//192.0.2.1/m", "http://["]
)
def test_redirects_lead_to_https_only(server: HubServer, target: str) -> None:
    server.faults.append(Fault("redirect", target=target))
    with pytest.raises(HubError) as caught:
        open_url(server.file_url("org/m", "m.gguf"))
    assert caught.value.fault == "redirect"


def test_circles_end(server: HubServer) -> None:
    server.faults.extend([Fault("redirect", target="/org/m/resolve/main/m.gguf")] * 20)
    with pytest.raises(HubError, match="circles"):
        open_url(server.file_url("org/m", "m.gguf"))


def test_a_gated_file_wants_terms_and_a_token(server: HubServer) -> None:
    with pytest.raises(HubError, match="terms") as caught:
        open_url(server.file_url("org/g", "m.gguf"))
    assert (caught.value.fault, caught.value.kind) == ("gated", "argument")


def test_an_answer_without_end_is_cut(server: HubServer) -> None:
    with open_url(server.file_url("org/m", "m.gguf")) as response, pytest.raises(HubError, match="more than"):
        response.read_whole(100)


def test_a_server_without_ranges_gives_no_part(server: HubServer) -> None:
    server.faults.append(Fault("no_ranges"))
    with pytest.raises(HubError, match="parts of a file"):
        open_range(server.file_url("org/m", "m.gguf"), 10, 20)


@pytest.mark.parametrize(
    ("status", "fault"),
    [
        (401, "token"),
        (403, "refused"),
        (404, "not_found"),
        (407, "proxy"),
        (416, "answer"),
        (502, "server"),
        (204, "answer"),
    ],
)
def test_statuses(status: int, fault: str) -> None:
    found = error_of_status(status, Message(), "https://hub.example/x")
    assert found.fault == fault
    assert "hub.example" in found.summary() or fault == "proxy"


@pytest.mark.parametrize(("value", "seconds"), [("7", 7.0), ("99999", 120.0), ("soon", None), ("", None)])
def test_how_long_a_server_wants_us_to_wait(value: str, seconds: float | None) -> None:
    message = Message()
    message["Retry-After"] = value
    assert retry_after(message) == seconds


def test_a_proxy_is_asked_for_what_lies_elsewhere(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", server.url)
    monkeypatch.setenv("no_proxy", "")
    server.plain["m.gguf"] = DATA
    with open_url("http://localhost:9/plain/m.gguf") as response:
        assert response.read_whole(len(DATA)) == DATA
    assert server.asked[0].path == "http://localhost:9/plain/m.gguf", "a proxy is asked for the whole address"
