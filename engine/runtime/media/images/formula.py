"""`python -m engine.runtime.media.images.formula`: the child that draws formulas, LaTeX to SVG.

The library that does it is Python from beginning to end: in a thread of the window it would hold up every frame. And a
formula is a program of a stranger: it measures what is inside a root or a fraction again at each level, so that the
work doubles with each of them. The child has little time for each, and is killed for one that takes more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.base.errors import EngineError
from engine.runtime.process.decoders import run_decoder
from engine.runtime.protocol.messages import Job, Message

if TYPE_CHECKING:
    from engine.runtime.process.questions import KeptChild

SECONDS = 4.0
"""For one formula. Large honest ones take one second."""
MEMORY_BYTES = 512 << 20
MAX_DEPTH = 20
"""Braces within braces."""
SIZE_PX = 16.0
MAX_SIDE_PX = 20_000.0
MAX_SVG_BYTES = 8 << 20


class DrawFormula(Job, frozen=True, tag="draw_formula", kw_only=True):
    """Draw a formula; `colour` is `#rrggbb`."""

    source: str
    is_display: bool
    colour: str


class DrawnFormula(Message, frozen=True, tag="drawn_formula", kw_only=True):
    """A picture of a formula, sizes in pixels; `depth_px` hangs below the line of the text. No `svg`: it is none."""

    svg: str = ""
    width_px: float = 0.0
    height_px: float = 0.0
    depth_px: float = 0.0


class FormulaProcess:
    """Draws formulas by a child, which is started by the first. For one thread, but for `close`."""

    def __init__(self) -> None:
        self._child: KeptChild | None = None
        self._is_closed = False

    def draw(self, source: str, *, is_display: bool, colour: str) -> DrawnFormula | None:
        """Return the picture of a formula; None if its source is none, or asks for too much."""
        if self._is_closed or _depth(source) > MAX_DEPTH:
            return None
        if self._child is None:
            from engine.runtime.process.questions import KeptChild

            self._child = KeptChild("formula", DrawnFormula)
        source = source.encode("utf-8", "replace").decode()
        request = DrawFormula(source=source, is_display=is_display, colour=colour, seconds=SECONDS)
        try:
            drawn = self._child.ask(request, DrawnFormula)
        except EngineError:
            return None
        # what broke the child may speak for it
        sizes = (drawn.width_px, drawn.height_px, drawn.depth_px)
        is_sound = all(0 <= size <= MAX_SIDE_PX + 2 for size in sizes) and len(drawn.svg) <= MAX_SVG_BYTES
        # The window divides by the width.
        return drawn if drawn.svg and is_sound and min(drawn.width_px, drawn.height_px) > 0 else None

    def close(self) -> None:
        """End the child; nothing is drawn any more."""
        self._is_closed = True
        if self._child is not None:
            self._child.close()


def main() -> None:
    """Draw formulas until the parent ends."""
    # Before the file system is gone, and a third of a second: the fonts are files of the library.
    from ziamath.zmath import Latex

    Latex("x")
    run_decoder(DrawFormula, draw_formula, MEMORY_BYTES)


def draw_formula(request: DrawFormula) -> DrawnFormula:
    """Return the picture of a formula; it may take any time."""
    from ziamath.config import config
    from ziamath.zmath import Latex

    # Qt draws plain paths only, not symbols that are used again.
    config.svg2 = False
    try:
        drawn = Latex(request.source, size=SIZE_PX, color=request.colour, inline=not request.is_display)
        width, height = drawn.getsize()
        # A formula names lengths as it likes, and a message that is taller than Qt can count is not laid out.
        if not max(abs(width), abs(height), abs(drawn.getyofst())) <= MAX_SIDE_PX:
            return DrawnFormula()
        depth = max(-drawn.getyofst(), 0.0) + 1
        return DrawnFormula(svg=drawn.svg(), width_px=width + 2, height_px=height + 2, depth_px=depth)
    except Exception:  # Whatever a parser of strangers' words comes upon: it is shown as text then.
        return DrawnFormula()


def _depth(source: str) -> int:
    deepest = depth = 0
    for character in source:
        depth += (character == "{") - (character == "}")
        deepest = max(deepest, depth)
    return max(deepest, source.count("\\left"), source.count("\\begin"))


if __name__ == "__main__":
    main()
