"""Readings during a speed comparison: sleep of the machine, and load by other programs."""

from __future__ import annotations

import pytest

from engine.devices.device import Rig, make_host
from engine.machines.bench.readings import DeviceWatch, load_share


class Clocks:
    """Clocks that a test sets."""

    wall_s = 1000.0
    monotonic_s = 10.0

    def wall(self) -> float:
        return self.wall_s

    def monotonic(self) -> float:
        return self.monotonic_s


def test_a_sleep_is_what_one_clock_misses() -> None:
    clocks = Clocks()
    with DeviceWatch(Rig((), make_host("host", 1 << 30, 1 << 30)), clocks=clocks) as watch:
        watch.begin()
        clocks.wall_s, clocks.monotonic_s = 1600.0, 15.0
        slept = watch.end()
        watch.begin()
        clocks.wall_s, clocks.monotonic_s = 1605.5, 20.0
        awake = watch.end()
    assert slept.slept_s == pytest.approx(595.0)
    assert slept.seconds == 5.0
    assert awake.slept_s == 0.0, "a time service sets the clock by a little"


def test_the_load_of_others_is_a_share_of_all_processors() -> None:
    assert load_share(4.0, 2.0, 4) == pytest.approx(0.5)
    assert load_share(99.0, 2.0, 4) == 1.0
    assert load_share(-0.1, 2.0, 4) == 0.0, "a child that ended takes its time with it"
    assert load_share(0.05, 0.01, 4) is None
