"""One answer of a talk: asked for, shown as it reaches the disk, and kept whole."""

from __future__ import annotations

from app.cli.chat_printers import ChatPrinter
from app.cli.talk_session import Kept, Shown, TalkSession
from engine.chats.answer import AnswerInProgress
from engine.chats.message import Message, MessageState, Timings
from engine.chats.store import ChatStore
from engine.errors import EngineError
from engine.protocol.messages import Generate
from engine.session.events import Cancelled, Crashed, Done, Failed, OutOfMemory, RequestEnding, Token


class AnswerWriter:
    """Writes answers of one talk."""

    def __init__(self, store: ChatStore, session: TalkSession, printer: ChatPrinter) -> None:
        self._store, self._session, self._printer = store, session, printer

    def write(
        self, conversation: str, message: Message, request: Generate, *, note: str
    ) -> tuple[int, RequestEnding, Message]:
        """Have `message` written, which is kept already; return the request's number, its ending and the answer whole.
        `note`: what is kept with an answer that nothing went wrong with.

        Raises:
            Over: where the model was lost before it was asked.
        """
        answer = AnswerInProgress(
            self._store, conversation, message, lambda told, error: self._session.put(Shown(told, error))
        )
        number = self._session.request(request)
        ending = self._follow(number, answer)
        done = ending if isinstance(ending, Done) else None
        whole, kept = answer.end(
            _state_of(ending),
            stop_reason=done.stop_reason if done else "",
            timings=None if done is None else _timings(done),
            note=note if done else getattr(ending, "message", ""),
        )
        kept.add_done_callback(lambda future: self._session.put(Kept(future.exception())))
        self._show_rest()
        return number, ending, whole

    def _follow(self, request: int, answer: AnswerInProgress) -> RequestEnding:
        """Show an answer up to its ending."""
        for news in self._session.news_of(request):
            match news:
                case Token() if news.request == request:
                    answer.add(news.text, news.choices)
                case Shown():
                    self._show(news)
                case Done() | OutOfMemory() | Failed() | Crashed() | Cancelled() if news.request in (request, None):
                    return news
        raise AssertionError("an answer has an ending")

    def _show(self, shown: Shown) -> None:
        if shown.error is not None:
            self._printer.notice(shown.error.summary())
        self._printer.said(shown.told.reasoning, shown.told.content)

    def _show_rest(self) -> None:
        for news in self._session.next_news(lambda: None):
            if isinstance(news, Shown):
                self._show(news)
            elif isinstance(news, Kept):
                if isinstance(news.error, EngineError):
                    self._printer.notice(news.error.summary())
                return


def _state_of(ending: RequestEnding) -> MessageState:
    if not isinstance(ending, Done):
        return "failed"
    return "stopped" if ending.stop_reason == "stopped" else "done"


def _timings(done: Done) -> Timings:
    read = done.prompt_tokens - done.cached_tokens
    return Timings(
        prompt_tokens=done.prompt_tokens,
        cached_tokens=done.cached_tokens,
        generated_tokens=done.generated_tokens,
        prompt_seconds=read / done.prompt_tokens_per_second if done.prompt_tokens_per_second else None,
        generation_seconds=done.generated_tokens / done.generation_tokens_per_second
        if done.generation_tokens_per_second
        else None,
    )
