"""The download queue: order, one at a time, pause, continuation, storage over restarts, and reported states."""

from __future__ import annotations

import errno
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.library.downloads.job import Job, JobState, JobView, hub_job
from engine.library.downloads.queue import PAUSES_S, DownloadQueue, Retries, network_state
from engine.library.hub.client import list_repo
from engine.library.hub.settings import hub_settings
from tests.support.hub_server import Fault, HubServer, Repo, hub_server
from tests.support.patience import DEADLINE_S
from tests.support.transfers import KIB, Running, download_of, some_bytes


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


DATA = {f"{name}-Q8_0.gguf": some_bytes(200 * KIB, seed) for seed, name in enumerate("abc")}
Views = tuple[JobView, ...]


@pytest.fixture
def server() -> Iterator[HubServer]:
    repos = [Repo(f"org/{name[0]}", {name: data, "mmproj-F16.gguf": b"GGUFx"}) for name, data in DATA.items()]
    with hub_server(*repos) as found:
        yield found


class Seen:
    """What a queue has told."""

    def __init__(self) -> None:
        self.views: queue.SimpleQueue[Views] = queue.SimpleQueue()
        self.orders: list[tuple[str, ...]] = []
        self.last: Views = ()

    def take(self, views: Views) -> None:
        self.orders.append(tuple(view.id for view in views if view.state is JobState.RUNNING))
        self.views.put(views)

    def wait_for(self, wanted: Callable[[Views], bool]) -> Views:
        while not wanted(self.last):
            self.last = self.views.get(timeout=DEADLINE_S)
        return self.last

    def wait_for_state(self, job_id: str, state: JobState) -> JobView:
        views = self.wait_for(lambda views: any(view.id == job_id and view.state is state for view in views))
        return next(view for view in views if view.id == job_id)


@contextmanager
def _queue(path: Path, network: Sequence[str] = (), **options: object) -> Iterator[tuple[DownloadQueue, Seen]]:
    seen = Seen()
    template = download_of(**{"tries": 2, **options})  # type: ignore[arg-type]
    retries = Retries(lambda: tuple(network), clock=lambda: 0.0, look_every_s=0.05)
    found = DownloadQueue(path, seen.take, template=template, token_of=lambda _: "hf_right", retries=retries)
    try:
        yield found, seen
    finally:
        found.close()


def _job(server: HubServer, name: str, folder: Path) -> Job:
    hub = hub_settings(environment={"HF_ENDPOINT": server.url})
    listing = list_repo(f"org/{name}", hub)
    return hub_job(name, listing, listing.find(None), hub, folder / name)


def test_one_after_another_with_all_that_belongs_to_them(server: HubServer, tmp_path: Path) -> None:
    with _queue(tmp_path / "queue.json") as (downloads, seen):
        for name in "ab":
            downloads.add(_job(server, name, tmp_path))
        done = seen.wait_for_state("b", JobState.DONE)
        assert seen.last[0].state is JobState.DONE
        assert all(len(running) < 2 for running in seen.orders)
        assert [Path(path).name for path in done.paths] == ["b-Q8_0.gguf", "mmproj-F16.gguf"]
        assert Path(done.paths[0]).read_bytes() == DATA["b-Q8_0.gguf"]
    assert "hf_right" not in (tmp_path / "queue.json").read_text()


def test_a_queue_that_is_closed_goes_on_where_it_was(server: HubServer, tmp_path: Path) -> None:
    jobs = [_job(server, name, tmp_path) for name in "ab"]
    server.faults.append(Fault("stall", 128 * KIB))
    with _queue(tmp_path / "queue.json") as (downloads, seen):
        for job in jobs:
            downloads.add(job)
        seen.wait_for(lambda views: bool(views) and views[0].done_bytes == 128 * KIB)
    server.sent.clear()
    with _queue(tmp_path / "queue.json") as (_, seen):
        seen.wait_for_state("b", JobState.DONE)
        assert seen.last[0].state is JobState.DONE
    assert server.bytes_sent("a-Q8_0.gguf") == 72 * KIB


