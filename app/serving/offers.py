"""The models that the window's API server offers: the open ones, and those of the library. Does not import Qt."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from app.library.catalogue import LibraryCatalogue
from app.paths import serve_settings_path
from engine.api.server.offers import entries_of_library
from engine.api.server.pooled_model import default_keep_alive_s
from engine.api.server.preferences import Preferences, read_preferences, with_preferences
from engine.api.wire.names import ModelEntry
from engine.base.cancellation import CancelToken
from engine.base.errors import ArgumentError, LibraryError
from engine.base.values import replace

_log = logging.getLogger("layerdeck.server")

RESCAN_S = 10.0
"""Least time in seconds between two scans of the library's folders."""


class Offers:
    """The list of models that the window's API server offers, updated from the library.

    `entries` may take seconds, and is called in threads of the server. The other methods return at once, in any thread,
    except `recall`, which reads the library's database.
    """

    def __init__(self, catalogue: LibraryCatalogue) -> None:
        self._catalogue = catalogue
        self._lock = threading.Lock()
        self._token = CancelToken()
        self._scanned_s: float | None = None
        # Replaced whole, so that any thread may read them.
        self._listed: tuple[ModelEntry, ...] = ()
        self._open: tuple[ModelEntry, ...] = ()
        self._preferences = Preferences()

    def close(self) -> None:
        """Cancel a running scan of the library."""
        self._token.cancel()

    def set_open(self, entries: Sequence[ModelEntry]) -> None:
        """Replace the API's entries for the models that are open in the window."""
        self._open = tuple(entries)

    def listed(self, path: Path) -> ModelEntry | None:
        """Return the entry of the library's model at `path` from the last scan, or None if the scan did not list it."""
        return next((entry for entry in self._listed if entry.path == path), None)

    def recall(self) -> None:
        """Offer the models of the library's last scan, so that the server knows them before the first scan."""
        with self._lock:
            if self._scanned_s is None:
                try:
                    contents = self._catalogue.contents()
                    if not contents.is_scanned:
                        contents = self._catalogue.load()
                    self._listed = entries_of_library(contents.models, self._catalogue.index)
                except LibraryError:
                    return  # `entries` meets the same error, and its requests are told.

    def entries(self) -> tuple[ModelEntry, ...]:
        """Return the models that clients may request, open models first.

        Clients may also request an open model by its name in the library.

        Raises:
            LibraryError: the library cannot be read.
        """
        with self._lock:
            now_s = time.monotonic()
            if self._scanned_s is None or now_s - self._scanned_s > RESCAN_S:
                self._scan()
                self._scanned_s = time.monotonic()
        listed = {entry.path: entry for entry in self._listed}
        opened = self._open
        paths, ids = {entry.path for entry in opened}, {entry.id for entry in opened}
        others = (entry for entry in self._listed if entry.path not in paths and entry.id not in ids)
        own = (_joined(entry, listed.get(entry.path)) for entry in opened)
        return with_preferences((*own, *others), self._preferences)

    def keep_alive_s(self, entry: ModelEntry, load_s: float = 0.0) -> float:
        """Return the idle time in seconds after which the model of `entry`, loaded for a request, is unloaded.

        `load_s`: seconds that its load took; the default depends on them.
        """
        kept = (entry.keep_alive_s, self._preferences.keep_alive_s)
        return next((seconds for seconds in kept if seconds is not None), default_keep_alive_s(load_s))

    def _scan(self) -> None:
        catalogue = self._catalogue
        if not catalogue.contents().is_scanned or catalogue.is_stale():
            catalogue.scan()
        # A file that cannot be read must not cost a child process with each list of models.
        catalogue.read_headers(lambda _done, _whole: None, self._token, retries=False)
        self._listed = entries_of_library(catalogue.contents().models, catalogue.index)
        try:
            self._preferences = read_preferences(serve_settings_path())
        except ArgumentError as error:
            # The models themselves can be asked for without it.
            _log.info("%s", error.summary())


def _joined(entry: ModelEntry, listed: ModelEntry | None) -> ModelEntry:
    if listed is None:
        return entry
    names = dict.fromkeys((*entry.names, *listed.all_names))
    names.pop(entry.id, None)
    return replace(listed, id=entry.id, path=entry.path, names=tuple(names))
