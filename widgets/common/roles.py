"""Labels, small buttons and tooltips that show text from files literally, and roles for the stylesheet.

A role selects the look of a widget: the stylesheet has selectors for the property `role`.
"""

from __future__ import annotations

from html import escape

from PySide6.QtCore import QCoreApplication, QEvent, Qt
from PySide6.QtWidgets import QLabel, QToolButton, QWidget


def set_role(widget: QWidget, role: str) -> None:
    """Set the property `role`, by which the stylesheet selects the look of `widget`, and apply the stylesheet again.

    Qt does not apply a stylesheet again when a property changes.
    """
    if widget.property("role") == role:
        return
    widget.setProperty("role", role)
    style = widget.style()
    style.unpolish(widget)
    style.polish(widget)
    # Clears the cached size hint: roles differ in padding and font.
    QCoreApplication.sendEvent(widget, QEvent(QEvent.Type.StyleChange))


def plain_label(text: str = "", role: str = "", *, wrap: bool = False) -> QLabel:
    """Return a label that shows `text` as it is, never as markup.

    `role`: role of the label in the stylesheet, which selects its look.
    `wrap`: whether long text is wrapped.
    """
    label = QLabel()
    # QLabel detects rich text by default, and names of models and devices come from foreign files.
    label.setTextFormat(Qt.TextFormat.PlainText)
    label.setText(text)
    label.setWordWrap(wrap)
    if role:
        label.setProperty("role", role)
    return label


def tool_button(text: str, name: str, role: str = "quiet", *, tip: str = "") -> QToolButton:
    """Return a small button with the label `text`, often a symbol such as "×".

    `name`: accessible name, and also the tooltip unless `tip` is given.
    `role`: role of the button in the stylesheet, which selects its look.
    """
    button = QToolButton()
    button.setText(text)
    button.setAccessibleName(name)
    button.setToolTip(tip or name)
    button.setProperty("role", role)
    return button


def plain_tool_tip(text: str) -> str:
    """Return a tooltip that shows `text` literally, with its line breaks; empty for an empty text."""
    # `<qt>` makes Qt take every text as rich text, so that none is guessed to be. Rich tooltips wrap long lines, too.
    return f"<qt>{escape(text).replace(chr(10), '<br>')}</qt>" if text else ""
