"""`python -m engine.runtime.child`: the process that loads llama.cpp.

It reads requests on standard input and writes messages on standard output.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import TYPE_CHECKING

from engine.base.engine_build import engine_version
from engine.runtime.child.load.loaded_context import LoadedContext
from engine.runtime.child.load.model_loader import ModelLoader
from engine.runtime.child.load.probe import probe
from engine.runtime.child.load.warm_up import StageReporter
from engine.runtime.child.native.backends import load_own_backends, load_packs
from engine.runtime.child.native.bindings import Bindings, prepare_environment
from engine.runtime.child.native.devices import list_devices
from engine.runtime.child.native.failures import EndOfRequest, failure
from engine.runtime.child.native.log import EngineLog
from engine.runtime.child.native.rights import give_up_rights
from engine.runtime.child.native.stop import StopRequest
from engine.runtime.protocol.effort import WorkTicks
from engine.runtime.protocol.media import MediaCache
from engine.runtime.protocol.messages import (
    AnyRequest,
    DeviceMemoryQuery,
    DeviceMemoryReadings,
    Failure,
    Generate,
    ListDevices,
    Load,
    Logits,
    MeasureSpeed,
    Message,
    ModelRequest,
    PackLoad,
    Probe,
    Quantise,
    Quit,
    Serve,
    Stop,
)
from engine.runtime.protocol.pipe import Pipe, Requests, prepare_process

if TYPE_CHECKING:
    from engine.runtime.child.generate.decode_loop import DecodeLoop


class Worker:
    """Answers requests: those on a loaded model beside each other, all else one after another."""

    def __init__(self, pipe: Pipe, stop: StopRequest, requests: Requests[AnyRequest]) -> None:
        self._pipe = pipe
        self._stop = stop
        self._requests = requests
        self._log = EngineLog()
        self._context: LoadedContext | None = None
        self._loop: DecodeLoop | None = None
        self._engine = Bindings()
        self._engine.on_log(self._log.write)
        self._engine.on_abort(pipe.send_last_word)
        load_own_backends(self._engine)
        self._packs: tuple[PackLoad, ...] | None = None
        self._engine.low.llama_backend_init()

    def run(self) -> None:
        """Do what is asked until `Quit`. The first request has been read."""
        request = self._requests.next()
        if not isinstance(request, Quit | Stop):
            self._prepare(request)
        # Not before the rights are given up: a thread keeps those that it started with.
        self._requests.start_reading()
        while self._take(request):
            if self._loop is not None and self._loop.busy:
                # a batch of a prompt, or a token of a model that is swapped in, may take longer than a stall timeout
                with WorkTicks(self._loop.tell_reading):
                    if not self._run_loop():
                        return
            request = self._requests.next()

    def _run_loop(self) -> bool:
        """Work on the requests that are under way, and take new ones; False when it is over."""
        while self._loop is not None and self._loop.busy:
            if not all(map(self._take, self._requests.arrived())):
                return False
            if self._loop is not None:
                self._loop.step()
        return True

    def _take(self, request: AnyRequest) -> bool:
        """Do what is asked, or begin to; False for the wish to end."""
        match request:
            case Quit():
                return False
            case Stop():
                if self._loop is not None:
                    self._loop.stop(request.request)
                self._stop.taken(request.request)
            case ModelRequest() if self._loop is not None:
                self._loop.take(request)
            case _:
                self._pipe.send(self._handle(request))
        return True

    def _handle(self, request: AnyRequest) -> Message:
        """Do what is asked and return the last message about it."""
        try:
            self._prepare(request)
            return self._answer(request)
        except EndOfRequest as end:
            return end.message

    def _prepare(self, request: AnyRequest) -> None:
        """Load packs and give up the rights that `request` does not need."""
        # Not before something is asked: a child in waiting touches no device. Not later: a pack lies where the child
        # cannot look any more.
        if self._packs is None:
            self._packs = load_packs(self._engine)
        give_up_rights(self._engine, request)

    def free(self) -> None:
        """Give the model's memory back."""
        if self._loop is not None:
            self._loop.stop(None)
        context, self._context, self._loop = self._context, None, None
        if context is not None:
            context.free()

    def _answer(self, request: AnyRequest) -> Message:
        # what only some children do is imported where they do it: a probe is over in little more than its imports
        match request:
            case ListDevices():
                return list_devices(self._engine, request.endpoints, request.routes, self._packs or ())
            case Probe():
                return probe(self._engine, self._log, request)
            case Load():
                return self._load(request)
            case ModelRequest():
                raise EndOfRequest(failure("internal", "No model is loaded.").word_of(request.id))
            case Logits():
                from engine.runtime.child.generate.sampling import logit_digest

                if self._loop is not None:
                    self._loop.lose_memory()
                with self._stop.computing(()):
                    return logit_digest(self._loaded(), request)
            case DeviceMemoryQuery():
                return DeviceMemoryReadings(readings=self._loaded().devices.memory())
            case Quantise():
                from engine.runtime.child.load.quantise import quantise

                return quantise(self._engine, request)
            case MeasureSpeed():
                from engine.runtime.child.load.speed import measure_speed

                return measure_speed(self._engine, request)
            case Serve():
                from engine.runtime.child.serve import serve

                return serve(self._engine, request)
            case _:
                raise failure("internal", f"{type(request).__name__} is no request for this moment.")

    def _load(self, request: Load) -> Message:
        self.free()
        with StageReporter(self._pipe.send) as reporter:
            loader = ModelLoader(self._engine, self._log, self._stop, reporter, request)
            self._context, message = loader.run()
        from engine.runtime.child.generate.decode_loop import DecodeLoop

        self._loop = DecodeLoop(self._context, self._stop, self._pipe.send_all)
        return message

    def _loaded(self) -> LoadedContext:
        if self._context is None:
            raise failure("internal", "No model is loaded.")
        return self._context


def main() -> None:
    """Run until `Quit` or the end of input."""
    prepare_process()
    pipe, stop = Pipe(), StopRequest()
    pipe.greet(engine_version())
    prepare_environment()
    requests: Requests[AnyRequest] = Requests(AnyRequest, pipe, _Noted(stop).note)
    try:
        # The engine is loaded before anything is asked: a child may wait for its first request.
        worker = Worker(pipe, stop, requests)
        if requests.read_first():
            worker.run()
        worker.free()
    except Exception as error:
        traceback.print_exc()
        pipe.send(
            Failure(kind="internal", message=f"The worker met a bug of its own: {type(error).__name__}: {error}.")
        )
        sys.stderr.flush()
        os._exit(1)
    sys.stderr.flush()
    # no interpreter shutdown: native threads and the reader are still there
    os._exit(0)


class _Noted:
    """What is to be done with a request when it is read, whatever native code is doing."""

    def __init__(self, stop: StopRequest) -> None:
        self._stop = stop
        self._media = MediaCache()

    def note(self, request: AnyRequest) -> AnyRequest:
        """Have a stop seen at once; return the request with the images and sounds that came before."""
        match request:
            case Stop():
                self._stop.ask(request.request)
            case Quit():
                self._stop.quit()
            case Load():
                self._stop.begin_load()
            case Generate():
                return self._media.complete(request)
        return request


if __name__ == "__main__":
    main()
