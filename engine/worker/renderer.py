"""`python -m engine.worker.renderer`: renders chat templates of strangers, in a process that can be killed for it.

A template may stay in one C call for a minute, where no limit inside the interpreter reaches it. So this process has
an alarm that the kernel rings, an address space that ends, and nothing to lose; it never loads the engine.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import BinaryIO

import msgspec

from engine.confinement import code_folders, confine, refuse_core_files
from engine.protocol.messages import ChatMessage
from engine.worker.chat_template import TemplateError, render_chat

READY = b"ready\n"
ALARM_GRACE_S = 1.0
"""Whoever asked kills this process when the time is up; where they are gone, the alarm does so a little later."""


class RenderRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation to be rendered within `seconds`."""

    template: str
    messages: tuple[ChatMessage, ...]
    beginning_of_text: str
    end_of_text: str
    seconds: float


class RenderAnswer(msgspec.Struct, frozen=True):
    """The prompt, or why there is none; `for_log` as of `TemplateError`."""

    text: str = ""
    fault: str = ""
    for_log: str = ""


def main(further_bytes: int) -> None:
    """Answer requests, one a line, until the end of input; with at most `further_bytes` of memory for all of it."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb", buffering=0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    refuse_core_files()
    _limit_memory(further_bytes)
    confine(readable=code_folders(), writable=())
    answers.write(READY)
    _answer_all(requests, answers)


def _answer_all(requests: BinaryIO, answers: BinaryIO) -> None:
    decoder, encoder = msgspec.json.Decoder(RenderRequest), msgspec.json.Encoder()
    while line := requests.readline():
        request = decoder.decode(line)
        _ring_after(request.seconds + ALARM_GRACE_S)
        answer = _answer(request)
        _ring_after(0.0)
        answers.write(encoder.encode(answer) + b"\n")


def _answer(request: RenderRequest) -> RenderAnswer:
    try:
        text = render_chat(
            request.template,
            request.messages,
            beginning_of_text=request.beginning_of_text,
            end_of_text=request.end_of_text,
        )
    except TemplateError as error:
        return RenderAnswer(fault=str(error), for_log=error.for_log)
    return RenderAnswer(text=text)


def _ring_after(seconds: float) -> None:
    """End this process after `seconds` (0: never) without asking the interpreter, where the system can do that."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _limit_memory(further_bytes: int) -> None:
    if not sys.platform.startswith("linux"):
        return
    import resource

    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit_bytes = pages * resource.getpagesize() + further_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))


if __name__ == "__main__":
    main(int(sys.argv[1]))
