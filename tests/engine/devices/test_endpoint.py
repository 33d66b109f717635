"""Greetings of endpoints with any kind of server behind the port; none takes longer than its limit."""

from __future__ import annotations

import socket
import struct
import threading

import pytest

from engine.base.cancellation import CancelToken
from engine.devices.endpoint import Greeting, GreetingStatus, greet, greet_all, parse_endpoint
from tests.support.rpc_peers import ANSWER, FACTS, HELLO_BYTES, answer_questions, receive, rpc_server, serve_peer

SHORT_S = 1.5
"""A time limit that some tests wait for. The peers need some of it to answer on a busy machine."""


def greeting_of(endpoint: str, timeout_s: float = 5.0) -> Greeting:
    host, port = parse_endpoint(endpoint)
    return greet(host, port, timeout_s)


def test_an_rpc_server_answers() -> None:
    with rpc_server() as endpoint:
        greeting = greeting_of(endpoint)
    assert (greeting.status, greeting.version, greeting.ok) == (GreetingStatus.OK, (7, 0, 0), True)
    assert greeting.endpoint == endpoint


def test_the_request_is_a_hello_of_33_bytes() -> None:
    received: list[bytes] = []

    def talk(client: socket.socket) -> None:
        received.append(receive(client, HELLO_BYTES))
        client.sendall(ANSWER)
        answer_questions(client)

    with serve_peer(talk) as endpoint:
        assert greeting_of(endpoint).ok
    assert received == [struct.pack("<BQ", 14, 24) + bytes(24)]


def test_an_answer_in_single_bytes_is_an_answer() -> None:
    def talk(client: socket.socket) -> None:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        receive(client, HELLO_BYTES)
        for index in range(len(ANSWER)):
            client.sendall(ANSWER[index : index + 1])
        answer_questions(client)

    with serve_peer(talk) as endpoint:
        assert greeting_of(endpoint).ok


@pytest.mark.parametrize("version", [(6, 0, 0), (8, 0, 0), (7, 1, 0)])
def test_another_version_is_named(version: tuple[int, int, int]) -> None:
    with rpc_server(answer=struct.pack("<QBBBB", 28, *version, 0) + bytes(24)) as endpoint:
        greeting = greeting_of(endpoint)
    assert greeting.status is GreetingStatus.WRONG_VERSION
    assert f"{version[0]}.{version[1]}" in greeting.sentence
    assert greeting.version == version


def test_a_later_patch_of_the_version_is_fine() -> None:
    with rpc_server(answer=struct.pack("<QBBBB", 28, 7, 0, 9, 0) + bytes(24)) as endpoint:
        assert greeting_of(endpoint).ok


def test_a_web_server_is_no_rpc_server() -> None:
    def talk(client: socket.socket) -> None:
        client.recv(1)
        client.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    with serve_peer(talk) as endpoint:
        greeting = greeting_of(endpoint)
    assert greeting.status is GreetingStatus.NOT_RPC
    assert endpoint in greeting.sentence


def test_a_server_that_speaks_first_is_no_rpc_server() -> None:
    with serve_peer(lambda client: client.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")) as endpoint:
        assert greeting_of(endpoint).status is GreetingStatus.NOT_RPC


def test_a_flood_is_read_no_further_than_an_answer() -> None:
    def talk(client: socket.socket) -> None:
        while True:
            client.sendall(bytes(65536))

    with serve_peer(talk) as endpoint:
        assert greeting_of(endpoint).status is GreetingStatus.NOT_RPC


def test_closed_without_an_answer() -> None:
    def talk(client: socket.socket) -> None:
        receive(client, HELLO_BYTES)

    with serve_peer(talk) as endpoint:
        assert greeting_of(endpoint).status is GreetingStatus.NOT_RPC


def test_closed_at_once() -> None:
    with serve_peer(lambda client: None) as endpoint:
        assert greeting_of(endpoint).status is GreetingStatus.NOT_RPC


def test_silence_is_busy() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1) as listener:
        greeting = greeting_of(f"127.0.0.1:{listener.getsockname()[1]}", SHORT_S)
    assert greeting.status is GreetingStatus.BUSY
    assert "one program at a time" in greeting.sentence


def test_half_an_answer_ends_at_the_limit() -> None:
    def talk(client: socket.socket) -> None:
        receive(client, HELLO_BYTES)
        client.sendall(ANSWER[:20])
        client.recv(1)

    with serve_peer(talk) as endpoint:
        assert greeting_of(endpoint, SHORT_S).status is GreetingStatus.NOT_RPC


@pytest.mark.parametrize(
    ("command", "answer", "claim"),
    [
        (15, struct.pack("<I", 4_000_000_000), "4,000,000,000 devices"),
        (15, struct.pack("<I", 0), "0 devices"),
        (1, struct.pack("<Q", 0), "a buffer alignment of 0 bytes"),
        (1, struct.pack("<Q", 48), "a buffer alignment of 48 bytes"),
        (1, struct.pack("<Q", 1 << 63), "a buffer alignment of 9,223,372,036,854,775,808 bytes"),
        (2, struct.pack("<Q", 0), "a largest buffer of 0 bytes"),
        (11, struct.pack("<QQ", (1 << 64) - 1, 1 << 30), "18,446,744,073,709,551,615 bytes of memory for device 0"),
        (11, struct.pack("<QQ", 0, 1 << 60), "1,152,921,504,606,846,976 bytes of memory for device 0"),
    ],
)
def test_a_claim_that_cannot_be_is_named(command: int, answer: bytes, claim: str) -> None:
    with rpc_server(facts={**FACTS, command: answer}) as endpoint:
        greeting = greeting_of(endpoint)
    assert greeting.status is GreetingStatus.ABSURD
    assert endpoint in greeting.sentence
    assert claim in greeting.sentence


