"""Lending of this computer's devices to paired computers while the window is open, by a server in its own thread."""

from __future__ import annotations

import math
import platform
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from msgspec import Struct
from PySide6.QtCore import QObject, Qt, Signal

from app.paths import identity_path, pairings_path, weight_cache_path
from app.settings import Settings
from engine.base.cancellation import CancelToken
from engine.base.errors import EngineError
from engine.base.language import tr
from engine.base.values import replace
from widgets.common.delayed_call import DelayedCall

if TYPE_CHECKING:
    from engine.machines.rigs.secure_serving import SecureAddress
    from engine.machines.tunnel.listener import Use

_KEY = "lending"
_END_S = 8.0
DEFAULT_PORT = 50052
MAX_NAME = 40


class LendChoice(Struct, frozen=True):
    """Choices for lending, as they are stored in the settings.

    `host`: address to listen on; empty for the first of `lending_addresses`.
    `name`: name of this computer for others. `announce`: whether the computer is announced by mDNS.
    `without`: ids of devices that are not lent. `caps`: largest memory in bytes by device id. `without` and `caps`
    may have ids of devices that this computer does not have now.
    """

    host: str = ""
    port: int = DEFAULT_PORT
    name: str = ""
    announce: bool = True
    without: tuple[str, ...] = ()
    caps: dict[str, int] = {}


class LendState(Struct, frozen=True):
    """State of lending for its dialog.

    `is_starting`: whether the server is being started.
    `addresses`: host and port to which other computers connect, one pair for each network, separated by commas; empty
    while nothing is lent.
    `code`: the valid pairing code; empty if there is none, for instance after it was used or has expired.
    `users`: pairs of a device id and the name of the client that uses the device.
    `problem`: why the last attempt to lend failed; empty if it succeeded.
    `note`: the server's last message for the user, such as a new pairing or a failed attempt to pair; may be empty.
    """

    is_starting: bool = False
    addresses: str = ""
    code: str = ""
    users: tuple[tuple[str, str], ...] = ()
    problem: str = ""
    note: str = ""


