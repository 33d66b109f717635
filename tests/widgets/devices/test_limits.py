"""Sizes typed for a cap and a margin."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.base.units import GIB, MIB, parse_size
from widgets.devices.limits import DeviceLimits, editable_size, parse_limits


@pytest.mark.parametrize(
    ("cap", "margin", "expected"),
    [
        ("", "", DeviceLimits("A", None, 0)),
        ("  ", "512MiB", DeviceLimits("A", None, 512 * MIB)),
        ("1.5 GiB", "0", DeviceLimits("A", 1536 * MIB, 0)),
        ("16GiB", "1GiB", DeviceLimits("A", 16 * GIB, GIB)),
    ],
)
def test_usable_limits(cap: str, margin: str, expected: DeviceLimits) -> None:
    assert parse_limits("A", cap, margin, 8 * GIB) == expected


@pytest.mark.parametrize(
    ("cap", "margin", "words"),
    [
        ("-1", "", "Cap: "),
        ("", "5 parsecs", "Margin: "),
        ("0", "", "leaves no memory"),
        ("1GiB", "1GiB", "The margin must be smaller than 1.00 GiB"),
        ("16GiB", "8GiB", "The margin must be smaller than 8.00 GiB"),
    ],
)
def test_limits_that_cannot_be_used_say_why(cap: str, margin: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_limits("A", cap, margin, 8 * GIB)


@given(st.integers(min_value=0, max_value=1 << 50))
def test_what_the_dialog_shows_reads_back(size_bytes: int) -> None:
    assert parse_size(editable_size(size_bytes)) == size_bytes
