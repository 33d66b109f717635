"""Parallel connections of a download: each byte is fetched once, one more connection if it helps, measured rates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.library.downloads.connections import MAX_SPAN_BYTES, RateMeter, Span, SpanPlan, Trial
from engine.library.downloads.part_file import Ranges, add_range, first_gap


@given(st.integers(1, 500), st.integers(1, 60), st.lists(st.integers(1, 4), min_size=1, max_size=40), st.data())
def test_whatever_connections_come_and_go_every_byte_is_fetched_once(
    size: int, segment: int, wanted: list[int], data: st.DataObject
) -> None:
    plan = SpanPlan(segment)
    done: Ranges = ()
    open_spans: list[Span] = []
    fetched = 0
    for step in range(10_000):
        want = wanted[step % len(wanted)]
        if len(open_spans) < want and (span := plan.take(done, size, want)) is not None:
            open_spans.append(span)
        if not open_spans:
            break
        span = data.draw(st.sampled_from(open_spans)) if len(open_spans) > 1 else open_spans[0]
        assert span.end is not None
        count = min(segment // 2 + 1, span.end - span.at)
        done = add_range(done, span.at, span.at + count)
        span.at += count
        fetched += count
        if span.at >= span.end:
            plan.release(span)
            open_spans.remove(span)
    assert first_gap(done, size) is None
    assert fetched == size


def test_no_request_is_larger_than_the_hub_answers() -> None:
    size, plan = 100 << 30, SpanPlan(256 << 20)
    done: Ranges = ()
    spans = []
    while (span := plan.take(done, size, 1)) is not None:
        assert span.end is not None
        spans.append((span.at, span.end))
        done = add_range(done, span.at, span.end)
        plan.release(span)
    assert [end - first for first, end in spans] == [MAX_SPAN_BYTES] * 3 + [4 << 30]


def test_a_file_of_unknown_size_has_one_connection() -> None:
    plan = SpanPlan(10)
    span = plan.take((), None, 3)
    assert span is not None
    assert (span.at, span.end) == (0, None)
    assert plan.take((), None, 3) is None


@pytest.mark.parametrize(("rates", "wanted"), [([10, 10], 1), ([10, 19, 20], 2), ([10, 20, 30, 40], 4)])
def test_one_more_connection_is_kept_where_it_brings_a_good_deal(rates: list[int], wanted: int) -> None:
    trial = Trial(4, 3.0, worth_bytes=100)
    now, fetched = 0.0, 0
    for _ in range(100):
        now += 1.0
        fetched += rates[min(trial.wanted, len(rates)) - 1]
        trial.look(now, fetched, 10_000)
    assert trial.wanted == wanted


def test_little_is_not_worth_a_second_connection() -> None:
    trial = Trial(4, 3.0, worth_bytes=100)
    for now in range(100):
        trial.look(float(now), now * 10 + 1, 99)
    assert trial.wanted == 1


def test_the_rate_is_that_of_ten_seconds() -> None:
    meter = RateMeter()
    assert meter.bytes_per_second is None
    for second in range(20):
        meter.add(float(second), 1000 * second)
    for second in range(20, 31):
        meter.add(float(second), 19_000 + 50 * (second - 19))
    assert meter.bytes_per_second == pytest.approx(50)
    assert meter.left_s(500) == pytest.approx(10)


def test_no_time_is_told_while_the_rate_is_not_steady() -> None:
    meter = RateMeter()
    meter.add(0.0, 0)
    meter.add(1.0, 100)
    assert meter.left_s(100) is None, "too early"
    for second in range(2, 11):
        meter.add(float(second), 100 if second < 6 else 100 + 400 * (second - 5))
    assert meter.left_s(100) is None, "much faster than a moment ago"
    stuck = RateMeter()
    for second in range(10):
        stuck.add(float(second), 100)
    assert (stuck.bytes_per_second, stuck.left_s(100)) == (0, None)


def test_a_line_that_trickles_is_told_as_slow_as_it_is() -> None:
    meter = RateMeter()
    done_bytes = 0
    for half_second in range(60):
        done_bytes += 90 if half_second % 6 == 0 else 0
        meter.add(half_second / 2, done_bytes)
    rate = meter.bytes_per_second
    assert rate is not None
    assert 27 <= rate <= 36
    left_s = meter.left_s(3000)
    assert left_s is None or 80 < left_s < 120
