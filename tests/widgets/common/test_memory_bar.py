"""The memory bar: parts of a device's row, and the mark and text for too much memory."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QRectF
from PySide6.QtGui import QColor, QImage, QPainter
from pytestqt.qtbot import QtBot

from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import Device
from engine.planning.memory.estimate import DeviceMemory, Grade
from engine.planning.plan.report import DeviceRow, make_row
from widgets.common.memory_bar import (
    PlacedWeights,
    SegmentRole,
    available_bytes,
    bar_of_row,
    bar_tooltip,
    paint_bar,
    room_text,
    segment_colour,
    segment_texts,
)
from widgets.common.palette import DARK
from widgets.layout_editor.annotations import legend_entries

CARD = Device(
    id="CUDA0", name="Card", backend="CUDA", kind="gpu", total_bytes=8 * GIB, free_bytes=7 * GIB, margin_bytes=512 * MIB
)


def row_of(need_bytes: int, device: Device = CARD, **parts: int) -> DeviceRow:
    return make_row(device, DeviceMemory(weights_bytes=need_bytes, **parts), Grade.ESTIMATED)


def test_what_fits_leaves_what_is_free_after_the_margin() -> None:
    bar = bar_of_row(row_of(4 * GIB, kv_cache_bytes=GIB, recurrent_bytes=MIB, compute_bytes=255 * MIB))
    assert bar.other_bytes == GIB
    assert [(part.label, part.size_bytes) for part in bar.parts] == [
        ("weights", 4 * GIB),
        ("KV", GIB + MIB),
        ("compute", 255 * MIB),
    ]
    assert bar.line_bytes == 8 * GIB - 512 * MIB
    assert room_text(bar) == "free 1.25 GiB"
    assert segment_texts(bar)[0] == "weights 4.0 · KV 1.0 · compute 0.2 GiB"


def test_copies_for_a_pipeline_are_a_part_of_their_own() -> None:
    row = row_of(GIB, compute_bytes=3 * GIB, pipeline_bytes=2 * GIB, overhead_bytes=MIB)
    bar = bar_of_row(row)
    assert [(part.role, part.size_bytes) for part in bar.parts] == [
        ("weights", GIB),
        ("compute", GIB + MIB),
        ("pipeline", 2 * GIB),
    ]
    assert bar.used_bytes - (bar.other_bytes or 0) == row.need_bytes
    assert "copies for pipeline parallelism: 2.00 GiB" in bar_tooltip(row)
    assert "pipeline" not in segment_texts(bar_of_row(row_of(GIB, compute_bytes=GIB)))[0]


def test_what_the_projector_computes_in_is_told_as_part_of_the_compute_buffer() -> None:
    row = row_of(GIB, compute_bytes=3 * MIB, projector_bytes=2 * MIB)
    told = "compute buffer: 3.0 MiB\nincluding the projector's buffer for the largest image: 2.0 MiB"
    assert told in bar_tooltip(row)
    assert bar_of_row(row).used_bytes - (bar_of_row(row).other_bytes or 0) == row.need_bytes == GIB + 3 * MIB
    assert "projector" not in bar_tooltip(row_of(GIB, compute_bytes=3 * MIB))


def test_experts_are_a_part_of_their_own_in_the_colour_of_the_legend(qtbot: QtBot) -> None:
    bar = bar_of_row(row_of(4 * GIB), placed=PlacedWeights(4 * GIB, 3 * GIB))
    assert [(part.role, part.size_bytes) for part in bar.parts] == [("weights", GIB), ("experts", 3 * GIB)]
    assert "including experts: 3.00 GiB" in bar_tooltip(row_of(4 * GIB), placed=PlacedWeights(4 * GIB, 3 * GIB))
    assert segment_texts(bar)[0] == "weights 1.0 · experts 3.0 GiB"
    image = QImage(800, 20, QImage.Format.Format_RGB32)
    painter = QPainter(image)
    paint_bar(painter, QRectF(0, 0, 800, 20), bar, DARK)
    painter.end()
    assert QColor(DARK.experts).rgb() in {image.pixel(x, 10) for x in range(800)}


def test_the_roles_of_a_bar_are_in_the_legend_and_in_the_palette() -> None:
    row = row_of(4 * GIB, kv_cache_bytes=GIB, compute_bytes=3 * MIB, pipeline_bytes=MIB)
    roles: set[SegmentRole] = {part.role for part in bar_of_row(row, placed=PlacedWeights(4 * GIB, GIB)).parts}
    roles.add("other")
    assert roles == {entry.role for entry in legend_entries(experts=True, pipeline=True)} - {None}
    assert all(segment_colour(DARK, role).startswith("#") for role in roles)


def test_a_mapped_file_counts_as_far_as_the_layout_reads_it() -> None:
    row = row_of(0, mapped_bytes=59 * GIB)
    placed = PlacedWeights(5 * GIB, 4 * GIB)
    bar = bar_of_row(row, placed=placed)
    assert (bar.mapped_bytes, bar.mapped_expert_bytes) == (5 * GIB, 4 * GIB)
    assert segment_texts(bar)[0] == "mapped 5.0 GiB"
    assert "memory-mapped weights in use (reclaimable): 5.00 GiB" in bar_tooltip(row, placed=placed)
    assert "memory-mapped part of the file: 59.00 GiB" in bar_tooltip(row, placed=placed)
    assert bar_of_row(row).mapped_bytes == 59 * GIB


def test_what_does_not_fit_says_how_much_is_missing() -> None:
    assert room_text(bar_of_row(row_of(7 * GIB))) == "lacks 512.0 MiB"
    assert "missing: 512.0 MiB" in bar_tooltip(row_of(7 * GIB))


def test_a_device_that_holds_nothing_is_never_short() -> None:
    full = replace(CARD, free_bytes=100 * MIB)
    assert room_text(bar_of_row(row_of(0, full))) == "free 0 B"
    assert segment_texts(bar_of_row(row_of(0, full))) == ()


def test_unknown_free_memory_is_a_gap_and_not_a_zero() -> None:
    bar = bar_of_row(row_of(GIB, replace(CARD, free_bytes=None)))
    assert bar.other_bytes is None
    assert "free: unknown" in bar_tooltip(row_of(GIB, replace(CARD, free_bytes=None)))


def test_a_cap_moves_the_line_and_a_small_one_is_the_whole_bar() -> None:
    capped = row_of(GIB, replace(CARD, cap_bytes=4 * GIB))
    assert available_bytes(capped) == 4 * GIB
    assert bar_of_row(capped).line_bytes == GIB + 4 * GIB - 512 * MIB
    assert bar_of_row(capped).span_bytes == 8 * GIB
    assert "cap: 4.00 GiB" in bar_tooltip(capped)
    small = bar_of_row(row_of(100 * MIB, replace(CARD, cap_bytes=256 * MIB, margin_bytes=0)))
    assert (small.span_bytes, small.other_bytes, small.line_bytes) == (256 * MIB, 0, 256 * MIB)


def test_a_measured_row_is_held_against_the_memory_before_it_took_its_part() -> None:
    forecast = row_of(4 * GIB)
    measured = row_of(4 * GIB + 100 * MIB, replace(CARD, free_bytes=2 * GIB))
    bar = bar_of_row(measured, forecast)
    assert bar.other_bytes == GIB
    assert bar.shortfall_bytes == forecast.shortfall_bytes + 100 * MIB


def test_mapped_bytes_are_shown_and_never_too_much() -> None:
    bar = bar_of_row(row_of(0, mapped_bytes=40 * GIB, compute_bytes=MIB))
    assert bar.shortfall_bytes < 0
    assert segment_texts(bar)[0].endswith("mapped 40.0 GiB")


def painted(row: DeviceRow) -> QImage:
    image = QImage(218, 20, QImage.Format.Format_RGB32)
    image.fill(QColor(DARK.panel))
    painter = QPainter(image)
    paint_bar(painter, QRectF(0, 3, 218, 14), bar_of_row(row), DARK)
    painter.end()
    return image


@pytest.mark.parametrize(("need_bytes", "red_past_the_end"), [(4 * GIB, False), (9 * GIB, True)])
def test_too_much_is_red_past_the_end_of_the_device(qtbot: QtBot, need_bytes: int, red_past_the_end: bool) -> None:
    image = painted(row_of(need_bytes))
    past_the_end = image.pixelColor(204, 10)
    assert (past_the_end == QColor(DARK.bad)) is red_past_the_end
    assert image.pixelColor(10, 10) == QColor(DARK.other)
    assert image.pixelColor(60, 10) == QColor(DARK.weights)
