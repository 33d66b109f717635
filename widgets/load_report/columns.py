"""The columns of the report's table: parts of a device's memory, in the order and colours used everywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.language import tr
from engine.plan.report import DeviceRow
from engine.units import format_bytes
from widgets.common.palette import Palette
from widgets.load_report.outcome import Outcome, format_difference


@dataclass(frozen=True, slots=True)
class Column:
    """A part of the memory; `color` is None for sums."""

    title: str
    size_bytes: Callable[[DeviceRow], int]
    color: Callable[[Palette], str] | None = None


ALL_COLUMNS = (
    Column(tr("Weights"), lambda row: row.weights_bytes, lambda palette: palette.weights),
    Column(tr("Mapped"), lambda row: row.mapped_bytes, lambda palette: palette.other),
    Column(tr("KV cache"), lambda row: row.kv_cache_bytes, lambda palette: palette.kv),
    Column(tr("State"), lambda row: row.recurrent_bytes, lambda palette: palette.kv),
    Column(tr("Compute"), lambda row: row.compute_bytes, lambda palette: palette.compute),
    Column(tr("Output"), lambda row: row.output_bytes, lambda palette: palette.compute),
    Column(tr("Overhead"), lambda row: row.overhead_bytes, lambda palette: palette.other),
    Column(tr("Total"), lambda row: row.need_bytes),
)
OPTIONAL_TITLES = frozenset({tr("Mapped"), tr("State"), tr("Overhead")})
DIFFERENCE_TITLE = tr("Difference")


@dataclass(frozen=True, slots=True)
class TableLine:
    """A device's cells; `forecast` has the same length, empty where there is none."""

    device: str
    measured: tuple[str, ...]
    forecast: tuple[str, ...]
    difference: str


def visible_columns(rows: Sequence[DeviceRow]) -> tuple[Column, ...]:
    """Return the columns worth showing: rare parts only where some device has them."""
    return tuple(
        column
        for column in ALL_COLUMNS
        if column.title not in OPTIONAL_TITLES or any(column.size_bytes(row) for row in rows)
    )


def table_lines(outcome: Outcome) -> tuple[TableLine, ...]:
    """Return the cells of the outcome's table."""
    columns = visible_columns(outcome.rows)
    forecast = {row.id: row for row in outcome.forecast}
    return tuple(_line(row, forecast.get(row.id), columns) for row in outcome.rows)


def _line(row: DeviceRow, expected: DeviceRow | None, columns: Sequence[Column]) -> TableLine:
    return TableLine(
        device=row.id,
        measured=tuple(_cell(column.size_bytes(row)) for column in columns),
        forecast=() if expected is None else tuple(_cell(column.size_bytes(expected)) for column in columns),
        difference="" if expected is None else format_difference(row.need_bytes - expected.need_bytes),
    )


def _cell(size_bytes: int) -> str:
    return format_bytes(size_bytes) if size_bytes else "–"
