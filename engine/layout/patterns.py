"""Regexes on tensor names: are they usable, and which one names a part of some layers."""

from __future__ import annotations

import re
import warnings
from functools import lru_cache
from typing import Literal

from engine.gguf.blocks import PART_PATTERNS

OverridePart = Literal["experts", "ffn", "attention", "all"]
OVERRIDE_PARTS: tuple[OverridePart, ...] = ("experts", "ffn", "attention", "all")

MAX_PATTERN_LENGTH = 1024

# ECMAScript, which the engine uses, knows only these groups that begin with a question mark.
_FOREIGN_GROUP = re.compile(r"(?<!\\)(?:\\\\)*\(\?(?![:=!])")


@lru_cache(maxsize=256)
def find_pattern_fault(pattern: str) -> str | None:
    """Return a sentence on why `pattern` cannot be used on tensor names, None if it can."""
    if not pattern:
        return "an empty pattern matches every weight; name the tensors it is for"
    if len(pattern) > MAX_PATTERN_LENGTH:
        return f"the pattern has {len(pattern)} characters; at most {MAX_PATTERN_LENGTH} are allowed"
    if _FOREIGN_GROUP.search(pattern):
        return "the pattern uses a group that ECMAScript regexes do not have; after ( ? only : = and ! may come"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return f"the pattern is not a regular expression ({error}); check its brackets"
    return None


def part_pattern(part: OverridePart, layers: range | None) -> str:
    """Return the regex that finds `part` (experts, ffn, attention, all) of `layers`, None meaning every layer.

    Parts are those of the model file's blocks: ffn is without the experts, recurrent tensors count as attention.
    """
    numbers = r"\d+" if layers is None else f"({'|'.join(map(str, layers))})"
    block = rf"^blk\.{numbers}\."
    if part == "all":
        return block
    parts = [name for name, _ in PART_PATTERNS]
    earlier = "".join(f"(?!{pattern})" for _, pattern in PART_PATTERNS[: parts.index(part)])
    return f"{block}{earlier}({dict(PART_PATTERNS)[part]})"
