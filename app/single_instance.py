"""One window for each user: a second start of the program passes its files to the open window, and exits.

The files pass through a local socket.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from PySide6.QtCore import QCoreApplication, QEvent, QObject, Signal
from PySide6.QtGui import QFileOpenEvent
from PySide6.QtNetwork import QLocalServer, QLocalSocket

CONNECT_MS = 1000
ANSWER_MS = 10_000
"""Milliseconds that a second start waits for the answer of a busy window, before it opens a window of its own."""
MAX_MESSAGE_BYTES = 1024 * 1024
TAKEN = b"taken\n"

_decoder = msgspec.json.Decoder(list[str])


def hand_over(name: str, files: Sequence[Path]) -> bool:
    """Send `files` to the window that listens on the local socket `name`. Return whether the window accepted them."""
    socket = QLocalSocket()
    socket.connectToServer(name)
    if not socket.waitForConnected(CONNECT_MS):
        return False
    # Absolute paths: the other process has its own current folder. A message is one line, since a socket may deliver it
    # in pieces.
    socket.write(msgspec.json.encode([str(path.absolute()) for path in files]) + b"\n")
    taken = socket.waitForReadyRead(ANSWER_MS) and bytes(socket.readAll().data()) == TAKEN
    socket.disconnectFromServer()
    return taken


class FirstInstance(QObject):
    """The local socket of a user's first window. Later starts of the program send it the files to open."""

    asked = Signal(list)  # list[Path]: the files of a further start; empty: raise the window

    def __init__(self, name: str, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._server = QLocalServer(self)
        # The socket is in a folder that all users share.
        self._server.setSocketOptions(QLocalServer.SocketOption.UserAccessOption)
        self._server.newConnection.connect(self._on_connection)
        if not self._server.listen(name):
            # A socket file of a killed instance. Nobody listens: `hand_over` was tried before.
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
            # The server, the socket's parent, would keep it until the window closes.
            socket.disconnected.connect(socket.deleteLater)
            # The line may have arrived before `readyRead` was connected.
            if socket.canReadLine():
                self._read(socket)

    def _on_ready(self) -> None:
        socket = self.sender()
        if isinstance(socket, QLocalSocket):
            self._read(socket)

    def _read(self, socket: QLocalSocket) -> None:
        # A line without an end would fill the memory.
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
    """An event filter for files opened in the Finder: macOS sends one event per file to the running application."""

    asked = Signal(list)  # list[Path]

    def __init__(self, application: QCoreApplication) -> None:
        super().__init__(application)
        application.installEventFilter(self)

    def eventFilter(self, _watched: QObject, event: QEvent) -> bool:
        """Emit `asked` for an event that opens a file; ignore all other events, which Qt then delivers."""
        if not isinstance(event, QFileOpenEvent) or not event.file():
            return False
        self.asked.emit([Path(event.file())])
        return True


def _files(line: bytes) -> list[Path] | None:
    """Return the paths in `line`, the message of a second start of the program; None if it is malformed."""
    try:
        words = _decoder.decode(line)
    except ValueError:
        return None
    # With a NUL in a path, every system call raises ValueError.
    return None if any("\0" in word for word in words) else [Path(word) for word in words]
