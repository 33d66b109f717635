"""One answer from its question to its end: a machine without input and output.

A driver (window, command line, a server) makes an `AnswerRun` for each answer that is to be written, as many at once as
it likes. It calls one method for each thing that happens and carries out the effects that the method returns, in their
order: restore what was saved, count, ask a person, read files, ask the model, write, finish. An input that comes too
late has no effects. Each answer has exactly one `Finish`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from engine.base.errors import ChatError
from engine.base.language import tr
from engine.chat.asking import (
    SYSTEM,
    answer_request,
    chat_messages,
    messages_by_id,
    names_of_media,
    with_files,
)
from engine.chat.context import (
    Overflow,
    answer_reserve,
    choose,
    cut_of_answer,
    cut_of_path,
    cut_that_leaves_out,
    left_out_of,
    left_out_sentence,
    may_be_too_long,
    shown_path,
    tokens_of,
)
from engine.chat.message import MAX_CHOICES, Attachment, Message, MessageState, Timings, new_id, now_ms
from engine.chat.thinking import Delta, Marks, Splitter, begun_answer
from engine.chat.tree import MessageTree, add, changed
from engine.planning.fit.shares import share_words
from engine.planning.layout.layout import Layout
from engine.planning.settings.sampling_settings import SamplingSettings
from engine.planning.settings.sampling_sources import changed_settings
from engine.runtime.protocol.messages import ChatMessage, Counted, CountTokens, Generate, TokenChoice
from engine.runtime.session.events import Cancelled, Crashed, Done, Failed, OutOfMemory, RequestEnding


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What an answer is asked with: later changes of the conversation or of the model do not change it.

    `system`, `template`: of the conversation, empty for none. `n_ctx`: tokens of the context, None if unknown.
    `model`: the name of the model; with `model_identity` and the words of `layout` it is kept with the message.
    """

    system: str = ""
    template: str = ""
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    overflow: Overflow = "drop"
    n_ctx: int | None = None
    model: str = ""
    model_identity: str = ""
    layout: Layout | None = None


# ------------------------------------------------------------------ effects


@dataclass(frozen=True, slots=True)
class Restore:
    """Have the model hold the saved state of the conversation, if there is one; then call `restored`."""


@dataclass(frozen=True, slots=True)
class Count:
    """Ask the model for the tokens of the prompt; then call `counted`, or `fail`."""

    request: CountTokens


@dataclass(frozen=True, slots=True)
class AskOverflow:
    """Ask a person whether the oldest turns are left out of the full context; then call `answer_overflow`.

    An empty sentence takes the question back.
    """

    sentence: str


@dataclass(frozen=True, slots=True)
class Notice:
    """Show a sentence that ends nothing."""

    sentence: str


@dataclass(frozen=True, slots=True)
class ReadFiles:
    """Read the attachments with these SHA-256; then call `files_read`."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the model for the answer; then call `token` for each piece of its text, and `done` or `fail` at its end."""

    request: Generate


@dataclass(frozen=True, slots=True)
class StopAnswer:
    """Ask the model to stop; its ending comes as always."""


@dataclass(frozen=True, slots=True)
class Append:
    """Write more text of the message; once it is on disk, or cannot be written, call `written` and show it."""

    message: str
    content: str
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Finish:
    """Write the whole message; the answer has ended.

    `done`: the model's report, None if the answer failed. `failure`: a sentence on why it did.
    """

    message: Message
    done: Done | None = None
    failure: str = ""


Effect = Restore | Count | AskOverflow | Notice | ReadFiles | Ask | StopAnswer | Append | Finish
Effects = tuple[Effect, ...]


class _Step(Enum):
    """What the answer waits for."""

    RESTORING = auto()
    COUNTING = auto()
    ASKING_PERSON = auto()
    READING_FILES = auto()
    WRITING = auto()
    ENDED = auto()


