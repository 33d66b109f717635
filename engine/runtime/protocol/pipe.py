"""The child's side of every child process: messages out, requests in, and rights given up between the two.

All children do the same in the same order: they take over standard output, say hello, read their first request in
the main thread, give up the rights that this request does not need, and only then start other threads. Landlock and
`no_new_privs` bind the calling thread and those that it starts later, so a thread started earlier would keep its
rights. From then on a thread reads further requests; the end of input ends the process, whatever native code is doing.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from engine.base.confinement import code_folders, confine, refuse_core_files
from engine.base.json_file import UNREADABLE
from engine.base.programs import LOG_MARK
from engine.runtime.protocol.messages import PROTOCOL_VERSION, Aborting, Failure, Hello, Job, Message, Quit

MAX_MESSAGE_BYTES = 256 << 20
"""Longest message in JSON, for both sides. 1,000 embeddings of 8,192 numbers take about 170 MB."""
READ_BYTES = 1 << 16
ALARM_GRACE_S = 1.0
"""The parent kills a child whose time is up. If the parent is gone, the kernel does so this much later."""
_SOURCE_PATH = re.compile(r"^\S*[/\\](?=\S+:\d+:)")
"""Path on the machine that built the engine, at the start of an assertion."""

_R = TypeVar("_R")
_encode = msgspec.json.Encoder().encode


class Pipe:
    """Messages to the parent, from any thread. What libraries print to standard output goes to standard error."""

    def __init__(self) -> None:
        self._descriptor = os.dup(1)
        os.dup2(2, 1)
        self._lock = threading.Lock()

    def greet(self, engine: str) -> None:
        """Send the hello; `engine` names the version of what runs here."""
        self.send(Hello(protocol=PROTOCOL_VERSION, engine=engine, pid=os.getpid()))

    def send(self, message: Message) -> None:
        """Write one message; ends the process when the parent is gone."""
        self.send_all((message,))

    def send_all(self, messages: Iterable[Message]) -> None:
        """Write messages at once."""
        data = b"".join(map(_line, messages))
        with self._lock:
            self._write(data)

    def send_last_word(self, text: str) -> None:
        """Say why the process is about to abort. Any thread may call it, even while another one is writing."""
        held = self._lock.acquire(timeout=0.5)
        try:
            self._write(_line(Aborting(text=_SOURCE_PATH.sub("", text))))
        finally:
            if held:
                self._lock.release()

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError:
            os._exit(0)


def _line(message: Message) -> bytes:
    """Return a message as a line; one that is too long becomes the failure of its request."""
    data = _encode(message)
    if len(data) >= MAX_MESSAGE_BYTES:
        failed = Failure(
            kind="argument",
            message=f"The answer takes more than {MAX_MESSAGE_BYTES >> 20} MiB; ask for less at a time.",
            request=getattr(message, "request", None),
        )
        data = _encode(failed)
    return data + b"\n"


class Requests(Generic[_R]):
    """Requests of the parent, one JSON object a line, of the union type `kind`.

    `on_read` is called for each in the thread that reads it, and returns what is queued. What cannot be decoded is
    answered with a `Failure`. `on_end` is called at the end of input with an exit status: 0, or 1 after an error.
    """

    def __init__(
        self,
        kind: Any,
        pipe: Pipe,
        on_read: Callable[[_R], _R] = lambda request: request,
        on_end: Callable[[int], object] = os._exit,
    ) -> None:
        self._decoder: msgspec.json.Decoder[_R] = msgspec.json.Decoder(kind)
        self._pipe = pipe
        self._on_read = on_read
        self._on_end = on_end
        self._queue: queue.SimpleQueue[_R] = queue.SimpleQueue()
        self._begun: list[bytes] = []

    def read_first(self) -> bool:
        """Read in this thread until a request is there; False at the end of input."""
        while self._queue.empty():
            if not self._read_some():
                return False
        return True

    def start_reading(self) -> None:
        """Read on in a thread of its own, which by default ends the process with the input."""
        threading.Thread(target=self._read_to_the_end, name="requests", daemon=True).start()

    def next(self) -> _R:
        """Wait for the next request."""
        return self._queue.get()

    def arrived(self) -> Iterator[_R]:
        """Go through the requests that have been read by now, without waiting."""
        while not self._queue.empty():
            yield self._queue.get_nowait()

    def _read_to_the_end(self) -> None:
        status = 1
        try:
            while self._read_some():
                pass
            status = 0
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            # The parent closed the pipe or died: nobody is left to serve, and native code may be busy for minutes.
            # After an error (memory may run out here too) nobody could end this process through the pipe any more.
            self._on_end(status)

    def _read_some(self) -> bool:
        received = os.read(sys.stdin.fileno(), READ_BYTES)
        first, *further = received.split(b"\n")
        self._begun.append(first)
        for piece in further:
            # joined once: a line with an image has hundreds of pieces
            line, self._begun = b"".join(self._begun), [piece]
            if line.strip():
                self._take(line)
        return bool(received)

    def _take(self, line: bytes) -> None:
        try:
            request = self._decoder.decode(line)
        except UNREADABLE as error:
            self._pipe.send(Failure(kind="internal", message=f"A request was not understood: {error}."))
            return
        self._queue.put(self._on_read(request))


@dataclass(frozen=True, slots=True)
class Limits:
    """What a child keeps after its first request, besides its code.

    `readable`, `writable`: files and folders. `memory_bytes`: address space beyond what is used, 0 for no limit.
    """

    readable: tuple[Path, ...] = ()
    writable: tuple[Path, ...] = ()
    memory_bytes: int = 0


def prepare_process() -> None:
    """Leave interrupts to the parent, refuse core files, and send log lines to the parent's log."""
    # An interrupt typed in the terminal reaches the whole group; the parent decides and says so through the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    refuse_core_files()
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"{LOG_MARK}%(message)s"))
    log = logging.getLogger("layerdeck.engine")
    log.setLevel(logging.INFO)
    log.addHandler(handler)


