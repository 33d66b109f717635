"""Regexes on tensor names: their validation, matching, and the regex for a part of some layers.

A pattern may come from a file of someone else. llama.cpp and Python match by backtracking, which takes exponential time
for a pattern such as `(.+)+!`. Here RE2 matches it instead, in time linear in the length of the name. llama.cpp gets a
list of the matching names (`found_names.py`) instead of the pattern.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Literal

import re2

from engine.base.language import tr
from engine.base.texts import quote
from engine.model.gguf.model_file import PART_PATTERNS

OverridePart = Literal["experts", "ffn", "attention", "all"]
OVERRIDE_PARTS: tuple[OverridePart, ...] = ("experts", "ffn", "attention", "all")

MAX_PATTERN_LENGTH = 1024
_MAX_COMPILED_BYTES = 1 << 22
"""Memory limit in bytes for RE2's compiled program and its states. A pattern that needs more is refused."""

_ESCAPED = r"(?<!\\)(?:\\\\)*"
# ECMAScript, which the engine uses, knows only these groups that begin with a question mark.
_FOREIGN_GROUP = re.compile(_ESCAPED + r"\(\?(?![:=!])")
_LOOK_AHEAD = re.compile(_ESCAPED + r"\(\?[=!]")
_BACK_REFERENCE = re.compile(_ESCAPED + r"\\[1-9]")
# Letters and digits after a backslash that ECMAScript and RE2 read alike. Any other character stands for itself in
# both.
_FOREIGN_ESCAPE = re.compile(_ESCAPED + r"\\(?![dDwWsSbBnrtfv]|x[0-9A-Fa-f]{2})[A-Za-z0-9]")


# RE2 reads a brace without a count as the character itself; `std::regex` refuses it.
_NO_COUNT = re.compile(_ESCAPED + r"\{(?!\d{1,4}(?:,\d{0,4})?\})")


def find_pattern_error(pattern: str) -> str | None:
    """Return a sentence on why `pattern` cannot be used on tensor names; None if it can be used.

    Patterns that `part_pattern` made can always be used.
    """
    if _is_of_part(pattern):
        return None
    if not pattern:
        return tr("an empty pattern matches every weight; name the tensors of the override")
    if len(pattern) > MAX_PATTERN_LENGTH:
        return tr(
            "the pattern has {count} characters; at most {max_pattern_length} are allowed",
            count=len(pattern),
            max_pattern_length=MAX_PATTERN_LENGTH,
        )
    return _find_error(pattern)


@lru_cache(maxsize=4096)
def _find_error(pattern: str) -> str | None:
    shown = quote(pattern)
    if _FOREIGN_GROUP.search(pattern):
        return tr(
            "the pattern {shown} uses a group that ECMAScript regexes do not have; only (?: ) is allowed",
            shown=shown,
        )
    if _LOOK_AHEAD.search(pattern):
        return tr(
            "the pattern {shown} has a look-ahead, which may take too long to match; list the names of the "
            "tensors instead",
            shown=shown,
        )
    if _BACK_REFERENCE.search(pattern):
        return tr(
            "the pattern {shown} has a back-reference, which may take too long to match; list the names of the "
            "tensors instead",
            shown=shown,
        )
    if escape := _FOREIGN_ESCAPE.search(pattern):
        return tr(
            "the pattern {shown} has the escape {escape}, which is not supported; write the characters themselves",
            shown=shown,
            escape=quote(escape[0][-2:]),
        )
    if _NO_COUNT.search(pattern):
        return tr(
            "the pattern {shown} has a brace that is not a count such as {{1,3}}; write \\{{ for the character",
            shown=shown,
        )
    try:
        _compiled(pattern)
    except (re2.error, UnicodeEncodeError) as error:
        reason = (
            tr("the pattern contains a lone surrogate, which is not a character")
            if isinstance(error, UnicodeEncodeError)
            else quote(_reason(error))
        )
        return tr(
            "the pattern {shown} is not a regular expression ({reason}); check its brackets", shown=shown, reason=reason
        )
    return None


@lru_cache(maxsize=4096)
def pattern_finder(pattern: str) -> Callable[[str], bool]:
    """Return a function that returns whether a tensor name contains a match of `pattern`.

    An unusable pattern matches nothing. Patterns that `part_pattern` made are accepted although they have look-aheads.
    """
    if _is_of_part(pattern):
        part = re.compile(pattern)
        return lambda name: part.search(name) is not None
    if find_pattern_error(pattern) is not None:
        return lambda name: False
    regex = _compiled(pattern)
    return lambda name: regex.search(name) is not None


def part_pattern(part: OverridePart, layers: range | None) -> str:
    """Return the regex for the names of all tensors of `part` in `layers`; None for all layers.

    Parts are those of `PART_PATTERNS`: "ffn" excludes the experts, and recurrent tensors belong to "attention". The
    regex has look-aheads, but no repetition, so `std::regex` matches it quickly.
    """
    numbers = r"\d+" if layers is None else f"({'|'.join(map(str, layers))})"
    return rf"^blk\.{numbers}\.{_PART_TAILS[part]}"


def _part_tail(part: OverridePart) -> str:
    if part == "all":
        return ""
    parts = [name for name, _ in PART_PATTERNS]
    earlier = "".join(f"(?!{pattern})" for _, pattern in PART_PATTERNS[: parts.index(part)])
    return f"{earlier}({dict(PART_PATTERNS)[part]})"


_PART_TAILS = {part: _part_tail(part) for part in OVERRIDE_PARTS}
_PART_HEAD = re.compile(r"\^blk\\\.(?:\\d\+|\([0-9|]+\))\\\.", re.ASCII)


def _is_of_part(pattern: str) -> bool:
    head = _PART_HEAD.match(pattern)
    return head is not None and pattern[head.end() :] in _PART_TAILS.values()


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re2._Regexp[str]:
    options = re2.Options()
    # RE2 would write faults to stderr. The caller makes a sentence of them.
    options.log_errors = False
    options.max_mem = _MAX_COMPILED_BYTES
    return re2.compile(pattern, options)


def _reason(error: re2.error) -> str:
    text_or_bytes = error.args[0] if error.args else ""
    return text_or_bytes.decode("utf-8", "replace") if isinstance(text_or_bytes, bytes) else str(text_or_bytes)
