"""Child of `cold_start`: opens one window, prints `painted` after its first paint, and ends."""

from __future__ import annotations

import sys
from functools import partial

from PySide6.QtCore import QEvent, QObject, QTimer, Signal
from PySide6.QtWidgets import QApplication, QMainWindow, QWidget


class FirstPaint(QObject):
    """Tells when the window has been painted for the first time.

    A window whose children cover it need not be painted itself, so every widget's paint events are watched.
    """

    seen = Signal()

    def __init__(self, application: QApplication) -> None:
        super().__init__(application)
        self._seen = False
        application.installEventFilter(self)

    def eventFilter(self, _watched: QObject, event: QEvent) -> bool:
        """Look for a paint event; it is delivered as usual."""
        if not self._seen and event.type() == QEvent.Type.Paint:
            self._seen = True
            QTimer.singleShot(0, self.seen.emit)
        return False


def end(window: QWidget) -> None:
    """Tell the parent that the window was painted, and end."""
    print("painted", flush=True)
    window.close()
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
    first = FirstPaint(application)
    if sys.argv[1] == "bare":
        bare = bare_window()
        first.seen.connect(partial(end, bare))
        bare.show()
    else:
        # As `app/gui.py` starts the window.
        from app.garbage import GarbageCollector
        from app.gui import skip_feature_search

        GarbageCollector(application)
        skip_feature_search()
        from app.opening import Opening, StartOptions
        from app.settings import Settings
        from app.theme import Theme

        opening = Opening(Settings(), Theme(application, "dark"), StartOptions())
        # Shown with all its parts, so the first paint is the complete window (`app/opening.py`).
        first.seen.connect(partial(end, opening.frame.main))
        opening.show()
    application.exec()


if __name__ == "__main__":
    main()
