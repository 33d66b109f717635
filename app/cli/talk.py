"""One talk of `chat`: load, go on where the conversation was, answer line after line, keep everything."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from app.cli import exit_codes
from app.cli.chat_printers import ChatPrinter
from app.cli.entry import on_interrupt
from app.cli.inputs import learn_speed
from app.cli.lines import LineReader
from app.cli.talk_answer import AnswerWriter
from app.cli.talk_session import POLL_S, Over, TalkSession
from engine.chats.asking import (
    SYSTEM,
    answer_request,
    chat_messages,
    count_request,
    messages_by_id,
    names_of_media,
    with_files,
)
from engine.chats.attachments import ReadFile
from engine.chats.context import Overflow, answer_reserve, choose, left_out_sentence, tokens_of
from engine.chats.conversation import Conversation
from engine.chats.cuts import cut_of_answer, cut_of_path, cut_that_leaves_out, left_out_of
from engine.chats.kept_state import MIN_TOKENS, KeptStates, StateKey, key_of, model_identity
from engine.chats.message import Cut, Message, new_id, now_ms
from engine.chats.presets import Preset
from engine.chats.store import ChatStore
from engine.chats.tree import add
from engine.demo.speaking import recommended_sampling
from engine.errors import ChatError, EngineError
from engine.fit.step_back import layout_words
from engine.protocol.messages import ChatMessage, Counted, LastWord, RestoreSequence, SaveSequence, SequenceSaved
from engine.session.events import Done, Failed
from engine.session.load_order import LoadOrder
from engine.settings.sampling_sources import changed_settings, model_sampling, sampling_of
from engine.texts import escape

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
        self._plan = plan = order.plan
        self._model = model_identity(plan.model)
        preset = {} if options.preset is None else options.preset.settings
        chat = {**conversation.settings, **options.settings}
        authors = recommended_sampling(plan.model)
        self._sampling = sampling_of(model_sampling(plan.model.metadata), preset, chat, authors=authors).settings
        self._system = conversation.system or ("" if options.preset is None else options.preset.system)
        self._tree = store.tree(conversation.id)
        self._attached = options.attached
        self._keeps_states = self._make_folder()
        self._session = TalkSession(printer, states.folder if self._keeps_states else None)
        self._writer = AnswerWriter(store, self._session, printer)

    def run(self) -> int:
        """Return the exit code."""
        with on_interrupt(self._session.on_interrupt):
            try:
                self._session.load(self._order)
                # it may have stepped back from what was asked for
                self._plan = self._session.loaded_plan or self._plan
                self._printer.begin(self._conversation.id, self._conversation.title)
                self._restore()
                for line in self._questions():
                    self._take(line)
            except Over as over:
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

    @property
    def _key(self) -> StateKey:
        return key_of(self._model, self._plan.settings, self._plan.edit.side_files.adapters)

    def _restore(self) -> None:
        """Go on with what a model held of the conversation; where that cannot be, it is read again."""
        path = self._states.find(self._conversation.id, self._key) if self._tree.messages else None
        if path is not None and not isinstance(self._session.answer_of(RestoreSequence(path=str(path))), LastWord):
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
        while True:
            try:
                return reader.next(POLL_S)
            except queue.Empty:
                pass
            if self._session.interrupts > self._session.heeded:
                self._session.interrupted()
            self._session.look()

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
            title = escape(" ".join(text.split())[:TITLE_CHARACTERS])
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
        before, message, n_ctx = self._tree, self._new_answer(path[-1].id), self._session.n_ctx
        known = cut_of_answer(add(before, message), message.id, n_ctx)
        fitting = self._shown_of(path, known)
        if fitting is None:
            return
        shown, cut = fitting
        message = msgspec.structs.replace(message, cut=cut)
        note = left_out_sentence() if cut is not None and cut_of_path(path, n_ctx) is None else ""
        if note and known is None:
            self._printer.notice(note)
        try:
            messages = self._with_files(chat_messages(self._system, shown))
        except ChatError as error:
            self._refuse(error.summary())
            return
        self._tree = add(before, message)
        self._store.apply(self._conversation.id, before, self._tree)
        asked = answer_request(messages, self._sampling, template=self._conversation.template)
        request, ending, whole = self._writer.write(self._conversation.id, message, asked, note=note)
        self._tree = add(before, whole)
        if not isinstance(ending, Done):
            self._session.end(ending)
            return
        self._printer.done(ending, whole)
        if (loaded := self._session.loaded_plan) is not None:
            learn_speed(loaded, ending)
        self._keep_state(request, ending.prompt_tokens + ending.generated_tokens)

    def _refuse(self, sentence: str) -> None:
        """Say why a question is not asked. Where it is the only one the talk ends with that, as `TalkSession.end`."""
        if self._options.prompt is not None:
            self._session.end(Failed(kind="argument", message=sentence))
        self._printer.notice(sentence)

    def _new_answer(self, question: str) -> Message:
        return Message(
            id=new_id(),
            role="assistant",
            content="",
            parent=question,
            model=self._plan.model.name,
            model_identity=self._model,
            layout=layout_words(self._plan.edit.layout),
            settings=changed_settings(self._sampling),
            state="writing",
            created_ms=now_ms(),
        )

    def _with_files(self, messages: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
        """Return messages with the bytes of their images and sounds; raises as `with_files` does."""
        names = names_of_media(messages)
        if not names:
            return messages
        self._store.settled().result()
        return with_files(messages, {name: data for name in names if (data := self._store.file(name)) is not None})

    def _shown_of(self, path: tuple[Message, ...], cut: Cut | None) -> tuple[tuple[Message, ...], Cut | None] | None:
        """Return what of a path the model is shown, and the cut that leaves out the rest; None where it does not fit,
        which is said. `cut`: what is left out already."""
        left_out = left_out_of(path, cut)
        while True:
            shown = tuple(message for message in path if message.id not in left_out)
            asked = messages_by_id(self._system, shown)
            counted = self._session.answer_of(count_request(asked.values(), template=self._conversation.template))
            if not isinstance(counted, Counted):
                return shown, cut
            tokens = tokens_of(asked, counted.messages, counted.prompt)
            room = counted.n_ctx - answer_reserve(counted.n_ctx, self._sampling.max_tokens) - tokens.get(SYSTEM, 0)
            fit = choose(shown, tokens, room, self._options.overflow)
            if fit.decision != "fits":
                self._refuse(fit.sentence())
                return None
            if not fit.newly:
                return shown, cut
            # what is left is counted again by the real template before it is believed to fit
            left_out |= set(fit.newly)
            cut = cut_that_leaves_out(path, left_out, counted.n_ctx)

    def _keep_state(self, request: int, tokens: int) -> None:
        if tokens < MIN_TOKENS or not self._keeps_states:
            return
        path = self._states.place(self._conversation.id, self._key)
        if isinstance(self._session.answer_of(SaveSequence(path=str(path), of=request)), SequenceSaved):
            self._states.keep(path)
