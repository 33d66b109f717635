"""Counts with their thousands apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from widgets.common.counts import SEPARATOR, format_count, parse_count


@pytest.mark.parametrize(("count", "text"), [(0, "0"), (999, "999"), (16384, "16 384"), (1048576, "1 048 576")])
def test_thousands_are_apart(count: int, text: str) -> None:
    assert format_count(count) == text.replace(" ", SEPARATOR)


@given(st.integers(min_value=0, max_value=10**17))
def test_what_is_shown_reads_back(count: int) -> None:
    assert parse_count(format_count(count)) == count


@pytest.mark.parametrize("text", ["", "k", "²", "٣"])
def test_no_digits_are_no_count(text: str) -> None:
    assert parse_count(text) is None
