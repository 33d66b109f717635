"""Help > New Version: whether to look for one, where, and what was found. Nothing is fetched; a page can be opened."""

from __future__ import annotations

from PySide6.QtCore import Qt, QUrl
from PySide6.QtGui import QDesktopServices
from PySide6.QtWidgets import (
    QCheckBox,
    QDialog,
    QDialogButtonBox,
    QLabel,
    QLineEdit,
    QPushButton,
    QVBoxLayout,
    QWidget,
)

from app.releases import Look, ReleaseKeeper
from engine.language import tr
from engine.releases.errors import ReleaseError
from widgets.common.roles import plain_label, set_role
from widgets.common.tool_tips import plain_tool_tip

INTRODUCTION = tr(
    "Layerdeck asks nobody for new versions unless you want it to. Then it asks the address "
    "below, which learns nothing but that somebody asked. The answer counts only if it is "
    "signed by those who publish Layerdeck. Nothing is downloaded or installed."
)
NOT_LOOKED = tr("Not looked yet.")


class ReleasesDialog(QDialog):
    """Shows what `keeper` does, and lets people turn it on."""

    def __init__(self, parent: QWidget, keeper: ReleaseKeeper) -> None:
        super().__init__(parent)
        self.setWindowTitle(tr("New Version"))
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self._keeper = keeper
        self._page = ""
        self.daily_box = QCheckBox(tr("&Look once a day"))
        self.daily_box.setChecked(keeper.kept.daily)
        self.address_edit = QLineEdit(keeper.address)
        self.address_edit.setPlaceholderText("https://…")
        self.address_edit.setAccessibleName(tr("Address that is asked for new versions"))
        self._words = plain_label(NOT_LOOKED, wrap=True)
        self._words.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.look_button = QPushButton(tr("Look &Now"))
        self.page_button = QPushButton(tr("Open Its &Page"))
        self.page_button.setEnabled(False)
        self._build()
        self.daily_box.toggled.connect(self._on_turned)
        self.look_button.clicked.connect(self._on_look)
        self.page_button.clicked.connect(self._on_page)
        keeper.looked.connect(self._on_looked)
        if keeper.is_looking:
            self._show_looking()

    @property
    def text(self) -> str:
        """What is said about the newest version."""
        return self._words.text()

    def done(self, result: int) -> None:
        """Close; an address that was entered stays where it may be asked."""
        self._take_address()
        super().done(result)

    def _build(self) -> None:
        buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Close)
        buttons.addButton(self.look_button, QDialogButtonBox.ButtonRole.ActionRole)
        buttons.addButton(self.page_button, QDialogButtonBox.ButtonRole.ActionRole)
        self.look_button.setDefault(True)
        buttons.rejected.connect(self.reject)
        label = QLabel(tr("&Address"))
        label.setBuddy(self.address_edit)
        layout = QVBoxLayout(self)
        layout.setSpacing(8)
        layout.addWidget(plain_label(INTRODUCTION, "dim", wrap=True))
        layout.addWidget(self.daily_box)
        layout.addWidget(label)
        layout.addWidget(self.address_edit)
        layout.addSpacing(8)
        layout.addWidget(self._words)
        layout.addStretch(1)
        layout.addWidget(buttons)
        self.resize(560, 320)

    def _on_turned(self, daily: bool) -> None:
        self._keeper.turn(daily)
        if daily:
            self._on_look()

    def _on_look(self) -> None:
        if self._take_address():
            self._show_looking()
            self._keeper.look()

    def _take_address(self) -> bool:
        """Keep the address that is entered; return whether it may be asked."""
        address = self.address_edit.text().strip()
        try:
            if address != self._keeper.address:
                self._keeper.set_address(address)
        except ReleaseError as error:
            self._say(error.summary(), bad=True)
            return False
        return True

    def _on_looked(self, look: Look) -> None:
        self.look_button.setEnabled(True)
        self._say(look.sentence, bad=look.release is None)
        self._page = look.release.page if look.release is not None else ""
        self.page_button.setEnabled(bool(self._page))
        self.page_button.setToolTip(plain_tool_tip(self._page))

    def _on_page(self) -> None:
        if not QDesktopServices.openUrl(QUrl(self._page)):
            self._say(tr("No browser answered. The page is {page}", page=self._page))

    def _show_looking(self) -> None:
        self.look_button.setEnabled(False)
        self._say(tr("Looking…"))

    def _say(self, text: str, *, bad: bool = False) -> None:
        set_role(self._words, "error" if bad else "")
        self._words.setText(text)
