"""The commands Cut, Copy, Paste and Select All of the Edit menu, for the widget with the keyboard focus."""

from __future__ import annotations

from PySide6.QtCore import QObject
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QAbstractItemView, QAbstractSpinBox, QApplication, QLineEdit, QPlainTextEdit, QTextEdit

from app.window.actions import Actions, Command
from engine.base.language import tr

TextWidget = QLineEdit | QTextEdit | QPlainTextEdit


def text_commands() -> tuple[Command, ...]:
    """Return the clipboard commands of the Edit menu.

    The commands have no shortcuts. Text widgets handle these keys themselves, and a shortcut of the window would
    override the keys in lists and tables, which copy their current cell.
    """
    return (
        Command("cut", tr("Cu&t"), _cut),
        Command("copy", tr("&Copy"), _copy),
        Command("paste", tr("&Paste"), _paste),
        Command("select_all", tr("Select &All"), _select_all),
    )


class TextActions(QObject):
    """Enables the clipboard commands that the widget with the keyboard focus supports."""

    def __init__(self, actions: Actions, parent: QObject) -> None:
        super().__init__(parent)
        self._actions = actions
        application = QApplication.instance()
        assert isinstance(application, QApplication)
        application.focusChanged.connect(self._on_focus_changed)
        self._on_focus_changed()

    def _on_focus_changed(self) -> None:
        widget = _text_widget()
        can_edit = widget is not None and not widget.isReadOnly()
        self._actions.enable(
            cut=can_edit,
            paste=can_edit,
            copy=widget is not None or isinstance(QApplication.focusWidget(), QAbstractItemView),
            select_all=widget is not None,
        )


def _text_widget() -> TextWidget | None:
    """Return the text widget with the keyboard focus; None if another widget has it."""
    widget = QApplication.focusWidget()
    # Qt gives the focus to the spin box, which passes keys on to its line edit.
    if isinstance(widget, QAbstractSpinBox):
        return widget.lineEdit()
    return widget if isinstance(widget, TextWidget) else None


def _cut() -> None:
    widget = _text_widget()
    if widget is not None:
        widget.cut()


def _copy() -> None:
    widget = _text_widget()
    focused = QApplication.focusWidget()
    if widget is not None:
        widget.copy()
    elif isinstance(focused, QAbstractItemView) and focused.currentIndex().isValid():
        QGuiApplication.clipboard().setText(str(focused.currentIndex().data() or ""))


def _paste() -> None:
    widget = _text_widget()
    if widget is not None:
        widget.paste()


def _select_all() -> None:
    widget = _text_widget()
    if widget is not None:
        widget.selectAll()
