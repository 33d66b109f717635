"""Parts of a model's details: its quantisations, its saved layouts, and the preset for new conversations."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QSignalBlocker, QSize, Qt, Signal
from PySide6.QtGui import QColor, QKeyEvent, QWheelEvent
from PySide6.QtWidgets import (
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
from engine.library.fit import speed_range_text
from engine.library.listed import Listed
from engine.library.notes import SavedDocument
from widgets.common.boxes import h_box, v_box
from widgets.common.elided_label import ElidedLabel
from widgets.common.inputs import ComboBox
from widgets.common.painting import keep_left_to_right
from widgets.common.palette import DARK, Palette
from widgets.common.roles import plain_label, plain_tool_tip
from widgets.library.entry_texts import fit_of, short_speed

_MOST_ROWS = 8
ROW_HEIGHT = 26


class QuantisationList(QTreeWidget):
    """List of a model's quantisations. A click selects one; a double click or Enter opens it."""

    chosen = Signal()
    open_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._quantisations: tuple[Quantisation, ...] = ()
        keep_left_to_right(self)
        self._palette = DARK
        self._colours: list[str] = []
        self.setColumnCount(4)
        self.setHeaderLabels([tr("Quantisation"), tr("Size"), tr("On this rig"), tr("Tokens/s")])
        self.setRootIsDecorated(False)
        # Lets Qt measure one row instead of all; the height is computed from `ROW_HEIGHT` below, too.
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
        """Apply the colours of `palette`."""
        self._palette = palette
        self._paint()

    def show_model(self, model: Listed, *, keep: bool) -> None:
        """List the quantisations of `model`.

        `keep`: whether the selection stays; if not, the proposed quantisation is selected.
        """
        before = self.current
        # By label and not by row: a download or a scan can add quantisations in between.
        wanted = before.label if keep and before is not None else model.chosen.label
        # Clearing and filling would report each change of the current item; the caller shows the new one itself.
        with QSignalBlocker(self):
            self.clear()
            self._quantisations = model.entry.quantisations
            self._colours = []
            for each in self._quantisations:
                words, colour = fit_of(model, each)
                fit = model.fit_of(each)
                label, size = each.label or tr("unknown"), format_bytes(each.size_bytes)
                item = QTreeWidgetItem([label, size, words, short_speed(model, each)])
                item.setSizeHint(0, QSize(0, ROW_HEIGHT))
                item.setToolTip(3, plain_tool_tip("" if fit is None or each.fault else speed_range_text(fit)))
                self._colours.append(colour)
                self.addTopLevelItem(item)
            labels = [each.label for each in self._quantisations]
            self.setCurrentIndex(self.model().index(labels.index(wanted) if wanted in labels else 0, 0))
        self._paint()
        rows = min(len(self._quantisations), _MOST_ROWS)
        # 6 pixels for the frame. The page scrolls as a whole, so the list does not take spare height.
        self.setFixedHeight(self.header().sizeHint().height() + rows * ROW_HEIGHT + 6)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        # Qt's `itemActivated` would also follow the single click of some desktop styles.
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


class SavedLayouts(QWidget):
    """List of the saved layouts of a model. If the model is open, its present layout can be saved under a name."""

    use_requested = Signal(object)  # SavedDocument
    forget_requested = Signal(object)  # SavedDocument
    save_requested = Signal(str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._heading = plain_label(tr("Layouts"), "strong")
        self._rows = QVBoxLayout()
        self._rows.setSpacing(4)
        self.name_edit = QLineEdit()
        self.name_edit.setPlaceholderText(tr("Save the current layout as…"))
        self.name_edit.setAccessibleName(tr("Name of the current layout"))
        self.name_edit.setMaxLength(MAX_NAME)
        self.name_edit.returnPressed.connect(self._keep)
        column = v_box(self, spacing=6)
        column.addWidget(self._heading)
        column.addLayout(self._rows)
        column.addWidget(self.name_edit)
        self.set_can_save(False)

    def set_can_save(self, can: bool) -> None:
        """Set whether the present layout can be saved. It can be saved if the shown model is the open one."""
        self.name_edit.setVisible(can)
        self._heading.setVisible(can or self._rows.count() > 0)

    def show_layouts(self, documents: Sequence[SavedDocument]) -> None:
        """List the saved layouts. Documents of another kind than "layout" are left out."""
        while (item := self._rows.takeAt(0)) is not None:
            widget = item.widget()
            if widget is not None:
                widget.deleteLater()
        for document in documents:
            if document.kind == "layout":
                self._rows.addWidget(self._row(document))
        self._heading.setVisible(self._rows.count() > 0 or not self.name_edit.isHidden())

    def _row(self, document: SavedDocument) -> QWidget:
        row = QWidget()
        use, forget = QPushButton(tr("Open with Layout")), QPushButton(tr("Remove"))
        forget.setProperty("role", "flat")
        use.clicked.connect(lambda: self.use_requested.emit(document))
        forget.clicked.connect(lambda: self.forget_requested.emit(document))
        layout = h_box(row)
        layout.addWidget(ElidedLabel(document.name), 1)
        layout.addWidget(use)
        layout.addWidget(forget)
        return row

    def _keep(self) -> None:
        # Names are shown in one line, and two that differ in spaces only could not be told apart.
        name = " ".join(self.name_edit.text().split())
        if name:
            self.name_edit.clear()
            self.save_requested.emit(name)


_NONE = tr("No preset")


class PresetBox(ComboBox):
    """Choice of the preset for new conversations. A removed preset stays in the list while it is chosen."""

    # Name of the chosen preset, empty for none.
    preset_chosen = Signal(str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._names: tuple[str, ...] = ()
        self._chosen = ""
        self.setAccessibleName(tr("Preset of new conversations"))
        self.setToolTip(tr("New conversations with this model use this preset. Create presets in the chat's settings."))
        # `activated` is emitted for a choice by the user only, so filling the box reports nothing.
        self.activated.connect(lambda row: self._choose(str(self.itemData(row))))
        self._fill()

    @property
    def chosen(self) -> str:
        """The name of the chosen preset; empty if no preset is chosen."""
        return self._chosen

    def show_presets(self, names: Sequence[str]) -> None:
        """Offer the presets `names`."""
        self._names = tuple(names)
        self._fill()

    def show_chosen(self, name: str) -> None:
        """Show the preset `name` as the chosen one. `name` is empty if no preset is chosen."""
        if name != self._chosen:
            self._chosen = name
            self._fill()

    def wheelEvent(self, event: QWheelEvent) -> None:
        """Ignore the wheel, so that the scroll area scrolls and the choice does not change by accident."""
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
            self.addItem(tr("{preset} (removed)", preset=self._chosen), self._chosen)
        self.setCurrentIndex(max(0, self.findData(self._chosen)))
