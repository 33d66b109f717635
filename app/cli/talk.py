"""One talk of `chat`: load, go on where the conversation was, answer line after line, keep everything."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from app.cli import exit_codes
from app.cli.chat_printers import ChatPrinter
from app.cli.interrupts import on_interrupt
from app.cli.lines import LineReader
from engine.chats.answer import AnswerInProgress
from engine.chats.asking import (
    SYSTEM,
    answer_request,
    chat_messages,
    count_request,
    messages_by_id,
    names_of_images,
    with_files,
)
from engine.chats.attachments import ReadFile
from engine.chats.context import Overflow, answer_reserve, choose, tokens_of
from engine.chats.conversation import Conversation
from engine.chats.kept_state import MIN_TOKENS, KeptStates, key_of, model_identity
from engine.chats.message import Message, MessageState, Timings, new_id, now_ms
from engine.chats.presets import Preset
from engine.chats.store import ChatStore
from engine.chats.thinking import Told
from engine.chats.tree import add
from engine.errors import ArgumentError, ChatError, EngineError
from engine.fit.step_back import layout_words
from engine.protocol.messages import (
    AnyModelRequest,
    ChatMessage,
    Counted,
    LastWord,
    RestoreSequence,
    SaveSequence,
    SequenceSaved,
)
from engine.session.driver import News
from engine.session.events import (
    Answered,
    Attempt,
    Cancelled,
    Crashed,
    Done,
    Failed,
    Loaded,
    OutOfMemory,
    Progress,
    RequestEnding,
    Stage,
    Token,
)
from engine.session.load_order import LoadOrder
from engine.session.session import ModelSession
from engine.session.snapshot import Phase, Snapshot
from engine.settings.sampling_sources import changed_settings, model_sampling, sampling_of
from engine.telemetry.memory_holders import memory_holders

POLL_S = 0.2
TITLE_CHARACTERS = 60
HELP = "/again: another answer to the last question; /quit: end (as the end of the input); Ctrl+C stops an answer."


@dataclass(frozen=True, slots=True)
class TalkOptions:
    """`settings`: what of the samplers the command line set; `prompt`: the only question, None where lines are read;
    `attached`: files with the first question."""

    preset: Preset | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    overflow: Overflow = "drop"
    prompt: str | None = None
    attached: tuple[ReadFile, ...] = ()


class _Shown(NamedTuple):
    """A piece of the answer that is on disk."""

    told: Told
    error: EngineError | None


class _Kept(NamedTuple):
    """The answer is on disk, and every piece of it has been told."""

    error: BaseException | None


class _Over(Exception):
    """The talk ends with this exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(str(code))
        self.code = code


