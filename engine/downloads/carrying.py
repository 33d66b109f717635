"""What the child does: the files of an order one after another, and links and refs that lead to them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from engine.downloads.file_transfer import FileProgress, FileTransfer, done_bytes
from engine.downloads.placing import lead_to, write_refs
from engine.errors import EngineError
from engine.protocol.messages import Download, Downloaded, DownloadProgress, Failure, Message, TransferFile


def carry_out(order: Download, send: Callable[[Message], None], stop: threading.Event) -> Message:
    """Do what is ordered, telling with `send` how far it is, and return the last message about it."""
    transfers = []
    finished = []
    try:
        for index, file in enumerate(order.files):
            later_bytes = sum(map(_missing_bytes, order.files[index + 1 :]))
            transfer = FileTransfer(file, order, _Teller(order.files, index, send).tell, stop, later_bytes)
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


def _missing_bytes(file: TransferFile) -> int:
    return max(0, (file.size_bytes or 0) - done_bytes(file))


class _Teller:
    """Tells of all files of an order while one of them is under way."""

    def __init__(self, files: tuple[TransferFile, ...], index: int, send: Callable[[Message], None]) -> None:
        others = [file for number, file in enumerate(files) if number != index]
        sizes = [file.size_bytes for file in others]
        self._done_bytes = sum(map(done_bytes, others))
        self._size_bytes = None if None in sizes else sum(size or 0 for size in sizes)
        self._name = Path(files[index].link or files[index].target).name
        self._send = send

    def tell(self, progress: FileProgress) -> None:
        known = self._size_bytes is not None and progress.size_bytes is not None
        self._send(
            DownloadProgress(
                stage=progress.stage,
                done_bytes=self._done_bytes + progress.done_bytes,
                size_bytes=(self._size_bytes or 0) + (progress.size_bytes or 0) if known else None,
                file=self._name,
                connections=progress.connections,
                note=progress.note,
            )
        )
