"""The input of the chat: Enter sends, Shift+Enter inserts a line break, and it grows up to a few lines."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import QBuffer, QEvent, QMimeData, Qt, Signal
from PySide6.QtGui import QFocusEvent, QImage, QKeyEvent, QKeySequence, QResizeEvent
from PySide6.QtWidgets import QApplication, QPlainTextEdit, QSizePolicy, QWidget

from engine.base.language import tr
from widgets.common.delayed_call import DelayedCall

MAX_LINES = 6
IMAGE_TYPES = ("image/png", "image/jpeg", "image/webp", "image/bmp", "image/gif")
MODEL_ENDING = ".gguf"
BLINKING_MS = 10_000
"""Milliseconds after the last key press until the cursor stops blinking, as in GTK. Each blink wakes the process."""


def files_of(source: QMimeData) -> tuple[Path, ...]:
    """Return the dropped or pasted files that can be attached.

    If one of the files is a model, the result is empty, because the window opens models.
    """
    files = tuple(Path(url.toLocalFile()) for url in source.urls() if url.isLocalFile())
    return () if any(file.suffix.lower() == MODEL_ENDING for file in files) else files


def image_of(source: QMimeData) -> bytes:
    """Return the image of a clipboard or a drop as the bytes of an image file; empty if there is none.

    An image file is not decoded here. Plain pixels are encoded as PNG.
    """
    for kind in IMAGE_TYPES:
        if source.hasFormat(kind) and (data := bytes(source.data(kind).data())):
            return data
    image = source.imageData() if source.hasImage() else None
    if not isinstance(image, QImage) or image.isNull():
        return b""
    written = QBuffer()
    written.open(QBuffer.OpenModeFlag.WriteOnly)
    image.save(written, "PNG")  # type: ignore[call-overload]  # the stub wants bytes, which the call refuses
    return bytes(written.data().data())


class PromptEdit(QPlainTextEdit):
    """Multi-line input. Enter emits `submitted`; the text stays until the caller clears it."""

    submitted = Signal()
    files_given = Signal(object)  # tuple[Path, ...]
    """Emitted with the paths of files that were dropped or pasted."""
    image_given = Signal(bytes)
    """Emitted with the bytes of an image that was pasted or dropped and is not a file."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setPlaceholderText(tr("Ask something…"))
        self.setAccessibleName(tr("Message to the model"))
        # Tab leaves the input, as people without a mouse expect.
        self.setTabChangesFocus(True)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.textChanged.connect(self._fit_height)
        self._flash_ms = 0  # the cursor's flash time while it does not blink
        self._stop_blinking = DelayedCall(self, self._hold_cursor, BLINKING_MS)
        self._fit_height()

    def canInsertFromMimeData(self, source: QMimeData) -> bool:
        """Return whether text, files or an image can be inserted. A model file is refused: the window opens it."""
        if source.hasUrls() and not files_of(source) and any(url.isLocalFile() for url in source.urls()):
            return False
        return bool(files_of(source)) or source.hasImage() or super().canInsertFromMimeData(source)

    def insertFromMimeData(self, source: QMimeData) -> None:
        """Insert text at the cursor; emit a signal for files and images."""
        files = files_of(source)
        if files:
            self.files_given.emit(files)
        elif not source.hasText() and (image := image_of(source)):
            self.image_given.emit(image)
        else:
            super().insertFromMimeData(source)

    def event(self, event: QEvent) -> bool:
        """Pass Undo and Redo on to the window if the input has nothing to undo or redo.

        The window applies them to the layout.
        """
        if event.type() == QEvent.Type.ShortcutOverride and isinstance(event, QKeyEvent):
            undoes = event.matches(QKeySequence.StandardKey.Undo) and not self.document().isUndoAvailable()
            if undoes or (event.matches(QKeySequence.StandardKey.Redo) and not self.document().isRedoAvailable()):
                event.ignore()
                return False
        return super().event(event)

    def focusInEvent(self, event: QFocusEvent) -> None:
        self._blink()
        super().focusInEvent(event)

    def focusOutEvent(self, event: QFocusEvent) -> None:
        # The setting is that of all fields of the application.
        self._blink()
        self._stop_blinking.stop()
        super().focusOutEvent(event)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        self._blink()
        is_return = event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter)
        if is_return and not event.modifiers() & Qt.KeyboardModifier.ShiftModifier:
            self.submitted.emit()
            return
        super().keyPressEvent(event)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit_height()

    def _blink(self) -> None:
        if self._flash_ms:
            QApplication.setCursorFlashTime(self._flash_ms)
            self._flash_ms = 0
        self._stop_blinking.start()

    def _hold_cursor(self) -> None:
        """Show the cursor without blinking, until a key is pressed or the focus changes."""
        self._flash_ms = QApplication.cursorFlashTime()
        QApplication.setCursorFlashTime(0)

    def _fit_height(self) -> None:
        # A plain text document measures its height in lines.
        wanted_lines = max(round(self.document().size().height()), 1)
        lines = min(wanted_lines, MAX_LINES)
        policy = Qt.ScrollBarPolicy.ScrollBarAsNeeded if wanted_lines > lines else Qt.ScrollBarPolicy.ScrollBarAlwaysOff
        self.setVerticalScrollBarPolicy(policy)
        # Before the first layout the viewport has an arbitrary size.
        around = max(self.height() - self.viewport().height(), 2 * self.frameWidth()) + 2 * round(
            self.document().documentMargin()
        )
        height = lines * self.fontMetrics().lineSpacing() + around
        # Setting the height emits a resize event, which calls this again.
        if height != self.height():
            self.setFixedHeight(height)
