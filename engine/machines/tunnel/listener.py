"""The serving end of the tunnel: a TLS listener that connects paired machines to the RPC workers of this one."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from msgspec import Struct, field

from engine.base.errors import EngineError
from engine.base.values import replace
from engine.machines.tunnel.identity import Identity, fingerprint_of
from engine.machines.tunnel.offers import Admission, ClientRequest, Entrance, OfferedDevice, OfferHeader
from engine.machines.tunnel.pairing import OpenCode, accept_pairing
from engine.machines.tunnel.pairings import Pairing, PairingStore
from engine.machines.tunnel.refusals import Refusals
from engine.machines.tunnel.streams import (
    BrokenTalkError,
    Purpose,
    Stream,
    keep_alive,
    plain_stream,
    read_preface,
    relay,
    serving_context,
    tls_stream,
)

MAX_CONNECTIONS = 32
MAX_OF_ONE_ADDRESS = 8
"""Largest number of connections without a session that are open from one IP address."""
HELLO_S = 5.0
"""Time-out in seconds for the preface and the TLS handshake of a session."""
PAIRING_S = 15.0
BUSY_S = 0.8
"""Seconds that a caller waits if another session uses the device, because that session may just be ending."""
_BACKLOG = 16
_LOOK_S = 0.5
_END_S = 3.0
_log = logging.getLogger("layerdeck.engine")


class LentDevice(Struct, frozen=True):
    """A device that the listener lends.

    `name`: id of the device for clients.
    `reach`: returns a connection to its worker, or raises `OSError`. Called in threads.
    `describe`: returns its current description, or None if the device is no longer lent. The listener adds the name of
    the client that uses the device. Called in threads.
    """

    name: str
    reach: Callable[[], socket.socket]
    describe: Callable[[], OfferedDevice | None]


class Use(Struct, frozen=True):
    """A running session of a client with a lent device.

    `device`: id of the device.
    `client`: name of the client's machine.
    `fingerprint`: fingerprint of the client's certificate.
    """

    device: str
    client: str
    fingerprint: str


class _ListeningSocket(socket.socket):
    """A listening socket that remembers the last accepted connection.

    `sock_accept` of asyncio loses a connection if it is cancelled at the moment at which the connection arrives.
    """

    last: socket.socket | None = None

    def accept(self) -> tuple[socket.socket, Any]:
        found = super().accept()
        self.last = found[0]
        return found


class _DeviceSession(Struct, eq=False):
    """A lent device and its session: the time in which one client uses the device.

    There is at most one session at a time, because the device's worker (its RPC server) serves one client.

    `lock`: held by the connection that has the session, or is about to begin it.
    `use`: the running session; None: no session is running.
    `ended`: the last session, if it ended because the worker closed the connection; else None. `Listener.take_ended`
    also sets it to None.
    `taken`: the session that the last call of `Listener.take_ended` found. The next call does not return it again.
    """

    device: LentDevice
    # Since Python 3.10 a lock binds to the loop that first waits for it, so it may be made in another thread.
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    use: Use | None = None
    ended: Use | None = None
    taken: Use | None = None


class _Caller(Struct, eq=False):
    """A connection to the listener.

    `address`: IP address of the caller.
    `begun_s`: time when it was accepted, by the clock of the event loop.
    `session`: fingerprint of the client during a session, else empty.
    """

    connection: socket.socket
    address: str
    begun_s: float
    session: str = ""
    task: asyncio.Task[None] | None = None


class Listener:
    """The TLS listener that lends devices to paired machines; a context manager that listens inside its `with` block.

    It runs an event loop in a thread of its own. Connections beyond the limits are closed at once, and a caller that is
    not paired has some seconds to pair. If a pairing is deleted, its sessions end.

    `book`: the file of pairings.
    `code`: the current pairing code.
    `name`: name of this machine for its clients.
    `devices`: devices that it lends; a client that names none gets the first one.
    `on_paired`: called with each new pairing, in a thread.
    `on_use`: called with all sessions whenever one begins or ends, in the thread of the event loop; it must not wait.
    `on_problem`: called with a sentence, in a thread, if a pairing cannot be stored or the code was guessed wrong too
    often.

    Raises, on entering:
        EngineError: if it cannot listen.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        identity: Identity,
        book: PairingStore,
        code: OpenCode,
        name: str,
        devices: Sequence[LentDevice],
        on_paired: Callable[[Pairing], None],
        on_use: Callable[[tuple[Use, ...]], None] | None = None,
        on_problem: Callable[[str], None] = _log.warning,
    ) -> None:
        self._address = (host, port)
        self._identity, self._book, self._code, self._name = identity, book, code, name
        self._device_sessions = {each.name: _DeviceSession(each) for each in devices}
        self._on_paired, self._on_use, self._on_problem = on_paired, on_use, on_problem
        self.refusals = Refusals()
        self._callers: set[_Caller] = set()
        # Since Python 3.10 it binds to the loop that first waits for it, so it may be made in this thread.
        self._session_begun = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._listening: _ListeningSocket | None = None
        self._serving: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="tunnel-listener", daemon=True)

    def __enter__(self) -> Listener:
        host, port = self._address
        try:
            listening = socket.create_server(self._address, backlog=_BACKLOG)
        except (OSError, OverflowError, UnicodeError) as error:
            self._loop.close()
            reason = getattr(error, "strerror", None) or error
            raise EngineError(
                f"Cannot listen on {host}:{port}: {reason}. Choose another port or a numeric address of this computer."
            ) from None
        self._listening = _ListeningSocket(fileno=listening.detach())
        self._listening.setblocking(False)
        # The loop does not run yet, so this thread may still add a task without `call_soon_threadsafe`.
        self._serving = self._loop.create_task(self._serve())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._serving is not None
        assert self._listening is not None
        self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join(_END_S)
        # After the thread: the loop must not watch a descriptor that is closed, whose number may be used again.
        self._listening.close()

    @property
    def port(self) -> int:
        """The TCP port of the listener, which the system chose if port 0 was requested."""
        assert self._listening is not None
        return int(self._listening.getsockname()[1])

    def _run(self) -> None:
        assert self._serving is not None
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            # `wait`, since the task itself would raise CancelledError at every normal end.
            runner.run(asyncio.wait([self._serving]))

    async def _serve(self) -> None:
        looking = asyncio.create_task(self._end_forgotten())
        try:
            await self._accept()
        finally:
            tasks = [looking, *(each.task for each in self._callers if each.task is not None)]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            # A task that is cancelled before its first step runs no `finally` of its own.
            for each in self._callers:
                each.connection.close()
            if self._listening is not None and self._listening.last is not None:
                self._listening.last.close()

    async def _accept(self) -> None:
        assert self._listening is not None
        while True:
            try:
                connection, (address, _) = await self._loop.sock_accept(self._listening)
            except OSError as error:  # no descriptors left, or a caller that was gone at once
                _log.warning("tunnel: a caller was not taken: %s", error)
                await asyncio.sleep(_LOOK_S)
                continue
            # Limits before anything is read: a flood of connections costs no handshakes, and one address cannot take
            # all.
            if not self._make_room(address):
                connection.close()
                continue
            caller = _Caller(connection, address, self._loop.time())
            self._callers.add(caller)
            caller.task = asyncio.create_task(self._take(caller))
            # Not in the task: one that is cancelled before its first step runs no `finally`.
            caller.task.add_done_callback(partial(self._leave, caller))

    def _make_room(self, address: str) -> bool:
        """Return whether another connection from `address` may be accepted.

        At the limit, the oldest connection without a session is closed to make room. Without this, silent connections
        from the address of a paired machine could lock that machine out. A paired machine is not affected: it gets its
        session within milliseconds.
        """
        crowd = [each for each in self._callers if each.address == address]
        if self._waiting_of(address) < MAX_OF_ONE_ADDRESS:
            crowd = list(self._callers)
            if len(crowd) < MAX_CONNECTIONS:
                return True
        strangers = [each for each in crowd if not each.session and each.task is not None]
        if not strangers:
            return False
        oldest = min(strangers, key=lambda each: each.begun_s)
        assert oldest.task is not None
        oldest.task.cancel()
        # Not when its task has ended: the next caller may come before that.
        self._callers.discard(oldest)
        return True

    def _waiting_of(self, address: str) -> int:
        """Return the number of connections from `address` without a session, which `MAX_OF_ONE_ADDRESS` limits."""
        callers = [each for each in self._callers if each.address == address]
        clients = {each.session for each in callers}
        return len(callers) - sum(use.fingerprint in clients for use in self.uses)

    async def _take(self, caller: _Caller) -> None:
        try:
            await self._talk(caller)
        except (OSError, BrokenTalkError, EngineError) as error:
            _log.info("tunnel: a caller from %s was left: %s", caller.address, error)
        # Nobody awaits this task before the listener ends, so asyncio would report the error late.
        except Exception:
            _log.exception("tunnel: a caller could not be served")

    def _leave(self, caller: _Caller, _task: asyncio.Task[None]) -> None:
        caller.connection.close()
        self._callers.discard(caller)

    async def _talk(self, caller: _Caller) -> None:
        # All limits count from here: who sends the preface slowly has less time for the handshake.
        begin_s = self._loop.time()
        async with asyncio.timeout_at(begin_s + HELLO_S):
            purpose = await read_preface(caller.connection)
        if purpose is None:
            return
        keep_alive(caller.connection)
        if purpose is Purpose.PAIRING:
            async with asyncio.timeout_at(begin_s + PAIRING_S):
                await self._pair(caller)
            return
        # Read for each session, since another process may have paired or forgotten a machine meanwhile.
        clients = {each.fingerprint: each for each in await asyncio.to_thread(self._book.all, "client")}
        context = serving_context(self._identity, [each.der for each in clients.values()])
        async with asyncio.timeout_at(begin_s + HELLO_S):
            stream = await tls_stream(caller.connection, context, server_side=True)
        try:
            # TLS has verified that the certificate is one of the clients'; this says which one.
            client = clients.get(fingerprint_of(stream.certificate))
            if client is not None:
                caller.session = client.fingerprint
                self._session_begun.set()
                await self._serve_client(stream, client, purpose, begin_s)
        finally:
            await stream.close()

    async def _pair(self, caller: _Caller) -> None:
        async def keep(pairing: Pairing) -> None:
            await asyncio.to_thread(self._book.add, pairing)

        stream = await tls_stream(caller.connection, serving_context(self._identity, None), server_side=True)
        try:
            pairing = await accept_pairing(stream, self._identity, self._name, self._code, keep)
            if pairing is not None:
                await asyncio.to_thread(self._on_paired, pairing)
        except EngineError as error:
            await asyncio.to_thread(self._on_problem, f"No computer was paired. {error.summary()}")
        except asyncio.CancelledError:
            stream.abort()  # It makes room for another caller; a close would wait for an answer.
            raise
        finally:
            await stream.close()

    async def _serve_client(self, stream: Stream, client: Pairing, purpose: Purpose, begin_s: float) -> None:
        if purpose is Purpose.SESSION:
            # A caller of an older release knows of one device only, and reads one byte.
            first = next(iter(self._device_sessions.values()))
            await self._serve_session(stream, client, first, lambda each: stream.send(each.admission.value.encode()))
            return
        async with asyncio.timeout_at(begin_s + HELLO_S):
            request = await stream.receive_message(ClientRequest)
        if request.device is None:
            await self._send_offer(stream, client)
            return
        device_session = self._device_sessions.get(request.device)
        if device_session is None:
            await stream.send_message(Entrance(Admission.UNKNOWN))
        else:
            await self._serve_session(stream, client, device_session, stream.send_message)

    async def _send_offer(self, stream: Stream, client: Pairing) -> None:
        described = [
            (device_session, await asyncio.to_thread(device_session.device.describe))
            for device_session in self._device_sessions.values()
        ]
        lent = [(device_session, offered) for device_session, offered in described if offered is not None]
        await stream.send_message(OfferHeader(self._name, len(lent)))
        for device_session, offered in lent:
            user = "" if device_session.use is None else device_session.use.client
            is_yours = device_session.use is not None and device_session.use.fingerprint == client.fingerprint
            refused_s = self.refusals.left_s(client.fingerprint)
            await stream.send_message(replace(offered, user=user, is_yours=is_yours, refused_s=refused_s))

    async def _serve_session(
        self,
        stream: Stream,
        client: Pairing,
        device_session: _DeviceSession,
        send: Callable[[Entrance], Awaitable[None]],
    ) -> None:
        if refused_s := self.refusals.left_s(client.fingerprint):
            await send(Entrance(Admission.NO_WORKER, refused_s=refused_s))
            return
        # An RPC server serves one client at a time, so sessions take turns.
        try:
            async with asyncio.timeout(BUSY_S):
                await device_session.lock.acquire()
        except TimeoutError:
            use = device_session.use
            is_yours = use is not None and use.fingerprint == client.fingerprint
            await send(Entrance(Admission.BUSY, "" if use is None else use.client, is_yours))
            return
        try:
            try:
                worker = await plain_stream(await _reach(device_session.device))
            except OSError:
                await send(Entrance(Admission.NO_WORKER))
                return
            use = Use(device_session.device.name, client.name, client.fingerprint)
            try:
                await send(Entrance(Admission.OPEN))
                device_session.use, device_session.ended = use, None
                self._report_use()
            # Also for a cancel: `relay` has not taken over yet, and the worker would stay busy with this connection.
            except BaseException:
                device_session.use = None
                await worker.close()
                raise
            try:
                if await relay(stream, worker) and device_session.taken is not use:
                    device_session.ended = use
            finally:
                device_session.use = None
                self._report_use()
        finally:
            device_session.lock.release()

    @property
    def uses(self) -> tuple[Use, ...]:
        """The running sessions of clients with lent devices. May be read in any thread."""
        return tuple(
            use for device_session in self._device_sessions.values() if (use := device_session.use) is not None
        )

    def take_ended(self, device: str) -> Use | None:
        """Return the session that was running when the worker of `device` ended; None if there was none.

        A second call for the same session returns None. May be called in any thread, after the worker's end.
        """
        device_session = self._device_sessions[device]
        # The loop may not have seen the end of the worker's connection yet.
        found = device_session.use or device_session.ended
        is_new = found is not None and found is not device_session.taken
        device_session.ended, device_session.taken = None, found
        return found if is_new else None

    def _report_use(self) -> None:
        if self._on_use is not None:
            self._on_use(self.uses)

    async def _end_forgotten(self) -> None:
        """End the sessions of clients whose pairing was deleted.

        While there are no sessions, the file of pairings is not read.
        """
        while True:
            await self._session_begun.wait()
            await asyncio.sleep(_LOOK_S)
            if not any(each.session for each in self._callers):
                self._session_begun.clear()
                continue
            clients = {each.session for each in self._callers if each.session}
            forgotten = await asyncio.to_thread(self._book.forgotten, "client", clients)
            # No await in this loop: tasks that end remove their caller from the set.
            for caller in self._callers:
                if caller.session in forgotten and caller.task is not None:
                    caller.task.cancel()


async def _reach(device: LentDevice) -> socket.socket:
    """Return a connection to the RPC worker of `device`; raises `OSError` if the worker cannot be reached."""
    made: list[socket.socket] = []
    is_given_up = threading.Event()

    def reach() -> None:
        made.append(device.reach())
        if is_given_up.is_set():
            made[0].close()

    try:
        await asyncio.to_thread(reach)
    except asyncio.CancelledError:
        # The thread goes on. Its connection would keep the worker in use, and nobody would close it.
        is_given_up.set()
        for connection in made:
            connection.close()
        raise
    return made[0]
