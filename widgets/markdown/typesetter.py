"""What all messages of a window share: looks, pictures of formulas, and who parses beside the GUI thread."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, TypeVar

from PySide6.QtCore import QObject, Qt, Signal

from widgets.common.palette import DARK, Palette
from widgets.markdown.document import MarkdownDocument
from widgets.markdown.formulas import DrawFormula, Formulas, Submit
from widgets.markdown.stream import parse_whole
from widgets.markdown.styles import Styles

_T = TypeVar("_T")


class Typesetter(QObject):
    """Given the means to work in other threads: `parse` for what people wait for, `draw` for formulas.

    `draw_formula` makes a picture; without it formulas are shown as their source.
    """

    restyled = Signal()

    _parsed = Signal(object)

    def __init__(
        self, parse: Submit, draw: Submit, parent: QObject | None = None, *, draw_formula: DrawFormula | None = None
    ) -> None:
        super().__init__(parent)
        self._submit = parse
        self._waiting: dict[int, Callable[[Any], None]] = {}
        self._tickets = count()
        self._parsed.connect(self._on_parsed, Qt.ConnectionType.QueuedConnection)
        self.formulas = Formulas(draw, draw_formula, self)
        self._styles: Styles | None = None
        self._palette = DARK

    def warm_up(self) -> None:
        """Load what parsing needs, before anybody waits for it."""
        self._submit(_parse_something)

    def parse(self, work: Callable[[], _T], then: Callable[[_T], None]) -> None:
        """Do `work` in the other thread, and `then` with its answer in this one.

        Answers come through this object, which lives as long as the window: a message may be deleted in the moment in
        which the other thread would tell it something.
        """
        ticket = next(self._tickets)
        self._waiting[ticket] = then

        def answer() -> None:
            found = work()
            try:
                self._parsed.emit((ticket, found))
            except RuntimeError:
                return  # The window closed in the meantime.

        self._submit(answer)

    def _on_parsed(self, answer: tuple[int, Any]) -> None:
        ticket, found = answer
        self._waiting.pop(ticket)(found)

    @property
    def palette(self) -> Palette:
        return self._palette

    @property
    def styles(self) -> Styles:
        """The looks; fonts want an application, so they are made when first asked for."""
        if self._styles is None:
            self._styles = Styles(self._palette)
        return self._styles

    def apply_palette(self, palette: Palette) -> None:
        """Use the colours of `palette` from now on, everywhere."""
        self._palette = palette
        self._styles = Styles(palette)
        self.restyled.emit()

    def make_document(self, parent: QObject) -> MarkdownDocument:
        """Return an empty document, owned by `parent`."""
        return MarkdownDocument(self.styles, self.formulas, parent)


def _parse_something() -> None:
    parse_whole("*a*")
