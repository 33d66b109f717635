"""Runs `chat`: loads the model, restores the conversation, answers each line of input, and stores everything."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from enum import Enum
from typing import Literal

from msgspec import Struct, field

from app.cli import exit_codes
from app.cli.chat_printers import ChatPrinter
from app.cli.follow import IDLE_POLL_S, BadEnding, Ended, Follower, exit_code_of
from app.cli.inputs import learn_speed
from app.cli.output import print_stderr
from engine.base.errors import EngineError
from engine.base.values import replace
from engine.chat import answer as core
from engine.chat.answer import (
    AnswerOptions,
    AnswerRun,
    Append,
    Finish,
    continued_answer,
    loss_text,
    new_answer,
)
from engine.chat.attachments import ReadFile
from engine.chat.context import Overflow
from engine.chat.conversation import Conversation, title_of_message
from engine.chat.message import Message, new_user_message
from engine.chat.presets import Preset, chat_sampling, chat_template, system_prompt
from engine.chat.saved_kv_states import MIN_TOKENS, KvStateKey, SavedKvStates, key_of, model_identity
from engine.chat.store import ChatStore
from engine.chat.thinking import begun_answer
from engine.chat.tools import ToolUse, missing_results, read_tools, result_message, with_results
from engine.chat.tree import MessageTree, add
from engine.runtime.protocol.messages import Counted, FinalMessage, SequenceSaved
from engine.runtime.protocol.requests import Generate, RestoreSequence, SaveSequence, ToolCall
from engine.runtime.session.events import Done, Failed, Loaded, RequestEnding, RequestEvent, Shifted, Token
from engine.runtime.session.load_spec import LoadSpec
from engine.runtime.session.session import RequestStream

HELP = (
    "/again: another answer to the last question; /skip: go on without the results of tool calls; "
    "/quit: end the conversation, as the end of the input does; Ctrl+C stops an answer."
)
_READ_BYTES = 1 << 16


NOT_STORED = "The text from here on is not saved yet: it is lost if the program is killed before there is disk space."
SAVING = "Saving the KV state of the conversation… Ctrl+C ends without it."
STORED_AGAIN = "The conversation is saved again, with the text since the failure."


class TalkOptions(Struct, frozen=True):
    """Options of a chat.

    `preset`: the preset of --preset or of the stored conversation; None if there is none.
    `settings`: sampler settings by key.
    `overflow`: what to do if the context is full.
    `prompt`: the only question; None to read lines of standard input.
    `attached`: files for the first question.
    """

    preset: Preset | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    overflow: Overflow = "drop"
    prompt: str | None = None
    attached: tuple[ReadFile, ...] = ()


class _Wake(Enum):
    WAKE = "wake"


class LineReader:
    """Reads lines of standard input in a daemon thread. A pending read does not delay the end of the program."""

    def __init__(self, descriptor: int = 0) -> None:
        self._descriptor = descriptor
        self._lines: queue.SimpleQueue[str | Literal[_Wake.WAKE] | None] = queue.SimpleQueue()
        # not through sys.stdin: a thread that waits in there holds a lock that Python wants at its end
        threading.Thread(target=self._run, name="lines", daemon=True).start()

    def next(self, timeout_s: float | None) -> str | None:
        """Return the next line without its line end; None at the end of the input.

        `timeout_s`: None to wait without limit.

        Raises:
            queue.Empty: if no line came in time, or `wake` ended the wait.
        """
        line = self._lines.get(timeout=timeout_s)
        if line is _Wake.WAKE:
            raise queue.Empty
        return line

    def wake(self) -> None:
        """End the wait for a line in `next`. May be called in any thread, and in a signal handler."""
        self._lines.put(_Wake.WAKE)

    def _run(self) -> None:
        held = b""
        with suppress(OSError):
            while data := os.read(self._descriptor, _READ_BYTES):
                # A read may end in the middle of a line, and of a character in UTF-8: only whole lines are decoded.
                *lines, held = (held + data).split(b"\n")
                for line in lines:
                    self._lines.put(_text(line))
        if held:
            self._lines.put(_text(held))
        self._lines.put(None)


class Talk:
    """Runs a chat from its start to its last event. All child processes have ended when `run` returns.

    The state machine `engine.chat.answer` decides what happens in an answer. This class carries out its effects in one
    thread, one after another.
    """

    def __init__(
        self,
        store: ChatStore,
        states: SavedKvStates,
        spec: LoadSpec,
        printer: ChatPrinter,
        conversation: Conversation,
        options: TalkOptions,
    ) -> None:
        self._store, self._states, self._printer, self._options = store, states, printer, options
        self._spec, self._conversation = spec, conversation
        self._plan = plan = spec.plan
        self._model = model_identity(plan.model)
        settings = {**conversation.settings, **options.settings}
        self._answer_options = AnswerOptions(
            system=system_prompt(conversation, options.preset),
            template=conversation.template,
            tools=ToolUse(read_tools(conversation.tools), chat_template(plan.model, conversation.template)),
            sampling=chat_sampling(plan.model, options.preset, settings).settings,
            overflow=options.overflow,
            model=plan.model.name,
            model_identity=self._model,
        )
        self._tree = store.tree(conversation.id)
        self._attached = options.attached
        self._has_asked = options.prompt is None
        """Whether a question was asked, so that the next line may be the result of a tool call.

        False until the question of --prompt is asked. True from the start if questions come from standard input.
        """
        # A quota of 0 turns saving off.
        self._keeps_states = states.quota_bytes > 0 and self._make_folder()
        self._follower = Follower(states.folder if self._keeps_states else None)
        # Whether the user was told that text is not stored.
        self._has_warned = False
        # Last event of the request for the current answer.
        self._ending: RequestEnding | None = None
        self._finish: Finish | None = None
        # Number of the request for the current answer.
        self._request = 0

    def run(self) -> int:
        """Run the chat, and return the exit code."""
        with self._follower.loading(self._spec):
            try:
                self._load()
                self._restore()
                for line in self._questions():
                    self._take(line)
            except Ended as ended:
                self._printer.load.show(replace(ended.ending, request=None))
                return exit_code_of(ended.ending)
        return exit_codes.OK

    def _load(self) -> None:
        self._load_layout()
        self._printer.begin(self._conversation.id, self._conversation.title)

    def _load_layout(self) -> None:
        ending = self._follower.load(self._printer.load)
        if not isinstance(ending, Loaded):
            raise Ended(ending)
        self._printer.load.show(ending)
        # It may have stepped back from the plan that was asked for.
        self._plan = plan = self._follower.loaded_plan or self._plan
        n_ctx = self._follower.session.snapshot.context_size
        self._answer_options = replace(self._answer_options, n_ctx=n_ctx, layout=plan.edit.layout)

    # ------------------------------------------------------------------ saved states of the model

    def _make_folder(self) -> bool:
        try:
            self._states.make_folder()
        except EngineError as error:
            self._printer.notice(error.summary())
            return False
        return True

    @property
    def _key(self) -> KvStateKey:
        return key_of(self._model, self._plan.settings, self._plan.edit.side_files.adapters)

    def _restore(self) -> None:
        """Restore the saved KV state of the conversation, if there is one.

        The state is deleted if the model can never restore it.
        """
        path = self._states.find(self._conversation.id, self._key) if self._tree.messages else None
        if path is None:
            return
        answer = self._follower.answer_of(RestoreSequence(path=str(path)))
        if isinstance(answer, Failed) and answer.kind == "model_file":
            self._states.forget(path)

    def _save_state(self, request: int, tokens: int) -> None:
        if tokens < MIN_TOKENS or not self._keeps_states:
            return
        path = self._states.path_for(self._conversation.id, self._key)
        save = SaveSequence(path=str(path), of=request, most_bytes=self._states.quota_bytes)
        answer = self._follower.answer_of(save, stops=False, on_long=lambda: print_stderr(SAVING))
        if isinstance(answer, SequenceSaved):
            self._states.keep(path)
        elif isinstance(answer, Failed) and answer.kind == "does_not_fit":
            # The conversation only grows: its later states are not saved either.
            self._keeps_states = False
            print_stderr(answer.message)

    # ------------------------------------------------------------------ questions

    def _questions(self) -> Iterator[str]:
        has_prompt = self._options.prompt is not None
        if self._options.prompt is not None:
            yield self._options.prompt
        reader = None
        while True:
            missing = missing_results(self._tree.path)
            # After --prompt only results are read.
            if has_prompt and not missing:
                return
            if reader is None:
                reader = LineReader()
                self._follower.wake = reader.wake
            if missing:
                self._printer.prompt_result(missing[0])
            else:
                self._printer.prompt()
            line = self._line(reader)
            if line is None or line.strip() == "/quit":
                return
            if line.strip() or missing:
                yield line

    def _line(self, reader: LineReader) -> str | None:
        """Return the next line of input; None at its end.

        Raises `Ended` if the model is lost, or after an interrupt.
        """
        while True:
            with suppress(queue.Empty):
                return reader.next(IDLE_POLL_S)
            self._follower.check()

    def _take(self, line: str) -> None:
        command = line.strip()
        missing = missing_results(self._tree.path)
        if command == "/help":
            self._printer.notice(HELP)
        elif command == "/skip" and missing:
            self._answer(with_results(self._tree))
        elif missing and command != "/again" and self._has_asked:
            self._take_result(missing, line)
        elif command == "/again":
            last = self._tree.path[-1] if self._tree.path else None
            if last is None or last.role != "assistant" or last.parent is None:
                self._printer.notice("There is no answer yet.")
            else:
                self._answer(replace(self._tree, leaf=last.parent))
        else:
            self._ask(line)

    def _take_result(self, missing: Sequence[ToolCall], text: str) -> None:
        """Store `text` as the result of the first tool call in `missing`. After the last one, the model answers.

        `missing`: the tool calls that have no result yet.
        """
        tree = add(self._tree, result_message(missing[0], text, self._tree.leaf))
        if len(missing) == 1:
            self._answer(tree)
        else:
            self._store.apply(self._conversation.id, self._tree, tree)
            self._tree = tree

    def _ask(self, text: str) -> None:
        self._has_asked = True
        # Only a question of --prompt comes before the results of an earlier chat.
        before = with_results(self._tree)
        files, self._attached = self._attached, ()
        for file in files:
            self._store.keep_file(file.data)
        question = new_user_message(text, before.leaf, [file.attachment for file in files])
        if not self._tree.messages:
            title = self._conversation.title or title_of_message(question)
            self._conversation = replace(self._conversation, title=title)
            # Before its messages, which refer to it in the database.
            if self._store.conversation(self._conversation.id) is None:
                self._store.save(self._conversation)
        self._answer(add(before, question))

    def _answer(self, tree: MessageTree) -> None:
        """Generate and store an answer to the last message of `tree`."""
        self._write_answer(new_answer(self._conversation.id, tree, self._answer_options))

    def _write_answer(self, run: AnswerRun) -> None:
        """Generate, print and store an answer.

        If memory runs out and the options allow retries, another layout is loaded, and the answer continues.
        """
        self._store.apply(self._conversation.id, self._tree, run.tree)
        self._tree = run.tree
        self._ending, self._finish = None, None
        self._do(run, run.begin())
        finish = self._finish
        assert finish is not None
        if finish.done is not None:
            self._printer.done(finish.done, finish.message)
            learn_speed(self._plan, finish.done)
            # Last: the answer is complete, and saving may take long or lose the model.
            # Not after a context shift: the KV state is not that of the conversation.
            if not finish.done.dropped_tokens:
                self._save_state(self._request, finish.done.prompt_tokens + finish.done.generated_tokens)
        elif self._ending is not None and self._follower.step_back(self._spec.with_plan(self._plan), self._ending):
            self._load_layout()
            self._restore()
            self._go_on(finish.message, run)
        elif self._follower.interrupted:
            raise Ended(self._follower.cancelled)
        elif isinstance(self._ending, BadEnding):
            raise Ended(self._ending)
        elif self._options.prompt is not None:
            # With --prompt nobody can ask again.
            raise Ended(Failed(kind="argument", message=finish.failure))
        else:
            self._printer.notice(finish.failure)

    def _go_on(self, message: Message, run: AnswerRun) -> None:
        """Continue the unfinished answer `message`, now that the model is loaded with another layout.

        `run`: the state of this answer when the generation was cut off.
        """
        thinking = bool(message.reasoning) and not message.content
        begun = begun_answer(message.reasoning, message.content, run.marks, thinking=thinking)
        self._write_answer(continued_answer(run.chat, self._tree, message, self._answer_options, begun))

    # ------------------------------------------------------------------ effects

    def _do(self, run: AnswerRun, effects: core.Effects) -> None:
        for effect in effects:
            match effect:
                case core.Restore():
                    self._do(run, run.restored())  # That was done after the load: there is one conversation.
                case core.Count():
                    self._count(run, effect)
                case core.AskOverflow():
                    if effect.sentence:  # Nobody is there to be asked.
                        self._do(run, run.fail(effect.sentence))
                case core.Notice():
                    self._printer.notice(effect.sentence)
                case core.ReadFiles():
                    # Files of this question may still wait to be written.
                    self._store.settled().result()
                    files = {name: data for name in effect.names if (data := self._store.file(name)) is not None}
                    self._do(run, run.files_read(files))
                case core.SendRequest():
                    self._follow(run, effect.request)
                case Append():
                    # Printed only when it is stored: a crash loses no text that people have seen.
                    self._write(self._store.append(effect.message, effect.content, effect.reasoning, effect.calls))
                    run.written(effect)
                    self._printer.print_delta(effect.reasoning, effect.content)
                case Finish():
                    self._write(self._store.finish(run.chat, effect.message))
                    self._tree, self._finish = add(run.tree, effect.message), effect

    def _count(self, run: AnswerRun, effect: core.Count) -> None:
        answer = self._follower.answer_of(effect.request)
        if isinstance(answer, Counted):
            self._do(run, run.counted(answer))
        elif not isinstance(answer, FinalMessage):
            self._ending = answer
            self._do(run, run.fail(loss_text(answer)))

    def _follow(self, run: AnswerRun, request: Generate) -> None:
        """Send `request` to the model, then print and store the pieces of the answer `run` until it ends.

        Pieces that arrive during a write to the database are written together.
        """
        stream = self._follower.ask(request)
        for event in self._events(run, stream):
            if isinstance(event, Token):
                run.token(event.text, event.choices)
                # Each flush waits for a write to the database, so tokens that are there already go with it.
                if stream.is_empty:
                    self._do(run, run.flush())
            elif isinstance(event, Shifted):
                self._printer.shifted(event)
                self._do(run, (*run.flush(), *run.shifted(event)))
            elif isinstance(event, RequestEnding):
                self._ending = event
                # The first interrupt until now was about this answer.
                self._follower.mark_interrupt_handled()
                self._do(run, run.done(event) if isinstance(event, Done) else run.fail(loss_text(event)))
                self._request = stream.number

    def _events(self, run: AnswerRun, stream: RequestStream) -> Iterator[RequestEvent]:
        """Yield the events of the answer `run`. If `Ended` is raised meanwhile, the text so far is stored.

        Raises:
            Ended: at a third interrupt (Ctrl+C).
        """
        try:
            yield from self._follower.events(stream, stop=stream.stop)
        except Ended:
            self._ending = self._follower.cancelled
            self._do(run, run.fail(loss_text(self._ending)))
            raise

    def _write(self, written: Future[None]) -> None:
        """Wait for `written`, a write to the database. If it fails, a notice is printed, and the answer continues.

        Another notice is printed when the text of the failed write has been stored.
        """
        try:
            written.result()
        except EngineError as error:
            if not self._has_warned:
                self._has_warned = True
                self._printer.notice(f"{error.summary()} {NOT_STORED}")
            return
        if self._has_warned and not self._store.is_behind:
            self._has_warned = False
            self._printer.notice(STORED_AGAIN)


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace").rstrip("\r")
