"""Objects that all messages of a window share: text formats, formulas, and the thread that parses Markdown."""

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
    """Makes Markdown documents, and runs functions for them in other threads.

    `parse`: runs a function in the thread that parses Markdown.
    `draw`: runs a function in the thread that renders formulas.
    `draw_formula`: renders a formula; if it is None, formulas are shown as their LaTeX source.
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
        # Queued: the parsing thread emits this signal.
        self._parsed.connect(self._on_parsed, Qt.ConnectionType.QueuedConnection)
        self.formulas = Formulas(draw, draw_formula, self)
        self._styles: Styles | None = None
        self._palette = DARK

    def warm_up(self) -> None:
        """Import the Markdown parser in the thread that will use it, before the first message needs it."""
        self._submit(_parse_something)

    def parse(self, work: Callable[[], _T], then: Callable[[_T], None]) -> None:
        """Call `work` in the parsing thread, then `then` with its result in the GUI thread.

        A signal of this object brings the result to the GUI thread. This object lives as long as the window, while a
        message can be deleted before its text is parsed.
        """
        ticket = next(self._tickets)
        # Only the number goes through the other thread. The callback, often a method of a widget, stays in the GUI
        # thread.
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
        """The text formats of the palette. They are made on first use, since fonts need a `QApplication`."""
        if self._styles is None:
            self._styles = Styles(self._palette)
        return self._styles

    def apply_palette(self, palette: Palette) -> None:
        """Use the colours of `palette` in all documents."""
        self._palette = palette
        self._styles = Styles(palette)
        self.restyled.emit()

    def make_document(self, parent: QObject) -> MarkdownDocument:
        """Return an empty document, owned by `parent`."""
        return MarkdownDocument(self.styles, self.formulas, parent)


def _parse_something() -> None:
    parse_whole("*a*")
