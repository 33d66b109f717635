"""Widgets around the lanes: the ruler with layer numbers above, notes and the legend below."""

from __future__ import annotations

from msgspec import Struct
from PySide6.QtCore import QPointF, QRectF, QSize, Qt
from PySide6.QtGui import QPainter, QPaintEvent, QPen, QResizeEvent
from PySide6.QtWidgets import QScrollArea, QSizePolicy, QVBoxLayout, QWidget

from engine.base.language import tr
from widgets.common.boxes import h_box
from widgets.common.elided_label import ElidedLabel
from widgets.common.memory_bar import SegmentRole, segment_colour
from widgets.common.painting import colour, keep_left_to_right
from widgets.common.palette import DARK, Palette
from widgets.common.roles import plain_label, set_role, tool_button
from widgets.common.text import Fonts, text_width, zoom, zoomed
from widgets.layout_editor.geometry import Track

RULER_HEIGHT = 24
_MIN_DISTANCE = 44.0


def ruler_step(n_layers: int, width: float) -> int:
    """Return the distance between two numbers of the ruler, in layers: a power of two.

    With this step the numbers are on average at least `_MIN_DISTANCE` pixels apart.
    `width`: width in pixels of all layers together.
    """
    step = 1
    while step < n_layers and width / max(n_layers, 1) * step < _MIN_DISTANCE:
        step *= 2
    return step


