"""`python -m engine.library.downloads`: the child that fetches files.

It reads one request on standard input and writes messages on standard output.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from importlib.metadata import PackageNotFoundError, version

from engine.library.downloads.file_transfer import carry_out
from engine.runtime.protocol.messages import Failure, Quit
from engine.runtime.protocol.network import DownloadRequest
from engine.runtime.protocol.pipe import Pipe, Requests, prepare_process


def main() -> None:
    """Run one order; end with it, with a wish to quit, or with the parent."""
    prepare_process()
    pipe, stop = Pipe(), threading.Event()
    pipe.greet(f"layerdeck {_version()}")

    def note(request: DownloadRequest) -> DownloadRequest:
        if isinstance(request, Quit):
            stop.set()
        return request

    # What was begun is written down before the end: the input does not end this process, but the transfer.
    requests: Requests[DownloadRequest] = Requests(DownloadRequest, pipe, note, lambda _status: stop.set())
    if not requests.read_first():
        return
    order = requests.next()
    if isinstance(order, Quit):
        return
    requests.start_reading()
    try:
        pipe.send(carry_out(order, pipe.send, stop))
    except Exception as error:
        traceback.print_exc()
        pipe.send(Failure(kind="internal", message=f"A bug in Layerdeck: {error!r}"))
    sys.stderr.flush()
    # No shutdown of the interpreter: a connection may be waiting for a silent server.
    os._exit(0)


def _version() -> str:
    try:
        return version("layerdeck")
    except PackageNotFoundError:
        return "?"


if __name__ == "__main__":
    main()
