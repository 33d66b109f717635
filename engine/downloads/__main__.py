"""`python -m engine.downloads`: the child that fetches files. One order on standard input, messages on the output."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
from msgspec.structs import replace

from engine.downloads.file_transfer import FileProgress, FileTransfer, done_bytes
from engine.downloads.placing import lead_to, write_refs
from engine.errors import EngineError
from engine.protocol.messages import (
    PROTOCOL_VERSION,
    AnyRequest,
    Download,
    Downloaded,
    DownloadProgress,
    Failure,
    Hello,
    Message,
    TransferFile,
)

_encode = msgspec.json.Encoder().encode
_decoder: msgspec.json.Decoder[AnyRequest] = msgspec.json.Decoder(AnyRequest)


class Pipe:
    """Messages out; the end of the parent is the end of this process."""

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


def fetch(order: Download, pipe: Pipe, stop: threading.Event) -> Message:
    """Do what is ordered and return the last message about it."""
    transfers = []
    finished = []
    try:
        for index, file in enumerate(order.files):
            transfer = FileTransfer(file, order, _Teller(order.files, index, pipe).tell, stop)
            transfers.append(transfer)
            done = transfer.run()
            if file.link is not None:
                lead_to(Path(file.link), Path(file.target))
                done = replace(done, path=file.link)
            finished.append(done)
        write_refs(order.refs)
    except EngineError as error:
        return Failure(kind=error.kind, message=error.summary())
    return Downloaded(files=tuple(finished), fetched_bytes=sum(each.fetched_bytes for each in transfers))


class _Teller:
    """Tells of all files of an order while one of them is under way."""

    def __init__(self, files: tuple[TransferFile, ...], index: int, pipe: Pipe) -> None:
        others = [file for number, file in enumerate(files) if number != index]
        sizes = [file.size_bytes for file in others]
        self._done_bytes = sum(map(done_bytes, others))
        self._size_bytes = None if None in sizes else sum(size or 0 for size in sizes)
        self._name = Path(files[index].link or files[index].target).name
        self._pipe = pipe

    def tell(self, progress: FileProgress) -> None:
        known = self._size_bytes is not None and progress.size_bytes is not None
        self._pipe.send(
            DownloadProgress(
                stage=progress.stage,
                done_bytes=self._done_bytes + progress.done_bytes,
                size_bytes=(self._size_bytes or 0) + (progress.size_bytes or 0) if known else None,
                file=self._name,
                connections=progress.connections,
                note=progress.note,
            )
        )


def main() -> None:
    """Run one order; end with it, with a wish to quit, or with the parent."""
    # An interrupt typed in the terminal reaches the whole group; the parent decides and says so through the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
        pipe.send(fetch(order, pipe, stop))
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
