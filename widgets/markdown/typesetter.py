"""What all messages of a window share: looks, pictures of formulas, and who parses beside the GUI thread."""

from __future__ import annotations

from PySide6.QtCore import QObject, Signal

from widgets.common.palette import DARK, Palette
from widgets.markdown.document import MarkdownDocument
from widgets.markdown.formulas import Formulas, Submit
from widgets.markdown.stream import parse_whole
from widgets.markdown.styles import Styles


class Typesetter(QObject):
    """Given the means to work in other threads: `parse` for what people wait for, `draw` for formulas."""

    restyled = Signal()

    def __init__(self, parse: Submit, draw: Submit, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.parse = parse
        self.formulas = Formulas(draw, self)
        self._styles: Styles | None = None
        self._palette = DARK

    def warm_up(self) -> None:
        """Load what parsing needs, before anybody waits for it."""
        self.parse(_parse_something)

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
