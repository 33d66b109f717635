"""Formulas made to expand without end: drawn or shown as text within a time limit, and never too large."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from engine.runtime.media.images.formula import MAX_SIDE_PX, MAX_SVG_BYTES, FormulaProcess
from tests.support.selection import some


def nested(opening: str, depth: int = 19, core: str = "x") -> str:
    return opening * depth + core + "}" * depth


def doubled(opening: str, between: str, depth: int = 10) -> str:
    """What holds itself twice at each level."""
    inner = "x" if depth == 0 else doubled(opening, between, depth - 1)
    return inner if depth == 0 else f"{opening}{inner}{between}{inner}}}"


def rows(count: int, columns: int) -> str:
    return r"\\".join("&".join(["1"] * columns) for _ in range(count))


COMMANDS = (
    "sqrt", "hat", "widehat", "overbrace", "underbrace", "overline", "mathrm", "mathbf", "text", "mbox", "phantom",
    "boxed", "cancel", "smash", "xrightarrow", "stackrel{a}", "textcolor{red}", "frac{1}", "dfrac{1}", "cfrac{1}",
)  # fmt: skip
LENGTHS = ("1e9em", "1e300em", "-1e308em", "nan", "inf", "1000000000em")
FORMULAS: dict[str, str] = {
    **{f"nested {name}": nested(f"\\{name}{{") for name in COMMANDS},
    **{f"many {name}": f"\\{name}{{x}}" * 500 for name in COMMANDS},
    **{f"space of {length}": rf"a\hspace{{{length}}}b" for length in LENGTHS},
    **{f"rule of {length}": rf"\rule{{1em}}{{{length}}}" for length in LENGTHS},
    **{f"row of {length}": rf"\begin{{matrix}}1\\[{length}]2\end{{matrix}}" for length in LENGTHS},
    "macro of itself": r"\newcommand{\a}{\a\a}\a",
    "definition of itself": r"\def\a{\a\a}\a",
    "macros that double": "".join(rf"\newcommand{{\{chr(97 + n)}}}{{\{chr(98 + n) * 2}}}" for n in range(20)) + r"\a",
    "fractions of fractions": doubled(r"\frac{", "}{"),
    "powers and indices": doubled("x^{", "}_{"),
    "overset": doubled(r"\overset{", "}{"),
    "binomials": doubled(r"\binom{", "}{"),
    "powers": nested("x^{"),
    "indices": nested("x_{"),
    "double powers": "x" + "^x" * 10_000,
    "primes": "x" + "'" * 10_000,
    "a sum": "x+" * 20_000,
    "digits": "1" * 100_000,
    "letters": "a" * 100_000,
    "large matrix": rf"\begin{{matrix}}{rows(100, 100)}\end{{matrix}}",
    "long matrix": rf"\begin{{matrix}}{rows(1000, 3)}\end{{matrix}}",
    "many columns": rf"\begin{{array}}{{{'c' * 10_000}}}1\end{{array}}",
    "repeated columns": r"\begin{array}{*{100000000}{c}}1\end{array}",
    "columns of columns": r"\begin{array}{*{10000}{*{10000}{c}}}1\end{array}",
    "wide cell": r"\begin{array}{c}\multicolumn{100000000}{c}{x}\end{array}",
    "matrices in matrices": r"\begin{pmatrix}" * 15 + "x" + r"\end{pmatrix}" * 15,
    "cases in cases": r"\begin{cases}" * 19 + "x" + r"\end{cases}" * 19,
    "begin alone": r"\begin{matrix}1&2",
    "end alone": r"\end{matrix}",
    "begin and another end": r"\begin{matrix}1\end{pmatrix}" * 15,
    "name of a begin": rf"\begin{{{'x' * 50_000}}}",
    "left without right": r"\left(" * 5000,
    "few left without right": r"\left(" * 15 + "x",
    "right without left": r"\right)" * 5000,
    "left of all kinds": r"\left(\left[\left\{" * 6 + "x",
    "left in left": r"\left(" * 19 + "x" + r"\right)" * 19,
    "middles": r"\left(" + r"\middle|" * 5000 + r"\right)",
    "left of a letter": r"\leftx\righty",
    "sizes": r"\big(\Big(\bigg(\Bigg(" * 2000,
    "roots of roots": r"\sqrt[\sqrt[\sqrt[x]{x}]{x}]{x}" * 200,
    "files": r"\input{/etc/passwd}\include{/dev/zero}\includegraphics{/dev/zero}",
    "commands of a shell": r"\immediate\write18{touch /tmp/x}",
    "categories": r"\catcode`\@=11 \@",
    "kerning": r"\kern1e308em x\mkern-1e308mu x",
    "fraction of a length": r"\genfrac{(}{)}{1e300em}{0}{a}{b}",
    "bidirectional": "\u202e\u2066x\u2069" * 500,
    "lone surrogate": "\ud800x",
    "nothing": "x\0y",
    "controls": "".join(map(chr, range(1, 32))) * 50,
    "no characters": "\ufffe\uffff" * 100,
    "marks on one letter": "x" + "\u0301" * 20_000,
    "joined pictures": "\U0001f468\u200d\U0001f469" * 2000,
    "ideographs": "\u6f22" * 5000,
    "elements": "<script>&amp;]]>" * 100,
    "empty": "",
    "blanks": " " * 100_000,
    "braces": "{" * 19 + "}" * 19,
    "open braces": "{" * 19,
    "closed braces": "}" * 5000,
    "remarks": "%" * 10_000 + "\nx",
    "backslashes": "\\" * 10_001,
    "parameters": "#1" * 5000,
    "unknown commands": r"\foo" * 5000,
    "a long command": "\\" + "a" * 100_000,
    "not": r"\not" * 5000 + "x",
    "integrals": r"\int" * 5000,
    "limits": nested(r"\sum\limits_{", 15),
    "stacks": r"\substack{" + r"a\\" * 3000 + "}",
    "over": "{a" + r"\over b}" * 15,
    "lines of a table": r"\begin{array}{c}" + r"\hline" * 5000 + r"1\end{array}",
}


@pytest.fixture
def process() -> Iterator[FormulaProcess]:
    made = FormulaProcess()
    yield made
    made.close()


@pytest.mark.parametrize("name", some(tuple(FORMULAS), 6))
def test_a_formula_is_drawn_within_bounds_or_left_as_words(process: FormulaProcess, name: str) -> None:
    """A rule of a billion ems made a message that was taller than Qt can count."""
    formula = process.draw(FORMULAS[name], is_display=True, colour="#000000")
    if formula is not None:
        assert max(formula.width_px, formula.height_px, formula.depth_px) <= MAX_SIDE_PX + 2
        assert len(formula.svg) <= MAX_SVG_BYTES
        assert "<script" not in formula.svg


def test_one_that_takes_too_long_costs_itself_alone(process: FormulaProcess) -> None:
    assert process.draw(nested("\\sqrt{"), is_display=True, colour="#000000") is None
    drawn = process.draw(r"\sqrt{1+\sqrt{x}}", is_display=True, colour="#000000")
    assert drawn is not None
    assert drawn.svg.startswith("<svg")


def test_formulas_are_drawn_in_a_child_that_ends_with_the_window() -> None:
    """They were drawn in the window's process, whose frames waited for it."""
    before = set(psutil.Process().children())
    made = FormulaProcess()
    assert made.draw("x^2", is_display=False, colour="#ff0000") is not None
    (child,) = set(psutil.Process().children()) - before
    assert child.cmdline()[-1] == "engine.runtime.media.images.formula"
    made.close()
    assert not child.is_running()
    assert made.draw("x^3", is_display=False, colour="#ff0000") is None


def test_a_hundred_formulas_are_tried() -> None:
    assert len(FORMULAS) >= 100
