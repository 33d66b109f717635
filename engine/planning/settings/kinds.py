"""Types of setting values ("kinds"). Each parses and checks a value from a file or from a user's input, and formats it.

Load settings have a `Kind`, samplers a `SamplingKind`. `WholeNumber`, `Real` and `Choice` are used for both.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence

from msgspec import Struct

from engine.base.json_file import JsonObject
from engine.base.language import tr
from engine.base.units import parse_count
from engine.planning.settings.context_settings import AUTO

Value = int | float | str | bool | None
"""Value of a load setting. None means that the user chose no number, as for "auto"."""


class OpenValue(Struct, frozen=True):
    """The state of a number setting in which the user chose no number, such as "auto" or "unlimited".

    `kept`: value that stands for this state in `ContextSettings` or `SamplingSettings`.
    `written`: value that stands for it in a file: a word, or None for null.
    `word`: word for it that the user types.
    `or_empty`: whether an empty field of a form also stands for this state.
    """

    kept: int | None
    written: str | None
    word: str = AUTO
    or_empty: bool = False

    def is_typed(self, text: str) -> bool:
        """Return whether `text`, which a user typed, means that no number is chosen, such as "auto"."""
        return text.strip() == self.word or (self.or_empty and not text.strip())


class WholeNumber(Struct, frozen=True):
    """An integer setting from `low` to `high`, both included.

    `unit`: plural noun, such as "tokens"; empty for a number without a unit, such as a seed.
    `step`: llama.cpp rounds the number up to a multiple of this.
    `open_value`: the state without a number, such as "auto"; None if a number is required.
    """

    low: int
    high: int
    unit: str = "tokens"
    step: int = 1
    open_value: OpenValue | None = None

    @property
    def placeholder(self) -> str:
        """Return the placeholder for the value in a command line's usage line."""
        return "N"

    @property
    def allowed(self) -> str:
        """Return the allowed values as a phrase for the user."""
        numbers = tr("{low} to {high}", low=self.low, high=self.high)
        return (
            numbers
            if self.open_value is None
            else tr("{auto}, or {numbers}", auto=self.open_value.word, numbers=numbers)
        )

    def read(self, item: JsonObject, key: str) -> Value:
        """Return the value of `key` in a JSON object.

        Raises:
            EngineError: the value is invalid. For a layout file, the error is a `LayoutError`; each kind of file has
                its own subclass.
        """
        if self.open_value is None:
            return item.integer(key, self.low, self.high)
        if self.open_value.written is None:
            return item.nullable(key, lambda k: item.integer(k, self.low, self.high), self.open_value.kept)
        if item.is_text(key, self.open_value.written):
            return self.open_value.kept
        return item.integer(key, self.low, self.high)

    def written(self, value: Value) -> Value:
        """Return the JSON value for `value`: the number, or the word or null that means "no number" (`open_value`)."""
        is_open = self.open_value is not None and value == self.open_value.kept
        return self.open_value.written if is_open and self.open_value is not None else value

    def checked(self, value: object) -> int | None:
        """Check the JSON value `value` and return it as a setting.

        Raises:
            ValueError: the value is not allowed; the message is for the user, without its full stop.
        """
        if value is None and self.open_value is not None and self.open_value.written is None:
            return self.open_value.kept
        # bool is a subclass of int in Python, and JSON has both.
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(tr("the value must be a whole number ({allowed})", allowed=self.allowed))
        if not self.low <= value <= self.high:
            raise ValueError(
                tr("the value {value} is outside of {allowed}", value=str(value)[:40], allowed=self.allowed)
            )
        return value

    def typed(self, text: str) -> int | None:
        """Parse `text`, which a user typed, and return the value.

        Raises:
            ValueError: the value is not allowed; the message is for the user, without its full stop.
        """
        if self.open_value is not None and self.open_value.is_typed(text):
            return self.open_value.kept
        try:
            # Counts may be typed as "8k"; what counts nothing, such as a seed, may not. -1 is for int().
            number = parse_count(text) if self.unit and "-" not in text else int(text)
        except ValueError:
            # A number below the range, so that the next check reports both faults in one sentence.
            number = self.low - 1
        if number < self.low:
            words = "" if self.open_value is None else tr(", or {auto}", auto=self.open_value.word)
            raise ValueError(
                tr('"{text}" is not a whole number above {low}{words}', text=text[:40], low=self.low - 1, words=words)
            )
        # A number without a unit, such as a seed, counts nothing, so "too many" would be wrong.
        if number > self.high and not self.unit:
            raise ValueError(
                tr("the value {value} is outside of {allowed}", value=str(number)[:40], allowed=self.allowed)
            )
        if number > self.high:
            raise ValueError(
                tr(
                    "{number} {unit} are too many; the maximum is {high}",
                    number=number,
                    unit=self.unit,
                    high=self.high,
                )
            )
        return number

    def text_of(self, value: object) -> str:
        """Return the text that a user would type for `value`."""
        return self.open_value.word if self.open_value is not None and value == self.open_value.kept else str(value)


