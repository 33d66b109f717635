"""Connections of a load to its RPC workers: the cost of their byte counters, and open connections."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.base.units import GIB
from engine.runtime.child.load import early_weights
from engine.runtime.child.load.early_weights import Links
from engine.runtime.child.native.bindings import Bindings
from engine.runtime.child.native.devices import ResolvedDevices
from engine.runtime.child.native.stop import StopFlag
from engine.runtime.protocol import own_sockets
from engine.runtime.protocol.own_sockets import duplicate_socket
from engine.runtime.protocol.requests import DeviceRef, WeightSpan
from tests.support.patience import DEADLINE_S

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux counts bytes of a connection")


class Engine:
    """Bindings whose buffers are connections to a worker, as those of ggml-rpc."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.made: dict[int, socket.socket] = {}

    def device_buffer_type(self, device: int) -> int:
        return device

    def allocate_buffer(self, _buffer_type: int, _size_bytes: int) -> int:
        connection = socket.create_connection(("127.0.0.1", self._port))
        self.made[connection.fileno()] = connection
        return connection.fileno()

    def free_buffer(self, buffer: int) -> None:
        self.made.pop(buffer).close()


class Devices:
    by_id = {"RPC0": 1}  # noqa: RUF012
    remote = frozenset({"RPC0"})


@contextmanager
def links_to_a_worker() -> Iterator[tuple[Links, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
        engine: Any = Engine(port)
        refs = [DeviceRef(id="RPC0", backend="RPC", endpoint=f"127.0.0.1:{port}")]
        with Links(cast(Bindings, engine), cast(ResolvedDevices, Devices()), refs) as links:
            (connection,) = engine.made.values()
            yield links, connection
        assert engine.made == {}


def open_sockets() -> int:
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found += str(entry.readlink()).startswith("socket:")
        except OSError:
            continue
    return found


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_counters_are_read_without_looking_up_anything_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read ten times a second, and names of workers may take a server seconds to look up."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("looked up again")

    with links_to_a_worker() as (links, connection):
        monkeypatch.setattr(own_sockets, "Path", fail)
        monkeypatch.setattr(socket, "getaddrinfo", fail)
        (before,) = links.written().values()
        connection.sendall(b"x" * 5000)
        # The two counters of the system are not read at one moment.
        deadline_s = time.monotonic() + DEADLINE_S
        while list(links.written().values()) != [before + 5000] and time.monotonic() < deadline_s:
            pass
        assert links.sent()[0].sent_bytes == 5000


def test_no_connection_stays_open() -> None:
    before = open_sockets()
    with links_to_a_worker() as (links, _):
        assert [worker.devices for worker in links.workers] == [("RPC0",)]
    assert open_sockets() == before


def test_a_descriptor_that_is_no_socket_any_more_is_closed(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        before = open_descriptors()
        with pytest.raises(OSError, match="socket"):
            duplicate_socket(file.fileno())
        assert open_descriptors() == before


class Cache:
    """A worker's cache with a quota. It removes the oldest tensors or, if it knows its client, the newest."""

    def __init__(self, quota_bytes: int, *, knows_client: bool) -> None:
        self._quota_bytes, self._knows_client = quota_bytes, knows_client
        self._sizes: dict[object, int] = {}
        self.received_bytes = 0

    def put(self, key: object, size_bytes: int) -> bool:
        """Store a tensor that is not here, and return whether it was received."""
        if key in self._sizes:
            self._sizes[key] = self._sizes.pop(key)
            return False
        self.received_bytes += size_bytes
        self._sizes[key] = size_bytes
        while sum(self._sizes.values()) > self._quota_bytes:
            del self._sizes[list(self._sizes)[-1 if self._knows_client else 0]]
        return True


class SenderToCache(early_weights._Sender):
    def __init__(self, cache: Cache, spans: list[WeightSpan]) -> None:
        self.done_bytes = 0
        self._cache, self._spans, self._stop = cache, spans, cast(StopFlag, SimpleNamespace(requested=False))

    def _send_probe(self) -> bool:
        return self._cache.put("probe", 1)

    def _send(self, span: WeightSpan) -> bool:
        return self._cache.put(span.offset, span.size_bytes)


@pytest.mark.parametrize("knows_client", [True, False])
@pytest.mark.parametrize(("quota", "most"), [(20, 30), (3, 8), (70, 64)])
def test_a_small_quota_is_noticed_soon(knows_client: bool, quota: int, most: int) -> None:
    """64 GiB are 10 minutes of a link with 1 Gbit/s, which the load needs once more."""
    spans = [WeightSpan(path="", offset=at, size_bytes=GIB // 2 + at) for at in range(128)]
    cache = Cache(quota * GIB, knows_client=knows_client)
    SenderToCache(cache, spans)._send_all()
    assert cache.received_bytes < (most + 1) * GIB
    if quota == 70:
        assert cache.received_bytes > 64 * GIB
