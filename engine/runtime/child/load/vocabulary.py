"""Counts tokens with the vocabulary of a model that is not loaded (`vocab_only`).

With this option llama.cpp reads only the file's header, and needs no weights, context or device. After some time
without a request the process exits, because a large vocabulary takes some hundred MiB.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from engine.base.values import replace
from engine.planning.layout.engine_parameters import EngineParameters
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.child.handlers.texts import count_tokens
from engine.runtime.child.load.loaded_context import LoadedContext
from engine.runtime.child.load.model_loader import ModelParameters, check_file
from engine.runtime.child.native.bindings import Bindings
from engine.runtime.child.native.devices import resolve_devices
from engine.runtime.child.native.failures import RequestError
from engine.runtime.child.native.log import EngineLog, model_failure
from engine.runtime.protocol.messages import Counted
from engine.runtime.protocol.requests import CountVocabulary

_NO_DEVICES = EngineParameters(n_gpu_layers=0, devices=(), tensor_split=(), split_mode="none")


class LoadedVocabulary(LoadedContext):
    """A loaded vocabulary without the model's weights. There is no context, so the context length is 0."""

    @property
    def context_tokens(self) -> int:
        return 0

    def free(self) -> None:
        self.engine.low.llama_model_free(self.model)


class VocabularyReader:
    """Counts tokens with the vocabulary of the last requested file, and ends the process when it is idle.

    Use it in the main thread only.
    """

    def __init__(self, engine: Bindings, log: EngineLog) -> None:
        self._engine, self._log = engine, log
        self._path = ""
        self._loaded: LoadedVocabulary | None = None
        self._idle: threading.Timer | None = None
        self._idle_s = 0.0

    def count(self, request: CountVocabulary) -> Counted:
        """Return the token counts for a request. If the request names another file than the last one, load its
        vocabulary first.

        Raises:
            RequestError: the file has no vocabulary that llama.cpp can read, or the chat template is refused.
        """
        if self._idle is not None:
            self._idle.cancel()
        self._idle_s = request.idle_s
        if self._loaded is None or request.path != self._path:
            self._open(request.path)
        assert self._loaded is not None
        return count_tokens(self._loaded, request.count)

    def rest(self) -> None:
        """Start the timer that ends this process if no request comes for `idle_s` seconds. Called after each answer."""
        # Not the exit of the interpreter: the main thread waits for the next request.
        self._idle = threading.Timer(self._idle_s, os._exit, (0,))
        self._idle.daemon = True
        self._idle.start()

    def _open(self, path: str) -> None:
        if self._loaded is not None:
            self._loaded.free()
            self._loaded = None
        self._log.begin()
        check_file(path)
        context = ContextSettings()
        devices = resolve_devices(self._engine, (), ())
        # Without a list of devices llama.cpp would ask each card for its memory, which makes a context there.
        plain = replace(context, load_mode="none")
        parameters = ModelParameters(self._engine, _NO_DEVICES, devices, plain, dry=False)
        parameters.struct.vocab_only = True
        model = self._engine.low.llama_model_load_from_file(path.encode(), parameters.struct)
        if not model:
            raise RequestError(model_failure(path, self._log.facts))
        self._path = path
        name = Path(path).name
        self._loaded = LoadedVocabulary(self._engine, self._log, devices, context, int(model), 0, name=name)