def run_child(
    requests: Any,
    limits: Callable[[_R], Limits],
    answer: Callable[[_R, Callable[[Message], None]], None],
) -> None:
    """Be a child that answers requests of the types `requests`, one after another, until `Quit` or the end of input.

    `limits` says what the first request leaves of this process's rights. `answer` sends the answer. A `Job` has the
    time that it names: the kernel's alarm then ends the process without asking the interpreter.
    """
    prepare_process()
    pipe = Pipe()
    pipe.greet("layerdeck")
    incoming: Requests[_R | Quit] = Requests(requests | Quit, pipe)
    if incoming.read_first():
        request = incoming.next()
        if not isinstance(request, Quit):
            kept = limits(request)
            # First the memory: what is used of it is read from /proc.
            _limit_memory(kept.memory_bytes)
            confine(readable=(*code_folders(), *kept.readable), writable=kept.writable)
            incoming.start_reading()
        while not isinstance(request, Quit):
            _ring_after(request.seconds + ALARM_GRACE_S if isinstance(request, Job) else 0.0)
            answer(request, pipe.send)
            _ring_after(0.0)
            request = incoming.next()
    sys.stderr.flush()
    # No shutdown of the interpreter: the reading thread is still there.
    os._exit(0)


def limit_work(seconds: float) -> None:
    """Have the kernel end this process after `seconds` more of processor time, if the system can do that."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _ring_after(seconds: float) -> None:
    """Have the kernel end this process after `seconds` (0: never), if the system can do that."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _limit_memory(memory_bytes: int) -> None:
    if not memory_bytes or not sys.platform.startswith("linux"):
        return
    import resource

    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit_bytes = pages * resource.getpagesize() + memory_bytes
    with suppress(ValueError):  # the system's own limit is lower
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
