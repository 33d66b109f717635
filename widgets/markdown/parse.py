"""Parses Markdown to tokens. Text that is too long or nested too deeply is shown as plain text."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from urllib.parse import urlsplit

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.rules_core import StateCore
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token
from mdit_py_plugins.dollarmath import dollarmath_plugin
from mdit_py_plugins.tasklists import tasklists_plugin

from widgets.markdown.blocks import Block, Line, TextSpan

_CLOSING = {"\\(": "\\)", "\\[": "\\]"}


def bracket_math(parser: MarkdownIt) -> None:
    r"""Make `parser` accept formulas in `\(...\)` and `\[...\]`. They become tokens like formulas in dollar signs."""
    parser.inline.ruler.before("escape", "bracket_math", _inline)
    parser.block.ruler.before("fence", "bracket_math_block", _block)


def _inline(state: StateInline, silent: bool) -> bool:
    opening = state.src[state.pos : state.pos + 2]
    closing = _CLOSING.get(opening)
    if closing is None:
        return False
    end = state.src.find(closing, state.pos + 2, state.posMax)
    content = state.src[state.pos + 2 : end] if end >= 0 else ""
    if not content.strip():
        return False
    # With `silent` markdown-it only steps over the formula, for instance in search of the end of a link.
    if not silent:
        token = state.push("math_inline" if opening == "\\(" else "math_inline_double", "math", 0)
        token.content = content
    state.pos = end + 2
    return True


def _block(state: StateBlock, start_line: int, end_line: int, silent: bool) -> bool:
    r"""Parse a formula between a line that begins with `\[` and one that ends with `\]`; return whether there is one.

    A formula contains no blank lines. This function is a block rule of markdown-it: if `silent`, it only checks.
    """
    begin = state.bMarks[start_line] + state.tShift[start_line]
    if state.is_code_block(start_line) or not state.src.startswith("\\[", begin):
        return False
    lines: list[str] = []
    for line in range(start_line, end_line):
        if state.isEmpty(line) or (line > start_line and state.sCount[line] < state.blkIndent):
            return False
        text = state.src[state.bMarks[line] + state.tShift[line] : state.eMarks[line]].rstrip()
        lines.append(text.removeprefix("\\[") if line == start_line else text)
        if lines[-1].endswith("\\]"):
            break
        if "\\]" in lines[-1]:
            return False
    else:
        return False
    if silent:
        return True
    token = state.push("math_block", "math", 0)
    token.block = True
    token.content = "\n".join(lines).removesuffix("\\]")
    token.map = [start_line, start_line + len(lines)]
    state.line = start_line + len(lines)
    return True


MAX_NESTING = 100
"""Maximum number of levels of quotes and lists. The parser drops deeper text."""
MAX_INLINE_CHARACTERS = 5_000
"""Maximum length in characters of a paragraph whose inline Markdown is parsed. A longer one is shown as plain text."""
MAX_LINE_CHARACTERS = 4_000
"""Maximum length of a line of plain text in characters. A longer line is cut into several lines."""
LINK_SCHEMES = ("http", "https", "mailto")


@lru_cache(maxsize=1)
def _parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False, "linkify": True, "maxNesting": MAX_NESTING})
    parser.enable(["table", "strikethrough", "linkify"])
    # A reference definition at the end would change finished blocks above it.
    parser.disable("reference")
    parser.use(dollarmath_plugin, allow_space=False, allow_digits=False, allow_blank_lines=False, double_inline=True)
    parser.use(tasklists_plugin)
    parser.use(bracket_math)
    # Replaces markdown-it's own rule, which has no limit for the length of a paragraph.
    parser.core.ruler.at("inline", _bounded_inline)
    # Links with other schemes, such as file:, stay plain text.
    parser.validateLink = is_safe_link  # type: ignore[method-assign, assignment]
    if parser.linkify is not None:
        parser.linkify.set({"fuzzy_email": False})
    return parser


def is_safe_link(address: str) -> bool:
    """Return whether a click on a link to `address` may open it: only http, https and mailto."""
    try:
        return urlsplit(address.strip()).scheme.lower() in LINK_SCHEMES
    except ValueError:
        return False


def parse_tokens(source: str) -> list[Token] | None:
    """Return the markdown-it tokens of `source`; None if it is nested too deeply.

    `source`: text whose hidden characters were escaped by `visible`.
    """
    try:
        tokens = _parser().parse(source)
    except RecursionError:
        return None
    # markdown-it drops text below its limit silently, so text near it is shown as plain text.
    return None if any(token.level >= MAX_NESTING - 2 for token in tokens) else tokens


def plain_blocks(text: str) -> list[Block]:
    """Return `text` as plain lines, without parsing it."""
    return [
        Line("text", (TextSpan(part),) if part else ())
        for line in text.split("\n")
        for part in cut_line(line, MAX_LINE_CHARACTERS)
    ]


def cut_line(line: str, size: int) -> Iterator[str]:
    """Yield `line` in parts of at most `size` characters; an empty line gives one empty part."""
    for start in range(0, max(len(line), 1), size):
        yield line[start : start + size]


def _bounded_inline(state: StateCore) -> None:
    """Parse inline Markdown by markdown-it's own rule. Paragraphs above `MAX_INLINE_CHARACTERS` stay plain text."""
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