class AnswerRun:
    """One answer that is being written, in the conversation `chat`. For one thread.

    `tree`: the messages with the new one, as they are to be stored before `begin`. `message`: the answer as far as it
    is on disk, whole after its end. `begun`: what the model has to go on from, which is in `message` already.
    """

    def __init__(
        self,
        chat: str,
        tree: MessageTree,
        message: Message,
        options: AnswerOptions,
        *,
        begun: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.chat, self.options, self.begun = chat, options, begun
        message = msgspec.structs.replace(message, cut=cut_of_answer(tree, message.id, options.n_ctx))
        self.tree = changed(tree, message)
        self.message = message
        self.path = tree.path_to(message.parent)
        """The messages before the answer; the question is the last of them."""
        self.goes_on = False
        """Whether it is stopped only to answer with what was thought so far; see `continuation`."""
        self.left_out = left_out_of(self.path, message.cut)
        """Messages that the model is not shown."""
        self._was_cut = cut_of_path(self.path, options.n_ctx) is not None
        self._overflow = options.overflow
        self._step = _Step.RESTORING
        self._counted: Counted | None = None
        self._splitter = Splitter()
        self._splitter.add(begun)
        self._had_thought = self._splitter.has_thought
        self._content, self._reasoning = [message.content], [message.reasoning]
        self._choices = list(message.choices)
        self._waiting: list[Delta] = []
        self._tokens = 0
        self._clock = clock
        self._asked_s = clock()
        self._first_s: float | None = None
        self._last_s: float | None = None
        self._thought_s: float | None = None

    # ------------------------------------------------------------------ what may be read

    @property
    def question(self) -> Message | None:
        """The message that is answered."""
        return self.path[-1] if self.path else None

    @property
    def has_ended(self) -> bool:
        """Whether `Finish` was among the effects."""
        return self._step is _Step.ENDED

    @property
    def is_thinking(self) -> bool:
        """Whether the model thinks now."""
        return self._splitter.is_thinking

    @property
    def marks(self) -> Marks | None:
        """The marks around the thought; None if there was none."""
        return self._splitter.marks

    @property
    def continuation(self) -> str | None:
        """What the model goes on from after `answer_now` has stopped it; None if it was not."""
        if not self.goes_on or self.message.state != "stopped":
            return None
        return begun_answer(self.message.reasoning, "", self.marks)

    # ------------------------------------------------------------------ before the model is asked

    def begin(self) -> Effects:
        """Begin; `tree` is stored."""
        return (Restore(),)

    def restored(self) -> Effects:
        """The model holds the saved state, or has to read the conversation."""
        if self._step is not _Step.RESTORING:
            return ()
        return self._count() if may_be_too_long(self._prompt, self.options.n_ctx) else self._send()

    def counted(self, counted: Counted) -> Effects:
        """The model has counted the prompt."""
        if self._step is not _Step.COUNTING:
            return ()
        return self._take_count(counted)

    def answer_overflow(self, leave_out: bool) -> Effects:
        """A person has said whether the oldest turns are left out."""
        if self._step is not _Step.ASKING_PERSON:
            return ()
        assert self._counted is not None
        if leave_out:
            self._overflow = "drop"
            return (AskOverflow(""), *self._take_count(self._counted))
        return self.fail(tr("It was not asked: the context is full."))

    def files_read(self, files: Mapping[str, bytes]) -> Effects:
        """The attachments were read; those that are not there any more are missing in `files`."""
        if self._step is not _Step.READING_FILES:
            return ()
        try:
            return self._ask(with_files(self._prompt, files))
        except ChatError as error:
            return self.fail(error.summary())

    @property
    def _prompt(self) -> tuple[ChatMessage, ...]:
        return chat_messages(self.options.system, shown_path(self.path, self.left_out))

    def _count(self) -> Effects:
        self._step = _Step.COUNTING
        return (Count(CountTokens(messages=self._prompt, template=self.options.template)),)

    def _take_count(self, counted: Counted) -> Effects:
        options = self.options
        asked = messages_by_id(options.system, shown_path(self.path, self.left_out))
        tokens = tokens_of(asked, counted.messages, counted.prompt)
        reserve = answer_reserve(counted.n_ctx, options.sampling.max_tokens)
        room = counted.n_ctx - reserve - tokens.get(SYSTEM, 0)
        fit = choose(self.path, tokens, room, self._overflow, self.left_out)
        if fit.decision == "ask":
            self._step, self._counted = _Step.ASKING_PERSON, counted
            return (AskOverflow(fit.sentence()),)
        if fit.decision != "fits":
            sentence = fit.sentence()
            return self.fail(tr("{sentence} The context has {n_ctx} tokens.", sentence=sentence, n_ctx=counted.n_ctx))
        if not fit.newly:
            return self._send()
        is_new = self.message.cut is None
        self.left_out = frozenset(fit.left_out)
        cut = cut_that_leaves_out(self.path, fit.left_out, counted.n_ctx)
        self.message = msgspec.structs.replace(self.message, cut=cut)
        # The template may write more or less around fewer messages: what is left is counted again.
        return (*((Notice(left_out_sentence()),) if is_new else ()), *self._count())

    def _send(self) -> Effects:
        prompt = self._prompt
        if names := names_of_media(prompt):
            self._step = _Step.READING_FILES
            return (ReadFiles(names),)
        return self._ask(prompt)

    def _ask(self, prompt: Sequence[ChatMessage]) -> Effects:
        self._step = _Step.WRITING
        options = self.options
        return (Ask(answer_request(prompt, options.sampling, begun=self.begun, template=options.template)),)

    # ------------------------------------------------------------------ while the model answers

    def token(self, text: str, choices: Sequence[TokenChoice] = ()) -> None:
        """The model has written more; `flush` gives what there is to write and show."""
        if self._step is not _Step.WRITING:
            return
        self._choices += choices[: max(0, MAX_CHOICES - len(self._choices))]
        self._tokens += 1
        self._last_s = self._clock()
        if self._first_s is None:
            self._first_s = self._last_s
        self._take(self._splitter.add(text))

    def flush(self) -> Effects:
        """Have the text that came since the last call written, as one piece; nothing if none came."""
        content = "".join(delta.content for delta in self._waiting)
        reasoning = "".join(delta.reasoning for delta in self._waiting)
        self._waiting.clear()
        return (Append(self.message.id, content, reasoning),) if content or reasoning else ()

    def written(self, piece: Append) -> None:
        """A piece is on disk, or cannot be written; `message` has it from now on."""
        if not self.has_ended:
            content, reasoning = self.message.content + piece.content, self.message.reasoning + piece.reasoning
            self.message = msgspec.structs.replace(self.message, content=content, reasoning=reasoning)

    def stop(self) -> Effects:
        """A person wants no more of it; what came stays."""
        match self._step:
            case _Step.ENDED:
                return ()
            case _Step.WRITING:
                self.goes_on = False  # Otherwise the end of the thought would begin the answer.
                return (StopAnswer(),)
            case _Step.ASKING_PERSON:
                return self.answer_overflow(False)
        return self.fail(tr("It was stopped before the model was asked."))

    def answer_now(self) -> Effects:
        """End the thought, to have the model answer with what there is: see `continuation`."""
        if not self.is_thinking or self.goes_on or self._step is not _Step.WRITING:
            return ()
        self.goes_on = True
        return (StopAnswer(),)

    # ------------------------------------------------------------------ the end

    def done(self, event: Done) -> Effects:
        """The model has ended the answer."""
        if self._step is not _Step.WRITING:
            return ()
        state: MessageState = "stopped" if event.stop_reason == "stopped" else "done"
        note = left_out_sentence() if self.message.cut is not None and not self._was_cut else ""
        timings = self._timings(
            prompt_tokens=event.prompt_tokens,
            cached_tokens=event.cached_tokens,
            generated_tokens=event.generated_tokens,
            prompt_seconds=_seconds(event.prompt_tokens - event.cached_tokens, event.prompt_tokens_per_second),
            generation_seconds=_seconds(event.generated_tokens, event.generation_tokens_per_second),
        )
        rest = self._end(state, note, timings, event.stop_reason)
        return (*rest, Finish(self.message, done=event))

    def fail(self, sentence: str) -> Effects:
        """The model cannot be asked, or the answer broke off; text that came is kept, with our own count of its time.

        A message with text is `interrupted`, one without `failed`.
        """
        if self.has_ended:
            return ()
        self._take(self._splitter.rest())
        if not any(self._content) and not any(self._reasoning):
            rest = self._end("failed", sentence, self.message.timings)
        else:
            timings = self._timings(
                generated_tokens=self._tokens, generation_seconds=_between(self._first_s, self._last_s)
            )
            note = tr("{sentence} What had come is kept.", sentence=sentence)
            rest = self._end("interrupted", note, timings if self._tokens else self.message.timings)
        return (*rest, Finish(self.message, failure=sentence))

    def _end(self, state: MessageState, note: str, timings: Timings | None, stop_reason: str = "") -> Effects:
        self._take(self._splitter.rest())
        rest: Effects = self.flush()
        if self._step is _Step.ASKING_PERSON:
            rest = (AskOverflow(""), *rest)
        self._step = _Step.ENDED
        self.message = msgspec.structs.replace(
            self.message,
            content="".join(self._content),
            reasoning="".join(self._reasoning),
            state=state,
            note=note,
            stop_reason=stop_reason,
            timings=timings,
            choices=tuple(self._choices),
        )
        return rest

    def _take(self, delta: Delta) -> None:
        if delta.content or delta.reasoning:
            self._reasoning.append(delta.reasoning)
            self._content.append(delta.content)
            self._waiting.append(delta)
        if self._splitter.has_thought and self._thought_s is None:
            self._thought_s = self._clock()

    def _timings(self, **counted: float | None) -> Timings:
        """Return counts with our own times, since the answer was asked for; of one that goes on, those of all of it."""
        thought_s = self._clock() if self.is_thinking else self._thought_s
        timings = Timings(
            first_token_seconds=_between(self._asked_s, self._first_s),
            thinking_seconds=None if self._had_thought else _between(self._first_s, thought_s),
        )
        return msgspec.structs.replace(timings, **counted).after(self.message.timings)


# ------------------------------------------------------------------ how an answer begins


def new_question(text: str, parent: str | None, attachments: Sequence[Attachment] = ()) -> Message:
    """Return a question that follows `parent`."""
    return Message(
        id=new_id(), role="user", content=text, parent=parent, attachments=tuple(attachments), created_ms=now_ms()
    )


def new_answer(chat: str, tree: MessageTree, options: AnswerOptions) -> AnswerRun:
    """Return the answer to the last message that is shown of `tree`, beside those that it has already."""
    message = Message(
        id=new_id(),
        role="assistant",
        content="",
        parent=tree.leaf,
        model=options.model,
        model_identity=options.model_identity,
        layout="" if options.layout is None else layout_words(options.layout),
        settings=changed_settings(options.sampling),
        state="writing",
        created_ms=now_ms(),
    )
    return AnswerRun(chat, add(tree, message), message, options)


def continued_answer(chat: str, tree: MessageTree, message: Message, options: AnswerOptions, begun: str) -> AnswerRun:
    """Return an answer of `tree` that goes on from `begun`."""
    writing = msgspec.structs.replace(message, state="writing", note="", stop_reason="")
    return AnswerRun(chat, changed(tree, writing), writing, options, begun=begun)


def layout_words(layout: Layout) -> str:
    """Return the devices with their layers, as it is kept with an answer: "CUDA0 0–30, CPU 31–39", or their shares."""
    if layout.split_mode in ("tensor", "row"):
        return share_words(layout)
    return ", ".join(
        f"{run.device} {run.first}–{run.last}" if run.last > run.first else f"{run.device} {run.first}"
        for run in layout.runs
    )


def loss_words(ending: RequestEnding) -> str:
    """Return why a request that did not end well has no answer, as a sentence."""
    match ending:
        case Cancelled():
            return tr("It was stopped before the model answered.")
        case Crashed():
            # Its own message is long; next to an answer it would push the words away.
            return tr("The engine ended in the middle of this answer.")
        case OutOfMemory() | Failed():
            return ending.message
    return ""


def _seconds(tokens: int, per_second: float) -> float | None:
    return tokens / per_second if per_second else None


def _between(begin_s: float | None, end_s: float | None) -> float | None:
    return None if begin_s is None or end_s is None else end_s - begin_s
