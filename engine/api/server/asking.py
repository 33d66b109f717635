"""Sends requests to a loaded model's session, and brings the session's events into the server's asyncio loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from engine.api.server.pooled_model import LoadedModel
from engine.api.wire.errors import ApiError, context_exceeded, error_of
from engine.base.errors import ArgumentError
from engine.runtime.protocol.messages import Counted, FinalMessage, Tokenised
from engine.runtime.protocol.requests import AnyModelRequest, CountTokens, Tokenise
from engine.runtime.session.events import Answered, Done, Failed, RequestEnding, RequestEvent, Token

MAX_UNREAD_CHARACTERS = 1 << 20
"""Largest number of characters of an answer that a slow client may leave unread; beyond it the answer is stopped."""


class TooSlowError(Exception):
    """Error: the client reads the answer too slowly, or not at all."""


class Requests:
    """The model requests of one HTTP request, all sent to the session at once.

    The session's thread queues their events. The event loop reads the events with `next`, each with the index of its
    model request. If several events come between two iterations of the loop, only the first of them wakes it.
    """

    def __init__(self, model: LoadedModel, requests: Sequence[AnyModelRequest]) -> None:
        """Send all requests to the session.

        Raises:
            ApiError: the model is no longer loaded.
        """
        self._session = model.session
        self._loop = asyncio.get_running_loop()
        self._events: deque[tuple[int, RequestEvent]] = deque()
        self._put_characters = 0
        """Number of characters that the model has written; only the session's thread counts them."""
        self._taken_characters = 0
        """Number of characters that `next` has returned; only the event loop counts them."""
        self._is_too_slow = False
        self._arrived = asyncio.Event()
        self._is_woken = False
        self._open: dict[int, int] = {}
        try:
            for index, request in enumerate(requests):
                self._open[index] = self._session.ask(request, partial(self._put, index))
        except ArgumentError as error:
            self.close()
            raise ApiError(503, error.summary(), code="model_lost") from None

    def _put(self, index: int, event: RequestEvent) -> None:
        """Queue an event of the request at `index`. Called in the session's thread."""
        if isinstance(event, Token):
            self._put_characters += len(event.text)
            if self._put_characters - self._taken_characters > MAX_UNREAD_CHARACTERS:
                # Nothing more is kept. Without a number the request was closed, which stops it.
                number = self._open.get(index)
                if not self._is_too_slow and number is not None:
                    self._session.stop(number)
                self._is_too_slow = True
                return
        self._events.append((index, event))
        if not self._is_woken:
            self._is_woken = True
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._arrived.set)

    @property
    def is_over(self) -> bool:
        """Whether every request has ended and every event has been read."""
        return not self._open and not self._events

    async def next(self) -> list[tuple[int, RequestEvent]]:
        """Return the events since the last call; wait for an event if there is none.

        Raises:
            TooSlowError: more than `MAX_UNREAD_CHARACTERS` of text were left unread.
        """
        while not self._events:
            # Cleared before the last look: an event that comes from now on wakes the loop again.
            self._arrived.clear()
            self._is_woken = False
            if not self._events:
                await self._arrived.wait()
        found: list[tuple[int, RequestEvent]] = []
        while self._events:
            index, event = self._events.popleft()
            if isinstance(event, Token):
                self._taken_characters += len(event.text)
            elif isinstance(event, RequestEnding):
                self._open.pop(index, None)
            found.append((index, event))
        if self._is_too_slow:
            raise TooSlowError
        return found

    def close(self) -> None:
        """Ask the session to stop the requests that have not ended, without waiting for their ends."""
        for number in self._open.values():
            self._session.stop(number)
        self._open.clear()


async def ask(model: LoadedModel, request: AnyModelRequest) -> FinalMessage:
    """Return the model's answer to a request that generates no text, such as counting tokens.

    Raises:
        ApiError: the request failed.
    """
    requests = Requests(model, [request])
    try:
        while True:
            for _, event in await requests.next():
                if isinstance(event, RequestEnding):
                    return _answer(event)
    finally:
        requests.close()


def _answer(ending: RequestEnding) -> FinalMessage:
    if isinstance(ending, Answered):
        return ending.answer
    assert not isinstance(ending, Done)
    raise error_of(ending)


async def failure_of(model: LoadedModel, counting: CountTokens | Tokenise, ending: RequestEnding) -> ApiError:
    """Return the error for an answer that failed.

    If the prompt is too long, the error states the number of its tokens and the context size.
    `counting`: a request that counts the tokens of the prompt. It is only sent if the prompt may be too long.
    """
    assert not isinstance(ending, Done | Answered)
    if isinstance(ending, Failed) and ending.kind == "argument":
        with suppress(ApiError):
            counted = await ask(model, counting)
            n_tokens = counted.prompt if isinstance(counted, Counted) else 0
            if isinstance(counted, Tokenised):
                n_tokens = len(counted.tokens)
            if n_tokens >= model.n_ctx:
                return context_exceeded(n_tokens, model.n_ctx)
    return error_of(ending)
