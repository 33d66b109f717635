"""Counts tokens for a model that is not loaded, in a child process that reads only its vocabulary."""

from __future__ import annotations

import threading
from pathlib import Path

from engine.base.errors import ArgumentError
from engine.base.language import tr
from engine.model.gguf.parts import named_parts
from engine.runtime.plan_requests import path_text
from engine.runtime.process.blocking_child import PersistentChild
from engine.runtime.protocol.messages import Counted
from engine.runtime.protocol.requests import CountTokens, CountVocabulary, FileAccess

IDLE_S = 60.0
"""Seconds without a request after which the child ends by itself."""
LIMIT_S = 30.0
"""Time limit of a request, in seconds. A vocabulary of 260,000 tokens is read in about a second."""


class VocabularyCounter:
    """Counts tokens in a child that is kept while requests are about the same file. Thread-safe; `count` blocks.

    `idle_s`: seconds without a request after which the child ends; the next request starts another one.
    """

    def __init__(self, idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._child = PersistentChild("worker", Counted)
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Process id of the child; None if there is no child."""
        return self._child.pid

    def count(self, path: Path, request: CountTokens) -> Counted:
        """Return the token counts for `request` with the vocabulary of the model at `path`. `n_ctx` of the result is 0.

        Raises:
            EngineError: the file has no vocabulary, the child failed, or `close` was called.
        """
        with self._lock:
            if self._is_closed:
                raise ArgumentError(tr("Layerdeck is closing."))
            # The rights of a child are for one file.
            if path != self._path:
                self._child.end()
                self._path = path
            return self._child.ask(
                CountVocabulary(
                    seconds=LIMIT_S,
                    path=path_text(path),
                    count=request,
                    idle_s=self._idle_s,
                    # llama.cpp reads the headers of all parts.
                    access=FileAccess(readable=tuple(map(path_text, named_parts(path)))),
                ),
                Counted,
            )

    def close(self) -> None:
        """End the child; later requests fail."""
        self._is_closed = True
        self._child.close()
