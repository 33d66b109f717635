"""Attachments of the next question: files are read in the background, and their tokens counted by the loaded model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct
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
from engine.runtime.media.images.pictures import ImageFacts, Picture, inspect_image
from engine.runtime.protocol.messages import Counted
from engine.runtime.protocol.requests import CountTokens
from engine.runtime.session.events import Answered
from widgets.chat.images import Gallery

MAX_FILES = 16
MAX_NAME_CHARACTERS = 80
PASTED = tr("Pasted image")
BLIND = tr(
    "{name} cannot be attached, because the loaded model has no projector for images. Choose its mmproj file in the "
    "load settings, and load again."
)
DEAF = tr(
    "{name} cannot be attached, because the loaded model has no projector for sound. Choose its mmproj file in the "
    "load settings, and load again."
)

_log = logging.getLogger("layerdeck.images")


class Attached(Struct):
    """A file to send with the next question.

    `id`: id of this attachment. `attachment`: what is sent; None while the file is being read.
    `data`: bytes of the file; None if they are stored already.
    `tokens`: number of tokens of the file in the prompt; None if they were not counted.
    """

    id: str
    name: str
    attachment: Attachment | None = None
    data: bytes | None = None
    tokens: int | None = None


class Attacher(QObject):
    """The files attached to the next question in each conversation of one model; lost when the window closes."""

    changed = Signal()
    refused = Signal(str)
    """Carries the reason why a file cannot be attached; empty to remove the error."""
    pictured = Signal(str, Picture)
    """Carries the SHA-256 of an image and its thumbnail."""

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
        """The attachments of the conversation that the chat of this model shows."""
        return tuple(self._files.get(self._conversation.chat.id, ()))

    @property
    def is_reading(self) -> bool:
        """Whether an attachment of the shown conversation is still being read."""
        return any(each.attachment is None for each in self.files)

    @property
    def tokens(self) -> int:
        """Number of tokens of all attachments together. Attachments that were not counted are left out."""
        return sum(each.tokens or 0 for each in self.files)

    def add(self, paths: Sequence[Path]) -> None:
        """Read files in the background, and attach them to the next question."""
        self.refused.emit("")
        for path in paths:
            if len(self.files) >= MAX_FILES:
                self.refused.emit(_too_many())
                break
            self._read(path.name, partial(read_attachment, path))
        self.changed.emit()

    def add_image(self, data: bytes) -> None:
        """Attach an image that is not a file, such as a pasted one, to the next question.

        `data`: bytes of an image file.
        """
        self.refused.emit("")
        # A pasted image counts as a file.
        if len(self.files) >= MAX_FILES:
            self.refused.emit(_too_many())
            return
        # Pasted images have no file name, so they are numbered.
        number = 1 + sum(1 for each in self.files if each.name.startswith(PASTED))
        name = f"{PASTED} {number}"
        self._read(name, partial(as_attachment, data, name))
        self.changed.emit()

    def remove(self, file: str) -> None:
        """Remove the attachment with this id."""
        files = self._files.get(self._conversation.chat.id, [])
        files[:] = [each for each in files if each.id != file]
        self.refused.emit("")
        self.changed.emit()

    def take(self) -> tuple[tuple[Attachment, bytes | None], ...]:
        """Remove all attachments of the shown conversation, and return them with their bytes.

        Attachments that are still being read are not returned. The bytes are None if they are stored already.
        """
        files = self._files.pop(self._conversation.chat.id, [])
        self.refused.emit("")
        self.changed.emit()
        return tuple((each.attachment, each.data) for each in files if each.attachment is not None)

    def _read(self, name: str, read: Callable[[], ReadFile]) -> None:
        files = self._files.setdefault(self._conversation.chat.id, [])
        file = Attached(new_id(), show(name, MAX_NAME_CHARACTERS))
        files.append(file)

        def take(found: ReadFile) -> None:
            # Told before the question is sent: the model would refuse it only then.
            if lacks := self._lacks(found.attachment):
                refuse(ChatError(lacks.format(name=file.name)))
                return
            file.attachment, file.data = found.attachment, found.data
            if found.thumbnail is not None:
                self.pictured.emit(found.attachment.sha256, found.thumbnail)
            self._count(file)
            self.changed.emit()

        def refuse(error: EngineError) -> None:
            # The user may have removed the file while it was read.
            if file in files:
                files.remove(file)
                self.refused.emit(error.summary())
                self.changed.emit()

        self._background.run(tr("Reading {name}", name=file.name), read, take, refuse)

    def _lacks(self, attachment: Attachment) -> str:
        """Return a message if `attachment` needs a projector that the loaded model does not have; else an empty text.

        The text is also empty if no model is loaded.
        """
        info = self._loading.snapshot.loaded
        if info is None:
            return ""
        projector = info.spec.plan.edit.side_files.projector
        if attachment.kind == "image" and (projector is None or not projector.sees):
            return BLIND
        return DEAF if attachment.kind == "audio" and (projector is None or not projector.hears) else ""

    # ------------------------------------------------------------------ tokens

    def _count(self, file: Attached) -> None:
        if file.attachment is None or not self._loading.phase.is_loaded:
            return
        try:
            number = self._loading.ask(_count_request(file.attachment))
        except EngineError:
            return  # The model was lost a moment ago. The file is counted when one is loaded again.
        self._counting[number] = file

    def _on_answered(self, event: Answered) -> None:
        file = self._counting.pop(event.request, None)
        if file is not None and isinstance(event.answer, Counted):
            file.tokens = sum((*event.answer.texts, *event.answer.media))
            self.changed.emit()

    def _on_loaded_changed(self) -> None:
        # Another model has another vocabulary.
        self._counting.clear()
        for files in self._files.values():
            for file in files:
                file.tokens = None
                self._count(file)
        self.changed.emit()


def _too_many() -> str:
    return tr(
        "At most {max_files} files can be attached to a question. Remove one, or send two questions.",
        max_files=MAX_FILES,
    )


def _count_request(attachment: Attachment) -> CountTokens:
    file = media_file(attachment)
    return CountTokens(texts=(attachment_text(attachment),)) if file is None else CountTokens(media=(file,))


class Thumbnails(QObject):
    """Reads the thumbnails that the gallery of a chat requests.

    An image that cannot be read stays an empty box. File names are not written to the log.
    """

    def __init__(
        self, gallery: Gallery, storage: ChatStorage, background: Background, parent: QObject | None = None
    ) -> None:
        super().__init__(parent)
        self._gallery, self._storage, self._background = gallery, storage, background
        gallery.wanted.connect(self._on_wanted)

    def put(self, sha256: str, picture: Picture) -> None:
        """Show `picture`, a thumbnail, in the gallery. `sha256`: SHA-256 of the image that it shows."""
        self._gallery.put(sha256, picture.width_px, picture.height_px, picture.pixels)

    def _on_wanted(self, sha256: str) -> None:
        def look(files: Mapping[str, bytes]) -> None:
            self._background.run("Reading an image", lambda: _thumbnail(files.get(sha256)), take, refuse, quiet=True)

        def take(looked: ImageFacts) -> None:
            self.put(sha256, looked.thumbnail)

        def refuse(error: EngineError) -> None:
            _log.info("an image is not shown: %s", error.summary())

        self._storage.read_files((sha256,), look)


def _thumbnail(data: bytes | None) -> ImageFacts:
    if data is None:
        raise ChatError(tr("An attached image cannot be shown, because its data is no longer stored."))
    return inspect_image(data, tr("An image"))


def attachment_size(attachment: Attachment) -> str:
    """Return the size of an attachment as text: pixels of an image, length of a sound, bytes of another file."""
    match attachment.kind:
        case "image":
            return f"{attachment.width_px} × {attachment.height_px}"
        case "audio":
            return length_text(attachment.length_ms)
    return format_bytes(attachment.size_bytes)


def length_text(length_ms: int) -> str:
    """Return the length of a sound as `minutes:seconds`, at least one second."""
    minutes, seconds = divmod(max(1, round(length_ms / 1000)), 60)
    return f"{minutes}:{seconds:02}"
