"""Shows what the current model reads of its conversation."""

from __future__ import annotations

from PySide6.QtCore import QObject
from PySide6.QtWidgets import QWidget

from app.models.loading import AnswerLost
from app.models.open_model import OpenModel
from app.models.open_models import OpenModels
from app.theme import Theme
from app.window.choices_presenter import shown_choice
from engine.chats.asking import choices_in_prompt
from engine.chats.message import Message
from engine.errors import EngineError
from engine.language import tr
from engine.protocol.messages import Rendered, RenderTemplate
from engine.session.events import Answered
from widgets.chat.token_dialogs import PromptDialog, ShownPrompt


class PromptPresenter(QObject):
    """Keeps one dialog, made when it is first asked for."""

    def __init__(self, models: OpenModels, theme: Theme, window: QWidget) -> None:
        super().__init__(window)
        self._models = models
        self._theme = theme
        self._window = window
        self._asked: tuple[OpenModel, int] | None = None
        self._path: tuple[Message, ...] = ()
        """What was said when the model was asked."""
        self.dialog: PromptDialog | None = None

    def show(self) -> None:
        """Ask the model, and open the dialog."""
        self._forget()
        dialog = self.dialog = self.dialog or self._make_dialog()
        dialog.show()
        dialog.raise_()
        dialog.activateWindow()
        model = self._models.current
        messages = model.conversation.prompt_messages()
        if not messages:
            dialog.show_fault(tr("Nothing was said yet."))
            return
        try:
            number = model.loading.ask(
                RenderTemplate(messages=messages, template=model.conversation.chat.template, tokenise=True)
            )
        except EngineError as error:
            dialog.show_fault(error.summary())
            return
        self._asked, self._path = (model, number), model.conversation.prompt_path
        model.loading.bridge.answered.connect(self._on_answered)
        model.loading.answer_lost.connect(self._on_lost)

    def _make_dialog(self) -> PromptDialog:
        dialog = PromptDialog(self._window)
        dialog.apply_palette(self._theme.palette)
        self._theme.palette_changed.connect(dialog.apply_palette)
        return dialog

    def _on_answered(self, event: Answered) -> None:
        if self._asked is None or event.request != self._asked[1] or self.dialog is None:
            return
        if isinstance(event.answer, Rendered):
            answer = event.answer
            n_ctx = self._asked[0].loading.snapshot.context_size
            found = choices_in_prompt(answer.pieces, self._path)
            choices = {place: shown_choice(choice) for place, choice in found.items()}
            shown = ShownPrompt(answer.tokens, answer.pieces, n_ctx, answer.replaced, answer.n_tokens, choices)
            self.dialog.show_prompt(shown)
        self._forget()

    def _on_lost(self, lost: AnswerLost) -> None:
        if self._asked is not None and lost.request == self._asked[1]:
            if self.dialog is not None:
                self.dialog.show_fault(lost.sentence)
            self._forget()

    def _forget(self) -> None:
        asked, self._asked = self._asked, None
        if asked is not None:
            asked[0].loading.bridge.answered.disconnect(self._on_answered)
            asked[0].loading.answer_lost.disconnect(self._on_lost)
