"""Shows how the tokens of an answer were chosen."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QObject
from PySide6.QtWidgets import QWidget

from app.models.open_model import OpenModel
from app.theme import Theme
from engine.chats.message import MAX_CHOICES
from engine.language import tr
from engine.protocol.messages import TokenChoice
from widgets.chat.chat_pane import ChatPane
from widgets.chat.shown import MessageAction
from widgets.chat.token_dialogs import ChoicesDialog, ShownChoice
from widgets.common.counts import format_count


def shown_choice(choice: TokenChoice) -> ShownChoice:
    """Return how a token was chosen as widgets show it."""
    return ShownChoice(choice.text, choice.probability, choice.likeliest)


class ChoicesPresenter(QObject):
    """Keeps one dialog for a window, made when it is first asked for."""

    def __init__(self, theme: Theme, window: QWidget) -> None:
        super().__init__(window)
        self._theme = theme
        self._window = window
        self.dialog: ChoicesDialog | None = None

    def follow(self, model: OpenModel, pane: ChatPane) -> None:
        """Show the answers of a chat when that is asked for there."""
        pane.acted.connect(self._shows(model))

    def _shows(self, model: OpenModel) -> Callable[[MessageAction], None]:
        def show(action: MessageAction) -> None:
            if action.kind == "tokens":
                self._show(model, action.message)

        return show

    def _show(self, model: OpenModel, message: str) -> None:
        known = model.conversation.tree.messages.get(message)
        if known is None:
            return
        dialog = self.dialog = self.dialog or self._make_dialog()
        shown = list(map(shown_choice, known.choices))
        is_whole = len(shown) < MAX_CHOICES
        dialog.show_choices(
            shown,
            ""
            if is_whole
            else tr("of an answer the first {max_choices} are kept", max_choices=format_count(MAX_CHOICES)),
        )
        dialog.show()
        dialog.raise_()
        dialog.activateWindow()

    def _make_dialog(self) -> ChoicesDialog:
        dialog = ChoicesDialog(self._window)
        dialog.apply_palette(self._theme.palette)
        self._theme.palette_changed.connect(dialog.apply_palette)
        return dialog
