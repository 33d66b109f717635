"""The child's side of the pipe: messages out on a private duplicate of stdout, requests in on a thread of their own."""

from __future__ import annotations

import os
import queue
import re
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator

import msgspec

from engine.json_file import UNREADABLE
from engine.protocol.messages import Aborting, AnyRequest, Failure, Load, Message, Quit, Stop
from engine.worker.stop import StopRequest

READ_BYTES = 1 << 16
_SOURCE_PATH = re.compile(r"^\S*[/\\](?=\S+:\d+:)")
"""Where the engine was built is in its assertions and helps nobody."""


class MessagePipe:
    """Claims the process's stdout: from then on native prints go to stderr and only messages reach the parent."""

    def __init__(self) -> None:
        self._fd = os.dup(1)
        os.dup2(2, 1)
        self._lock = threading.Lock()
        self._encoder = msgspec.json.Encoder()

    def send(self, message: Message) -> None:
        """Write one message; ends the process when the parent is gone."""
        self.send_all((message,))

    def send_all(self, messages: Iterable[Message]) -> None:
        """Write messages at once."""
        with self._lock:
            self._write(*messages)

    def send_last_word(self, text: str) -> None:
        """Say why the process is about to abort. Any thread may call it, even while another one is writing."""
        held = self._lock.acquire(timeout=0.5)
        try:
            self._write(Aborting(text=_SOURCE_PATH.sub("", text)))
        finally:
            if held:
                self._lock.release()

    def _write(self, *messages: Message) -> None:
        data = b"".join([self._encoder.encode(message) + b"\n" for message in messages])
        try:
            written = os.write(self._fd, data)
            while written < len(data):
                written += os.write(self._fd, memoryview(data)[written:])
        except OSError:
            os._exit(0)


class RequestReader:
    """Reads requests on a thread, so that a stop and the end of input are seen whatever native code is doing."""

    def __init__(self, pipe: MessagePipe, stop: StopRequest) -> None:
        self._pipe = pipe
        self._stop = stop
        self._queue: queue.SimpleQueue[AnyRequest] = queue.SimpleQueue()
        self._decoder: msgspec.json.Decoder[AnyRequest] = msgspec.json.Decoder(AnyRequest)

    def start(self) -> None:
        threading.Thread(target=self._read, name="requests", daemon=True).start()

    def next_request(self) -> AnyRequest:
        """Wait for the next request."""
        return self._queue.get()

    def arrived(self) -> Iterator[AnyRequest]:
        """Go through the requests that have been read by now, without waiting."""
        while not self._queue.empty():
            yield self._queue.get_nowait()

    def _read(self) -> None:
        status = 1
        try:
            self._read_to_the_end()
            status = 0
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            # The parent closed the pipe or died: nobody is left to serve, and native code may be busy for minutes.
            # After an error (memory may run out here too) nobody could end this process through the pipe any more.
            os._exit(status)

    def _read_to_the_end(self) -> None:
        fd = sys.stdin.fileno()
        begun: list[bytes] = []
        while received := os.read(fd, READ_BYTES):
            first, *further = received.split(b"\n")
            begun.append(first)
            for piece in further:
                # put together once: a line with images has thousands of pieces
                line, begun = b"".join(begun), [piece]
                if line.strip():
                    self._handle(line)

    def _handle(self, line: bytes) -> None:
        try:
            request = self._decoder.decode(line)
        except UNREADABLE as error:
            self._pipe.send(Failure(kind="internal", message=f"A request was not understood: {error}."))
            return
        match request:
            case Stop():
                self._stop.ask(request.request)
            case Quit():
                self._stop.quit()
            case Load():
                self._stop.begin_load()
        self._queue.put(request)
