"""The dialog of Layout > Compare Two Layouts: two layouts of a model, their differences, memory, speed and costs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from msgspec import Struct
from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QHBoxLayout, QLabel, QPushButton, QSplitter, QVBoxLayout, QWidget

from engine.base.language import tr
from engine.base.texts import capitalised
from engine.planning.plan.comparison import Comparison, Side, figure_rows, memory_rows
from engine.planning.plan.preview import Preview
from widgets.common.dialog import Dialog
from widgets.common.inputs import ComboBox
from widgets.common.palette import Palette
from widgets.common.roles import plain_label, set_role
from widgets.common.row_table import RowTable
from widgets.layout_editor.compared_lanes import LETTERS, ComparedLanes

WIDTH_PX, HEIGHT_PX = 1060, 700


class SideOption(Struct, frozen=True):
    """A layout that can be chosen for one side of the comparison. `key`: stable identifier. `title`: shown name."""

    key: str
    title: str


class ShownSide(Struct, frozen=True):
    """Contents of one side of the comparison. `preview`: the layout. `side`: its speed, costs and memory."""

    preview: Preview
    side: Side


class ComparisonDialog(Dialog):
    """Shows two layouts, and emits signals for the choices of the user. Not modal; computes nothing itself."""

    chosen = Signal(int, str)
    """Emitted with a side, 0 or 1, and the key of the `SideOption` that the user has chosen for that side."""
    take_requested = Signal(int)
    """Requests that the layout of a side replaces the layout in the editor. The argument is the side, 0 or 1."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(tr("Compare Two Layouts"), parent)
        self._sides: list[ShownSide | None] = [None, None]
        self._comparison: Comparison | None = None
        self.boxes = (ComboBox(), ComboBox())
        self.take_buttons = (QPushButton(tr("Use &A")), QPushButton(tr("Use &B")))
        self.state_labels = (plain_label("", "dim", wrap=True), plain_label("", "dim", wrap=True))
        for side, (box, button) in enumerate(zip(self.boxes, self.take_buttons, strict=True)):
            box.setAccessibleDescription(tr("Layout {letter}", letter=LETTERS[side]))
            box.setMinimumContentsLength(18)
            box.setSizeAdjustPolicy(ComboBox.SizeAdjustPolicy.AdjustToMinimumContentsLengthWithIcon)
            # `activated` is emitted for a choice of the user only, so filling the box requests nothing.
            box.activated.connect(partial(self._on_chosen, side))
            button.setToolTip(tr("Use this layout in the editor; Undo restores the current one"))
            button.clicked.connect(partial(self._on_take, side))
        self.lanes = ComparedLanes()
        self.figures = RowTable(("", *LETTERS, tr("difference")), tr("Speed, costs and memory"), wide=0)
        self.differences = RowTable((tr("differs"), *LETTERS), tr("Differences"), wide=0)
        self.notes_label = plain_label("", "dim", wrap=True)
        self.notes_label.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self._lay_out_parts()
        self.resize(WIDTH_PX, HEIGHT_PX)
        self._show()

    def set_options(self, options: Sequence[SideOption], keys: tuple[str, str]) -> None:
        """Offer `options` as layouts for both sides, and select for each side the option with its key in `keys`."""
        for box, key in zip(self.boxes, keys, strict=True):
            box.clear()
            for option in options:
                box.addItem(option.title, option.key)
            box.setCurrentIndex(max(box.findData(key), 0))
            box.setEnabled(bool(options))

    def show_status(self, side: int, sentence: str, *, bad: bool = False) -> None:
        """Show a sentence below the box that chooses the layout of a side. An empty sentence hides the line.

        `side`: 0 or 1. `bad`: whether the sentence is an error.
        """
        self.state_labels[side].setText(sentence)
        set_role(self.state_labels[side], "error" if bad else "dim")

    def show_side(self, side: int, shown: ShownSide | None) -> None:
        """Show the layout of a side, 0 or 1. `shown` is None if the side has no layout.

        The differences disappear until `show_differences` is called.
        """
        self._sides[side] = shown
        self._comparison = None
        self._show()

    def show_differences(self, comparison: Comparison) -> None:
        """Show the differences of the two shown sides."""
        self._comparison = comparison
        self._show()

    def apply_palette(self, palette: Palette) -> None:
        """Use the colours of `palette` in the lanes."""
        self.lanes.apply_palette(palette)

    def _on_chosen(self, side: int, row: int) -> None:
        self.chosen.emit(side, str(self.boxes[side].itemData(row)))

    def _on_take(self, side: int, _checked: bool = False) -> None:
        self.take_requested.emit(side)

    def _show(self) -> None:
        one, other = self._sides
        for button, shown in zip(self.take_buttons, self._sides, strict=True):
            button.setEnabled(shown is not None)
        self.lanes.show_sides(None if one is None else one.preview, None if other is None else other.preview)
        self.figures.show_rows([] if one is None or other is None else _figures(one.side, other.side))
        found = self._comparison
        rows: Sequence[tuple[str, ...]] = () if found is None else found.rows()
        if found is not None and found.is_equal:
            rows = [(tr("The layouts are equal."), "", "")]
        self.differences.show_rows(rows)
        notes = [
            f"{letter}: {sentence}"
            for letter, shown in zip(LETTERS, self._sides, strict=True)
            if shown is not None
            for sentence in shown.side.advice
        ]
        self.notes_label.setText("\n".join(notes))
        self.notes_label.setVisible(bool(notes))

    def _lay_out_parts(self) -> None:
        choice = QHBoxLayout()
        choice.setSpacing(16)
        for letter, box, button, label in zip(LETTERS, self.boxes, self.take_buttons, self.state_labels, strict=True):
            row = QHBoxLayout()
            name: QLabel = plain_label(letter, "strong")
            for widget in (name, box, button):
                row.addWidget(widget, 1 if widget is box else 0)
            column = QVBoxLayout()
            column.setSpacing(4)
            column.addLayout(row)
            column.addWidget(label)
            choice.addLayout(column, 1)
        tables = QSplitter(Qt.Orientation.Horizontal)
        tables.setAccessibleName(tr("Tables of the comparison"))
        tables.setChildrenCollapsible(False)
        tables.addWidget(self.figures)
        tables.addWidget(self.differences)
        tables.setSizes([WIDTH_PX * 6 // 10, WIDTH_PX * 4 // 10])
        parts = QSplitter(Qt.Orientation.Vertical)
        parts.setAccessibleName(tr("The two layouts, and tables that compare them"))
        parts.setChildrenCollapsible(False)
        parts.addWidget(self.lanes)
        parts.addWidget(tables)
        parts.setSizes([HEIGHT_PX // 2, HEIGHT_PX // 3])
        self.lay_out(choice, parts, self.notes_label)


def _figures(one: Side, other: Side) -> list[tuple[str, ...]]:
    """Return the rows of the table of figures: speed and costs, then the memory of each device."""
    return [*((capitalised(row[0]), *row[1:], "") for row in figure_rows(one, other)), *memory_rows(one, other)]
