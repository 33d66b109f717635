"""The pool of models that a server loads for requests, one load at a time, in the order of the requests.

The pool runs in the server's event loop, and sessions report to it there. Slow work (plans, device discovery, the end
of a child process) runs in threads. A model that is answering is never unloaded. If a load needs the memory of such a
model, the load waits until the answers have ended. Later requests for that model wait until the load has ended. So two
models that do not fit together are used alternately.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import msgspec

from engine.api.server.pool_functions import Holdings, PoolFunctions
from engine.api.server.pooled_model import LoadedModel, PooledModel
from engine.api.wire.api_request import Profile
from engine.api.wire.errors import ApiError, error_of
from engine.api.wire.names import ModelEntry, find_entry
from engine.base.errors import EngineError, RuleViolationError
from engine.base.texts import escape
from engine.base.units import format_bytes
from engine.base.values import replace
from engine.devices.device import ComputingNeed, Rig
from engine.model.gguf.model_file import identify
from engine.planning.fit.loaded_models import (
    UNTIL_UNLOADED_S,
    HeldModel,
    expired,
    held_bytes,
    next_expiry_s,
    rig_after_unload,
)
from engine.planning.fit.unload_plan import UnloadPlan, plan_unloads
from engine.planning.layout.layout_file import encode_layout
from engine.planning.plan.preview import LoadedLayout
from engine.runtime.probing.probe import ProbeCache
from engine.runtime.session.driver import SessionUpdate
from engine.runtime.session.events import Crashed, Failed, Loaded, LoadEnding, OutOfMemory
from engine.runtime.session.load_spec import LoadSpec
from engine.runtime.session.session import ModelSession
from engine.runtime.session.snapshot import Snapshot

_log = logging.getLogger("layerdeck.server")

MAX_WAITING = 64
"""Largest number of requests that wait until their models are loaded; further requests are refused."""
RETRY = {"Retry-After": "5"}
_END_POLL_S = 0.1


class ModelPool:
    """The models of a server: loads them for requests, and unloads idle ones.

    Its methods are called in the server's event loop only.

    `keep_alive_s`: idle time in seconds after which a model is unloaded; None: `default_keep_alive_s`.
    `pinned`: ids of models with another idle time, such as models that the command line names.
    `pinned_s`: their idle time in seconds; by default they stay loaded while idle.
    """

    def __init__(
        self,
        functions: PoolFunctions,
        *,
        keep_alive_s: float | None = None,
        pinned_s: float = UNTIL_UNLOADED_S,
        pinned: Sequence[str] = (),
    ) -> None:
        self._functions, self._keep_alive_s = functions, keep_alive_s
        self._probes = ProbeCache()
        self._pinned_s, self._pinned = pinned_s, frozenset(pinned)
        self._models: dict[str, PooledModel] = {}
        self._wanted: list[PooledModel] = []
        """Models that wait for their load, in the order of the requests."""
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._loading: PooledModel | None = None
        self._last_used = ""
        self._offered_ids: set[str] | None = None
        """Ids of all offered models at the last call of `entries`; None before the first call."""
        self._is_closed = False
        self._closing: set[asyncio.Future[None]] = set()

    # ------------------------------------------------------------------ from the beginning to the end

    def start(self) -> None:
        """Start the task that loads and unloads models. Call it in the event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Unload the models that the pool has loaded, and refuse the requests that wait.

        A second call only waits until everything is unloaded.
        """
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        for model in self._models.values():
            self._refuse(model, _ending())
        sessions = [
            model.session for model in self._models.values() if model.session is not None and model.lent is None
        ]
        await asyncio.gather(*self._closing, *(asyncio.to_thread(session.close) for session in sessions))

    async def preload(self, entry: ModelEntry) -> None:
        """Load a model before the first request for it.

        Raises:
            ApiError: the model cannot be loaded.
        """
        async with self._lease(entry, None, answers=False):
            pass

    # ------------------------------------------------------------------ models of others

    def lend(self, entry: ModelEntry, session: ModelSession, held: HeldModel) -> None:
        """Answer requests with a model that the caller has loaded. Only the caller unloads this model.

        Call it in the event loop. Call it again after each load of this session, to admit the requests that waited for
        it. The call has no effect if the pool itself has loaded this model.

        `held`: the memory that the model holds.
        """
        model = self._models.setdefault(entry.id, PooledModel(entry, UNTIL_UNLOADED_S))
        if model.session is not None and model.lent is None:
            return
        model.entry, model.session, model.lent = entry, session, held
        if model.is_ready:
            self._admit(model)
        self._changed.set()

    def take_back(self, id: str) -> None:
        """Undo `lend`: the pool no longer uses the caller's session. Call it in the event loop.

        If requests wait for the model, the pool then loads it itself.
        """
        model = self._models.get(id)
        if model is None or model.lent is None:
            return
        model.session = model.lent = None
        if model.waiting and model not in self._wanted:
            self._wanted.append(model)
        self._changed.set()

    # ------------------------------------------------------------------ what requests ask for

    @asynccontextmanager
    async def use(self, name: str, keep_alive_s: float | None = None) -> AsyncIterator[LoadedModel]:
        """Provide the model with this name for one request; load the model first if necessary.

        An empty name means the model that was used last, else the only model that exists.
        `keep_alive_s`: new idle time of the model in seconds; None: unchanged.

        Raises:
            ApiError: no model has this name, or it cannot be loaded.
        """
        entry = await self.entry(name)
        async with self._lease(entry, keep_alive_s) as model:
            yield model

    async def entries(self) -> tuple[ModelEntry, ...]:
        """Return the models that requests may name: those that the server offers, and those passed to `lend`."""
        offered = tuple(await asyncio.to_thread(self._functions.entries))
        ids = self._offered_ids = {entry.id for entry in offered}
        lent = (model.entry for model in self._models.values() if model.lent is not None and model.entry.id not in ids)
        return (*offered, *lent)

    async def entry(self, name: str) -> ModelEntry:
        """Return the entry of the model that has this name, without loading the model.

        An empty name means the model that was used last, else the only model that exists.

        Raises:
            ApiError: no model, or more than one, has this name; or the name is empty and there is not exactly one
                model.
        """
        known = [model.entry for model in self._models.values() if model.session is not None]
        if not name:
            last = self._models.get(self._last_used)
            if last is not None:
                return last.entry
            entries = known or await self.entries()
            if len(entries) == 1:
                return entries[0]
            raise ApiError(
                400, "The request names no model; name one of those that GET /v1/models lists.", param="model"
            )
        # What is loaded comes first: most requests mean it, and need no look at the library.
        called = [entry for entry in known if name in entry.all_names]
        # An id comes before another name of what is loaded.
        if len(called) == 1 and (called[0].id == name or self._has_no_id(name)):
            return called[0]
        return find_entry(name, await self.entries())

    def _has_no_id(self, name: str) -> bool:
        return self._offered_ids is not None and name not in self._offered_ids

    @asynccontextmanager
    async def _lease(
        self, entry: ModelEntry, keep_alive_s: float | None, *, answers: bool = True
    ) -> AsyncIterator[LoadedModel]:
        model = self._models.get(entry.id)
        if model is None:
            default_s = self._pinned_s if entry.id in self._pinned else self._keep_alive_s
            default_s = default_s if entry.keep_alive_s is None else entry.keep_alive_s
            model = self._models[entry.id] = PooledModel(entry, default_s)
        elif model.session is None:
            # The library may have changed since it was unloaded.
            model.entry = entry
        await self._enter(model)
        if keep_alive_s is not None:
            model.keep_alive_s = keep_alive_s
            if model.lent is not None:
                self._functions.keep_alive(model.entry, keep_alive_s)
        try:
            loaded = model.snapshot.loaded
            # The model may be taken back or lost between the turn that let the request in and this one.
            if model.session is None or loaded is None:
                raise _lost(entry)
            self._last_used = entry.id
            yield LoadedModel(entry, model.session, Profile(loaded.spec.plan.model), loaded.n_ctx_seq)
        finally:
            self._leave(model, answered=answers)

    async def _enter(self, model: PooledModel) -> None:
        """Wait until the model is loaded, and count the caller's request as one that the model is answering."""
        if self._is_closed:
            raise _ending()
        if model.is_ready:
            self._hold(model)
            return
        if sum(len(each.waiting) for each in self._models.values()) >= MAX_WAITING:
            raise ApiError(503, "Too many requests wait for models to be loaded.", code="queue_full", headers=RETRY)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        model.waiting.append(future)
        if model not in self._wanted and model is not self._loading:
            self._wanted.append(model)
        self._changed.set()
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._leave(model, answered=False)
            elif future in model.waiting:
                model.waiting.remove(future)
                # A load that waits for room is not begun for nobody.
                self._changed.set()
            raise

    def _hold(self, model: PooledModel) -> None:
        model.users += 1
        if model.held is not None:
            model.held = model.held.busy()

    def _leave(self, model: PooledModel, *, answered: bool) -> None:
        model.users -= 1
        if not model.users and model.held is not None:
            held = replace(model.held, keep_alive_s=model.idle_time_s)
            model.held = held.idle(time.monotonic(), answered=answered)
        self._changed.set()

    def _admit(self, model: PooledModel) -> None:
        """Resume all requests that wait for this model, which is loaded now."""
        for future in model.waiting:
            if not future.done():
                # Counted here, since the waiting task runs later: the model must not be unloaded in between.
                self._hold(model)
                future.set_result(None)
        model.waiting.clear()

    def _refuse(self, model: PooledModel, error: ApiError) -> None:
        for future in model.waiting:
            if not future.done():
                future.set_exception(error)
        model.waiting.clear()

    # ------------------------------------------------------------------ loading and unloading

    async def _run(self) -> None:
        while True:
            await self._unload_idle()
            if self._wanted:
                model = self._wanted.pop(0)
                if not model.waiting:
                    continue  # Its clients have gone away.
                self._loading = model
                try:
                    await self._load(model)
                except ApiError as error:
                    self._refuse(model, error)
                except EngineError as error:
                    self._refuse(model, _refusal(error))
                except Exception:
                    _log.exception("a load failed")
                    self._refuse(model, ApiError(500, "A bug in Layerdeck; the log says more.", code="internal"))
                finally:
                    self._loading = None
                    for each in self._models.values():
                        each.is_leaving = False
                        if each.is_ready:
                            # Its memory was not needed after all, or it came back meanwhile.
                            self._admit(each)
                continue
            await self._wait(next_expiry_s(self._held()))

    async def _wait(self, until_s: float | None) -> None:
        """Wait until the pool changes, or until the monotonic clock reaches `until_s`; None: without a limit."""
        # No await lies between the caller's look at the pool and this line, so no change is missed.
        self._changed.clear()
        seconds = None if until_s is None else max(0.0, until_s - time.monotonic())
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    def _held(self, but: PooledModel | None = None) -> list[HeldModel]:
        return [each.held for each in self._models.values() if each.held is not None and each is not but]

    async def _unload_idle(self) -> None:
        over = {held.key for held in expired(self._held(), time.monotonic())}
        for model in list(self._models.values()):
            if model.held is not None and model.held.key in over and not model.users:
                await self._unload(model)

    async def _unload(self, model: PooledModel) -> None:
        """End the model's child process; return when its memory is free."""
        session, model.session, model.held = model.session, None, None
        if session is not None:
            # `close` of the pool may end this task while the child ends; it then waits for the child.
            closing = asyncio.ensure_future(asyncio.to_thread(session.close))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            await asyncio.shield(closing)
            # `close` waits some seconds, but the kernel takes minutes to free the memory of a large model.
            while session.snapshot.holds_child:
                await asyncio.sleep(_END_POLL_S)

    async def _load(self, model: PooledModel) -> None:
        """Load a model, after unloading others if necessary, and admit the requests that wait for it.

        Raises:
            ApiError, EngineError: the model cannot be loaded.
        """
        if model.snapshot.loaded is not None:
            self._admit(model)
            return
        if model.lent is not None:
            return  # Its owner moves it to another layout; `lend` or `take_back` follows.
        if self._functions.load is not None:
            await self._load_outside(model, self._functions.load(model.entry))
            return
        await self._unload(model)  # of a session whose model was lost
        spec = await self._make_room(model)
        if spec is None:
            return
        session = ModelSession(
            partial(self._on_update, asyncio.get_running_loop(), model),
            # Shared by all sessions, so that a model that comes back is known.
            cache=self._probes,
            holders=self._functions.holders,
        )
        model.session = session
        ended: asyncio.Future[LoadEnding] = asyncio.get_running_loop().create_future()
        model.ended = ended
        session.load(spec)
        try:
            ending = await ended
        except asyncio.CancelledError:
            await asyncio.to_thread(session.close)
            raise
        if not isinstance(ending, Loaded):
            await self._unload(model)
            raise error_of(ending)
        model.load_s = sum(ending.seconds.values())
        self._note_held(model)
        self._admit(model)

    async def _load_outside(self, model: PooledModel, load: Awaitable[None]) -> None:
        """Await `load` (see `PoolFunctions.load`), which loads a model outside the pool.

        If no request waits for the model any more, `load` is cancelled.

        Raises:
            ApiError: the model cannot be loaded.
        """
        loading = asyncio.ensure_future(load)
        loading.add_done_callback(lambda _loading: self._changed.set())
        try:
            while model.waiting and not loading.done():
                await self._wait(None)
        finally:
            loading.cancel()
        if loading.done():
            loading.result()
        if model.waiting and model.lent is None and model not in self._wanted:
            raise _lost(model.entry)

    def _note_held(self, model: PooledModel) -> None:
        info = model.snapshot.loaded
        if info is None:
            return  # Lost a moment later; the next request loads it again.
        plan = info.spec.plan
        loaded = LoadedLayout(plan.edit, info.measured, info.forecast, info.context, info.flash_attention)
        key = identify(plan.model.paths)
        held = HeldModel(key, model.entry.id, keep_alive_s=model.idle_time_s)
        held = held.holding(held_bytes(loaded), frozenset(plan.used_endpoints))
        model.held = held.idle(time.monotonic(), answered=False)

    async def _make_room(self, model: PooledModel) -> LoadSpec | None:
        """Unload the models whose memory a load needs, and return the `LoadSpec` of that load.

        The load is planned as if all idle models were unloaded. If a model that must be unloaded is answering, wait
        until its answers have ended. Return None, and unload nothing, if no request waits for the load any more.

        Raises:
            ApiError: the model does not fit, even if all others are unloaded.
        """
        while True:
            # Asked anew in each round: answers that were waited for may have taken minutes.
            rig = await asyncio.to_thread(self._functions.rig)
            others = self.holdings(model)
            spec, unloads = await asyncio.to_thread(self._planned, model.entry, rig, others)
            if not model.waiting:
                return None
            # A forecast alone refuses nothing: with nothing else loaded the load is tried, and says what it measured.
            if others.own and unloads.still_short:
                raise does_not_fit(model.entry, unloads)
            victims = {held.key for held in unloads.victims}
            leaving = [each for each in self._models.values() if each.held is not None and each.held.key in victims]
            busy = [each for each in leaving if each.users]
            # All of them, before the first wait: a request must not enter a model that is about to be unloaded.
            for each in leaving:
                each.is_leaving = True
            if not busy:
                for each in leaving:
                    await self._unload(each)
                return spec
            while any(each.users for each in busy) and model.waiting:
                await self._wait(None)

    def _planned(self, entry: ModelEntry, rig: Rig, others: Holdings) -> tuple[LoadSpec, UnloadPlan]:
        """Plan the load of a model. Return its `LoadSpec`, and the models of the pool that must be unloaded first.

        `others`: memory of all other loaded models, including those that the pool has not loaded.
        """
        idle = [held for held in others.own if not held.is_busy]
        spec = self._functions.plan(entry, rig_after_unload(rig, others.all, idle))
        plan = spec.plan
        if plan.violations:
            raise RuleViolationError(tuple((each.rule, each.message, each.remedy) for each in plan.violations))
        return spec, plan_unloads(plan.forecast, others.own, lambda leaving: rig_after_unload(rig, others.all, leaving))

    def _on_update(self, loop: asyncio.AbstractEventLoop, model: PooledModel, update: SessionUpdate) -> None:
        """Handle a session's report: an ended load, a lost model, or a `ComputingNeed` (memory for computing).

        Called in the session's thread.
        """
        if isinstance(update, ComputingNeed):
            self._functions.learn(update)
            return
        with suppress(RuntimeError):  # the loop has ended
            if isinstance(update, LoadEnding):
                loop.call_soon_threadsafe(self._on_ending, model, update)
            elif isinstance(update, Snapshot) and update.loaded is None:
                loop.call_soon_threadsafe(self._on_unloaded, model)

    def _on_ending(self, model: PooledModel, ending: LoadEnding) -> None:
        if model.ended is not None and not model.ended.done():
            model.ended.set_result(ending)
        elif isinstance(ending, OutOfMemory | Failed | Crashed):
            kind = "out_of_memory" if isinstance(ending, OutOfMemory) else ending.kind
            _log.warning("%s was lost: %s", escape(model.entry.id), kind)

    def _on_unloaded(self, model: PooledModel) -> None:
        """Stop counting the memory of a model whose child process was lost. The next request loads the model again."""
        if model.snapshot.loaded is None and model.held is not None:
            model.held = None
            self._changed.set()

    # ------------------------------------------------------------------ what is told

    @property
    def functions(self) -> PoolFunctions:
        """The functions that the pool calls to find, plan and load models."""
        return self._functions

    @property
    def is_busy(self) -> bool:
        """Whether a model answers or is being loaded."""
        return self._loading is not None or any(model.users for model in self._models.values())

    def holdings(self, but: PooledModel | None = None) -> Holdings:
        """Return the memory of all loaded models except the model `but`.

        `Holdings.own` has the models that a load may unload, `Holdings.lent` those that it must not unload. Models that
        the caller has loaded (`lend`) are in `Holdings.lent`. If `PoolFunctions.load` is set, they are in
        `Holdings.own`, because the function `load` can unload them.
        """
        lent = tuple(each.lent for each in self._models.values() if each.lent is not None and each is not but)
        own = tuple(self._held(but))
        return Holdings(own, lent) if self._functions.load is None else Holdings((*own, *lent), ())

    def states(self) -> dict[str, dict[str, Any]]:
        """Return the state of each loaded or requested model as JSON fields, by the model's id."""
        return {model.entry.id: self._state(model) for model in self._models.values()}

    def _state(self, model: PooledModel) -> dict[str, Any]:
        info = model.snapshot.loaded
        is_loading = model is self._loading or model in self._wanted
        state: dict[str, Any] = {
            "state": "loaded" if info is not None else "loading" if is_loading else "unloaded",
            "requests": model.users,
            "lent": model.lent is not None,
            "waiting": len(model.waiting),
        }
        if info is not None:
            plan = info.spec.plan
            held = model.held
            expires_s = None if held is None or held.expires_s == UNTIL_UNLOADED_S else held.expires_s
            state |= {
                "n_ctx": info.n_ctx,
                "n_ctx_seq": info.n_ctx_seq,
                "parallel": info.slots,
                "layout": msgspec.Raw(encode_layout(plan.edit.as_file(plan.model.name))),
                "devices": info.measured,
                "forecast": info.forecast,
                "unload_in_s": None if expires_s is None else max(0.0, expires_s - time.monotonic()),
            }
        elif model.snapshot.stage is not None:
            state["stage"] = model.snapshot.stage
        return state


def _ending() -> ApiError:
    return ApiError(503, "The server is shutting down.", code="ending")


def _lost(entry: ModelEntry) -> ApiError:
    return ApiError(503, f"{entry.id} is not loaded any more.", code="model_lost", headers=RETRY)


def _refusal(error: EngineError) -> ApiError:
    fields = {key: value for key, value in error.fields().items() if key not in ("path",)}
    return ApiError(503, error.summary(), code=error.kind, fields=fields)


def does_not_fit(entry: ModelEntry, unloads: UnloadPlan) -> ApiError:
    """Return the error for a model that does not fit, even if all others are unloaded.

    `unloads`: the models that would have to be unloaded, and the memory that is still missing after that.
    """
    device, missing_bytes = unloads.still_short[0]
    names = ", ".join(f"{format_bytes(size_bytes)} on {name}" for name, size_bytes in unloads.still_short)
    return ApiError(
        503,
        f"{entry.id} does not fit: {names} missing.",
        type="out_of_memory_error",
        code="does_not_fit",
        fields={
            "device": device,
            "missing_bytes": missing_bytes,
            "devices": [{"device": name, "missing_bytes": size_bytes} for name, size_bytes in unloads.still_short],
        },
    )
