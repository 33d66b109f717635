"""Markdown to blocks. Bounded: what is too long or too deep is shown as the text that it is."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from urllib.parse import urlsplit

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from markdown_it.token import Token
from mdit_py_plugins.dollarmath import dollarmath_plugin
from mdit_py_plugins.tasklists import tasklists_plugin

from widgets.markdown.blocks import Block, Line, Run
from widgets.markdown.bracket_math import bracket_math

MAX_NESTING = 100
"""Quotes and lists within each other; what lies deeper would be lost by the parser."""
MAX_INLINE_CHARACTERS = 5_000
"""Of one paragraph: marks in longer ones stay as they are."""
MAX_LINE_CHARACTERS = 4_000
"""A longer line is laid out as several."""
LINK_SCHEMES = ("http", "https", "mailto")


@lru_cache(maxsize=1)
def _parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False, "linkify": True, "maxNesting": MAX_NESTING})
    parser.enable(["table", "strikethrough", "linkify"])
    # A definition far below would change what is above and finished.
    parser.disable("reference")
    parser.use(dollarmath_plugin, allow_space=False, allow_digits=False, allow_blank_lines=False, double_inline=True)
    parser.use(tasklists_plugin)
    parser.use(bracket_math)
    parser.core.ruler.at("inline", _bounded_inline)
    parser.validateLink = is_safe_link  # type: ignore[method-assign, assignment]
    if parser.linkify is not None:
        parser.linkify.set({"fuzzy_email": False})
    return parser


def is_safe_link(address: str) -> bool:
    """Return whether a click on `address` may open it."""
    try:
        return urlsplit(address.strip()).scheme.lower() in LINK_SCHEMES
    except ValueError:
        return False


def parse_tokens(source: str) -> list[Token] | None:
    """Return the tokens of `source`, which is visible; None where it nests too deep."""
    try:
        tokens = _parser().parse(source)
    except RecursionError:
        return None
    return None if any(token.level >= MAX_NESTING - 2 for token in tokens) else tokens


def plain_blocks(text: str) -> list[Block]:
    """Return `text` as it is."""
    return [
        Line("text", (Run(part),) if part else ())
        for line in text.split("\n")
        for part in cut_line(line, MAX_LINE_CHARACTERS)
    ]


def cut_line(line: str, size: int) -> Iterator[str]:
    """Yield `line` in parts of at most `size` characters; an empty one for an empty line."""
    for start in range(0, max(len(line), 1), size):
        yield line[start : start + size]


def _bounded_inline(state: StateCore) -> None:
    """Parse what is inside paragraphs, as markdown-it does, but none that is too long for it."""
    for token in state.tokens:
        if token.type != "inline":
            continue
        token.children = []
        if len(token.content) <= MAX_INLINE_CHARACTERS:
            state.md.inline.parse(token.content, state.md, state.env, token.children)
            continue
        for number, line in enumerate(token.content.split("\n")):
            if number:
                token.children.append(Token("softbreak", "br", 0))
            text = Token("text", "", 0)
            text.content = line
            token.children.append(text)
