"""`python -m engine.library.downloads`: the child that fetches files.

It reads one request on standard input and writes messages on standard output.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback

from engine.base.engine_build import own_version
from engine.base.errors import EngineError
from engine.library.downloads.file_transfer import carry_out
from engine.library.downloads.rights import give_up_rights
from engine.runtime.protocol.messages import Failure
from engine.runtime.protocol.network import DownloadRequest
from engine.runtime.protocol.pipe import Requests, begin_child
from engine.runtime.protocol.requests import Quit


def main() -> None:
    """Run the child: carry out one download request, then end.

    The process also ends after a request to quit, or when the parent ends.
    """
    pipe, stop = begin_child(f"layerdeck {own_version()}"), threading.Event()

    def note(request: DownloadRequest) -> DownloadRequest:
        if isinstance(request, Quit):
            stop.set()
        return request

    # The end of standard input stops the transfer and not the process, so that the journal is written first.
    requests: Requests[DownloadRequest] = Requests(DownloadRequest, pipe, note, lambda _status: stop.set())
    if not requests.read_first():
        return
    download = requests.next()
    if isinstance(download, Quit):
        return
    try:
        # Before there is a second thread, which would keep its rights.
        give_up_rights(download)
    except EngineError as error:
        pipe.send(Failure(kind=error.kind, message=error.summary()))
        return
    requests.start_reading()
    try:
        pipe.send(carry_out(download, pipe.send, stop))
    except Exception as error:
        traceback.print_exc()
        pipe.send(Failure(kind="internal", message=f"A bug in Layerdeck: {error!r}"))
    sys.stderr.flush()
    # No shutdown of the interpreter: a connection may be waiting for a silent server.
    os._exit(0)


if __name__ == "__main__":
    main()
