"""Syntax highlighting of code by Pygments, with limits of length and time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache

from msgspec import Struct
from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.token import Comment, Error, Generic, Keyword, Name, Number, Operator, String, _TokenType
from pygments.util import ClassNotFound

from widgets.markdown.blocks import TextSpan

SEGMENT_LINES = 80
"""Maximum number of lines of a segment. Code is highlighted in segments, and each segment only once, so the end of long
streamed code costs as little as its beginning. A token that spans two segments may get a wrong colour.
"""
MAX_SEGMENT_CHARACTERS = 4_000
"""Maximum length of a segment in characters. Some rules of lexers go on over line ends, and their time grows with the
square of the segment's length: 80 lines of 400 characters of Java took 50 s, 4,000 characters take 0.4 s.
"""
MAX_CODE_CHARACTERS = 200_000
"""Maximum length of highlighted code in characters. Longer code has no colours."""
MAX_LINE_CHARACTERS = 2_000
"""Maximum length of a line of code in characters. A longer line is cut into several lines."""
MAX_COLOURED_CHARACTERS = 400
"""Maximum length of a highlighted line in characters. A segment with a longer line has no colours: lexers are regular
expressions with backtracking. Their time may grow with the square of a line's length or faster, and nothing can
interrupt them.
"""
MAX_SEGMENT_S = 0.2
"""Maximum processor time in seconds for highlighting a segment; usual code takes 0.02 s.
See `MAX_SLOW_SEGMENTS` for segments that take longer.
"""
MAX_SLOW_SEGMENTS = 2
"""Number of slow segments after which code in a language is not highlighted until the program ends.
It is more than one, because a garbage collection during a segment may take as long.
"""
MAX_MESSAGE_S = 3.0
"""Maximum processor time in seconds for highlighting the code of a message. The rest of its code has no colours. Usual
code of `MAX_CODE_CHARACTERS` takes about 1 s.
"""
LANGUAGES = frozenset({
    "asm", "bash", "bat", "c", "c#", "clojure", "cmake", "common-lisp", "console", "cpp", "css", "cuda", "dart",
    "diff", "docker", "elixir", "erlang", "fortran", "glsl", "go", "graphql", "groovy", "haskell", "html",
    "ini", "java", "javascript", "json", "json5", "julia", "kotlin", "latex", "less", "lua", "make", "markdown",
    "matlab", "mysql", "nginx", "nix", "objective-c", "ocaml", "pascal", "perl", "php", "powershell",
    "prolog", "properties", "protobuf", "pycon", "python", "r", "rst", "ruby", "rust", "scala", "scheme", "scss",
    "sql", "swift", "systemverilog", "tcl", "terraform", "toml", "tsx", "typescript", "verilog", "vhdl", "vim",
    "xml", "yaml", "zig",
})  # fmt: skip
"""Names of the languages that are highlighted. The model chooses both the text and its language, and some lexers take
minutes for some texts. `tests/hardening` runs the lexers of these languages on such texts. "http" and "postgresql" are
left out, since their lexers use any other lexer that the text names.
"""

_KINDS: tuple[tuple[_TokenType, str], ...] = (
    (Comment, "comment"),
    (Keyword, "keyword"),
    (Operator.Word, "keyword"),
    (String, "string"),
    (Number, "number"),
    (Name.Function, "function"),
    (Name.Class, "type"),
    (Name.Builtin, "type"),
    (Name.Decorator, "function"),
    (Name.Tag, "keyword"),
    (Name.Attribute, "type"),
    (Generic.Inserted, "string"),
    (Generic.Deleted, "error"),
    (Generic.Heading, "keyword"),
    (Error, "plain"),
)


class TimeUsed(Struct):
    """Processor time in seconds that the highlighting of one message has taken so far."""

    seconds: float = 0.0


def highlight(lines: Sequence[str], language: str, used: TimeUsed) -> Iterator[tuple[TextSpan, ...]]:
    """Yield each line of code as spans (pieces of text with one format).

    Code is highlighted if its language is one of `LANGUAGES` and the code is within the limits of length and time. Each
    span of highlighted code has a kind of token, such as "keyword".

    `used`: processor time that highlighting the message has taken so far. This call adds the time that it takes.
    """
    coloured = bool(language) and sum(map(len, lines)) <= MAX_CODE_CHARACTERS and _lexer(language) is not None
    for segment in _segments(lines):
        in_time = used.seconds <= MAX_MESSAGE_S and _slow[language] < MAX_SLOW_SEGMENTS
        if coloured and in_time and max(map(len, segment)) <= MAX_COLOURED_CHARACTERS:
            # Processor time, since other threads may hold this one up.
            begun_s = time.thread_time()
            spans = _highlight_segment("\n".join(segment), language)
            took_s = time.thread_time() - begun_s
            used.seconds += took_s
            if took_s > MAX_SEGMENT_S:
                _slow[language] += 1
            yield from spans
        else:
            yield from ((TextSpan(line, code=True),) if line else () for line in segment)


def _segments(lines: Sequence[str]) -> Iterator[list[str]]:
    # From the beginning: lines that are added at the end of streamed code change only the last segment.
    segment: list[str] = []
    length = 0
    for line in lines:
        length += len(line) + 1
        if segment and (len(segment) == SEGMENT_LINES or length > MAX_SEGMENT_CHARACTERS):
            yield segment
            segment, length = [], len(line) + 1
        segment.append(line)
    if segment:
        yield segment


_slow: Counter[str] = Counter()
"""Number of segments of each language that took longer than `MAX_SEGMENT_S`."""


@lru_cache(maxsize=64)
def _lexer(language: str) -> Lexer | None:
    try:
        # Without `handlecodeblocks` the lexers of Markdown and reStructuredText do not use lexers that the text names.
        lexer = get_lexer_by_name(language, stripnl=False, ensurenl=False, handlecodeblocks=False)
    except ClassNotFound:
        return None
    return lexer if LANGUAGES.intersection(lexer.aliases) else None


# Cached by text: while code streams, its finished segments are parsed again with the open end.
@lru_cache(maxsize=256)
def _highlight_segment(text: str, language: str) -> tuple[tuple[TextSpan, ...], ...]:
    lexer = _lexer(language)
    assert lexer is not None
    lines: list[list[TextSpan]] = [[]]
    length = 0
    for token_type, value in lexer.get_tokens(text):
        length += len(value)
        kind = next((kind for known, kind in _KINDS if token_type in known), "")  # type: ignore[comparison-overlap]
        for number, part in enumerate(value.split("\n")):
            if number:
                lines.append([])
            if part:
                _add(lines[-1], part, kind)
    if length != len(text) or len(lines) != text.count("\n") + 1:
        # The lexer has dropped or added characters. The text must stay right, so it is not highlighted.
        return tuple((TextSpan(line, code=True),) if line else () for line in text.split("\n"))
    return tuple(map(tuple, lines))


def _add(line: list[TextSpan], text: str, kind: str) -> None:
    if line and line[-1].token == kind:
        text = line.pop().text + text
    line.append(TextSpan(text, code=True, token=kind))
