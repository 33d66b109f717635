"""The models of the window as its API server uses them: clients of the server use the same sessions as the chats.

A loaded model is lent to the server: the server sends requests to its session. For any other model the server awaits
`load`, a coroutine of the server's event loop. The load itself runs in the GUI thread, like a load by the Load button.
Neither thread blocks: the coroutine emits a queued signal, and the GUI thread resumes the coroutine when the load has
ended.

If a load needs the memory of idle models, they are unloaded without a question. If a model to unload is answering, the
load waits for the end of the answer. Meanwhile this model is not lent any more, so that further requests for it are
served after the load.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError as FutureCancelledError
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct
from PySide6.QtCore import QObject, Qt, QTimer, Signal

from app.background import Background
from app.load.loader import Loader
from app.models.auto_layouts import AutoLayouts, Find
from app.models.document import LayoutDocument
from app.models.open_model import OpenModel
from app.models.open_models import OpenModels
from app.models.opener import ModelOpener, aside_edit
from app.models.side_files import open_file
from app.notices import Notices
from app.rig.live_rig import LiveRig
from app.serving.offers import Offers
from app.settings import Settings, StoredSideFiles
from engine.api.server.offers import entry_of_model
from engine.api.server.pool import does_not_fit
from engine.api.server.server import ApiServer
from engine.api.wire.errors import ApiError, error_of
from engine.api.wire.names import ModelEntry
from engine.base.errors import CancelledError, EngineError
from engine.base.language import tr
from engine.base.values import replace
from engine.devices.device import Rig
from engine.model.gguf.model_file import ModelFile
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.runtime.session.events import Crashed, Failed, LoadEnding, OutOfMemory
from engine.runtime.session.load_spec import LoadSpec
from engine.runtime.session.status import Phase

_T = TypeVar("_T")


class _LoadRequest(Struct, frozen=True):
    """The server's request to load the model of `entry`.

    `deliver`: callback for the end of the load, called once, in any thread. Its argument is the error, or None if the
    model is loaded and the server can use it.
    """

    entry: ModelEntry
    deliver: Callable[[ApiError | None], None]


class _LoadWithdrawal(Struct, frozen=True):
    """Message from the server: no client waits for the load of `request` any more."""

    request: _LoadRequest


class _KeepAlive(Struct, frozen=True):
    entry: ModelEntry
    keep_alive_s: float


class _Reading(Struct, frozen=True):
    """A call that a thread of the server passes to the GUI thread.

    `read`: the function to call there. `found`: future for its result, on which the server's thread waits.
    """

    read: Callable[[], Any]
    found: Future[Any]


class _Basis(Struct, frozen=True):
    """What the server needs from the window to load a model.

    `stored`: projector, LoRA adapters and draft (speculative decoding) that the settings store for the model.
    `find`: function that finds a layout.
    `file`, `edit`: if the model is open in the window, its file and its edit (layout and settings); else None.
    """

    stored: StoredSideFiles
    find: Find
    file: ModelFile | None
    edit: Edit | None


class ServedModels(QObject):
    """Gives the API server access to the loaded models, and loads other models for it, one at a time.

    `load` and `keep_alive` are called in the server's event loop, `rig` and `plan` in other threads of the server, all
    other methods in the GUI thread.
    """

    lent_changed = Signal()
    """Emitted when the lent models or their context sizes (`contexts`) have changed."""

    _asked = Signal(object)  # _LoadRequest | _LoadWithdrawal | _KeepAlive | _Reading

    def __init__(
        self,
        models: OpenModels,
        opener: ModelOpener,
        loader: Loader,
        document: LayoutDocument,
        auto_layouts: AutoLayouts,
        settings: Settings,
        live: LiveRig,
        offers: Offers,
        background: Background,
        notices: Notices,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._models, self._opener, self._loader, self._document = models, opener, loader, document
        self._auto_layouts, self._settings = auto_layouts, settings
        self._live, self._offers, self._background, self._notices = live, offers, background, notices
        self._readings: list[Future[Any]] = []
        """Futures of calls that threads of the server wait for; guarded by the lock."""
        self._lock = threading.Lock()
        self._server: ApiServer | None = None
        self._entries: dict[OpenModel, ModelEntry] = {}
        """The server's entry for each open model. An entry keeps its name as long as the model has the same file."""
        self._lent: set[OpenModel] = set()
        self._request: _LoadRequest | None = None
        self._preparing: _LoadRequest | None = None
        """The request for which a background thread reads the file or plans the load; None if no thread does.

        It stays here until the thread has ended, even if a newer request has replaced it.
        """
        self._begun: OpenModel | None = None
        """The model that the loader loads for the present request; None before the load was passed to the loader."""
        self._begun_s = 0.0
        """Time in seconds, by the monotonic clock, at which the load of `_begun` began."""
        self._ending_before: LoadEnding | None = None
        """How the previous load of the requested model has ended, to tell it from the end of the new load."""
        self._planned: tuple[OpenModel, Plan] | None = None
        """Model and plan of the requested load, while it waits for the end of answers or of another load; else None."""
        # Queued explicitly: the server's thread emits this signal.
        self._asked.connect(self._on_asked, Qt.ConnectionType.QueuedConnection)
        models.added.connect(self._follow)
        for model in models.all:
            self._follow(model)
        models.changed.connect(self._start_next_step)

    # ------------------------------------------------------------------ in the server's loop

    async def load(self, entry: ModelEntry) -> None:
        """Load the model of `entry`, and wait until the server can send requests to it.

        A load that has not begun is given up if the caller cancels this call.

        Raises:
            ApiError: the model cannot be loaded.
        """
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[None] = loop.create_future()

        def settle(error: ApiError | None) -> None:
            if loaded.done():
                return  # The server was stopped meanwhile.
            if error is None:
                loaded.set_result(None)
            else:
                loaded.set_exception(error)

        def deliver(error: ApiError | None) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(settle, error)

        request = _LoadRequest(entry, deliver)
        self._asked.emit(request)
        try:
            await loaded
        except asyncio.CancelledError:
            self._asked.emit(_LoadWithdrawal(request))
            raise

    def keep_alive(self, entry: ModelEntry, keep_alive_s: float) -> None:
        """Set the idle time that a request asks for: seconds after which the idle model of `entry` is unloaded.

        The call has no effect on models that a person has opened.
        """
        self._asked.emit(_KeepAlive(entry, keep_alive_s))

    # ------------------------------------------------------------------ in threads of the server, for forecasts

    def rig(self) -> Rig:
        """Return the devices with the free memory that they report, which excludes the memory of loaded models.

        Raises:
            EngineError: the server or the window is closing.
        """
        return self._read(self._live.reported)

    def plan(self, entry: ModelEntry, rig: Rig) -> LoadSpec:
        """Return the `LoadSpec` (plan and options) that a request would use to load the model of `entry` on `rig`.

        Nothing is loaded: the server makes forecasts from the plan. The call may read the file and search for a layout,
        so it must not run in the GUI thread.

        Raises:
            EngineError: the model cannot be loaded, or the server or the window is closing.
        """
        basis = self._read(partial(self._basis, entry))
        file, edit = basis.file, basis.edit
        if file is None or edit is None:
            opened = open_file(entry.path, basis.stored)
            file, edit = opened.model, aside_edit(opened, rig, entry.layout, basis.find)
        return LoadSpec(Plan(ModelMemory(file), rig, edit))

    def _basis(self, entry: ModelEntry) -> _Basis:
        """Return what `plan` needs for the model of `entry`: side files, layout finder, open file and its edit.

        Called in the GUI thread, which owns these objects.
        """
        model = self._find(entry)
        file, edit = (None, None) if model is None else (model.file, self._edit_of(model))
        return _Basis(self._settings.side_files(entry.path), self._auto_layouts.finder(), file, edit)

    def _read(self, read: Callable[[], _T]) -> _T:
        """Run `read` in the GUI thread, which owns the objects that it reads; wait for the result and return it."""
        found: Future[_T] = Future()
        with self._lock:
            if self._server is None:
                raise CancelledError("The server is ending.")
            self._readings.append(found)
        self._asked.emit(_Reading(read, found))
        try:
            return found.result()
        except FutureCancelledError:
            raise CancelledError("The server is ending.") from None

    # ------------------------------------------------------------------ lending

    def attach(self, server: ApiServer) -> None:
        """Lend all loaded models to `server`, which has just started."""
        self._server = server
        for model in self._models.all:
            self._name(model)
            self._lend(model)

    def detach(self) -> None:
        """Withdraw all models from the API server because the server is ending, and stop the answers to its clients."""
        with self._lock:
            self._server = None
            readings, self._readings = self._readings, []
        for reading in readings:
            reading.cancel()
        self._lent.clear()
        self.lent_changed.emit()
        self._forget()
        for model in self._models.all:
            model.loading.stop_requests_of_programs()

    @property
    def contexts(self) -> dict[str, int]:
        """Context size in tokens for one request, by the name of each loaded model; the current model first."""
        shown = sorted(self._lent, key=lambda model: (model is not self._models.current, model.number))
        return {self._entries[model].id: model.loading.snapshot.context_size or 0 for model in shown}

    def _follow(self, model: OpenModel) -> None:
        model.status_changed.connect(lambda _status: self._on_status_changed(model))

    def _on_status_changed(self, model: OpenModel) -> None:
        if self._server is None:
            return
        self._name(model)
        self._lend(model)
        if self._request is not None:
            # In the next turn: a load that has waited for memory is not shown as waiting any more when it begins.
            QTimer.singleShot(0, self, self._finish_if_ended)
            QTimer.singleShot(0, self, self._start_next_step)

    def _name(self, model: OpenModel) -> None:
        file = model.file
        known = self._entries.get(model)
        if file is None or (known is not None and known.path == file.paths[0]):
            return
        is_copy = model.key is not None and bool(model.key.copy)
        entry = None if is_copy else self._offers.listed(file.paths[0])
        if entry is None:
            entry = entry_of_model(file)
        if is_copy:
            entry = replace(entry, id=file.name, names=())
        taken = {each.id for other, each in self._entries.items() if other is not model}
        number = 2
        while entry.id in taken:
            entry = replace(entry, id=f"{entry.id.removesuffix(f' ({number - 1})')} ({number})")
            number += 1
        self._entries[model] = entry
        self._offers.set_open(tuple(self._entries.values()))

    def _lend(self, model: OpenModel) -> None:
        server, held = self._server, model.held
        if server is None or model not in self._entries:
            return
        is_ready = model.loading.phase.is_loaded and held is not None and not self._is_leaving(model)
        if is_ready and held is not None and model not in self._lent:
            self._lent.add(model)
            server.lend(self._entries[model], model.loading.bridge.session, held)
            self.lent_changed.emit()
        elif not is_ready and model in self._lent:
            self._lent.discard(model)
            server.take_back(self._entries[model].id)
            self.lent_changed.emit()

    def _is_leaving(self, model: OpenModel) -> bool:
        """Return whether the requested load will unload `model` as soon as the answers of `model` have ended."""
        if self._planned is None or model.held is None:
            return False
        return model.held in self._loader.unloads_for(*self._planned).victims

    # ------------------------------------------------------------------ loading

    def _on_asked(self, asked: _LoadRequest | _LoadWithdrawal | _KeepAlive | _Reading) -> None:
        if isinstance(asked, _Reading):
            self._answer(asked)
            return
        if isinstance(asked, _LoadWithdrawal):
            if asked.request is self._request and self._begun is None:
                # Lends the models again that were taken back for this load.
                self._finish(None)
            return
        if isinstance(asked, _KeepAlive):
            model = self._find(asked.entry)
            # What a person has loaded stays as that person wants it.
            if model is not None and model.is_of_program:
                model.keep_alive(asked.keep_alive_s)
            return
        if self._server is None:
            asked.deliver(ApiError(503, "The server is ending.", code="ending"))
            return
        # The pool has given up an earlier load if it asks for another one. If it is that of the same model, the load
        # goes on for the new request.
        begun = self._begun
        self._forget()
        self._request = asked
        if begun is not None and begun is self._find(asked.entry):
            self._begun = begun
        self._start_next_step()

    def _answer(self, reading: _Reading) -> None:
        with self._lock:
            if reading.found not in self._readings:
                return  # The server has ended meanwhile.
            self._readings.remove(reading.found)
        try:
            reading.found.set_result(reading.read())
        except Exception as error:
            reading.found.set_exception(error)

    def _find(self, entry: ModelEntry) -> OpenModel | None:
        """Return the open model with the name of `entry`, or else with its file; None if there is none.

        If there are several, a loaded model is preferred.
        """
        by_id = [model for model, each in self._entries.items() if each.id == entry.id]
        by_path = [model for model in self._models.all if model.file and model.file.paths[0] == entry.path]
        found = sorted(by_id or by_path, key=lambda model: not model.loading.phase.is_loaded)
        return found[0] if found else None

    def _start_next_step(self) -> None:
        """Start the next step of the requested load: open the file, plan, or load.

        Nothing is started while a step is running, or until another load, or answers that block this one, have ended.

        Called whenever a model has changed.
        """
        request = self._request
        if request is None or request is self._preparing or self._begun is not None:
            return
        if self._planned is not None and self._planned[0].file is not self._planned[1].model:
            self._planned = None  # A person has opened another file in its place.
        model = self._find(request.entry)
        if model is not None and model.loading.phase.is_loaded:
            self._finish(None)
        elif self._models.loading is not None or self._loader.is_waiting:
            return  # One load at a time; its end changes a model.
        elif self._planned is not None:
            self._begin(*self._planned)
        elif model is None:
            self._open(request)
        else:
            self._plan(request, model)

    def _open(self, request: _LoadRequest) -> None:
        entry = request.entry
        idle = [held for held in self._models.held if not held.is_busy]

        def opened(model: OpenModel) -> None:
            # Known under the name of the request from now on.
            self._entries.setdefault(model, entry)
            self._offers.set_open(tuple(self._entries.values()))
            self._end_preparing(request)

        self._preparing = request
        self._opener.open_aside(
            entry.path, entry.layout, self._auto_layouts.finder(), idle, opened, partial(self._refuse, request)
        )

    def _plan(self, request: _LoadRequest, model: OpenModel) -> None:
        file, edit = model.file, self._edit_of(model)
        if file is None or edit is None:
            return  # Another file takes its place just now.
        rig = self._live.rig_without(())

        def plan() -> Plan:
            # Tables of its own: the document goes on with the model's in the GUI thread.
            found = Plan(ModelMemory(file), rig, edit)
            assert found.forecast
            return found

        def planned(plan: Plan) -> None:
            if request is self._request:
                self._planned = (model, plan)
            self._end_preparing(request)

        self._preparing = request
        self._background.run(
            tr("Planning {name}", name=file.name), plan, planned, partial(self._refuse, request), quiet=True
        )

    def _edit_of(self, model: OpenModel) -> Edit | None:
        """Return the edit (layout and settings) that a request uses to load an open model.

        None if the model has no edit yet.
        """
        if model is self._models.current:
            return self._document.edit
        return None if model.edit_state is None else model.edit_state.edit

    def _end_preparing(self, request: _LoadRequest) -> None:
        if request is self._preparing:
            self._preparing = None
        self._start_next_step()

    def _begin(self, model: OpenModel, plan: Plan) -> None:
        request = self._request
        assert request is not None
        obstacle = self._loader.obstacle(plan)
        if obstacle:
            self._finish(ApiError(503, obstacle, code="rule_violation"))
            return
        unloads = self._loader.unloads_for(model, plan)
        # A forecast alone refuses nothing: with nothing else loaded the load is tried, and says what it measured.
        if self._models.held and unloads.still_short:
            self._finish(does_not_fit(request.entry, unloads))
            return
        if any(victim.is_busy for victim in unloads.victims):
            for other in self._models.all:
                self._lend(other)  # Takes back those that are in the way.
            return
        for victim in unloads.victims:
            self._notices.show(
                tr("Unloaded {name}: a program asked for the model {wanted}", name=victim.name, wanted=plan.model.name)
            )
        self._planned, self._begun, self._ending_before = None, model, model.loading.snapshot.ending
        self._begun_s = time.monotonic()
        if model.is_of_program:
            model.keep_alive(self._offers.keep_alive_s(request.entry))
        self._loader.load_unasked(model, plan)
        self._finish_if_ended()

    def _finish_if_ended(self) -> None:
        """Finish the requested load if it has ended: the model is loaded, the load failed, or a person cancelled it."""
        model = self._begun
        if model is None:
            return
        if model.loading.phase.is_loaded:
            self._keep_for_load_time(model)
            self._finish(None)
        elif model.loading.phase is Phase.STOPPED and self._loader.memory_return.waiting is not model:
            ending = model.loading.snapshot.ending
            if isinstance(ending, OutOfMemory | Failed | Crashed) and ending is not self._ending_before:
                self._finish(error_of(ending))
            else:
                self._finish(ApiError(503, "The load was cancelled in the window.", code="cancelled"))

    def _keep_for_load_time(self, model: OpenModel) -> None:
        """Make the idle time of `model` at least as long as its load took, unless somebody has chosen an idle time."""
        assert self._request is not None
        entry = self._request.entry
        # During the load a person may have chosen one in the window.
        if model.is_of_program and model.keep_alive_s == self._offers.keep_alive_s(entry):
            model.keep_alive(self._offers.keep_alive_s(entry, time.monotonic() - self._begun_s))

    def _refuse(self, request: _LoadRequest, error: EngineError) -> None:
        if request is self._preparing:
            self._preparing = None
        # The server may have been stopped meanwhile, and another model be requested since.
        if request is self._request:
            self._finish(ApiError(503, error.summary(), code=error.kind))

    def _finish(self, error: ApiError | None) -> None:
        request = self._request
        self._forget()
        for model in self._models.all:
            self._lend(model)
        if request is not None:
            request.deliver(error)

    def _forget(self) -> None:
        self._request = self._begun = self._planned = None
