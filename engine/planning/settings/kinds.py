"""Kinds of values that a setting may have: how each is read from a file, checked, typed by a person, and written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.base.json_file import JsonObject
from engine.base.language import tr
from engine.planning.settings.context_settings import AUTO

Value = int | str | bool | None


@dataclass(frozen=True, slots=True)
class LeftOpen:
    """A number that somebody else is to decide.

    `kept`: its value in the settings. `written`: its value in a file, null or a word. `word`: what a person types.
    `or_empty`: an empty field of a form means the same.
    """

    kept: int | None
    written: str | None
    word: str = AUTO
    or_empty: bool = False

    def is_typed(self, text: str) -> bool:
        """Return whether a person left the number open."""
        return text.strip() == self.word or (self.or_empty and not text.strip())


@dataclass(frozen=True, slots=True)
class WholeNumber:
    """A number from `low` to `high`, counted in `unit` (empty: it counts nothing).

    `step`: the engine rounds it up to a multiple of this. `left_open` None: it has to be a number.
    """

    low: int
    high: int
    unit: str = "tokens"
    step: int = 1
    left_open: LeftOpen | None = None

    @property
    def placeholder(self) -> str:
        """What stands for a value in a usage line."""
        return "N"

    @property
    def allowed(self) -> str:
        """What may be typed, in words."""
        numbers = tr("{low} to {high}", low=self.low, high=self.high)
        return (
            numbers if self.left_open is None else tr("{auto}, or {numbers}", auto=self.left_open.word, numbers=numbers)
        )

    def read(self, item: JsonObject, key: str) -> Value:
        """Return what a file says under `key`; refuses through `item`."""
        if self.left_open is None:
            return item.integer(key, self.low, self.high)
        if self.left_open.written is None:
            return item.nullable(key, lambda k: item.integer(k, self.low, self.high), self.left_open.kept)
        if item.is_text(key, self.left_open.written):
            return self.left_open.kept
        return item.integer(key, self.low, self.high)

    def written(self, value: Value) -> Value:
        """Return `value` as a file has it."""
        is_open = self.left_open is not None and value == self.left_open.kept
        return self.left_open.written if is_open and self.left_open is not None else value

    def checked(self, value: object) -> int | None:
        """Return a value of a file; raises as `Real.checked` does."""
        if value is None and self.left_open is not None and self.left_open.written is None:
            return self.left_open.kept
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(tr("this has to be a whole number, {allowed}", allowed=self.allowed))
        if not self.low <= value <= self.high:
            raise ValueError(tr("{value} is outside of {allowed}", value=str(value)[:40], allowed=self.allowed))
        return value

    def typed(self, text: str) -> int | None:
        """Return what a person typed.

        Raises:
            ValueError: one sentence without its full stop.
        """
        if self.left_open is not None and self.left_open.is_typed(text):
            return self.left_open.kept
        try:
            number = int(text)
        except ValueError:
            number = self.low - 1
        if number < self.low:
            words = "" if self.left_open is None else tr(", nor {auto}", auto=self.left_open.word)
            raise ValueError(
                tr('"{text}" is not a whole number above {low}{words}', text=text[:40], low=self.low - 1, words=words)
            )
        if number > self.high and not self.unit:
            raise ValueError(tr("{value} is outside of {allowed}", value=str(number)[:40], allowed=self.allowed))
        if number > self.high:
            raise ValueError(
                tr(
                    "{number} {unit} are too many; the engine takes up to {high}",
                    number=number,
                    unit=self.unit,
                    high=self.high,
                )
            )
        return number

    def text_of(self, value: object) -> str:
        """Return what a person would type for `value`."""
        return self.left_open.word if self.left_open is not None and value == self.left_open.kept else str(value)


class _Words:
    """What settings have in common whose values are typed as one of a few words."""

    __slots__ = ()
    words: tuple[str, ...]

    @property
    def allowed(self) -> str:
        """What may be typed, in words."""
        return ", ".join(self.words)

    def written(self, value: Value) -> Value:
        """Return `value` as a file has it."""
        return value

    def _typed_word(self, text: str) -> str:
        if text not in self.words:
            raise ValueError(tr('"{text}" is not one of {allowed}', text=text, allowed=self.allowed))
        return text


@dataclass(frozen=True, slots=True)
class Choice(_Words):
    """One of several words; `placeholder` stands for them in a usage line."""

    words: tuple[str, ...]
    placeholder: str = "M"

    def read(self, item: JsonObject, key: str) -> str:
        """Return what a file says under `key`; refuses through `item`."""
        return item.choice(key, self.words)

    def checked(self, value: object) -> str:
        """Return a value of a file; raises as `Real.checked` does."""
        if not isinstance(value, str) or value not in self.words:
            raise ValueError(tr("this has to be one of {allowed}", allowed=self.allowed))
        return value

    def typed(self, text: str) -> str:
        """Return what a person typed; raises as `WholeNumber.typed` does."""
        return self._typed_word(text)

    def text_of(self, value: object) -> str:
        """Return what a person would type for `value`."""
        return str(value)


@dataclass(frozen=True, slots=True)
class Switch(_Words):
    """On or off: true or false in a file. `with_auto`: it may also be left open."""

    with_auto: bool = False
    placeholder: str = "M"

    @property
    def words(self) -> tuple[str, ...]:  # type: ignore[override]
        """The words that may be typed."""
        return (AUTO, "on", "off") if self.with_auto else ("on", "off")

    def read(self, item: JsonObject, key: str) -> Value:
        """Return what a file says under `key`; refuses through `item`."""
        return AUTO if self.with_auto and item.is_text(key, AUTO) else item.flag(key)

    def typed(self, text: str) -> Value:
        """Return what a person typed; raises as `WholeNumber.typed` does."""
        return AUTO if self._typed_word(text) == AUTO else text == "on"

    def text_of(self, value: Value) -> str:
        """Return what a person would type for `value`."""
        return AUTO if value == AUTO else "on" if value else "off"


Kind = WholeNumber | Choice | Switch


SamplingValue = float | int | str | tuple[str, ...] | None
MAX_TEXTS = 64
MAX_TEXT_CHARACTERS = 1 << 16
_ESCAPES = {"\\n": "\n", "\\t": "\t", "\\r": "\r", "\\\\": "\\", "\\s": " "}


@dataclass(frozen=True, slots=True)
class Real:
    """A number from `low` to `high`; a form moves it by `step`."""

    low: float
    high: float
    step: float

    @property
    def allowed(self) -> str:
        """What may be typed, in words."""
        return tr("{low:g} to {high:g}", low=self.low, high=self.high)

    def checked(self, value: object) -> SamplingValue:
        """Return a value of a file.

        Raises:
            ValueError: one sentence without its full stop.
        """
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(tr("this has to be a number, {allowed}", allowed=self.allowed))
        if not self.low <= value <= self.high:
            raise ValueError(tr("{value:g} is outside of {allowed}", value=value, allowed=self.allowed))
        return float(value)

    def typed(self, text: str) -> SamplingValue:
        """Return what a person typed; raises as `checked` does."""
        try:
            number = float(text.replace(",", "."))
        except ValueError:
            raise ValueError(tr('"{text}" is not a number', text=text[:40])) from None
        return self.checked(number)

    def text_of(self, value: SamplingValue) -> str:
        """Return what a person would type for `value`."""
        return f"{value:g}" if isinstance(value, int | float) else ""


@dataclass(frozen=True, slots=True)
class Texts:
    """Several texts, none of them empty. A person types one a line, a newline in it as `\\n`."""

    allowed: str = tr("texts, one a line")

    def checked(self, value: object) -> SamplingValue:
        """Return a value of a file; raises as `Real.checked` does."""
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ValueError(tr("this has to be a list of texts"))
        if len(value) > MAX_TEXTS:
            raise ValueError(
                tr("these are {count} texts, and {max_texts} are the most", count=len(value), max_texts=MAX_TEXTS)
            )
        return tuple(str(_checked_text(text, may_be_empty=False)) for text in value)

    def typed(self, text: str) -> SamplingValue:
        """Return what a person typed; raises as `Real.checked` does."""
        return self.checked([_unescaped(line) for line in text.splitlines() if line])

    def text_of(self, value: SamplingValue) -> str:
        """Return what a person would type for `value`."""
        return "\n".join(_escaped(text) for text in value) if isinstance(value, tuple) else ""


@dataclass(frozen=True, slots=True)
class Text:
    """A text of any length that is sensible."""

    allowed: str = "text"

    def checked(self, value: object) -> SamplingValue:
        """Return a value of a file; raises as `Real.checked` does."""
        return _checked_text(value, may_be_empty=True)

    def typed(self, text: str) -> SamplingValue:
        """Return what a person typed; raises as `Real.checked` does."""
        return self.checked(text)

    def text_of(self, value: SamplingValue) -> str:
        """Return what a person would type for `value`."""
        return str(value)


SamplingKind = Real | WholeNumber | Choice | Texts | Text


def _checked_text(value: object, *, may_be_empty: bool) -> str:
    if not isinstance(value, str):
        raise ValueError(tr("this has to be text"))
    if not value and not may_be_empty:
        raise ValueError(tr("a text is empty; leave it out"))
    if len(value) > MAX_TEXT_CHARACTERS:
        raise ValueError(
            tr(
                "a text of {count} characters is longer than {max_text_characters}",
                count=len(value),
                max_text_characters=MAX_TEXT_CHARACTERS,
            )
        )
    if "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ValueError(tr("a text has a character in it that no text has"))
    return value


def _unescaped(line: str) -> str:
    found, place = "", 0
    while place < len(line):
        pair = line[place : place + 2]
        found += _ESCAPES.get(pair, line[place])
        place += 2 if pair in _ESCAPES else 1
    return found


def _escaped(text: str) -> str:
    for word, letter in (("\\\\", "\\"), ("\\n", "\n"), ("\\t", "\t"), ("\\r", "\r")):
        text = text.replace(letter, word)
    return text