class Lender(QObject):
    """Starts and stops the server that lends devices. `state_changed` is emitted at each change."""

    state_changed = Signal(LendState)
    _reported = Signal(object)

    def __init__(self, settings: Settings, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._settings = settings
        self.choice = settings.kept(_KEY, LendChoice) or LendChoice(name=platform.node()[:MAX_NAME])
        self.state = LendState()
        self.devices: tuple[str, ...] = ()
        """Ids of the devices of the last `start`."""
        self._until: CancelToken | None = None
        self._thread: threading.Thread | None = None
        self._address: SecureAddress | None = None
        self._expiry = DelayedCall(self, self._on_code_due)
        # Not a coarse timer, which may be due before the code has expired.
        self._expiry.setTimerType(Qt.TimerType.PreciseTimer)
        # Emitted by threads of the server.
        self._reported.connect(self._on_reported, Qt.ConnectionType.QueuedConnection)

    def start(self, choice: LendChoice, devices: Sequence[str]) -> None:
        """Store `choice` and start lending with it; do nothing if devices are lent already.

        `devices`: ids of the devices to lend. Others are not lent, even if a search finds them now.
        """
        if self._until is not None:
            return
        self._settings.keep_changes(_KEY, self.choice, choice)
        self.choice, self.devices = choice, tuple(devices)
        until = self._until = CancelToken()
        self._set(LendState(is_starting=True))
        self._thread = threading.Thread(
            target=self._run, args=(choice, self.devices, until, self._thread), name="lender", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop lending at once; connections of other computers are closed."""
        if self._until is not None:
            self._until.cancel()
            self._until = self._address = None
            self._set(LendState())

    def renew_code(self) -> None:
        """Replace the pairing code by a new one; the old code becomes invalid."""
        if self._address is not None:
            self._set(replace(self.state, code=self._address.code.renew()))

    def close(self) -> None:
        """Stop lending, and wait a bounded time for the server's thread."""
        self.stop()
        if self._thread is not None:
            self._thread.join(_END_S)

    def _set(self, state: LendState) -> None:
        self.state = state
        self._expiry.stop()
        if state.code and self._address is not None:
            self._expiry.start(math.ceil(self._address.code.left_s * 1000))
        self.state_changed.emit(state)

    def _report(self, until: CancelToken, change: Callable[[], None]) -> None:
        """Run `change` in the GUI thread, unless the server was stopped or restarted in the meantime.

        Called in the server's threads. `until`: token that ends the run of the server to which `change` belongs.
        """
        self._reported.emit((until, change))

    def _on_reported(self, report: tuple[CancelToken, Callable[[], None]]) -> None:
        until, change = report
        if until is self._until:
            change()

    # ------------------------------------------------------------------ in the thread

    def _run(
        self, choice: LendChoice, devices: Sequence[str], until: CancelToken, before: threading.Thread | None
    ) -> None:
        # What was lent before keeps the port until its workers have ended.
        if before is not None:
            before.join()
        try:
            if not until.cancelled:
                self._serve(choice, devices, until)
        except EngineError as error:
            sentence = error.summary()
            self._report(until, lambda: self._end(sentence))

    def _end(self, sentence: str) -> None:
        self._until = self._address = None
        self._set(LendState(problem=sentence))

    def _serve(self, choice: LendChoice, devices: Sequence[str], until: CancelToken) -> None:
        # Imported here: most windows never lend.
        from app.lending import find_lendings
        from engine.devices.own_addresses import listening_addresses
        from engine.machines.rigs.lab import WeightCache
        from engine.machines.rigs.secure_serving import Lent, SecureAddress, serve_secure
        from engine.machines.tunnel.identity import read_identity
        from engine.machines.tunnel.local_network import Announcement
        from engine.machines.tunnel.pairing import OpenCode
        from engine.machines.tunnel.pairings import PairingStore

        caps = tuple((device, choice.caps[device]) for device in devices if device in choice.caps)
        lendings = find_lendings(only=devices, caps=caps)
        host = choice.host or lending_addresses()[0]
        name = choice.name or platform.node() or "unnamed"
        book = PairingStore(pairings_path())
        address = SecureAddress(host, choice.port, name, read_identity(identity_path()), book, OpenCode())
        with ExitStack() as stack:

            def begin(lent: Lent) -> None:
                note = ""
                if choice.announce:
                    announcement = Announcement(
                        name,
                        host,
                        lent.port,
                        device=", ".join(each.device.id for each in lendings),
                        total_bytes=sum(each.total_bytes for each in lendings),
                        fingerprint=address.identity.fingerprint,
                    )
                    try:
                        stack.enter_context(announcement)
                    except EngineError as error:
                        # The address can be typed at the other computer.
                        note = error.summary()
                self._report(until, lambda: self._begin(address, listening_addresses(host, lent.port), note))

            serve_secure(
                address,
                lendings,
                kept=WeightCache(weight_cache_path()),
                until=until,
                on_serving=begin,
                on_paired=lambda pairing: self._report(
                    until, lambda: self._show_note(tr("Paired with {words}.", words=pairing.words))
                ),
                on_use=lambda uses: self._report(until, lambda: self._show_uses(uses)),
                on_problem=lambda sentence: self._report(until, lambda: self._show_note(sentence)),
            )

    def _begin(self, address: SecureAddress, addresses: str, note: str) -> None:
        self._address = address
        # A session of one worker may have begun while another one was starting.
        self._set(LendState(addresses=addresses, code=address.code.renew(), users=self.state.users, note=note))

    def _show_uses(self, uses: tuple[Use, ...]) -> None:
        self._set(replace(self.state, users=tuple((use.device, use.client) for use in uses)))

    def _show_note(self, sentence: str) -> None:
        # A pairing and wrong guesses use the code up.
        self._set(replace(self.state, note=sentence, code=self._valid_code))

    def _on_code_due(self) -> None:
        self._set(replace(self.state, code=self._valid_code))

    @property
    def _valid_code(self) -> str:
        return "" if self._address is None else self._address.code.current or ""


def lending_addresses() -> tuple[str, ...]:
    """Return the addresses of this computer on which lending can listen; first those that other computers reach."""
    from engine.devices.own_addresses import own_addresses

    return own_addresses()
