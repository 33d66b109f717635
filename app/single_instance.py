"""One window for each user: a second start, or the system, hands its files to the first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from PySide6.QtCore import QCoreApplication, QEvent, QObject, Signal
from PySide6.QtGui import QFileOpenEvent
from PySide6.QtNetwork import QLocalServer, QLocalSocket

CONNECT_MS = 1000
ANSWER_MS = 10_000
"""How long a second start waits for a first one that is there and just busy, before it opens a window of its own."""
MAX_MESSAGE_BYTES = 1024 * 1024
TAKEN = b"taken\n"

_decoder = msgspec.json.Decoder(list[str])


def hand_over(name: str, files: Sequence[Path]) -> bool:
    """Give `files` to the instance that listens under `name`; return whether one took them."""
    socket = QLocalSocket()
    socket.connectToServer(name)
    if not socket.waitForConnected(CONNECT_MS):
        return False
    socket.write(msgspec.json.encode([str(path.absolute()) for path in files]) + b"\n")
    taken = socket.waitForReadyRead(ANSWER_MS) and bytes(socket.readAll().data()) == TAKEN
    socket.disconnectFromServer()
    return taken


class FirstInstance(QObject):
    """Listens for later starts of the same user."""

    asked = Signal(list)  # list[Path]: the files of a later start; none: it wants to be seen

    def __init__(self, name: str, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._server = QLocalServer(self)
        # The socket lies in a folder of all users.
        self._server.setSocketOptions(QLocalServer.SocketOption.UserAccessOption)
        self._server.newConnection.connect(self._on_connection)
        if not self._server.listen(name):
            # What a killed instance left behind; nobody answered there, or we would not be the first.
            QLocalServer.removeServer(name)
            self._server.listen(name)

    @property
    def is_listening(self) -> bool:
        return self._server.isListening()

    def close(self) -> None:
        self._server.close()

    def _on_connection(self) -> None:
        while (socket := self._server.nextPendingConnection()) is not None:
            socket.readyRead.connect(self._on_ready)
            socket.disconnected.connect(socket.deleteLater)
            if socket.canReadLine():
                self._read(socket)

    def _on_ready(self) -> None:
        socket = self.sender()
        if isinstance(socket, QLocalSocket):
            self._read(socket)

    def _read(self, socket: QLocalSocket) -> None:
        if socket.bytesAvailable() > MAX_MESSAGE_BYTES:
            socket.abort()
            return
        if not socket.canReadLine():
            return
        files = _files(bytes(socket.readLine().data()))
        if files is None:
            socket.abort()
            return
        socket.write(TAKEN)
        socket.flush()
        self.asked.emit(files)


class OpenEvents(QObject):
    """macOS hands files over by itself: the program that runs gets an event for each of them."""

    asked = Signal(list)  # list[Path]

    def __init__(self, application: QCoreApplication) -> None:
        super().__init__(application)
        application.installEventFilter(self)

    def eventFilter(self, _watched: QObject, event: QEvent) -> bool:
        """Take the events that open a file; all others go on."""
        if not isinstance(event, QFileOpenEvent) or not event.file():
            return False
        self.asked.emit([Path(event.file())])
        return True


def _files(line: bytes) -> list[Path] | None:
    """Return the files of a message, None where it is none."""
    try:
        words = _decoder.decode(line)
    except ValueError:
        return None
    return None if any("\0" in word for word in words) else [Path(word) for word in words]
