"""Presenters of two dialogs about tokens: the raw prompt of a conversation, and the probabilities of an answer."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtWidgets import QWidget

from app.models.loading import RequestLost
from app.models.open_model import OpenModel
from app.models.open_models import OpenModels
from app.theme import Theme
from app.window.dialogs import OneDialog
from engine.base.errors import EngineError
from engine.base.language import tr
from engine.base.units import format_count
from engine.chat.asking import choices_in_prompt
from engine.chat.message import MAX_CHOICES, Message
from engine.runtime.protocol.messages import Rendered, TokenChoice
from engine.runtime.protocol.requests import RenderTemplate, TemplateInput
from engine.runtime.session.events import Answered
from widgets.chat.chat_pane import ChatPane
from widgets.chat.shown import MessageAction
from widgets.chat.token_dialogs import ChoicesDialog, PromptDialog, ShownChoice, ShownPrompt


def shown_choice(choice: TokenChoice) -> ShownChoice:
    """Return a token with its probability and alternatives as the value that widgets show."""
    return ShownChoice(choice.text, choice.probability, choice.likeliest)


class ChoicesPresenter(OneDialog[ChoicesDialog]):
    """Shows a dialog with the probabilities of the tokens of an answer."""

    def __init__(self, theme: Theme, window: QWidget) -> None:
        super().__init__(self._make_dialog, lambda _dialog: None, window)
        self._theme = theme
        self._window = window

    def follow(self, model: OpenModel, pane: ChatPane) -> None:
        """Show token probabilities when the user chooses Tokens on a message in `pane`, the chat of `model`."""
        pane.acted.connect(self._shows(model))

    def _shows(self, model: OpenModel) -> Callable[[MessageAction], None]:
        def show(action: MessageAction) -> None:
            if action.kind == "tokens":
                self.show_choices(model, action.message)

        return show

    def show_choices(self, model: OpenModel, message: str) -> None:
        """Show the token probabilities of the answer with the id `message`."""
        known = model.conversation.tree.messages.get(message)
        if known is None:
            return
        shown = list(map(shown_choice, known.choices))
        is_whole = len(shown) < MAX_CHOICES
        cut = tr(
            "probabilities are saved for the first {max_choices} tokens only", max_choices=format_count(MAX_CHOICES)
        )
        self.open().show_choices(shown, "" if is_whole else cut)

    def _make_dialog(self) -> ChoicesDialog:
        dialog = ChoicesDialog(self._window)
        dialog.apply_palette(self._theme.palette)
        self._theme.palette_changed.connect(dialog.apply_palette)
        return dialog


class PromptPresenter(OneDialog[PromptDialog]):
    """Shows a dialog with the raw prompt of the current conversation, token by token."""

    def __init__(self, models: OpenModels, theme: Theme, window: QWidget) -> None:
        super().__init__(self._make_dialog, lambda _dialog: None, window)
        self._models = models
        self._theme = theme
        self._window = window
        self._asked: tuple[OpenModel, int] | None = None
        self._path: tuple[Message, ...] = ()
        """The messages of the prompt that was requested."""

    def show(self) -> None:
        """Open the dialog, and request the rendered prompt from the model's child process."""
        # The answer to an earlier request must not be shown as this prompt.
        self._forget()
        dialog = self.open()
        model = self._models.current
        messages = model.conversation.prompt_messages()
        if not messages:
            dialog.show_error(tr("The conversation is empty."))
            return
        try:
            tools = TemplateInput(tools=model.conversation.tools.definitions)
            number = model.loading.ask(
                RenderTemplate(
                    messages=messages,
                    template_input=tools,
                    template=model.conversation.chat.template,
                    tokenise=True,
                )
            )
        except EngineError as error:
            dialog.show_error(error.summary())
            return
        self._asked, self._path = (model, number), model.conversation.prompt_path
        # Connected for one request only: each model has its own bridge.
        model.loading.bridge.answered.connect(self._on_answered)
        model.loading.request_lost.connect(self._on_lost)

    def _make_dialog(self) -> PromptDialog:
        dialog = PromptDialog(self._window)
        dialog.apply_palette(self._theme.palette)
        self._theme.palette_changed.connect(dialog.apply_palette)
        return dialog

    def _on_answered(self, event: Answered) -> None:
        # The bridge emits answers for all who ask the child, such as the token counter.
        if self._asked is None or event.request != self._asked[1] or self.dialog is None:
            return
        if isinstance(event.answer, Rendered):
            answer = event.answer
            n_ctx = self._asked[0].loading.snapshot.context_size
            found = choices_in_prompt(answer.pieces, self._path)
            choices = {index: shown_choice(choice) for index, choice in found.items()}
            shown = ShownPrompt(answer.tokens, answer.pieces, n_ctx, answer.replaced, answer.n_tokens, choices)
            self.dialog.show_prompt(shown)
        self._forget()

    def _on_lost(self, lost: RequestLost) -> None:
        if self._asked is not None and lost.request == self._asked[1]:
            if self.dialog is not None:
                self.dialog.show_error(lost.sentence)
            self._forget()

    def _forget(self) -> None:
        asked, self._asked = self._asked, None
        if asked is not None:
            asked[0].loading.bridge.answered.disconnect(self._on_answered)
            asked[0].loading.request_lost.disconnect(self._on_lost)