class Ruler(QWidget):
    """The ruler above the lanes: a layer's number is above the middle of the layer."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self._fonts = Fonts()
        self._track: Track | None = None
        self._palette = DARK

    def set_track(self, track: Track | None, palette: Palette) -> None:
        """Number the layers of `track`; None removes the numbers."""
        if track != self._track or palette is not self._palette:
            self._track, self._palette = track, palette
            self.update()

    def sizeHint(self) -> QSize:
        """Return the height of one line of small text."""
        return QSize(0, RULER_HEIGHT)

    def paintEvent(self, event: QPaintEvent) -> None:
        """Paint numbers and ticks. A number that would touch the previous one is left out."""
        track = self._track
        if track is None or track.n_layers == 0:
            return
        painter = QPainter(self)
        painter.scale(zoom(), zoom())
        painter.setFont(self._fonts.small)
        painter.setPen(colour(self._palette.dim))
        step = ruler_step(track.n_layers, track.edges[-1] - track.edges[0])
        free_from = -1.0
        for layer in range(0, track.n_layers, step):
            # The last pixel of a layer is its gap to the next one. Half a pixel puts a one-pixel tick on one column.
            centre = round((track.edges[layer] + track.edges[layer + 1] - 1) / 2) + 0.5
            width = text_width(str(layer), self._fonts.small)
            # `ruler_step` keeps distances on average only: layers are as wide as their bytes, so some numbers still
            # collide.
            if centre - width / 2 < free_from:
                continue
            free_from = centre + width / 2 + 8
            rect = QRectF(centre - width / 2 - 2, 0, width + 4, RULER_HEIGHT - 7)
            painter.drawText(rect, int(Qt.AlignmentFlag.AlignCenter), str(layer))
            painter.drawLine(QPointF(centre, RULER_HEIGHT - 5), QPointF(centre, RULER_HEIGHT - 2))
        painter.end()


_MAX_LINES = 3
_SHOW_ALL, _SHOW_LESS = tr("Show All"), tr("Show Less")


class Notes(QWidget):
    """Warnings and advice below the lanes: up to three elided lines, or all of them in full after "Show All".

    The full text scrolls within half of the editor's height, so that the lanes stay visible.
    """

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._lines: tuple[tuple[str, bool], ...] = ()
        self._max_lines = _MAX_LINES
        self._labels = [ElidedLabel() for _ in range(_MAX_LINES)]
        self.button = tool_button(_SHOW_ALL, tr("Show all warnings and notes in full"))
        self.button.setCheckable(True)
        self.button.toggled.connect(self._show)
        self.drop_button = tool_button(
            tr("Drop Overrides"), tr("Drop the overrides that this split mode does not allow")
        )
        self.drop_button.hide()
        self._whole = plain_label(wrap=True)
        # Remedies name options and files, which people copy.
        self._whole.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self._scroll = QScrollArea()
        self._scroll.setWidgetResizable(True)
        self._scroll.setFrameShape(QScrollArea.Shape.NoFrame)
        self._scroll.setAccessibleName(tr("Warnings and notes"))
        self._scroll.setWidget(self._whole)
        short = QVBoxLayout()
        short.setSpacing(4)
        for label in self._labels:
            short.addWidget(label)
        row = h_box(self, spacing=8)
        row.addLayout(short, 1)
        row.addWidget(self._scroll, 1)
        row.addWidget(self.drop_button, 0, Qt.AlignmentFlag.AlignTop)
        row.addWidget(self.button, 0, Qt.AlignmentFlag.AlignTop)
        self.hide()
        self._show()

    def set_room(self, height: int) -> None:
        """Limit the notes to a size that leaves lanes visible in an editor of `height` pixels."""
        self._max_lines = _MAX_LINES if height >= _LOW_EDITOR else 1
        self._scroll.setFixedHeight(max(height // 2 - 2 * _LEGEND_LINE, 3 * _LEGEND_LINE))
        self._show()

    def set_lines(self, lines: tuple[tuple[str, bool], ...]) -> None:
        """Show `lines`: pairs of a text and whether it is a warning."""
        if lines != self._lines:
            self._lines = lines
            self._show()

    def resizeEvent(self, event: QResizeEvent) -> None:
        """Show the button "Show All" if a line is cut at this width."""
        super().resizeEvent(event)
        self.button.setVisible(self._has_more())

    def _has_more(self) -> bool:
        # Not `isVisible`: that is False until the window is shown, and the first lines are set before.
        is_cut = any(label.isVisibleTo(self) and label.shown_text() != label.text() for label in self._labels)
        return self.button.isChecked() or is_cut or len(self._lines) > self._max_lines

    def _show(self) -> None:
        lines, in_full = self._lines, self.button.isChecked()
        for index, label in enumerate(self._labels):
            label.setVisible(not in_full and index < min(len(lines), self._max_lines))
            if index >= len(lines):
                label.setText("")
                continue
            text, is_bad = lines[index]
            more = len(lines) - self._max_lines
            suffix = tr("  (and {more} more)", more=more) if more > 0 and index == self._max_lines - 1 else ""
            set_role(label, "error" if is_bad else "dim")
            label.setText(_marked(text, is_bad=is_bad) + suffix)
        self._whole.setText("\n".join(_marked(text, is_bad=is_bad) for text, is_bad in lines))
        self._scroll.setVisible(in_full)
        self.button.setText(_SHOW_LESS if in_full else _SHOW_ALL)
        self.button.setVisible(self._has_more())
        self.setVisible(bool(lines))


def _marked(text: str, *, is_bad: bool) -> str:
    return f"\N{WARNING SIGN} {text}" if is_bad else text


_LOW_EDITOR = 340
"""Height in pixels below which an editor shows only one line of notes."""
_LEGEND_LINE = 20
_SWATCH = 10.0
_GAP = 20.0


class LegendEntry(Struct, frozen=True):
    """An entry of the legend.

    role: the part of memory whose colour the swatch has. None for the dashed line that marks the limit in memory bars.
    """

    text: str
    role: SegmentRole | None


def legend_entries(*, experts: bool, pipeline: bool = False, draft: bool = False) -> tuple[LegendEntry, ...]:
    """Return the entries of the legend.

    experts: whether the model has experts.
    pipeline: whether devices hold copies for pipeline parallelism.
    draft: whether a draft model is loaded too.
    """
    return (
        LegendEntry(tr("other programs"), "other"),
        LegendEntry(tr("attention + dense"), "weights"),
        *((LegendEntry(tr("experts"), "experts"),) if experts else ()),
        LegendEntry(tr("KV cache"), "kv"),
        LegendEntry(tr("compute and output buffers"), "compute"),
        *((LegendEntry(tr("copies for pipeline parallelism"), "pipeline"),) if pipeline else ()),
        *((LegendEntry(tr("draft model"), "draft"),) if draft else ()),
        LegendEntry(tr("memory limit (margin subtracted)"), None),
    )


class Legend(QWidget):
    """The legend: a swatch and a text for each part of memory."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._fonts = Fonts()
        keep_left_to_right(self)
        self._palette = DARK
        self._entries = legend_entries(experts=False)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setFixedHeight(_LEGEND_LINE)

    def set_parts(self, *, experts: bool, pipeline: bool, draft: bool = False) -> None:
        """Set whether the legend has entries for experts, copies for pipeline parallelism, and a draft model."""
        entries = legend_entries(experts=experts, pipeline=pipeline, draft=draft)
        if entries != self._entries:
            self._entries = entries
            self._fit_height()
            self.update()

    def apply_palette(self, palette: Palette) -> None:
        """Use the colours of `palette`, and the zoom of the interface."""
        self._palette = palette
        self._fit_height()
        self.update()

    def sizeHint(self) -> QSize:
        """Return a size that is high enough for the entries, wrapped at the present width."""
        return QSize(320, self.height())

    def resizeEvent(self, event: QResizeEvent) -> None:
        """Wrap the entries to the new width."""
        self._fit_height()

    def _positions(self) -> list[tuple[LegendEntry, float, float]]:
        positions = []
        x = y = 0.0
        for entry in self._entries:
            width = _SWATCH + 6 + text_width(entry.text, self._fonts.small)
            # Lengths here are not zoomed, because the painter is scaled. An entry at the left end stays, however wide
            # it is.
            if x and x + width > self.width() / zoom():
                x, y = 0.0, y + _LEGEND_LINE
            positions.append((entry, x, y))
            x += width + _GAP
        return positions

    def _fit_height(self) -> None:
        self.setFixedHeight(zoomed(self._positions()[-1][2] + _LEGEND_LINE))

    def paintEvent(self, event: QPaintEvent) -> None:
        """Paint the swatches and the texts."""
        painter = QPainter(self)
        # A painter begins with the direction of the application, not with that of the widget.
        painter.setLayoutDirection(self.layoutDirection())
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.scale(zoom(), zoom())
        painter.setFont(self._fonts.small)
        for entry, x, y in self._positions():
            self._paint_swatch(painter, entry, QRectF(x, y + (_LEGEND_LINE - _SWATCH) / 2, _SWATCH, _SWATCH))
            painter.setPen(colour(self._palette.dim))
            rect = QRectF(x + _SWATCH + 6, y, self.width(), _LEGEND_LINE)
            painter.drawText(rect, int(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter), entry.text)
        painter.end()

    def _paint_swatch(self, painter: QPainter, entry: LegendEntry, rect: QRectF) -> None:
        if entry.role is None:
            pen = QPen(colour(self._palette.text, 0.75), 1.5)
            pen.setDashPattern([2.0, 1.5])
            pen.setCapStyle(Qt.PenCapStyle.FlatCap)
            painter.setPen(pen)
            painter.drawLine(QPointF(rect.center().x(), rect.top() - 2), QPointF(rect.center().x(), rect.bottom() + 2))
            return
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(colour(segment_colour(self._palette, entry.role)))
        painter.drawRoundedRect(rect, 2, 2)
