"""The row of attachments of the next question: a chip above the input for each file, with its size and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from msgspec import Struct
from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QFrame, QLabel, QToolButton, QWidget

from engine.base.language import tr
from widgets.chat.images import Gallery
from widgets.common.boxes import h_box, v_box
from widgets.common.elided_label import ElidedLabel
from widgets.common.roles import plain_label, set_role, tool_button
from widgets.common.wrap_layout import WrapLayout

CHIP_WIDTH_PX = 260
PICTURE_PX = 32


class AttachedFile(Struct, frozen=True):
    """An attachment of the next question, as the row shows it.

    `detail`: size and tokens of the file as text, or a note that the file is being read.
    `is_bad`: whether the file is too large for the context.
    `picture`: key of the thumbnail (SHA-256 of the image); empty for files that are not images.
    """

    id: str
    name: str
    detail: str
    is_bad: bool = False
    picture: str = ""


class AttachmentRow(QWidget):
    """Shows a chip for each attachment, and below the chips the reason why a file cannot be attached."""

    removed = Signal(str)

    def __init__(self, gallery: Gallery, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._gallery = gallery
        self._pictures: dict[str, QLabel] = {}
        # A thumbnail is decoded in a process of its own, and arrives after its chip.
        gallery.arrived.connect(self._show_picture)
        self._files: tuple[AttachedFile, ...] = ()
        self._chips = QWidget()
        self._flow = WrapLayout(self._chips, spacing=6)
        self.error_label = plain_label("", "error", wrap=True)
        self.remove_buttons: dict[str, QToolButton] = {}
        column = v_box(self, spacing=4)
        column.addWidget(self._chips)
        column.addWidget(self.error_label)
        self._refresh()

    @property
    def files(self) -> tuple[AttachedFile, ...]:
        """The shown attachments."""
        return self._files

    def show_files(self, files: Sequence[AttachedFile]) -> None:
        """Show a chip for each file."""
        # Unchanged chips keep the focus of their buttons.
        if tuple(files) == self._files:
            return
        self._files = tuple(files)
        self.remove_buttons.clear()
        self._pictures.clear()
        while (item := self._flow.takeAt(0)) is not None:
            chip = item.widget()
            if chip is not None:
                chip.hide()
                chip.deleteLater()
        for file in self._files:
            self._flow.addWidget(self._make_chip(file))
        self._refresh()

    def show_error(self, sentence: str) -> None:
        """Show `sentence` as the reason why a file cannot be attached; an empty sentence removes the reason."""
        self.error_label.setText(sentence)
        self._refresh()

    def _make_chip(self, file: AttachedFile) -> QFrame:
        chip = QFrame()
        chip.setProperty("role", "card")
        chip.setMaximumWidth(CHIP_WIDTH_PX + (2 * PICTURE_PX if file.picture else 0))
        chip.setAccessibleName(tr("Attached: {name}, {detail}", name=file.name, detail=file.detail))
        name = ElidedLabel(file.name)
        name.setMaximumWidth(CHIP_WIDTH_PX // 2)
        detail = plain_label(file.detail, "dim")
        if file.is_bad:
            set_role(detail, "error")
        button = tool_button("×", tr("Remove {name}", name=file.name), tip=tr("Remove this file"))
        button.clicked.connect(partial(self.removed.emit, file.id))
        self.remove_buttons[file.id] = button
        row = h_box(chip, spacing=6, margins=(8, 2, 2, 2))
        if file.picture:
            row.addWidget(self._make_picture(file.picture))
        for widget in (name, detail, button):
            row.addWidget(widget)
        return chip

    def _make_picture(self, picture: str) -> QLabel:
        label = self._pictures[picture] = QLabel()
        label.setFixedSize(PICTURE_PX, PICTURE_PX)
        label.setAlignment(Qt.AlignmentFlag.AlignCenter)
        self._show_picture(picture)
        self._gallery.ask(picture)
        return label

    def _show_picture(self, picture: str) -> None:
        label, found = self._pictures.get(picture), self._gallery.pictures.get(picture)
        if label is not None and found is not None:
            side = PICTURE_PX
            fitting = found.scaled(
                side, side, Qt.AspectRatioMode.KeepAspectRatio, Qt.TransformationMode.SmoothTransformation
            )
            label.setPixmap(fitting)

    def _refresh(self) -> None:
        self._chips.setVisible(bool(self._files))
        self.error_label.setVisible(bool(self.error_label.text()))
        self.setVisible(bool(self._files) or bool(self.error_label.text()))
