"""Base classes of the dialogs: a title, parts one below the other, and a row of buttons at the end."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QDialog, QDialogButtonBox, QLayout, QPushButton, QVBoxLayout, QWidget

from engine.base.errors import EngineError
from widgets.common.roles import plain_label, set_role

CLOSE = QDialogButtonBox.StandardButton.Close
OK_CANCEL = QDialogButtonBox.StandardButton.Ok | QDialogButtonBox.StandardButton.Cancel


class Dialog(QDialog):
    """A dialog with a button to close it, and further buttons from `add_button`.

    `once`: whether the dialog is deleted when it closes; otherwise it can be shown again.
    """

    def __init__(
        self,
        title: str,
        parent: QWidget | None = None,
        *,
        standard: QDialogButtonBox.StandardButton = CLOSE,
        once: bool = False,
    ) -> None:
        super().__init__(parent)
        self.setWindowTitle(title)
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose, once)
        self.buttons = QDialogButtonBox(standard)
        self.buttons.accepted.connect(self.accept)
        self.buttons.rejected.connect(self.reject)

    def add_button(self, text: str, do: Callable[[], object], *, apart: bool = False) -> QPushButton:
        """Add a button that calls `do` and does not close the dialog.

        `apart`: whether the button is at the other end of the row of buttons.
        """
        role = QDialogButtonBox.ButtonRole.ResetRole if apart else QDialogButtonBox.ButtonRole.ActionRole
        button = self.buttons.addButton(text, role)
        # `clicked` passes whether the button is checked, which `do` does not take.
        button.clicked.connect(lambda _checked: do())
        return button

    def lay_out(self, *parts: QWidget | QLayout | None) -> None:
        """Put the parts one below the other, with the row of buttons at the end. None adds a stretch.

        Call this method once, after all parts are made: Tab follows the order in which widgets join the dialog.
        """
        column = QVBoxLayout(self)
        column.setSpacing(8)
        for part in (*parts, self.buttons):
            if part is None:
                column.addStretch(1)
            elif isinstance(part, QLayout):
                column.addLayout(part)
            else:
                column.addWidget(part)


class StatusDialog(Dialog):
    """A dialog for work that takes time, such as a check of the computer. A label shows the state of the work.

    The dialog is deleted when it closes.
    """

    def __init__(self, title: str, parent: QWidget | None = None) -> None:
        super().__init__(title, parent, once=True)
        self.close_button = self.buttons.button(CLOSE)
        self.status_label = plain_label("", wrap=True)

    @property
    def text(self) -> str:
        """The shown sentence on the state of the work."""
        return self.status_label.text()

    def show_status(self, text: str, bad: bool = False) -> None:
        """Show `text` as the state of the work. `bad`: whether `text` is an error."""
        self.status_label.setText(text)
        set_role(self.status_label, "error" if bad else "strong")


class EntryDialog(Dialog):
    """A dialog with OK and Cancel. OK closes it if the entry is valid; otherwise `problem_label` shows the error."""

    entered = Signal(object)
    """Emitted with the valid entry, after the dialog has closed."""

    def __init__(self, title: str, parent: QWidget | None = None, *, once: bool = False) -> None:
        super().__init__(title, parent, standard=OK_CANCEL, once=once)
        self.problem_label = plain_label("", "error", wrap=True)
        self.problem_label.hide()

    def lay_out(self, *parts: QWidget | QLayout | None) -> None:
        """Put the parts one below the other, then the label for an error and the row of buttons."""
        super().lay_out(*parts, self.problem_label)

    def entry(self) -> object:
        """Return the value that was entered.

        Raises:
            ValueError, EngineError: if the entry is not valid, with a sentence for the person.
        """
        raise NotImplementedError

    def accept(self) -> None:
        """Close the dialog and emit the entry if it is valid; otherwise show the error."""
        try:
            entry = self.entry()
        except (EngineError, ValueError) as error:
            self.problem_label.setText(error.summary() if isinstance(error, EngineError) else str(error))
            self.problem_label.show()
            return
        # The dialog is hidden before `entered`, whose listener may open another one or show an error.
        super().accept()
        self.entered.emit(entry)
