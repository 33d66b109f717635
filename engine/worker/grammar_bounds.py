"""What of a grammar would break the engine's reader of it: it recurses for each bracket and writes out each repetition.

Looked at before the engine sees it. What takes long all the same is ended by `engine/worker/step_limit.py`.
"""

from __future__ import annotations

import re

MAX_DEPTH = 3000
"""Brackets within brackets: the reader's stack has room for some 20,000."""
MAX_ELEMENTS = 200_000
"""Characters, classes and names with all repetitions written out, as the reader does it."""
_TOKENS = re.compile(
    r"""(?P<skipped>\#[^\n]*|\s+)
    |(?P<literal>"(?:\\.|[^"\\])*"?|\[(?:\\.|[^\]\\])*\]?)
    |(?P<count>\{\s*(?P<least>\d*)\s*(?P<comma>,?)\s*(?P<most>\d*)\s*\}?)
    |(?P<word>[\w-]+)
    |(?P<other>.)""",
    re.ASCII | re.DOTALL | re.VERBOSE,
)
_MAX_DIGITS = 6


def fault_of(grammar: str) -> str:
    """Return why the engine cannot be given this grammar, empty where nothing speaks against it."""
    sums, last = [0], 0
    for token in _TOKENS.finditer(grammar):
        match token.lastgroup, token[0]:
            case "skipped", _:
                continue
            case "other", "(":
                sums.append(0)
                last = 0
            case "other", ")" if len(sums) > 1:
                last = sums.pop()
                sums[-1] += last
            case "count", _:
                least, most = token["least"], token["most"] if token["comma"] else token["least"]
                if max(len(least), len(most)) > _MAX_DIGITS:
                    return "it repeats something too often"
                if least and most and int(least) > int(most):
                    return f"{token[0][:40]} asks for more than it allows"
                times = max(1, int(least or 0), int(most or 0))
                sums[-1] += last * (times - 1)
                last *= times
            case _:
                last = len(token[0])
                sums[-1] += last
        if len(sums) > MAX_DEPTH:
            return "its brackets are nested too deeply"
        if sums[-1] > MAX_ELEMENTS:
            return "written out it is too long"
    return ""
