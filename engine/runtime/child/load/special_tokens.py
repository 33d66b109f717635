"""The special tokens of a vocabulary, which llama.cpp finds in a text by their names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from msgspec import Struct

_BEGINNING = 4
# enum llama_token_attr of llama.h.
_UNKNOWN, _CONTROL, _LSTRIP, _RSTRIP = 1 << 0, 1 << 3, 1 << 7, 1 << 8


class SpecialToken(NamedTuple):
    """A special token of a vocabulary. llama.cpp finds its name in a text only if special tokens are parsed.

    `strips_left`, `strips_right`: whether the token removes the spaces before or after it.
    """

    id: int
    strips_left: bool
    strips_right: bool


class SpecialTokens(Struct, frozen=True):
    """Special tokens of a vocabulary by name.

    `names`: pattern that matches the longest name at a position; None if there are no names.
    `beginnings`: pattern that matches the first character of a name; None if there are no names.
    """

    by_name: dict[str, SpecialToken]
    names: re.Pattern[str] | None
    beginnings: re.Pattern[str] | None


def read_special_tokens(low: Any, vocabulary: Any, size: int) -> SpecialTokens:
    """Return the special tokens of a vocabulary of `size` tokens. `low`: the module `llama_cpp.llama_cpp`."""
    found: dict[str, SpecialToken] = {}
    for token in range(size):
        attributes = int(low.llama_vocab_get_attr(vocabulary, token))
        if attributes & (_CONTROL | _UNKNOWN):
            name = low.llama_vocab_get_text(vocabulary, token).decode("utf-8", "replace")
            if name:
                found[name] = SpecialToken(token, bool(attributes & _LSTRIP), bool(attributes & _RSTRIP))
    return SpecialTokens(found, any_of(found), any_of({name[0] for name in found}))


def any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches the longest of these texts at a position; None if there are no texts."""
    # Grouped by their beginnings: Gemma has 6000 names with `<`, and each `<` of a page of HTML would try them all.
    rests: dict[str, list[str]] = {}
    for text in sorted(texts, key=len, reverse=True):
        rests.setdefault(text[:_BEGINNING], []).append(re.escape(text[_BEGINNING:]))
    groups = (f"{re.escape(beginning)}(?:{'|'.join(ends)})" for beginning, ends in rests.items())
    return re.compile("|".join(groups)) if rests else None
