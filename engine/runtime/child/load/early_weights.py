"""Sends the large weights of a load to several RPC workers in parallel, and measures what each link carries.

llama.cpp sends one tensor after another, so only one link is busy at a time. A worker that caches weights
(`engine.base.weight_cache`) needs no tensor that is in its cache. So the large tensors are first sent in parallel to a
scratch buffer on each worker, and the load then finds them in the caches. ggml's protocol does not say whether a worker
caches weights; the bytes written to its connection show it. Only Linux counts these bytes; on other systems nothing is
sent early.
"""

from __future__ import annotations

import ctypes
import mmap
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from engine.base.units import GIB
from engine.runtime.child.load.warm_up import StageReporter
from engine.runtime.child.native.bindings import Bindings, InitParams
from engine.runtime.child.native.devices import ResolvedDevices
from engine.runtime.child.native.stop import StopFlag
from engine.runtime.protocol.messages import SentWeights
from engine.runtime.protocol.own_sockets import ACKED_OFFSET, duplicate_socket, own_sockets
from engine.runtime.protocol.requests import DeviceRef, Load, WeightSpan

_TCP_INFO = 11
_ACKED = struct.Struct("=Q")
_QUEUED = 0x5411
"""SIOCOUTQ: the ioctl for the number of bytes written to a socket that the other end has not acknowledged."""
_HASHED_BYTES = 4096
"""Largest number of bytes that ggml-rpc writes for a tensor that is in the worker's cache: the tensor's hash.

A tensor that is not in the cache has at least 10 MiB.
"""
_PROBE_BYTES = (10 << 20) + 4096
"""Size in bytes of a tensor of zeros that is sent to find out whether a worker caches weights.

Smaller tensors are never cached (`HASH_THRESHOLD` of ggml-rpc).
"""
_CHECK_BYTES = 8 * GIB
"""Largest number of bytes between two checks whether the worker still has the tensors that were sent.

The first check comes after four tensors. Up to this limit, the number of bytes until the next check about doubles with
each check.
"""
_I8 = 24
_WEIGHTS = 1
"""`GGML_BACKEND_BUFFER_USAGE_WEIGHTS`. ggml-rpc sends the hash of a tensor first only in buffers with this usage."""
_ROOM_BYTES = 1 << 16
_POLL_S = 0.1


class _Worker(Struct, frozen=True):
    """An RPC worker of the load. `address`: its host and port. `devices`: ids of its devices."""

    address: str
    devices: tuple[str, ...]


