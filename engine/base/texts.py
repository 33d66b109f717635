"""Makes text from outside safe to show: it cannot control the terminal, reorder the text around it, or be too long.

Text from files, command lines, devices, peers and path names is passed to this module before it is shown.
"""

from __future__ import annotations

import re

MAX_SENTENCE = 2000
"""Largest number of characters of one message."""

_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Pattern of the characters that are escaped: control and bidirectional characters, line separators and lone
surrogates.

Newlines and tabs are not escaped, nor are joiners, which some scripts need.
"""
_KEPT_BYTE = re.compile("[\udc80-\udcff]")


def escape(text: str, *, keep_lines: bool = False) -> str:
    r"""Return `text` with control characters as escapes, such as `\x1b`.

    `keep_lines`: whether newlines and tabs stay as they are.
    """
    if text.isascii() and text.isprintable():
        return text
    text = _STEERING.sub(_escaped, _decoded(text))
    return text if keep_lines else text.replace("\n", "\\n").replace("\t", "\\t")


def replace_controls(text: str, by: str) -> str:
    """Return `text` with each control or bidirectional character, line separator and lone surrogate replaced by `by`.

    Newlines and tabs are unchanged, and so are zero-width joiners, which some scripts need.
    """
    return _STEERING.sub(by, text)


def shorten(text: str, max_length: int = MAX_SENTENCE) -> str:
    """Return `text`, shortened in its middle to at most `max_length` characters."""
    if len(text) <= max_length:
        return text
    head = max_length * 2 // 3
    return f"{text[:head]}…{text[len(text) - (max_length - head - 1) :]}"


def show(text: str, max_length: int = MAX_SENTENCE) -> str:
    """Return `text` for one line of output: escaped, and shortened to `max_length` characters."""
    # Before, because escaping megabytes takes long; after, because escapes are longer than what they replace.
    return shorten(escape(shorten(text, max_length)), max_length)


def one_line(text: str) -> str:
    """Return `text` on one line: unprintable characters become spaces, and white space becomes single spaces."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def capitalised(text: str) -> str:
    """Return `text` with a capital first letter. Unlike `str.capitalize`, it leaves the other letters unchanged."""
    return f"{text[:1].upper()}{text[1:]}"


def escape_json(document: str) -> str:
    r"""Return JSON text with control characters as escapes, so that any terminal can show it.

    The JSON values do not change, except a lone surrogate in a string, for which JSON has no valid escape: it becomes
    six ordinary characters, such as `\\udc80`.
    """
    return _STEERING.sub(_json_escaped, _decoded(document))


def _decoded(text: str) -> str:
    """Return `text` with its surrogate escapes (path bytes that the locale cannot decode) decoded as UTF-8.

    If these bytes are not UTF-8, the text is returned unchanged.
    """
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


def fenced(text: str, language: str = "") -> str:
    """Return a text as a Markdown code block, with a fence that is longer than any in the text.

    `language`: language for syntax highlighting, such as "json"; empty: none.
    """
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text}\n{fence}"


MAX_SHOWN = 80


def clean(text: str, max_length: int = MAX_SHOWN) -> str:
    """Return `text` on one line, with control characters escaped, cut to `max_length` characters."""
    if len(text) <= max_length and text.isprintable():
        return text.strip()
    start = text[: 4 * max_length]
    line = escape(" ".join(start.split()))
    return line if len(line) <= max_length and len(start) == len(text) else line[: max_length - 1] + "…"


def quote(text: str) -> str:
    """Return `text` in quotation marks, on one line, with control characters escaped, and cut to `MAX_SHOWN`
    characters.
    """
    return f'"{clean(text)}"'
