"""The painted bar of a device's memory, with its values and texts: what other programs hold and what a layout needs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct
from PySide6.QtCore import QPointF, QRectF, Qt
from PySide6.QtGui import QPainter, QPen, QPolygonF

from engine.base.language import tr
from engine.base.units import GIB, MIB, format_bytes
from engine.devices.device import Holding
from engine.planning.memory.estimate import grade_text
from engine.planning.plan.report import DeviceRow
from widgets.common.painting import colour, mix, paint_hatch
from widgets.common.palette import Palette

SegmentRole = Literal["weights", "experts", "kv", "compute", "pipeline", "draft", "other"]
"""A part of a device's memory. "other" is the memory of other programs, and everything that has no part of its own.

The name of a part is also the name of its colour in `Palette`, so that a part has the same colour everywhere.
"""

OVERFLOW_WIDTH = 18.0
"""Room in pixels at the right of the bar, for memory that exceeds the device's total."""
# Below this share of the device's memory a cap becomes the whole length of the bar.
_SMALL_CAP_SHARE = 0.25
_MIN_SEGMENT = 1.5


class BarSegment(Struct, frozen=True):
    """A segment of a memory bar. `label`: name of the part in the language of the window."""

    role: SegmentRole
    label: str
    size_bytes: int


class PlacedWeights(Struct, frozen=True):
    """Bytes of the weights that a layout places on one device, computed from the sizes of the tensors.

    total_bytes: size of all these weights; None if overrides by tensor name make it unknown.
    expert_bytes: size of the experts among these weights.
    """

    total_bytes: int | None = None
    expert_bytes: int = 0


UNKNOWN_WEIGHTS = PlacedWeights()


class MemoryBar(Struct, frozen=True):
    """The values of a memory bar.

    span_bytes: memory that the whole length of the bar stands for.
    other_bytes: memory of other programs; None if it is unknown.
    parts: memory that the layout needs, by part.
    mapped_bytes: weights that are read from the mapped file. The system can drop their pages, so they always fit.
    mapped_expert_bytes: the experts among the mapped weights.
    line_bytes: position of the dashed line that marks the limit of the layout. It is the sum of two sizes: the memory
    of other programs, and the memory available to the layout less the margin.
    shortfall_bytes: missing memory, with the margin; negative if everything fits.
    """

    span_bytes: int
    other_bytes: int | None
    parts: tuple[BarSegment, ...]
    mapped_bytes: int
    line_bytes: int
    shortfall_bytes: int
    mapped_expert_bytes: int = 0

    @property
    def used_bytes(self) -> int:
        """Memory of other programs, plus the memory that the layout needs (`parts`), in bytes."""
        return (self.other_bytes or 0) + sum(part.size_bytes for part in self.parts)


def row_segments(row: DeviceRow, placed: PlacedWeights = UNKNOWN_WEIGHTS) -> tuple[BarSegment, ...]:
    """Return the segments of a memory bar, in their order in the bar; segments of zero bytes are left out.

    `row`: memory that the layout needs on the device.
    `placed`: bytes of the weights that the layout places on the device.
    """
    # `compute_bytes` includes the copies for a pipeline, which are a segment of their own.
    alone_bytes = row.compute_bytes - row.pipeline_bytes
    # Experts that are mapped are not in `weights_bytes`; those are painted with the mapped part.
    expert_bytes = min(placed.expert_bytes, row.weights_bytes)
    parts = (
        BarSegment("weights", tr("weights"), row.weights_bytes - expert_bytes),
        BarSegment("experts", tr("experts"), expert_bytes),
        BarSegment("kv", tr("KV"), row.kv_cache_bytes + row.recurrent_bytes),
        BarSegment("compute", tr("compute"), alone_bytes + row.output_bytes + row.overhead_bytes + row.answering_bytes),
        BarSegment("pipeline", tr("pipeline"), row.pipeline_bytes),
        BarSegment("draft", tr("draft"), row.draft_bytes),
    )
    return tuple(part for part in parts if part.size_bytes > 0)


def available_bytes(row: DeviceRow) -> int:
    """Return the memory available to a layout on the device: free memory or the cap, whichever is smaller.

    The margin is not subtracted.
    """
    # The shortfall is signed and is need + margin - available, so this also holds if everything fits.
    return row.need_bytes + row.margin_bytes - row.shortfall_bytes


def shortfall_within(row: DeviceRow, room: DeviceRow) -> int:
    """Return the missing bytes: need and margin of `row`, less the available memory; negative if everything fits.

    `room`: memory values of the same device; their free memory and cap give the available memory.
    """
    return row.need_bytes + row.margin_bytes - available_bytes(room)


