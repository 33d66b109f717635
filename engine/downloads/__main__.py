"""`python -m engine.downloads`: the child that fetches files. One order on standard input, messages on the output."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from importlib.metadata import PackageNotFoundError, version

import msgspec

from engine.confinement import refuse_core_files
from engine.downloads.file_transfer import carry_out
from engine.protocol.messages import PROTOCOL_VERSION, AnyRequest, Download, Failure, Hello
from engine.protocol.pipe import Pipe

_decoder: msgspec.json.Decoder[AnyRequest] = msgspec.json.Decoder(AnyRequest)


def main() -> None:
    """Run one order; end with it, with a wish to quit, or with the parent."""
    # An interrupt typed in the terminal reaches the whole group; the parent decides and says so through the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    refuse_core_files()  # it holds tokens
    pipe, stop = Pipe(), threading.Event()
    pipe.send(Hello(protocol=PROTOCOL_VERSION, engine=f"layerdeck {_version()}", pid=os.getpid()))
    line = sys.stdin.buffer.readline()
    if not line.strip():
        return
    order = _decoder.decode(line)
    if not isinstance(order, Download):
        return
    threading.Thread(target=_watch_input, args=(stop,), name="input", daemon=True).start()
    try:
        pipe.send(carry_out(order, pipe.send, stop))
    except Exception as error:
        traceback.print_exc()
        pipe.send(Failure(kind="internal", message=f"A bug in Layerdeck: {error!r}"))
    sys.stderr.flush()
    # No shutdown of the interpreter: a connection may be waiting for a silent server.
    os._exit(0)


def _watch_input(stop: threading.Event) -> None:
    """Whatever comes after the order, a wish to quit or the end of the input, ends the transfer."""
    sys.stdin.buffer.readline()
    stop.set()


def _version() -> str:
    try:
        return version("layerdeck")
    except PackageNotFoundError:
        return "?"


if __name__ == "__main__":
    main()
