"""State machine of one answer, from its question to the complete message; it does no input or output itself.

A driver (window, command line, API server) creates an `AnswerRun` for each answer; several may run at once. The driver
calls one method of the run for each event. The method returns effects: commands that the driver executes in order, such
as restoring the KV state, counting tokens, asking a person, reading files, sending the request to the model, writing to
the database, finishing. An event that comes too late returns no effects. Each answer has exactly one `Finish`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto

import msgspec
from msgspec import Struct, field

from engine.base.errors import ChatError
from engine.base.language import tr
from engine.base.values import replace
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
    shift_sentence,
    shown_path,
    tokens_of,
)
from engine.chat.message import MAX_CHOICES, Message, MessageState, Timings, new_id, now_ms
from engine.chat.thinking import Delta, Splitter, ThinkTags, begun_answer
from engine.chat.tool_calls import CallDelta, Found, calls_with
from engine.chat.tools import NO_TOOLS, ToolUse
from engine.chat.tree import MessageTree, add, changed
from engine.planning.fit.shares import share_text
from engine.planning.layout.layout import Layout
from engine.planning.settings.sampling_settings import SamplingSettings
from engine.planning.settings.sampling_sources import changed_settings
from engine.runtime.protocol.messages import Counted, DraftStatistics, TokenChoice
from engine.runtime.protocol.requests import ChatMessage, CountTokens, Generate, TemplateInput
from engine.runtime.session.events import Cancelled, Crashed, Done, Failed, OutOfMemory, RequestEnding, Shifted


class AnswerOptions(Struct, frozen=True):
    """Settings of one answer. Later changes of the conversation or the model do not change them.

    `system`: the system prompt; empty if there is none.
    `template`: chat template of the conversation; empty for the model's own.
    `n_ctx`: context size in tokens; None if unknown.
    `model`, `model_identity`, `layout`: name, digest and layout of the model, stored with the message.
    `tools`: the tools that the model may call, with the chat template in use.
    """

    system: str = ""
    template: str = ""
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    overflow: Overflow = "drop"
    n_ctx: int | None = None
    model: str = ""
    model_identity: str = ""
    layout: Layout | None = None
    tools: ToolUse = NO_TOOLS


# ------------------------------------------------------------------ effects


class Restore(Struct, frozen=True):
    """Command to the driver of an `AnswerRun`: restore the saved KV state, if there is one, then call `restored`."""


class Count(Struct, frozen=True):
    """Command to the driver of an `AnswerRun`: send `request`, then call `counted`, or `fail` on an error."""

    request: CountTokens


class AskOverflow(Struct, frozen=True):
    """Command to the driver of an `AnswerRun`: ask a person whether to drop the oldest turns, then call
    `answer_overflow`.

    `sentence`: the question; if empty, the driver removes an earlier question from the screen.
    """

    sentence: str


class Notice(Struct, frozen=True):
    """Command to the driver of an `AnswerRun`: show `sentence` to the person.

    The answer continues without waiting for the person.
    """

    sentence: str


class ReadFiles(Struct, frozen=True):
    """Command to the driver of an `AnswerRun`: read attachments by their SHA-256, then call `files_read`."""

    names: tuple[str, ...]


class SendRequest(Struct, frozen=True):
    """Command to the driver of an `AnswerRun`: send `request` to the model.

    The driver then calls `token` for each piece of text, and once `done` or `fail` when the request has ended.
    """

    request: Generate


class StopAnswer(Struct, frozen=True):
    """Command to the driver of an `AnswerRun`: ask the model to stop.

    The driver still calls `done` or `fail` when the request has ended.
    """


class Append(Struct, frozen=True):
    """Command to the driver of an `AnswerRun`: store more text and tool calls of the message with the id
    `message`.

    The driver calls `written` when they are on disk or cannot be stored, and then shows them.
    """

    message: str
    content: str
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


class Finish(Struct, frozen=True):
    """Last command to the driver of an `AnswerRun`: store the complete message. The answer has ended.

    `done`: the model's final report; None if the answer failed.
    `failure`: a sentence on why the answer failed; empty if it did not fail.
    """

    message: Message
    done: Done | None = None
    failure: str = ""


Effect = Restore | Count | AskOverflow | Notice | ReadFiles | SendRequest | StopAnswer | Append | Finish
Effects = tuple[Effect, ...]


class _Step(Enum):
    """The event for which an `AnswerRun` waits."""

    RESTORING = auto()
    COUNTING = auto()
    WAITING_FOR_USER = auto()
    READING_FILES = auto()
    WRITING = auto()
    ENDED = auto()


class AnswerRun:
    """State machine that writes one answer. Not thread-safe.

    Its methods take events, and return effects (commands) for the driver.

    `chat`: id of the conversation.
    `tree`: messages of the conversation, including the new answer. The driver stores this tree before it calls `begin`.
    `message`: the answer with the text that is on disk; complete after the end.
    `begun`: beginning of the answer, from which the model continues; `message` already contains this text.
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
        # A regenerated answer begins with the cut of its newest version, so that the prompt and its cached prefix stay.
        message = replace(message, cut=cut_of_answer(tree, message.id, options.n_ctx))
        self.tree = changed(tree, message)
        self.message = message
        self.path = tree.path_to(message.parent)
        """The messages before the answer; the question is the last of them."""
        self.will_be_continued = False
        """Whether the model is being stopped only to end its thought (`answer_now`).

        A second `AnswerRun` then lets the model write the answer from the text `continuation`.
        """
        self.left_out = left_out_of(self.path, message.cut)
        """Ids of the messages that are left out of the prompt."""
        self._was_cut = cut_of_path(self.path, options.n_ctx) is not None
        self._overflow = options.overflow
        self._step = _Step.RESTORING
        self._counted: Counted | None = None
        self._splitter = Splitter()
        # A continued answer begins inside its thought or after it; the splitter has to know which.
        self._splitter.add(begun)
        self._had_thought = self._splitter.has_thought
        self._content, self._reasoning = [message.content], [message.reasoning]
        self._choices = list(message.choices)
        self._reader = options.tools.reader() if options.tools.tools else None
        self._calls: list[CallDelta] = []
        self._waiting: list[Delta] = []
        self._waiting_calls: list[CallDelta] = []
        self._tokens = 0
        self._shift_note = ""
        self._clock = clock
        self._asked_s = clock()
        self._first_s: float | None = None
        self._last_s: float | None = None
        self._thought_s: float | None = None

    # ------------------------------------------------------------------ what may be read

    @property
    def has_ended(self) -> bool:
        """Whether a method has returned `Finish`."""
        return self._step is _Step.ENDED

    @property
    def is_thinking(self) -> bool:
        """Whether the model is writing its thought."""
        return self._splitter.is_thinking

    @property
    def marks(self) -> ThinkTags | None:
        """The tags around the thought; None if there is no thought."""
        return self._splitter.marks

    @property
    def continuation(self) -> str | None:
        """The thought so far with its end tag, from which a second `AnswerRun` continues after `answer_now`.

        None if `answer_now` was not called, or if the model has not stopped yet.
        """
        if not self.will_be_continued or self.message.state != "stopped":
            return None
        return begun_answer(self.message.reasoning, "", self.marks)

    # ------------------------------------------------------------------ before the model is asked

    def begin(self) -> Effects:
        """Begin the answer. The driver calls this when it has stored `tree`, which contains the answer."""
        return (Restore(),)

    def restored(self) -> Effects:
        """Continue after `Restore`, whether or not a KV state was restored."""
        if self._step is not _Step.RESTORING:
            return ()
        # Counting takes a round trip to the child, so short prompts are sent at once.
        return self._count() if may_be_too_long(self._prompt, self.options.n_ctx) else self._send()

    def counted(self, counted: Counted) -> Effects:
        """Continue with the token counts of the prompt."""
        if self._step is not _Step.COUNTING:
            return ()
        return self._take_count(counted)

    def answer_overflow(self, leave_out: bool) -> Effects:
        """Continue with a person's answer to `AskOverflow`.

        `leave_out`: whether to drop the oldest turns; if false, the answer fails.
        """
        if self._step is not _Step.WAITING_FOR_USER:
            return ()
        assert self._counted is not None
        if leave_out:
            # The person has agreed, so a second count of this answer does not ask again.
            self._overflow = "drop"
            return (AskOverflow(""), *self._take_count(self._counted))
        return self.fail(
            tr(
                "The question was not sent, because the context is full. Drop the oldest messages, or load with a "
                "longer context."
            )
        )

    def files_read(self, files: Mapping[str, bytes]) -> Effects:
        """Continue with the bytes of the attachments by SHA-256.

        Files that are no longer stored are missing in `files`.
        """
        if self._step is not _Step.READING_FILES:
            return ()
        try:
            return self._ask(with_files(self._prompt, files))
        except ChatError as error:
            return self.fail(error.summary())

    @property
    def _prompt(self) -> tuple[ChatMessage, ...]:
        return chat_messages(self.options.system, shown_path(self.path, self.left_out), self.options.tools)

    def _count(self) -> Effects:
        self._step = _Step.COUNTING
        options = self.options
        definitions = TemplateInput(tools=options.tools.definitions)
        request = CountTokens(messages=self._prompt, template_input=definitions, template=options.template)
        return (Count(request),)

    def _take_count(self, counted: Counted) -> Effects:
        options = self.options
        asked = messages_by_id(options.system, shown_path(self.path, self.left_out), options.tools)
        tokens = tokens_of(asked, counted.messages, counted.prompt)
        # Without a reserve the answer would have no room in a context that the prompt just fits.
        reserve = answer_reserve(counted.n_ctx, options.sampling.max_tokens)
        room = counted.n_ctx - reserve - tokens.get(SYSTEM, 0)
        fit = choose(self.path, tokens, room, self._overflow, self.left_out)
        if fit.decision == "ask":
            self._step, self._counted = _Step.WAITING_FOR_USER, counted
            return (AskOverflow(fit.sentence()),)
        if fit.decision != "fits":
            sentence = fit.sentence()
            return self.fail(tr("{sentence} The context has {n_ctx} tokens.", sentence=sentence, n_ctx=counted.n_ctx))
        if not fit.newly:
            return self._send()
        # The sentence is shown only when the first turns are dropped, not for each later answer.
        is_new = self.message.cut is None
        self.left_out = frozenset(fit.left_out)
        cut = cut_that_leaves_out(self.path, fit.left_out, counted.n_ctx)
        self.message = replace(self.message, cut=cut)
        # A template may write other text around fewer messages, so the shorter prompt is counted again.
        return (*((Notice(left_out_sentence()),) if is_new else ()), *self._count())

    def _send(self) -> Effects:
        prompt = self._prompt
        # Bytes of images and sounds are read only now: a dropped turn needs none.
        if names := names_of_media(prompt):
            self._step = _Step.READING_FILES
            return (ReadFiles(names),)
        return self._ask(prompt)

    def _ask(self, prompt: Sequence[ChatMessage]) -> Effects:
        self._step = _Step.WRITING
        options = self.options
        request = answer_request(
            prompt, options.sampling, begun=self.begun, template=options.template, tools=options.tools
        )
        return (SendRequest(request),)

    # ------------------------------------------------------------------ while the model answers

    def token(self, text: str, choices: Sequence[TokenChoice] = ()) -> None:
        """Add a token's text to the answer. `flush` returns the effect that stores it.

        `choices`: for each token of `text`, the sampled token and the most probable tokens; empty if not requested.
        """
        if self._step is not _Step.WRITING:
            return
        # Only the first tokens keep their alternatives: each takes some hundred bytes in the database.
        self._choices += choices[: max(0, MAX_CHOICES - len(self._choices))]
        self._tokens += 1
        self._last_s = self._clock()
        if self._first_s is None:
            self._first_s = self._last_s
        self._take(self._splitter.add(text))

    def shifted(self, event: Shifted) -> Effects:
        """Handle a context shift (older tokens were dropped from the full context).

        Return a `Notice`. Its sentence also becomes part of the note below the answer.
        """
        if self._step is not _Step.WRITING:
            return ()
        self._shift_note = shift_sentence(event.kept_tokens)
        return (Notice(self._shift_note),)

    def flush(self) -> Effects:
        """Return the effect that stores all text since the last call; no effect if there is no text."""
        content = "".join(delta.content for delta in self._waiting)
        reasoning = "".join(delta.reasoning for delta in self._waiting)
        calls = tuple(self._waiting_calls)
        self._waiting.clear()
        self._waiting_calls.clear()
        return (Append(self.message.id, content, reasoning, calls),) if content or reasoning or calls else ()

    def written(self, piece: Append) -> None:
        """Add the text and calls of `piece` to `message`. The driver calls this after the attempt to store `piece`."""
        if not self.has_ended:
            content, reasoning = self.message.content + piece.content, self.message.reasoning + piece.reasoning
            calls = calls_with(self.message.calls, piece.calls)
            self.message = replace(self.message, content=content, reasoning=reasoning, calls=calls)

    def stop(self) -> Effects:
        """Stop the answer because a person asked for it. The text so far is kept."""
        match self._step:
            case _Step.ENDED:
                return ()
            case _Step.WRITING:
                # A person's stop wins over `answer_now`.
                self.will_be_continued = False  # Otherwise the answer would begin after the stopped thought.
                return (StopAnswer(),)
            case _Step.WAITING_FOR_USER:
                return self.answer_overflow(False)
        return self.fail(tr("Stopped before the model began to answer."))

    def answer_now(self) -> Effects:
        """Stop the model while it thinks, so that it answers at once ("Answer now").

        A second `AnswerRun` then continues from the text `continuation`.
        """
        if not self.is_thinking or self.will_be_continued or self._step is not _Step.WRITING:
            return ()
        self.will_be_continued = True
        return (StopAnswer(),)

    # ------------------------------------------------------------------ the end

    def done(self, event: Done) -> Effects:
        """End the answer with the model's final report: token counts, speeds and the reason why it stopped."""
        if self._step is not _Step.WRITING:
            return ()
        state: MessageState = "stopped" if event.stop_reason == "stopped" else "done"
        note = left_out_sentence() if self.message.cut is not None and not self._was_cut else ""
        # The child reports speeds; the message stores times, so that those of a continued answer can be added.
        timings = self._timings(
            draft=event.draft,
            prompt_tokens=event.prompt_tokens,
            cached_tokens=event.cached_tokens,
            generated_tokens=event.generated_tokens,
            prompt_seconds=_seconds(event.prompt_tokens - event.cached_tokens, event.prompt_tokens_per_second),
            generation_seconds=_seconds(event.generated_tokens, event.generation_tokens_per_second),
        )
        rest = self._end(state, note, timings, event.stop_reason)
        return (*rest, Finish(self.message, done=event))

    def fail(self, sentence: str) -> Effects:
        """End the answer with an error. The text so far is kept.

        The message becomes `interrupted` if it has text, else `failed`. Its times are measured by this run, because the
        model sent no report.

        `sentence`: the reason for people, stored in the message's note.
        """
        if self.has_ended:
            return ()
        # Text that might have begun a tag was held back; it is part of the answer after all.
        self._take_rest()
        if not (any(self._content) or any(self._reasoning) or self._calls):
            rest = self._end("failed", sentence, self.message.timings)
        else:
            timings = self._timings(
                generated_tokens=self._tokens, generation_seconds=_between(self._first_s, self._last_s)
            )
            note = tr("{sentence} The partial answer was kept.", sentence=sentence)
            rest = self._end("interrupted", note, timings if self._tokens else self.message.timings)
        return (*rest, Finish(self.message, failure=sentence))

    def _end(self, state: MessageState, note: str, timings: Timings | None, stop_reason: str = "") -> Effects:
        self._take_rest()
        calls = calls_with((), self._calls)
        rest: Effects = self.flush()
        # A banner that still asks about the full context has to go.
        if self._step is _Step.WAITING_FOR_USER:
            rest = (AskOverflow(""), *rest)
        self._step = _Step.ENDED
        self.message = replace(
            self.message,
            content="".join(self._content),
            reasoning="".join(self._reasoning),
            state=state,
            note=" ".join(filter(None, (self._shift_note, note))),
            stop_reason=stop_reason,
            timings=timings,
            choices=tuple(self._choices),
            calls=calls,
        )
        return rest

    def _take_rest(self) -> None:
        """Add the text that was held back because it could have begun a thought tag or a tool call.

        Called when the answer ends.
        """
        self._take(self._splitter.rest())
        if self._reader is not None:
            self._take_found(self._reader.end())

    def _take(self, delta: Delta) -> None:
        if self._reader is not None and delta.content:
            # Calls are read from the answer, as the API server does, and never from the thought.
            found = self._reader.add(delta.content)
            delta = Delta(delta.reasoning, "")
            self._take_found(found)
        self._take_text(delta)

    def _take_found(self, found: Found) -> None:
        self._calls += found.calls
        self._waiting_calls += found.calls
        self._take_text(Delta("", found.content))

    def _take_text(self, delta: Delta) -> None:
        if delta.content or delta.reasoning:
            self._reasoning.append(delta.reasoning)
            self._content.append(delta.content)
            self._waiting.append(delta)
        if self._splitter.has_thought and self._thought_s is None:
            self._thought_s = self._clock()

    def _timings(self, draft: DraftStatistics | None = None, **counted: float | None) -> Timings:
        """Return token counts and times of the whole answer, including the part that this run continues.

        `counted`: values of `Timings` from the model's report, by field. The other times are measured by this run.
        """
        thought_s = self._clock() if self.is_thinking else self._thought_s
        timings = Timings(
            first_token_seconds=_between(self._asked_s, self._first_s),
            thinking_seconds=None if self._had_thought else _between(self._first_s, thought_s),
            draft=draft,
        )
        return msgspec.structs.replace(timings, **counted).after(self.message.timings)


