"""`python -m engine.runtime.media.images.formula`: the child that draws LaTeX formulas as SVG.

The library (ziamath) is pure Python; in a thread of the window it would delay every frame. A formula comes from the
model, and the time doubles with each nested root or fraction, because the library measures the inner part again at each
level. So a child process draws formulas, with a time limit for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.base.confinement import FORMULA
from engine.base.errors import EngineError
from engine.runtime.process.decoders import run_decoder
from engine.runtime.protocol.messages import Message
from engine.runtime.protocol.requests import Job

if TYPE_CHECKING:
    from engine.runtime.process.blocking_child import PersistentChild

SECONDS = 4.0
"""Time limit for one formula, in seconds. Large formulas in real answers take one second."""
MAX_DEPTH = 20
"""Deepest nesting of braces in a formula; deeper formulas are not drawn."""
SIZE_PX = 16.0
MAX_SIDE_PX = 20_000.0
MAX_SVG_BYTES = 8 << 20


class DrawFormula(Job, frozen=True, tag="draw_formula", kw_only=True):
    """Request to draw a formula; answered by `DrawnFormula`.

    `source`: the formula in LaTeX.
    `is_display`: whether the formula stands on a line of its own.
    `colour`: colour of the formula as `#rrggbb`.
    """

    source: str
    is_display: bool
    colour: str


class DrawnFormula(Message, frozen=True, tag="drawn_formula", kw_only=True):
    """A drawn formula. `svg`: the drawing; empty if the source is invalid. `depth_px`: height below the baseline."""

    svg: str = ""
    width_px: float = 0.0
    height_px: float = 0.0
    depth_px: float = 0.0


class FormulaProcess:
    """Draws formulas in a child process, which starts with the first formula.

    All methods except `close` must be called in one thread.
    """

    def __init__(self) -> None:
        self._child: PersistentChild | None = None
        self._is_closed = False

    def draw(self, source: str, *, is_display: bool, colour: str) -> DrawnFormula | None:
        """Return the drawn formula; None if its source is invalid or nested too deeply, or takes too long. Blocks.

        `source`: the formula in LaTeX.
        `is_display`: whether the formula stands on a line of its own.
        `colour`: colour of the formula as `#rrggbb`.
        """
        if self._is_closed or _depth(source) > MAX_DEPTH:
            return None
        if self._child is None:
            from engine.runtime.process.blocking_child import PersistentChild

            self._child = PersistentChild("formula", DrawnFormula)
        source = source.encode("utf-8", "replace").decode()
        request = DrawFormula(source=source, is_display=is_display, colour=colour, seconds=SECONDS)
        try:
            drawn = self._child.ask(request, DrawnFormula)
        except EngineError:
            return None
        # A formula that has taken over the child could send anything.
        sizes = (drawn.width_px, drawn.height_px, drawn.depth_px)
        is_sound = all(0 <= size <= MAX_SIDE_PX + 2 for size in sizes) and len(drawn.svg) <= MAX_SVG_BYTES
        # The window divides by width and height.
        return drawn if drawn.svg and is_sound and min(drawn.width_px, drawn.height_px) > 0 else None

    def close(self) -> None:
        """End the child. Later calls of `draw` return None."""
        self._is_closed = True
        if self._child is not None:
            self._child.close()


def main() -> None:
    """Run as the child that draws formulas until the parent ends it."""
    # The library reads its fonts on first use (a third of a second). After confinement it could not read them.
    from ziamath.zmath import Latex

    Latex("x")
    run_decoder(DrawFormula, draw_formula, FORMULA)


def draw_formula(request: DrawFormula) -> DrawnFormula:
    """Return the drawn formula. Runs in the child; only the parent limits its time."""
    from ziamath.config import config
    from ziamath.zmath import Latex

    # Qt's SVG renderer draws paths, but not the reused <symbol> elements of SVG 2.
    config.svg2 = False
    try:
        drawn = Latex(request.source, size=SIZE_PX, color=request.colour, inline=not request.is_display)
        width, height = drawn.getsize()
        # A formula may name any length, and Qt cannot lay out a message that is taller than its coordinates.
        if not max(abs(width), abs(height), abs(drawn.getyofst())) <= MAX_SIDE_PX:
            return DrawnFormula()
        depth = max(-drawn.getyofst(), 0.0) + 1
        return DrawnFormula(svg=drawn.svg(), width_px=width + 2, height_px=height + 2, depth_px=depth)
    except Exception:  # The library raises all kinds on invalid input; the formula is then shown as text.
        return DrawnFormula()


def _depth(source: str) -> int:
    deepest = depth = 0
    for character in source:
        depth += (character == "{") - (character == "}")
        deepest = max(deepest, depth)
    return max(deepest, source.count("\\left"), source.count("\\begin"))


if __name__ == "__main__":
    main()