@pytest.mark.parametrize("command", sorted(FACTS))
def test_silence_after_the_greeting_is_told_of_its_endpoint(command: int) -> None:
    facts = {each: answer for each, answer in FACTS.items() if each != command}
    with rpc_server(facts=facts) as endpoint:
        greeting = greeting_of(endpoint, SHORT_S)
    assert greeting.status is GreetingStatus.SILENT
    assert endpoint in greeting.sentence


@pytest.mark.parametrize("command", sorted(FACTS))
def test_an_answer_of_another_length_is_none(command: int) -> None:
    with rpc_server(facts={**FACTS, command: bytes(5)}) as endpoint:
        assert greeting_of(endpoint).status is GreetingStatus.NOT_RPC


def test_every_device_is_asked_about() -> None:
    asked: list[tuple[int, bytes]] = []

    def talk(client: socket.socket) -> None:
        receive(client, HELLO_BYTES)
        client.sendall(ANSWER)
        while header := receive(client, 9):
            command, size = struct.unpack("<BQ", header)
            asked.append((command, receive(client, size)))
            answer = struct.pack("<I", 3) if command == 15 else FACTS[command]
            client.sendall(struct.pack("<Q", len(answer)) + answer)

    with serve_peer(talk) as endpoint:
        assert greeting_of(endpoint).ok
    devices = [struct.pack("<I", index) for index in range(3)]
    assert asked == [(15, b""), *((command, device) for device in devices for command in (1, 2, 11))]


def test_closed_after_the_greeting() -> None:
    def talk(client: socket.socket) -> None:
        receive(client, HELLO_BYTES)
        client.sendall(ANSWER)

    with serve_peer(talk) as endpoint:
        greeting = greeting_of(endpoint)
    assert greeting.status is GreetingStatus.NOT_RPC
    assert "after the first answer" in greeting.sentence


def test_nobody_listens() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        greeting = greeting_of(f"127.0.0.1:{bound.getsockname()[1]}")
    assert greeting.status is GreetingStatus.REFUSED
    assert "start the RPC worker" in greeting.sentence


def test_a_name_without_an_address() -> None:
    greeting = greeting_of("no..host:50052", 20.0)  # an empty label fails without asking any name server
    assert greeting.status is GreetingStatus.UNRESOLVED
    assert "no..host" in greeting.sentence


def test_a_name_with_an_address() -> None:
    with rpc_server() as endpoint:
        assert greeting_of(endpoint.replace("127.0.0.1", "localhost"), 20.0).ok


def test_several_are_greeted_at_once() -> None:
    """The peers answer only when all of them have been greeted, so one after another would not do."""
    all_greeted = threading.Barrier(3)

    def talk(client: socket.socket) -> None:
        receive(client, HELLO_BYTES)
        all_greeted.wait(20)
        client.sendall(ANSWER)
        answer_questions(client)

    with serve_peer(talk) as first, serve_peer(talk) as second, serve_peer(talk) as third:
        greetings = greet_all([first, second, third], 20.0)
    assert [greetings[endpoint].ok for endpoint in (first, second, third)] == [True] * 3


def test_a_silent_one_does_not_cost_the_others_their_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, rpc_server() as endpoint:
        silent = f"127.0.0.1:{listener.getsockname()[1]}"
        greetings = greet_all([silent, endpoint], SHORT_S)
    assert greetings[silent].status is GreetingStatus.BUSY
    assert greetings[endpoint].ok


def test_a_cancel_ends_the_wait() -> None:
    token = CancelToken()
    greeted = threading.Event()

    def talk(client: socket.socket) -> None:
        receive(client, HELLO_BYTES)
        greeted.set()
        client.recv(1)

    def cancel() -> None:
        greeted.wait(20)
        token.cancel()

    with serve_peer(talk) as endpoint:
        thread = threading.Thread(target=cancel)
        thread.start()
        # Without the cancel this would take an hour, and the test's own limit would end it.
        greetings = greet_all([endpoint], 3600.0, cancel=token)
        thread.join()
    assert not greetings[endpoint].ok


def test_a_busy_server_finds_a_late_connection_reset() -> None:
    """A server that answers a hello nobody waits for must get an error, not the signal of a closed pipe."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert not greeting_of(f"127.0.0.1:{listener.getsockname()[1]}", SHORT_S).ok
        client, _ = listener.accept()
        with client:
            receive(client, HELLO_BYTES)
            with pytest.raises(ConnectionResetError):
                client.sendall(ANSWER)


@pytest.mark.parametrize(
    "text",
    ["", "host", ":50052", "host:", "host:0", "host:65536", "host:1:2", "[::1]:50052", "ho st:1", "host:-1", "h:１"],
)
def test_what_is_no_endpoint(text: str) -> None:
    with pytest.raises(ValueError, match=r"HOST:PORT"):
        parse_endpoint(text)


def test_no_endpoints_need_no_greeting() -> None:
    assert greet_all([]) == {}
