"""Small pictures of images that conversations have: decoded beside the GUI thread, by a process of its own."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from PySide6.QtCore import QObject

from app.background import Background
from app.models.chat_keeper import ChatKeeper
from engine.errors import ChatError, EngineError
from engine.images.pictures import Looked, Picture, look_at
from engine.language import tr
from widgets.chat.images import Gallery

_log = logging.getLogger("layerdeck.images")


class Thumbnails(QObject):
    """Gives a gallery what it asks for. One that cannot be read stays a box, and is in the log without its name."""

    def __init__(
        self, gallery: Gallery, keeper: ChatKeeper, background: Background, parent: QObject | None = None
    ) -> None:
        super().__init__(parent)
        self._gallery, self._keeper, self._background = gallery, keeper, background
        gallery.wanted.connect(self._on_wanted)

    def put(self, sha256: str, picture: Picture) -> None:
        """Take a picture that is here already."""
        self._gallery.put(sha256, picture.width_px, picture.height_px, picture.pixels)

    def _on_wanted(self, sha256: str) -> None:
        def look(files: Mapping[str, bytes]) -> None:
            self._background.run("Reading an image", lambda: _look(files.get(sha256)), take, refuse, quiet=True)

        def take(looked: Looked) -> None:
            self.put(sha256, looked.thumbnail)

        def refuse(error: EngineError) -> None:
            _log.info("an image is not shown: %s", error.summary())

        self._keeper.read_files((sha256,), look)


def _look(data: bytes | None) -> Looked:
    if data is None:
        raise ChatError(tr("An image is not kept any more."))
    return look_at(data, tr("An image"))