class Real(Struct, frozen=True):
    """A float setting from `low` to `high`, both included.

    `step`: step of the spin box in a form.
    `low_word`: text that the spin box shows in place of the number `low`; empty if it shows the number.
    """

    low: float
    high: float
    step: float
    low_word: str = ""

    @property
    def placeholder(self) -> str:
        """Return the placeholder for the value in a command line's usage line."""
        return "X"

    @property
    def allowed(self) -> str:
        """Return the allowed values as a phrase for the user."""
        return tr("{low:g} to {high:g}", low=self.low, high=self.high)

    def read(self, item: JsonObject, key: str) -> float:
        """Return the value of `key` in a JSON object.

        Raises:
            EngineError: the value is invalid. For a layout file, the error is a `LayoutError`; each kind of file has
                its own subclass.
        """
        number = item.number(key)
        if not self.low <= number <= self.high:
            item.refuse(tr("the value {value:g} is outside of {allowed}", value=number, allowed=self.allowed), key)
        return number

    def written(self, value: Value) -> Value:
        """Return the JSON value for `value`, which is `value` itself."""
        return value

    def checked(self, value: object) -> float:
        """Check the JSON or GGUF value `value` and return it as a setting.

        Raises:
            ValueError: the value is not allowed; the message is for the user, without its full stop.
        """
        # Metadata of a model file may hold NaN or infinity; an integer may be too large for a float.
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            raise ValueError(tr("the value must be a number ({allowed})", allowed=self.allowed))
        if not self.low <= value <= self.high:
            raise ValueError(tr("the value {value:g} is outside of {allowed}", value=value, allowed=self.allowed))
        return float(value)

    def typed(self, text: str) -> float:
        """Parse `text`, which a user typed, and return the value.

        Raises:
            ValueError: the value is not allowed; the message is for the user, without its full stop.
        """
        try:
            # People who write decimals with a comma type one here too; no value has a thousands separator.
            number = float(text.replace(",", "."))
        except ValueError:
            raise ValueError(tr('"{text}" is not a number', text=text[:40])) from None
        return self.checked(number)

    def text_of(self, value: object) -> str:
        """Return the text that a user would type for `value`."""
        if not isinstance(value, int | float):
            return ""
        # Values of GGUF files are 32-bit floats: 0.949999988 is 0.95 there.
        short = f"{value:g}"
        return short if _as_float32(float(short)) == _as_float32(value) and "e" not in short else f"{value:.9g}"


def _as_float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


class _Words:
    """Base class of settings for which a user types one of a few words."""

    __slots__ = ()
    words: tuple[str, ...]

    @property
    def allowed(self) -> str:
        """Return the allowed words as a phrase for the user."""
        return ", ".join(self.words)

    def written(self, value: Value) -> Value:
        """Return the JSON value for `value`, which is `value` itself."""
        return value

    def _typed_word(self, text: str) -> str:
        if text not in self.words:
            raise ValueError(tr('"{text}" is not one of {allowed}', text=text, allowed=self.allowed))
        return text


class Choice(Struct, _Words, frozen=True):
    """A setting that is one of several words. `placeholder`: name for these words in a command line's usage line."""

    words: tuple[str, ...]
    placeholder: str = "M"

    def read(self, item: JsonObject, key: str) -> str:
        """Return the value of `key` in a JSON object.

        Raises:
            EngineError: the value is invalid. For a layout file, the error is a `LayoutError`; each kind of file has
                its own subclass.
        """
        return item.choice(key, self.words)

    def checked(self, value: object) -> str:
        """Check the JSON or GGUF value `value` and return it as a setting.

        Raises:
            ValueError: the value is not an allowed word; the message is for the user, without its full stop.
        """
        if not isinstance(value, str) or value not in self.words:
            raise ValueError(tr("the value must be one of {allowed}", allowed=self.allowed))
        return value

    def typed(self, text: str) -> str:
        """Parse `text`, which a user typed, and return the value.

        Raises:
            ValueError: the text is not an allowed word; the message is for the user, without its full stop.
        """
        return self._typed_word(text)

    def text_of(self, value: object) -> str:
        """Return the text that a user would type for `value`."""
        return str(value)


class Switch(Struct, _Words, frozen=True):
    """A setting that is on or off, true or false in JSON. `with_auto`: whether "auto" is also allowed."""

    with_auto: bool = False
    placeholder: str = "M"

    @property
    def words(self) -> tuple[str, ...]:  # type: ignore[override]
        """Return the words that a user may type."""
        return (AUTO, "on", "off") if self.with_auto else ("on", "off")

    def read(self, item: JsonObject, key: str) -> Value:
        """Return the value of `key` in a JSON object.

        Raises:
            EngineError: the value is invalid. For a layout file, the error is a `LayoutError`; each kind of file has
                its own subclass.
        """
        return AUTO if self.with_auto and item.is_text(key, AUTO) else item.flag(key)

    def typed(self, text: str) -> Value:
        """Parse `text`, which a user typed, and return the value.

        Raises:
            ValueError: the text is not an allowed word; the message is for the user, without its full stop.
        """
        return AUTO if self._typed_word(text) == AUTO else text == "on"

    def text_of(self, value: Value) -> str:
        """Return the text that a user would type for `value`."""
        return AUTO if value == AUTO else "on" if value else "off"


