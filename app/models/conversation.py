"""The conversation of an open model that is shown: its messages, and the answer being written.

Which conversation that is can change at any time. An answer goes on in the one that it was asked for, shown or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
from PySide6.QtCore import QObject, QTimer, Signal

from app.models.answer import Answer, Piece
from app.models.answering import Answering
from app.models.chat_keeper import ChatKeeper, NoKeeper
from app.models.chat_words import layout_words, title_of_message
from app.models.context_counter import CountedChat
from app.models.context_fit import shown_path
from app.models.loading import Loading
from engine.chats.asking import chat_messages, media_of, texts_of
from engine.chats.conversation import Conversation as Chat
from engine.chats.cuts import cut_of_answer, cut_of_path, left_out_of
from engine.chats.message import Attachment, Message, new_id, now_ms
from engine.chats.presets import Preset
from engine.chats.thinking import TEMPLATE_KEY, Marks, begun_answer, marks_of
from engine.chats.tree import MessageTree, add, branched, changed, edited, select, step_version, without_turn
from engine.demo.speaking import recommended_sampling
from engine.language import tr
from engine.plan.preview import LoadedLayout
from engine.protocol.messages import ChatMessage
from engine.session.events import Done
from engine.session.status import Phase
from engine.settings.sampling_sources import Sampling, changed_settings, model_sampling, sampling_of


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
        self.answering = Answering(loading, self)
        self._keeper: ChatKeeper = NoKeeper()
        self.chat = new_chat()
        self.tree = MessageTree()
        self.presets: Mapping[str, Preset] = {}
        """Those that there are, by name."""
        self._is_kept = False
        self._returned: str | None = None
        """The question that went back to be asked anew: the next one takes its place."""
        self.answering.begun.connect(self._on_begun)
        self.answering.text.connect(self.answer_text)
        self.answering.changed.connect(self._on_answer_changed)
        self.answering.piece_kept.connect(self._on_piece_kept)
        self.answering.overflow_asked.connect(self.overflow_asked)
        self.answering.finished.connect(self._on_finished)
        self.answering.failed.connect(self._on_failed)
        self.answering.kept.connect(self.message_changed)
        loading.loaded_changed.connect(self._on_loaded_changed)

    def keep_in(self, keeper: ChatKeeper) -> None:
        """Have what is said kept there from now on."""
        self._keeper = self.answering.keeper = keeper

    # ------------------------------------------------------------------ what is shown

    @property
    def is_empty(self) -> bool:
        """Whether nothing was said."""
        return not self.tree.messages and self.answering.answer is None

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
        of_preset = {} if preset is None else preset.settings
        return sampling_of(of_model, of_preset, self.chat.settings, authors=recommended_sampling(model))

    @property
    def is_answering(self) -> bool:
        """Whether an answer is being written, in this conversation or in another one."""
        return self.answering.answer is not None

    @property
    def open_message(self) -> str | None:
        """The answer that is being written in what is shown."""
        answer = self.answering.answer
        return answer.message.id if answer is not None and answer.chat == self.chat.id else None

    @property
    def left_out(self) -> frozenset[str]:
        """Messages of what is shown that the model is not shown any more."""
        path = self.tree.path
        return left_out_of(path, cut_of_path(path, self._context_size))

    @property
    def prompt_path(self) -> tuple[Message, ...]:
        """What a model would be shown of what was said."""
        return shown_path(self.tree.path, self.left_out)

    def prompt_messages(self) -> tuple[ChatMessage, ...]:
        """Return what a model would be shown of this conversation, with what is typed as the next question."""
        path = self.prompt_path
        if self.chat.draft.strip():
            path = (*path, Message(id=new_id(), role="user", content=self.chat.draft))
        return chat_messages(self.system, path)

    @property
    def asked_request(self) -> int | None:
        """The number under which the model is asked for the answer that is being written; None: it is not asked yet."""
        return None if self.answering.answer is None else self.answering.answer.request

    def counted_chat(self, used: int | None) -> CountedChat:
        """Return what is to be counted of what is shown; `used`: how many tokens it takes, where that is known."""
        path = shown_path(self.tree.path, self.left_out)
        return CountedChat(
            messages=chat_messages(self.system, path),
            template=self.chat.template,
            system=self.system,
            files=tuple(text for message in path for text in texts_of(message)),
            media=tuple(file for message in path for file in media_of(message)),
            used=used,
            max_tokens=self.sampling.settings.max_tokens,
        )

    def tell_restored(self, chat: str, restored: Restored) -> None:
        """Take what became of the kept state of a conversation."""
        if chat == self.chat.id:
            self.restored.emit(restored)
            if restored.tokens:
                self.context_use_changed.emit(ContextUse(restored.tokens, self._context_size))

    def open(self, chat: Chat, tree: MessageTree) -> None:
        """Show a conversation that is kept."""
        self.chat, self._is_kept, self._returned = chat, True, None
        answer = self.answering.answer
        # What is being written here is further than what was read.
        self.tree = answer.tree if answer is not None and answer.chat == chat.id else tree
        self._show()

    def begin(self, chat: Chat | None = None) -> None:
        """Show a new conversation; the one before stays where it is kept."""
        shown = self.chat
        self.chat, self.tree = chat or _like(shown), MessageTree()
        self._is_kept, self._returned = False, None
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
            self._keeper.save(chat, before)
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
                self._keeper.keep_file(data)
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
            begun = begun_answer(known.reasoning, known.content, self._marks(), thinking=thinking)
            self._continue(select(self.tree, message), known, begun)

    def _marks(self) -> Marks | None:
        """Return what thoughts stand between by the template that is used."""
        model = self._loading.model
        template = self.chat.template or ("" if model is None else model.metadata.get(TEMPLATE_KEY))
        return marks_of(template) if isinstance(template, str) else None

    def toggle_pin(self, message: str) -> None:
        """Have a turn stay in the context when others are left out, or no more."""
        known = self.tree.messages.get(message)
        if known is not None and self.open_message is None:
            self._apply(changed(self.tree, msgspec.structs.replace(known, pinned=not known.pinned)))

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
            title=tr("{title} (branch)", title=self.chat.title or title_of_message(tree.path[0])),
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
        return loading.phase is Phase.READY and loading.model is not None and not self.is_answering

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
        path, n_ctx = tree.path_to(message.parent), self._context_size
        message = msgspec.structs.replace(message, cut=cut_of_answer(tree, message.id, n_ctx))
        tree = changed(tree, message)
        before, self.tree = self.tree, tree
        answer = Answer(
            chat=self.chat.id,
            tree=tree,
            message=message,
            system=self.system,
            template=self.chat.template,
            settings=self.sampling.settings,
            left_out=left_out_of(path, message.cut),
            was_cut=cut_of_path(path, n_ctx) is not None,
            begun=begun,
        )
        self._keeper.apply(self.chat.id, before, tree)
        self.answering.begin(answer)

    # ------------------------------------------------------------------ what comes

    def _on_begun(self, answer: Answer) -> None:
        self.shown_changed.emit()
        self.answer_started.emit(answer.message.model)

    def _on_answer_changed(self, answer: Answer) -> None:
        if answer.chat == self.chat.id and answer.message.id in self.tree.messages:
            self.tree = changed(self.tree, answer.message)

    def _on_piece_kept(self, answer: Answer, piece: Piece) -> None:
        if answer.chat == self.chat.id:
            self.piece_kept.emit(piece)

    def _on_finished(self, answer: Answer, event: Done) -> None:
        if answer.goes_on and answer.message.state == "stopped":
            thought = self.tree.messages.get(answer.message.id)
            if thought is not None and answer.chat == self.chat.id:
                begun = begun_answer(thought.reasoning, "", answer.splitter.marks)
                QTimer.singleShot(0, self, lambda: self._answer_now(thought, begun))
        self.answer_finished.emit(event)
        self.context_use_changed.emit(ContextUse(self._loading.snapshot.context_used or 0, self._context_size))

    def _answer_now(self, thought: Message, begun: str) -> None:
        if thought.id in self.tree.messages and self.can_ask:
            self._continue(self.tree, thought, begun)

    def _on_failed(self, answer: Answer, sentence: str) -> None:
        question = answer.question
        if question is not None and answer.chat == self.chat.id:
            self._returned = question.id
            self.question_returned.emit(question)
        self.answer_failed.emit(sentence)

    # ------------------------------------------------------------------ inside

    def _show(self) -> None:
        self.chat_changed.emit()
        self.shown_changed.emit()
        if self._loading.phase is Phase.READY:
            self.context_use_changed.emit(ContextUse(None if self.tree.messages else 0, self._context_size))

    def _apply(self, tree: MessageTree) -> None:
        before, self.tree = self.tree, tree
        if self._is_kept:
            self._keeper.apply(self.chat.id, before, tree)
        self.shown_changed.emit()

    def _keep_chat(self) -> None:
        self._is_kept = True
        self._keeper.save(self.chat, None)

    @property
    def _context_size(self) -> int | None:
        return self._loading.snapshot.context_size

    def _on_loaded_changed(self, loaded: LoadedLayout | None) -> None:
        used = 0 if loaded is not None and not self.tree.messages else None
        self.context_use_changed.emit(ContextUse(used, None if loaded is None else self._context_size))


def _like(chat: Chat) -> Chat:
    """Return a new conversation with the prompt and settings of another one."""
    return msgspec.structs.replace(
        new_chat(), system=chat.system, preset=chat.preset, settings=chat.settings, template=chat.template
    )
