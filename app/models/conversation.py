"""The conversation that an open model shows: its message tree, and the actions of people on it.

A model may switch to another conversation at any time. A running answer continues in its own conversation, even if
that is not shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct
from PySide6.QtCore import QObject, QTimer, Signal

from app.models.answering import Answering, ChatStorage
from app.models.context_counter import CountedChat
from app.models.loading import Loading, RequestLost
from engine.base.language import tr
from engine.base.values import replace
from engine.chat.answer import AnswerOptions, AnswerRun, Append, Finish, continued_answer, new_answer
from engine.chat.asking import chat_messages, media_of, texts_of
from engine.chat.context import cut_of_path, left_out_of, shown_path
from engine.chat.conversation import Conversation as Chat
from engine.chat.conversation import result_key, title_of_message
from engine.chat.message import Attachment, Message, new_id, new_user_message, now_ms
from engine.chat.presets import Preset, chat_sampling, chat_template, system_prompt
from engine.chat.thinking import ThinkTags, begun_answer, think_tags_of
from engine.chat.tools import (
    DefinitionError,
    ToolUse,
    answer_waiting_for_results,
    missing_results,
    read_tools,
    result_message,
    with_results,
)
from engine.chat.tree import (
    MessageTree,
    add,
    branched,
    changed,
    edited,
    edited_result,
    is_empty_failure,
    select,
    step_version,
    without_leaf,
    without_turn,
)
from engine.planning.plan.preview import LoadedLayout
from engine.planning.settings.sampling_sources import Sampling
from engine.runtime.protocol.requests import ChatMessage, ToolCall
from engine.runtime.session.events import Done
from engine.runtime.session.status import Phase


class ContextFill(Struct, frozen=True):
    """Use of the loaded context, in tokens.

    `used`: tokens in the context; None if unknown. `total`: size of the context; None if no model is loaded.
    """

    used: int | None
    total: int | None


class Restored(Struct, frozen=True):
    """Result of restoring a saved KV state.

    `tokens`: length of the state; 0 if the state was not used.
    `refusal`: the reason, for people, why the state was not used.
    """

    tokens: int
    refusal: str = ""


def new_chat() -> Chat:
    """Return a new conversation without messages."""
    now = now_ms()
    return Chat(id=new_id(), created_ms=now, updated_ms=now)


class Conversation(QObject):
    """The conversation that one model shows, with the actions of people on its messages. Use it in the GUI thread only.

    Questions go to the model through `Answering`, and changes are stored in a `ChatStorage`. The object exists as long
    as its model is open; `open` and `begin` switch it to another conversation.
    """

    answer_finished = Signal(Done)
    context_use_changed = Signal(ContextFill)
    overflow_asked = Signal(str)
    """Carries the question to the user what to do with a full context; `Answering.answer_overflow` takes the choice.
    An empty text removes the question."""
    restored = Signal(Restored)
    """Emitted when the saved KV state of the shown conversation was restored, or could not be used."""
    shown_changed = Signal()
    """Emitted when the list of shown messages has changed, for instance after a switch to another branch."""
    message_changed = Signal(str)
    """Carries the id of a message that has changed."""
    piece_kept = Signal(Append)
    """Carries a piece of the shown answer's text, which is on disk and may now be painted."""
    chat_changed = Signal()
    """Emitted when another conversation is shown, or when its title, prompt or settings have changed."""

    def __init__(self, loading: Loading, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._loading = loading
        self.answering = Answering(loading, self)
        self._storage = ChatStorage()
        self.chat = new_chat()
        self.tree = MessageTree()
        self.presets: Mapping[str, Preset] = {}
        """All presets (stored prompts and sampling settings), by name."""
        self._is_kept = False
        self.answering.begun.connect(self.shown_changed)
        self.answering.changed.connect(self._on_answer_changed)
        self.answering.written.connect(self._on_written)
        self.answering.overflow_asked.connect(self.overflow_asked)
        self.answering.finished.connect(self._on_finished)
        self.answering.kept.connect(self.message_changed)
        self._failed: AnswerRun | None = None
        """The last answer that failed, until it is known whether the model is loaded again for it; else None."""
        self._waiting = ""
        """The id of the answer that will continue once the model is loaded with another layout; empty if none will."""
        loading.loaded_changed.connect(self._on_loaded_changed)
        # After `Answering`, which ends the answer by the same signal.
        loading.request_lost.connect(self._on_lost)
        loading.phase_changed.connect(self._on_phase_changed)

    def keep_in(self, storage: ChatStorage) -> None:
        """Store this model's conversations in `storage` from now on."""
        self._storage = self.answering.storage = storage

    # ------------------------------------------------------------------ what is shown

    @property
    def is_empty(self) -> bool:
        """Whether the conversation has no messages and no answer is being written in it."""
        return not self.tree.messages and self.answering.answer is None

    @property
    def preset(self) -> Preset | None:
        """The preset of the conversation; None if it has none."""
        return self.presets.get(self.chat.preset)

    @property
    def system(self) -> str:
        """The system prompt of the conversation; if it has none, the system prompt of its preset."""
        return system_prompt(self.chat, self.preset)

    @property
    def sampling(self) -> Sampling:
        """The sampling settings for the next answer, with the source of each value."""
        return chat_sampling(self._loading.model, self.preset, self.chat.settings)

    @property
    def tools(self) -> ToolUse:
        """The tools that the model may call; none if their definitions are invalid."""
        try:
            return ToolUse(read_tools(self.chat.tools), self._template)
        except DefinitionError:
            return ToolUse((), self._template)

    @property
    def tools_error(self) -> str:
        """The reason why the definitions of tools are invalid, as a sentence; empty if they are valid."""
        try:
            read_tools(self.chat.tools)
        except DefinitionError as error:
            return str(error)
        return ""

    @property
    def missing_results(self) -> tuple[ToolCall, ...]:
        """The tool calls of the last answer that have no result yet."""
        return () if self.open_message is not None else missing_results(self.tree.path)

    @property
    def is_answering(self) -> bool:
        """Whether the model writes an answer, in this conversation or in another one."""
        return self.answering.answer is not None

    @property
    def open_message(self) -> str | None:
        """The id of the answer that is being written in this conversation; None if there is none."""
        answer = self.answering.answer
        return answer.message.id if answer is not None and answer.chat == self.chat.id else None

    @property
    def left_out(self) -> frozenset[str]:
        """Ids of shown messages that the prompt omits, because the context is full."""
        path = self.tree.path
        return left_out_of(path, cut_of_path(path, self._context_size))

    @property
    def prompt_path(self) -> tuple[Message, ...]:
        """The shown messages that the prompt of the next question would contain."""
        return shown_path(self.tree.path, self.left_out)

    def prompt_messages(self) -> tuple[ChatMessage, ...]:
        """Return the messages of the next prompt. The unsent text of the input field is the last question."""
        path = self.prompt_path
        if self.chat.draft.strip():
            path = (*path, Message(id=new_id(), role="user", content=self.chat.draft))
        return chat_messages(self.system, path, self.tools)

    @property
    def pending_request(self) -> int | None:
        """The number of the request for the present answer; None if there is none, or it was not sent yet."""
        return None if self.answering.answer is None else self.answering.request

    def counted_chat(self) -> CountedChat:
        """Return the prompt of the conversation and its parts, so that the loaded model can count their tokens."""
        path = self.prompt_path
        return CountedChat(
            messages=chat_messages(self.system, path, self.tools),
            template=self.chat.template,
            tools=self.tools.definitions,
            system=self.system,
            files=tuple(text for message in path for text in texts_of(message)),
            media=tuple(file for message in path for file in media_of(message)),
            max_tokens=self.sampling.settings.max_tokens,
        )

    def unloaded_chat(self, attachments: Sequence[Attachment] = ()) -> CountedChat | None:
        """Return the prompt with the unsent text and `attachments`, to count its tokens without a loaded model.

        None if there are no messages, no unsent text and no attachments.
        """
        path = self.prompt_path
        if self.chat.draft.strip() or attachments:
            path = (*path, new_user_message(self.chat.draft, None, attachments))
        if not path:
            return None
        files = tuple(text for message in path for text in texts_of(message))
        return replace(
            self.counted_chat(), messages=chat_messages(self.system, path, self.tools), files=files, media=()
        )

    def emit_restored(self, chat: str, restored: Restored) -> None:
        """Emit the signal `restored` if the conversation with the id `chat` is shown.

        `restored`: the result of restoring the saved KV state of this conversation.
        """
        if chat == self.chat.id:
            self.restored.emit(restored)

    def open(self, chat: Chat, tree: MessageTree) -> None:
        """Switch to the stored conversation `chat` with the messages `tree`."""
        self.chat, self._is_kept = chat, True
        answer = self.answering.answer
        if answer is not None and answer.chat == chat.id:
            tree = changed(answer.tree, answer.message)  # It is newer than what was read.
        self.tree = tree
        self._show()

    def begin(self, chat: Chat | None = None) -> None:
        """Switch to a new conversation: `chat`, or an empty one with the same settings. The old one remains stored."""
        shown = self.chat
        self.chat, self.tree = chat or _like(shown), MessageTree()
        self._is_kept = False
        self._show()

    def clear(self) -> None:
        """Switch to a new conversation. An answer that is written in the present one is stopped first."""
        if self.open_message is not None:
            self.answering.stop()
        self.begin()

    def change_chat(self, chat: Chat) -> None:
        """Replace title, unsent text, system prompt and settings by those of `chat`, and store the change."""
        before, self.chat = self.chat, chat
        # An untouched new conversation is not stored.
        if self._is_kept:
            self._storage.save(chat, before)
        elif chat.draft or chat.title:
            self._keep_chat()
        self.chat_changed.emit()

    def select(self, message: str) -> None:
        """Show the branch of the message tree that has the message with this id."""
        if message in self.tree.messages:
            self._apply(select(self.tree, message))

    # ------------------------------------------------------------------ what people do

    def send(self, text: str, files: Sequence[tuple[Attachment, bytes | None]] = ()) -> None:
        """Send a question to the model; do nothing if the model cannot accept a question now.

        `files`: attachments, each with its bytes, or None if the bytes are stored already.
        """
        if not self.can_send:
            return
        for _attachment, data in files:
            if data is not None:
                self._storage.keep_file(data)
        attachments = tuple(attachment for attachment, _data in files)
        tree, typed = self._with_results(), self._typed_results()
        self._ask(add(tree, new_user_message(text, tree.leaf, attachments)))
        self._forget_results(typed)

    def regenerate(self, message: str) -> None:
        """Request another version of the answer with the id `message`. A failed answer without text is replaced."""
        question = self.tree.messages[message].parent
        if question is None or not self.can_send:
            return
        tree = self.tree
        if is_empty_failure(tree, message):
            tree = without_leaf(tree, message)
        self._ask(replace(tree, leaf=question))

    def edit(self, message: str, text: str) -> None:
        """Send `text` as another version of the question with the id `message`."""
        if self.can_send:
            self._ask(edited(self.tree, message, text, created_ms=now_ms()))

    # ------------------------------------------------------------------ tools

    def type_result(self, message: str, call: str, text: str) -> None:
        """Store the unsent text that a person has typed as the result of a tool call.

        `message`: id of the answer that has the call. `call`: id of the call.
        """
        key = result_key(message, call)
        if text != self.chat.results.get(key, ""):
            results = {name: value for name, value in self.chat.results.items() if name != key}
            self.change_chat(replace(self.chat, results={**results, key: text} if text else results))

    def give_result(self, call: str, text: str) -> bool:
        """Add `text` as the result of the tool call with id `call`. After the last missing result, the model answers.

        Returns:
            Whether the result was accepted. It is refused if the call needs none, or if the model cannot answer now.
        """
        missing = self.missing_results
        wanted = next((each for each in missing if each.id == call), None)
        if wanted is None or (len(missing) == 1 and not self.can_send):
            return False
        tree, typed = add(self.tree, result_message(wanted, text, self.tree.leaf)), self._typed_results(call)
        if len(missing) == 1:
            self._ask(tree)
        else:
            self._apply(tree)
        self._forget_results(typed)
        return True

    def answer_results(self) -> None:
        """Make the model answer now. A tool call without a result gets the text typed for it, or an empty result."""
        if self.can_send and self.tree.path:
            typed = self._typed_results()
            self._ask(self._with_results())
            self._forget_results(typed)

    def edit_result(self, message: str, text: str) -> None:
        """Add `text` as another version of a tool call's result. If no result is missing, the model answers.

        `message`: id of the message with the earlier result.
        """
        if self.can_send:
            tree = edited_result(self.tree, message, text, created_ms=now_ms())
            if missing_results(tree.path):
                self._apply(tree)
            else:
                self._ask(tree)

    def _with_results(self) -> MessageTree:
        """Return the messages, with a result added for each tool call of the last answer that has none.

        The added result is the unsent text that a person has typed for the call, or empty.
        """
        answer = answer_waiting_for_results(self.tree.path)
        if answer is None or self.open_message is not None:
            return self.tree
        typed = self.chat.results
        return with_results(
            self.tree, {call.id: typed.get(result_key(answer.id, call.id), "") for call in answer.calls}
        )

    def _typed_results(self, *calls: str) -> set[str]:
        """Return the keys under which unsent results for tool calls of the last answer are stored.

        `calls`: ids of the tool calls; if none are given, all calls of the answer.
        """
        answer = answer_waiting_for_results(self.tree.path)
        found = () if answer is None else calls or tuple(call.id for call in answer.calls)
        return set() if answer is None else {result_key(answer.id, call) for call in found}

    def _forget_results(self, keys: set[str]) -> None:
        """Delete the unsent results for tool calls that are stored under `keys`.

        Called after the results are stored as messages, so that a crash in between loses nothing.
        """
        if keys & self.chat.results.keys():
            results = {name: text for name, text in self.chat.results.items() if name not in keys}
            self.change_chat(replace(self.chat, results=results))

    def go_on(self, message: str) -> None:
        """Make the model continue the incomplete answer with the id `message`."""
        known = self.tree.messages[message]
        if known.role == "assistant" and self.can_send:
            thinking = bool(known.reasoning) and not known.content
            begun = begun_answer(known.reasoning, known.content, self._marks(), thinking=thinking)
            self._continue(select(self.tree, message), known, begun)

    def _marks(self) -> ThinkTags | None:
        """Return the tags that the chat template puts around reasoning, or None if the template has no such tags."""
        return think_tags_of(self._template)

    @property
    def _template(self) -> str:
        return chat_template(self._loading.model, self.chat.template)

    def toggle_pin(self, message: str) -> None:
        """Pin or unpin a message. The turn of a pinned message stays in the prompt when the context is full."""
        known = self.tree.messages.get(message)
        if known is not None and self.open_message is None:
            self._apply(changed(self.tree, replace(known, pinned=not known.pinned)))

    def step_version(self, message: str, step: int) -> None:
        """Show the next (`step` 1) or previous (-1) version of a message."""
        if not self.is_answering:
            self._apply(step_version(self.tree, message, step))

    def delete_turn(self, message: str) -> MessageTree | None:
        """Delete a question with its answers.

        Returns:
            The old messages for `restore`; None if an answer is being written, so that nothing was deleted.
        """
        if self.open_message is not None:
            return None
        before = self.tree
        self._apply(without_turn(self.tree, message))
        return before

    def restore(self, tree: MessageTree) -> None:
        """Undo a deletion: show the messages `tree` again."""
        if self.open_message is None:
            self._apply(tree)

    def branch(self, message: str) -> None:
        """Switch to a new conversation with copies of the messages up to the one with the id `message`."""
        if self.open_message is not None:
            return
        tree = branched(self.tree, message)
        now = now_ms()
        chat = replace(
            self.chat,
            id=new_id(),
            title=tr("{title} (branch)", title=self.chat.title or title_of_message(tree.path[0])),
            leaf=tree.leaf,
            draft="",
            results={},
            pinned=False,
            forked_from=self.chat.id if self._is_kept else None,
            created_ms=now,
            updated_ms=now,
        )
        # Conversation first, then its messages: they refer to it in the database.
        self.chat, self.tree = chat, MessageTree()
        self._is_kept = False
        self._keep_chat()
        self._apply(tree)
        self.chat_changed.emit()

    # ------------------------------------------------------------------ asking

    @property
    def can_send(self) -> bool:
        """Whether the model is loaded and no answer is being written, so that a question can be sent."""
        # One answer at a time for each model's chat. Programs may be asking the same model; the engine queues requests.
        loading = self._loading
        is_loaded = loading.phase.is_loaded and loading.model is not None
        return is_loaded and not self.is_answering

    @property
    def _options(self) -> AnswerOptions:
        loading = self._loading
        assert loading.model is not None
        return AnswerOptions(
            system=self.system,
            template=self.chat.template,
            tools=self.tools,
            sampling=self.sampling.settings,
            overflow=self.answering.overflow,
            n_ctx=self._context_size,
            model=loading.model.name,
            layout=None if loading.loaded is None else loading.loaded.edit.layout,
        )

    def _ask(self, tree: MessageTree) -> None:
        # A conversation gets its title from the first question; before that it is a draft.
        if not self.chat.title:
            self.change_chat(replace(self.chat, title=title_of_message(tree.path[-1])))
        elif not self._is_kept:
            self._keep_chat()
        self._begin(new_answer(self.chat.id, tree, self._options))

    def _continue(self, tree: MessageTree, message: Message, begun: str) -> None:
        """Make the model continue `message` of the tree. `begun`: the text after which the model continues."""
        self._begin(continued_answer(self.chat.id, tree, message, self._options, begun))

    def _begin(self, run: AnswerRun) -> None:
        before, self.tree = self.tree, run.tree
        self._storage.apply(self.chat.id, before, run.tree)
        self.answering.begin(run)

    # ------------------------------------------------------------------ what comes

    def _on_answer_changed(self, run: AnswerRun) -> None:
        if run.chat == self.chat.id and run.message.id in self.tree.messages:
            self.tree = changed(self.tree, run.message)

    def _on_written(self, run: AnswerRun, piece: Append) -> None:
        self._on_answer_changed(run)
        if run.chat == self.chat.id:
            self.piece_kept.emit(piece)

    def _on_finished(self, run: AnswerRun, end: Finish) -> None:
        if end.done is None:
            self._failed = run
            return  # the failed answer stays below its question, and Retry asks again
        begun = run.continuation
        if begun is not None and run.chat == self.chat.id:
            # Later, when all receivers of the ended answer have run.
            QTimer.singleShot(0, self, lambda: self._answer_now(run.message.id, begun))
        self.answer_finished.emit(end.done)
        self.context_use_changed.emit(ContextFill(self._loading.snapshot.context_used or 0, self._context_size))

    def _on_lost(self, lost: RequestLost) -> None:
        failed, self._failed = self._failed, None
        # A program's answer may be lost as well, long after one of this conversation has failed.
        is_own = lost.request == self.answering.request
        if lost.goes_on and is_own and failed is not None and failed.chat == self.chat.id:
            self._waiting = failed.message.id

    def _on_phase_changed(self, phase: Phase) -> None:
        """Continue the answer that ran out of memory, as soon as the model is loaded with another layout."""
        if phase is Phase.READY:
            waiting, self._waiting = self._waiting, ""
            if waiting in self.tree.messages:
                # Later, when everybody knows the loaded model.
                QTimer.singleShot(0, self, lambda: self.go_on(waiting))
        elif phase is Phase.STOPPED:
            self._waiting = ""

    def _answer_now(self, thought: str, begun: str) -> None:
        if thought in self.tree.messages and self.can_send:
            self._continue(self.tree, self.tree.messages[thought], begun)

    # ------------------------------------------------------------------ inside

    def _show(self) -> None:
        self.chat_changed.emit()
        self.shown_changed.emit()
        if self._loading.phase is Phase.READY:
            self.context_use_changed.emit(ContextFill(None if self.tree.messages else 0, self._context_size))

    def _apply(self, tree: MessageTree) -> None:
        before, self.tree = self.tree, tree
        if self._is_kept:
            self._storage.apply(self.chat.id, before, tree)
        self.shown_changed.emit()

    def _keep_chat(self) -> None:
        self._is_kept = True
        self._storage.save(self.chat, None)

    @property
    def _context_size(self) -> int | None:
        return self._loading.snapshot.context_size

    def _on_loaded_changed(self, loaded: LoadedLayout | None) -> None:
        used = 0 if loaded is not None and not self.tree.messages else None
        self.context_use_changed.emit(ContextFill(used, None if loaded is None else self._context_size))


def _like(chat: Chat) -> Chat:
    """Return a new conversation with the prompt and settings of `chat`."""
    return replace(
        new_chat(),
        system=chat.system,
        preset=chat.preset,
        settings=chat.settings,
        template=chat.template,
        tools=chat.tools,
    )
