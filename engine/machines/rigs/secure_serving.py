"""Lends devices of this machine to paired machines.

Each device has an RPC worker, which accepts connections only from the listener of the tunnel.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from msgspec import Struct

from engine.base.cancellation import CancelToken
from engine.base.errors import ArgumentError, EngineError
from engine.base.processor import default_threads
from engine.base.units import MIB, format_bytes
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device
from engine.devices.host_memory import read_host_memory
from engine.devices.telemetry.sampler import DeviceReadings
from engine.machines.rigs.lab import MIN_CAP_BYTES, START_TIMEOUT_S, ServingChild, WeightCache, make_folder
from engine.machines.tunnel.door import Key, require_guard
from engine.machines.tunnel.identity import Identity
from engine.machines.tunnel.listener import LentDevice, Listener, Use
from engine.machines.tunnel.offers import MAX_OFFERED, OfferedDevice, OfferedSpeed
from engine.machines.tunnel.pairing import OpenCode
from engine.machines.tunnel.pairings import Pairing, PairingStore
from engine.machines.tunnel.refusals import MAX_ENDS, REFUSED_S
from engine.runtime.protocol.messages import Serving
from engine.runtime.protocol.requests import Serve

NOT_GUARDED = "This system cannot keep other users of this computer from the worker; they can use it without pairing."
DEFAULT_PORT = 50052
"""Default TCP port of the listener, the same as of llama.cpp's `rpc-server`."""
HOST_MARGIN_BYTES = 256 * MIB
"""Default margin of a lent CPU: memory kept free for the lender's own programs."""
_HOST_MARGIN_SHARE = 20
_END_TIMEOUT_S = 5.0
_READING_TIMEOUT_S = 2.0
_POLL_S = 0.25
RESTART_AFTER_S = 60.0
"""Seconds after a worker's start. If the worker ends earlier, its end counts towards `MAX_QUICK_ENDS`."""
MAX_QUICK_ENDS = 5
"""Largest number of quick ends in a row after which a worker is started again. One more ends it for good.

An end is quick if it comes within `RESTART_AFTER_S` of the worker's start. An end during a session is counted against
the borrower instead (`Refusals`): the borrower's model may have ended the worker, and the device must stay available to
others.
"""
_log = logging.getLogger("layerdeck.engine")


class SecureAddress(Struct, frozen=True):
    """Network address of the listener for paired machines, and the identity of this machine.

    `host`, `port`: IP address and TCP port of the listener.
    `name`: name under which paired machines list this one.
    `identity`: key and certificate of this machine.
    `book`: the file of pairings.
    `code`: the current pairing code.
    """

    host: str
    port: int
    name: str
    identity: Identity
    book: PairingStore
    code: OpenCode


class Lending(Struct, frozen=True):
    """A device to lend, with the limits of its memory.

    `cap_bytes`: most bytes that borrowers may use, None for all.
    `margin_bytes`: bytes of free memory that stay free for the lender.
    `speed`: measured speed of the device, None if it was never measured.
    """

    device: Device
    cap_bytes: int | None = None
    margin_bytes: int = 0
    speed: OfferedSpeed | None = None

    @property
    def total_bytes(self) -> int:
        return self.device.total_bytes if self.cap_bytes is None else min(self.cap_bytes, self.device.total_bytes)


def choose_lendings(
    devices: Sequence[Device],
    *,
    only: Sequence[str] = (),
    without: Sequence[str] = (),
    caps: Sequence[tuple[str, int]] = (),
    margins: Sequence[tuple[str, int]] = (),
) -> tuple[Lending, ...]:
    """Return the devices to lend with their limits: the devices in `only`, in this order, or else all of `devices`.

    `only`, `without`: ids of the devices to lend and not to lend.
    `caps`, `margins`: pairs of a device id and bytes. An empty id means the only device.

    Raises:
        ArgumentError: if a device is unknown or has two caps or two margins, if none is left, or if a cap is too large.
    """
    here = {device.id: device for device in devices if device.kind != "accel"}
    for name in (*only, *without):
        _require(name, here)
    chosen = tuple(here[name] for name in dict.fromkeys(only or here) if name not in without)
    if not chosen:
        raise ArgumentError("No device is left to lend; leave out one --except.")
    if len(chosen) > MAX_OFFERED:
        raise ArgumentError(f"At most {MAX_OFFERED} devices can be lent; choose them with --device.")
    cap_of, margin_of = (_sizes(sizes, chosen, option) for sizes, option in ((caps, "--cap"), (margins, "--margin")))
    for device in chosen:
        cap_bytes = cap_of.get(device.id)
        if cap_bytes is not None and not MIN_CAP_BYTES <= cap_bytes <= device.total_bytes:
            raise ArgumentError(
                f"--cap {device.id}={format_bytes(cap_bytes)} is not possible: {device.id} has "
                f"{format_bytes(device.total_bytes)}. Give between 1 MiB and that."
            )
    return tuple(
        Lending(device, cap_of.get(device.id), margin_of.get(device.id, _usual_margin(device))) for device in chosen
    )