class Links:
    """Context manager that measures how fast this process sends to the RPC workers of a load.

    The measurement ends when `sent` is called. A small buffer on each worker keeps ggml's connection open, because the
    kernel's byte counters of a new connection begin at 0.
    """

    def __init__(self, engine: Bindings, devices: ResolvedDevices, refs: Sequence[DeviceRef]) -> None:
        self._engine, self._devices = engine, devices
        self._workers = _workers(refs, devices)
        self._buffers: list[int] = []
        self._connections: dict[str, socket.socket] = {}
        self._began: dict[str, int] = {}
        self._seconds: dict[str, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="links", daemon=True)

    def __enter__(self) -> Links:
        # No worker, or no counters: nothing is measured.
        if self._workers and sys.platform.startswith("linux"):
            for worker in self._workers:
                buffer_type = self._engine.device_buffer_type(self._devices.by_id[worker.devices[0]])
                if buffer := self._engine.allocate_buffer(buffer_type, 1):
                    self._buffers.append(buffer)
            self._connections = _connections([worker.address for worker in self._workers])
            self._began = self.written()
            self._seconds = dict.fromkeys(self._began, 0.0)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    @property
    def workers(self) -> tuple[_Worker, ...]:
        """The workers with a connection whose bytes the operating system counts."""
        return tuple(worker for worker in self._workers if worker.address in self._began)

    def written(self) -> dict[str, int]:
        """Return the bytes written to each worker so far, by its address; workers without a connection are left out."""
        return {address: written for address, (written, _) in self._counts().items()}

    def _counts(self) -> dict[str, tuple[int, int]]:
        """Return (bytes written so far, written bytes that are not acknowledged yet) by the worker's address."""
        # The connections were found once: this is read ten times a second, and neither a look at each descriptor of
        # the process nor a name server that takes seconds may hold it up.
        found: dict[str, tuple[int, int]] = {}
        for address, connection in self._connections.items():
            with suppress(OSError, struct.error, ImportError):
                found[address] = _counts(connection)
        return found

    def sent(self) -> tuple[SentWeights, ...]:
        """End the measurement; return the bytes sent to each worker, and the seconds in which the link to it was
        busy.
        """
        now = self.written()
        self._end()
        return tuple(
            SentWeights(
                devices=worker.devices,
                sent_bytes=max(0, now.get(worker.address, 0) - self._began[worker.address]),
                seconds=self._seconds[worker.address],
            )
            for worker in self.workers
        )

    def _end(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        for buffer in self._buffers:
            self._engine.free_buffer(buffer)
        self._buffers.clear()
        for connection in self._connections.values():
            connection.close()
        self._connections = {}

    def _watch(self) -> None:
        before, last_s = self._began, time.monotonic()
        while not self._ended.wait(_POLL_S):
            counts, now_s = self._counts(), time.monotonic()
            for address in self._seconds:
                written, queued = counts.get(address, (0, 0))
                # A tensor is under way: bytes wait in the socket, or more than its hash was written.
                if queued or written > before.get(address, 0) + _HASHED_BYTES:
                    self._seconds[address] += now_s - last_s
            before, last_s = {address: written for address, (written, _) in counts.items()}, now_s


def send_early(
    engine: Bindings, devices: ResolvedDevices, load: Load, links: Links, stop: StopFlag, reporter: StageReporter
) -> None:
    """Send the tensors of `load.early` to their workers in parallel, if these workers cache weights.

    Returns when all are sent, or soon after a stop was requested. Does nothing if fewer than two workers get weights.
    """
    by_device = {each.device: each.spans for each in load.early}
    found = [(worker, [span for device in worker.devices for span in by_device.get(device, ())])
             for worker in links.workers]  # fmt: skip
    wanted = [(worker, spans) for worker, spans in found if spans]
    if len(wanted) < 2:
        return
    reporter.enter("send", 0.0)
    senders = [_Sender(engine, devices, links, worker, spans, stop) for worker, spans in wanted]
    threads = [threading.Thread(target=sender.run, name="early-weights", daemon=True) for sender in senders]
    for thread in threads:
        thread.start()
    total_bytes = sum(span.size_bytes for _, spans in wanted for span in spans)
    for thread in threads:
        while thread.is_alive():
            thread.join(_POLL_S)
            reporter.advance(min(0.99, sum(sender.done_bytes for sender in senders) / total_bytes))


class _Sender:
    """Sends tensors (as spans of the model file) to one worker.

    `done_bytes`: total size of the spans that are sent or need not be sent.
    """

    def __init__(
        self,
        engine: Bindings,
        devices: ResolvedDevices,
        links: Links,
        worker: _Worker,
        spans: Sequence[WeightSpan],
        stop: StopFlag,
    ) -> None:
        self.done_bytes = 0
        self._engine, self._links, self._worker, self._spans, self._stop = engine, links, worker, spans, stop
        self._buffer_type = engine.device_buffer_type(devices.by_id[worker.devices[0]])

    def run(self) -> None:
        pointer = ctypes.c_void_p
        bind = self._engine.bind
        size_bytes = max(_PROBE_BYTES, *(span.size_bytes for span in self._spans))
        buffer = self._engine.allocate_buffer(self._buffer_type, size_bytes)
        if not buffer:
            return
        try:
            bind("ggml_backend_buffer_set_usage", None, pointer, ctypes.c_int)(buffer, _WEIGHTS)
            self._base = bind("ggml_backend_buffer_get_base", pointer, pointer)(buffer)
            self._buffer = buffer
            self._send_all()
        except (OSError, ValueError, ImportError):
            # The load reads the same file next, and says what is wrong with it.
            return
        finally:
            self.done_bytes = sum(span.size_bytes for span in self._spans)
            self._engine.free_buffer(buffer)

    def _send_all(self) -> None:
        # Only a worker that caches has the probe after it was sent. It always has it in later loads, of any model.
        if self._send_probe() and self._send_probe():
            return
        spans = sorted(self._spans, key=lambda span: span.size_bytes)
        # Two that it has tell that it has all that its quota has room for: the first, and one of medium size. Large
        # ones take longer to hash and to find. A tensor that it lacks after all is sent by the load.
        asked = dict.fromkeys((spans[0], spans[len(spans) // 2]))
        were_sent = [self._send(span) for span in asked]
        if not any(were_sent):
            return
        rest = [span for span in spans if span not in asked]
        batch: list[WeightSpan] = []
        n_checks = due_bytes = 0
        for span in rest:
            if self._stop.requested:
                return
            if self._send(span):
                batch.append(span)
            batch_bytes = sum(each.size_bytes for each in batch)
            if len(batch) < 4 or batch_bytes < due_bytes:
                continue
            # If the worker's quota is too small, more tensors are of no use: it has removed the oldest or, if it knows
            # its client, recent ones. Another old one is asked for each time, since a worker counts that as a use. The
            # newest are not asked for, because it looks at its cache once a second.
            if self._send(rest[n_checks]) or self._send(batch[len(batch) // 2]):
                return
            n_checks, due_bytes, batch = n_checks + 1, min(_CHECK_BYTES, due_bytes + batch_bytes), []

    def _send_probe(self) -> bool:
        """Send a tensor of zeros, to find out whether the worker caches weights; return whether its bytes were sent.

        The bytes are not sent if the worker has cached the same tensor before.
        """
        with mmap.mmap(-1, _PROBE_BYTES) as zeros:
            first = ctypes.c_char.from_buffer(zeros)
            was_sent = self._put(ctypes.addressof(first), _PROBE_BYTES)
            del first
        return was_sent

    def _send(self, span: WeightSpan) -> bool:
        """Send a tensor to the worker unless its cache has it; return whether the tensor's bytes were sent."""
        with _mapped(span) as address:
            was_sent = self._put(address, span.size_bytes)
        self.done_bytes += span.size_bytes
        return was_sent

    def _put(self, address: int, size_bytes: int) -> bool:
        """Send a tensor's bytes to the worker, unless the worker has cached them; return whether they were sent.

        `address`: address of the bytes in this process.
        """
        if self._stop.requested:
            return False
        pointer = ctypes.c_void_p
        bind = self._engine.bind
        before = self._links.written().get(self._worker.address, 0)
        context = bind("ggml_init", pointer, InitParams)(InitParams(_ROOM_BYTES, None, True))
        try:
            tensor = bind("ggml_new_tensor_1d", pointer, pointer, ctypes.c_int, ctypes.c_int64)(
                context, _I8, size_bytes
            )
            allocate = bind("ggml_backend_tensor_alloc", ctypes.c_int, pointer, pointer, pointer)
            # ggml_backend_tensor_set waits until the bytes are in the socket, without Python's lock.
            put = bind("ggml_backend_tensor_set", None, pointer, pointer, ctypes.c_size_t, ctypes.c_size_t)
            if allocate(self._buffer, tensor, self._base) == 0:
                put(tensor, address, 0, size_bytes)
        finally:
            bind("ggml_free", None, pointer)(context)
        return self._links.written().get(self._worker.address, 0) - before > _HASHED_BYTES


class _mapped:
    """Context manager that maps a span of a file into memory; `with` returns the address of its first byte."""

    def __init__(self, span: WeightSpan) -> None:
        self._span = span

    def __enter__(self) -> int:
        start = self._span.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        skipped = self._span.offset - start
        with Path(self._span.path).open("rb") as file:
            # A private copy on write: ctypes takes the address of writable memory only, and nothing is written.
            self._map = mmap.mmap(file.fileno(), self._span.size_bytes + skipped, access=mmap.ACCESS_COPY, offset=start)
        self._first = ctypes.c_char.from_buffer(self._map, skipped)
        return ctypes.addressof(self._first)

    def __exit__(self, *_: object) -> None:
        # The map cannot be closed while something points into it.
        del self._first
        self._map.close()


def _workers(refs: Sequence[DeviceRef], devices: ResolvedDevices) -> tuple[_Worker, ...]:
    found: dict[str, list[str]] = {}
    for ref in refs:
        address = ref.endpoint if ref.address is None else ref.address
        if address and ref.id in devices.remote:
            found.setdefault(address, []).append(ref.id)
    return tuple(_Worker(address, tuple(ids)) for address, ids in found.items())


def _peers(address: str) -> set[tuple[str, int]]:
    host, _, port = address.rpartition(":")
    with suppress(OSError):
        infos = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        return {(str(info[4][0]), int(info[4][1])) for info in infos}
    return set()


def _connections(addresses: Sequence[str]) -> dict[str, socket.socket]:
    """Return a duplicate socket of this process's connection to each address; unconnected addresses are left out."""
    peers = {peer: address for address in addresses for peer in _peers(address)}
    found: dict[str, socket.socket] = {}
    for _, descriptor in own_sockets():
        with suppress(OSError):  # closed by now
            link = duplicate_socket(descriptor)
            address = None  # not connected
            with suppress(OSError):
                address = peers.get(link.getpeername()[:2])
            if address is None or address in found:
                link.close()
            else:
                found[address] = link
    return found


def _counts(link: socket.socket) -> tuple[int, int]:
    """Return (bytes written to a connection, written bytes that the worker has not acknowledged)."""
    import fcntl

    info = link.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, ACKED_OFFSET + _ACKED.size)
    queued = int(struct.unpack("=i", fcntl.ioctl(link.fileno(), _QUEUED, b"\0" * 4))[0])
    return int(_ACKED.unpack_from(info, ACKED_OFFSET)[0]) + queued, queued
