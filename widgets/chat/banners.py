"""Rows above the input of the chat: banners with buttons, and the progress of reading a prompt."""

from __future__ import annotations

from PySide6.QtCore import QSize, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import (
    QBoxLayout,
    QFrame,
    QLayout,
    QProgressBar,
    QPushButton,
    QSizePolicy,
    QWidget,
)

from engine.base.language import tr
from widgets.common.boxes import h_box
from widgets.common.elided_label import ElidedLabel
from widgets.common.roles import plain_label
from widgets.common.wrap_layout import WrapLayout

LEAST_SENTENCE_PX = 220
"""Least width in pixels of a sentence with buttons at its side. With less room the buttons are below the sentence."""
LEAST_BAR_PX = 40


class Banner(QFrame):
    """Row with a sentence and one or more buttons; hidden at first.

    In a narrow panel the buttons are below the sentence, because one line with both would widen the panel.
    """

    def __init__(self, text: str, button: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "card")
        self.button = QPushButton(button)
        self.label = plain_label(text, wrap=True)
        self._buttons = QWidget()
        self._buttons.setSizePolicy(QSizePolicy.Policy.Maximum, QSizePolicy.Policy.Preferred)
        self._flow = WrapLayout(self._buttons, spacing=6)
        self._flow.addWidget(self.button)
        row = self._row = QBoxLayout(QBoxLayout.Direction.LeftToRight, self)
        row.setContentsMargins(12, 8, 8, 8)
        row.addWidget(self.label, 1)
        row.addWidget(self._buttons)
        # The minimum of the present direction would keep the panel wide.
        row.setSizeConstraint(QLayout.SizeConstraint.SetNoConstraint)
        self.hide()

    def minimumSizeHint(self) -> QSize:
        """Return the minimum size, which is as wide as the widest button."""
        margins = self._row.contentsMargins()
        width = self._flow.minimumSize().width() + margins.left() + margins.right()
        return QSize(width, super().minimumSizeHint().height())

    def resizeEvent(self, event: QResizeEvent) -> None:
        """Place the buttons below the sentence if both do not fit side by side."""
        super().resizeEvent(event)
        is_narrow = self.width() < self._flow.sizeHint().width() + LEAST_SENTENCE_PX
        direction = QBoxLayout.Direction.TopToBottom if is_narrow else QBoxLayout.Direction.LeftToRight
        if direction != self._row.direction():
            self._row.setDirection(direction)
            # The height for this width is another one now.
            self.updateGeometry()

    def show_words(self, text: str, button: str) -> None:
        """Set the sentence to `text`, and the label of the button to `button`."""
        self.label.setText(text)
        self.button.setText(button)

    def add_button(self, text: str) -> QPushButton:
        """Add a button with the label `text` at the left of the first button, and return it."""
        button = QPushButton(text)
        self._flow.removeWidget(self.button)
        self._flow.addWidget(button)
        self._flow.addWidget(self.button)
        return button


class OverflowBanner(Banner):
    """Banner that asks whether to drop the oldest messages from a full context; hidden while there is no question."""

    answered = Signal(bool)
    """Emitted with the person's answer. True: drop the oldest messages. False: do not send the question."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__("", tr("Do not send"), parent)
        self.leave_out_button = self.add_button(tr("Drop oldest messages"))
        self.cancel_button = self.button
        self.leave_out_button.clicked.connect(lambda: self.answered.emit(True))
        self.cancel_button.clicked.connect(lambda: self.answered.emit(False))

    def ask(self, sentence: str) -> None:
        """Show `sentence` as the question; an empty sentence hides the banner."""
        self.label.setText(sentence)
        self.setVisible(bool(sentence))


class ReadingRow(QWidget):
    """Progress bar of prompt processing; hidden while no prompt is being processed."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.progress = QProgressBar()
        # The label beside it has the numbers.
        self.progress.setTextVisible(False)
        self.progress.setAccessibleName(tr("Progress of prompt processing"))
        self.progress.setMinimumWidth(LEAST_BAR_PX)
        # Cut in a narrow panel: the row comes and goes, and must not make the panel wider.
        self.label = ElidedLabel("", "dim")
        row = h_box(self)
        row.addWidget(self.progress, 1)
        row.addWidget(self.label)
        self.hide()

    def show_share(self, share: float | None, words: str) -> None:
        """Show the processed share of the prompt, 0 to 1, with the text `words` beside it.

        The row is hidden if `share` is None.
        """
        self.setVisible(share is not None)
        self.progress.setValue(round(100 * (share or 0.0)))
        self.label.setText(words)