Kind = WholeNumber | Real | Choice | Switch
"""Types of load settings. Each also needs an input widget in `widgets/controls/setting_controls.py`."""


SamplingValue = float | int | str | tuple[str, ...] | None
"""Value of a sampler setting. A tuple is a list of texts; None means that the user chose no number."""
MAX_TEXTS = 64
"""Largest number of stop texts or DRY breakers in one setting.

It is limited because files may come from other people.
"""
MAX_TEXT_CHARACTERS = 1 << 16
"""Largest number of characters in one text setting. It is limited because files may come from other people."""
# Escapes in one line of a form: a line cannot contain a newline, and a space at its end is easily lost.
_ESCAPES = {"\\n": "\n", "\\t": "\t", "\\r": "\r", "\\\\": "\\", "\\s": " "}


class Texts(Struct, frozen=True):
    r"""A setting that is a list of non-empty texts. A user types one per line, with `\n` for a newline in it."""

    allowed: str = tr("texts, one per line")

    def checked(self, value: object) -> SamplingValue:
        """Check the JSON value `value` and return it as a setting.

        Raises:
            ValueError: the value is not allowed; the message is for the user, without its full stop.
        """
        # A str is a sequence of characters, each of which would become a text of its own.
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ValueError(tr("the value must be a list of texts"))
        if len(value) > MAX_TEXTS:
            raise ValueError(
                tr("{count} texts are too many; the maximum is {max_texts}", count=len(value), max_texts=MAX_TEXTS)
            )
        return tuple(str(_checked_text(text, may_be_empty=False)) for text in value)

    def typed(self, text: str) -> SamplingValue:
        """Parse `text`, which a user typed, and return the texts.

        Raises:
            ValueError: there are too many texts, or one is too long; the message is for the user, without its full
                stop.
        """
        # Empty lines are skipped. An empty stop text would end every answer at once.
        return self.checked([_unescaped(line) for line in text.splitlines() if line])

    def text_of(self, value: SamplingValue) -> str:
        """Return the lines that a user would type for `value`."""
        return "\n".join(_escaped(text) for text in value) if isinstance(value, tuple) else ""


class Text(Struct, frozen=True):
    """A setting that is one text of at most `MAX_TEXT_CHARACTERS` characters."""

    allowed: str = "text"

    def checked(self, value: object) -> SamplingValue:
        """Check the JSON value `value` and return it as a setting.

        Raises:
            ValueError: the value is no text, or is too long; the message is for the user, without its full stop.
        """
        return _checked_text(value, may_be_empty=True)

    def typed(self, text: str) -> SamplingValue:
        """Check `text`, which a user typed, and return it.

        Raises:
            ValueError: the text is too long; the message is for the user, without its full stop.
        """
        return self.checked(text)

    def text_of(self, value: SamplingValue) -> str:
        """Return the text that a user would type for `value`."""
        return str(value)


SamplingKind = Real | WholeNumber | Choice | Texts | Text
"""Types of sampler settings."""


def _checked_text(value: object, *, may_be_empty: bool) -> str:
    if not isinstance(value, str):
        raise ValueError(tr("the value must be text"))
    if not value and not may_be_empty:
        raise ValueError(tr("empty text is not allowed; remove the entry"))
    if len(value) > MAX_TEXT_CHARACTERS:
        raise ValueError(
            tr(
                "a text of {count} characters is too long; the maximum is {max_text_characters}",
                count=len(value),
                max_text_characters=MAX_TEXT_CHARACTERS,
            )
        )
    # llama.cpp takes texts as UTF-8 C strings: NUL would end them, and a lone surrogate has no UTF-8.
    if "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ValueError(
            tr(
                "the text contains a character that is not allowed (NUL or a lone surrogate, which is half of a "
                "character); remove it"
            )
        )
    return value


def _unescaped(line: str) -> str:
    found, index = "", 0
    while index < len(line):
        pair = line[index : index + 2]
        # An unknown escape stays as it was typed: people also write single backslashes.
        found += _ESCAPES.get(pair, line[index])
        index += 2 if pair in _ESCAPES else 1
    return found


def _escaped(text: str) -> str:
    # The backslash is the first, because later ones would double the backslashes of the other escapes.
    for word, letter in (("\\\\", "\\"), ("\\n", "\n"), ("\\t", "\t"), ("\\r", "\r")):
        text = text.replace(letter, word)
    return text
