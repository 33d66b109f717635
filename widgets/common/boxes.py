"""Rows and columns of widgets: Qt's box layouts with their margins and spacing in one call."""

from __future__ import annotations

from typing import TypeVar

from PySide6.QtWidgets import QBoxLayout, QHBoxLayout, QVBoxLayout, QWidget

_Box = TypeVar("_Box", bound=QBoxLayout)
NO_MARGINS = (0, 0, 0, 0)


def h_box(
    parent: QWidget | None = None, *, spacing: int | None = None, margins: tuple[int, int, int, int] = NO_MARGINS
) -> QHBoxLayout:
    """Return a Qt layout that places widgets in a row.

    `parent`: widget that gets the row as its layout; None if the caller adds the row to another layout.
    `spacing`: pixels between two widgets; None for the spacing of the Qt style.
    `margins`: left, top, right and bottom margin in pixels.
    """
    return _placed(QHBoxLayout(), parent, spacing, margins)


def v_box(
    parent: QWidget | None = None, *, spacing: int | None = None, margins: tuple[int, int, int, int] = NO_MARGINS
) -> QVBoxLayout:
    """Return a Qt layout that places widgets in a column.

    `parent`: widget that gets the column as its layout; None if the caller adds the column to another layout.
    `spacing`: pixels between two widgets; None for the spacing of the Qt style.
    `margins`: left, top, right and bottom margin in pixels.
    """
    return _placed(QVBoxLayout(), parent, spacing, margins)


def centred(widget: QWidget, parent: QWidget | None = None) -> QHBoxLayout:
    """Return a row with `widget` in the middle and free space at both sides.

    `parent`: widget that gets the row as its layout; None if the caller adds the row to another layout.
    """
    row = h_box(parent)
    row.addStretch(1)
    # 1000 to 1: the widget takes all width up to its maximum, and only then the margins grow.
    row.addWidget(widget, 1000)
    row.addStretch(1)
    return row


def _placed(box: _Box, parent: QWidget | None, spacing: int | None, margins: tuple[int, int, int, int]) -> _Box:
    if parent is not None:
        parent.setLayout(box)
    box.setContentsMargins(*margins)
    if spacing is not None:
        box.setSpacing(spacing)
    return box