def test_pause_order_and_removal(server: HubServer, tmp_path: Path) -> None:
    jobs = [_job(server, name, tmp_path) for name in "abc"]
    server.faults.append(Fault("stall", 128 * KIB))
    with _queue(tmp_path / "queue.json") as (downloads, seen):
        for job in jobs:
            downloads.add(job)
        seen.wait_for(lambda views: len(views) == 3 and views[0].done_bytes == 128 * KIB)
        downloads.pause("b")
        downloads.pause("a")
        seen.wait_for_state("c", JobState.DONE)
        assert [(view.id, view.state) for view in seen.last] == [
            ("a", JobState.PAUSED), ("b", JobState.PAUSED), ("c", JobState.DONE),
        ]  # fmt: skip
        downloads.remove("a", discard=True)
        seen.wait_for(lambda views: [view.id for view in views] == ["b", "c"])
        downloads.resume("b")
        seen.wait_for_state("b", JobState.DONE)
    assert not list((tmp_path / "a").iterdir())


def test_paused_and_gone_on_with_at_once(server: HubServer, tmp_path: Path) -> None:
    job = _job(server, "a", tmp_path)
    server.faults.append(Fault("stall", 128 * KIB))
    with _queue(tmp_path / "queue.json") as (downloads, seen):
        downloads.add(job)
        seen.wait_for(lambda views: bool(views) and views[0].done_bytes == 128 * KIB)
        for _ in range(3):
            downloads.pause("a")
            downloads.resume("a")
        seen.wait_for_state("a", JobState.DONE)
    assert not any(view.reason for view in seen.last)


def test_paused_and_removed_at_once(server: HubServer, tmp_path: Path) -> None:
    server.faults.append(Fault("stall", 128 * KIB))
    with _queue(tmp_path / "queue.json") as (downloads, seen):
        downloads.add(_job(server, "a", tmp_path))
        seen.wait_for(lambda views: bool(views) and views[0].done_bytes == 128 * KIB)
        downloads.pause("a")
        downloads.remove("a", discard=True)
        seen.wait_for(lambda views: not views)
    assert not list((tmp_path / "a").iterdir())


def test_a_job_whose_file_another_program_downloads_is_removed_without_it(server: HubServer, tmp_path: Path) -> None:
    job = _job(server, "a", tmp_path)
    server.faults.append(Fault("stall", 128 * KIB))
    reached, other = (
        threading.Event(),
        Running(download_of(*job.files), lambda progress: reached.set() if progress.done_bytes == 128 * KIB else None),
    )
    assert reached.wait(DEADLINE_S)
    with _queue(tmp_path / "queue.json") as (downloads, seen):
        downloads.add(job)
        assert "another program" in seen.wait_for_state("a", JobState.FAILED).reason
        downloads.remove("a", discard=True)
        seen.wait_for(lambda views: not views)
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"a-Q8_0.gguf.part", "a-Q8_0.gguf.part.json"}
    other.transfer.stop()
    other.end()


def test_what_goes_wrong_pauses_with_its_reason_and_the_next_begins(server: HubServer, tmp_path: Path) -> None:
    one, two = _job(server, "a", tmp_path), _job(server, "b", tmp_path)
    server.faults.extend([Fault("broken"), Fault("broken")])
    with _queue(tmp_path / "queue.json") as (downloads, seen):
        downloads.add(one)
        view = seen.wait_for_state("a", JobState.PAUSED)
        assert (view.kind, "503" in view.reason) == ("unreachable", True)
        server.faults.append(Fault("corrupt"))
        downloads.resume("a")
        assert "SHA-256" in seen.wait_for_state("a", JobState.FAILED).reason
        downloads.add(two)
        seen.wait_for_state("b", JobState.DONE)
        downloads.add(one)
        seen.wait_for_state("a", JobState.DONE)
        assert len(seen.last) == 2, "the same files are one job"


