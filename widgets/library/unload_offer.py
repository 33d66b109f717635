"""The bar above the editor that offers to unload idle models, so that the model fits without layers on the CPU."""

from __future__ import annotations

from msgspec import Struct
from PySide6.QtCore import Signal
from PySide6.QtWidgets import QFrame, QPushButton, QSizePolicy, QWidget

from widgets.common.boxes import h_box
from widgets.common.roles import plain_label, plain_tool_tip

MAX_BUTTON_PX = 320
"""Maximum width of a button in pixels. Its label has the name of a model, which can be very long."""


class UnloadOffer(Struct, frozen=True):
    """The texts of the offer to unload idle models: a sentence, two buttons, and a tool tip."""

    text: str
    unload_text: str
    load_text: str
    tool_tip: str


class UnloadOfferBar(QFrame):
    """The bar with the offer to unload idle models; hidden while there is no offer."""

    unload_requested = Signal()
    load_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "card")
        self.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Fixed)
        self.text_label = plain_label("", wrap=True)
        self.unload_button = QPushButton()
        self.load_button = QPushButton()
        self.load_button.setProperty("role", "primary")
        row = h_box(self, spacing=8, margins=(12, 6, 8, 6))
        row.addWidget(self.text_label, 1)
        for button in (self.unload_button, self.load_button):
            button.setMaximumWidth(MAX_BUTTON_PX)
            row.addWidget(button)
        self.unload_button.clicked.connect(self.unload_requested)
        self.load_button.clicked.connect(self.load_requested)
        self.hide()

    def set_offer(self, offer: UnloadOffer | None) -> None:
        """Show `offer`, which offers to unload idle models; None hides the bar."""
        if offer is not None:
            self.text_label.setText(offer.text)
            self.setAccessibleName(offer.text)
            for button, text in ((self.unload_button, offer.unload_text), (self.load_button, offer.load_text)):
                # The text has the name of a model, in which "&" is no mnemonic.
                button.setText(text.replace("&", "&&"))
                button.setAccessibleName(text)
                button.setToolTip(plain_tool_tip(f"{text}\n{offer.tool_tip}"))
        self.setVisible(offer is not None)
