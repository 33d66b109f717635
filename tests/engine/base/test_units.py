"""Parsing and formatting of sizes and counts."""

from __future__ import annotations

import pytest

from engine.base.units import GIB, KIB, MIB, format_bytes, format_rough_time, parse_count, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("4096", 4096),
        ("4096B", 4096),
        ("8k", 8 * KIB),
        ("8KB", 8 * KIB),
        ("120M", 120 * MIB),
        ("120MB", 120 * MIB),
        ("120mb", 120 * MIB),
        ("120 MiB", 120 * MIB),
        ("1.5G", 1536 * MIB),
        (" 24 GB ", 24 * GIB),
        ("2TiB", 2048 * GIB),
    ],
)
def test_sizes_with_any_usual_unit_are_binary(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "MB", "12 i", "12iB", "1,5GB", "-1M", "1QB", "1MBB", "٣MB", "1e9"])
def test_other_texts_are_not_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize("size_bytes", [0, 1000, 5 * KIB, 120 * MIB, 3 * GIB])
def test_shown_sizes_can_be_typed(size_bytes: int) -> None:
    assert parse_size(format_bytes(size_bytes)) == size_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8192", 8192),
        ("8k", 8192),
        ("32K", 32768),
        ("8 ki", 8192),
        ("1.5k", 1536),
        ("1,5k", 1536),
        ("1M", 1 << 20),
        ("16 384", 16384),
        ("16,384", 16384),
        ("16.384", 16384),
        ("16\N{NARROW NO-BREAK SPACE}384", 16384),
        ("0", 0),
    ],
)
def test_counts_take_thousands_and_k(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "k", "8kB", "1.5", "-8k", "8 k 8", "1,23,456", "eight", "1e3", "²"])
def test_other_texts_are_not_counts(text: str) -> None:
    with pytest.raises(ValueError, match="is not a count"):
        parse_count(text)


def test_estimated_times_are_rounded() -> None:
    times = [format_rough_time(seconds) for seconds in (0, 89, 290, 89 * 60, 90 * 60, 3.3 * 3600)]
    assert times == ["1 min", "1 min", "5 min", "89 min", "2 h", "3 h"]
