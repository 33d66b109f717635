"""Dialogs: the row of buttons is last, and an entry that is not valid keeps the dialog open."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QDialogButtonBox, QHBoxLayout, QLineEdit
from pytestqt.qtbot import QtBot

from engine.base.errors import LayoutError
from widgets.common.dialog import CLOSE, Dialog, EntryDialog


class WordDialog(EntryDialog):
    """Asks for a word."""

    def __init__(self) -> None:
        super().__init__("A word")
        self.edit = QLineEdit()
        self.lay_out(self.edit)

    def entry(self) -> str:
        if not self.edit.text():
            raise ValueError("A word is needed.")
        if self.edit.text() == "layout":
            raise LayoutError("Not this word", location="runs")
        return self.edit.text()


def test_parts_are_above_the_buttons_and_tab_goes_through_them_first(qtbot: QtBot) -> None:
    dialog = Dialog("Two fields")
    qtbot.addWidget(dialog)
    pressed: list[int] = []
    extra = dialog.add_button("More", lambda: pressed.append(1))
    first, second, row = QLineEdit(), QLineEdit(), QHBoxLayout()
    row.addWidget(second)
    dialog.lay_out(first, row, None)
    with qtbot.waitExposed(dialog):
        dialog.show()
    assert dialog.windowTitle() == "Two fields"
    assert first.y() < second.y() < dialog.buttons.y()
    assert first.nextInFocusChain() is second
    extra.click()
    assert pressed == [1]
    assert dialog.isVisible()
    dialog.buttons.button(CLOSE).click()
    assert not dialog.isVisible()


def test_only_a_dialog_that_is_shown_once_is_deleted_when_it_closes(qtbot: QtBot) -> None:
    kept, once = Dialog("kept"), Dialog("once", once=True)
    qtbot.addWidget(kept)
    for dialog in (kept, once):
        dialog.lay_out()
        dialog.show()
    with qtbot.waitSignal(once.destroyed):
        once.reject()
    kept.reject()
    kept.show()
    assert kept.isVisible()


def test_an_entry_that_is_not_valid_keeps_the_dialog_open_and_says_why(qtbot: QtBot) -> None:
    dialog = WordDialog()
    qtbot.addWidget(dialog)
    entered: list[tuple[object, bool]] = []
    dialog.entered.connect(lambda entry: entered.append((entry, dialog.isVisible())))
    with qtbot.waitExposed(dialog):
        dialog.show()
    ok = dialog.buttons.button(QDialogButtonBox.StandardButton.Ok)
    for text, problem in (
        ("", "A word is needed."),
        ("layout", LayoutError("Not this word", location="runs").summary()),
    ):
        dialog.edit.setText(text)
        ok.click()
        assert dialog.isVisible()
        assert dialog.problem_label.text() == problem
    dialog.edit.setText("word")
    QTest.keyClick(dialog.edit, Qt.Key.Key_Return)
    assert entered == [("word", False)]
