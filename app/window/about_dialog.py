"""About: versions of everything, where files are, licences. All of it can be copied."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import (
    QApplication,
    QDialog,
    QDialogButtonBox,
    QGridLayout,
    QPlainTextEdit,
    QTabWidget,
    QVBoxLayout,
    QWidget,
)

from app.window.versions import Facts
from engine.language import tr
from widgets.common.roles import plain_label

ABOUT = tr("Layerdeck places the layers of a model on your devices, loads exactly that, and chats with the result.")
NOTHING_SENT = tr("No account, no telemetry. It asks the network for nothing unless you do.")


class AboutDialog(QDialog):
    """Shows `facts`."""

    def __init__(self, parent: QWidget, facts: Facts) -> None:
        super().__init__(parent)
        self.setWindowTitle(tr("About Layerdeck"))
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.facts = facts
        tabs = QTabWidget()
        tabs.setAccessibleName(tr("About Layerdeck"))
        tabs.addTab(_table((*facts.versions, *facts.folders)), tr("Versions and folders"))
        tabs.addTab(_text(tr("Licence of Layerdeck"), facts.licence), tr("Licence"))
        tabs.addTab(_text(tr("Licences of what it uses"), facts.notices), tr("Used in it"))
        buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Close)
        self.copy_button = buttons.addButton(tr("Copy Versions"), QDialogButtonBox.ButtonRole.ActionRole)
        self.copy_button.clicked.connect(self._on_copy)
        buttons.rejected.connect(self.reject)
        layout = QVBoxLayout(self)
        layout.setSpacing(8)
        layout.addWidget(plain_label(ABOUT, "strong", wrap=True))
        layout.addWidget(plain_label(NOTHING_SENT, "dim", wrap=True))
        layout.addWidget(tabs, 1)
        layout.addWidget(buttons)
        self.resize(720, 480)

    def _on_copy(self) -> None:
        QApplication.clipboard().setText(self.facts.text)


def _table(rows: tuple[tuple[str, str], ...]) -> QWidget:
    content = QWidget()
    grid = QGridLayout(content)
    grid.setHorizontalSpacing(24)
    grid.setVerticalSpacing(6)
    grid.setColumnStretch(1, 1)
    for row, (name, value) in enumerate(rows):
        label = plain_label(value, wrap=True)
        label.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        grid.addWidget(plain_label(name, "dim"), row, 0, Qt.AlignmentFlag.AlignTop)
        grid.addWidget(label, row, 1)
    grid.setRowStretch(len(rows), 1)
    return content


def _text(name: str, text: str) -> QPlainTextEdit:
    view = QPlainTextEdit(text)
    view.setAccessibleName(name)
    view.setReadOnly(True)
    view.setLineWrapMode(QPlainTextEdit.LineWrapMode.WidgetWidth)
    return view
