"""Parts of a model's details: its quantisations, its saved layouts, and the preset for new conversations."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QSignalBlocker, QSize, Qt, Signal
from PySide6.QtGui import QColor, QKeyEvent, QWheelEvent
from PySide6.QtWidgets import (
    QComboBox,
    QHBoxLayout,
    QHeaderView,
    QLineEdit,
    QPushButton,
    QTreeWidget,
    QTreeWidgetItem,
    QVBoxLayout,
    QWidget,
)

from engine.base.language import tr
from engine.base.units import format_bytes
from engine.library.entry import Quantisation
from engine.library.fit import speed_words
from engine.library.listed import Listed
from engine.library.notes import KeptDocument
from widgets.common.elided_label import ElidedLabel
from widgets.common.painting import keep_left_to_right
from widgets.common.palette import DARK, Palette
from widgets.common.roles import plain_label
from widgets.library.entry_words import fit_of

_MOST_ROWS = 8
ROW_HEIGHT = 26


class QuantisationList(QTreeWidget):
    """A row for each; a click chooses, a double click opens."""

    chosen = Signal()
    open_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._quantisations: tuple[Quantisation, ...] = ()
        keep_left_to_right(self)
        self._palette = DARK
        self._colours: list[str] = []
        self.setColumnCount(4)
        self.setHeaderLabels([tr("Quantisation"), tr("Size"), tr("On this rig"), tr("Predicted")])
        self.setRootIsDecorated(False)
        self.setUniformRowHeights(True)
        self.setAccessibleName(tr("Quantisations"))
        self.header().setSectionResizeMode(QHeaderView.ResizeMode.ResizeToContents)
        self.header().setStretchLastSection(True)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.currentItemChanged.connect(lambda *_: self.chosen.emit())
        self.itemDoubleClicked.connect(lambda *_: self.open_requested.emit())

    @property
    def current(self) -> Quantisation | None:
        row = self.currentIndex().row()
        return self._quantisations[row] if 0 <= row < len(self._quantisations) else None

    def apply_palette(self, palette: Palette) -> None:
        """Use the colours of `palette`."""
        self._palette = palette
        self._paint()

    def show_model(self, model: Listed, *, keep: bool) -> None:
        """List the quantisations of `model`; with `keep` the chosen one stays so, else the proposed one is."""
        before = self.current
        wanted = before.label if keep and before is not None else model.chosen.label
        with QSignalBlocker(self):
            self.clear()
            self._quantisations = model.entry.quantisations
            self._colours = []
            for each in self._quantisations:
                words, colour = fit_of(model, each)
                fit = model.fit_of(each)
                speed = "" if fit is None or each.fault else speed_words(fit).removesuffix(tr(" tokens/s"))
                item = QTreeWidgetItem([each.label or tr("unknown"), format_bytes(each.size_bytes), words, speed])
                item.setSizeHint(0, QSize(0, ROW_HEIGHT))
                item.setToolTip(3, tr("Tokens per second, slowest to fastest"))
                self._colours.append(colour)
                self.addTopLevelItem(item)
            labels = [each.label for each in self._quantisations]
            self.setCurrentIndex(self.model().index(labels.index(wanted) if wanted in labels else 0, 0))
        self._paint()
        rows = min(len(self._quantisations), _MOST_ROWS)
        self.setFixedHeight(self.header().sizeHint().height() + rows * ROW_HEIGHT + 6)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
            self.open_requested.emit()
            return
        super().keyPressEvent(event)

    def _paint(self) -> None:
        for row, colour in enumerate(self._colours):
            item = self.topLevelItem(row)
            if item is not None:
                item.setForeground(2, QColor(str(getattr(self._palette, colour))))


MAX_NAME = 80


class KeptLayouts(QWidget):
    """A row for each; below, where the model is the one on the table, a name to keep its layout under."""

    use_requested = Signal(object)  # KeptDocument
    forget_requested = Signal(object)  # KeptDocument
    keep_requested = Signal(str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._heading = plain_label(tr("Layouts"), "strong")
        self._rows = QVBoxLayout()
        self._rows.setSpacing(4)
        self.name_edit = QLineEdit()
        self.name_edit.setPlaceholderText(tr("Keep the present layout as…"))
        self.name_edit.setAccessibleName(tr("Name for the present layout"))
        self.name_edit.setMaxLength(MAX_NAME)
        self.name_edit.returnPressed.connect(self._keep)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(6)
        column.addWidget(self._heading)
        column.addLayout(self._rows)
        column.addWidget(self.name_edit)
        self.set_can_keep(False)

    def set_can_keep(self, can: bool) -> None:
        """Say whether the model that is shown is the one on the table."""
        self.name_edit.setVisible(can)
        self._heading.setVisible(can or self._rows.count() > 0)

    def show_layouts(self, documents: Sequence[KeptDocument]) -> None:
        """List the layouts among `documents`."""
        while (item := self._rows.takeAt(0)) is not None:
            widget = item.widget()
            if widget is not None:
                widget.deleteLater()
        for document in documents:
            if document.kind == "layout":
                self._rows.addWidget(self._row(document))
        self._heading.setVisible(self._rows.count() > 0 or not self.name_edit.isHidden())

    def _row(self, document: KeptDocument) -> QWidget:
        row = QWidget()
        use, forget = QPushButton(tr("Open with it")), QPushButton(tr("Forget"))
        forget.setProperty("role", "flat")
        use.clicked.connect(lambda: self.use_requested.emit(document))
        forget.clicked.connect(lambda: self.forget_requested.emit(document))
        layout = QHBoxLayout(row)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(ElidedLabel(document.name), 1)
        layout.addWidget(use)
        layout.addWidget(forget)
        return row

    def _keep(self) -> None:
        name = " ".join(self.name_edit.text().split())
        if name:
            self.name_edit.clear()
            self.keep_requested.emit(name)


_NONE = tr("No preset")


class PresetBox(QComboBox):
    """Lists presets by name, with none first; one that is chosen and no longer there is listed as long as it is."""

    preset_chosen = Signal(str)
    """Somebody chose this one, empty: none."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._names: tuple[str, ...] = ()
        self._chosen = ""
        self.setAccessibleName(tr("Preset of its conversations"))
        self.setToolTip(tr("Conversations with this model begin with it; presets are made in the chat's settings"))
        self.activated.connect(lambda row: self._choose(str(self.itemData(row))))
        self._fill()

    @property
    def chosen(self) -> str:
        """The name of the chosen preset, empty for none."""
        return self._chosen

    def show_presets(self, names: Sequence[str]) -> None:
        """Offer these presets."""
        self._names = tuple(names)
        self._fill()

    def show_chosen(self, name: str) -> None:
        """Show that this preset is chosen, empty: none."""
        if name != self._chosen:
            self._chosen = name
            self._fill()

    def wheelEvent(self, event: QWheelEvent) -> None:
        """Leave the wheel to what scrolls around it: nobody means to choose with it."""
        event.ignore()

    def _choose(self, name: str) -> None:
        if name != self._chosen:
            self.show_chosen(name)
            self.preset_chosen.emit(name)

    def _fill(self) -> None:
        self.clear()
        self.addItem(_NONE, "")
        for name in self._names:
            self.addItem(name, name)
        if self._chosen and self._chosen not in self._names:
            self.addItem(tr("{chosen} (no longer there)", chosen=self._chosen), self._chosen)
        self.setCurrentIndex(max(0, self.findData(self._chosen)))
