"""The child's end of the protocol: sends messages, reads requests, and limits the rights of the process.

The order is the same in all children. `begin_child` takes over standard output and sends the first message (`Hello`).
The first request is read in the main thread. The child then gives up the rights that this request does not need, and
only then starts other threads: Landlock and `no_new_privs` bind the calling thread and the threads that it starts
later, so a thread started earlier would keep all rights. One of the other threads reads further requests. The end of
the input ends the process, even while native code computes.
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
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct

from engine.base.confinement import Rights, confine, refuse_core_files
from engine.base.json_file import UNREADABLE
from engine.base.programs import LOG_PREFIX
from engine.base.values import replace
from engine.runtime.protocol.messages import PROTOCOL_VERSION, Aborting, Failure, Hello, Message
from engine.runtime.protocol.requests import Job, Quit

MAX_MESSAGE_BYTES = 256 << 20
"""Longest message in JSON, in both directions. 1,000 embeddings of 8,192 numbers take about 170 MB."""
READ_BYTES = 1 << 16
ALARM_GRACE_S = 1.0
"""Seconds between a request's time limit and the kernel's alarm, which ends the child.

The parent kills the child at the time limit. The alarm is for a child whose parent is gone.
"""
_SOURCE_PATH = re.compile(r"^\S*[/\\](?=\S+:\d+:)")
"""Matches the folder of a source file at the start of an assertion's text: a path on the build machine."""

_R = TypeVar("_R")
_encode = msgspec.json.Encoder().encode


class Pipe:
    """The child's pipe to the parent: it sends messages. Thread-safe.

    It uses standard output. Text that native libraries print to standard output goes to standard error instead.
    """

    def __init__(self) -> None:
        # On the level of descriptors, because C code does not use sys.stdout.
        self._descriptor = os.dup(1)
        os.dup2(2, 1)
        self._lock = threading.Lock()

    def greet(self, engine: str) -> None:
        """Send the first message (`Hello`). `engine`: name and version of the software in this process."""
        self.send(Hello(protocol=PROTOCOL_VERSION, engine=engine, pid=os.getpid()))

    def send(self, message: Message) -> None:
        """Write one message. If the parent has closed the pipe, the process ends."""
        self.send_all((message,))

    def send_all(self, messages: Iterable[Message]) -> None:
        """Write several messages together. If the parent has closed the pipe, the process ends."""
        data = b"".join(map(_line, messages))
        with self._lock:
            self._write(data)

    def send_abort_text(self, text: str) -> None:
        """Send an `Aborting` (this process is about to abort) with no field but `text`, the reason.

        Any thread may call this, even while another thread is writing.
        """
        self.send_aborting(Aborting(text=text))

    def send_aborting(self, message: Aborting) -> None:
        """Send the message that this process is about to abort, without the folder of the source file in its text.

        Any thread may call this, even while another thread is writing.
        """
        # Another thread may be writing to a parent that does not read: after 0.5 s the text goes out without the lock.
        held = self._lock.acquire(timeout=0.5)
        try:
            self._write(_line(replace(message, text=_SOURCE_PATH.sub("", message.text))))
        finally:
            if held:
                self._lock.release()

    def _write(self, data: bytes) -> None:
        # A write to a pipe may take only a part of the data. An error means that the parent has closed its end.
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError:
            # This may be any thread, so `sys.exit` would not end the process.
            os._exit(0)


def _line(message: Message) -> bytes:
    """Return a message as a line of JSON. A message that is too long becomes a `Failure` of its request."""
    data = _encode(message)
    # The newline below counts too.
    if len(data) >= MAX_MESSAGE_BYTES:
        failed = Failure(
            kind="argument",
            message=f"The answer takes more than {MAX_MESSAGE_BYTES >> 20} MiB; ask for less at a time.",
            request=getattr(message, "request", None),
        )
        data = _encode(failed)
    return data + b"\n"


