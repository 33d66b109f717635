"""Actions of the Devices menu on the rig: searches, rig files, lab workers, remote workers, limits, samples."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.notices import Notice, Notices
from app.rig.device_list import DeviceList
from app.rig.limit_store import LimitStore
from app.settings import Settings
from app.wiring import RigObjects
from engine.base.errors import EngineError
from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Fault, Rig, make_host
from engine.devices.rig_file import read_rig, write_rig
from engine.devices.telemetry.sample import Sample
from engine.machines.rigs.check_results import CheckResults, write_check_results
from engine.machines.rigs.engine_checks import Case, Checked, Trial
from engine.machines.rigs.lab import LabRig
from widgets.devices.limits import DeviceLimits

CARD = Device("CUDA0", "card", "CUDA", "gpu", 8 * GIB, 6 * GIB, pci_bus_id="0000:01:00.0")
HOST = make_host("host", 16 * GIB)


@pytest.fixture
def told(notices: Notices) -> list[Notice]:
    seen: list[Notice] = []
    notices.given.connect(seen.append)
    return seen


@pytest.fixture
def wait(qtbot: QtBot) -> Callable[[Callable[[], bool]], None]:
    return qtbot.waitUntil


Wait = Callable[[Callable[[], bool]], None]


def test_a_search_finds_the_host_and_its_samples_arrive(parts: RigObjects, wait: Wait) -> None:
    samples: list[tuple[Sample, ...]] = []
    parts.live.samples_arrived.connect(samples.append)
    parts.start()
    wait(lambda: any(each.device == CPU_ID and each.used_bytes for each in (samples or [()])[-1]))
    wait(lambda: parts.live.rig.host.free_bytes is not None)
    assert parts.live.is_real


def test_a_rig_file_is_opened_and_saved(parts: RigObjects, told: list[Notice], wait: Wait, tmp_path: Path) -> None:
    path, saved = tmp_path / "rig.json", tmp_path / "saved.json"
    write_rig(path, Rig((CARD,), HOST))
    parts.files.open(path)
    wait(lambda: told == [Notice("Using the devices in rig.json", bad=False)])
    assert parts.live.missing_devices == ("CUDA0",)
    parts.files.save(saved)
    wait(lambda: told[-1] == Notice("Saved saved.json", bad=False))
    assert read_rig(saved) == read_rig(path)
    parts.files.save(tmp_path / "nowhere" / "rig.json")
    wait(lambda: told[-1].bad)
    assert "rig.json: the rig file cannot be written" in told[-1].text


def test_a_rig_file_that_cannot_be_read_changes_nothing(
    parts: RigObjects, told: list[Notice], wait: Wait, tmp_path: Path
) -> None:
    before = parts.live.devices
    parts.files.open(tmp_path / "away.json")
    wait(lambda: [notice.bad for notice in told] == [True])
    assert parts.live.devices is before


def test_a_rig_file_that_is_opened_during_a_search_stays(
    parts: RigObjects, wait: Wait, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = threading.Event()

    def find(*_words: object, **_named: object) -> Rig:
        opened.wait()
        return Rig((replace(CARD, id="CUDA1"),), HOST)

    monkeypatch.setattr("app.rig.device_search.find_all_devices", find)
    write_rig(tmp_path / "rig.json", Rig((CARD,), HOST))
    searched: list[bool] = []
    try:
        parts.search.refresh()
        parts.files.open(tmp_path / "rig.json")
        wait(lambda: parts.live.devices.from_file)
        monkeypatch.setattr(parts.live, "end_search", lambda: searched.append(True))
    finally:
        opened.set()
    wait(lambda: searched == [True])
    assert (parts.live.devices.from_file, parts.live.rig.ids) == (True, ("CUDA0", "CPU"))
    # A search that begins after the file was opened replaces its devices.
    parts.search.refresh()
    wait(lambda: parts.live.rig.ids == ("CUDA1", "CPU"))


def test_lab_workers_come_and_go_as_devices(parts: RigObjects, told: list[Notice], wait: Wait) -> None:
    running: list[bool] = []
    then: list[str] = []
    parts.lab.running_changed.connect(running.append)
    parts.lab.start([16 * MIB, 16 * MIB], then=lambda: then.append("first"))
    parts.lab.start([16 * MIB])  # One lab at a time, and this one is on its way.
    wait(lambda: then == ["first"])
    assert told[-1].text == "RPC0 and RPC1 are two simulated devices on this computer"
    assert [device.id for device in parts.live.rig.devices] == ["RPC0", "RPC1"]
    assert parts.lab.processes.keys() == parts.lab.endpoints
    parts.lab.start([16 * MIB], then=lambda: then.append("second"))
    assert then == ["first", "second"]
    parts.lab.stop()
    assert (parts.live.rig.devices, parts.lab.endpoints, parts.lab.processes) == ((), frozenset(), {})
    assert running == [True, False]


def test_workers_that_are_stopped_in_the_background_have_ended_after_a_close(parts: RigObjects, wait: Wait) -> None:
    parts.lab.start([16 * MIB])
    wait(lambda: bool(parts.lab.endpoints))
    (process,) = parts.lab.processes.values()
    parts.lab.stop()
    parts.lab.close()
    assert not psutil.pid_exists(process.pid)


def test_a_lab_that_cannot_start_is_told_and_may_be_tried_again(
    parts: RigObjects, told: list[Notice], wait: Wait
) -> None:
    parts.lab.start([1])
    wait(lambda: [notice.bad for notice in told] == [True])
    parts.lab.start([16 * MIB])
    wait(lambda: bool(parts.lab.endpoints))


def test_a_lost_worker_is_told(parts: RigObjects, qtbot: QtBot, wait: Wait, caplog: pytest.LogCaptureFixture) -> None:
    parts.lab.start([16 * MIB])
    wait(lambda: bool(parts.lab.endpoints))
    (process,) = parts.lab.processes.values()
    with qtbot.waitSignal(parts.lab.worker_lost) as lost:
        psutil.Process(process.pid).kill()
    assert lost.args is not None
    assert lost.args[0].startswith("RPC0 (lab worker) stopped.")
    assert lost.args[0] in caplog.text


def test_a_stopped_worker_has_no_memory_until_it_is_restarted_at_its_port(
    parts: RigObjects, wait: Wait, caplog: pytest.LogCaptureFixture
) -> None:
    parts.lab.start([16 * MIB, 16 * MIB])
    wait(lambda: bool(parts.lab.endpoints))
    before = parts.live.rig
    stopped: list[tuple[str, ...]] = []
    parts.lab.stopped_changed.connect(stopped.append)
    second = parts.live.rig.devices[1]
    psutil.Process(parts.lab.processes[str(second.endpoint)].pid).kill()
    wait(lambda: stopped == [("RPC1",)])
    assert [device.available_bytes for device in parts.live.rig.devices] == [16 * MIB, 0]
    assert [device.is_stopped for device in parts.live.rig.devices] == [False, True]
    assert list(parts.lab.processes) == [before.devices[0].endpoint]
    then: list[str] = []
    parts.lab.when_running(lambda: then.append("running"))
    wait(lambda: then == ["running"])
    assert stopped == [("RPC1",), ()]
    assert parts.live.rig.devices == before.devices
    assert psutil.pid_exists(parts.lab.processes[str(second.endpoint)].pid)
    parts.lab.when_running(lambda: then.append("at once"))
    assert then == ["running", "at once"]


def test_who_asks_during_a_start_or_a_restart_waits_for_it(
    parts: RigObjects, wait: Wait, caplog: pytest.LogCaptureFixture
) -> None:
    then: list[str] = []
    parts.lab.start([16 * MIB], then=lambda: then.append("first"))
    parts.lab.start([16 * MIB], then=lambda: then.append("second"))
    wait(lambda: then == ["first", "second"])
    (process,) = parts.lab.processes.values()
    psutil.Process(process.pid).kill()
    wait(lambda: parts.lab.stopped == ("RPC0",))
    parts.lab.restart()
    parts.lab.when_running(lambda: then.append("third"))
    wait(lambda: then == ["first", "second", "third"])
    assert parts.lab.stopped == ()


def lose_both(parts: RigObjects, wait: Wait) -> LabRig:
    """Start two lab workers, kill them, and return their rig."""
    parts.lab.start([16 * MIB, 16 * MIB])
    wait(lambda: bool(parts.lab.endpoints))
    for process in parts.lab.processes.values():
        psutil.Process(process.pid).kill()
    wait(lambda: parts.lab.stopped == ("RPC0", "RPC1"))
    assert parts.lab._workers is not None
    return parts.lab._workers


def test_a_worker_that_ends_again_while_another_restarts_is_stopped(
    parts: RigObjects, wait: Wait, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    workers = lose_both(parts, wait)
    restart = workers.restart
    lost: list[str] = []
    parts.lab.worker_lost.connect(lost.append)

    def restarting(device_id: str) -> None:
        if device_id == "RPC1":
            pid = workers.pid("RPC0")
            assert pid is not None
            psutil.Process(pid).kill()
            workers._started.workers["RPC0"].child.wait_for_end(60.0)
        restart(device_id)

    with monkeypatch.context() as patch:
        patch.setattr(workers, "restart", restarting)
        parts.lab.restart()
        wait(lambda: bool(lost) and parts.lab.stopped == ("RPC0",))
    assert len(parts.lab.processes) == 1
    parts.lab.restart()
    wait(lambda: parts.lab.stopped == ())


def test_of_several_workers_those_that_restart_run(
    parts: RigObjects, told: list[Notice], wait: Wait, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    workers = lose_both(parts, wait)
    restart = workers.restart

    def restarting(device_id: str) -> None:
        if device_id == "RPC1":
            raise EngineError("The port is taken.")
        restart(device_id)

    monkeypatch.setattr(workers, "restart", restarting)
    parts.lab.restart()
    wait(lambda: told[-1] == Notice("The port is taken.", bad=True))
    assert parts.lab.stopped == ("RPC1",)
    assert len(parts.lab.processes) == 1


def test_stopping_the_lab_forgets_its_stopped_workers(
    parts: RigObjects, wait: Wait, caplog: pytest.LogCaptureFixture
) -> None:
    parts.lab.start([16 * MIB])
    wait(lambda: bool(parts.lab.endpoints))
    (process,) = parts.lab.processes.values()
    psutil.Process(process.pid).kill()
    wait(lambda: parts.lab.stopped == ("RPC0",))
    parts.lab.stop()
    assert (parts.lab.stopped, parts.live.rig.devices) == ((), ())


def test_a_rig_file_without_its_workers_ends_the_lab(parts: RigObjects, wait: Wait, tmp_path: Path) -> None:
    parts.lab.start([16 * MIB])
    wait(lambda: bool(parts.lab.endpoints))
    with_lab, without = tmp_path / "with.json", tmp_path / "without.json"
    write_rig(with_lab, parts.live.devices.rig)
    write_rig(without, Rig((), HOST))
    parts.files.open(with_lab)
    wait(lambda: parts.live.devices.from_file)
    assert parts.lab.endpoints
    parts.files.open(without)
    wait(lambda: not parts.lab.endpoints)
    assert parts.live.rig.devices == ()


def test_a_remote_worker_is_added_once_with_its_limits(parts: RigObjects, told: list[Notice], wait: Wait) -> None:
    with LabRig([16 * MIB]) as elsewhere:
        (worker,) = elsewhere.rig.devices
        assert worker.endpoint is not None
        parts.search.add_remote(f" {worker.endpoint}\n")
        wait(lambda: [device.endpoint for device in parts.live.rig.devices] == [worker.endpoint])
        assert told == [Notice(f"Added {worker.endpoint}", bad=False)]
        parts.search.add_remote(worker.endpoint)
        assert "already among the devices" in told[-1].text
        parts.search.set_limits(DeviceLimits("RPC0", 8 * MIB, 0))
        parts.search.remove("RPC0")
        assert parts.live.rig.devices == ()
        parts.search.add_remote(worker.endpoint)
        wait(lambda: [device.cap_bytes for device in parts.live.rig.devices] == [8 * MIB])


def test_a_remote_worker_that_is_added_twice_at_the_same_time_is_listed_once(
    parts: RigObjects, told: list[Notice], wait: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Device("RPC0", "worker", "RPC", "gpu", GIB, endpoint="192.0.2.7:50052")
    monkeypatch.setattr("app.rig.device_search.find_workers", lambda *_words: (worker,))
    for _ in range(2):
        parts.search.add_remote("192.0.2.7:50052")
    wait(lambda: len(told) == 2)
    assert [(notice.bad, "already among the devices" in notice.text) for notice in told] == [
        (False, False),
        (True, True),
    ]
    assert parts.live.rig.ids == ("RPC0", "CPU")


def test_a_worker_is_judged_by_the_engines_checks_when_it_is_added_and_with_every_search(
    parts: RigObjects, wait: Wait, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = tmp_path / "checks.json"
    monkeypatch.setattr("app.rig.device_search.engine_checks_path", lambda: checks)

    def keep(*, ok: bool) -> None:
        trial = Trial(Path("model"))
        case = Case("weights", "Q8_0", (worker.id,), trial, trial)
        found = [Checked(case, ok, "" if ok else "It dies.")]
        write_check_results(checks, CheckResults().with_results(found_rig, {}, found))

    def shown() -> list[tuple[bool, tuple[Fault, ...]]]:
        return [
            (device.findings.is_checked, device.findings.faults)
            for device in parts.live.devices.rig.devices
            if device.is_rpc
        ]

    with LabRig([16 * MIB]) as elsewhere:
        (worker,) = elsewhere.rig.devices
        # As a search finds it, its name is its address.
        worker = replace(worker, name=str(worker.endpoint))
        found_rig = Rig((worker,), HOST)
        keep(ok=False)
        parts.search.add_remote(str(worker.endpoint))
        wait(lambda: shown() == [(True, (Fault("weights", "It dies.", "Q8_0"),))])
        keep(ok=True)
        parts.search.refresh()
        wait(lambda: shown() == [(True, ())])


def test_what_is_no_endpoint_is_told(parts: RigObjects, told: list[Notice]) -> None:
    parts.search.add_remote("attic")
    assert [notice.bad for notice in told] == [True]
    assert "HOST:PORT" in told[0].text


def test_limits_of_a_rig_file_are_not_kept(parts: RigObjects, tmp_path: Path) -> None:
    def kept() -> Device:
        return LimitStore(Settings(tmp_path / "settings.ini")).apply(CARD)

    shown = DeviceList(Rig((CARD,), HOST))
    parts.live.set_devices(replace(shown, from_file=True))
    parts.search.set_limits(DeviceLimits("CUDA0", GIB, 2 * GIB))
    assert (parts.live.rig.devices[0].cap_bytes, parts.live.rig.devices[0].margin_bytes) == (GIB, 2 * GIB)
    assert kept() == CARD
    parts.live.set_devices(shown)
    parts.search.set_limits(DeviceLimits("CUDA0", GIB, 2 * GIB))
    assert (kept().cap_bytes, kept().margin_bytes) == (GIB, 2 * GIB)


def test_limits_that_another_window_has_set_stay(tmp_path: Path) -> None:
    settings, second = Settings(tmp_path / "settings.ini"), replace(CARD, id="CUDA1", pci_bus_id="0000:09:00.0")
    ours, theirs = LimitStore(settings), LimitStore(settings)
    theirs.keep(replace(second, cap_bytes=GIB))
    ours.keep(replace(CARD, cap_bytes=2 * GIB))
    kept = LimitStore(settings)
    assert [kept.apply(card).cap_bytes for card in (CARD, second)] == [2 * GIB, GIB]


def test_without_a_local_card_there_is_nothing_to_test(parts: RigObjects, told: list[Notice]) -> None:
    parts.search.test_repeats()
    assert "no local GPU" in told[0].text


def test_nothing_is_told_after_the_end(parts: RigObjects, qapp: QApplication, wait: Wait) -> None:
    parts.start()
    wait(lambda: parts.live.rig.host.free_bytes is not None)
    seen: list[object] = []
    parts.close()
    parts.live.samples_arrived.connect(seen.append)
    qapp.processEvents()
    assert seen == []
