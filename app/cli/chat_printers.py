"""How `chat` shows what is said: JSON lines for programs, or text for people."""

from __future__ import annotations

import sys

import msgspec

from app.cli.output import print_event, print_line, print_text, say
from app.cli.printers import JsonPrinter, TextPrinter
from engine.base.texts import escape
from engine.chat.message import Message
from engine.runtime.session.events import Done, Event


class Talking(Event, frozen=True, kw_only=True, tag="conversation"):
    """Which conversation it is, before its first answer."""

    id: str
    title: str


class Thinking(Event, frozen=True, kw_only=True, tag="thinking"):
    """What a model thinks before its answer."""

    text: str


class Spoken(Event, frozen=True, kw_only=True, tag="token"):
    """More of an answer."""

    text: str


class Notice(Event, frozen=True, kw_only=True, tag="notice"):
    """Something that a person is told, which ends nothing."""

    message: str


class Answered(Event, frozen=True, kw_only=True, tag="done"):
    """The end of an answer; `message` is its id. `replaced`: why the chat template was not used, where it was not."""

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    prompt_tokens_per_second: float
    generation_tokens_per_second: float
    stop_reason: str
    message: str
    replaced: str | msgspec.UnsetType = msgspec.UNSET


class JsonChat:
    """One event a line."""

    def __init__(self) -> None:
        self.load = JsonPrinter()

    def begin(self, conversation: str, title: str) -> None:
        print_event(Talking(id=conversation, title=title))

    def prompt(self) -> None:
        """Programs need none."""

    def said(self, reasoning: str, content: str) -> None:
        if reasoning:
            print_event(Thinking(text=reasoning))
        if content:
            print_event(Spoken(text=content))

    def notice(self, sentence: str) -> None:
        print_event(Notice(message=sentence))

    def done(self, done: Done, message: Message) -> None:
        values = {name: getattr(done, name) for name in Answered.__struct_fields__ if name != "message"}
        values["replaced"] = done.replaced or msgspec.UNSET
        print_line(msgspec.json.encode(Answered(message=message.id, **values)).decode())


class TextChat:
    """Answers on standard output, all else on standard error; thoughts there too, on a terminal only."""

    def __init__(self) -> None:
        self.load = TextPrinter()
        self._on_terminal = sys.stdout.isatty() and sys.stderr.isatty()
        self._asks = sys.stdin.isatty()
        self._thinks = False
        self._replaced: set[str] = set()
        """What was said of templates: it is the same after each answer."""

    def begin(self, conversation: str, title: str) -> None:
        say(f"conversation {conversation}{f': {title}' if title else ''}")

    def prompt(self) -> None:
        if self._asks:
            say("> ", end="")

    def said(self, reasoning: str, content: str) -> None:
        if reasoning and self._on_terminal:
            say(f"{'' if self._thinks else 'thinking: '}{reasoning}", end="")
            self._thinks = True
        if content:
            if self._thinks:
                say("")
            self._thinks = False
            print_text(escape(content, keep_lines=True) if self._on_terminal else content)

    def notice(self, sentence: str) -> None:
        say(sentence)

    def done(self, done: Done, message: Message) -> None:
        print_line("")
        cached = f", {done.cached_tokens} of {done.prompt_tokens} tokens were cached" if done.cached_tokens else ""
        say(
            f"{done.generated_tokens} tokens, {done.generation_tokens_per_second:.1f} tokens/s; "
            f"prompt {done.prompt_tokens_per_second:.1f} tokens/s{cached}"
        )
        if done.replaced and done.replaced not in self._replaced:
            self._replaced.add(done.replaced)
            say(done.replaced)


ChatPrinter = JsonChat | TextChat
