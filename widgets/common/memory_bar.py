"""The bar of a device's memory: other programs, what a layout takes by part, what is free, and what does not fit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from PySide6.QtCore import QPointF, QRectF, Qt
from PySide6.QtGui import QPainter, QPen, QPolygonF

from engine.base.language import tr
from engine.base.units import GIB, MIB, format_bytes
from engine.devices.device import Holding
from engine.planning.memory.estimate import grade_words
from engine.planning.plan.report import DeviceRow
from widgets.common.painting import colour, mix, paint_hatch
from widgets.common.palette import Palette

PartRole = Literal["weights", "kv", "compute", "pipeline"]

OVERFLOW_WIDTH = 18.0
"""Pixels kept free right of the bar, for what goes past its end."""
_SMALL_CAP_SHARE = 0.25
_MIN_SEGMENT = 1.5


@dataclass(frozen=True, slots=True)
class BarPart:
    """One segment. `role` is the palette's colour for it, `label` what people call it."""

    role: PartRole
    label: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryBar:
    """What a bar shows. The bar is `span_bytes` long; beyond `line_bytes` (limit less margin) is too much.

    `other_bytes` None: the memory held by other programs is unknown. `mapped_bytes` is reclaimable and never too much.
    """

    span_bytes: int
    other_bytes: int | None
    parts: tuple[BarPart, ...]
    mapped_bytes: int
    line_bytes: int
    shortfall_bytes: int

    @property
    def used_bytes(self) -> int:
        """Where the parts end, from the bar's start."""
        return (self.other_bytes or 0) + sum(part.size_bytes for part in self.parts)


def row_parts(row: DeviceRow) -> tuple[BarPart, ...]:
    """Return the segments of `row`, in the order of the bar, without empty ones."""
    alone_bytes = row.compute_bytes - row.pipeline_bytes
    parts = (
        BarPart("weights", tr("weights"), row.weights_bytes),
        BarPart("kv", tr("KV"), row.kv_cache_bytes + row.recurrent_bytes),
        BarPart("compute", tr("compute"), alone_bytes + row.output_bytes + row.overhead_bytes),
        BarPart("pipeline", tr("pipeline"), row.pipeline_bytes),
    )
    return tuple(part for part in parts if part.size_bytes > 0)


def available_bytes(row: DeviceRow) -> int:
    """Return what may be planned on the device of `row`: its free memory or its cap, whichever is less."""
    return row.need_bytes + row.margin_bytes - row.shortfall_bytes


def shortfall_within(row: DeviceRow, room: DeviceRow) -> int:
    """Return what the need of `row` lacks in the memory that `room` was planned with; negative when it fits."""
    return row.need_bytes + row.margin_bytes - available_bytes(room)


def bar_of_row(row: DeviceRow, room: DeviceRow | None = None) -> MemoryBar:
    """Return the bar of `row`. `room` is the row whose free memory counts, for one measured after it took its part."""
    room = row if room is None else room
    limit_bytes = available_bytes(room)
    other_bytes = None if room.free_bytes is None else max(room.total_bytes - room.free_bytes, 0)
    span_bytes = room.total_bytes
    unused_bytes = span_bytes - (other_bytes or 0)
    if limit_bytes < unused_bytes and limit_bytes < span_bytes * _SMALL_CAP_SHARE:
        # A small cap on a large device: drawn to the device's scale, nothing in it could be seen.
        span_bytes, other_bytes = max(limit_bytes, 1), 0 if other_bytes is not None else None
    return MemoryBar(
        span_bytes=max(span_bytes, 1),
        other_bytes=other_bytes,
        parts=row_parts(row),
        mapped_bytes=row.mapped_bytes,
        line_bytes=(other_bytes or 0) + max(limit_bytes - row.margin_bytes, 0),
        shortfall_bytes=shortfall_within(row, room),
    )


def room_text(bar: MemoryBar) -> str:
    """Return "free 4.10 GiB" or "short 312.0 MiB", after the margin. A device that holds nothing is never short."""
    if bar.shortfall_bytes > 0 and bar.parts:
        return tr("short {size}", size=format_bytes(bar.shortfall_bytes))
    return tr("free {size}", size=format_bytes(max(-bar.shortfall_bytes, 0)))


def parts_texts(bar: MemoryBar) -> tuple[str, ...]:
    """Return "weights 16.9 · KV 1.4 · compute 1.2 GiB" and shorter forms of it, longest first; () when empty."""
    named = [(part.label, part.size_bytes) for part in bar.parts]
    if bar.mapped_bytes > 0:
        named.append((tr("mapped"), bar.mapped_bytes))
    if not named:
        return ()
    factor, unit = (GIB, "GiB") if max(size for _, size in named) >= GIB else (MIB, "MiB")

    def join(names: list[str], separator: str) -> str:
        values = (f"{name} {size / factor:.1f}" for name, (_, size) in zip(names, named, strict=True))
        return f"{separator.join(values)} {unit}"

    full = [name for name, _ in named]
    letters = [name if len(name) == 2 else name[0] for name in full]
    return join(full, " · "), join(letters, " · "), join(letters, " ")


