"""Numbers in boxes: shown without a word about it, and without taking away what somebody is typing."""

from __future__ import annotations

from PySide6.QtWidgets import QSpinBox


def show_number(box: QSpinBox, number: int) -> int:
    """Show `number` without a signal, and return what the box makes of it.

    Where it has that number already, the text stays: somebody may be typing another one.
    """
    if box.value() != min(max(number, box.minimum()), box.maximum()):
        blocked = box.blockSignals(True)
        box.setValue(number)
        box.blockSignals(blocked)
    return box.value()


def is_typed_in(box: QSpinBox) -> bool:
    """Return whether somebody is typing a number that is not entered yet."""
    return box.hasFocus() and box.lineEdit().isModified()
