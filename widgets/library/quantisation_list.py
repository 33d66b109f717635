"""The quantisations of a model: size, how each fits, how fast."""

from __future__ import annotations

from PySide6.QtCore import QSignalBlocker, QSize, Qt, Signal
from PySide6.QtGui import QColor, QKeyEvent
from PySide6.QtWidgets import QHeaderView, QTreeWidget, QTreeWidgetItem, QWidget

from engine.language import tr
from engine.library.entry import Quantisation
from engine.library.fit import speed_words
from engine.library.listed import Listed
from engine.units import format_bytes
from widgets.common.painting import keep_left_to_right
from widgets.common.palette import DARK, Palette
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
