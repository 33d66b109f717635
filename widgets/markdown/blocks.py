"""What Markdown comes to before it is drawn: lines of styled text, and tables. Plain values, without Qt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LineKind = Literal["text", "heading", "code", "rule"]
Alignment = Literal["left", "center", "right"]


@dataclass(frozen=True, slots=True)
class Run:
    """Text of one look. `formula` is LaTeX (its own source is `text`); `token` is the kind of a word of code."""

    text: str
    bold: bool = False
    italic: bool = False
    struck: bool = False
    code: bool = False
    dim: bool = False
    link: str = ""
    formula: Literal["", "inline", "display"] = ""
    token: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """One paragraph. `marker` stands before it (a bullet, a number, a box); `indent` and `quote` count levels.

    Of code, `begins` and `ends` tell the first and the last line, `joins` that it goes on the line before, which was
    too long for one.
    """

    kind: LineKind
    runs: tuple[Run, ...] = ()
    level: int = 0
    indent: int = 0
    quote: int = 0
    marker: str = ""
    language: str = ""
    begins: bool = False
    ends: bool = False
    joins: bool = False
    centred: bool = False

    @property
    def all_runs(self) -> tuple[Run, ...]:
        return self.runs

    @property
    def text(self) -> str:
        """The words alone."""
        return "".join(run.text for run in self.runs)


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells, the first one the heading. Every row has as many cells as there are `alignments`."""

    rows: tuple[tuple[tuple[Run, ...], ...], ...]
    alignments: tuple[Alignment, ...]
    indent: int = 0
    quote: int = 0

    @property
    def all_runs(self) -> tuple[Run, ...]:
        """Those of all cells."""
        return tuple(run for row in self.rows for cell in row for run in cell)


Block = Line | Table
