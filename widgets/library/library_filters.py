"""Search field, sort order and filters of the library, reported together as one `ListFilter`."""

from __future__ import annotations

from PySide6.QtCore import QSignalBlocker, Qt, Signal
from PySide6.QtGui import QKeyEvent
from PySide6.QtWidgets import QLineEdit, QSizePolicy, QToolButton, QWidget

from engine.base.language import tr
from engine.base.units import GIB
from engine.base.values import replace
from engine.library.capabilities import CAPABILITY_TEXTS
from engine.library.listed import ALL, ListFilter
from widgets.common.boxes import v_box
from widgets.common.inputs import ComboBox
from widgets.common.wrap_layout import WrapLayout

_ORDERS = (
    ("name", tr("By name")), ("fit", tr("By fit in memory")), ("speed", tr("By speed")), ("used", tr("Last used")),
    ("size", tr("By size")), ("parameters", tr("By parameters")),
)  # fmt: skip
_FITS = (("any", tr("Fitting or not")), ("fits", tr("Fits in memory")), ("devices", tr("Fits without the CPU")))
_SIZES = (
    (None, tr("Any size")),
    (2 * GIB, tr("Up to 2 GiB")),
    (8 * GIB, tr("Up to 8 GiB")),
    (24 * GIB, tr("Up to 24 GiB")),
)


class SearchEdit(QLineEdit):
    """Search field. Down moves the focus to the list. Escape clears the text; in an empty field it closes the page."""

    left_down = Signal()
    left = Signal()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        # A line edit has no use for Down, so one key leads from the search to its results.
        if event.key() == Qt.Key.Key_Down:
            self.left_down.emit()
        elif event.key() == Qt.Key.Key_Escape and self.text():
            self.clear()
        elif event.key() == Qt.Key.Key_Escape:
            self.left.emit()
        else:
            super().keyPressEvent(event)


class LibraryFilters(QWidget):
    """Search field, sort order and filters. Each change emits `filter_changed` with all their values."""

    filter_changed = Signal(ListFilter)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.filter = ALL
        self.search_edit = SearchEdit()
        self.order_box = ComboBox()
        self.fit_box = ComboBox()
        self.size_box = ComboBox()
        self.tag_box = ComboBox()
        self.turn_button = _toggle("↓", tr("Reverse the order"))
        self.favourite_button = _toggle("★", tr("Favourites only"))
        self.capability_buttons = {
            name: _toggle(words, tr("Only models with: {capability}", capability=words))
            for name, words in CAPABILITY_TEXTS.items()
        }
        self._build()
        self.search_edit.textChanged.connect(lambda text: self._change(text=text))
        self.order_box.currentIndexChanged.connect(lambda at: self._change(order=_ORDERS[at][0]))
        self.fit_box.currentIndexChanged.connect(lambda at: self._change(fit=_FITS[at][0]))
        self.size_box.currentIndexChanged.connect(lambda at: self._change(max_bytes=_SIZES[at][0]))
        self.tag_box.currentIndexChanged.connect(lambda at: self._change(tag=self.tag_box.itemText(at) if at else ""))
        self.turn_button.toggled.connect(lambda on: self._change(descending=on))
        self.favourite_button.toggled.connect(lambda on: self._change(only_favourites=on))
        for button in self.capability_buttons.values():
            button.toggled.connect(lambda _on: self._change(capabilities=self._capabilities()))

    def set_tags(self, tags: tuple[str, ...]) -> None:
        """Offer `tags` in the box that filters models by tag. The box is hidden if there are no tags."""
        shown = [self.tag_box.itemText(at) for at in range(1, self.tag_box.count())]
        # Tags are set after every scan; an unchanged box keeps its open list.
        if shown != list(tags):
            wanted = self.filter.tag
            with QSignalBlocker(self.tag_box):
                self.tag_box.clear()
                self.tag_box.addItems([tr("Any tag"), *tags])
                self.tag_box.setCurrentIndex(tags.index(wanted) + 1 if wanted in tags else 0)
            # The last model with this tag has lost it: a filter that cannot be seen would hide all models.
            if wanted not in ("", *tags):
                self._change(tag="")
        self.tag_box.setVisible(bool(tags))

    def clear(self) -> None:
        """Reset search and filters."""
        self.search_edit.clear()
        for box in (self.fit_box, self.size_box, self.tag_box):
            box.setCurrentIndex(0)
        for button in (self.favourite_button, *self.capability_buttons.values()):
            button.setChecked(False)

    def _capabilities(self) -> frozenset[str]:
        return frozenset(name for name, button in self.capability_buttons.items() if button.isChecked())

    def _change(self, **change: object) -> None:
        wanted = replace(self.filter, **change)  # type: ignore[arg-type]
        # One change can come twice, for instance when `clear` resets boxes that are reset already.
        if wanted != self.filter:
            self.filter = wanted
            self.filter_changed.emit(wanted)

    def _build(self) -> None:
        self.search_edit.setPlaceholderText(tr("Search names, architectures, folders, tags, notes…"))
        self.search_edit.setClearButtonEnabled(True)
        self.search_edit.setAccessibleName(tr("Search the library"))
        self.search_edit.setAcceptDrops(False)  # Dropped files are for the window.
        for box, options, name in (
            (self.order_box, _ORDERS, tr("Order")),
            (self.fit_box, _FITS, tr("Fit on your devices")),
            (self.size_box, _SIZES, tr("Size")),
        ):
            box.addItems([text for _, text in options])
            box.setAccessibleName(name)
            # On Linux Qt reports the chosen entry of a combo box as its name, so the purpose is also its description.
            box.setAccessibleDescription(name)
        self.tag_box.addItem(tr("Any tag"))
        self.tag_box.setAccessibleName(tr("Tag"))
        self.tag_box.setAccessibleDescription(tr("Tag"))
        self.tag_box.hide()
        row = WrapLayout(spacing=6)
        for widget in (self.order_box, self.turn_button, self.fit_box, self.size_box, self.tag_box):
            row.addWidget(widget)
        for button in (*self.capability_buttons.values(), self.favourite_button):
            row.addWidget(button)
        column = v_box(self, spacing=8)
        column.addWidget(self.search_edit)
        column.addLayout(row)


def _toggle(text: str, tip: str) -> QToolButton:
    button = QToolButton()
    button.setText(text)
    button.setToolTip(tip)
    button.setAccessibleName(tip)
    button.setCheckable(True)
    button.setProperty("role", "segment")
    button.setSizePolicy(QSizePolicy.Policy.Fixed, QSizePolicy.Policy.Fixed)
    return button
