"""Decoders of untrusted files: each file is decoded by a child process of its own.

An image or sound from the network may exploit a fault of its decoder. So the decoder runs with a time limit, a limited
address space and no access to files besides its own code. It gets the file in its request, and the caller checks its
answer.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import TypeVar

from engine.base.confinement import Rights
from engine.base.programs import child_argv
from engine.runtime.protocol.messages import Failure, Hello, Message
from engine.runtime.protocol.pipe import Limits, run_child
from engine.runtime.protocol.requests import Job

_R = TypeVar("_R", bound=Job)
_A = TypeVar("_A", bound=Message)


def ask_decoder(child: str, request: Job, answer_type: type[_A], *, cancelled: Callable[[], bool] | None = None) -> _A:
    """Start a decoder, send it `request` and return its answer. The decoder has ended when this returns.

    `child`: name of the program in `CHILDREN`. `cancelled`: called regularly; True cancels the request.

    Raises:
        EngineError: it could not be started, crashed, broke the protocol, took too long, or was cancelled.
    """
    # Imported here, because the decoder imports this module too and has to start fast.
    from engine.runtime.process.blocking_child import SMALL_CHILD, START_S, BlockingChild

    decoder = BlockingChild(
        argv=child_argv(child),
        name=child,
        timeout_s=request.seconds,
        start_timeout_s=START_S,
        environment=SMALL_CHILD,
        messages=answer_type | Hello | Failure,
        own_group=False,
    )
    with decoder:
        try:
            return decoder.ask(request, answer_type, cancelled=cancelled)
        finally:
            # Killed, not asked to end: it has done its only work, and may be in the hands of the file.
            decoder.end(kill=True)


def run_decoder(requests: type[_R], answer: Callable[[_R], Message], rights: Rights) -> None:
    """Run this process as a decoder that answers requests until its input ends.

    `requests`: type of the requests.
    `answer`: decodes the file of one request and returns the message to send.
    `rights`: rights that the process keeps, from `engine.base.confinement`. They allow no files besides the code.
    """
    # Libraries log warnings that quote the file, which would reach the parent's log.
    logging.disable()
    warnings.simplefilter("ignore")

    def limits(_request: _R) -> Limits:
        return Limits(rights)

    def send_answer(request: _R, send: Callable[[Message], None]) -> None:
        send(answer(request))

    run_child(requests, limits, send_answer)
