"""Form for speculative decoding in the next load: none, n-gram, MTP head, a model of the library, or a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QHBoxLayout, QWidget

from engine.base.language import tr
from engine.planning.settings.context_settings import AUTO
from engine.planning.settings.table import DRAFTED_TOKENS, MOST_DRAFTED
from widgets.common.boxes import v_box
from widgets.common.inputs import ComboBox, SpinBox
from widgets.common.roles import plain_label, plain_tool_tip
from widgets.controls.setting_controls import show_number
from widgets.controls.values import DraftChoice, ProposedDraft

_NONE, _NGRAM, _MTP, _FILE = "none", "ngram", "mtp", "file"
_TIP = tr(
    "Speculative decoding: a draft model, an MTP head or repeated text (n-gram) proposes several tokens at a time, and "
    "the model checks them in one step. Answers stay the same, and are faster if the model accepts enough of the "
    "proposed tokens."
)


class DraftForm(QWidget):
    """Form for the draft (speculative decoding): its kind or model, number of drafted tokens, and its device.

    The form only emits requests; its owner opens the file dialog and reads the file.
    """

    removed = Signal()
    ngram_chosen = Signal()
    mtp_chosen = Signal()
    file_chosen = Signal(str)
    """Emitted with the path of the proposed draft model that the user has chosen."""
    file_requested = Signal()
    tokens_chosen = Signal(int)
    device_chosen = Signal(str)
    """Emitted with the id of the chosen device; empty for automatic."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._draft = DraftChoice()
        self.kind_box, self.device_box = ComboBox(), ComboBox()
        self.kind_box.setAccessibleName(tr("Draft"))
        self.kind_box.setToolTip(plain_tool_tip(_TIP))
        self.device_box.setAccessibleName(tr("Device of the draft model"))
        self.tokens_box = SpinBox()
        self.tokens_box.setRange(1, MOST_DRAFTED)
        self.tokens_box.setValue(DRAFTED_TOKENS)
        self.tokens_box.setKeyboardTracking(False)
        self.tokens_box.setAlignment(Qt.AlignmentFlag.AlignCenter)
        self.tokens_box.setAccessibleName(tr("Drafted tokens"))
        self.tokens_label = plain_label(tr("tokens"), "dim")
        self.line = plain_label("", "dim", wrap=True)
        row = QHBoxLayout()
        row.setSpacing(8)
        row.addWidget(plain_label(tr("Draft"), "dim"))
        row.addWidget(self.kind_box, 1)
        for widget in (self.device_box, self.tokens_label, self.tokens_box):
            row.addWidget(widget)
        column = v_box(self, spacing=8)
        column.addLayout(row)
        column.addWidget(self.line)
        self.kind_box.activated.connect(lambda _index: self._on_kind())
        self.device_box.activated.connect(self._on_device)
        self.tokens_box.valueChanged.connect(self.tokens_chosen)
        self.set_draft(self._draft, (), ())

    def set_draft(
        self, draft: DraftChoice, proposed: Sequence[ProposedDraft], devices: Sequence[str], *, has_mtp: bool = False
    ) -> None:
        """Show `draft` as the chosen kind of speculative decoding.

        `proposed`: models of the library that can be chosen as draft model.
        `devices`: ids of the devices that can hold the draft model.
        `has_mtp`: whether the model has an MTP head that can propose tokens.
        """
        self._draft = draft
        entries = [(tr("off"), _NONE), (tr("n-gram (needs no memory)"), _NGRAM)]
        if has_mtp or draft.kind == _MTP:
            entries.append((tr("MTP head of the model"), _MTP))
        entries += [(each.name, each.path) for each in proposed]
        if draft.path and draft.path not in [path for _, path in entries]:
            entries.append((Path(draft.path).name, draft.path))
        entries.append((tr("File…"), _FILE))
        # Clearing and filling emit `currentIndexChanged`, but not `activated`, so nothing is reported. A box that is
        # open keeps its entries.
        if [(self.kind_box.itemText(i), self.kind_box.itemData(i)) for i in range(self.kind_box.count())] != entries:
            self.kind_box.clear()
            for text, key in entries:
                self.kind_box.addItem(text, key)
        self.kind_box.setCurrentIndex(max(0, self.kind_box.findData(draft.path or draft.kind)))
        self.device_box.clear()
        self.device_box.addItems([AUTO, *devices])
        # Several devices of a layout file, or one that has gone away.
        if draft.device and draft.device not in devices:
            self.device_box.addItem(draft.device)
        index = self.device_box.findText(draft.device) if draft.device else 0
        self.device_box.setCurrentIndex(max(0, index))
        self.device_box.setVisible(bool(draft.path))
        for widget in (self.tokens_label, self.tokens_box):
            widget.setVisible(draft.kind != _NONE)
        show_number(self.tokens_box, draft.n_tokens)

    def _on_kind(self) -> None:
        key = self.kind_box.currentData()
        # The box shows the present draft until another one has been read.
        self.kind_box.setCurrentIndex(max(0, self.kind_box.findData(self._draft.path or self._draft.kind)))
        if key == _FILE:
            self.file_requested.emit()
        elif key == _NONE:
            self.removed.emit()
        elif key == _NGRAM:
            self.ngram_chosen.emit()
        elif key == _MTP:
            self.mtp_chosen.emit()
        else:
            self.file_chosen.emit(str(key))

    def _on_device(self) -> None:
        # The first entry is "auto", by its index: a device could have that name.
        device = "" if self.device_box.currentIndex() == 0 else self.device_box.currentText()
        if device != (self._draft.device or ""):
            self.device_chosen.emit(device)
