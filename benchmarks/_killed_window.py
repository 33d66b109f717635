"""The window process of `killed_windows` and `two_windows`: does random actions, and reports what it has painted.

    python -m benchmarks._killed_window SEED MODEL URL

Reports are JSON lines on standard output. A message is reported after its paint event, so that each reported message
was visible on the screen.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import sys
import tempfile
from pathlib import Path

import msgspec
from PySide6.QtCore import QEvent, QObject, QTimer
from PySide6.QtWidgets import QApplication, QWidget

from app.chats.transfer import ChatTransfer
from app.gui import QuitOnSignals
from app.logs import start_logging
from app.opening import Opening, StartOptions
from app.paths import log_path
from app.settings import Settings
from app.theme import Theme
from app.wiring import WindowObjects
from engine.chat.conversation import Conversation
from engine.chat.markdown_file import as_markdown
from engine.chat.message import Message
from engine.library.downloads.job import web_job
from engine.library.hub.addresses import WebAddress
from engine.runtime.session.status import Phase

LEAST_MS, MOST_MS = 30, 250
SHARE_OF_WATCHING = 0.9
OPENS_WITHIN_S = 60.0
"""Seconds after which a window that has not opened writes what its threads do to standard error."""


def tell(kind: str, **values: object) -> None:
    os.write(1, json.dumps({"kind": kind, **values}).encode() + b"\n")


class Actor(QObject):
    """Does random actions in the window, and reports the messages that the chat paints and the notices."""

    def __init__(self, window: WindowObjects, seed: int, url: str) -> None:
        super().__init__(window.main)
        self._window, self._seed, self._url = window, seed, url
        self._chance = random.Random(seed)
        self._count = 0
        self._told: dict[str, str] = {}
        self._transfer = ChatTransfer(window.desk.archive, window.desk.notices, self)
        window.desk.notices.given.connect(lambda notice: tell("notice", text=notice.text, bad=notice.bad))
        self._timer = QTimer(self, singleShot=True)
        self._timer.timeout.connect(self._on_step)
        self._timer.start(LEAST_MS)
        application = QApplication.instance()
        assert application is not None
        application.installEventFilter(self)
        faulthandler.cancel_dump_traceback_later()
        tell("opened")

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() is QEvent.Type.Paint and isinstance(watched, QWidget):
            chat = self._window.views.current.chat
            if chat.isAncestorOf(watched):
                # After the event: a kill in between would leave a line of something that nobody saw.
                QTimer.singleShot(0, self, self._tell_painted)
        return False

    def _tell_painted(self) -> None:
        for message in self._window.views.current.chat.message_list.messages[-3:]:
            if self._told.get(message.id) != message.text:
                self._told[message.id] = message.text
                tell("painted", id=message.id, role=message.role, text=message.text)

    def _on_step(self) -> None:
        self._timer.start(self._chance.randint(LEAST_MS, MOST_MS))
        self._count += 1
        # While an answer comes, most moments are left to it: a new conversation takes it off the screen.
        if self._window.desk.loading.phase is Phase.ANSWERING and self._chance.random() < SHARE_OF_WATCHING:
            return
        steps = [
            self._send,
            self._send,
            self._send,
            self._edit,
            self._change_context,
            self._import,
            self._new,
            self._download,
        ]
        self._chance.choice(steps)()

    @property
    def _name(self) -> str:
        return f"{self._seed}-{self._count}"

    def _send(self) -> None:
        desk = self._window.desk
        if desk.loading.phase is Phase.READY and desk.models.current.conversation.can_send:
            desk.models.current.conversation.send(f"question {self._name}")
        elif desk.loading.phase in (Phase.STOPPED, Phase.FAILED) and desk.document.edit is not None:
            desk.loader.load()

    def _edit(self) -> None:
        chat = self._window.desk.models.current.conversation
        asked = [each for each in chat.prompt_path if each.role == "user"]
        if asked and not chat.is_answering and chat.can_send:
            chat.edit(self._chance.choice(asked).id, f"edited {self._name}")

    def _change_context(self) -> None:
        document = self._window.desk.document
        edit = document.edit
        if edit is not None:
            document.set_context(msgspec.structs.replace(edit.context, n_ctx=256 * self._chance.randint(8, 64)))

    def _import(self) -> None:
        path = Path(tempfile.gettempdir(), f"imported-{self._name}.md")
        chat = Conversation(id=f"imported-{self._name}", title=f"imported {self._name}")
        path.write_text(as_markdown(chat, [Message(id=f"hello-{self._name}", role="user", content="hello")]))
        self._transfer.import_file(path)

    def _new(self) -> None:
        self._window.desk.chat_controller.new()

    def _download(self) -> None:
        if self._count % 4 == 0:
            name = f"m{self._seed % 7}.gguf"
            folder = Path(os.environ["HOME"], "models")
            address = WebAddress(f"{self._url}/plain/{name}", name)
            self._window.desk.finder.downloads.add(web_job(self._name, address, folder))


def main() -> None:
    seed, model, url = sys.argv[1:]
    faulthandler.dump_traceback_later(OPENS_WITHIN_S)
    start_logging(log_path())
    application = QApplication(sys.argv[:1])
    opening = Opening(Settings(), Theme(application, "dark"), StartOptions([Path(model)], None))
    signals = QuitOnSignals(application)
    actors: list[Actor] = []
    opening.opened.connect(lambda window: actors.append(Actor(window, int(seed), url)))
    opening.show()
    application.exec()
    signals.close()


if __name__ == "__main__":
    main()
