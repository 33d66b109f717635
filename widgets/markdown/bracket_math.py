r"""The formulas between `\(` and `\)`, `\[` and `\]`: rules beside those of the plugin for dollars."""

from __future__ import annotations

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline

_CLOSING = {"\\(": "\\)", "\\[": "\\]"}


def bracket_math(parser: MarkdownIt) -> None:
    """Teach `parser` these formulas; they come as the tokens of the plugin for dollars."""
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
    if not silent:
        token = state.push("math_inline" if opening == "\\(" else "math_inline_double", "math", 0)
        token.content = content
    state.pos = end + 2
    return True


def _block(state: StateBlock, start_line: int, end_line: int, silent: bool) -> bool:
    r"""A line that begins with `\[`, up to one that ends with `\]`. No blank line lies between, as in LaTeX itself."""
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
