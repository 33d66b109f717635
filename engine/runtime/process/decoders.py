"""Reading what strangers made: a child of its own for each file, with little time and memory and nothing to lose.

A file of another person is a program for whatever decodes it. Its decoder has an alarm, a limited address space, and no
file system but its own code; it gets the file in its request, and its answer is not believed.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import TypeVar

from engine.base.programs import child_argv
from engine.runtime.protocol.messages import Failure, Hello, Job, Message
from engine.runtime.protocol.pipe import Limits, run_child

_R = TypeVar("_R", bound=Job)
_A = TypeVar("_A", bound=Message)


def ask_decoder(child: str, request: Job, answer_type: type[_A], *, cancelled: Callable[[], bool] | None = None) -> _A:
    """Return what one of our children makes of a file, within the time of `request`. It does not outlive our group.

    Raises:
        EngineError: it could not be started, broke down, sent nonsense, took too long, or was `cancelled`.
    """
    # Only who asks needs what supervises a child, and the decoder itself has to start fast.
    from engine.runtime.process.questions import SMALL_CHILD, START_S, Questions

    decoder = Questions(
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
            decoder.end(kill=True)


def run_decoder(requests: type[_R], answer: Callable[[_R], Message], memory_bytes: int) -> None:
    """Be a decoder: answer requests with no files and at most `memory_bytes` of memory beyond what is used by then."""
    # what a library says of the file is for nobody
    logging.disable()
    warnings.simplefilter("ignore")

    def limits(_request: _R) -> Limits:
        return Limits(memory_bytes=memory_bytes)

    def send_answer(request: _R, send: Callable[[Message], None]) -> None:
        send(answer(request))

    run_child(requests, limits, send_answer)
