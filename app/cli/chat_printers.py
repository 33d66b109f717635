"""Output of `chat`: events as JSON lines for programs, or text for people."""

from __future__ import annotations

import sys

import msgspec

from app.cli.output import print_event, print_line, print_stderr, print_text
from app.cli.printers import JsonPrinter, TextPrinter
from engine.base.texts import escape
from engine.base.values import replace
from engine.chat.message import Message
from engine.chat.tools import pretty_arguments
from engine.runtime.protocol.messages import DraftStatistics
from engine.runtime.protocol.requests import ToolCall
from engine.runtime.session.drafts import draft_words
from engine.runtime.session.events import Done, Event, Shifted

REPETITION_SENTENCE = (
    "The answer was stopped because it kept repeating itself. --repeat-penalty 1.1 or a higher --temperature helps; "
    "--repetition continue lets such answers go on."
)


class Talking(Event, frozen=True, kw_only=True, tag="conversation"):
    """Event at the start of a chat, with the conversation's id and title."""

    id: str
    title: str


class Thinking(Event, frozen=True, kw_only=True, tag="thinking"):
    """Event with a piece of the reasoning before an answer."""

    text: str


class Spoken(Event, frozen=True, kw_only=True, tag="token"):
    """Event with a piece of an answer."""

    text: str


class Called(Event, frozen=True, kw_only=True, tag="tool_call"):
    """Event of a tool call by the model. Its result is then read as a line of standard input.

    `id`: id of the call. `name`: name of the tool. `arguments`: a JSON object, as text.
    """

    id: str
    name: str
    arguments: str


class Notice(Event, frozen=True, kw_only=True, tag="notice"):
    """Event with a message for the user."""

    message: str


class ChatEnded(Event, frozen=True, kw_only=True, tag="done"):
    """Event at the end of an answer.

    `prompt_tokens`, `cached_tokens`, `generated_tokens`: numbers of tokens.
    `stop_reason`: why the answer ended.
    `message`: id of the answer's message.
    `replaced`: the reason why the model's chat template was not used; absent if the template was used.
    `dropped_tokens`: number of tokens that context shifts removed; absent if there were none.
    `draft`: statistics of speculative decoding, such as the number of accepted tokens; absent if the loaded model has
    no draft.
    """

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    prompt_tokens_per_second: float
    generation_tokens_per_second: float
    stop_reason: str
    message: str
    replaced: str | msgspec.UnsetType = msgspec.UNSET
    dropped_tokens: int | msgspec.UnsetType = msgspec.UNSET
    draft: DraftStatistics | msgspec.UnsetType = msgspec.UNSET


class JsonChat:
    """Prints the events of a chat as JSON, one on each line."""

    def __init__(self) -> None:
        self.load = JsonPrinter()

    def begin(self, conversation: str, title: str) -> None:
        print_event(Talking(id=conversation, title=title))

    def prompt(self) -> None:
        """Print nothing: programs need no prompt."""

    def print_delta(self, reasoning: str, content: str) -> None:
        if reasoning:
            print_event(Thinking(text=reasoning))
        if content:
            print_event(Spoken(text=content))

    def prompt_result(self, call: ToolCall) -> None:
        """Print nothing: programs need no prompt for the result of a tool call."""

    def notice(self, sentence: str) -> None:
        print_event(Notice(message=sentence))

    def shifted(self, event: Shifted) -> None:
        print_event(replace(event, request=None))

    def done(self, done: Done, message: Message) -> None:
        for call in message.calls:
            print_event(Called(id=call.id, name=call.name, arguments=call.arguments))
        values = {name: getattr(done, name) for name in ChatEnded.__struct_fields__ if name != "message"}
        # msgspec leaves fields out that are UNSET.
        values["replaced"] = done.replaced or msgspec.UNSET
        values["dropped_tokens"] = done.dropped_tokens or msgspec.UNSET
        values["draft"] = done.draft or msgspec.UNSET
        print_line(msgspec.json.encode(ChatEnded(message=message.id, **values)).decode())


class TextChat:
    """Prints answers on standard output, and all other text on standard error.

    Reasoning is printed on a terminal only.
    """

    def __init__(self) -> None:
        self.load = TextPrinter()
        self._text_on_terminal = sys.stdout.isatty()
        # Reasoning goes to standard error and the answer to standard output: readable together on a terminal only.
        self._shows_reasoning = self._text_on_terminal and sys.stderr.isatty()
        self._asks = sys.stdin.isatty()
        self._thinks = False
        # Messages about templates that were printed: they are the same after each answer.
        self._replaced: set[str] = set()

    def begin(self, conversation: str, title: str) -> None:
        print_stderr(f"conversation {conversation}{f': {title}' if title else ''}")

    def prompt(self) -> None:
        if self._asks:
            print_stderr("> ", end="")

    def print_delta(self, reasoning: str, content: str) -> None:
        if reasoning and self._shows_reasoning:
            print_stderr(f"{'' if self._thinks else 'thinking: '}{reasoning}", end="")
            self._thinks = True
        if content:
            if self._thinks:
                print_stderr("")
            self._thinks = False
            # Control characters in an answer could steer a terminal. A file or a pipe gets the text unchanged.
            print_text(escape(content, keep_lines=True) if self._text_on_terminal else content)

    def prompt_result(self, call: ToolCall) -> None:
        if self._asks:
            print_stderr(f"result of {call.name} (/skip: none)> ", end="")

    def notice(self, sentence: str) -> None:
        print_stderr(sentence)

    def shifted(self, _event: Shifted) -> None:
        """Print nothing: a notice about the context shift follows."""

    def done(self, done: Done, message: Message) -> None:
        print_line("")
        for call in message.calls:
            print_line(f"call of {call.name}: {' '.join(pretty_arguments(call).split())}")
        cached = f", {done.cached_tokens} of {done.prompt_tokens} tokens were cached" if done.cached_tokens else ""
        print_stderr(
            f"{done.generated_tokens} tokens, {done.generation_tokens_per_second:.1f} tokens/s; "
            f"prompt {done.prompt_tokens_per_second:.1f} tokens/s{cached}"
        )
        if done.stop_reason == "repetition":
            print_stderr(REPETITION_SENTENCE)
        for words in draft_words(done.draft):
            print_stderr(words)
        if done.replaced and done.replaced not in self._replaced:
            self._replaced.add(done.replaced)
            print_stderr(done.replaced)


ChatPrinter = JsonChat | TextChat
