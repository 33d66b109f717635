"""Characters that hide or reorder text, made visible: what is read is what is there."""

from __future__ import annotations

import re

_HIDDEN = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but tab and line feed
    "\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e"  # soft hyphen, invisible fillers, Arabic letter mark
    "\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"  # widthless space, direction marks, separators, overrides, isolates
    "\ufdd0-\ufdef\ufeff\ufff9-\uffff"  # what Qt's documents keep for frames and objects; marks
    "\ud800-\udfff"  # halves of a pair
    "\U000e0000-\U000e0fff"  # tags: text in characters that are not drawn
    "]"
)


def visible(text: str) -> str:
    """Return `text` with each hidden character as its escape; line ends of other systems become line feeds."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return _HIDDEN.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
