"""What of one message is drawn: Qt lays all of a document out, in the GUI thread."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from widgets.markdown.blocks import Block, Line, Run, Table

MAX_PIECES = 10_000
"""Lines and cells of tables; 10,000 take Qt about a second."""
MAX_FORMULAS = 200
"""Those after it stay as they are written. Fewer than pictures are kept, else they would be made again without end."""


@dataclass(slots=True)
class Room:
    """What is left of it, and the characters of the blocks that came too late."""

    pieces: int = MAX_PIECES
    formulas: int = MAX_FORMULAS
    left_out: int = 0

    def take(self, blocks: Iterable[Block]) -> list[Block]:
        """Return the blocks that there is room for, in their order; code that is cut ends where it is cut."""
        taken: list[Block] = []
        for block in blocks:
            pieces = len(block.rows) * len(block.alignments) if isinstance(block, Table) else 1
            if pieces > self.pieces:
                self.pieces = 0
                self.left_out += sum(len(run.text) for run in block.all_runs)
                continue
            self.pieces -= pieces
            taken.append(self._with_formulas(block))
        if taken and isinstance(last := taken[-1], Line) and last.kind == "code" and not last.ends:
            taken[-1] = replace(last, ends=True)
        return taken

    def _with_formulas(self, block: Block) -> Block:
        count = sum(bool(run.formula) for run in block.all_runs)
        if count <= self.formulas:
            self.formulas -= count
            return block
        if isinstance(block, Line):
            return replace(block, runs=self._words(block.runs))
        return replace(block, rows=tuple(tuple(self._words(cell) for cell in row) for row in block.rows))

    def _words(self, runs: Iterable[Run]) -> tuple[Run, ...]:
        result: list[Run] = []
        for run in runs:
            if run.formula and not self.formulas:
                result.append(replace(run, formula=""))
                continue
            self.formulas -= bool(run.formula)
            result.append(run)
        return tuple(result)
