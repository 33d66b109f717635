"""File dialogs, and a base class for dialogs that can be open only once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from PySide6.QtCore import QObject, Qt
from PySide6.QtWidgets import QDialog, QFileDialog, QMessageBox, QWidget

from engine.base.errors import ArgumentError
from engine.base.files import write_whole
from engine.base.language import tr

MODEL_FILTER = tr("GGUF models (*.gguf);;All files (*)")
LAYOUT_FILTER = tr("Layouts (*.json);;All files (*)")
RIG_FILTER = tr("Rigs (*.json);;All files (*)")
_Dialog = TypeVar("_Dialog", bound=QDialog)


def ask_open(parent: QWidget, title: str, file_filter: str, folder: Path | None = None) -> Path | None:
    """Ask for a file to open. Return its path, or None if the dialog was cancelled.

    `file_filter`: Qt's name filter of the dialog. `folder`: folder that the dialog shows first, or None.
    """
    name, _ = QFileDialog.getOpenFileName(parent, title, str(folder or ""), file_filter)
    return Path(name) if name else None


def ask_save(parent: QWidget, title: str, file_filter: str, proposal: str) -> Path | None:
    """Ask for a file to write. Return its path; None if the user cancels, or does not want to replace the file.

    A name without extension gets the extension of `proposal`, the proposed file name. `file_filter`: Qt's name filter
    of the dialog.
    """
    name, _ = QFileDialog.getSaveFileName(parent, title, proposal, file_filter)
    if not name:
        return None
    chosen = Path(name)
    path = chosen if chosen.suffix else chosen.with_name(chosen.name + Path(proposal).suffix)
    question = replace_question(parent, chosen, path)
    return path if question is None or question.exec() == QMessageBox.StandardButton.Yes else None


def replace_question(parent: QWidget, chosen: Path, path: Path) -> QMessageBox | None:
    """Return a message box that asks whether to replace the file `path`; None if there is nothing to ask.

    The caller shows the box.
    `chosen`: the path that the user chose. The file dialog has already asked whether to replace that file.
    `path`: the same path, perhaps with an added extension.
    """
    if path == chosen or not path.exists():
        return None
    box = QMessageBox(parent)
    box.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
    box.setIcon(QMessageBox.Icon.Warning)
    box.setWindowTitle(tr("Replace the File"))
    box.setTextFormat(Qt.TextFormat.PlainText)  # Names of files may contain markup.
    box.setText(tr("{name} already exists. Do you want to replace it?", name=path.name))
    box.setStandardButtons(QMessageBox.StandardButton.Yes | QMessageBox.StandardButton.No)
    box.setDefaultButton(QMessageBox.StandardButton.No)
    return box


def write_chosen(path: Path, data: bytes) -> None:
    """Write `data` to a file that the user has chosen. Blocks, so it must not be called in the GUI thread.

    Raises:
        ArgumentError: the file cannot be written.
    """
    try:
        write_whole(path, data)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ArgumentError(
            tr("{path} cannot be written ({reason}); choose another place.", path=path, reason=reason)
        ) from None


class OneDialog(QObject, Generic[_Dialog]):
    """Owns a dialog that can be open only once. The dialog is not modal, so the window stays usable.

    `make`: returns the dialog. Called at first use, and again after Qt has deleted a closed dialog.
    `begin`: fills the dialog each time it is opened.
    """

    def __init__(self, make: Callable[[], _Dialog], begin: Callable[[_Dialog], None], window: QWidget) -> None:
        super().__init__(window)
        self._make = make
        self._begin = begin
        self.dialog: _Dialog | None = None

    def show(self) -> None:
        """Open the dialog, or bring it to the front if it is open."""
        self.open()

    def open(self) -> _Dialog:
        """Open the dialog, or bring it to the front if it is open, and return it."""
        dialog = self.dialog
        if dialog is None:
            dialog = self.dialog = self._make()
            # Qt deletes the C++ object of such a dialog, and a call of the Python object would raise RuntimeError.
            if dialog.testAttribute(Qt.WidgetAttribute.WA_DeleteOnClose):
                dialog.finished.connect(self._forget)
        if not dialog.isVisible():
            self._begin(dialog)
            dialog.show()
        dialog.raise_()
        dialog.activateWindow()
        return dialog

    def _forget(self) -> None:
        self.dialog = None
