"""Has chat templates rendered by a process of its own, which is killed where it takes too long or too much."""

from __future__ import annotations

import queue
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

import msgspec

from engine.json_file import UNREADABLE
from engine.programs import child_argv, log_end_of
from engine.protocol.messages import ChatMessage
from engine.worker.chat_template import MAX_TEMPLATE_CHARACTERS, TemplateError
from engine.worker.renderer import READY, RenderAnswer, RenderRequest

RENDER_SECONDS = 2.0
RENDER_BYTES = 256 << 20
START_SECONDS = 20.0
"""A cold disk and a busy machine; only the first conversation waits for this."""
_MAX_ANSWER_BYTES = 64 << 20


class TemplateProcess:
    """At most one process that renders: started when it is first needed, again after it had to be killed.

    It ends when this process does: its input closes. For one thread.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    @property
    def pid(self) -> int | None:
        """Its process id; None where none runs."""
        return None if self._process is None else self._process.pid

    def render(
        self, template: str, messages: Sequence[ChatMessage], *, beginning_of_text: str, end_of_text: str
    ) -> str:
        """Return the prompt that asks the assistant to go on, by the model's own template.

        Raises:
            TemplateError: the template is broken, refuses the conversation or takes too much time or space.
        """
        if len(template) > MAX_TEMPLATE_CHARACTERS:
            raise TemplateError("it is too long")
        request = RenderRequest(
            template=template,
            messages=tuple(messages),
            beginning_of_text=beginning_of_text,
            end_of_text=end_of_text,
            seconds=RENDER_SECONDS,
        )
        # what was killed from outside since the last conversation is not this template's fault
        if self._process is not None and self._process.poll() is not None:
            self.end()
        answer = self._answer(request)
        if answer.fault:
            raise TemplateError(answer.fault, answer.for_log)
        return answer.text

    def end(self) -> None:
        """Kill the process, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        log_end_of("renderer", process)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def _answer(self, request: RenderRequest) -> RenderAnswer:
        if self._process is None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(request) + b"\n")
            self._process.stdin.flush()
            line = self._lines.get(timeout=RENDER_SECONDS)
            return msgspec.json.decode(line, type=RenderAnswer)
        except queue.Empty:
            self.end()
            raise TemplateError(f"it takes longer than {RENDER_SECONDS:g} s") from None
        except (OSError, *UNREADABLE):
            self.end()
            raise TemplateError("the process that rendered it broke down over it") from None

    def _start(self) -> None:
        self._lines = queue.SimpleQueue()
        try:
            self._process = subprocess.Popen(
                child_argv("renderer", str(RENDER_BYTES)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            assert self._process.stdout is not None
            threading.Thread(
                target=_read_lines, args=(self._process.stdout, self._lines), name="templates", daemon=True
            ).start()
            started = self._lines.get(timeout=START_SECONDS) == READY
        except (OSError, RuntimeError, queue.Empty):
            started = False
        if not started:
            self.end()
            raise TemplateError("the process that renders it could not be started")


def _read_lines(stream: IO[bytes], lines: queue.SimpleQueue[bytes]) -> None:
    """Hand lines over; after the last comes an empty one."""
    with suppress(OSError, ValueError):
        while line := stream.readline(_MAX_ANSWER_BYTES):
            lines.put(line)
    lines.put(b"")
