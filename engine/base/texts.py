"""How foreign text is shown: nothing in it steers a terminal, hides or turns what stands around it, or fills a screen.

What comes from files, command lines, devices, peers and the names of paths goes through here on its way to people.
"""

from __future__ import annotations

import re

MAX_SENTENCE = 2000
"""Characters of anything that is said at once."""

_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control and bidirectional characters, separators of lines, and lone surrogates, but neither newline nor tab. What
joins letters stays: languages are written with it."""
_KEPT_BYTE = re.compile("[\udc80-\udcff]")


def escape(text: str, *, keep_lines: bool = False) -> str:
    """Return `text` with what cannot be shown as escapes, such as `\\x1b`; with `keep_lines` newlines and tabs stay."""
    if text.isascii() and text.isprintable():
        return text
    text = _STEERING.sub(_escaped, _decoded(text))
    return text if keep_lines else text.replace("\n", "\\n").replace("\t", "\\t")


def shorten(text: str, max_length: int = MAX_SENTENCE) -> str:
    """Return `text` with at most `max_length` characters: what is too long loses its middle."""
    if len(text) <= max_length:
        return text
    head = max_length * 2 // 3
    return f"{text[:head]}…{text[len(text) - (max_length - head - 1) :]}"


def show(text: str, max_length: int = MAX_SENTENCE) -> str:
    """Return `text` for people, on one line: escaped and short."""
    return shorten(escape(shorten(text, max_length)), max_length)


def one_line(text: str) -> str:
    """Return `text` as a title or a name on one line: what cannot be printed is a space, and several are one."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def capitalised(text: str) -> str:
    """Return `text` as a sentence begins; what follows the first letter stays, other than with `str.capitalize`."""
    return f"{text[:1].upper()}{text[1:]}"


def escape_json(document: str) -> str:
    """Return JSON text that any terminal and any reader takes: the same values, steering characters as escapes.

    Half of a surrogate pair is no text, so JSON cannot tell it: it stands there as a person would write it.
    """
    return _STEERING.sub(_json_escaped, _decoded(document))


def _decoded(text: str) -> str:
    """Return the letters that bytes of paths stand for where the locale could not tell: Python keeps each as half of a
    surrogate pair. What is no UTF-8 stays."""
    if not _KEPT_BYTE.search(text):
        return text
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        return text


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def _json_escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\\\u{code:04x}" if 0xD800 <= code <= 0xDFFF else f"\\u{code:04x}"
