"""Kinds of values that a setting may have: how each is read from a file, typed by a person, and written."""

from __future__ import annotations

from dataclasses import dataclass

from engine.json_file import JsonObject
from engine.language import tr
from engine.settings.context_settings import AUTO

Value = int | str | bool | None


@dataclass(frozen=True, slots=True)
class LeftOpen:
    """How a number that somebody else is to decide is kept in `ContextSettings` and `written` in a file: as the word
    auto, or as null. A person types auto either way."""

    kept: int | None
    written: str | None


@dataclass(frozen=True, slots=True)
class WholeNumber:
    """A number from `low` to `high`, counted in `unit`; `step`: the engine rounds it up to a multiple of this.

    `left_open` None: it has to be a number.
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
        return numbers if self.left_open is None else tr("{auto}, or {numbers}", auto=AUTO, numbers=numbers)

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

    def typed(self, text: str) -> Value:
        """Return what a person typed.

        Raises:
            ValueError: one sentence without its full stop.
        """
        if self.left_open is not None and text == AUTO:
            return self.left_open.kept
        try:
            number = int(text)
        except ValueError:
            number = self.low - 1
        if number < self.low:
            words = "" if self.left_open is None else tr(", nor {auto}", auto=AUTO)
            raise ValueError(
                tr('"{text}" is not a whole number above {low}{words}', text=text, low=self.low - 1, words=words)
            )
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

    def text_of(self, value: Value) -> str:
        """Return what a person would type for `value`."""
        return AUTO if self.left_open is not None and value == self.left_open.kept else str(value)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several words; `placeholder` stands for them in a usage line."""

    words: tuple[str, ...]
    placeholder: str = "M"

    @property
    def allowed(self) -> str:
        """What may be typed, in words."""
        return ", ".join(self.words)

    def read(self, item: JsonObject, key: str) -> Value:
        """Return what a file says under `key`; refuses through `item`."""
        return item.choice(key, self.words)

    def written(self, value: Value) -> Value:
        """Return `value` as a file has it."""
        return value

    def typed(self, text: str) -> Value:
        """Return what a person typed; raises as `WholeNumber.typed` does."""
        if text not in self.words:
            raise ValueError(tr('"{text}" is not one of {allowed}', text=text, allowed=self.allowed))
        return text

    def text_of(self, value: Value) -> str:
        """Return what a person would type for `value`."""
        return str(value)


@dataclass(frozen=True, slots=True)
class Switch:
    """On or off: true or false in a file. `with_auto`: it may also be left open."""

    with_auto: bool = False

    @property
    def placeholder(self) -> str:
        """What stands for a value in a usage line."""
        return "M"

    @property
    def words(self) -> tuple[str, ...]:
        return (AUTO, "on", "off") if self.with_auto else ("on", "off")

    @property
    def allowed(self) -> str:
        """What may be typed, in words."""
        return ", ".join(self.words)

    def read(self, item: JsonObject, key: str) -> Value:
        """Return what a file says under `key`; refuses through `item`."""
        return AUTO if self.with_auto and item.is_text(key, AUTO) else item.flag(key)

    def written(self, value: Value) -> Value:
        """Return `value` as a file has it."""
        return value

    def typed(self, text: str) -> Value:
        """Return what a person typed; raises as `WholeNumber.typed` does."""
        if text not in self.words:
            raise ValueError(tr('"{text}" is not one of {allowed}', text=text, allowed=self.allowed))
        return AUTO if text == AUTO else text == "on"

    def text_of(self, value: Value) -> str:
        """Return what a person would type for `value`."""
        return AUTO if value == AUTO else "on" if value else "off"


Kind = WholeNumber | Choice | Switch
