"""Formulas as SVG images: rendered in another thread, cached, and drawn by Qt as part of the text."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from msgspec import Struct
from PySide6.QtCore import QByteArray, QObject, QRect, QRectF, QSizeF, Qt, Signal
from PySide6.QtGui import QFontMetricsF, QPainter, QPyTextObject, QTextDocument, QTextFormat
from PySide6.QtSvg import QSvgRenderer

Submit = Callable[[Callable[[], None]], None]
"""Function that runs a given function in another thread. Functions run one after the other, in the order of the calls.
"""

FORMULA_TYPE = QTextFormat.ObjectTypes.UserObject.value + 1
SOURCE = QTextFormat.Property.UserProperty.value + 1
SHOWN = QTextFormat.Property.UserProperty.value + 2
COLOUR = QTextFormat.Property.UserProperty.value + 3

MAX_KEPT = 1_000


class FormulaKey(Struct, frozen=True):
    """The cache key of a formula.

    `source`: LaTeX source of the formula. `is_display`: whether the formula stands on a line of its own.
    `colour`: text colour as `#rrggbb`.
    """

    source: str
    is_display: bool
    colour: str


class Formula(Struct, frozen=True):
    """A rendered formula. Sizes are in pixels; `depth` is the height below the baseline."""

    svg: bytes
    width: float
    height: float
    depth: float


DrawFormula = Callable[[FormulaKey], Formula | None]
"""Function that renders a formula; it returns None for invalid source. It is called in a thread of its own."""


class Formulas(QObject):
    """Cache of rendered formulas. A formula that is not in the cache is rendered in another thread."""

    drawn = Signal(FormulaKey)
    """Emitted when a requested formula was rendered, or when that failed."""

    _made = Signal(object)

    def __init__(self, submit: Submit, draw: DrawFormula | None, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._submit = submit
        self._draw = draw
        self._kept: OrderedDict[FormulaKey, Formula | None] = OrderedDict()
        self._renderers: dict[FormulaKey, QSvgRenderer] = {}
        self._asked: set[FormulaKey] = set()
        self._made.connect(self._on_made, Qt.ConnectionType.QueuedConnection)

    def get(self, key: FormulaKey) -> Formula | None:
        """Return a rendered formula; None while it is being rendered, or if it cannot be rendered."""
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        if key not in self._asked:
            self._asked.add(key)
            self._submit(lambda: self._make(key))
        return None

    def renderer(self, key: FormulaKey, formula: Formula) -> QSvgRenderer:
        """Return the Qt object that paints the SVG image of `formula`. It is made once for each `key`."""
        if key not in self._renderers:
            self._renderers[key] = QSvgRenderer(QByteArray(formula.svg))
        return self._renderers[key]

    def _make(self, key: FormulaKey) -> None:
        try:
            self._made.emit((key, self._draw(key) if self._draw is not None else None))
        except RuntimeError:
            return  # The window closed in the meantime.

    def _on_made(self, made: tuple[FormulaKey, Formula | None]) -> None:
        key, formula = made
        self._asked.discard(key)
        self._kept[key] = formula
        # `get` moves a formula to the end, so the first one was used longest ago.
        while len(self._kept) > MAX_KEPT:
            oldest, _ = self._kept.popitem(last=False)
            self._renderers.pop(oldest, None)
        self.drawn.emit(key)


def key_of(character_format: QTextFormat) -> FormulaKey:
    """Return the cache key of the formula that has this character format in a document."""
    return FormulaKey(
        str(character_format.property(SOURCE)),
        character_format.property(SHOWN) == "display",
        str(character_format.property(COLOUR)),
    )


class FormulaObject(QPyTextObject):
    """Qt text object that draws a formula: its SVG image, or its LaTeX source until the image is rendered."""

    def __init__(self, formulas: Formulas, parent: QObject) -> None:
        super().__init__(parent)
        self._formulas = formulas

    def intrinsicSize(self, document: QTextDocument, _position: int, text_format: QTextFormat) -> QSizeF:
        formula = self._formulas.get(key_of(text_format))
        room = max(document.textWidth() - 2 * document.documentMargin(), 40.0)
        if formula is None:
            font = text_format.toCharFormat().font()
            metrics = QFontMetricsF(font)
            flags = Qt.TextFlag.TextWrapAnywhere.value
            box = metrics.boundingRect(QRectF(0, 0, room - 2, 10_000), flags, str(text_format.property(SOURCE)))
            return QSizeF(min(box.width() + 2, room), box.height())
        # A formula wider than the message is made smaller.
        scale = min(1.0, room / formula.width)
        above = formula.height - formula.depth
        # The object is aligned by its middle, so its height is symmetric around the baseline.
        return QSizeF(formula.width * scale, 2 * max(above, formula.depth) * scale)

    def drawObject(
        self,
        painter: QPainter,
        rect: QRectF | QRect,
        document: QTextDocument,
        _position: int,
        text_format: QTextFormat,
    ) -> None:
        key, rect = key_of(text_format), QRectF(rect)
        formula = self._formulas.get(key)
        if formula is None:
            painter.setFont(text_format.toCharFormat().font())
            painter.setPen(text_format.toCharFormat().foreground().color())
            painter.drawText(rect, Qt.TextFlag.TextWrapAnywhere.value, key.source)
            return
        scale = min(1.0, rect.width() / formula.width)
        # Qt's AlignMiddle puts the middle a quarter of the x-height above the baseline.
        line = rect.center().y() + QFontMetricsF(text_format.toCharFormat().font()).xHeight() / 4
        top = line - (formula.height - formula.depth) * scale
        picture = QRectF(rect.left(), top, formula.width * scale, formula.height * scale)
        self._formulas.renderer(key, formula).render(painter, picture)
