"""The conversation of an open model that is shown: its messages, and the answer being written.

Which conversation that is can change at any time. An answer goes on in the one that it was asked for, shown or not.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
from PySide6.QtCore import QObject, QTimer, Signal

from app.models.chat_keeper import ChatKeeper, NoKeeper
from app.models.chat_words import layout_words, title_of_message
from app.models.context_fit import ContextQuestion, may_be_too_long, shown_path
from app.models.loading import AnswerLost, Loading, ModelState
from app.models.state_keeper import NoStates, StateKeeper
from engine.chats.asking import answer_request, chat_messages
from engine.chats.context import Overflow
from engine.chats.conversation import Conversation as Chat
from engine.chats.message import Attachment, Message, MessageState, Timings, new_id, now_ms
from engine.chats.presets import Preset
from engine.chats.thinking import Splitter, Told, begun_answer
from engine.chats.tree import MessageTree, add, branched, changed, edited, select, step_version, without_turn
from engine.errors import EngineError
from engine.plan.preview import LoadedLayout
from engine.protocol.messages import ChatMessage, Counted
from engine.session.events import Answered, Done, Token
from engine.settings.sampling_settings import SamplingSettings
from engine.settings.sampling_sources import Sampling, changed_settings, model_sampling, sampling_of

KEEP_INTERVAL_MS = 30
"""Tokens that come faster are kept, and painted, together."""


@dataclass(frozen=True, slots=True)
class ContextUse:
    """Tokens of the loaded context; `used` None when nothing was said yet."""

    used: int | None
    total: int | None


@dataclass(frozen=True, slots=True)
class Restored:
    """Tokens that the model holds again without having read them; or, with none, why what was kept was of no use."""

    tokens: int
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """More of an answer, which is kept and may be painted."""

    message: str
    text: str
    thinking: str = ""


@dataclass(slots=True)
class _Answer:
    """An answer under way: the conversation that it is of, as that stands, and what came of it.

    `system`, `template` and `settings` are those of when it was asked for: another conversation may be shown since.
    """

    chat: str
    tree: MessageTree
    message: Message
    system: str
    template: str
    settings: SamplingSettings
    left_out: frozenset[str]
    begun: str = ""
    """What it goes on from."""
    counting: tuple[int, ContextQuestion] | None = None
    """The number under which the model counts what it would read, before it is asked."""
    asking: tuple[ContextQuestion, Counted] | None = None
    """What a person is asked about: the context is full."""
    note: str = ""
    waits: bool = False
    """Whether the model does not yet hold what is kept of the conversation."""
    request: int | None = None
    splitter: Splitter = field(default_factory=Splitter)
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    waiting: list[Told] = field(default_factory=list)
    """What was told and is not kept yet."""
    asked_s: float = 0.0
    first_s: float | None = None
    thought_s: float | None = None
    """When the answer itself began, where there was a thought before."""
    goes_on: bool = False
    """It was stopped only to answer now: what it thought so far is enough."""

    def take(self, text: str) -> Told:
        """Tell thought and answer apart."""
        told = self.splitter.add(text)
        self._note(told)
        return told

    def rest(self) -> None:
        """Take what was held back at the end of the text."""
        self._note(self.splitter.rest())

    def _note(self, told: Told) -> None:
        self.reasoning.append(told.reasoning)
        self.content.append(told.content)
        if self.splitter.marks is not None and not self.splitter.is_thinking and self.thought_s is None:
            self.thought_s = time.monotonic()


def new_chat() -> Chat:
    """Return a conversation in which nothing was said."""
    now = now_ms()
    return Chat(id=new_id(), created_ms=now, updated_ms=now)


class Conversation(QObject):
    """Questions and answers over the child of a `Loading`; both live as long as the window."""

    answer_started = Signal(str)
    answer_text = Signal(str)
    answer_finished = Signal(Done)
    answer_failed = Signal(str)
    context_use_changed = Signal(ContextUse)
    overflow_asked = Signal(str)
    """The context is full: `answer_overflow` says whether turns are left out. Empty: nobody asks any more."""
    restored = Signal(Restored)
    """What was kept of the shown conversation is in the model again, or is of no use."""
    shown_changed = Signal()
    """Other messages are shown than before."""
    message_changed = Signal(str)
    """The message of this id is not what it was."""
    piece_kept = Signal(Piece)
    question_returned = Signal(object)  # Message
    """A question whose answer failed goes back to where it was typed."""
    chat_changed = Signal()
    """Another conversation is shown, or its title, prompt or settings changed."""

    def __init__(self, loading: Loading, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._loading = loading
        self.keeper: ChatKeeper = NoKeeper()
        self.states: StateKeeper = NoStates()
        self.chat = new_chat()
        self.tree = MessageTree()
        self.presets: Mapping[str, Preset] = {}
        """Those that there are, by name."""
        self.overflow: Overflow = "drop"
        """What to do when the context is full."""
        self._left_out: frozenset[str] = frozenset()
        """Messages of what is shown that the model is not shown any more."""
        self._is_kept = False
        self._answer: _Answer | None = None
        self._returned: str | None = None
        """The question that went back to be asked anew: the next one takes its place."""
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.setInterval(KEEP_INTERVAL_MS)
        self._timer.timeout.connect(self._keep_waiting)
        loading.bridge.token.connect(self._on_token)
        loading.answered.connect(self._on_answered)
        loading.bridge.answered.connect(self._on_counted)
        loading.answer_lost.connect(self._on_answer_lost)
        loading.loaded_changed.connect(self._on_loaded_changed)

    # ------------------------------------------------------------------ what is shown

    @property
    def is_empty(self) -> bool:
        """Whether nothing was said."""
        return not self.tree.messages and self._answer is None

    @property
    def preset(self) -> Preset | None:
        """The preset of what is shown; None without one."""
        return self.presets.get(self.chat.preset)

    @property
    def system(self) -> str:
        """The system prompt: the conversation's own, else that of its preset."""
        preset = self.preset
        return self.chat.system or ("" if preset is None else preset.system)

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen, and where each value comes from."""
        model, preset = self._loading.model, self.preset
        of_model = {} if model is None else model_sampling(model.metadata)
        return sampling_of(of_model, {} if preset is None else preset.settings, self.chat.settings)

    @property
    def is_answering(self) -> bool:
        """Whether an answer is being written, in this conversation or in another one."""
        return self._answer is not None

    @property
    def open_message(self) -> str | None:
        """The answer that is being written in what is shown."""
        answer = self._answer
        return answer.message.id if answer is not None and answer.chat == self.chat.id else None

    @property
    def left_out(self) -> frozenset[str]:
        """Messages of what is shown that the model is not shown any more."""
        return self._left_out

    def prompt_messages(self) -> tuple[ChatMessage, ...]:
        """Return what a model would be shown of this conversation, with what is typed as the next question."""
        path = shown_path(self.tree.path, self._left_out)
        if self.chat.draft.strip():
            path = (*path, Message(id=new_id(), role="user", content=self.chat.draft))
        return chat_messages(self.system, path)

    @property
    def asked_request(self) -> int | None:
        """The number under which the model is asked for the answer that is being written; None: it is not asked yet."""
        return None if self._answer is None else self._answer.request

    def tell_restored(self, chat: str, restored: Restored) -> None:
        """Take what became of the kept state of a conversation."""
        if chat == self.chat.id:
            self.restored.emit(restored)
            if restored.tokens:
                self.context_use_changed.emit(ContextUse(restored.tokens, self._context_size))

    def open(self, chat: Chat, tree: MessageTree) -> None:
        """Show a conversation that is kept."""
        self.chat, self._is_kept, self._returned = chat, True, None
        self._left_out = frozenset()
        answer = self._answer
        # What is being written here is further than what was read.
        self.tree = answer.tree if answer is not None and answer.chat == chat.id else tree
        self._show()

    def begin(self, chat: Chat | None = None) -> None:
        """Show a new conversation; the one before stays where it is kept."""
        shown = self.chat
        self.chat, self.tree = chat or _like(shown), MessageTree()
        self._is_kept, self._returned = False, None
        self._left_out = frozenset()
        self._show()

    def clear(self) -> None:
        """Begin a new conversation; a running answer ends first."""
        if self.open_message is not None:
            self._loading.stop_answer()
        self.begin()

    def change_chat(self, chat: Chat) -> None:
        """Change title, draft, prompt or settings of what is shown."""
        before, self.chat = self.chat, chat
        if self._is_kept:
            self.keeper.save(chat, before)
        elif chat.draft or chat.title:
            self._keep_chat()
        self.chat_changed.emit()

    def select(self, message: str) -> None:
        """Show the branch with this message."""
        if message in self.tree.messages:
            self._apply(select(self.tree, message))

    # ------------------------------------------------------------------ what people do

    def send(self, text: str, files: Sequence[tuple[Attachment, bytes | None]] = ()) -> None:
        """Answer `text` in the conversation so far. `files` go with it; their bytes, where they are not kept yet."""
        if not self.can_ask:
            return
        for _attachment, data in files:
            if data is not None:
                self.keeper.keep_file(data)
        question = Message(
            id=new_id(),
            role="user",
            content=text,
            parent=self._parent_of_next(),
            attachments=tuple(attachment for attachment, _data in files),
            created_ms=now_ms(),
        )
        self._ask(add(self.tree, question))

    def regenerate(self, message: str) -> None:
        """Write another version of an answer."""
        question = self.tree.messages[message].parent
        if question is not None and self.can_ask:
            self._ask(replace(self.tree, leaf=question))

    def edit(self, message: str, text: str) -> None:
        """Ask a question with other words, as a branch."""
        if self.can_ask:
            self._ask(edited(self.tree, message, text, created_ms=now_ms()))

    def go_on(self, message: str) -> None:
        """Go on where an answer ended before its end."""
        known = self.tree.messages[message]
        if known.role == "assistant" and self.can_ask:
            thinking = bool(known.reasoning) and not known.content
            begun = begun_answer(known.reasoning, known.content, None, thinking=thinking)
            self._continue(select(self.tree, message), known, begun)

    def stop(self) -> None:
        """End the answer that is being written; what is there stays."""
        answer = self._answer
        if answer is not None and answer.asking is not None:
            self.answer_overflow(False)
        elif answer is not None and (answer.waits or answer.counting is not None):
            self._fail("It was stopped before the model was asked.")
        else:
            self._loading.stop_answer()

    def answer_overflow(self, leave_out: bool) -> None:
        """Go on with a question that the context has no room for, without the oldest turns; or do not ask it."""
        answer = self._answer
        if answer is None or answer.asking is None:
            return
        asking, answer.asking = answer.asking, None
        self.overflow_asked.emit("")
        if leave_out:
            self._take_count(answer, *asking, "drop")
        else:
            self._fail("It was not asked: the context is full.")

    def toggle_pin(self, message: str) -> None:
        """Have a turn stay in the context when others are left out, or no more."""
        known = self.tree.messages.get(message)
        if known is not None and self.open_message is None:
            self._apply(changed(self.tree, msgspec.structs.replace(known, pinned=not known.pinned)))

    def answer_now(self) -> None:
        """End the thought of the answer that is being written, and have it answer with what there is."""
        answer = self._answer
        if answer is not None and answer.splitter.is_thinking and not answer.goes_on:
            answer.goes_on = True
            self._loading.stop_answer()

    def step_version(self, message: str, step: int) -> None:
        """Show the version of a message before or after this one."""
        if not self.is_answering:
            self._apply(step_version(self.tree, message, step))

    def delete_turn(self, message: str) -> MessageTree | None:
        """Delete a question with its answers; return what was before, for the way back."""
        if self.open_message is not None:
            return None
        before = self.tree
        self._apply(without_turn(self.tree, message))
        return before

    def restore(self, tree: MessageTree) -> None:
        """Go back to what was before a deletion."""
        if self.open_message is None:
            self._apply(tree)

    def branch(self, message: str) -> None:
        """Go on from a message in a new conversation."""
        if self.open_message is not None:
            return
        tree = branched(self.tree, message)
        now = now_ms()
        chat = msgspec.structs.replace(
            self.chat,
            id=new_id(),
            title=f"{self.chat.title or title_of_message(tree.path[0])} (branch)",
            leaf=tree.leaf,
            draft="",
            pinned=False,
            forked_from=self.chat.id if self._is_kept else None,
            created_ms=now,
            updated_ms=now,
        )
        self.chat, self.tree, self._returned = chat, MessageTree(), None
        self._is_kept = False
        self._keep_chat()
        self._apply(tree)
        self.chat_changed.emit()

    # ------------------------------------------------------------------ asking

    @property
    def can_ask(self) -> bool:
        """Whether a question would be answered now."""
        loading = self._loading
        return loading.state is ModelState.READY and loading.model is not None and not self.is_answering

    def _parent_of_next(self) -> str | None:
        returned = self.tree.messages.get(self._returned or "")
        if returned is not None and any(shown.id == returned.id for shown in self.tree.path):
            return returned.parent
        return self.tree.leaf

    def _ask(self, tree: MessageTree) -> None:
        loading = self._loading
        assert loading.model is not None
        self._returned = None
        message = Message(
            id=new_id(),
            role="assistant",
            content="",
            parent=tree.leaf,
            model=loading.model.name,
            layout="" if loading.loaded is None else layout_words(loading.loaded.edit.layout),
            settings=changed_settings(self.sampling.settings),
            state="writing",
            created_ms=now_ms(),
        )
        if not self.chat.title:
            self.change_chat(msgspec.structs.replace(self.chat, title=title_of_message(tree.path[-1])))
        elif not self._is_kept:
            self._keep_chat()
        self._begin(add(tree, message), message)

    def _continue(self, tree: MessageTree, message: Message, begun: str) -> None:
        """Have a message that is there go on from `begun`."""
        writing = msgspec.structs.replace(message, state="writing", note="", stop_reason="")
        self._begin(changed(tree, writing), writing, begun)

    def _begin(self, tree: MessageTree, message: Message, begun: str = "") -> None:
        before, self.tree = self.tree, tree
        answer = self._answer = _Answer(
            self.chat.id,
            tree,
            message,
            self.system,
            self.chat.template,
            self.sampling.settings,
            self._left_out,
            begun,
            asked_s=time.monotonic(),
        )
        answer.splitter.add(begun)
        answer.content.append(message.content)
        answer.reasoning.append(message.reasoning)
        self.keeper.apply(self.chat.id, before, tree)
        self.shown_changed.emit()
        self.answer_started.emit(message.model)
        path = tree.path_to(message.parent)
        answer.waits = True
        self.states.before_answer(answer.chat, lambda: self._go_on_asking(answer, path), goes_on=len(path) > 1)

    def _go_on_asking(self, answer: _Answer, path: tuple[Message, ...]) -> None:
        if answer is self._answer:
            answer.waits = False
            self._ask_model(answer, path)

    def _ask_model(self, answer: _Answer, path: tuple[Message, ...], *, is_counted: bool = False) -> None:
        question = ContextQuestion(answer.system, path, answer.left_out, answer.template)
        asked = chat_messages(answer.system, shown_path(path, answer.left_out))
        try:
            if not is_counted and may_be_too_long(asked, self._context_size):
                answer.counting = self._loading.ask(question.request), question
            else:
                request = answer_request(asked, answer.settings, begun=answer.begun, template=answer.template)
                answer.request = self._loading.generate(request)
                self.states.asked(answer.chat, answer.request)
        except EngineError as error:
            self._fail(error.summary())

    def _on_counted(self, event: Answered) -> None:
        answer = self._answer
        if answer is None or answer.counting is None or answer.counting[0] != event.request:
            return
        (_, question), answer.counting = answer.counting, None
        if not isinstance(event.answer, Counted):
            self._fail("The conversation could not be counted; send it again.")
            return
        self._take_count(answer, question, event.answer, self.overflow)

    def _take_count(self, answer: _Answer, question: ContextQuestion, counted: Counted, overflow: Overflow) -> None:
        fit = question.fit(counted, overflow, answer.settings.max_tokens)
        if fit.decision == "ask":
            answer.asking = question, counted
            self.overflow_asked.emit(fit.sentence())
        elif fit.decision != "fits":
            self._fail(f"{fit.sentence()} The context has {counted.n_ctx} tokens.")
        else:
            answer.left_out = frozenset(fit.left_out)
            if answer.chat == self.chat.id:
                self._left_out = answer.left_out
            answer.note = fit.sentence()
            self._ask_model(answer, question.path, is_counted=True)

    # ------------------------------------------------------------------ what comes

    def _on_token(self, event: Token) -> None:
        answer = self._answer
        if answer is None or answer.request is None or event.request != answer.request:
            return
        if answer.first_s is None:
            answer.first_s = time.monotonic()
        told = answer.take(event.text)
        if told.content or told.reasoning:
            answer.waiting.append(told)
        if not self._timer.isActive():
            self._timer.start()
        self.answer_text.emit(event.text)

    def _keep_waiting(self) -> None:
        answer = self._answer
        if answer is None or not answer.waiting:
            return
        text = "".join(told.content for told in answer.waiting)
        thinking = "".join(told.reasoning for told in answer.waiting)
        answer.waiting.clear()
        piece = Piece(answer.message.id, text, thinking)
        self.keeper.append(piece.message, text, thinking, lambda: self._paint(answer, piece))

    def _paint(self, answer: _Answer, piece: Piece) -> None:
        """Show what is kept; of an answer that is over all of it is shown at once."""
        if answer is not self._answer:
            return
        message = answer.tree.messages[piece.message]
        answer.message = msgspec.structs.replace(
            message, content=message.content + piece.text, reasoning=message.reasoning + piece.thinking
        )
        self._put(answer, answer.message)
        if answer.chat == self.chat.id:
            self.piece_kept.emit(piece)

    def _put(self, answer: _Answer, message: Message) -> None:
        answer.tree = changed(answer.tree, message)
        if answer.chat == self.chat.id and message.id in self.tree.messages:
            self.tree = changed(self.tree, message)

    def _on_answered(self, event: Done) -> None:
        answer = self._answer
        if answer is None or answer.request is None or event.request != answer.request:
            return
        answer.rest()
        held = event.prompt_tokens + event.generated_tokens
        self.states.answered(answer.chat, answer.request, held)
        timings = Timings(
            prompt_tokens=event.prompt_tokens,
            cached_tokens=event.cached_tokens,
            generated_tokens=event.generated_tokens,
            prompt_seconds=_seconds(event.prompt_tokens - event.cached_tokens, event.prompt_tokens_per_second),
            generation_seconds=_seconds(event.generated_tokens, event.generation_tokens_per_second),
            first_token_seconds=_between(answer.asked_s, answer.first_s),
            thinking_seconds=_between(answer.first_s, answer.thought_s),
        )
        state: MessageState = "stopped" if event.stop_reason == "stopped" else "done"
        self._finish(state, note=answer.note, stop_reason=event.stop_reason, timings=timings)
        if answer.goes_on and state == "stopped":
            thought = self.tree.messages.get(answer.message.id)
            if thought is not None and answer.chat == self.chat.id:
                begun = begun_answer(thought.reasoning, "", answer.splitter.marks)
                QTimer.singleShot(0, self, lambda: self._answer_now(thought, begun))
        self.answer_finished.emit(event)
        self.context_use_changed.emit(ContextUse(self._loading.snapshot.context_used or 0, self._context_size))

    def _answer_now(self, thought: Message, begun: str) -> None:
        if thought.id in self.tree.messages and self.can_ask:
            self._continue(self.tree, thought, begun)

    def _on_answer_lost(self, lost: AnswerLost) -> None:
        answer = self._answer
        if answer is not None and lost.request in (answer.request, answer.counting and answer.counting[0]):
            self._fail(lost.sentence)

    def _fail(self, sentence: str) -> None:
        """What came of the answer stays, and the question can be asked again."""
        answer = self._answer
        assert answer is not None
        answer.rest()
        question = answer.tree.messages.get(answer.message.parent or "")
        has_words = any(answer.content) or any(answer.reasoning)
        self._finish("interrupted" if has_words else "failed", note=sentence)
        if question is not None and answer.chat == self.chat.id:
            self._returned = question.id
            self.question_returned.emit(question)
        self.answer_failed.emit(sentence)

    def _finish(
        self, state: MessageState, *, note: str = "", stop_reason: str = "", timings: Timings | None = None
    ) -> None:
        answer = self._answer
        assert answer is not None
        self._timer.stop()
        message = msgspec.structs.replace(
            answer.message,
            content="".join(answer.content),
            reasoning="".join(answer.reasoning),
            state=state,
            note=note,
            stop_reason=stop_reason,
            timings=timings,
        )
        self._put(answer, message)
        self._answer = None
        self.keeper.finish(answer.chat, message, lambda: self.message_changed.emit(message.id))

    # ------------------------------------------------------------------ inside

    def _show(self) -> None:
        self.chat_changed.emit()
        self.shown_changed.emit()
        if self._loading.state is ModelState.READY:
            self.context_use_changed.emit(ContextUse(None if self.tree.messages else 0, self._context_size))

    def _apply(self, tree: MessageTree) -> None:
        before, self.tree = self.tree, tree
        if self._is_kept:
            self.keeper.apply(self.chat.id, before, tree)
        self.shown_changed.emit()

    def _keep_chat(self) -> None:
        self._is_kept = True
        self.keeper.save(self.chat, None)

    @property
    def _context_size(self) -> int | None:
        return self._loading.snapshot.context_size

    def _on_loaded_changed(self, loaded: LoadedLayout | None) -> None:
        used = None if loaded is None else 0
        self.context_use_changed.emit(ContextUse(used, None if loaded is None else self._context_size))


def _like(chat: Chat) -> Chat:
    """Return a new conversation with the prompt and settings of another one."""
    return msgspec.structs.replace(
        new_chat(), system=chat.system, preset=chat.preset, settings=chat.settings, template=chat.template
    )


def _seconds(tokens: int, per_second: float) -> float | None:
    return tokens / per_second if per_second else None


def _between(begin_s: float | None, end_s: float | None) -> float | None:
    return None if begin_s is None or end_s is None else end_s - begin_s