def bar_tooltip(row: DeviceRow, room: DeviceRow | None = None) -> str:
    """Return every number of `row`, a line each, for a plain-text tooltip."""
    room = row if room is None else room
    lines = [
        (label, size)
        for label, size in (
            (tr("weights"), row.weights_bytes),
            (tr("mapped from the file, reclaimable"), row.mapped_bytes),
            (tr("KV cache"), row.kv_cache_bytes),
            (tr("recurrent state"), row.recurrent_bytes),
            (tr("compute buffer"), row.compute_bytes),
            (tr("of that, copies for a pipeline"), row.pipeline_bytes),
            (tr("output buffer"), row.output_bytes),
            (tr("overhead"), row.overhead_bytes),
        )
        if size
    ]
    shortfall_bytes = shortfall_within(row, room)
    text = [f"{row.id}: {grade_words(row.grade)}"]
    text += [f"{label}: {format_bytes(size)}" for label, size in lines]
    text.append(
        tr(
            "in all: {need}, and a margin of {margin}",
            need=format_bytes(row.need_bytes),
            margin=format_bytes(row.margin_bytes),
        )
    )
    free = tr("unknown, planned with the total") if room.free_bytes is None else format_bytes(room.free_bytes)
    text.append(tr("free: {free}; total: {total}", free=free, total=format_bytes(room.total_bytes)))
    if room.free_bytes is not None and available_bytes(room) < room.free_bytes:
        text.append(tr("cap: {available}", available=format_bytes(available_bytes(room))))
    if row.need_bytes and shortfall_bytes > 0:
        text.append(tr("missing: {shortfall}", shortfall=format_bytes(shortfall_bytes)))
    return "\n".join(text)


def paint_bar(painter: QPainter, rect: QRectF, bar: MemoryBar, palette: Palette) -> None:
    """Paint `bar` into `rect`; its last `OVERFLOW_WIDTH` pixels are for what goes past the device's end."""
    body = rect.adjusted(0, 0, -OVERFLOW_WIDTH, 0)
    painter.fillRect(body, mix(palette.panel, palette.line, 0.75))
    scale = body.width() / bar.span_bytes
    position = body.left()
    line_x = body.left() + min(bar.line_bytes, bar.span_bytes) * scale
    segments = [(palette.other, 1.0, bar.other_bytes or 0)]
    segments += [(getattr(palette, part.role), 1.0, part.size_bytes) for part in bar.parts]
    for name, opacity, size_bytes in segments:
        if size_bytes > 0:
            width = max(size_bytes * scale, _MIN_SEGMENT)
            _paint_segment(painter, QRectF(position, rect.top(), width, rect.height()) & body, name, opacity)
            position += width
    if bar.mapped_bytes > 0 and position < body.right():
        width = max(bar.mapped_bytes * scale, _MIN_SEGMENT)
        mapped = QRectF(position, rect.top(), width, rect.height()) & body
        painter.fillRect(mapped, colour(palette.weights, 0.3))
        paint_hatch(painter, mapped, colour(palette.weights, 0.8), step=4.0, width=1.0)
    if bar.parts and bar.shortfall_bytes > 0:
        _paint_overflow(painter, rect, line_x, position, palette)
    pen = QPen(colour(palette.text, 0.75), 1.5)
    pen.setDashPattern([2.0, 1.5])
    pen.setCapStyle(Qt.PenCapStyle.FlatCap)
    painter.setPen(pen)
    painter.drawLine(QPointF(line_x, rect.top() - 3), QPointF(line_x, rect.bottom() + 3))


def _paint_segment(painter: QPainter, rect: QRectF, name: str, opacity: float) -> None:
    # A hairline of background at the right end tells neighbours apart without their colours.
    gap = 1.0 if rect.width() > 3 else 0.0
    painter.fillRect(rect.adjusted(0, 0, -gap, 0), colour(name, opacity))


def _paint_overflow(painter: QPainter, rect: QRectF, line_x: float, end_x: float, palette: Palette) -> None:
    """Paint what is beyond the line in red: hatched up to the device's end, an arrow where it goes on past that."""
    body = rect.adjusted(0, 0, -OVERFLOW_WIDTH, 0)
    end_x = max(end_x, line_x + 3)
    inside = QRectF(line_x, rect.top(), min(end_x, body.right()) - line_x, rect.height())
    painter.fillRect(inside, mix(palette.panel, palette.bad, 0.45))
    paint_hatch(painter, inside, colour(palette.bad))
    if end_x <= body.right():
        return
    tip = min(end_x, rect.right())
    shoulder = tip - 5 if end_x > rect.right() else tip
    shape = QPolygonF(
        [
            QPointF(body.right(), rect.top()),
            QPointF(shoulder, rect.top()),
            QPointF(tip, rect.center().y()),
            QPointF(shoulder, rect.bottom()),
            QPointF(body.right(), rect.bottom()),
        ]
    )
    painter.setPen(Qt.PenStyle.NoPen)
    painter.setBrush(colour(palette.bad))
    painter.drawPolygon(shape)


def holdings_text(holdings: Iterable[Holding]) -> str:
    """Return a line for each model; empty without any."""
    return "\n".join(
        tr("{model} holds {size}", model=each.model, size=format_bytes(each.size_bytes)) for each in holdings
    )
