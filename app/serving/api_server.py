"""The API server of the window, as the panel and the preferences use it: start, stop, keys, list of requests.

The server has a thread with an event loop of its own. Start and stop take up to a second, and run in background
threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from PySide6.QtCore import QObject, Qt, Signal

from app.background import Background
from app.paths import api_key_path, make_folder
from app.serving.address import address_error, is_loopback, listen_error, own_names, reached_url
from app.serving.key_file import read_keys, replace_keys, unusable
from app.settings import Settings
from engine.base.engine_build import own_version
from engine.base.errors import ArgumentError, EngineError
from engine.base.language import tr
from engine.base.values import replace

if TYPE_CHECKING:
    # The server and what it is made of are imported when it is started: the window opens without them.
    from app.serving.offers import Offers
    from app.serving.served_models import ServedModels
    from engine.api.server.journal import Journal, RequestEntry
    from engine.api.server.server import ApiServer

    MakeServed = Callable[[], tuple[Offers, ServedModels]]

CLOSE_WAIT_S = 5.0
"""Seconds that the closing window waits for a start of the server that is still running."""


class ServerPhase(Enum):
    """State of the server.

    OFF: the server does not run. BUSY: the server starts or stops. ON: the server runs.
    """

    OFF = auto()
    BUSY = auto()
    ON = auto()


class ServerState(Struct, frozen=True):
    """State of the window's API server, for its panel.

    `phase`: whether the server is off, on, or between the two.
    `url`: address of the running server; else empty.
    `fault`: reason why the server could not be started, with a remedy; empty if there is none.
    `key`: API key of the server; empty if it needs none, or if the key was not read yet.
    """

    phase: ServerPhase = ServerPhase.OFF
    url: str = ""
    fault: str = ""
    key: str = ""


class _ServerObjects(Struct, frozen=True):
    """Objects that are made once and used by each run of the server.

    `offers`: the models that clients may request. `served`: the loaded models that the server uses.
    `journal`: the list of requests.
    """

    offers: Offers
    served: ServedModels
    journal: Journal


class WindowApiServer(QObject):
    """Starts and stops the API server, from the GUI thread.

    Calls return at once; only `close` waits, for a bounded time.
    """

    state_changed = Signal(ServerState)
    requests_changed = Signal()
    """Emitted when a request has arrived or changed its state.

    The signal is not emitted again before `take_requests` is called.
    """

    models_changed = Signal()
    """Emitted when the lent models or their context sizes (`contexts`) have changed."""

    _changed = Signal()

    def __init__(
        self, make_served: MakeServed, settings: Settings, background: Background, parent: QObject | None = None
    ) -> None:
        super().__init__(parent)
        self._make_served, self._settings, self._background = make_served, settings, background
        self._objects: _ServerObjects | None = None
        """Objects that stay when the server is stopped and started again; None before its first start."""
        self._keeps_texts = False
        self._is_renewed = False
        """Whether the key was replaced after the last start of the server had begun."""
        self.state = ServerState()
        self._lock = threading.Lock()
        # Guarded by the lock.
        self._server: ApiServer | None = None
        self._is_closed = False
        self._change_is_emitted = False
        """Whether `requests_changed` was emitted and `take_requests` not called since."""
        self._starts = threading.Event()
        self._starts.set()
        # Queued explicitly: the server's thread emits this signal.
        self._changed.connect(self.requests_changed, Qt.ConnectionType.QueuedConnection)

    # ------------------------------------------------------------------ on and off

    def start(self) -> None:
        """Start the server on the address of the settings. If that fails, `state` has the reason."""
        if self.state.phase is not ServerPhase.OFF:
            return
        fault = address_error(self._settings.serve_host, self._settings.serves_plain, self._settings.serve_needs_key)
        if fault:
            self._set_state(ServerState(fault=fault, key=self.state.key))
            return
        self._set_state(ServerState(ServerPhase.BUSY, key=self.state.key))
        self._background.run(
            tr("Starting the API server"), _import_server, lambda _none: self._start(), self._refuse, quiet=True
        )

    def stop(self) -> None:
        """Stop the server and all its answers to clients; models stay loaded."""
        if self.state.phase is ServerPhase.ON:
            self._stop(lambda: self._set_state(ServerState(key=self.state.key)))

    def renew_key(self) -> None:
        """Replace the API key by a new one.

        A running server is restarted, so that it refuses clients with the old key.
        """
        if self.state.phase is ServerPhase.BUSY:
            return

        def replaced(key: str) -> None:
            self._set_state(replace(self.state, fault="", key=key))
            self._is_renewed = True
            # As it is now: it may have been stopped meanwhile.
            if self.state.phase is ServerPhase.ON:
                self._stop(self._start)

        self._background.run(tr("Creating an API key"), _new_key, replaced, self._show_fault, quiet=True)

    def show_key(self) -> None:
        """Read the API key in the background and put it into `state`.

        If there is no key file, it is written with a new key.
        """

        def read(key: str) -> None:
            self._set_state(replace(self.state, key=key))

        if not self.state.key:
            self._background.run(tr("Reading the API key"), _read_key, read, self._show_fault, quiet=True)

    def close(self) -> None:
        """Stop the server, wait until it has stopped, and prevent further starts."""
        with self._lock:
            self._is_closed = True
            server, self._server = self._server, None
        if self._objects is not None:
            self._objects.served.detach()
            self._objects.offers.close()
        if server is not None:
            server.stop()
        # A start that is under way sees that the window has closed, and ends its server itself.
        self._starts.wait(CLOSE_WAIT_S)

    def _start(self) -> None:
        settings = self._settings
        host, port, needs_key = settings.serve_host, settings.serve_port, settings.serve_needs_key
        if self._objects is None:
            # Imported here: the window opens without the server.
            from engine.api.server.journal import Journal

            self._objects = _ServerObjects(*self._make_served(), Journal(self._on_request))
            self._objects.served.lent_changed.connect(self.models_changed)
            self._objects.journal.keeps_texts = self._keeps_texts
        objects = self._objects
        self._starts.clear()
        self._is_renewed = False

        def start() -> ApiServer | None:
            try:
                objects.offers.recall()
                server = _make_server(host, port, _read_keys() if needs_key else (), objects)
                try:
                    server.start()
                except ArgumentError as error:
                    raise ArgumentError(listen_error(error, host, port)) from error
                with self._lock:
                    if not self._is_closed:
                        self._server = server
                        return server
                server.stop()
                return None
            finally:
                self._starts.set()

        def started(server: ApiServer | None) -> None:
            if server is not None and self._is_renewed:
                # It may have the old key.
                self._stop(self._start)
            elif server is not None:
                objects.served.attach(server)
                url = reached_url(server.address.host, server.address.port)
                self._set_state(ServerState(ServerPhase.ON, url, key=self.state.key))
                self.show_key()

        self._background.run(tr("Starting the API server"), start, started, self._refuse, quiet=True)

    def _stop(self, then: Callable[[], None]) -> None:
        with self._lock:
            server, self._server = self._server, None
        # With its address: the panel tells a stop from a start by it.
        self._set_state(ServerState(ServerPhase.BUSY, self.state.url, key=self.state.key))
        if self._objects is not None:
            self._objects.served.detach()

        def stop() -> None:
            if server is not None:
                server.stop()

        self._background.run(tr("Stopping the API server"), stop, lambda _none: then(), self._refuse, quiet=True)

    def _refuse(self, error: EngineError) -> None:
        is_on = self._server is not None
        phase = ServerPhase.ON if is_on else ServerPhase.OFF
        self._set_state(ServerState(phase, self.state.url if is_on else "", error.summary(), self.state.key))

    def _show_fault(self, error: EngineError) -> None:
        """Show in `state` why the key could not be read or replaced. The phase of the server does not change."""
        self._set_state(replace(self.state, fault=error.summary()))

    def _set_state(self, state: ServerState) -> None:
        if state != self.state:
            self.state = state
            self.state_changed.emit(state)

    # ------------------------------------------------------------------ requests

    @property
    def contexts(self) -> dict[str, int]:
        """Context size in tokens for one request, by the name of each loaded model; the current model first."""
        return {} if self._objects is None else self._objects.served.contexts

    def take_requests(self) -> tuple[RequestEntry, ...]:
        """Return the running requests and the last requests that have ended, newest first.

        `requests_changed` is emitted at most once between two calls.
        """
        with self._lock:
            self._change_is_emitted = False
        if self._objects is None:
            return ()
        journal = self._objects.journal
        # In this order: a request that ends in between is in both, and its end counts.
        under_way, ended = journal.under_way, journal.ended
        found = {entry.number: entry for entry in (*under_way, *ended) if entry.path not in _QUIET}
        return tuple(found[number] for number in sorted(found, reverse=True))

    def keep_texts(self, keeps: bool) -> None:
        """Store the texts of requests in memory from now on, or delete all stored texts if `keeps` is false."""
        self._keeps_texts = keeps
        if self._objects is not None and keeps:
            self._objects.journal.keeps_texts = True
        elif self._objects is not None:
            self._objects.journal.forget_texts()

    def text_of(self, number: int) -> tuple[str, str] | None:
        """Return the texts of a request's body and of its answer, or None if they were not stored.

        `number`: number of the request in the list.
        """
        text = None if self._objects is None else self._objects.journal.text_of(number)
        return None if text is None else (text.asked, text.answered)

    def _on_request(self, _entry: RequestEntry) -> None:
        """Emit `_changed`, which reaches the GUI thread as `requests_changed`. Called in the server's thread.

        After that, nothing is emitted until `take_requests` is called.
        """
        with self._lock:
            if self._change_is_emitted or self._is_closed:
                return
            self._change_is_emitted = True
        self._changed.emit()


_QUIET = frozenset({"/health", "/metrics"})
"""URL paths that monitoring programs request every few seconds. The list of requests leaves them out."""


def _import_server() -> None:
    """Import Starlette, uvicorn and the modules that use them.

    It takes half a second, so it runs in a background thread.
    """
    import app.serving.served_models  # noqa: F401


def _read_keys() -> tuple[str, ...]:
    return _keys(api_key_path(), fresh=False)


def _read_key() -> str:
    return _read_keys()[0]


def _new_key() -> str:
    return _keys(api_key_path(), fresh=True)[0]


def _keys(path: Path, *, fresh: bool) -> tuple[str, ...]:
    what = tr("The API key file")
    try:
        make_folder(path.parent)
    except OSError as error:
        raise unusable(what, path, error) from None
    return (replace_keys if fresh else read_keys)(path, what).keys


def _make_server(host: str, port: int, keys: tuple[str, ...], objects: _ServerObjects) -> ApiServer:
    from engine.api.server.guard import Access, key_digest
    from engine.api.server.pool import ModelPool
    from engine.api.server.pool_functions import PoolFunctions
    from engine.api.server.server import Address, ApiServer

    access = Access(keys=tuple(map(key_digest, keys)), hosts=own_names(host), is_loopback=is_loopback(host))
    served = objects.served
    pool = ModelPool(
        PoolFunctions(
            objects.offers.entries, rig=served.rig, plan=served.plan, load=served.load, keep_alive=served.keep_alive
        )
    )
    return ApiServer(Address(host, port), access, pool, version=own_version(), journal=objects.journal)
