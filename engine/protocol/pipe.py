"""The pipe of a child without a model: its messages to the parent, whose end is the end of this process."""

from __future__ import annotations

import os
import threading

import msgspec

from engine.protocol.messages import Message

_encode = msgspec.json.Encoder().encode


class Pipe:
    """Messages out, from any thread. What libraries print goes to standard error."""

    def __init__(self) -> None:
        self._descriptor = os.dup(1)
        os.dup2(2, 1)
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        data = _encode(message) + b"\n"
        with self._lock:
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]
            except OSError:
                os._exit(0)