def test_a_server_that_is_not_reached_is_tried_again_once_the_network_is_another(
    server: HubServer, tmp_path: Path
) -> None:
    job, network = _job(server, "a", tmp_path), ["one"]
    server.faults.extend([Fault("cut", 64 * KIB), Fault("broken"), Fault("broken")])
    with _queue(tmp_path / "queue.json", network) as (downloads, seen):
        downloads.add(job)
        view = seen.wait_for_state("a", JobState.PAUSED)
        assert (view.retry_s, "503" in view.reason) == (PAUSES_S[0], True)
    with _queue(tmp_path / "queue.json", network) as (downloads, seen):
        assert seen.wait_for_state("a", JobState.PAUSED).retry_s == PAUSES_S[0], "after the next start as well"
        downloads.pause("a")
        seen.wait_for(lambda views: bool(views) and views[0].retry_s is None)
        server.faults.extend([Fault("broken"), Fault("broken")])
        downloads.resume("a")
        seen.wait_for(lambda views: views[0].retry_s is not None)
        server.faults.clear()
        network.append("two")
        seen.wait_for_state("a", JobState.DONE)


def test_a_changed_file_waits_for_an_answer(server: HubServer, tmp_path: Path) -> None:
    job = _job(server, "a", tmp_path)
    server.faults.extend([Fault("cut", 128 * KIB), Fault("broken")])
    with _queue(tmp_path / "queue.json") as (downloads, seen):
        downloads.add(job)
        seen.wait_for_state("a", JobState.PAUSED)
        downloads.remove("a")
        server.repos["org/a"].files["a-Q8_0.gguf"] = DATA["c-Q8_0.gguf"]
        downloads.add(_job(server, "a", tmp_path))
        seen.wait_for_state("a", JobState.CHANGED)
        downloads.resume("a", restart=True)
        done = seen.wait_for_state("a", JobState.DONE)
    assert Path(done.paths[0]).read_bytes() == DATA["c-Q8_0.gguf"]


def test_two_windows_keep_their_downloads(server: HubServer, tmp_path: Path) -> None:
    path = tmp_path / "queue.json"
    server.faults.append(Fault("stall", 128 * KIB))
    with _queue(path) as (one, seen_one):
        one.add(_job(server, "a", tmp_path))
        seen_one.wait_for(lambda views: bool(views) and views[0].done_bytes == 128 * KIB)
        with _queue(path) as (two, seen_two):
            two.add(_job(server, "b", tmp_path))
            seen_two.wait_for_state("b", JobState.DONE)
            server.faults.append(Fault("stall", 64 * KIB))
            two.add(_job(server, "c", tmp_path))
            seen_two.wait_for(lambda views: views[-1].id == "c" and views[-1].done_bytes == 64 * KIB)
            assert [view.id for view in seen_two.last] == ["b", "c"], "those of the other window are its own"
        one.pause("a")
        seen_one.wait_for_state("a", JobState.PAUSED)
    with _queue(path) as (_, seen):
        seen.wait_for_state("c", JobState.DONE)
        assert {view.id: view.state for view in seen.last} == {
            "a": JobState.PAUSED, "b": JobState.DONE, "c": JobState.DONE,
        }  # fmt: skip
    assert sorted(each.name for each in tmp_path.glob("queue*.json")) == ["queue.json"]


def test_without_file_locks_the_list_is_read_as_well(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _queue(tmp_path / "queue.json") as (downloads, seen):
        downloads.add(_job(server, "a", tmp_path))
        seen.wait_for_state("a", JobState.DONE)

    def refuse(*_: object, **__: object) -> bool:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("engine.library.downloads.queue.open_lock", refuse)
    with _queue(tmp_path / "queue.json") as (_, seen):
        seen.wait_for_state("a", JobState.DONE)


def test_a_list_that_cannot_be_read_is_put_aside(tmp_path: Path) -> None:
    (tmp_path / "queue.json").write_text('{"version": 99, "jobs": []}')
    with _queue(tmp_path / "queue.json") as (_, seen):
        seen.views.get(timeout=DEADLINE_S)
    assert (tmp_path / "queue.json.unreadable").read_text() == '{"version": 99, "jobs": []}'
