"""The presenter of a chat's attachments: added by a dialog, drop or paste, shown as chips, and removed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PySide6.QtCore import QObject
from PySide6.QtWidgets import QFileDialog, QWidget

from app.background import Background
from app.chats.attacher import Attached, Attacher, Thumbnails, attachment_size
from app.models.answering import ChatStorage
from app.models.open_model import OpenModel
from engine.base.language import tr
from engine.base.units import format_count
from widgets.chat.attachment_row import AttachedFile
from widgets.chat.chat_pane import ChatPane

ATTACH_FILTER = tr("Text, code, PDF, images and sound (*)")


class AttachPresenter(QObject):
    """Shows the attachments of one model's next question as chips, and adds and removes files."""

    def __init__(
        self, model: OpenModel, storage: ChatStorage, background: Background, pane: ChatPane, window: QWidget
    ) -> None:
        super().__init__(window)
        self._loading = model.loading
        self._pane = pane
        self._window = window
        self.attacher = Attacher(model, background, self)
        self._thumbnails = Thumbnails(pane.message_list.gallery, storage, background, self)
        # Reading an attachment makes its thumbnail, so the image is not decoded a second time for its chip.
        self.attacher.pictured.connect(self._thumbnails.put)
        self.attacher.changed.connect(self._show)
        self.attacher.refused.connect(pane.attachments.show_error)
        model.conversation.chat_changed.connect(self._show)
        pane.files_given.connect(self._on_files)
        pane.image_given.connect(self.attacher.add_image)
        pane.attach_requested.connect(self._on_attach)
        pane.file_removed.connect(self.attacher.remove)

    def _on_files(self, files: Sequence[Path]) -> None:
        self.attacher.add(files)

    def _on_attach(self) -> None:
        dialog = QFileDialog(self._window, tr("Attach files"))
        dialog.setFileMode(QFileDialog.FileMode.ExistingFiles)
        dialog.setNameFilter(ATTACH_FILTER)
        dialog.filesSelected.connect(lambda names: self.attacher.add([Path(name) for name in names]))
        dialog.open()

    def _show(self) -> None:
        room = self._loading.snapshot.context_size
        self._pane.show_files(
            [shown_file(each, room) for each in self.attacher.files], is_reading=self.attacher.is_reading
        )
        self._pane.context_meter.show_pending(self.attacher.tokens)


def shown_file(file: Attached, room: int | None) -> AttachedFile:
    """Return the contents of an attachment's chip: name, size, tokens, and whether it is too large for the context.

    `room`: size of the context in tokens; None if no model is loaded.
    """
    if file.attachment is None:
        return AttachedFile(file.id, file.name, tr("reading…"))
    attachment = file.attachment
    # Only images have a thumbnail.
    picture = attachment.sha256 if attachment.kind == "image" else ""
    size = attachment_size(attachment)
    if file.tokens is None:
        return AttachedFile(file.id, file.name, size, picture=picture)
    words = tr("{size}, {tokens} tokens", size=size, tokens=format_count(file.tokens))
    if room is not None and file.tokens > room:
        words = tr(
            "{tokens} tokens, but the context has room for {room} tokens",
            tokens=format_count(file.tokens),
            room=format_count(room),
        )
        return AttachedFile(file.id, file.name, words, is_bad=True, picture=picture)
    return AttachedFile(file.id, file.name, words, picture=picture)
