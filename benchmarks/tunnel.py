"""Rate and round trip through both ends of the tunnel, as ratios to plain TCP on the loopback interface.

Run with `python -m benchmarks.tunnel`. On the loopback interface only the processor limits; a network is slower than
both. Of three rounds the best of each is printed: gigabytes per second, microseconds of the median round trip of 64
bytes (wall clock), and the ratios.
"""

from __future__ import annotations

import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from engine.base.units import MIB
from engine.machines.tunnel.calling import pair_with
from engine.machines.tunnel.identity import read_identity
from engine.machines.tunnel.listener import LentDevice, Listener
from engine.machines.tunnel.offers import OfferedDevice
from engine.machines.tunnel.pairing import OpenCode
from engine.machines.tunnel.pairings import PairingStore
from engine.machines.tunnel.tunnels import Tunnels

SENT_BYTES = 1024 * MIB
TRIPS = 3000
TRIP_BYTES = 64
ROUNDS = 3
_PART = bytes(MIB)


@contextmanager
def worker() -> Iterator[tuple[str, int]]:
    """Yield the address of a server, which answers each message with 64 bytes once it has received it.

    A message begins with its length in 8 bytes.
    """
    listening = socket.create_server(("127.0.0.1", 0))

    def talk(client: socket.socket) -> None:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        room = memoryview(bytearray(MIB))
        with client, suppress(OSError):
            while head := client.recv(8, socket.MSG_WAITALL):
                left = int.from_bytes(head, "little")
                while left > 0:
                    left -= client.recv_into(room[: min(left, MIB)])
                client.sendall(bytes(TRIP_BYTES))

    def run() -> None:
        with suppress(OSError):
            while True:
                client, _ = listening.accept()
                threading.Thread(target=talk, args=(client,), daemon=True).start()

    threading.Thread(target=run, daemon=True).start()
    with listening:
        yield listening.getsockname()


@contextmanager
def tunnel(address: tuple[str, int], folder: Path) -> Iterator[tuple[str, int]]:
    """Yield the address of the calling end of a tunnel to `address`.

    That end is a child; the listener is in this process.
    """
    here, there = read_identity(folder / "here.pem"), read_identity(folder / "there.pem")
    book, code = PairingStore(folder / "here.json"), OpenCode()

    def offered() -> OfferedDevice:
        return OfferedDevice(name="CPU", kind="cpu", total_bytes=MIB)

    with Listener(
        "127.0.0.1",
        0,
        identity=there,
        book=PairingStore(folder / "there.json"),
        code=code,
        name="there",
        devices=[LentDevice("CPU", lambda: socket.create_connection(address), offered)],
        on_paired=lambda _pairing: None,
    ) as listener:
        pairing = pair_with(f"127.0.0.1:{listener.port}", code.renew(), here, "here")
        book.add(pairing)
        with Tunnels(here.path, book) as tunnels:
            host, _, port = tunnels.route(pairing.endpoint, pairing.fingerprint).rpartition(":")
            yield host, int(port)


def measure(address: tuple[str, int]) -> tuple[float, float]:
    """Return bytes per second and the median round trip in seconds, through a connection to `address`."""
    with socket.create_connection(address) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(TRIPS):
            begin_s = time.perf_counter()
            client.sendall((TRIP_BYTES).to_bytes(8, "little") + bytes(TRIP_BYTES))
            client.recv(TRIP_BYTES, socket.MSG_WAITALL)
            trips.append(time.perf_counter() - begin_s)
        begin_s = time.perf_counter()
        client.sendall(SENT_BYTES.to_bytes(8, "little"))
        for _ in range(SENT_BYTES // MIB):
            client.sendall(_PART)
        client.recv(TRIP_BYTES, socket.MSG_WAITALL)
        return SENT_BYTES / (time.perf_counter() - begin_s), statistics.median(trips)


def main() -> None:
    """Measure both in turns, and print the best of the rounds and the ratios."""
    with tempfile.TemporaryDirectory() as folder, worker() as plain, tunnel(plain, Path(folder)) as secure:
        rounds = [(measure(plain), measure(secure)) for _ in range(ROUNDS)]
    plain_rate, secure_rate = (max(each[way][0] for each in rounds) for way in range(2))
    plain_trip, secure_trip = (min(each[way][1] for each in rounds) for way in range(2))
    print(f"plain:  {plain_rate / 1e9:.2f} GB/s, round trip {plain_trip * 1e6:.0f} µs")
    print(f"tunnel: {secure_rate / 1e9:.2f} GB/s, round trip {secure_trip * 1e6:.0f} µs")
    print(f"ratio:  {secure_rate / plain_rate:.2f} of the rate, {secure_trip / plain_trip:.1f} times the round trip")


if __name__ == "__main__":
    main()
