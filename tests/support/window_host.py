"""Runs the real window in a process of its own, and answers questions about it, a JSON line each.

End-to-end tests move a real mouse on a virtual screen; they ask here for positions and texts. The value of a question
is a path of attributes and list indices, from the window or its parts (`SHORT` has abbreviations). A callable at the
end or before an index is called: `{"rect": "settings_bar"}`, `{"text": "load_report.badge_text"}`, `{"layout": ""}`.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

from PySide6.QtCore import QObject, QPoint, QPointF, Qt, Signal
from PySide6.QtWidgets import QApplication, QWidget

from app.bug_report import BugReporter
from app.gui import QuitOnSignals
from app.logs import start_logging
from app.opening import Opening, StartOptions
from app.paths import log_path
from app.settings import Settings
from app.theme import Theme
from app.wiring import WindowObjects
from engine.model.demo import writer as demo_writer
from engine.planning.layout.layout import make_layout
from widgets.layout_editor.preview_geometry import PreviewGeometry

SHORT = {
    "chat": "views.current.chat",
    "load_report": "views.current.report",
    "status_text": "main.status_line.text",
    "add_remote": "questions.add_remote",
    "desk.open_demo": "desk.opener.open_demo",
    "desk.try_demo": "desk.opener.try_demo",
    "desk.stop_lab": "desk.unloader.stop_lab",
}


class Answers(QObject):
    """Answers questions in the GUI thread. Points and rectangles are in pixels of the screen."""

    asked = Signal(str)

    def __init__(self, window: WindowObjects) -> None:
        super().__init__(window.main)
        self._window = window
        self.asked.connect(self._on_asked, Qt.ConnectionType.QueuedConnection)

    def _on_asked(self, line: str) -> None:
        ((question, path),) = json.loads(line).items()
        try:
            answer = getattr(self, f"_{question}")(path)
        except Exception as error:
            answer = {"error": repr(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()

    def _find(self, path: str) -> Any:
        path = next(
            (full + path[len(short) :] for short, full in SHORT.items() if f"{path}.".startswith(f"{short}.")), path
        )
        found: Any = self._window if hasattr(self._window, path.split(".")[0]) else self._window.main
        for name in filter(None, path.split(".")):
            found = (found() if callable(found) else found)[int(name)] if name.isdecimal() else getattr(found, name)
        return found() if callable(found) and not isinstance(found, QWidget) else found

    def _rect(self, path: str) -> list[int]:
        widget = self._find(path)
        corner = widget.mapToGlobal(QPoint(0, 0))
        return [corner.x(), corner.y(), widget.width(), widget.height()]

    def _layer(self, path: str) -> list[int]:
        """Return the centre of a layer in a lane. `path`: layer and device, such as "5@CPU"."""
        layer, device = path.split("@")
        geometry = self._geometry()
        return self._screen_point(geometry.block_rect(geometry.lane_of[device], int(layer), int(layer)).center())

    def _output(self, device: str) -> list[int]:
        """Return the centre of the output column in the lane of `device`; of the output block if it is empty."""
        geometry = self._geometry()
        center = geometry.output_rect().center()
        if device:
            center.setY(geometry.track_rect(geometry.lane_of[device]).center().y())
        return self._screen_point(center)

    def _boundary(self, index: str) -> list[int]:
        """Return the handle of the boundary after run `index`."""
        place = next(place for place in self._geometry().handles if place.index == int(index))
        return self._screen_point(QPointF(place.x, place.dot_y))

    def _geometry(self) -> PreviewGeometry:
        geometry = self._window.main.editor.preview_geometry
        assert geometry is not None, "no model is open"
        return geometry

    def _screen_point(self, point: QPointF) -> list[int]:
        view = self._window.main.editor.view
        place = view.viewport().mapToGlobal(view.mapFromScene(point))
        return [place.x(), place.y()]

    def _text(self, path: str) -> str:
        return str(self._find(path))

    def _visible(self, path: str) -> bool:
        return bool(self._find(path).isVisible())

    def _state(self, _path: str) -> str:
        return self._window.desk.loading.phase.name

    def _layout(self, _path: str) -> list[list[object]] | None:
        edit = self._window.desk.document.edit
        return None if edit is None else [[run.device, run.first, run.last] for run in edit.layout.runs]

    def _engine_layout(self, _path: str) -> list[list[object]]:
        """Return the runs of layers that llama.cpp reported in its log, without the output layer."""
        loaded = self._window.desk.loading.snapshot.loaded
        assert loaded is not None, "nothing is loaded"
        layout = make_layout(len(loaded.layer_devices) - 1, loaded.layer_devices[:-1])
        return [[run.device, run.first, run.last] for run in layout.runs]

    def _loaded_models(self, _path: str) -> list[str]:
        """Return the accessible name of each row of the loaded models."""
        return [row.accessibleName() for row in self._window.main.model_panel.loaded_list.rows()]

    def _trigger(self, name: str) -> None:
        self._window.actions[name].trigger()

    def _drop(self, path: str) -> None:
        self._window.questions.open_dropped(Path(path))

    def _last_note(self, _path: str) -> str:
        return self._of_last_message("last_note")

    def _last_answer(self, _path: str) -> str:
        return self._of_last_message("last_text")

    def _of_last_message(self, name: str) -> str:
        """Return an attribute of the chat about its last message; empty without messages."""
        chat = self._window.views.current.chat
        return str(getattr(chat, name)) if chat.message_list.messages else ""

    def _active(self, _path: str) -> str:
        """Return the title of the active window; empty if no window of this process is active."""
        active = QApplication.activeWindow()
        return active.windowTitle() if active is not None else ""

    def _bugs(self, _path: str) -> list[str]:
        top = QApplication.topLevelWidgets()
        return [widget.windowTitle() for widget in top if widget.isVisible() and widget is not self._window.main]


def main() -> None:
    """Open the window. Arguments: theme, optionally a model and a rig file."""
    theme, model, rig = (*sys.argv[1:], "", "")[:3]
    # The made-up demo model ends after one sentence in five. A test that wants to meet an answer in progress must not
    # depend on its length: here an answer goes on until it is stopped or the context is full.
    demo_writer._END_AFTER_STOP = 1e-12
    start_logging(log_path())
    application = QApplication(sys.argv[:1])
    BugReporter(application).install()
    options = StartOptions([Path(model)] if model else [], Path(rig) if rig else None)
    opening = Opening(Settings(), Theme(application, "dark" if theme == "dark" else "light"), options)
    signals = QuitOnSignals(application)

    def listen(answers: Answers) -> None:
        for line in sys.stdin:
            answers.asked.emit(line)

    def answer(window: WindowObjects) -> None:
        threading.Thread(target=listen, args=(Answers(window),), daemon=True).start()

    opening.opened.connect(answer)
    opening.show()
    application.exec()
    signals.close()


if __name__ == "__main__":
    main()