class Talk:
    """From start to the last event; no process of ours is left when `run` returns."""

    def __init__(
        self,
        store: ChatStore,
        states: KeptStates,
        order: LoadOrder,
        printer: ChatPrinter,
        conversation: Conversation,
        options: TalkOptions,
    ) -> None:
        self._store, self._states, self._printer, self._options = store, states, printer, options
        self._order, self._conversation = order, conversation
        plan = order.plan
        self._model = model_identity(plan.model)
        self._key = key_of(self._model, plan.settings, plan.edit.side_files.adapters)
        preset = {} if options.preset is None else options.preset.settings
        chat = {**conversation.settings, **options.settings}
        self._sampling = sampling_of(model_sampling(plan.model.metadata), preset, chat).settings
        self._system = conversation.system or ("" if options.preset is None else options.preset.system)
        self._tree = store.tree(conversation.id)
        self._attached = options.attached
        self._left_out: frozenset[str] = frozenset()
        self._news: queue.SimpleQueue[News | _Shown | _Kept] = queue.SimpleQueue()
        self._keeps_states = self._make_folder()
        folder = states.folder if self._keeps_states else None
        self._session = ModelSession(self._news.put, holders=memory_holders, sequences=folder)
        self._stage: Stage = "header"
        self._interrupts = 0

    def run(self) -> int:
        """Return the exit code."""
        with on_interrupt(self._on_interrupt):
            try:
                self._load()
                self._printer.begin(self._conversation.id, self._conversation.title)
                self._restore()
                for line in self._questions():
                    self._take(line)
            except _Over as over:
                return over.code
            finally:
                self._session.close()
        return exit_codes.OK

    def _make_folder(self) -> bool:
        try:
            self._states.make_folder()
        except EngineError as error:
            self._printer.notice(error.summary())
            return False
        return True

    def _on_interrupt(self) -> None:
        self._interrupts += 1

    # ------------------------------------------------------------------ loading

    def _load(self) -> None:
        self._session.load(self._order)
        for news in self._next_news(self._session.stop):
            match news:
                case Snapshot() if news.phase is Phase.LOADING:
                    self._printer.load.child_started()
                case Progress():
                    self._stage = news.stage
                    self._printer.load.show(news)
                case Attempt():
                    self._printer.load.show(news)
                case Loaded() if not self._interrupts:
                    self._printer.load.show(news)
                    return
                case Loaded():
                    self._end(Cancelled(stage=self._stage))
                case OutOfMemory() | Failed() | Crashed() | Cancelled():
                    self._end(news)

    def _end(self, ending: RequestEnding) -> None:
        """Show the last event.

        Raises:
            _Over: always.
        """
        self._printer.load.show(ending)
        match ending:
            case OutOfMemory():
                raise _Over(exit_codes.DOES_NOT_FIT)
            case Cancelled():
                raise _Over(exit_codes.INTERRUPTED)
            case Failed() | Crashed():
                raise _Over(exit_codes.exit_code(ending.kind))
        raise _Over(exit_codes.OK)

    def _restore(self) -> None:
        """Go on with what a model held of the conversation; where that cannot be, it is read again."""
        path = self._states.find(self._conversation.id, self._key) if self._tree.messages else None
        if path is not None and not isinstance(self._answer_of(RestoreSequence(path=str(path))), LastWord):
            self._states.forget(path)

    # ------------------------------------------------------------------ questions and answers

    def _questions(self) -> Iterator[str]:
        if self._options.prompt is not None:
            yield self._options.prompt
            return
        reader = LineReader()
        while True:
            self._printer.prompt()
            line = self._line(reader)
            if line is None or line.strip() == "/quit":
                return
            if line.strip():
                yield line

    def _line(self, reader: LineReader) -> str | None:
        """Return the next line; a model that is lost meanwhile ends the talk, and so does an interrupt."""
        before = self._interrupts
        while True:
            try:
                return reader.next(POLL_S)
            except queue.Empty:
                pass
            if self._interrupts > before:
                self._end(Cancelled(stage=self._stage))
            while not self._news.empty():
                news = self._news.get()
                if isinstance(news, Failed | Crashed):
                    self._end(news)

    def _take(self, line: str) -> None:
        command = line.strip()
        if command == "/help":
            self._printer.notice(HELP)
        elif command == "/again":
            last = self._tree.path[-1] if self._tree.path else None
            if last is None or last.role != "assistant" or last.parent is None:
                self._printer.notice("There is no answer yet.")
            else:
                self._answer(self._tree.path[:-1])
        else:
            self._ask(line)

    def _ask(self, text: str) -> None:
        if not self._tree.messages:
            title = " ".join(text.split())[:TITLE_CHARACTERS]
            self._conversation = msgspec.structs.replace(self._conversation, title=self._conversation.title or title)
            if self._store.conversation(self._conversation.id) is None:
                self._store.save(self._conversation)
        before = self._tree
        for file in self._attached:
            self._store.keep_file(file.data)
        question = Message(
            id=new_id(),
            role="user",
            content=text,
            parent=before.leaf,
            attachments=tuple(file.attachment for file in self._attached),
            created_ms=now_ms(),
        )
        self._attached = ()
        self._tree = add(before, question)
        self._store.apply(self._conversation.id, before, self._tree)
        self._answer(self._tree.path)

    def _answer(self, path: tuple[Message, ...]) -> None:
        """Answer the last question of a path."""
        shown = self._shown_of(path)
        if shown is None:
            return
        try:
            messages = self._with_files(chat_messages(self._system, shown))
        except ChatError as error:
            self._printer.notice(error.summary())
            return
        before = self._tree
        message = Message(
            id=new_id(),
            role="assistant",
            content="",
            parent=path[-1].id,
            model=self._order.plan.model.name,
            model_identity=self._model,
            layout=layout_words(self._order.plan.edit.layout),
            settings=changed_settings(self._sampling),
            state="writing",
            created_ms=now_ms(),
        )
        self._tree = add(before, message)
        self._store.apply(self._conversation.id, before, self._tree)
        answer = AnswerInProgress(
            self._store, self._conversation.id, message, lambda told, error: self._news.put(_Shown(told, error))
        )
        request = self._request(answer_request(messages, self._sampling, template=self._conversation.template))
        ending = self._follow(request, answer)
        state: MessageState = "failed" if not isinstance(ending, Done) else "done"
        if isinstance(ending, Done) and ending.stop_reason == "stopped":
            state = "stopped"
        done = ending if isinstance(ending, Done) else None
        note = "" if done else getattr(ending, "message", "")
        whole, kept = answer.end(
            state,
            stop_reason=done.stop_reason if done else "",
            timings=None if done is None else _timings(done),
            note=note,
        )
        kept.add_done_callback(lambda future: self._news.put(_Kept(future.exception())))
        self._show_rest()
        self._tree = add(before, whole)
        if done is None:
            self._end(ending)
            return
        self._printer.done(done, whole)
        self._keep_state(request, done.prompt_tokens + done.generated_tokens)

    def _with_files(self, messages: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
        """Return messages with the bytes of their images; raises as `with_files` does."""
        names = names_of_images(messages)
        if not names:
            return messages
        self._store.settled().result()
        return with_files(messages, {name: data for name in names if (data := self._store.file(name)) is not None})

    def _shown_of(self, path: tuple[Message, ...]) -> tuple[Message, ...] | None:
        """Return what of a path the model is shown; None where it does not fit, which is said."""
        already, said_before = self._left_out, bool(self._left_out)
        while True:
            shown = tuple(message for message in path if message.id not in already)
            asked = messages_by_id(self._system, shown)
            counted = self._answer_of(count_request(asked.values(), template=self._conversation.template))
            if not isinstance(counted, Counted):
                return shown
            tokens = tokens_of(asked, counted.messages, counted.prompt)
            room = counted.n_ctx - answer_reserve(counted.n_ctx, self._sampling.max_tokens) - tokens.get(SYSTEM, 0)
            fit = choose(shown, tokens, room, self._options.overflow)
            if fit.decision != "fits":
                self._printer.notice(fit.sentence())
                return None
            if not fit.newly:
                self._left_out = already
                return shown
            # what is left is counted again by the real template before it is believed to fit
            already |= set(fit.newly)
            if not said_before:
                self._printer.notice(fit.sentence())
                said_before = True

    def _follow(self, request: int, answer: AnswerInProgress) -> RequestEnding:
        """Show an answer up to its ending; an interrupt stops it."""
        for news in self._next_news(lambda: self._session.stop(request)):
            match news:
                case Token() if news.request == request:
                    answer.add(news.text)
                case _Shown():
                    self._show(news)
                case Done() | OutOfMemory() | Failed() | Crashed() | Cancelled() if news.request in (request, None):
                    return news
        raise AssertionError("news have no end")

    def _show(self, shown: _Shown) -> None:
        if shown.error is not None:
            self._printer.notice(shown.error.summary())
        self._printer.said(shown.told.reasoning, shown.told.content)

    def _show_rest(self) -> None:
        for news in self._next_news(lambda: None):
            if isinstance(news, _Shown):
                self._show(news)
            elif isinstance(news, _Kept):
                if isinstance(news.error, EngineError):
                    self._printer.notice(news.error.summary())
                return

    def _keep_state(self, request: int, tokens: int) -> None:
        if tokens < MIN_TOKENS or not self._keeps_states:
            return
        path = self._states.place(self._conversation.id, self._key)
        if isinstance(self._answer_of(SaveSequence(path=str(path), of=request)), SequenceSaved):
            self._states.keep(path)

    # ------------------------------------------------------------------ the session

    def _request(self, request: AnyModelRequest) -> int:
        """Ask; a model that was lost a moment ago ends the talk.

        Raises:
            _Over: with what was said of the loss.
        """
        try:
            return self._session.ask(request)
        except ArgumentError as error:
            self._end(Failed(kind=error.kind, message=error.summary()))
            raise AssertionError("it has ended") from None

    def _answer_of(self, request: AnyModelRequest) -> LastWord | RequestEnding:
        """Return the child's last word on a request that generates nothing, or the ending of one that failed."""
        number = self._request(request)
        for news in self._next_news(lambda: None):
            if isinstance(news, Answered) and news.request == number:
                return news.answer
            if isinstance(news, OutOfMemory | Failed | Crashed | Cancelled) and news.request == number:
                return news
            if isinstance(news, Failed | Crashed) and news.request is None:
                self._end(news)
        raise AssertionError("news have no end")

    def _next_news(self, stop: Callable[[], None]) -> Iterator[News | _Shown | _Kept]:
        """Wait for news, without end; an interrupt meanwhile calls `stop`, once."""
        before, stopping = self._interrupts, False
        while True:
            if self._interrupts > before and not stopping:
                stopping = True
                stop()
            try:
                yield self._news.get(timeout=POLL_S)
            except queue.Empty:
                continue


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
