"""Rows of a form for settings. A row has a control, and the decision: the value that a load uses, with the reason."""

from __future__ import annotations

from collections.abc import Mapping

from PySide6.QtWidgets import QGridLayout, QLabel, QWidget

from engine.base.language import tr
from engine.base.units import format_count
from engine.planning.plan.decisions.decision import Decision
from widgets.common.boxes import h_box
from widgets.common.roles import plain_label, plain_tool_tip

MIN_COUNT = 10_000
"""Least number that a decision shows with separators for thousands."""


def decided_text(decision: Decision) -> str:
    """Return the value of a decision and its reason in one line; only the reason if the user chose the value."""
    return decision.reason if decision.overridden else f"{value_text(decision.value)}: {decision.reason}"


def value_text(value: str | int | bool) -> str:
    """Return the value that was decided for a setting, as text, such as "on"."""
    # First, because `bool` is a subclass of `int`.
    if isinstance(value, bool):
        return tr("on") if value else tr("off")
    return format_count(value) if isinstance(value, int) and value >= MIN_COUNT else str(value)


TWO_LINES_PX = 34
"""Least height in pixels of the label with a decision. It has room for two lines, so the dialog's height rarely
changes.
"""


class DecidedRows:
    """Lays out settings in three columns: label, control, and the decided value with its reason."""

    def __init__(self, grid: QGridLayout) -> None:
        self._grid = grid
        self._lines: dict[str, QLabel] = {}
        grid.setHorizontalSpacing(16)
        grid.setVerticalSpacing(8)
        grid.setColumnStretch(2, 1)

    def add_title(self, text: str) -> None:
        """Add a title above the rows that are added next."""
        row = self._grid.rowCount()
        # An empty `QGridLayout` says that it has one row, so the first title is in row 1.
        if row > 1:
            self._grid.setRowMinimumHeight(row, 8)
            row += 1
        self._grid.addWidget(plain_label(text, "title"), row, 0, 1, 3)

    def add(self, setting: str, label: str, *controls: QWidget, hint: str = "") -> None:
        """Add a row for one setting: its label, its controls, and room for its decision.

        The decision is the value that a load uses, with the reason. `show_decisions` fills the room.

        `setting`: key of the setting.
        `hint`: tooltip of the label and the controls.
        """
        row = self._grid.rowCount()
        name = plain_label(label, "dim")
        for widget in (name, *controls):
            widget.setToolTip(plain_tool_tip(hint[:1].upper() + hint[1:]))
        self._grid.addWidget(name, row, 0)
        self._grid.addWidget(_beside(controls), row, 1)
        line = self._lines[setting] = plain_label("", "dim", wrap=True)
        line.setAccessibleName(tr("{label}: value in use and reason", label=label))
        line.setMinimumHeight(TWO_LINES_PX)
        self._grid.addWidget(line, row, 2)

    def line(self, setting: str) -> str:
        """Return the decision (value and reason) that is shown for the setting with the key `setting`."""
        return self._lines[setting].text()

    def show_decisions(self, decisions: Mapping[str, Decision]) -> None:
        """Show next to each setting its decision: the value that a load uses, with the reason.

        A setting whose key is not in `decisions` shows no decision.
        """
        for setting, line in self._lines.items():
            decided = decisions.get(setting)
            line.setText("" if decided is None else decided_text(decided))


def _beside(controls: tuple[QWidget, ...]) -> QWidget:
    if len(controls) == 1:
        return controls[0]
    group = QWidget()
    row = h_box(group, spacing=8)
    for control in controls:
        row.addWidget(control)
    return group