def _require(name: str, here: dict[str, Device]) -> None:
    if name not in here:
        raise ArgumentError(f'There is no device "{name[:60]}" here to lend; there are {", ".join(here)}.')


def _sizes(sizes: Sequence[tuple[str, int]], chosen: Sequence[Device], option: str) -> dict[str, int]:
    names = {device.id for device in chosen}
    found: dict[str, int] = {}
    for name, size_bytes in sizes:
        if not name and len(names) > 1:
            raise ArgumentError(
                f"{option} without a device is for one device, and {len(names)} are lent; write {option} ID=SIZE "
                f"({', '.join(sorted(names))})."
            )
        device = name or next(iter(names))
        if device not in names:
            raise ArgumentError(f'{option}: "{device[:60]}" is not lent; there are {", ".join(sorted(names))}.')
        if device in found:
            raise ArgumentError(f"{option} gives {device} two sizes; give one.")
        found[device] = size_bytes
    return found


def _usual_margin(device: Device) -> int:
    if device.is_host:
        return min(HOST_MARGIN_BYTES, device.total_bytes // _HOST_MARGIN_SHARE)
    return device.margin_bytes


class _Worker:
    """The RPC worker of one lent device. `look` must be called regularly: it restarts a worker that has crashed.

    A worker that crashes soon after its start more than `MAX_QUICK_ENDS` times in a row is not restarted. A crash while
    a borrower was using the worker is not counted here, but against the borrower.

    `key`: the only source port from which the worker accepts connections.
    `kept`: cache of weights on the disk, None for no cache.
    `kept_name`: name of the worker's subfolder in the cache of weights.
    `blame`: called after a crash. If a borrower was using the worker, it counts the crash against that borrower and
    returns True.
    """

    def __init__(
        self,
        lending: Lending,
        key: Key,
        kept: WeightCache | None,
        kept_name: str,
        blame: Callable[[], bool] = lambda: False,
    ) -> None:
        self.lending, self._blame = lending, blame
        self.serving: Serving | None = None
        self.is_over = False
        """Whether the worker has ended and is not started again; its device is then not offered."""
        self._key = key
        device = lending.device
        self._readings, self._reading = DeviceReadings((device,)), threading.Lock()
        self._request = Serve(
            host="127.0.0.1",
            # Any free port of the loopback interface: only we have to know it.
            port=0,
            device=device.id,
            # RLIMIT_DATA limits memory of the process, not of a card; a card's cap counts in the client's plans.
            cap_bytes=lending.cap_bytes if device.is_host else None,
            n_threads=default_threads() if device.is_host else 1,
            client_port=key.port,
        )
        if kept is not None:
            folder = make_folder(kept.folder / kept_name)
            self._request = replace(self._request, weight_cache=str(folder), cache_quota_bytes=kept.quota_bytes)
        self._child = ServingChild(self._request, name=f"lent-{device.id}")
        self._began_s = 0.0
        self._quick_ends = 0

    def start(self) -> None:
        self._began_s = time.monotonic()
        self._child.start()

    def wait(self, deadline_s: float) -> Serving:
        self.serving = self._child.wait_until_serving(deadline_s)
        return self.serving

    def look(self) -> EngineError | None:
        """Start the worker again if it has ended. Return an error if it must not be started again, else None.

        The call does not wait until the new worker accepts connections, because that would delay other workers' checks.
        """
        outcome = self._child.wait_for_end(0)
        if outcome is None:
            # One that was started again says its port when it accepts connections.
            self.serving = self._child.serving
            return None
        has_served, self.serving = self._child.serving is not None, None
        is_quick = time.monotonic() - self._began_s < RESTART_AFTER_S
        if not (has_served and self._blame()):
            self._quick_ends = self._quick_ends + 1 if is_quick else 1
        if has_served and self._quick_ends <= MAX_QUICK_ENDS:
            _log.warning("the worker of %s is started again: %s", self.lending.device.id, outcome.sentence)
            self._child = ServingChild(self._request, name=f"lent-{self.lending.device.id}")
            self.start()
            return None
        try:
            # One that never served would end for the same reason again. It may have said more than its end does.
            self._child.wait_until_serving(0.0)
        except EngineError as error:
            return error
        return outcome.error()

    def begin_stop(self) -> None:
        self._child.begin_stop()

    def wait_for_end(self) -> None:
        self._child.wait_for_end(_END_TIMEOUT_S)
        # A driver may hang in a reading, and lending must be able to end all the same.
        if self._reading.acquire(timeout=_END_TIMEOUT_S):
            try:
                self._readings.close()
            finally:
                self._reading.release()

    def reach(self) -> socket.socket:
        """Connect to the worker from the only source port that it accepts (`key`), and return the socket.

        Raises `OSError`.
        """
        if self.serving is None:
            raise ConnectionRefusedError
        return self._key.connect(self.serving.port)

    def describe(self) -> OfferedDevice | None:
        """Return the description of the device for borrowers, with its current free memory if the system reports it.

        None if the worker has crashed and is not restarted any more. Thread-safe.
        """
        if self.is_over:
            return None
        lending, device = self.lending, self.lending.device
        known_bytes = self._read_free_bytes()
        free_bytes = device.total_bytes if known_bytes is None else known_bytes
        offered_bytes = min(free_bytes, lending.total_bytes)
        # Memory beyond the cap stays free anyway, and counts as margin first.
        usable_bytes = min(offered_bytes, max(0, free_bytes - lending.margin_bytes))
        return OfferedDevice(
            name=device.id,
            kind=device.kind,
            total_bytes=lending.total_bytes,
            description=device.name,
            backend=device.backend,
            free_bytes=None if known_bytes is None else offered_bytes,
            margin_bytes=offered_bytes - usable_bytes,
            alignment_bytes=device.buffers.alignment_bytes,
            largest_tensor_bytes=device.buffers.largest_tensor_bytes,
            largest_buffer_bytes=device.buffers.largest_buffer_bytes,
            mixes_streams=device.buffers.mixes_streams,
            overhead_bytes=device.overhead_bytes,
            speed=lending.speed,
        )

    def _read_free_bytes(self) -> int | None:
        """Return the free memory of the device in bytes; None if the system does not report it, or not in time."""
        if self.lending.device.is_host:
            return read_host_memory().free_bytes
        # A reader is for one thread.
        if not self._reading.acquire(timeout=_READING_TIMEOUT_S):
            return None
        try:
            (sample,) = self._readings.read()
        finally:
            self._reading.release()
        if sample.used_bytes is None or sample.total_bytes is None:
            return None
        return max(0, sample.total_bytes - sample.used_bytes)


class Lent(Struct, frozen=True):
    """Facts on devices that are lent now: the listener and the workers accept connections.

    `port`: TCP port of the listener.
    `servings`: first message of each worker, which says that it accepts connections; in the order of the lent devices.
    """

    port: int
    servings: tuple[Serving, ...]

    @property
    def is_guarded(self) -> bool:
        """Whether all workers refuse connections of other users of this machine."""
        return all(each.is_guarded for each in self.servings)


def serve_secure(
    address: SecureAddress,
    lendings: Sequence[Lending],
    *,
    kept: WeightCache | None,
    until: CancelToken,
    on_serving: Callable[[Lent], None],
    on_paired: Callable[[Pairing], None],
    on_use: Callable[[tuple[Use, ...]], None] | None = None,
    on_problem: Callable[[str], None] | None = None,
) -> None:
    """Lend devices to paired machines until `until` is cancelled.

    Workers and listener have ended when this returns or raises.

    `kept`: cache of weights, shared by all workers; None for no cache.
    `on_serving`: called once when all workers accept connections.
    `on_paired`: called in a thread with each new pairing.
    `on_use`: called with all sessions whenever one begins or ends, in the listener's thread; it must not wait.
    `on_problem`: called with a sentence if one of several workers has ended for good, a borrower is refused, a pairing
    cannot be stored, or the pairing code was guessed wrong too often.

    Raises:
        EngineError: if this machine cannot listen or serve, or if no worker is left.
    """
    require_guard()
    # The key outlives the workers: while it is held, no other user can bind the port that the workers trust.
    report_problem = on_problem or _log.warning
    with Key() as key, _serving(address, lendings, key, kept, on_paired, on_use, report_problem) as (listener, workers):
        deadline_s = time.monotonic() + START_TIMEOUT_S
        servings = tuple(worker.wait(deadline_s) for worker in workers)
        on_serving(Lent(listener.port, servings))
        _supervise(list(workers), until, report_problem)


@contextmanager
def _serving(
    address: SecureAddress,
    lendings: Sequence[Lending],
    key: Key,
    kept: WeightCache | None,
    on_paired: Callable[[Pairing], None],
    on_use: Callable[[tuple[Use, ...]], None] | None,
    report_problem: Callable[[str], None],
) -> Iterator[tuple[Listener, tuple[_Worker, ...]]]:
    """Context manager that starts the listener and then the workers, and stops both at its end.

    The workers' cache folders are named after the listener's port, so the listener is started first. A client that
    connects before a worker is ready gets the answer that the worker does not run (`Admission.NO_WORKER`).

    `key`: source port of connections to the workers.
    `kept`: cache of weights, None for no cache.
    `on_paired`: called with each new pairing. `on_use`: called with all sessions whenever one begins or ends.
    `report_problem`: called with a sentence if a borrower is refused, or the listener has a problem.
    """
    workers: list[_Worker] = []

    def lent(index: int, lending: Lending) -> LentDevice:
        def reach() -> socket.socket:
            if index >= len(workers):
                raise ConnectionRefusedError
            return workers[index].reach()

        def describe() -> OfferedDevice | None:
            if index < len(workers):
                return workers[index].describe()
            device = lending.device
            return OfferedDevice(name=device.id, kind=device.kind, total_bytes=lending.total_bytes)

        return LentDevice(lending.device.id, reach, describe)

    listener = Listener(
        address.host,
        address.port,
        identity=address.identity,
        book=address.book,
        code=address.code,
        name=address.name,
        devices=[lent(index, each) for index, each in enumerate(lendings)],
        on_paired=on_paired,
        on_use=on_use,
        on_problem=report_problem,
    )
    with listener:
        shared = None if kept is None else WeightCache(kept.folder, kept.quota_bytes // len(lendings))
        try:
            for each in lendings:
                # A single CPU keeps the folder of older releases.
                is_old = len(lendings) == 1 and each.device.id == CPU_ID
                name = str(listener.port) if is_old else f"{listener.port}-{each.device.id}"
                blame = partial(_blame, listener, each.device.id, report_problem)
                workers.append(_Worker(each, key, shared, name, blame))
                # At once: workers start in parallel.
                workers[-1].start()
            yield listener, tuple(workers)
        finally:
            for worker in workers:
                worker.begin_stop()
            for worker in workers:
                worker.wait_for_end()


def _blame(listener: Listener, device: str, report_problem: Callable[[str], None]) -> bool:
    """Count a crash of the worker of `device` against the borrower that used it; return whether a borrower used it.

    `report_problem`: called with a sentence if the borrower is refused from now on.
    """
    use = listener.take_ended(device)
    if use is None:
        return False
    if listener.refusals.count(use.fingerprint):
        minutes = math.ceil(REFUSED_S / 60)
        report_problem(
            f"{use.client} is refused for {minutes} min: its models ended workers {MAX_ENDS} times, last on {device}."
        )
    return True


def _supervise(workers: list[_Worker], until: CancelToken, report_problem: Callable[[str], None]) -> None:
    # Polled, since the ends of processes and `until` cannot be waited for together.
    while not until.wait(_POLL_S):
        for worker in tuple(workers):
            error = worker.look()
            if error is None:
                continue
            workers.remove(worker)
            worker.is_over = True
            if not workers:
                raise error
            report_problem(f"{worker.lending.device.id} is no longer lent. {error.summary()}")
