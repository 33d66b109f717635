"""The engine's check of devices with real children: right results, crashes, wrong results, and stored faults."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import psutil
import pytest

from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import CPU_ID, Capabilities, Device, Fault, Rig, make_host
from engine.machines.rigs.check_results import CheckResults, book_key, read_check_results, write_check_results
from engine.machines.rigs.discovery import host_device
from engine.machines.rigs.engine_checks import (
    CONTEXT,
    Case,
    Checked,
    Checker,
    Trial,
    cases_of,
    shared_cases,
    write_models,
)
from engine.machines.rigs.lab import LabRig
from tests.support.patience import DEADLINE_S

Models = dict[str, Path]
CARDS = tuple(
    Device(f"Vulkan{n}", "card", "Vulkan", "gpu", GIB, capabilities=Capabilities(repeatable=True)) for n in range(2)
)
RIG = Rig(CARDS, make_host("processor", GIB))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return write_models(tmp_path_factory.mktemp("models"))


@contextmanager
def killing_the_next_child(number: int) -> Iterator[None]:
    """End the child of the next check with a signal from outside, as soon as it is there."""
    done = threading.Event()

    def kill() -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not done.wait(0.01) and time.monotonic() < deadline_s:
            for child in psutil.Process().children():
                with suppress(psutil.Error):  # Other children may end meanwhile.
                    if child.cmdline()[-1:] == ["engine check"]:
                        child.send_signal(number)
                        return

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def checked(
    feature: str, *, ok: bool, of: str = "", devices: tuple[str, ...] = (CPU_ID,), known: bool = True
) -> Checked:
    trial = Trial(Path("model"))
    case = Case(feature, of, devices, trial, trial)  # type: ignore[arg-type]
    return Checked(case, ok, "" if ok else f"It dies with {feature}.", is_known=known)


def test_every_kind_of_weights_can_be_made(models: Models) -> None:
    assert len(models) == 14
    assert all(path.stat().st_size > MIB // 4 for path in models.values())


def test_what_works_here_is_found_to_work(models: Models) -> None:
    rig = Rig((), host_device())
    few = {name: models[name] for name in ("F16", "Q4_0")}
    cases = [case for case in cases_of(rig.host, few) if case.of in ("Q4_0", "f16", "q8_0")]
    assert [case.feature for case in cases] == ["weights", "extra_buffers", "flash_attention", "flash_attention"]
    told: list[Checked] = []
    found = Checker(rig).run(cases, told.append)
    assert told == found
    assert all(each.ok and each.difference is not None for each in found), found
    assert 0 < (found[0].difference or 0) < 0.5, "other weights give other logits, and not quite others"


@pytest.mark.exhaustive
def test_workers_compute_as_the_cpu_does_alone_and_as_a_split(models: Models) -> None:
    with LabRig([64 * MIB] * 2) as lab:
        few = {name: models[name] for name in ("F16", "Q8_0")}
        cases = [case for case in cases_of(lab.rig.devices[0], few) if case.of in ("Q8_0", "q8_0")]
        (split,) = shared_cases(lab.rig, few)
        assert all(each.ok for each in Checker(lab.rig).run([*cases, split]))
        # A cache on the host is what a split is known to compute nonsense with.
        nonsense = msgspec.structs.replace(split.tried.context, offload_kqv=False)
        (wrong,) = Checker(lab.rig).run([replace(split, tried=replace(split.tried, context=nonsense))])
    assert not wrong.ok
    assert wrong.is_known
    assert wrong.reason == "It computes wrong values with split mode tensor."
    assert (wrong.difference or 0) > 1


def test_a_child_that_dies_is_told_with_its_signal(models: Models) -> None:
    checker = Checker(Rig((), host_device()))
    plain = Trial(models["F16"])
    sound = Case("weights", "F16", (CPU_ID,), plain, plain)
    assert checker.run([sound])[0].ok
    copies = Case("extra_buffers", "F16", (CPU_ID,), replace(plain, extra_buffers=True), plain)
    with killing_the_next_child(signal.SIGSEGV):
        (dead,) = checker.run([copies])
    assert (dead.ok, dead.is_known) == (False, True)
    assert dead.reason == "It dies (SIGSEGV) with F16 weights repacked for the CPU."


def test_a_child_that_says_nothing_for_long_says_nothing_of_the_engine(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker = Checker(Rig((), host_device()))
    plain = Trial(models["F16"])
    assert checker.run([Case("weights", "F16", (CPU_ID,), plain, plain)])[0].ok
    # Less than any child needs to begin.
    monkeypatch.setattr("engine.machines.rigs.engine_checks.TIMEOUT_S", 0.001)
    copies = Case("extra_buffers", "F16", (CPU_ID,), replace(plain, extra_buffers=True), plain)
    (slow,) = checker.run([copies])
    assert (slow.ok, slow.is_known, slow.is_stalled) == (False, False, True)
    assert slow.reason == "It hangs with F16 weights repacked for the CPU."
    assert CheckResults().with_results(checker.rig, {}, [slow]).devices == {}


def test_a_lost_worker_says_nothing_of_the_engine(models: Models) -> None:
    with LabRig([64 * MIB]) as lab:
        pid = lab.pid("RPC0")
        assert pid is not None
        worker = psutil.Process(pid)
        worker.kill()
        psutil.wait_procs([worker], timeout=DEADLINE_S)
        plain = Trial(models["F16"])
        (lost,) = Checker(lab.rig).run([Case("weights", "F16", ("RPC0",), Trial(models["F16"], ("RPC0",)), plain)])
    assert (lost.ok, lost.is_known) == (False, False)


def test_a_device_without_room_says_nothing_of_the_engine(models: Models) -> None:
    with LabRig([MIB]) as lab:
        tried = Trial(models["F16"], ("RPC0",), msgspec.structs.replace(CONTEXT, n_ctx=65536))
        (full,) = Checker(lab.rig).run([Case("weights", "F16", ("RPC0",), tried, Trial(models["F16"]))])
    assert (full.ok, full.is_known) == (False, False)
    assert "no room" in full.reason


def test_the_book_keeps_what_was_found_and_lays_it_over_a_rig(tmp_path: Path) -> None:
    path = tmp_path / "data" / "engine_checks.json"
    results = [
        checked("extra_buffers", of="Q4_0", ok=True),
        checked("extra_buffers", of="Q4_1", ok=False),
        checked("weights", of="Q8_0", ok=False, devices=("Vulkan0",)),
        checked("tensor_split", ok=False, devices=("Vulkan0", "Vulkan1")),
        checked("repeated", ok=False, devices=("Vulkan1",)),
        checked("flash_attention", of="q4_0", ok=False, devices=("Vulkan1",), known=False),
    ]
    write_check_results(path, CheckResults().with_results(RIG, {}, results))
    judged = read_check_results(path).apply(RIG, {})
    assert judged.host.findings.faults == (Fault("extra_buffers", "It dies with extra_buffers."),)
    first, second = judged.devices
    assert first.fault("weights", "Q8_0") is not None
    assert first.fault("weights", "Q4_0") is None
    assert second.fault("flash_attention", "q4_0") is None
    assert (first.capabilities.tensor_split, second.capabilities.tensor_split) == (False, False)
    assert (first.capabilities.repeatable, second.capabilities.repeatable) == (True, False)
    assert all(device.findings.is_checked for device in judged.all_devices)

    later = read_check_results(path).with_results(RIG, {}, [checked("extra_buffers", of="Q4_1", ok=True)])
    assert later.apply(RIG, {}).host.findings.faults == ()
    assert later.apply(RIG, {}).devices == judged.devices


def test_what_was_found_of_a_split_is_taken_back_by_a_later_check() -> None:
    def book(*, ok: bool) -> CheckResults:
        return CheckResults().with_results(RIG, {}, [checked("tensor_split", ok=ok, devices=("Vulkan0", "Vulkan1"))])

    judged = book(ok=False).apply(RIG, {})
    (again,) = shared_cases(judged, {"F16": Path("model")})
    assert again.devices == ("Vulkan0", "Vulkan1")
    sound = book(ok=True).apply(judged, {})
    assert [(each.capabilities.tensor_split, each.findings.faults) for each in sound.devices] == [(True, ())] * 2
    unable = Rig(tuple(replace(each, capabilities=Capabilities(tensor_split=False)) for each in CARDS), RIG.host)
    assert list(shared_cases(unable, {"F16": Path("model")})) == []
    assert book(ok=True).apply(unable, {}).devices[0].capabilities.tensor_split is False


def test_what_was_found_holds_for_its_driver_its_device_and_its_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = CheckResults().with_results(
        RIG, {"Vulkan0": "1.0"}, [checked("tensor_split", ok=False, devices=("Vulkan0",))]
    )
    assert not book.apply(RIG, {"Vulkan0": "1.0"}).devices[0].capabilities.tensor_split
    assert book.apply(RIG, {"Vulkan0": "2.0"}) == RIG
    other = Rig((replace(CARDS[0], name="another card"),), RIG.host)
    assert book.apply(other, {"Vulkan0": "1.0"}) == other
    monkeypatch.setattr("engine.machines.rigs.check_results.engine_build", lambda: "built anew")
    assert book.apply(RIG, {"Vulkan0": "1.0"}) == RIG
    fresh = book.with_results(RIG, {}, [checked("weights", ok=True)])
    assert list(fresh.devices) == [book_key(RIG.host, {})]


@pytest.mark.parametrize("content", [b"", b"{", b'{"version": 2}', b"\xff"])
def test_a_damaged_book_holds_nothing(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "engine_checks.json"
    path.write_bytes(content)
    assert read_check_results(path) == CheckResults()
