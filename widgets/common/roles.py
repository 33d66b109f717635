"""Labels and small buttons with a role: the stylesheet selects the look of a widget by its property `role`."""

from __future__ import annotations

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
    """Return a label that shows `text` as it is, never as markup. `role`: name of its look in the stylesheet."""
    label = QLabel()
    # QLabel detects rich text by default, and names of models and devices come from foreign files.
    label.setTextFormat(Qt.TextFormat.PlainText)
    label.setText(text)
    label.setWordWrap(wrap)
    if role:
        label.setProperty("role", role)
    return label


def tool_button(text: str, name: str, role: str = "quiet", *, tip: str = "") -> QToolButton:
    """Return a small button. `name`: accessible name, and also the tooltip unless `tip` is given."""
    button = QToolButton()
    button.setText(text)
    button.setAccessibleName(name)
    button.setToolTip(tip or name)
    button.setProperty("role", role)
    return button
