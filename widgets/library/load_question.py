"""The question above the editor when a model does not fit, alone or beside others. Nothing waits for the answer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QKeyEvent
from PySide6.QtWidgets import QCheckBox, QFrame, QHBoxLayout, QPushButton, QSizePolicy, QVBoxLayout, QWidget

from engine.base.language import tr
from widgets.common.roles import plain_label
from widgets.common.tool_tips import plain_tool_tip


class LoadAnswer(StrEnum):
    """What to do with the models that are in the way, and with the layout; the value is what settings keep.

    BESIDE: load as it is, whatever is forecast. PROPOSAL: load what would fit instead.
    """

    UNLOAD = "unload"
    BESIDE = "beside"
    PROPOSAL = "proposal"
    CANCEL = "cancel"


@dataclass(frozen=True, slots=True)
class LoadQuestion:
    """What is asked, and the words of the buttons; one without words is not offered."""

    text: str
    unload_text: str
    unload_tool_tip: str
    beside_text: str
    can_remember: bool
    proposal_text: str = ""
    proposal_tool_tip: str = ""


@dataclass(frozen=True, slots=True)
class LoadChoice:
    """What the person chose, and whether for the next time as well."""

    answer: LoadAnswer
    remember: bool = False


class LoadQuestionBar(QFrame):
    """Hidden without a question."""

    answered = Signal(LoadChoice)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "card")
        self.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Fixed)
        self.text_label = plain_label("", wrap=True)
        self.unload_button = QPushButton()
        self.unload_button.setProperty("role", "primary")
        self.unload_button.setMaximumWidth(420)
        self.beside_button = QPushButton()
        self.proposal_button = QPushButton()
        self.proposal_button.setProperty("role", "primary")
        self.cancel_button = QPushButton(tr("Cancel"))
        self.remember_box = QCheckBox(tr("Do not ask again"))
        self.remember_box.setToolTip(tr("Model > Ask before Unloading a Model brings the question back"))
        buttons = QHBoxLayout()
        buttons.setSpacing(8)
        buttons.addWidget(self.remember_box)
        buttons.addStretch(1)
        # The proposal is found while the question is read: it comes on the left, and the others stay where they are.
        for button in (self.proposal_button, self.cancel_button, self.beside_button, self.unload_button):
            buttons.addWidget(button)
        column = QVBoxLayout(self)
        column.setContentsMargins(12, 8, 12, 8)
        column.setSpacing(8)
        column.addWidget(self.text_label)
        column.addLayout(buttons)
        self.unload_button.clicked.connect(lambda: self._answer(LoadAnswer.UNLOAD))
        self.beside_button.clicked.connect(lambda: self._answer(LoadAnswer.BESIDE))
        self.proposal_button.clicked.connect(lambda: self._answer(LoadAnswer.PROPOSAL))
        self.cancel_button.clicked.connect(lambda: self._answer(LoadAnswer.CANCEL))
        self.hide()

    @property
    def text(self) -> str:
        return self.text_label.text()

    def set_question(self, question: LoadQuestion | None) -> None:
        """Ask `question`; None: there is nothing to ask."""
        if question is None:
            self.hide()
            return
        keeps_choice = self.isVisible() and question.can_remember
        self.text_label.setText(question.text)
        self.setAccessibleName(question.text)
        for button, text, tool_tip in (
            (self.unload_button, question.unload_text, question.unload_tool_tip),
            (self.proposal_button, question.proposal_text, question.proposal_tool_tip),
            (self.beside_button, question.beside_text, ""),
        ):
            button.setText(text)
            button.setToolTip(plain_tool_tip(tool_tip))
            button.setVisible(bool(text))
        self.remember_box.setChecked(keeps_choice and self.remember_box.isChecked())
        self.remember_box.setVisible(question.can_remember)
        self.show()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        """Escape on one of the buttons takes the question back."""
        if event.key() == Qt.Key.Key_Escape:
            self._answer(LoadAnswer.CANCEL)
            return
        super().keyPressEvent(event)

    def _answer(self, answer: LoadAnswer) -> None:
        # A proposal is for one layout; another one would be asked about all the same.
        remember = answer in (LoadAnswer.UNLOAD, LoadAnswer.BESIDE) and self.remember_box.isChecked()
        self.answered.emit(LoadChoice(answer, remember))
