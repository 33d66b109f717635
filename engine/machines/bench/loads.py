"""A child process with a loaded layout, for a benchmark: it loads, tokenises and answers through a `ModelSession`."""

from __future__ import annotations

import queue
import time
from contextlib import suppress
from typing import Protocol

from msgspec import Struct

from engine.base.cancellation import CancelToken
from engine.base.errors import ArgumentError, CancelledError, EngineError
from engine.base.language import tr
from engine.planning.plan.plan import Plan
from engine.runtime.protocol.messages import Detokenised, FinalMessage, Tokenised
from engine.runtime.protocol.requests import WHOLE_INTERVAL_S, Detokenise, Generate, Tokenise
from engine.runtime.session.driver import SessionUpdate
from engine.runtime.session.events import (
    Answered,
    Crashed,
    Done,
    Failed,
    Loaded,
    LoadEnding,
    OutOfMemory,
    RequestEnding,
    Token,
)
from engine.runtime.session.load_spec import LoadSpec
from engine.runtime.session.session import ModelSession, RequestStream

POLL_S = 0.2
"""Seconds of one wait for a message of the child; the cancellation is checked between two waits."""


class LoadEndedError(EngineError):
    """A layout could not be loaded, or its process ended.

    `reason`: kind of the error by `docs/contract.md`, such as `does_not_fit`.
    """

    def __init__(self, sentence: str, reason: str) -> None:
        super().__init__(sentence)
        self.reason = reason


class BenchAnswer(Struct, frozen=True):
    """A timed answer of a model.

    `done`: the engine's token counts and speeds.
    `first_token_s`: seconds from the request to the first text, None if the answer was empty.
    """

    done: Done
    text: str
    first_token_s: float | None


class Subject(Protocol):
    """Interface of the process that a benchmark measures. At most one layout is loaded at a time.

    Every method may raise `LoadEndedError` and `CancelledError`.
    """

    def load(self, plan: Plan) -> tuple[Loaded, float]:
        """Load a plan in place of the loaded one; return its `Loaded` event and the duration in seconds."""

    def prompt(self, n_tokens: int, seed: int) -> str:
        """Return a prompt of about `n_tokens` tokens that begins differently for each `seed`."""

    def answer(self, prompt: str, max_tokens: int) -> BenchAnswer:
        """Return the greedy answer to a prompt without chat template, of at most `max_tokens` tokens."""


class SessionSubject:
    """The child process that a benchmark measures, as a context manager that ends it.

    If `cancel` is cancelled, the running request is stopped and `CancelledError` raised.
    """

    def __init__(self, cancel: CancelToken) -> None:
        self._cancel = cancel
        self._news: queue.SimpleQueue[SessionUpdate] = queue.SimpleQueue()
        self._session = ModelSession(self._news.put)
        self._tokens: tuple[int, ...] = ()

    def __enter__(self) -> SessionSubject:
        return self

    def __exit__(self, *_: object) -> None:
        self._session.close()

    def load(self, plan: Plan) -> tuple[Loaded, float]:
        """Load a plan after unloading the loaded one, so that each load starts from a new child process.

        Return its `Loaded` event and the duration in seconds.
        """
        self._check()
        self._session.unload()
        while self._session.snapshot.holds_child:
            self._wait_for_news()
        # Updates about the unloaded model must not be taken for updates of this load.
        while not self._news.empty():
            self._news.get()
        begun_s = time.perf_counter()
        self._session.load(LoadSpec(plan))
        while True:
            news = self._wait_for_news()
            if isinstance(news, Loaded):
                return news, time.perf_counter() - begun_s
            if isinstance(news, LoadEnding):
                self._check()
                raise load_ended(news)

    def prompt(self, n_tokens: int, seed: int) -> str:
        """Return a prompt of about `n_tokens` tokens that begins differently for each `seed`.

        With the same beginning the child would take the tokens from its KV cache and not compute them again.
        """
        if len(self._tokens) < n_tokens:
            # `PROSE` has more than 64 words, and so more than 64 tokens.
            text = PROSE * (1 + n_tokens // 64)
            found = self._ask(Tokenise(text=text, add_special=False))
            assert isinstance(found, Tokenised)
            self._tokens = found.tokens
        head = f"{seed + 1}. "
        found = self._ask(Tokenise(text=head, add_special=False))
        assert isinstance(found, Tokenised)
        kept = max(1, n_tokens - len(found.tokens) - 1)
        rest = self._ask(Detokenise(tokens=self._tokens[:kept]))
        assert isinstance(rest, Detokenised)
        return head + rest.text

    def answer(self, prompt: str, max_tokens: int) -> BenchAnswer:
        """Return the greedy answer to a prompt without chat template, of at most `max_tokens` tokens."""
        begun_s = time.perf_counter()
        # As few messages as possible, so that they do not slow down the answer that is measured.
        request = Generate(prompt=prompt, max_tokens=max_tokens, temperature=0.0, text_interval_s=WHOLE_INTERVAL_S)
        stream = self._stream(request)
        pieces, first_token_s = [], None
        while True:
            event = self._next(stream)
            if isinstance(event, Token):
                first_token_s = first_token_s or time.perf_counter() - begun_s
                pieces.append(event.text)
            elif isinstance(event, Done):
                self._check()
                return BenchAnswer(event, "".join(pieces), first_token_s)
            elif isinstance(event, RequestEnding):
                self._check()
                raise load_ended(event)

    # ------------------------------------------------------------------ waits

    def _check(self) -> None:
        if self._cancel.cancelled:
            self._session.stop()
            raise CancelledError(tr("The comparison was cancelled."))

    def _wait_for_news(self) -> SessionUpdate | None:
        self._check()
        with suppress(queue.Empty):
            return self._news.get(timeout=POLL_S)
        return None

    def _stream(self, request: Generate | Tokenise | Detokenise) -> RequestStream:
        self._check()
        try:
            return self._session.stream(request)
        except ArgumentError as error:
            raise self._loss() or LoadEndedError(error.summary(), error.kind) from error

    def _loss(self) -> LoadEndedError | None:
        """Return the error that ended the child between two requests; None if the session has reported none."""
        found = None
        while not self._news.empty():
            news = self._news.get()
            if isinstance(news, OutOfMemory | Failed | Crashed):
                found = load_ended(news)
        return found

    def _next(self, stream: RequestStream) -> object:
        while True:
            with suppress(queue.Empty):
                return stream.next(POLL_S)
            if self._cancel.cancelled:
                stream.stop()

    def _ask(self, request: Tokenise | Detokenise) -> FinalMessage:
        stream = self._stream(request)
        while True:
            event = self._next(stream)
            if isinstance(event, Answered):
                return event.answer
            if isinstance(event, RequestEnding):
                self._check()
                raise load_ended(event)


def load_ended(ending: LoadEnding | RequestEnding) -> LoadEndedError:
    """Return the error for a failed load or answer, made from its last message `ending`."""
    match ending:
        case OutOfMemory():
            return LoadEndedError(ending.message, "does_not_fit")
        case Failed() | Crashed():
            return LoadEndedError(ending.message, ending.kind)
    return LoadEndedError(tr("The model did not answer."), "crashed")


PROSE = """The keeper of the lighthouse had counted ships for thirty years, and he knew most of them by their lamps \
alone. In the winter of the great storm he saw a light that he could not name. It moved slowly against the wind, it \
vanished behind the waves, and each time it came back a little nearer to the rocks. He lit the second lamp, rang the \
bell, and wrote the hour into his book, as he had been told to do by the keeper before him. """
"""Text that prompts are made of: ordinary prose, which a model continues at length."""
