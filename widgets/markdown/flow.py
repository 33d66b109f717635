"""Converts the nested tokens of markdown-it to a flat list of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast
from urllib.parse import urlsplit

from markdown_it.token import Token
from msgspec import Struct

from engine.base.language import tr
from engine.base.values import replace
from widgets.markdown.blocks import Alignment, Block, Line, Table, TextSpan, visible
from widgets.markdown.highlight import MAX_LINE_CHARACTERS, TimeUsed, highlight

MAX_INDENT = 8
"""Maximum number of levels of lists and quotes that are indented."""
MAX_CELLS = 2_000
"""Maximum number of cells of a table. A table with more cells is shown as lines of text."""
MAX_FORMULA_CHARACTERS = 1_000
"""Maximum length of a formula in characters. A longer formula is shown as its source."""
BULLETS = ("•", "◦", "▪")
MAX_TEXT_CHARACTERS = 4_000


class _List(Struct):
    next_number: int | None
    """The number of the next item of a numbered list; None for a list with bullets."""


class Flow:
    """Converts the Markdown parser's tokens of one text to blocks, in one pass.

    `used`: counts the processor time that syntax highlighting has taken in this message; above a limit, code is not
    highlighted.
    """

    def __init__(self, tokens: Sequence[Token], used: TimeUsed) -> None:
        self._tokens, self._used = tokens, used
        self._blocks: list[Block] = []
        self._lists: list[_List] = []
        self._quote = 0
        self._marker = ""
        self._heading = 0

    def blocks(self) -> list[Block]:
        """Convert all tokens, and return the blocks in the order of the text."""
        index = 0
        while index < len(self._tokens):
            token = self._tokens[index]
            if token.type == "table_open":
                index = self._add_table(index)
                continue
            self._take(token)
            index += 1
        self._flush_marker()
        return self._blocks

    def _take(self, token: Token) -> None:
        match token.type:
            case "bullet_list_open":
                self._lists.append(_List(None))
            case "ordered_list_open":
                self._lists.append(_List(int(token.attrs.get("start", 1))))
            case "bullet_list_close" | "ordered_list_close":
                self._flush_marker()
                self._lists.pop()
            case "list_item_open":
                self._flush_marker()
                self._marker = self._next_marker()
            case "blockquote_open":
                self._quote += 1
            case "blockquote_close":
                self._flush_marker()
                self._quote -= 1
            case "heading_open":
                self._heading = int(token.tag[1:])
            case "heading_close":
                self._heading = 0
            case "inline":
                self._add_inline(token)
            case "fence" | "code_block":
                self._add_code(token.content, token.info)
            case "math_block":
                self._add_formula(visible(token.content.strip()))
            case "hr":
                self._add_line(Line("rule"))

    def _next_marker(self) -> str:
        current = self._lists[-1]
        if current.next_number is None:
            depth = sum(each.next_number is None for each in self._lists)
            return BULLETS[min(depth, len(BULLETS)) - 1]
        current.next_number += 1
        return f"{current.next_number - 1}."

    def _flush_marker(self) -> None:
        """Add an empty line for a list item without text, so that its marker is shown."""
        if self._marker:
            self._add_line(Line("text"))

    def _add_line(self, line: Line) -> None:
        marker, self._marker = self._marker, ""
        indent, quote = min(len(self._lists), MAX_INDENT), min(self._quote, MAX_INDENT)
        self._blocks.append(replace(line, indent=indent, quote=quote, marker=marker))

    def _add_inline(self, token: Token) -> None:
        children = list(token.children or ())
        if children and children[0].type == "html_inline":
            # The task list plugin writes the check box as HTML.
            self._marker = "☑" if "checked=" in children.pop(0).content else "☐"
            children[0].content = children[0].content.lstrip()
        spans = inline_spans(children)
        if self._heading:
            self._add_line(Line("heading", spans, level=self._heading))
            return
        for part in _bounded(spans):
            self._add_line(Line("text", part))

    def _add_formula(self, source: str) -> None:
        if len(source) <= MAX_FORMULA_CHARACTERS:
            self._add_line(Line("text", (TextSpan(source, formula="display"),), centred=True))
            return
        for part in _bounded((TextSpan(source),)):
            self._add_line(Line("text", part))

    def _add_code(self, content: str, info: str) -> None:
        # The info string of a fence may be "python {.numberLines}" or "python title=x".
        language = visible(info.strip().split(" ")[0].split("{")[0])[:40].strip().lower()
        text = visible(content)
        cut = [
            (line[start : start + MAX_LINE_CHARACTERS], start > 0)
            for line in text.removesuffix("\n").split("\n")
            for start in range(0, max(len(line), 1), MAX_LINE_CHARACTERS)
        ]
        for number, (spans, (_, joins)) in enumerate(
            zip(highlight([line for line, _ in cut], language, self._used), cut, strict=True)
        ):
            self._add_line(
                Line("code", spans, language=language, begins=number == 0, ends=number == len(cut) - 1, joins=joins)
            )

    def _add_table(self, index: int) -> int:
        rows: list[list[tuple[TextSpan, ...]]] = []
        alignments: list[Alignment] = []
        while (token := self._tokens[index]).type != "table_close":
            if token.type == "tr_open":
                rows.append([])
            elif token.type == "th_open":
                style = str(token.attrs.get("style", ""))
                alignments.append(cast(Alignment, style.removeprefix("text-align:") or "left"))
            elif token.type == "inline":
                rows[-1].append(inline_spans(token.children or ()))
            index += 1
        self._flush_marker()
        # Rows may have fewer cells than the heading.
        for row in rows:
            row.extend([()] * (len(alignments) - len(row)))
        if len(rows) * len(alignments) <= MAX_CELLS:
            indent, quote = min(len(self._lists), MAX_INDENT), min(self._quote, MAX_INDENT)
            self._blocks.append(
                Table(tuple(tuple(row[: len(alignments)]) for row in rows), tuple(alignments), indent, quote)
            )
        else:
            for row in rows:
                self._add_line(Line("text", tuple(span for cell in row for span in (*cell, TextSpan("  ")))))
        return index + 1


def inline_spans(children: Sequence[Token]) -> tuple[TextSpan, ...]:
    """Convert the inline tokens of a paragraph to spans of text with formats, links and formulas."""
    spans: list[TextSpan] = []
    bold = italic = struck = 0
    link, link_from = "", 0
    for child in children:
        match child.type:
            case "strong_open" | "strong_close":
                bold += child.nesting
            case "em_open" | "em_close":
                italic += child.nesting
            case "s_open" | "s_close":
                struck += child.nesting
            case "link_open":
                link, link_from = visible(str(child.attrs.get("href", ""))), len(spans)
            case "link_close":
                spans += _address_beside(link, "".join(span.text for span in spans[link_from:]))
                link = ""
            case "image":
                spans += _picture_words(child)
            case "math_inline" | "math_inline_double":
                source = visible(child.content.strip())
                if len(source) > MAX_FORMULA_CHARACTERS:
                    spans.append(TextSpan(source))
                    continue
                spans.append(TextSpan(source, formula="display" if child.type == "math_inline_double" else "inline"))
            case "softbreak" | "hardbreak":
                spans.append(TextSpan("\n"))
            case _:
                text = visible(child.content)
                look = TextSpan(text, bold > 0, italic > 0, struck > 0, code=child.type == "code_inline", link=link)
                if text:
                    _append(spans, look)
    return tuple(spans)


def _append(spans: list[TextSpan], span: TextSpan) -> None:
    """Append a span (text with one format). Spans with the same format are joined: fewer spans are drawn faster."""
    # Line breaks stay spans of their own, because `_bounded` cuts there.
    if spans and spans[-1].text != "\n" and replace(spans[-1], text=span.text) == span:
        span = replace(span, text=spans.pop().text + span.text)
    spans.append(span)


def _address_beside(link: str, words: str) -> list[TextSpan]:
    """Return what is shown in a dim colour after a link's text: the host of `link`; without a host, the whole address.

    The result is empty if the link's text, `words`, is itself an address with the same host. It is not enough that the
    text contains the host: "https://bank.example/?evil.example" contains evil.example, but looks like bank.example.
    """
    host = _host(link)
    # Text without spaces and @ may itself be an address.
    if host:
        # Without "//" `urlsplit` would take "example.org/page" for a path without a host.
        shown_host = "" if "@" in words or " " in words else _host(words if "://" in words else f"//{words}")
        return [] if shown_host == host else [TextSpan(f" ({host})", dim=True)]
    target = link.removeprefix("mailto:")
    return [] if target.lower() == words.removeprefix("mailto:").lower() else [TextSpan(f" ({target})", dim=True)]


def _host(address: str) -> str:
    """Return the host of an address in lower case; empty if it has none."""
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""


def _picture_words(token: Token) -> list[TextSpan]:
    """Return the placeholder for an image: its alternative text and its address. Images are never fetched."""
    words = visible(token.content) or "picture"
    address = visible(str(token.attrs.get("src", "")))
    return [TextSpan(tr("[picture: {words}]", words=words), link=address), TextSpan(f" ({address})", dim=True)]


def _bounded(spans: tuple[TextSpan, ...]) -> list[tuple[TextSpan, ...]]:
    """Split `spans` into lines that are short enough for Qt's layout, which is slow for long paragraphs."""
    if sum(len(span.text) for span in spans) <= MAX_TEXT_CHARACTERS:
        return [spans]
    lines: list[list[TextSpan]] = [[]]
    room = MAX_TEXT_CHARACTERS
    for span in spans:
        # A break in the second half of the room is taken, so that few lines are cut inside a word.
        if span.text == "\n" and room < MAX_TEXT_CHARACTERS // 2:
            lines.append([])
            room = MAX_TEXT_CHARACTERS
            continue
        text = span.text
        # A formula is one object of the document and cannot be cut.
        while len(text) > room and not span.formula:
            lines[-1].append(replace(span, text=text[:room]))
            text, room = text[room:], MAX_TEXT_CHARACTERS
            lines.append([])
        if text:
            lines[-1].append(replace(span, text=text))
            room -= len(text)
            if room <= 0:
                lines.append([])
                room = MAX_TEXT_CHARACTERS
    return [tuple(line) for line in lines if line]
