"""`ChildProcess`: a supervised child process that exchanges messages with this process over its pipes.

Every child of this program is a `ChildProcess`: model children, probing children, downloads, tunnels, the library's
scanner, decoders of foreign files, the template renderer. `engine.runtime.protocol.pipe` is the child's side.

Each child has four threads in the parent. One reads messages. One reads standard error, because a full pipe would stop
the child. One writes requests, because a child that does not read must not block the caller. The supervisor owns every
deadline and the end of the process. If the child binds its threads to processors, a fifth thread answers the kernel's
questions about that (`engine.base.thread_binding`).
"""

from __future__ import annotations

import logging
import os
import queue
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import IO, Any

import msgspec

from engine.base.engine_log import reports_tensor_api_failure
from engine.base.json_file import UNREADABLE
from engine.base.programs import LOG_PREFIX
from engine.base.texts import show
from engine.base.thread_binding import make_thread_binding
from engine.runtime.process.outcome import EndReason, ProcessOutcome, log_end
from engine.runtime.process.records import log_start
from engine.runtime.process.system import close_pipe, signal_process, spawn, wait_for_exit, worker_argv
from engine.runtime.protocol.messages import PROTOCOL_VERSION, Aborting, AnyMessage, Hello
from engine.runtime.protocol.pipe import MAX_MESSAGE_BYTES
from engine.runtime.protocol.requests import Quit, Request

DEFAULT_STALL_LIMIT_S = 60.0
STDERR_TAIL_LINES = 40
_MAX_STDERR_LINE_BYTES = 4096
# Asked to end, a child has 1 s. Terminated, it has 0.5 s more before it is killed.
_QUIT_S = 1.0
_OVERSLEPT_S = 3.0
"""Seconds by which a wait may end too late. A longer delay shows that this process was stopped, or the machine
suspended.
"""
_TERMINATE_S = 0.5
_KILL_WAIT_S = 300.0
"""Longest wait in seconds for the end of a killed process.

The kernel takes 40 to 170 s to free 400 GB of memory, and the process exists until then. A process that waits for a
driver or a disk in the kernel may also take long.
"""
_EXIT_AFTER_EOF_S = 2.0
_STDERR_DRAIN_S = 1.0
"""Seconds to wait, after the child's end, for the threads that read standard error and write requests.

Another process may have inherited standard error and hold it open for longer.
"""
_MESSAGES_DRAIN_S = 30.0
"""Seconds to wait, after the child's end, for the thread that reads messages.

So a slow receiver gets all messages before `on_end`.
"""

_log = logging.getLogger("layerdeck.engine")
_encode = msgspec.json.Encoder().encode
_decoder_of = cache(msgspec.json.Decoder)


