"""The question bar above the editor, shown if a model does not fit alone or beside the loaded models."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct
from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QKeyEvent
from PySide6.QtWidgets import QCheckBox, QFrame, QHBoxLayout, QPushButton, QSizePolicy, QWidget

from engine.base.language import tr
from widgets.common.boxes import v_box
from widgets.common.roles import plain_label, plain_tool_tip


class LoadDecision(StrEnum):
    """What to do about a model that does not fit. The settings file stores the value.

    UNLOAD: unload other models, then load. BESIDE: load the layout as it is. PROPOSAL: load the proposed layout
    instead. CANCEL: do not load.
    """

    UNLOAD = "unload"
    BESIDE = "beside"
    PROPOSAL = "proposal"
    CANCEL = "cancel"


class LoadQuestion(Struct, frozen=True):
    """A question to the user before a load, with the labels of its buttons. A button with an empty label is hidden.

    `text`: the question.
    `unload_text`, `without_unload_text`, `proposal_text`: labels of the buttons for these answers (`LoadDecision`).
    `can_remember`: whether "Do not ask again" is offered.
    """

    text: str
    unload_text: str
    unload_tool_tip: str
    without_unload_text: str
    can_remember: bool
    proposal_text: str = ""
    proposal_tool_tip: str = ""


class LoadChoice(Struct, frozen=True):
    """The user's answer in the question bar. `remember`: whether later loads use the same answer without asking."""

    answer: LoadDecision
    remember: bool = False


class LoadQuestionBar(QFrame):
    """The bar that asks before a load, for instance whether to unload other models; hidden while nothing is asked."""

    answered = Signal(LoadChoice)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "card")
        self.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Fixed)
        self.text_label = plain_label("", wrap=True)
        self.unload_button = QPushButton()
        self.unload_button.setProperty("role", "primary")
        # Its text has the name of a model, which can be as long as a file name.
        self.unload_button.setMaximumWidth(420)
        self.without_unload_button = QPushButton()
        self.proposal_button = QPushButton()
        self.proposal_button.setProperty("role", "primary")
        self.cancel_button = QPushButton(tr("Cancel"))
        self.remember_box = QCheckBox(tr("Do not ask again"))
        self.remember_box.setToolTip(tr("To be asked again, use Model > Ask before Unloading a Model"))
        buttons = QHBoxLayout()
        buttons.setSpacing(8)
        buttons.addWidget(self.remember_box)
        buttons.addStretch(1)
        # The proposal is found while the question is read: it comes on the left, and the others stay where they are.
        for button in (self.proposal_button, self.cancel_button, self.without_unload_button, self.unload_button):
            buttons.addWidget(button)
        column = v_box(self, spacing=8, margins=(12, 8, 12, 8))
        column.addWidget(self.text_label)
        column.addLayout(buttons)
        self.unload_button.clicked.connect(lambda: self._answer(LoadDecision.UNLOAD))
        self.without_unload_button.clicked.connect(lambda: self._answer(LoadDecision.BESIDE))
        self.proposal_button.clicked.connect(lambda: self._answer(LoadDecision.PROPOSAL))
        self.cancel_button.clicked.connect(lambda: self._answer(LoadDecision.CANCEL))
        self.hide()

    @property
    def text(self) -> str:
        return self.text_label.text()

    def set_question(self, question: LoadQuestion | None) -> None:
        """Show `question`; None hides the bar."""
        if question is None:
            self.hide()
            return
        # The same question comes again when a proposal was found or the layout was edited meanwhile.
        keeps_choice = self.isVisible() and question.can_remember
        self.text_label.setText(question.text)
        self.setAccessibleName(question.text)
        for button, text, tool_tip in (
            (self.unload_button, question.unload_text, question.unload_tool_tip),
            (self.proposal_button, question.proposal_text, question.proposal_tool_tip),
            (self.without_unload_button, question.without_unload_text, ""),
        ):
            # The text may have the name of a model, in which "&" is no mnemonic.
            button.setText(text.replace("&", "&&"))
            button.setAccessibleName(text)
            button.setToolTip(plain_tool_tip(tool_tip))
            button.setVisible(bool(text))
        self.remember_box.setChecked(keeps_choice and self.remember_box.isChecked())
        self.remember_box.setVisible(question.can_remember)
        self.show()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        """Cancel the question if Escape is pressed."""
        # Buttons do not use Escape, so it arrives here from whichever has the focus.
        if event.key() == Qt.Key.Key_Escape:
            self._answer(LoadDecision.CANCEL)
            return
        super().keyPressEvent(event)

    def _answer(self, answer: LoadDecision) -> None:
        # A proposal is for one layout; another one would be asked about all the same.
        remember = answer in (LoadDecision.UNLOAD, LoadDecision.BESIDE) and self.remember_box.isChecked()
        self.answered.emit(LoadChoice(answer, remember))
