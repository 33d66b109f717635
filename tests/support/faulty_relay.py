"""A TCP relay for tests and benchmarks: it delays, limits the rate, and breaks connections on request."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable
from enum import StrEnum

from tests.support.patience import DEADLINE_S

PART_BYTES = 1 << 16
ONE_MBIT = 1_000_000 / 8
"""Bytes per second of a link at 1 Mbit/s."""
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Fault(StrEnum):
    """What a relay does to its connections.

    `DROP`: reset the open connections.
    `CLOSE`: end the open connections regularly.
    `GONE`: reset the open connections, and refuse new ones.
    `SILENT`: forward nothing more. Connections stay open, and new ones get no answer.
    `FLIP`: flip one bit of the forwarded bytes.
    `INSERT`: add 16 bytes to the forwarded ones.
    `SLOW`: forward at 1 Mbit/s.
    """

    DROP = "drop"
    CLOSE = "close"
    GONE = "gone"
    SILENT = "silent"
    FLIP = "flip"
    INSERT = "insert"
    SLOW = "slow"


class Relay:
    """Forwards connections at `endpoint` to a port of this machine, in an event loop in its own thread.

    `delay_s`: delay of each direction in seconds.
    `bytes_per_second`: rate of each direction of a connection; None: unlimited.
    """

    def __init__(self, port: int, *, delay_s: float = 0.0, bytes_per_second: float | None = None) -> None:
        self.target_port = port
        self.delay_s, self._rate = delay_s, bytes_per_second
        self.usual_rate = bytes_per_second
        self.passed_bytes = 0
        self.struck = threading.Event()
        self._fault: Fault | None = None
        self._at_bytes: int | None = None
        self._silent = self._gone = False
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._transports: list[asyncio.WriteTransport] = []
        """Transports of all connections, also of closing ones, which stay open while their bytes are not read."""
        self._may_pass = asyncio.Event()
        self._may_pass.set()
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = int(self._listening.getsockname()[1])
        self._loop = asyncio.new_event_loop()
        # asyncio reports a server's tasks that are cancelled in the middle of a connection.
        self._loop.set_exception_handler(lambda *_: None)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="faulty-relay", daemon=True)
        self._thread.start()
        self._ready.wait(DEADLINE_S)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def arm(self, fault: Fault, after_bytes: int = 0) -> None:
        """Cause `fault` after `after_bytes` more forwarded bytes; with 0 at once. `struck` is set when it occurs."""
        self.struck.clear()
        self._call(lambda: self._arm(fault, after_bytes))

    def heal(self) -> None:
        """End lasting faults, and reset the connections that were silent."""
        self._call(self._heal)

    def close(self) -> None:
        self._call(self._loop.stop)
        self._thread.join(DEADLINE_S)
        self._listening.close()

    def _call(self, step: Callable[[], object]) -> None:
        done = threading.Event()

        def carry_out() -> None:
            step()
            done.set()

        self._loop.call_soon_threadsafe(carry_out)
        done.wait(DEADLINE_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, sock=self._listening.dup()))
        self._ready.set()
        self._loop.run_forever()
        # Accept nothing more, and let connections that were just accepted reach `_serve`: a server that was closed
        # before would not close their sockets, nor would a task that is cancelled before it begins.
        self._gone = True
        for listening in server.sockets:
            self._loop.remove_reader(listening.fileno())
        for _ in range(3):
            self._loop.run_until_complete(asyncio.sleep(0))
        server.close()
        for pair in tuple(self._pairs):
            self._reset(pair)
        while tasks := asyncio.all_tasks(self._loop):
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(tasks))
        for transport in self._transports:
            transport.abort()
        # The transports close their sockets in the next step of the loop.
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def _arm(self, fault: Fault, after_bytes: int) -> None:
        self._fault, self._at_bytes = fault, self.passed_bytes + after_bytes
        if after_bytes == 0 and fault not in (Fault.FLIP, Fault.INSERT):
            self._strike()

    def _heal(self) -> None:
        self._fault = self._at_bytes = None
        if self._silent:
            for pair in tuple(self._pairs):
                self._reset(pair)
        self._silent = self._gone = False
        self._rate = self.usual_rate
        self._may_pass.set()

    def _strike(self) -> None:
        fault, self._fault, self._at_bytes = self._fault, None, None
        match fault:
            case Fault.DROP | Fault.GONE:
                self._gone = fault is Fault.GONE
                for pair in tuple(self._pairs):
                    self._reset(pair)
            case Fault.CLOSE:
                for pair in self._pairs:
                    for each in pair:
                        each.close()
            case Fault.SILENT:
                self._silent = True
                self._may_pass.clear()
            case Fault.SLOW:
                self._rate = ONE_MBIT
        self.struck.set()

    @staticmethod
    def _reset(pair: tuple[asyncio.StreamWriter, asyncio.StreamWriter]) -> None:
        for each in pair:
            if not each.is_closing():
                each.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            each.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._transports.append(writer.transport)
        if self._gone:
            writer.transport.abort()
            return
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.target_port)
        except OSError:
            writer.transport.abort()
            return
        self._transports.append(back.transport)
        pair = (writer, back)
        for each in pair:
            each.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._pairs.add(pair)
        try:
            await asyncio.gather(self._carry(reader, back), self._carry(there, writer))
        except OSError:
            # A process that is killed with unread bytes resets its connection. The other end must see that, too.
            self._reset(pair)
        finally:
            self._pairs.discard(pair)
            for each in pair:
                each.close()

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """Forward one direction. Bytes are queued, so that the delay does not limit the rate."""
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)
        sending = asyncio.create_task(self._send(on_the_way, sink))
        try:
            while data := await source.read(PART_BYTES):
                await on_the_way.put((self._loop.time() + self.delay_s, data))
            await on_the_way.put((self._loop.time() + self.delay_s, b""))
            await sending
        finally:
            sending.cancel()

    async def _send(self, on_the_way: asyncio.Queue[tuple[float, bytes]], sink: asyncio.StreamWriter) -> None:
        while True:
            due_s, data = await on_the_way.get()
            if (left_s := due_s - self._loop.time()) > 0:
                await asyncio.sleep(left_s)
            await self._may_pass.wait()
            if not data:
                sink.close()
                return
            data = self._changed(data)
            if self._silent or sink.is_closing():
                await self._may_pass.wait()
                return
            if self._rate is not None:
                await asyncio.sleep(len(data) / self._rate)
            sink.write(data)
            await sink.drain()

    def _changed(self, data: bytes) -> bytes:
        """Count the bytes, cause a fault that is due, and return the bytes to forward."""
        at_bytes, before = self._at_bytes, self.passed_bytes
        self.passed_bytes += len(data)
        if at_bytes is None or self.passed_bytes <= at_bytes:
            return data
        place, fault = max(0, at_bytes - before), self._fault
        self._strike()
        if fault is Fault.FLIP:
            return data[:place] + bytes([data[place] ^ (1 << (place % 8))]) + data[place + 1 :]
        if fault is Fault.INSERT:
            return data[:place] + bytes(range(16)) + data[place:]
        return data