class ChildProcess:
    """A child process that speaks the protocol of `engine.runtime.protocol`. It is new, running, ending or ended.

    `on_message`: called in the reader thread for each message, never after `on_end`. While it runs, the child's pipe
    fills up, which is intended back-pressure.
    `on_end`: called once for each started child, in the supervisor thread, when the process has ended.
    `argv`: command; None for the model child.
    `stall_limit_s`: longest silence in seconds while the child is watched (`watch`).
    `name`: role of the process, for process lists and the log.
    `environment`: variables to add to our own.
    `about`: work of the child, for the log.
    `messages`: union of the message types that it may send.
    `own_group`: whether it leads a process group of its own. False for the child of a child, which is killed together
    with its parent's group.
    `before_send`: replaces a request just before it is written, in the writer thread.
    """

    def __init__(
        self,
        on_message: Callable[[AnyMessage], None],
        on_end: Callable[[ProcessOutcome], None],
        *,
        argv: Sequence[str] | None = None,
        stall_limit_s: float = DEFAULT_STALL_LIMIT_S,
        name: str = "worker",
        environment: Mapping[str, str] | None = None,
        about: str = "",
        messages: Any = AnyMessage,
        own_group: bool = True,
        before_send: Callable[[Request], Request] | None = None,
    ) -> None:
        self._about = about
        self._decoder: msgspec.json.Decoder[AnyMessage] = _decoder_of(messages)
        self._own_group = own_group
        self._before_send = before_send
        self._engine = ""
        self._on_message = on_message
        self._on_end = on_end
        self._argv = list(argv) if argv is not None else worker_argv(name)
        self._stall_limit_s = stall_limit_s
        self._name = name
        self._environment = environment or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._stderr_tail: deque[str] = deque(maxlen=STDERR_TAIL_LINES)
        self._failed_in_tensor_api = False
        self._threads: list[threading.Thread] = []
        # Everything below is guarded by the condition, which the supervisor waits for.
        self._condition = threading.Condition()
        self._greeted = False
        self._stdout_closed = False
        self._last_sign_s = 0.0
        self._watched = True
        self._delivering = False
        self._fault: tuple[EndReason, str] | None = None
        self._quit_until_s: float | None = None
        self._terminate_s = _TERMINATE_S
        self._aborting = Aborting(text="")
        self._outcome: ProcessOutcome | None = None
        self._ended = threading.Event()

    @property
    def pid(self) -> int | None:
        """The process id; None before `start`, or if the start failed."""
        return self._process.pid if self._process is not None else None

    @property
    def outcome(self) -> ProcessOutcome | None:
        """How the child ended; None until it has ended."""
        return self._outcome

    def start(self) -> None:
        """Start the process and its threads. If that fails, the child ends at once with the outcome `NOT_STARTED`.

        Raises:
            RuntimeError: the child was started before.
        """
        if self._process is not None or self._ended.is_set():
            raise RuntimeError("a child is started once")
        # The renderer, a child of a child, has no threads to bind.
        binding = make_thread_binding({**os.environ, **self._environment}) if self._own_group else None
        further = self._environment if binding is None else {**self._environment, **binding.environment}
        inherited = () if binding is None else (binding.inherited,)
        try:
            self._process = spawn(self._argv, further, own_group=self._own_group, inherited=inherited)
        except OSError as error:
            if binding is not None:
                binding.close()
            self._finish(ProcessOutcome(EndReason.NOT_STARTED, detail=f"{self._argv[0]}: {error.strerror or error}"))
            return
        self._last_sign_s = time.monotonic()
        roles = {
            "reader": self._read_messages,
            "stderr": self._read_stderr,
            "writer": self._write_requests,
        }
        if binding is not None:
            roles["binding"] = partial(binding.serve, self._process.pid)
        # The last one: it ends the child, and `_give_up` does if a thread before it could not be started.
        roles["supervisor"] = self._supervise
        self._threads = [
            threading.Thread(target=target, name=f"{self._name}-{self._process.pid}-{role}", daemon=True)
            for role, target in roles.items()
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:
            # Its thread closes it when the child has ended.
            if binding is not None and self._threads[3].ident is None:
                binding.close()
            self._give_up(str(error))

    def note_work(self, about: str) -> None:
        """Set the description of the child's current work, for the log line at its end."""
        self._about = about

    def send(self, request: Request) -> None:
        """Queue a request. It is written after the child's first message (`Hello`), and dropped if the child ends
        before.
        """
        self._requests.put(request)

    def watch(self, active: bool) -> None:
        """Turn the stall limit on or off: the child is killed if it sends no message for `stall_limit_s` seconds.

        The limit is on after `start`. This call restarts the count of seconds.

        `active`: False while the child has no work, because it then sends nothing.
        """
        with self._condition:
            self._watched = active
            self._last_sign_s = time.monotonic()
            self._condition.notify_all()

    def stop(self, *, quit_s: float = _QUIT_S, terminate_s: float = _TERMINATE_S) -> None:
        """Begin to end the child, without waiting. The child gets `Quit` and the end of input, then SIGTERM, then
        SIGKILL.

        A child that has not sent its first message (`Hello`) is terminated at once. A second call can only shorten the
        deadlines. Does nothing if the child is not running.
        `quit_s`: seconds from `Quit` to SIGTERM.
        `terminate_s`: seconds from SIGTERM to SIGKILL; 0: no SIGTERM is sent.
        """
        with self._condition:
            now_s = time.monotonic()
            until_s = now_s + quit_s if self._greeted else now_s
            # None ends the writer, which closes the pipe: the end of input ends a child that ignores `Quit`.
            if self._quit_until_s is None:
                self._requests.put(Quit())
                self._requests.put(None)
            self._quit_until_s = until_s if self._quit_until_s is None else min(until_s, self._quit_until_s)
            self._terminate_s = min(terminate_s, self._terminate_s)
            self._condition.notify_all()

    def wait(self, timeout_s: float) -> ProcessOutcome | None:
        """Wait at most `timeout_s` until the child has ended and `on_end` has returned.

        Return the outcome; None if it has not ended by then, or was never started.
        """
        if self._process is None and not self._ended.is_set():
            return None
        deadline_s = time.monotonic() + timeout_s
        if not self._ended.wait(timeout_s):
            return None
        # `_ended` is set before the supervisor closes the pipes and ends, so it is joined too.
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline_s - time.monotonic()))
        return self._outcome

    # ------------------------------------------------------------------ threads

    def _read_messages(self) -> None:
        stream = self._pipe("stdout")
        try:
            # One byte more than allowed, to recognise a line that is too long.
            while line := stream.readline(MAX_MESSAGE_BYTES + 1):
                if not line.endswith(b"\n") and len(line) <= MAX_MESSAGE_BYTES:
                    break  # The child went down in the middle of a message.
                if not self._take_line(line):
                    break
            # A child with a protocol fault may write on until it has ended. Its pipe is kept empty, or it might block
            # and never end by itself.
            while stream.read(65536):
                pass
        except (OSError, ValueError):
            pass
        finally:
            with self._condition:
                self._stdout_closed = True
                self._condition.notify_all()

    def _take_line(self, line: bytes) -> bool:
        if len(line) > MAX_MESSAGE_BYTES:
            return self._reject(f"it sent a line of more than {MAX_MESSAGE_BYTES} bytes")
        try:
            message = self._decoder.decode(line)
        except UNREADABLE:
            shown = line[:80].decode("utf-8", "replace").strip()
            return self._reject(f'it sent "{shown}", which is not a message')
        if self._greeted and isinstance(message, Hello):
            # Each hello renews the deadline of a caller that waits (`Questions.ask`).
            return self._reject("it said hello twice")
        if not self._greeted and not self._check_hello(message):
            return False
        if self._outcome is not None:
            return False
        with self._condition:
            self._delivering = True
            if isinstance(message, Aborting):
                self._aborting = message
        try:
            self._on_message(message)
        except Exception:
            _log.exception("a message handler failed")
            return self._reject("its message could not be handled")
        finally:
            # The stall limit counts from here: while `on_message` ran, the child could not send anything.
            with self._condition:
                self._delivering = False
                self._last_sign_s = time.monotonic()
                self._condition.notify_all()
        return True

    def _check_hello(self, message: AnyMessage) -> bool:
        if not isinstance(message, Hello):
            return self._reject("its first message was not a hello")
        if message.protocol != PROTOCOL_VERSION:
            return self._reject(
                f"it speaks version {message.protocol} of the protocol and this program version {PROTOCOL_VERSION}; "
                "the installation is incomplete, so install it again"
            )
        self._engine = message.engine
        with self._condition:
            self._greeted = True
            self._condition.notify_all()
        return True

    def _reject(self, detail: str) -> bool:
        with self._condition:
            if self._fault is None:
                self._fault = (EndReason.BROKEN, detail)
            self._condition.notify_all()
        return False

    def _read_stderr(self) -> None:
        stream = self._pipe("stderr")
        try:
            while line := stream.readline(_MAX_STDERR_LINE_BYTES):
                text = line.decode("utf-8", "replace").rstrip()
                # Lines of our own logging in the child have a mark; other lines are what native code prints.
                if text.startswith(LOG_PREFIX):
                    _log.info("%s %s: %s", self._name, self.pid, show(text.removeprefix(LOG_PREFIX), 300))
                elif text:
                    self._stderr_tail.append(text)
                    self._failed_in_tensor_api = self._failed_in_tensor_api or reports_tensor_api_failure(text)
                    _log.debug("%s: %s", self._name, text)
        except (OSError, ValueError):
            pass

    def _write_requests(self) -> None:
        # Not before the hello: a child that never says it may not read either, and the pipe would fill up.
        with self._condition:
            self._condition.wait_for(lambda: self._greeted or self._stdout_closed or self._quit_until_s is not None)
        stream = self._pipe("stdin")
        try:
            is_first = True
            while self._greeted and (request := self._requests.get()) is not None:
                if is_first:
                    is_first = False
                    log_start(self._name, self.pid, self._engine, self._environment, request)
                if self._before_send is not None:
                    request = self._before_send(request)
                stream.write(_encode(request) + b"\n")
                stream.flush()
        except (OSError, ValueError):
            pass  # The child has ended or is ending; the supervisor reports how.
        finally:
            close_pipe(stream)

    def _supervise(self) -> None:
        reason, detail = self._wait_for_end()
        assert self._process is not None
        if reason is not EndReason.ITSELF:
            self._end_group(reason)
        elif wait_for_exit(self._process, _EXIT_AFTER_EOF_S) is None:
            # Standard output is closed, but the process goes on: it is broken, and killed.
            reason, detail = EndReason.BROKEN, "it closed its output and went on running"
            self._signal(kill=True)
        returncode = wait_for_exit(self._process, _KILL_WAIT_S)
        self._requests.put(None)
        # All messages before `on_end`; hence the reader first, and with the longest time.
        reader, stderr, writer, *_ = self._threads
        reader.join(_MESSAGES_DRAIN_S)
        stderr.join(_STDERR_DRAIN_S)
        writer.join(_STDERR_DRAIN_S)
        self._finish(self._make_outcome(reason, detail, returncode))
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None and not any(thread.is_alive() for thread in self._threads[:2]):
                close_pipe(pipe)

    def _wait_for_end(self) -> tuple[EndReason, str]:
        """Wait until the child has ended or must be ended; return the reason and its detail for the outcome."""
        with self._condition:
            is_first_look = True
            while True:
                if self._fault is not None:
                    return self._fault
                if self._quit_until_s is not None:
                    return EndReason.STOPPED, ""
                if self._stdout_closed:
                    return EndReason.ITSELF, ""
                if not self._watched or self._delivering:
                    self._condition.wait()
                    is_first_look = True
                    continue
                begun_s = time.monotonic()
                if is_first_look:
                    # The machine may have been suspended since the limit was turned on.
                    self._last_sign_s, is_first_look = begun_s, False
                # Each message renews `_last_sign_s`, so a slow child lives as long as it reports.
                left_s = self._last_sign_s + self._stall_limit_s - begun_s
                if left_s <= 0:
                    return EndReason.STALLED, f"{self._stall_limit_s:g} s"
                self._condition.wait(left_s)
                now_s = time.monotonic()
                if now_s > begun_s + left_s + _OVERSLEPT_S:
                    # This process did not run either, as in a suspended machine: what the child said is in the pipe.
                    self._last_sign_s = now_s

    def _end_group(self, reason: EndReason) -> None:
        """Wait for a child that got `Quit`, then send SIGTERM to its process group, then SIGKILL.

        If `reason` is not STOPPED, SIGTERM is sent at once.
        """
        with self._condition:
            while reason is EndReason.STOPPED and not self._stdout_closed and self._fault is None:
                left_s = (self._quit_until_s or 0.0) - time.monotonic()
                if left_s <= 0:
                    break
                self._condition.wait(left_s)
            terminate_s = self._terminate_s if reason is EndReason.STOPPED else _TERMINATE_S
            left = self._stdout_closed
        # A child that closed its output is about to exit by itself: no signal unless it takes too long.
        assert self._process is not None
        if left and wait_for_exit(self._process, terminate_s) is not None:
            return
        if terminate_s > 0:
            self._signal(kill=False)
        if terminate_s <= 0 or wait_for_exit(self._process, terminate_s) is None:
            self._signal(kill=True)

    def _give_up(self, detail: str) -> None:
        """Kill the child because one of its threads could not be started. `detail`: the fault, for the outcome.

        Threads already started end when its pipes are closed.
        """
        assert self._process is not None
        self._signal(kill=True)
        wait_for_exit(self._process, _KILL_WAIT_S)
        self._requests.put(None)
        with self._condition:
            self._stdout_closed = True
            self._condition.notify_all()
        self._threads = [thread for thread in self._threads if thread.ident is not None]
        for thread in self._threads:
            thread.join(_STDERR_DRAIN_S)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                close_pipe(pipe)
        self._finish(ProcessOutcome(EndReason.NOT_STARTED, detail=detail))

    def _make_outcome(self, reason: EndReason, detail: str, returncode: int | None) -> ProcessOutcome:
        if returncode is None:
            reason, detail = EndReason.BROKEN, f"process {self.pid} does not end, even when killed"
        return ProcessOutcome(
            reason,
            exit_code=returncode if returncode is not None and returncode >= 0 else None,
            signal=-returncode if returncode is not None and returncode < 0 else None,
            detail=detail,
            abort_text=self._aborting.text,
            refusing_device=self._aborting.device,
            free_bytes=self._aborting.free_bytes,
            requested_bytes=self._aborting.requested_bytes,
            stderr_tail=tuple(self._stderr_tail),
            failed_in_tensor_api=self._failed_in_tensor_api,
        )

    def _finish(self, outcome: ProcessOutcome) -> None:
        self._outcome = outcome
        log_end(self._name, self.pid, outcome, engine=self._engine, about=self._about)
        try:
            self._on_end(outcome)
        except Exception:
            _log.exception("the handler of a child's end failed")
        finally:
            self._ended.set()

    def _signal(self, *, kill: bool) -> None:
        assert self._process is not None
        signal_process(self._process, kill=kill, group=self._own_group)

    def _pipe(self, name: str) -> IO[bytes]:
        pipe: IO[bytes] | None = getattr(self._process, name)
        assert pipe is not None
        return pipe
