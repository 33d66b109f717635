"""Makes the handbook's pictures again, from the real window: `python -m tests.handbook.pictures`.

The window has a temporary home folder and Qt's offscreen platform. Needs the demo model that the set-up fetches. Takes
a minute or two: a lab rig starts, a model is loaded, and it answers.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import QPoint, QRect, QSize
from PySide6.QtGui import QImage
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QDialog, QWidget

from app.demo import fetched_demo
from app.settings import Settings
from app.theme import Theme
from app.wiring import WindowObjects, make_window
from engine.planning.layout.layout import single_device
from engine.planning.memory.estimate import Grade
from engine.runtime.session.status import Phase
from resources.loader import handbook

SIZE = QSize(1280, 860)
DEADLINE_S = 300.0
LOOK_MS = 50
STILL_LOOKS = 6
"""So many pictures in a row that are the same: nothing moves any more; live graphs have a new sample each second."""


def wait_for(what: str, condition: Callable[[], bool]) -> None:
    """Let the window live until `condition` holds."""
    ends_s = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > ends_s:
            raise SystemExit(f"{what} did not come")
        QTest.qWait(LOOK_MS)


def wait_until_still(widget: QWidget) -> None:
    """Let the window live until what is seen of `widget` changes no more."""
    seen: list[QImage] = []

    def is_still() -> bool:
        image = widget.grab().toImage()
        if seen and image != seen[-1]:
            seen.clear()
        seen.append(image)
        return len(seen) > STILL_LOOKS

    wait_for(f"a picture of {widget.objectName() or type(widget).__name__} that stays", is_still)


def save(widget: QWidget, name: str, part: QRect | None = None) -> None:
    """Save how `widget` looks as a picture of the handbook."""
    wait_until_still(widget)
    image = (widget.grab() if part is None else widget.grab(part)).toImage()
    image = image.convertToFormat(QImage.Format.Format_RGB888)
    path = handbook() / "pictures" / f"{name}.png"
    image.save(str(path), quality=0)
    sys.stdout.write(f"{path.name}: {path.stat().st_size // 1000} kB\n")


def part_of(main: QWidget, widget: QWidget) -> QRect:
    """Return where `widget` is in the window."""
    return QRect(widget.mapTo(main, QPoint(0, 0)), widget.size())


def dialog_of(main: QWidget) -> QDialog:
    """Return the dialog that is open, once it is."""

    def visible() -> list[QDialog]:
        return [each for each in main.findChildren(QDialog) if each.isVisible()]

    wait_for("the dialog", lambda: bool(visible()))
    return visible()[0]


def is_probed(window: WindowObjects) -> bool:
    plan = window.desk.document.plan
    return plan is not None and all(row.grade is Grade.PROBED for row in plan.report.rows if row.need_bytes)


def take_pictures(window: WindowObjects) -> None:
    """Go through the window as the handbook does."""
    main, desk = window.main, window.desk
    wait_for("the first page", main.editor.isVisible)
    save(main, "start")
    desk.opener.try_demo()
    wait_for("the proposal", lambda: desk.document.edit is not None and len(desk.rig.live.rig.devices) == 3)
    wait_for("the probe", lambda: is_probed(window))
    save(main, "layout", part_of(main, main.editor))
    save(main, "devices", part_of(main, main.device_strip))
    save(main, "settings", part_of(main, main.settings_bar))
    desk.loader.load()
    wait_for("the load", lambda: desk.loading.phase is Phase.READY)
    chat = window.views.current.chat
    chat.sample_prompts.buttons[0].click()
    wait_for("the answer", lambda: desk.loading.phase is not Phase.READY)
    wait_for("its end", lambda: desk.loading.phase is Phase.READY)
    save(main, "window")
    window.actions["arrange_chat"].trigger()
    save(main, "chat")
    window.actions["arrange_both"].trigger()
    edit = desk.document.edit
    assert edit is not None
    desk.document.set_layout(single_device(edit.layout.n_layers, "RPC0"), "all on one")
    desk.loader.load()
    wait_for("the question", main.load_question.isVisible)
    wait_for("its proposal", main.load_question.proposal_button.isVisible)
    save(main, "no-room")
    main.load_question.cancel_button.click()
    window.actions["add_remote"].trigger()
    warning = dialog_of(main)
    save(warning, "remote")
    warning.close()
    desk.library.add_folder(Path(os.environ["HOME"]) / "models")
    window.actions["library"].trigger()
    wait_for("the library", lambda: bool(window.library_presenter.page.view.visible_titles()))
    wait_for("its forecasts", lambda: all(row.fit is not None for row in desk.library.contents.models))
    save(main, "library")


def main() -> int:
    """Make all pictures; return the exit code."""
    fetched = fetched_demo()
    if fetched is None:
        raise SystemExit("The demo model is missing: `python3 make.py setup` fetches it.")
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    with tempfile.TemporaryDirectory(prefix="layerdeck-pictures-") as home:
        # Names of folders are seen in some pictures.
        for name, folder in (("HOME", ""), ("XDG_CACHE_HOME", "cache"), ("XDG_DATA_HOME", "data")):
            os.environ[name] = str(Path(home, folder))
        models = Path(home, "cache", "layerdeck", "models")
        models.mkdir(parents=True)
        shutil.copy2(fetched, models)
        shelf = Path(home, "models", "SmolLM2")
        shelf.mkdir(parents=True)
        shutil.copy2(fetched, shelf)
        (handbook() / "pictures").mkdir(exist_ok=True)
        application = QApplication(sys.argv[:1])
        window = make_window(Settings(Path(home, "settings.ini")), Theme(application, "light"))
        window.main.show()
        window.main.resize(SIZE)
        window.start(files=(), rig=None)
        try:
            take_pictures(window)
        finally:
            window.main.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
