"""A small window from which a test drags one file with the real mouse: `python -m tests.support.drag_source PATH`."""

from __future__ import annotations

import sys

from PySide6.QtCore import QMimeData, Qt, QTimer, QUrl
from PySide6.QtGui import QDrag, QMouseEvent
from PySide6.QtWidgets import QApplication, QLabel

SIZE_PX = 40


class DragSource(QLabel):
    """Window above all others in the corner of the screen. Prints "ready" when it is shown."""

    def __init__(self, path: str) -> None:
        super().__init__("file")
        self._path = path
        self.setWindowFlags(Qt.WindowType.X11BypassWindowManagerHint | Qt.WindowType.WindowStaysOnTopHint)
        self.setGeometry(0, 0, SIZE_PX, SIZE_PX)

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        drag = QDrag(self)
        mime = QMimeData()
        mime.setUrls([QUrl.fromLocalFile(self._path)])
        drag.setMimeData(mime)
        QTimer.singleShot(0, lambda: say("dragging"))
        drag.exec(Qt.DropAction.CopyAction)


def say(word: str) -> None:
    """Print a word for the test that waits for it."""
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def main() -> None:
    """Show the window until the process is killed."""
    application = QApplication(sys.argv[:1])
    source = DragSource(sys.argv[1])
    source.show()
    say("ready")
    application.exec()


if __name__ == "__main__":
    main()