def used_mapped_bytes(row: DeviceRow, placed: PlacedWeights) -> int:
    """Return how many bytes of the mapped model file are weights that the layout reads on the device of `row`.

    This can be much less than `row.mapped_bytes`. llama.cpp maps the range from the first to the last tensor on the CPU
    (`llama_model_loader::get_mapping_range`): for the experts of three layers, this can be almost the whole file. Pages
    of other tensors in the range are never read.

    `placed`: bytes of the weights that the layout places on the device.
    """
    if placed.total_bytes is None:
        return row.mapped_bytes
    return min(row.mapped_bytes, max(placed.total_bytes - row.weights_bytes, 0))


def bar_of_row(row: DeviceRow, room: DeviceRow | None = None, placed: PlacedWeights = UNKNOWN_WEIGHTS) -> MemoryBar:
    """Return the memory bar of a device.

    `row`: memory that the layout needs on the device.
    `room`: memory values of the same device that give its free memory and cap; None: those in `row`. It must be given
    if `row` was measured by a load, because the free memory in `row` is then from before the load.
    `placed`: bytes of the weights that the layout places on the device.
    """
    room = row if room is None else room
    limit_bytes = available_bytes(room)
    # An unknown reading stays None. As 0 it would say that no other program uses the device.
    other_bytes = None if room.free_bytes is None else max(room.total_bytes - room.free_bytes, 0)
    mapped_bytes = used_mapped_bytes(row, placed)
    span_bytes = room.total_bytes
    unused_bytes = span_bytes - (other_bytes or 0)
    if limit_bytes < unused_bytes and limit_bytes < span_bytes * _SMALL_CAP_SHARE:
        # A small cap on a large device: drawn to the device's scale, nothing in it could be seen.
        span_bytes, other_bytes = max(limit_bytes, 1), 0 if other_bytes is not None else None
    return MemoryBar(
        span_bytes=max(span_bytes, 1),
        other_bytes=other_bytes,
        parts=row_segments(row, placed),
        mapped_bytes=mapped_bytes,
        mapped_expert_bytes=min(max(placed.expert_bytes - row.weights_bytes, 0), mapped_bytes),
        # A margin larger than the free memory puts the limit at the end of the other programs.
        line_bytes=(other_bytes or 0) + max(limit_bytes - row.margin_bytes, 0),
        shortfall_bytes=shortfall_within(row, room),
    )


def room_text(bar: MemoryBar) -> str:
    """Return text on the memory that layout and margin leave free, or lack: "free 4.10 GiB" or "lacks 312.0 MiB".

    A device on which the layout places nothing never lacks memory.
    """
    if bar.shortfall_bytes > 0 and bar.parts:
        return tr("lacks {size}", size=format_bytes(bar.shortfall_bytes))
    return tr("free {size}", size=format_bytes(max(-bar.shortfall_bytes, 0)))


def segment_texts(bar: MemoryBar) -> tuple[str, ...]:
    """Return texts with the sizes of all parts, such as "weights 16.9 · KV 1.4 · compute 1.2 GiB", the longest first.

    The shorter ones abbreviate the labels. The first text that fits is painted. The result is empty if the bar has
    neither parts nor mapped weights.
    """
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
    # "KV" stays whole: "K" alone would be another cache.
    letters = [name if len(name) == 2 else name[0] for name in full]
    return join(full, " · "), join(letters, " · "), join(letters, " ")


def bar_tooltip(row: DeviceRow, room: DeviceRow | None = None, placed: PlacedWeights = UNKNOWN_WEIGHTS) -> str:
    """Return the text of a tooltip: the memory that a layout needs on a device, with one number on each line.

    `row`: memory that the layout needs.
    `room`: memory values of the same device that give its free memory and cap; None: those in `row`.
    `placed`: bytes of the weights that the layout places on the device.
    """
    room = row if room is None else room
    used_bytes = used_mapped_bytes(row, placed)
    # Zeros are left out: most devices have no recurrent state, pipeline or mapped file.
    lines = [
        (label, size)
        for label, size in (
            (tr("weights"), row.weights_bytes),
            (tr("including experts"), min(placed.expert_bytes, row.weights_bytes)),
            (tr("memory-mapped weights in use (reclaimable)"), used_bytes),
            (tr("memory-mapped part of the file"), row.mapped_bytes if row.mapped_bytes > used_bytes else 0),
            (tr("KV cache"), row.kv_cache_bytes),
            (tr("recurrent state"), row.recurrent_bytes),
            (tr("compute buffer"), row.compute_bytes),
            (tr("including copies for pipeline parallelism"), row.pipeline_bytes),
            (tr("including the projector's buffer for the largest image"), row.projector_bytes),
            (tr("output buffer"), row.output_bytes),
            (tr("draft model"), row.draft_bytes),
            (tr("overhead"), row.overhead_bytes),
            (tr("additional memory during answers"), row.answering_bytes),
            (tr("including growth as the context fills"), row.late_bytes),
        )
        if size
    ]
    shortfall_bytes = shortfall_within(row, room)
    text = [f"{row.id}: {grade_text(row.grade)}"]
    text += [f"{label}: {format_bytes(size)}" for label, size in lines]
    text.append(
        tr(
            "total: {need}, plus a margin of {margin}",
            need=format_bytes(row.need_bytes),
            margin=format_bytes(row.margin_bytes),
        )
    )
    free = (
        tr("unknown (all memory is assumed to be free)") if room.free_bytes is None else format_bytes(room.free_bytes)
    )
    text.append(tr("free: {free}; total: {total}", free=free, total=format_bytes(room.total_bytes)))
    if room.free_bytes is not None and available_bytes(room) < room.free_bytes:
        text.append(tr("memory cap: {available}", available=format_bytes(available_bytes(room))))
    if row.need_bytes and shortfall_bytes > 0:
        text.append(tr("missing: {shortfall}", shortfall=format_bytes(shortfall_bytes)))
    return "\n".join(text)


