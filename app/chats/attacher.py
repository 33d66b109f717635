"""Files that go with the next question of a conversation: read in the background, counted by the loaded model, and
shown with their size and a small picture.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
from PySide6.QtCore import QObject, Signal

from app.background import Background
from app.models.answering import ChatStorage
from app.models.loading import Loading
from app.models.open_model import OpenModel
from engine.base.errors import ChatError, EngineError
from engine.base.language import tr
from engine.base.texts import show
from engine.base.units import format_bytes
from engine.chat.asking import attachment_text, media_file
from engine.chat.attachments import ReadFile, as_attachment, read_attachment
from engine.chat.message import Attachment, new_id
from engine.runtime.media.images.pictures import Looked, Picture, look_at
from engine.runtime.protocol.messages import Counted, CountTokens
from engine.runtime.session.events import Answered
from engine.runtime.session.status import Phase
from widgets.chat.images import Gallery

MAX_FILES = 16
MAX_NAME_CHARACTERS = 80
PASTED = tr("Pasted image")
BLIND = tr(
    "{name} is not taken: the loaded model reads no images. Choose its projector (mmproj "
    "file) beside the model in the settings, and load again."
)
DEAF = tr(
    "{name} is not taken: the loaded model hears no sound. Choose a projector for sound (mmproj "
    "file) beside the model in the settings, and load again."
)

_log = logging.getLogger("layerdeck.images")


@dataclass(slots=True)
class Attached:
    """A file. `attachment` None: it is being read; `data` None: its bytes are kept already; `tokens` None: nobody
    counted them."""

    id: str
    name: str
    attachment: Attachment | None = None
    data: bytes | None = None
    tokens: int | None = None


class Attacher(QObject):
    """One model's. Each conversation has files of its own while the window is open."""

    changed = Signal()
    refused = Signal(str)
    """Why a file was not taken."""
    pictured = Signal(str, Picture)
    """The small picture of an image, by its SHA-256."""

    def __init__(self, model: OpenModel, background: Background, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._conversation = model.conversation
        self._loading: Loading = model.loading
        self._background = background
        self._files: dict[str, list[Attached]] = {}
        self._counting: dict[int, Attached] = {}
        model.loading.bridge.answered.connect(self._on_answered)
        model.loading.loaded_changed.connect(self._on_loaded_changed)

    @property
    def files(self) -> tuple[Attached, ...]:
        """Those of the conversation that is shown."""
        return tuple(self._files.get(self._conversation.chat.id, ()))

    @property
    def is_reading(self) -> bool:
        """Whether one of them is not there yet."""
        return any(each.attachment is None for each in self.files)

    @property
    def tokens(self) -> int:
        """What those that were counted take."""
        return sum(each.tokens or 0 for each in self.files)

    def add(self, paths: Sequence[Path]) -> None:
        """Read files, to go with the next question."""
        self.refused.emit("")
        for path in paths:
            if len(self.files) >= MAX_FILES:
                self.refused.emit(_too_many())
                break
            self._read(path.name, partial(read_attachment, path))
        self.changed.emit()

    def add_image(self, data: bytes) -> None:
        """Take an image that has no file, to go with the next question."""
        self.refused.emit("")
        if len(self.files) >= MAX_FILES:
            self.refused.emit(_too_many())
            return
        number = 1 + sum(1 for each in self.files if each.name.startswith(PASTED))
        name = f"{PASTED} {number}"
        self._read(name, partial(as_attachment, data, name))
        self.changed.emit()

    def remove(self, file: str) -> None:
        """Leave a file out."""
        files = self._files.get(self._conversation.chat.id, [])
        files[:] = [each for each in files if each.id != file]
        self.refused.emit("")
        self.changed.emit()

    def take(self) -> tuple[tuple[Attachment, bytes | None], ...]:
        """Return the files, which go now."""
        files = self._files.pop(self._conversation.chat.id, [])
        self.refused.emit("")
        self.changed.emit()
        return tuple((each.attachment, each.data) for each in files if each.attachment is not None)

    def give_back(self, attachments: Sequence[Attachment]) -> None:
        """Take files again that went with a question which was not answered."""
        if attachments and not self.files:
            back = [Attached(new_id(), each.name, msgspec.structs.replace(each, id=new_id())) for each in attachments]
            self._files[self._conversation.chat.id] = back
            for each in back:
                self._count(each)
            self.changed.emit()

    def _read(self, name: str, read: Callable[[], ReadFile]) -> None:
        files = self._files.setdefault(self._conversation.chat.id, [])
        file = Attached(new_id(), show(name, MAX_NAME_CHARACTERS))
        files.append(file)

        def take(found: ReadFile) -> None:
            if lacks := self._lacks(found.attachment):
                refuse(ChatError(lacks.format(name=file.name)))
                return
            file.attachment, file.data = found.attachment, found.data
            if found.thumbnail is not None:
                self.pictured.emit(found.attachment.sha256, found.thumbnail)
            self._count(file)
            self.changed.emit()

        def refuse(error: EngineError) -> None:
            if file in files:
                files.remove(file)
                self.refused.emit(error.summary())
                self.changed.emit()

        self._background.run(tr("Reading {name}", name=file.name), read, take, refuse)

    def _lacks(self, attachment: Attachment) -> str:
        """Return the sentence where what is loaded cannot read this; empty where it can, or nothing is loaded."""
        info = self._loading.snapshot.loaded
        if info is None:
            return ""
        projector = info.order.plan.edit.side_files.projector
        if attachment.kind == "image" and (projector is None or not projector.sees):
            return BLIND
        return DEAF if attachment.kind == "audio" and (projector is None or not projector.hears) else ""

    # ------------------------------------------------------------------ tokens

    def _count(self, file: Attached) -> None:
        if file.attachment is None or self._loading.phase not in (Phase.READY, Phase.ANSWERING):
            return
        try:
            number = self._loading.ask(_count_request(file.attachment))
        except EngineError:
            return  # Lost a moment ago; counted when a model is loaded again.
        self._counting[number] = file

    def _on_answered(self, event: Answered) -> None:
        file = self._counting.pop(event.request, None)
        if file is not None and isinstance(event.answer, Counted):
            file.tokens = sum((*event.answer.texts, *event.answer.media))
            self.changed.emit()

    def _on_loaded_changed(self) -> None:
        self._counting.clear()
        for files in self._files.values():
            for file in files:
                file.tokens = None
                self._count(file)
        self.changed.emit()


def _too_many() -> str:
    return tr("{max_files} files go with one question; leave one out, or ask in two steps.", max_files=MAX_FILES)


def _count_request(attachment: Attachment) -> CountTokens:
    file = media_file(attachment)
    return CountTokens(texts=(attachment_text(attachment),)) if file is None else CountTokens(media=(file,))


class Thumbnails(QObject):
    """Gives a gallery what it asks for. One that cannot be read stays a box, and is in the log without its name."""

    def __init__(
        self, gallery: Gallery, storage: ChatStorage, background: Background, parent: QObject | None = None
    ) -> None:
        super().__init__(parent)
        self._gallery, self._storage, self._background = gallery, storage, background
        gallery.wanted.connect(self._on_wanted)

    def put(self, sha256: str, picture: Picture) -> None:
        """Take a picture that is here already."""
        self._gallery.put(sha256, picture.width_px, picture.height_px, picture.pixels)

    def _on_wanted(self, sha256: str) -> None:
        def look(files: Mapping[str, bytes]) -> None:
            self._background.run("Reading an image", lambda: _thumbnail(files.get(sha256)), take, refuse, quiet=True)

        def take(looked: Looked) -> None:
            self.put(sha256, looked.thumbnail)

        def refuse(error: EngineError) -> None:
            _log.info("an image is not shown: %s", error.summary())

        self._storage.read_files((sha256,), look)


def _thumbnail(data: bytes | None) -> Looked:
    if data is None:
        raise ChatError(tr("An image is not kept any more."))
    return look_at(data, tr("An image"))


def attachment_size(attachment: Attachment) -> str:
    """Return the sides of an image, the length of a sound, the bytes of any other file."""
    match attachment.kind:
        case "image":
            return f"{attachment.width_px} × {attachment.height_px}"
        case "audio":
            return length_words(attachment.length_ms)
    return format_bytes(attachment.size_bytes)


def length_words(length_ms: int) -> str:
    """Return a length of sound as "minutes:seconds", at least one second."""
    minutes, seconds = divmod(max(1, round(length_ms / 1000)), 60)
    return f"{minutes}:{seconds:02}"
