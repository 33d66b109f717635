"""Which bytes are here: sums and gaps hold for whatever order bytes come in."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from engine.downloads.ranges import Ranges, add_range, count_bytes, first_gap, merge, prefix_end

SIZE = 40
PAIRS = st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)), max_size=12)


@given(PAIRS)
def test_ranges_are_the_bytes_that_were_added(pairs: list[tuple[int, int]]) -> None:
    ranges: Ranges = ()
    here: set[int] = set()
    for first, end in pairs:
        ranges = add_range(ranges, first, end)
        here.update(range(first, end))
    assert {at for first, end in ranges for at in range(first, end)} == here
    assert count_bytes(ranges) == len(here)
    assert all(one[1] < two[0] for one, two in pairwise(ranges)), "none touch"
    missing = [at for at in range(SIZE) if at not in here]
    gap = first_gap(ranges, SIZE)
    assert (gap is None) == (not missing)
    assert prefix_end(ranges) == next(at for at in range(SIZE + 1) if at not in here)
    if gap is not None:
        assert gap[0] == missing[0]
        assert set(range(*gap)).isdisjoint(here)


@given(st.lists(st.tuples(st.integers(-5, SIZE + 9), st.integers(-5, SIZE + 9)), max_size=12))
def test_a_damaged_journal_gives_ranges_inside_of_the_file(pairs: list[tuple[int, int]]) -> None:
    assert all(0 <= first < end <= SIZE for first, end in merge(pairs, SIZE))