class Requests(Generic[_R]):
    """Reads the parent's requests, one JSON object a line, into a queue. A malformed line is answered by a `Failure`.

    `kind`: union of the request types.
    `on_read`: called for each request in the reading thread, also while native code computes. The queue gets the
    request that it returns.
    `on_end`: called at the end of input with an exit status: 0, or 1 after an error. By default it ends the process.
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
        """Read standard input in the calling thread until the queue has a request; return False at the end of input."""
        while self._queue.empty():
            if not self._read_some():
                return False
        return True

    def start_reading(self) -> None:
        """Start a thread that reads all further requests, and calls `on_end` at the end of input."""
        threading.Thread(target=self._read_to_the_end, name="requests", daemon=True).start()

    def next(self) -> _R:
        """Return the next request; blocks until there is one."""
        return self._queue.get()

    def arrived(self) -> Iterator[_R]:
        """Yield the requests that were read so far, without waiting."""
        while not self._queue.empty():
            yield self._queue.get_nowait()

    def _read_to_the_end(self) -> None:
        # Stays 1 if the input does not end but an exception comes.
        status = 1
        try:
            while self._read_some():
                pass
            status = 0
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            # The parent closed the pipe or died. Native code in the main thread may compute for minutes, so that the
            # process ends from here. After an error, such as a lack of memory, no later request could end it.
            self._on_end(status)

    def _read_some(self) -> bool:
        # Not sys.stdin.readline: its lock would be held while the thread waits.
        received = os.read(sys.stdin.fileno(), READ_BYTES)
        first, *further = received.split(b"\n")
        self._begun.append(first)
        for piece in further:
            # Joined once for each line: one with an image comes in hundreds of pieces.
            line, self._begun = b"".join(self._begun), [piece]
            if line.strip():
                self._take(line)
        return bool(received)

    def _take(self, line: bytes) -> None:
        try:
            request = self._decoder.decode(line)
        except UNREADABLE as error:
            self._pipe.send(Failure(kind="internal", message=f"A request is invalid: {error}."))
            return
        self._queue.put(self._on_read(request))


class Limits(Struct, frozen=True):
    """Access rights that a child keeps after it has read its first request; it gives up all others.

    `rights`: rights of this kind of child, from `engine.base.confinement`. Their `memory_bytes` limit the address space
    that the child may add to what it uses now.
    `readable`, `writable`: files and folders that the child may still open.
    """

    rights: Rights
    readable: tuple[Path, ...] = ()
    writable: tuple[Path, ...] = ()


def begin_child(engine: str) -> Pipe:
    """Prepare this process as a child and send its first message (`Hello`). Return its pipe to the parent.

    Core files are disabled, because they would hold weights and conversations. Log lines go to the parent's log.

    `engine`: name and version of the software in this process.
    """
    # An interrupt typed in the terminal reaches the whole group; the parent decides and says so through the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    refuse_core_files()
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"{LOG_PREFIX}%(message)s"))
    log = logging.getLogger("layerdeck.engine")
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    pipe = Pipe()
    pipe.greet(engine)
    return pipe


def run_child(
    requests: Any,
    limits: Callable[[_R], Limits],
    answer: Callable[[_R, Callable[[Message], None]], None],
) -> None:
    """Run this process as a child that answers requests one after another, until `Quit` or the end of input.

    If a `Job` takes longer than its `seconds`, the kernel's alarm ends the process: a C function may never return to
    the interpreter.
    `requests`: union of the request types.
    `limits`: gets the first request, and returns the rights that the process keeps.
    `answer`: carries out a request and sends its answer.
    """
    pipe = begin_child("layerdeck")
    incoming: Requests[_R | Quit] = Requests(requests | Quit, pipe)
    if incoming.read_first():
        request = incoming.next()
        if not isinstance(request, Quit):
            kept = limits(request)
            # The memory first: the use so far is read from /proc, which Landlock closes.
            _limit_memory(kept.rights.memory_bytes)
            confine(kept.rights, kept.readable, kept.writable)
            incoming.start_reading()
        while not isinstance(request, Quit):
            _ring_after(request.seconds + ALARM_GRACE_S if isinstance(request, Job) else 0.0)
            answer(request, pipe.send)
            # Off while the child waits: the next request may come in an hour.
            _ring_after(0.0)
            request = incoming.next()
    sys.stderr.flush()
    # No shutdown of the interpreter: the reading thread still waits for input.
    os._exit(0)


def limit_work(seconds: float) -> None:
    """Set a kernel timer that ends this process after `seconds` more of processor time. Does nothing on Windows."""
    if hasattr(signal, "setitimer"):
        # It counts user and system time of all threads. Nobody handles SIGPROF, which then ends the process.
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _ring_after(seconds: float) -> None:
    """Set a kernel timer that ends this process after `seconds`; 0 switches it off. Does nothing on Windows."""
    if hasattr(signal, "setitimer"):
        # Nobody handles SIGALRM, which then ends the process, also inside of native code.
        signal.setitimer(signal.ITIMER_REAL, seconds)


_USUAL_BYTES = 192 << 20
"""Assumed address space of a child at its start in bytes, if it cannot be read.

Measured: 170 MiB at most in the renderer.
"""


def _limit_memory(memory_bytes: int) -> None:
    if not memory_bytes or not sys.platform.startswith("linux"):
        return
    import resource

    used_bytes = _USUAL_BYTES
    # A child of a confined child cannot read it.
    with suppress(OSError):
        # Field 0 of statm is the size of the address space, which RLIMIT_AS limits.
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        used_bytes = pages * resource.getpagesize()
    limit_bytes = used_bytes + memory_bytes
    with suppress(ValueError):  # The hard limit is lower already.
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
