"""`python -m engine.runtime.child`: the process that loads llama.cpp.

It reads requests on standard input and writes messages on standard output (`engine.runtime.protocol`). The main thread
calls llama.cpp. Meanwhile a second thread reads standard input, so that a stop request is seen during a native call.
Requests to the loaded model go to `DecodeLoop`; each type has a handler in `engine.runtime.child.handlers`.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import nullcontext
from typing import TYPE_CHECKING

from engine.base.engine_build import engine_version
from engine.runtime.child.load.loaded_context import LoadedContext
from engine.runtime.child.load.model_loader import ModelLoader
from engine.runtime.child.load.probe import probe
from engine.runtime.child.load.warm_up import StageReporter
from engine.runtime.child.native.backends import load_own_backends, load_packs
from engine.runtime.child.native.bindings import Bindings, prepare_environment
from engine.runtime.child.native.devices import list_devices
from engine.runtime.child.native.failures import RequestError, failure
from engine.runtime.child.native.log import EngineLog
from engine.runtime.child.native.rights import give_up_rights, has_rights
from engine.runtime.child.native.stop import StopFlag
from engine.runtime.protocol.heartbeat import WorkHeartbeat
from engine.runtime.protocol.media import MediaCache
from engine.runtime.protocol.messages import Aborting, DeviceMemoryReadings, Failure, Message, PackLoad
from engine.runtime.protocol.pipe import Pipe, Requests, begin_child
from engine.runtime.protocol.requests import (
    AnyRequest,
    CountVocabulary,
    DeviceMemoryQuery,
    Generate,
    ListDevices,
    Load,
    Logits,
    MeasureSpeed,
    MeasureThreads,
    ModelRequest,
    Probe,
    Quantise,
    Quit,
    Serve,
    Stop,
)

if TYPE_CHECKING:
    from engine.runtime.child.generate.decode_loop import DecodeLoop
    from engine.runtime.child.load.vocabulary import VocabularyReader


class ModelChild:
    """The model child: carries out the requests to this process, in its main thread.

    Requests to the loaded model run concurrently, all others one after another. `run` reads the requests from a queue,
    which a reading thread fills.
    """

    def __init__(self, pipe: Pipe, stop: StopFlag, requests: Requests[AnyRequest]) -> None:
        self._pipe = pipe
        self._stop = stop
        self._requests = requests
        self._log = EngineLog()
        self._context: LoadedContext | None = None
        self._loop: DecodeLoop | None = None
        self._vocabulary: VocabularyReader | None = None
        self._engine = Bindings()
        self._engine.on_log(self._log.write)
        self._is_aborting = False
        self._engine.on_abort(self._send_abort)
        load_own_backends(self._engine)
        self._packs: tuple[PackLoad, ...] | None = None
        self._engine.low.llama_backend_init()

    def run(self) -> None:
        """Carry out requests until `Quit`. The first request must already have been read."""
        request = self._requests.next()
        # A request that only a loaded model can answer fails. It does not tell what rights the child needs.
        while not has_rights(request):
            if not self._take(request) or not self._requests.read_first():
                return
            request = self._requests.next()
        self._prepare(request)
        # After giving up rights: Landlock does not bind threads that exist already.
        self._requests.start_reading()
        while True:
            # Tokenising a long text, a batch of a prompt, or one token of a model that is paged in from disk may take
            # longer than the parent's stall limit (60 s). A load has a heartbeat of its own.
            loop = self._loop
            with nullcontext() if loop is None else WorkHeartbeat(loop.send_progress, may_wait=loop.may_wait):
                if not self._take(request) or not self._run_loop():
                    return
            request = self._requests.next()

    def _send_abort(self, text: str) -> None:
        """Send the reason why the process is about to abort, with the device's free memory if a device refused an
        allocation.

        Called by ggml in the thread that aborts. `text`: the failed assertion.
        """
        refused, failed, devices, again = self._log.refused, self._log.failed, self._log.devices, self._is_aborting
        self._is_aborting = True
        if failed is not None:
            # ggml's text names neither: "ggml-cuda.cu:109: CUDA error".
            name = failed.device if devices is None else devices.id_of_name(failed.device)
            text = f"{text} on {name}: {failed.text}"
        # The driver is asked once: if that fails, ggml aborts again, in here.
        if refused is None or devices is None or again:
            self._pipe.send_abort_text(text)
            return
        device = devices.id_of_name(refused.device)
        free_bytes = devices.free_bytes(device)
        aborting = Aborting(text=text, device=device, free_bytes=free_bytes, requested_bytes=refused.requested_bytes)
        self._pipe.send_aborting(aborting)

    def _run_loop(self) -> bool:
        """Run the decode loop until no request is left; return False after `Quit`.

        New requests are read between batches.
        """
        while self._loop is not None and self._loop.busy:
            if not all(map(self._take, self._requests.arrived())):
                return False
            if self._loop is not None:
                self._loop.step()
        return True

    def _take(self, request: AnyRequest) -> bool:
        """Carry out or begin a request; return False for `Quit`."""
        match request:
            case Quit():
                return False
            case Stop():
                if self._loop is not None:
                    self._loop.stop(request.request)
                self._stop.acknowledge(request.request)
            case ModelRequest() if self._loop is not None:
                self._loop.take(request)
            case _:
                self._pipe.send(self._handle(request))
                if self._vocabulary is not None:
                    self._vocabulary.rest()
        return True

    def _handle(self, request: AnyRequest) -> Message:
        """Carry out a request that does not go to the decode loop, and return its final message."""
        try:
            self._prepare(request)
            return self._answer(request)
        except RequestError as end:
            return end.message

    def _prepare(self, request: AnyRequest) -> None:
        """Load the engine packs (further ggml backends), and drop the access rights that `request` does not need."""
        # Only with the first request, because a waiting child (`SpareChild`) must not touch a device. Before the rights
        # are given up, because packs are files that the child may not read afterwards.
        # A vocabulary needs no device.
        if self._packs is None and not isinstance(request, CountVocabulary):
            self._packs = load_packs(self._engine)
        give_up_rights(self._engine, request)

    def free(self) -> None:
        """Stop all requests and free the model."""
        if self._loop is not None:
            self._loop.stop(None)
        context, self._context, self._loop = self._context, None, None
        if context is not None:
            context.free()

    def _answer(self, request: AnyRequest) -> Message:
        # Modules of rare requests are imported here: most of the time of a probe is imports.
        match request:
            case ListDevices():
                return list_devices(self._engine, request, self._packs or ())
            case Probe():
                return probe(self._engine, self._log, request, self._pipe.send)
            case Load():
                return self._load(request)
            case ModelRequest():
                raise RequestError(failure("internal", "No model is loaded.").message_for(request.id))
            case Logits():
                from engine.runtime.child.generate.sampling import logit_digest

                if self._loop is not None:
                    self._loop.lose_memory()
                with self._stop.computing(()):
                    return logit_digest(self._loaded(), request)
            case DeviceMemoryQuery():
                return DeviceMemoryReadings(readings=self._loaded().devices.memory())
            case CountVocabulary():
                return self._vocabulary_reader().count(request)
            case Quantise():
                from engine.runtime.child.load.quantise import quantise

                return quantise(self._engine, request)
            case MeasureSpeed() | MeasureThreads():
                from engine.runtime.child.load.speed import measure

                return measure(self._engine, request)
            case Serve():
                from engine.runtime.child.rpc_server import serve

                return serve(self._engine, request)
            case _:
                raise failure("internal", f"{type(request).__name__} is not a valid request now.")

    def _load(self, request: Load) -> Message:
        self.free()
        with StageReporter(self._pipe.send) as reporter:
            loader = ModelLoader(self._engine, self._log, self._stop, reporter, request)
            self._context, message = loader.run()
        from engine.runtime.child.generate.decode_loop import DecodeLoop

        self._loop = DecodeLoop(self._context, self._stop, self._pipe.send_all)
        return message

    def _vocabulary_reader(self) -> VocabularyReader:
        from engine.runtime.child.load.vocabulary import VocabularyReader

        if self._vocabulary is None:
            self._vocabulary = VocabularyReader(self._engine, self._log)
        return self._vocabulary

    def _loaded(self) -> LoadedContext:
        if self._context is None:
            raise failure("internal", "No model is loaded.")
        return self._context


def main() -> None:
    """Run this process as the model child until `Quit` or the end of input."""
    pipe, stop = begin_child(engine_version()), StopFlag()
    prepare_environment()
    requests: Requests[AnyRequest] = Requests(AnyRequest, pipe, _RequestReceiver(stop).receive)
    try:
        # llama.cpp is loaded before the first request is read, so that a waiting child (`SpareChild`) has it ready.
        worker = ModelChild(pipe, stop, requests)
        if requests.read_first():
            worker.run()
        worker.free()
    except Exception as error:
        traceback.print_exc()
        pipe.send(
            Failure(kind="internal", message=f"Internal error in the engine process: {type(error).__name__}: {error}.")
        )
        sys.stderr.flush()
        os._exit(1)
    sys.stderr.flush()
    # No shutdown of the interpreter: native threads and the reading thread still run.
    os._exit(0)


class _RequestReceiver:
    """Handles each request as soon as it arrives, even while the main thread is in a native call.

    It runs in the thread that reads standard input.
    """

    def __init__(self, stop: StopFlag) -> None:
        self._stop = stop
        self._media = MediaCache()

    def receive(self, request: AnyRequest) -> AnyRequest:
        """Prepare a request for the queue and return it.

        A `Stop` sets the stop flag at once. A `Generate` gets from the cache the data of images and sounds that the
        parent has sent before.
        """
        match request:
            case Stop():
                self._stop.request(request.request)
            case Quit():
                self._stop.quit()
            case Load():
                self._stop.begin_load()
            case Generate():
                return self._media.complete(request)
        return request


if __name__ == "__main__":
    main()