# ------------------------------------------------------------------ how an answer begins


def new_answer(chat: str, tree: MessageTree, options: AnswerOptions) -> AnswerRun:
    """Return an `AnswerRun` that writes a new answer to the last shown message of `tree`.

    `AnswerRun.tree` already contains the new answer, which is empty. If the message has an answer already, the new one
    becomes another version of it.

    `chat`: id of the conversation.
    """
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
    """Return an `AnswerRun` that continues an existing answer of `tree`.

    `chat`: id of the conversation.
    `message`: the existing answer.
    `begun`: text of this answer, from which the model continues.
    """
    # The model goes on after the text, and writes the calls anew.
    writing = replace(message, state="writing", note="", stop_reason="", calls=())
    return AnswerRun(chat, changed(tree, writing), writing, options, begun=begun)


def layout_words(layout: Layout) -> str:
    """Return a short text that describes a layout. It is stored with each answer.

    Example: "CUDA0 0–30, CPU 31–39". For a tensor or row split, the text lists the shares of the devices.
    """
    if layout.split_mode in ("tensor", "row"):
        return share_text(layout)
    return ", ".join(
        f"{run.device} {run.first}–{run.last}" if run.last > run.first else f"{run.device} {run.first}"
        for run in layout.runs
    )


def loss_text(ending: RequestEnding) -> str:
    """Return a sentence on why a model request ended without an answer; empty if the model answered."""
    match ending:
        case Cancelled():
            return tr("Stopped before the model answered.")
        case Crashed():
            # The event's own message is long. The load report shows it.
            return tr("The engine ended during this answer.")
        case OutOfMemory() | Failed():
            return ending.message
    return ""


def _seconds(tokens: int, per_second: float) -> float | None:
    return tokens / per_second if per_second else None


def _between(begin_s: float | None, end_s: float | None) -> float | None:
    return None if begin_s is None or end_s is None else end_s - begin_s
