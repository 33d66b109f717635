"""Counts the tokens of a conversation while its model is loaded, for the meter of the context.

The model's child counts single texts with the vocabulary, and the whole prompt with the chat template. One request runs
at a time. Counts of texts, images, sounds and conversations are cached. After an answer the prompt is counted again.
The number of tokens in the KV cache would be wrong: it includes thoughts, which the next prompt leaves out, and the end
of a turn is not always generated.
"""

from __future__ import annotations

from msgspec import Struct
from PySide6.QtCore import QObject, Signal

from app.models.loading import Loading, RequestLost
from engine.base.errors import EngineError
from engine.base.values import replace
from engine.chat.context import ContextUse, answer_reserve, use_of
from engine.runtime.protocol.messages import Counted
from engine.runtime.protocol.requests import ChatMessage, CountTokens, MediaFile, TemplateInput
from engine.runtime.session.events import Answered
from engine.runtime.session.status import Phase
from widgets.common.delayed_call import DelayedCall

MOST_CONVERSATIONS = 32
"""Largest number of whole conversations whose counts are cached.

Counts of single texts are cached until the next load.
"""


class CountedChat(Struct, frozen=True):
    """The prompt of a conversation, and its parts that the meter shows separately.

    `messages`: all messages of the prompt. `system`: system prompt.
    `template`: chat template, empty for the model's own.
    `files`: texts of attachments. `media`: images and sounds, without their bytes.
    `max_tokens`: largest number of tokens of the answer, None if it is not limited.
    `tools`: definitions of tools as JSON.
    """

    messages: tuple[ChatMessage, ...]
    template: str
    system: str
    files: tuple[str, ...]
    media: tuple[MediaFile, ...]
    max_tokens: int | None
    tools: str = ""

    @property
    def request(self) -> CountTokens:
        """The request to the model's child that counts the whole prompt."""
        template_input = TemplateInput(tools=self.tools)
        return CountTokens(messages=self.messages, template_input=template_input, template=self.template)

    @property
    def texts(self) -> tuple[str, ...]:
        """The system prompt and the texts of attachments.

        Each is also counted on its own, because the context meter shows it as a separate part.
        """
        return tuple(text for text in (self.system, *self.files) if text)


class ContextCounter(QObject):
    """Counts tokens for the context meter, by requests to the model's child.

    A newer request replaces one that waits.
    """

    counted = Signal(ContextUse)

    def __init__(self, loading: Loading, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._loading = loading
        self._wanted: CountedChat | None = None
        self._asked: tuple[int, CountedChat, CountTokens] | None = None
        self._texts: dict[str, int] = {}
        self._media: dict[MediaFile, int] = {}
        self._prompts: dict[CountTokens, int] = {}
        # Waits until all receivers of the current signal are done: one of them may count another conversation.
        self._timer = DelayedCall(self, self._go_on)
        loading.bridge.answered.connect(self._on_answered)
        loading.request_lost.connect(self._on_lost)
        loading.loaded_changed.connect(self._forget)

    def count(self, chat: CountedChat) -> None:
        """Count a conversation. `counted` is emitted with the result, unless another count is requested before that."""
        self._wanted = chat
        self._timer.start(0)

    def _go_on(self) -> None:
        chat = self._wanted
        if chat is None or self._asked is not None:
            return
        # Each text once and in order: the child returns the counts in the order of the request.
        texts = tuple(text for text in dict.fromkeys(chat.texts) if text not in self._texts)
        media = tuple(file for file in dict.fromkeys(chat.media) if file not in self._media)
        used = self._prompts.get(chat.request)
        n_ctx = self._loading.snapshot.context_size
        if texts or media or used is None:
            # A prompt that was counted before is not sent again, only texts and media that are new.
            request = CountTokens() if used is not None else chat.request
            self._ask(chat, replace(request, texts=texts, media=media))
        elif n_ctx is not None:
            self._wanted = None
            system = self._texts.get(chat.system, 0)
            files = sum(self._texts.get(text, 0) for text in chat.files)
            files += sum(self._media.get(file, 0) for file in chat.media)
            self.counted.emit(use_of(used, system, files, answer_reserve(n_ctx, chat.max_tokens), n_ctx))

    def _ask(self, chat: CountedChat, request: CountTokens) -> None:
        if self._loading.phase is not Phase.READY:
            return  # The next answer or load counts again.
        try:
            number = self._loading.ask(request)
        except EngineError:
            return
        self._asked = number, chat, request

    def _on_answered(self, event: Answered) -> None:
        if self._asked is None or event.request != self._asked[0]:
            return
        (_, chat, request), self._asked = self._asked, None
        if isinstance(event.answer, Counted):
            self._texts.update(zip(request.texts, event.answer.texts, strict=True))
            self._media.update(zip(request.media, event.answer.media, strict=True))
            if request.messages:
                self._prompts[chat.request] = event.answer.prompt
                # A dict keeps its order of insertion, so the first key is the oldest.
                if len(self._prompts) > MOST_CONVERSATIONS:
                    del self._prompts[next(iter(self._prompts))]
            self._go_on()

    def _on_lost(self, lost: RequestLost) -> None:
        """After a failed request of this counter, count the conversation that waits, if there is one.

        The conversation of the failed request is not counted again, because that would fail again: the model is being
        unloaded, or it has no projector for the images.
        """
        if self._asked is not None and lost.request == self._asked[0]:
            (_, chat, _), self._asked = self._asked, None
            if self._wanted is not chat:
                self._timer.start(0)

    def _forget(self) -> None:
        # Counts depend on vocabulary, chat template and projector, and another load may have others.
        self._asked = None
        self._texts.clear()
        self._media.clear()
        self._prompts.clear()
