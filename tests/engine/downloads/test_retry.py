"""When a download is tried again: later and later, sooner after some bytes, and at once in another network."""

from __future__ import annotations

from engine.downloads.retry import PAUSES_S, Retries, network_state


class World:
    """A clock and a network for `Retries`."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.network = "one"
        self.retries = Retries(lambda: self.network, lambda: self.now_s)

    def pauses(self, job: str, done_bytes: int = 0) -> float | None:
        """Return the pause after another try in vain, and let it pass."""
        self.retries.add(job, done_bytes)
        left_s = self.retries.left_s(job)
        self.now_s += left_s or 0.0
        assert self.retries.due() == (() if left_s is None else (job,))
        return left_s


def test_pauses_grow_and_end() -> None:
    world = World()
    assert [world.pauses("a") for _ in PAUSES_S] == list(PAUSES_S)
    assert world.pauses("a") is None
    assert world.retries.wait_s is None


def test_bytes_that_came_and_people_begin_anew() -> None:
    world = World()
    assert [world.pauses("a", 10), world.pauses("a", 10), world.pauses("a", 11)] == [15.0, 60.0, 15.0]
    world.retries.forget("a")
    assert world.pauses("a", 11) == 15.0


def test_another_network_is_tried_at_once() -> None:
    world = World()
    for job in "ab":
        world.retries.add(job, 0)
    assert world.retries.due() == ()
    world.network = "two"
    assert world.retries.due() == ("a", "b")
    assert world.retries.left_s("a") is None
    world.retries.add("a", 0)
    assert world.retries.left_s("a") == PAUSES_S[1]
    world.retries.drop("a")
    assert world.retries.wait_s is None


def test_the_network_of_this_machine_stays_the_same() -> None:
    assert network_state() == network_state()
