"""The `serve` command: an API server for other programs, compatible with OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import os
import threading
import time
from argparse import Namespace
from contextlib import closing, suppress
from copy import copy
from pathlib import Path

from app.cli import exit_codes
from app.cli.auto_options import with_margins
from app.cli.entry import on_interrupt
from app.cli.hand_options import has_hand_layout
from app.cli.inputs import check_layout_options, learn_need, plan_request_on, spec_for_plan, this_machine
from app.cli.library import checked_folder, scan_library
from app.cli.output import print_notice
from app.cli.serve_log import ServeLog
from app.cli.serve_options import access_of, address_of, keep_alive_of, preferences_of
from app.paths import library_path
from app.serving.address import is_loopback
from engine.api.server.journal import Journal
from engine.api.server.offers import entries_of_library, entry_of_file
from engine.api.server.pool import ModelPool
from engine.api.server.pool_functions import PoolFunctions
from engine.api.server.preferences import Preferences, with_preferences
from engine.api.server.server import ApiServer
from engine.api.wire.errors import ApiError
from engine.api.wire.names import ModelEntry, find_entry
from engine.base.cancellation import CancelToken
from engine.base.engine_build import own_version
from engine.base.errors import ArgumentError
from engine.devices.device import Rig
from engine.devices.rig_file import read_rig
from engine.devices.telemetry.memory_holders import memory_holders
from engine.library.index import LibraryIndex
from engine.library.refresh import list_models
from engine.model.gguf.reader import read_model
from engine.planning.fit.loaded_models import UNTIL_UNLOADED_S
from engine.planning.layout.layout_file import parse_layout, read_layout
from engine.planning.memory.drafts import drafts_for
from engine.runtime.session.load_spec import LoadSpec

_SCAN_S = 10.0
"""Least time between two scans of the library, in seconds."""
_POLL_S = 0.2


def run_serve(options: Namespace) -> int:
    """Serve until an interrupt, and return the exit code. All child processes have ended when the call returns."""
    check_layout_options(options)
    if options.layout is not None and len(options.names) != 1:
        raise ArgumentError("--layout is the layout of one model; name one.")
    address, access, keep_alive_s = address_of(options), access_of(options), keep_alive_of(options)
    preferences = preferences_of(options)
    catalogue = Catalogue(options, preferences)
    entries = catalogue.named()
    pool = ModelPool(
        PoolFunctions(
            entries=catalogue.entries,
            rig=catalogue.rig,
            plan=catalogue.plan,
            holders=memory_holders,
            learn=learn_need,
        ),
        keep_alive_s=preferences.keep_alive_s if keep_alive_s is None else keep_alive_s,
        pinned_s=UNTIL_UNLOADED_S if keep_alive_s is None else keep_alive_s,
        pinned=[entry.id for entry in entries],
    )
    log = ServeLog(as_json=options.json)
    # Cancelled by an interrupt, and when the server's thread ends.
    ended = CancelToken()
    server = ApiServer(address, access, pool, version=own_version(), journal=Journal(log.request), on_end=ended.cancel)

    with on_interrupt(ended.cancel):
        try:
            server.start()
            log.serving(server)
            for entry in entries:
                if not _loads(server, entry, ended):
                    return exit_codes.OK
                log.loaded(entry)
            if not is_loopback(address.host):
                print_notice(f"other computers can reach {server.address.url}.")
            # Python runs signal handlers in the main thread only: a wait without limit would hold them up on Windows.
            while not ended.wait(_POLL_S if os.name == "nt" else None):
                pass
        except ApiError as error:
            print_notice(error.message)
            return exit_codes.DOES_NOT_FIT if error.code == "does_not_fit" else exit_codes.exit_code(error.code or "")
        finally:
            server.stop()
            log.close()
    return exit_codes.OK


def _loads(server: ApiServer, entry: ModelEntry, ended: CancelToken) -> bool:
    """Load the model of `entry` before requests arrive. Return whether it was loaded before the server ended.

    `ended`: cancelled when the server ends, or is to end.

    Raises:
        ApiError: if the model cannot be loaded.
    """
    loading = server.preload(entry)
    while not ended.cancelled:
        # A wait without limit would hold up signal handlers on Windows.
        with suppress(TimeoutError):
            loading.result(_POLL_S)
            return True
    return False


class Catalogue:
    """The models that `serve` offers. `plan` returns the `LoadSpec` (plan and retries) for one of them.

    The methods read files and query devices, so they block. They may be called in any thread.
    """

    def __init__(self, options: Namespace, preferences: Preferences) -> None:
        self._options, self._preferences = options, preferences
        self._folders = [checked_folder(folder) for folder in options.models]
        self._lock = threading.Lock()
        self._scanned: tuple[ModelEntry, ...] = ()
        self._scanned_s: float | None = None
        self._named: tuple[ModelEntry, ...] = ()

    def named(self) -> tuple[ModelEntry, ...]:
        """Return the models that the command line names, which are loaded at the start.

        Raises:
            EngineError: if one of these models cannot be found.
        """
        found = {}
        for name in self._options.names:
            path = Path(name)
            entry = entry_of_file(path) if path.is_file() else self._by_name(name)
            found[entry.id] = entry
        self._named = tuple(found.values())
        for alias, target in self._preferences.aliases.items():
            if alias in self._options.alias and not any(alias in each.all_names for each in self.entries()):
                raise ArgumentError(f"--alias {alias}: {target} is neither a file nor a model of the library.")
        # Those that only an alias names are loaded when somebody asks for them.
        return tuple(each for each in with_preferences(self._named, self._preferences) if each.id in found)

    def _by_name(self, name: str) -> ModelEntry:
        try:
            return find_entry(name, self._library())
        except ApiError as error:
            raise ArgumentError(f"{name} is not a file. {error.message}") from None

    def entries(self) -> tuple[ModelEntry, ...]:
        """Return the models that clients may request: those of the command line, then those of the library.

        With --only, those of the library are left out. A library model is also left out if a model of the command line
        has the same file or id.
        """
        if self._options.only:
            return with_preferences(self._named, self._preferences)
        paths = {entry.path.resolve() for entry in self._named}
        taken = {entry.id for entry in self._named}
        others = (each for each in self._library() if each.path.resolve() not in paths and each.id not in taken)
        return with_preferences((*self._named, *others), self._preferences)

    def _library(self) -> tuple[ModelEntry, ...]:
        with self._lock:
            now_s = time.monotonic()
            if self._scanned_s is None or now_s - self._scanned_s > _SCAN_S:
                self._scanned = self._scan()
                self._scanned_s = time.monotonic()
            return self._scanned

    def _scan(self) -> tuple[ModelEntry, ...]:
        with closing(LibraryIndex(library_path())) as index:
            # Once: a file that cannot be read must not cost a child process with each list of models.
            census, facts = scan_library(index, self._folders, retries=self._scanned_s is None)
            models = list_models(census.files, facts, index.notes(), {})
            return entries_of_library(models, index)

    def rig(self) -> Rig:
        """Return the devices with their present free memory."""
        options = self._options
        rig = read_rig(options.rig) if options.rig is not None else this_machine()
        return with_margins(options.tunnels.reach(rig), options.margin)

    def plan(self, entry: ModelEntry, rig: Rig) -> LoadSpec:
        """Return the `LoadSpec` (plan and rules for retries) for the model of `entry` on `rig`.

        Its layout is the one that the options choose, or else the saved layout of the model. If there is neither, it is
        an automatic layout.

        Raises:
            EngineError: if the model cannot be loaded.
        """
        options = copy(self._options)
        is_named = any(entry.id == each.id for each in self._named)
        model = read_model(entry.path)
        document = None
        if is_named and options.layout is not None:
            document = read_layout(options.layout, n_layers=model.n_layers)
        elif entry.layout and options.auto is None and options.device is None and not has_hand_layout(options):
            document = parse_layout(entry.layout, source=entry.id, n_layers=model.n_layers)
        if not is_named:
            # Modules are those of the named model: another one may lack them.
            options.place = []
            # So is a draft model. n-grams of a text are for any model that writes text.
            options.draft_device = None
            if options.draft != "ngram" or not drafts_for(model):
                options.draft, options.draft_tokens = "none" if options.draft == "none" else None, None
        if not is_named or options.mmproj is None:
            options.mmproj, options.lora = entry.projector, options.lora if is_named else []
        return spec_for_plan(options, plan_request_on(options, model, rig, document).plan)
