"""Child of `cold_start`: opens one window, says `painted` after its first paint, and ends."""

from __future__ import annotations

import sys

from PySide6.QtCore import QEvent, QObject, QTimer
from PySide6.QtWidgets import QApplication, QMainWindow, QWidget


class FirstPaint(QObject):
    """Says when any part of `widget` has been painted for the first time, and closes it.

    A window whose children cover it need not be painted itself, so every widget's paint events are watched.
    """

    def __init__(self, application: QApplication, widget: QWidget) -> None:
        super().__init__(widget)
        self._widget = widget
        self._seen = False
        application.installEventFilter(self)

    def eventFilter(self, _watched: QObject, event: QEvent) -> bool:
        """Look for a paint event; it is delivered as usual."""
        if not self._seen and event.type() == QEvent.Type.Paint:
            self._seen = True
            QTimer.singleShot(0, self._report)
        return False

    def _report(self) -> None:
        sys.stdout.write("painted\n")
        sys.stdout.flush()
        self._widget.close()
        QApplication.quit()


def bare_window() -> QMainWindow:
    """Return a window with one plot."""
    import pyqtgraph

    window = QMainWindow()
    plot = pyqtgraph.PlotWidget()
    plot.plot([0, 1, 2], [0, 1, 0])
    window.setCentralWidget(plot)
    window.resize(1280, 800)
    return window


def main() -> None:
    """Open the window that the first argument names; the filter is there before anything can be painted."""
    application = QApplication(sys.argv[:1])
    if sys.argv[1] == "bare":
        bare = bare_window()
        first = FirstPaint(application, bare)
        bare.show()
    else:
        from app.settings import Settings
        from app.theme import Theme
        from app.wiring import make_window

        own = make_window(Settings(), Theme(application, "dark"))
        first = FirstPaint(application, own.main)
        own.main.show()
        own.start(files=[], rig=None)
    application.exec()
    del first


if __name__ == "__main__":
    main()