def segment_colour(palette: Palette, role: SegmentRole) -> str:
    """Return the colour that stands for a part of memory, as `#rrggbb`."""
    name: str = getattr(palette, role)
    return name


def paint_bar(painter: QPainter, rect: QRectF, bar: MemoryBar, palette: Palette) -> None:
    """Paint `bar` into `rect`. The last `OVERFLOW_WIDTH` pixels are for memory that exceeds the device's total."""
    body = rect.adjusted(0, 0, -OVERFLOW_WIDTH, 0)
    painter.fillRect(body, mix(palette.panel, palette.line, 0.75))
    scale = body.width() / bar.span_bytes
    position = body.left()
    line_x = body.left() + min(bar.line_bytes, bar.span_bytes) * scale
    # Other programs come first: their memory is taken whatever the layout does.
    segments = [(segment_colour(palette, "other"), bar.other_bytes or 0)]
    segments += [(segment_colour(palette, part.role), part.size_bytes) for part in bar.parts]
    for name, size_bytes in segments:
        if size_bytes > 0:
            # Small parts stay visible, so a bar may be a few pixels longer than its bytes. `& body` cuts it at the
            # device's end.
            width = max(size_bytes * scale, _MIN_SEGMENT)
            _paint_segment(painter, QRectF(position, rect.top(), width, rect.height()) & body, name)
            position += width
    # Mapped weights are painted after this, and do not count: the system can drop their pages.
    end = position
    mapped_segments: tuple[tuple[SegmentRole, int], ...] = (
        ("weights", bar.mapped_bytes - bar.mapped_expert_bytes),
        ("experts", bar.mapped_expert_bytes),
    )
    for role, size_bytes in mapped_segments:
        if size_bytes > 0 and position < body.right():
            width = max(size_bytes * scale, _MIN_SEGMENT)
            mapped = QRectF(position, rect.top(), width, rect.height()) & body
            painter.fillRect(mapped, colour(segment_colour(palette, role), 0.3))
            paint_hatch(painter, mapped, colour(segment_colour(palette, role), 0.8), step=4.0, width=1.0)
            position += width
    if bar.parts and bar.shortfall_bytes > 0:
        _paint_overflow(painter, rect, line_x, end, palette)
    # Last, so that the overflow, which begins here, does not cover the limit.
    pen = QPen(colour(palette.text, 0.75), 1.5)
    pen.setDashPattern([2.0, 1.5])
    pen.setCapStyle(Qt.PenCapStyle.FlatCap)
    painter.setPen(pen)
    painter.drawLine(QPointF(line_x, rect.top() - 3), QPointF(line_x, rect.bottom() + 3))


def _paint_segment(painter: QPainter, rect: QRectF, name: str) -> None:
    # A hairline of background at the right end separates neighbours for people who cannot see their colours.
    gap = 1.0 if rect.width() > 3 else 0.0
    painter.fillRect(rect.adjusted(0, 0, -gap, 0), colour(name))


def _paint_overflow(painter: QPainter, rect: QRectF, line_x: float, end_x: float, palette: Palette) -> None:
    """Paint the memory beyond the limit in red: hatched up to the device's total, then as an arrow.

    `rect`: rectangle of the whole bar.
    `line_x`, `end_x`: horizontal positions of the limit, and of the end of the needed memory.
    """
    body = rect.adjusted(0, 0, -OVERFLOW_WIDTH, 0)
    end_x = max(end_x, line_x + 3)
    inside = QRectF(line_x, rect.top(), min(end_x, body.right()) - line_x, rect.height())
    painter.fillRect(inside, mix(palette.panel, palette.bad, 0.45))
    paint_hatch(painter, inside, colour(palette.bad))
    if end_x <= body.right():
        return
    tip = min(end_x, rect.right())
    # A flat end shows the true length; only what is longer than the room for it ends in an arrow.
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
    """Return one line for each model that holds memory of a device; empty if there are none."""
    return "\n".join(
        tr("{model} uses {size}", model=each.model, size=format_bytes(each.size_bytes)) for each in holdings
    )
