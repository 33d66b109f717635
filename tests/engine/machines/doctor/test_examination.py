"""The examination as a value: failing checks, a cancel in the middle, and the contents of its file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.base.cancellation import CancelToken
from engine.base.errors import EngineError, UnreachableError
from engine.base.landlock import landlock_version
from engine.base.pci import PciId
from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import ComputingNeed, Device, MeasuredChoice, Rig, make_host
from engine.devices.hiding_variables import HIDING_VARIABLES
from engine.devices.packs.store import ListedPack, PackState
from engine.machines.doctor import installed, machine
from engine.machines.doctor.installed import Card, card_checks, cards_on_bus, environment_checks, pack_checks
from engine.machines.doctor.loads import LoadCheck
from engine.machines.doctor.machine import Files, MachineSteps, engine_check, find_rig, personal_names
from engine.machines.doctor.report import Check, Progress, Report, Step, document, examine, table, without_names
from engine.machines.rigs.engine_checks import Case, Checked, Checker, Trial
from engine.machines.rigs.self_test import SelfTest
from engine.planning.fit.calibration import read_calibration, write_calibration
from engine.planning.fit.speed_book import SpeedBook, StoredDevice, read_speed_book, write_speed_book
from tests.support.models import write_tiny_llama

FILES = Files(*[Path(name) for name in ("demo", "checks", "verdicts", "calibration", "speeds")])


def step(name: str, *checks: Check, error: str = "") -> Step:
    def look() -> Iterator[Check]:
        yield from checks
        if error:
            raise EngineError(error)

    return Step(name, f"Looking at {name}", look, "CPU")


def test_a_step_that_fails_costs_that_step_only() -> None:
    told: list[Progress] = []
    found = Check(name="a", detail="well")
    steps = [step("first", found, error="It broke."), step("second", Check(name="b", ok=False, detail="bad"))]
    report = examine(steps, told.append, CancelToken())
    assert [(each.name, each.ok, each.detail) for each in report.checks] == [
        ("a", True, "well"),
        ("first", None, "It broke."),
        ("b", False, "bad"),
    ]
    assert report.is_whole
    assert not report.is_sound
    assert report.summary == "1 of 3 checks failed: b."
    assert [(each.done, each.words) for each in told if not each.checks] == [(0, "Looking at first")]
    assert (told[-1].done, told[-1].total, len(told[-1].checks)) == (2, 2, 3)


def test_a_pack_that_does_not_work_is_told_and_one_switched_off_is_in_order() -> None:
    packs = [
        listed_pack("vulkan", "Vulkan", "used"),
        listed_pack("cuda", "CUDA", "off"),
        listed_pack("hip", "HIP", "broken", "The driver is missing."),
        listed_pack("other", "Vulkan", "unchecked"),
    ]
    found = list(pack_checks(packs))
    assert [(each.name, each.ok) for each in found] == [("engine pack", ok) for ok in (True, True, False, None)]
    assert "hip" in found[2].detail
    assert "The driver is missing" in found[2].detail
    assert found[0].figures["size_bytes"] == 8 * MIB


@pytest.mark.parametrize(("version", "limited", "ok"), [(4, True, True), (0, True, None), (4, False, None)])
def test_it_says_what_children_give_up_here(
    monkeypatch: pytest.MonkeyPatch, version: int, limited: bool, ok: bool | None
) -> None:
    monkeypatch.setattr(installed, "landlock_version", lambda: version)
    monkeypatch.setattr(installed, "limits_memory", lambda: limited)
    monkeypatch.setattr(installed, "can_refuse_calls", lambda: True)
    found = next(each for each in installed.installed_checks() if each.name == "confinement")
    assert (found.ok, found.figures) == (ok, {"landlock_version": version, "seccomp": True, "memory_limits": limited})
    assert ("Landlock version 4" in found.detail, "not limited" in found.detail) == (version == 4, not limited)


def test_this_system_is_told_as_it_is() -> None:
    found = next(each for each in installed.installed_checks() if each.name == "confinement")
    assert found.figures["landlock_version"] == landlock_version()


def test_a_cancel_keeps_what_was_found() -> None:
    cancel = CancelToken()

    def look() -> Iterator[Check]:
        yield Check(name="a")
        cancel.cancel()
        raise EngineError("The question to the engine was cancelled.")

    never = Step("never", "Never", lambda: pytest.fail("it went on"))
    report = examine([Step("a", "A", look), never], lambda _progress: None, cancel)
    assert [check.name for check in report.checks] == ["a"]
    assert not report.is_whole
    assert report.summary == "Nothing wrong was found in 1 checks. It was cancelled before its end."


def test_the_document_names_no_person_and_no_computer() -> None:
    worker = Device("RPC0", "192.0.2.7:50052", "RPC", "gpu", GIB, endpoint="192.0.2.7:50052")
    names = personal_names(Rig((worker,), make_host("processor", GIB)), Path("/home/maria"))
    names |= {"maria": "user", "box": "this-machine"}
    said = "192.0.2.7:50052 refused; see /home/maria/models on box for maria, not on mariana or box-2."
    report = without_names(Report((Check(name="load", detail=said, figures={"at": "192.0.2.7", "n": 1}),)), names)
    assert report.checks[0].detail == "RPC0 refused; see ~/models on this-machine for user, not on mariana or box-2."
    assert report.checks[0].figures == {"at": "machine-of-RPC0", "n": 1}
    checks = document(report)["checks"]
    assert isinstance(checks, list)
    assert [list(check) for check in checks] == [["name", "device", "ok", "detail", "figures"]]
    assert table([Check(name="n", ok=None, detail="d"), Check(name="m", device="CPU", ok=False)]) == [
        ("n", "", "–", "d"),
        ("m", "CPU", "WRONG", ""),
    ]


def test_devices_of_a_paired_computer_are_named_without_its_name() -> None:
    lent = Device(
        "marias-attic-CUDA0", "maria's attic \N{MIDDLE DOT} RTX 3090", "RPC", "gpu", GIB,
        endpoint="192.0.2.7:50052/CUDA0", fingerprint="a" * 64,
    )  # fmt: skip
    names = personal_names(Rig((lent,), make_host("processor", GIB)), Path("/home/maria"))
    said = "1 GiB requested on marias-attic-CUDA0; maria's attic at 192.0.2.7:50052/CUDA0 is busy."
    checks = (
        Check(name="load", device=lent.id, detail=said, figures={"row": lent.id}),
        Check(name="tensor split", device=f"{lent.id}+CPU"),
    )
    first, shared = without_names(Report(checks), names).checks
    assert (first.device, first.figures, shared.device) == ("lent-0", {"row": "lent-0"}, "lent-0+CPU")
    assert first.detail == "1 GiB requested on lent-0; machine-of-lent-0 at lent-0 is busy."


def write_card(root: Path, slot: str, *, kind: str = "0x030000", vendor: str = "0x10de", driver: str = "") -> None:
    folder = root / slot
    folder.mkdir(parents=True)
    for name, text in {"class": kind, "vendor": vendor, "device": "0x2204"}.items():
        (folder / name).write_text(f"{text}\n", encoding="ascii")
    if driver:
        target = root.parent / "drivers" / driver
        target.mkdir(parents=True, exist_ok=True)
        (folder / "driver").symlink_to(target)


def test_cards_are_found_on_the_bus(tmp_path: Path) -> None:
    root = tmp_path / "devices"
    write_card(root, "0000:01:00.0", driver="nvidia")
    write_card(root, "0000:02:00.0", vendor="0x1002")
    write_card(root, "0000:03:00.0", kind="0x020000")
    write_card(root, "0000:04:00.0", vendor="0x1af4")
    assert cards_on_bus(root) == (
        Card(PciId(0, 1, 0), "NVIDIA", "2204", "nvidia"),
        Card(PciId(0, 2, 0), "AMD", "2204", ""),
    )
    assert cards_on_bus(tmp_path / "none") == ()


@pytest.mark.parametrize(
    ("maker", "driver", "backends", "reason"),
    [
        ("NVIDIA", "", ("CPU", "CUDA"), "no driver uses it. Install NVIDIA's driver."),
        ("NVIDIA", "nvidia", ("CPU", "RPC"), "built without CUDA and Vulkan"),
        ("AMD", "amdgpu", ("CPU",), "LAYERDECK_BACKEND=vulkan python3 make.py setup"),
        ("NVIDIA", "nouveau", ("CUDA",), "uses the driver nouveau"),
        ("NVIDIA", "vfio-pci", ("CUDA",), "assigned to a virtual machine"),
        ("AMD", "amdgpu", ("Vulkan",), "does not list it"),
    ],
)
def test_an_unused_card_says_why(maker: str, driver: str, backends: tuple[str, ...], reason: str) -> None:
    slot = PciId(0, 1, 0)
    card = Card(slot, maker, "2204", driver)
    (unused,) = card_checks([card], [], backends)
    assert unused.ok is False
    assert reason in unused.detail
    (used,) = card_checks([card], [slot], backends)
    assert (used.ok, used.device, used.detail) == (True, "0000:01:00", f"{maker} 2204")


def listed_pack(name: str, backend: str, state: PackState, reason: str = "") -> ListedPack:
    return ListedPack(name, backend, "0.3.36", "packs", 8 * MIB, state, reason, (), "a driver", ours=True)


@pytest.mark.parametrize(
    ("state", "reason", "said"),
    [
        ("used", "No device for it was found.", "the driver may not match the toolkit"),
        ("broken", "It dies (SIGSEGV).", "the engine pack cuda supports it. Not used. It dies (SIGSEGV)."),
        ("off", "", "the engine pack cuda supports it. Turned off."),
    ],
)
def test_a_card_is_told_what_keeps_its_pack_from_it(state: PackState, reason: str, said: str) -> None:
    card = Card(PciId(0, 1, 0), "NVIDIA", "2204", "nvidia")
    packs = [listed_pack("hip", "HIP", "used"), listed_pack("cuda", "CUDA", state, reason)]
    (check,) = card_checks([card], [], ("CPU", "RPC"), packs)
    assert check.ok is False
    assert said in check.detail
    assert "built without" not in check.detail


def test_a_card_that_is_not_used_beside_another_one_is_nothing_wrong() -> None:
    card = Card(PciId(0, 1, 0), "NVIDIA", "2204", "nvidia")
    inside = Card(PciId(0, 0, 2), "Intel", "4680", "i915")
    found = list(card_checks([inside, card], [card.slot], ("CPU", "CUDA")))
    assert [check.ok for check in found] == [None, True]
    assert "built without Vulkan and SYCL" in found[0].detail
    assert [check.ok for check in card_checks([inside, card], [], ("CPU", "CUDA"))] == [False, False]


def test_a_search_that_fails_leaves_the_host() -> None:
    def find() -> Rig:
        raise UnreachableError("192.0.2.1:1 does not answer.")

    rig, problem = find_rig(find)
    assert rig.devices == ()
    assert problem == "192.0.2.1:1 does not answer."
    again, problem_again = find_rig(find, find)
    # Free memory of the host is read anew by each search.
    assert (again.devices, again.host.id, problem_again) == ((), rig.host.id, problem)


def test_a_second_search_finds_what_the_first_could_not_tell() -> None:
    def find() -> Rig:
        raise UnreachableError("192.0.2.1:1 does not answer.")

    card = Device("CUDA0", "card", "CUDA", "gpu", GIB)
    here = Rig((card,), make_host("processor", GIB))
    assert find_rig(find, lambda: here) == (here, "192.0.2.1:1 does not answer.")
    assert find_rig(lambda: here, find) == (here, "")


def test_machines_that_were_asked_for_in_vain_are_not_named() -> None:
    asked = ("attic-of-maria.local:50052", " maria's laptop ")
    names = personal_names(Rig((), make_host("processor", GIB)), Path("/home/maria"), asked)
    said = "attic-of-maria.local:50052 refused: attic-of-maria.local is unknown. maria's laptop is not paired."
    report = without_names(Report((Check(name="devices", detail=said),)), names)
    assert report.checks[0].detail == "asked-0 refused: machine-of-asked-0 is unknown. asked-1 is not paired."


def test_one_check_for_all_types_of_a_feature() -> None:
    trial = Trial(Path("m"))

    def checked(of: str, *, ok: bool, known: bool = True) -> Checked:
        reason = "" if ok else f"Wrong with {of}."
        return Checked(Case("weights", of, ("CPU",), trial, trial), ok, reason, 0.5, is_known=known)

    good = engine_check("CPU", "weights", [checked("F16", ok=True), checked("Q4_0", ok=True)])
    assert (good.ok, good.detail, good.figures) == (True, "F16, Q4_0", {"F16": 0.5, "Q4_0": 0.5})
    bad = engine_check("CPU", "weights", [checked("F16", ok=True), checked("Q4_0", ok=False)])
    assert (bad.name, bad.ok, bad.detail) == ("weights", False, "Wrong with Q4_0.")
    assert engine_check("CPU", "weights", [checked("F16", ok=False, known=False)]).ok is None


def test_results_that_cannot_be_saved_are_shown_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = Device("CUDA0", "card", "CUDA", "gpu", 8 * GIB)
    folder = tmp_path / "folder"
    folder.mkdir()
    trial = Trial(Path("m"))
    wrong = Checked(Case("weights", "Q4_0", ("CPU",), trial, trial), ok=False, reason="Wrong with Q4_0.")
    book = read_speed_book(folder).with_device(card, StoredDevice(1e11, 1e-4, 1e9))
    monkeypatch.setattr(Checker, "run", lambda _checker, _cases: [wrong])
    monkeypatch.setattr(machine, "cases_of", lambda _device, _models: [])
    monkeypatch.setattr(machine, "try_repeated", lambda *_rest, **_more: SelfTest(1, 1))
    monkeypatch.setattr(machine, "measured_book", lambda *_rest: (book, ()))
    files = Files(tmp_path / "demo", *[folder] * 4)
    with MachineSteps(Rig((card,), make_host("host", GIB)), files, CancelToken()) as examined:
        examined._made = lambda: {"F16": tmp_path / "demo"}  # type: ignore[method-assign]
        steps = [each for each in examined.steps() if each.name in ("engine check", "repeated device", "speed")]
        report = examine(steps, lambda _progress: None, CancelToken())
    found = [(each.name, each.device, each.ok) for each in report.checks if each.device != "CPU"]
    assert found == [
        ("weights", "CUDA0", False),
        ("engine check", "CUDA0", None),
        ("flash attention", "CUDA0", False),
        ("engine check", "CUDA0", None),
        ("repeated device", "CUDA0", False),
        ("repeated device", "CUDA0", None),
        ("speed", "CUDA0", True),
        ("speed", None, None),
    ]
    assert not report.is_sound


def test_variables_that_hide_devices_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in HIDING_VARIABLES:
        monkeypatch.delenv(each.name, raising=False)
    card = Card(PciId(0, 1, 0), "AMD", "2204", "amdgpu")
    assert list(environment_checks()) == []
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("ONEAPI_DEVICE_SELECTOR", "level_zero:0")
    found = list(environment_checks())
    assert [(each.name, each.ok, each.figures["variable"]) for each in found] == [
        ("environment", None, "GGML_VK_VISIBLE_DEVICES"),
        ("environment", None, "ONEAPI_DEVICE_SELECTOR"),
    ]
    assert "hide devices of Vulkan" in found[0].detail
    (unused,) = card_checks([card], [], ("Vulkan",))
    assert "GGML_VK_VISIBLE_DEVICES may hide it" in unused.detail
    machine = MachineSteps(Rig((), make_host("host", GIB)), FILES, CancelToken())
    (step,) = [each for each in machine.steps() if each.name == "installed"]
    assert [each for each in step.look() if each.name == "environment"] == found


def test_what_the_window_learns_during_an_examination_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = Device("CUDA0", "card", "CUDA", "gpu", 8 * GIB)
    rig = Rig((card,), make_host("host", 8 * GIB))
    files = Files(
        write_tiny_llama(tmp_path / "tiny.gguf"),
        *(tmp_path / name for name in ("checks", "verdicts", "calibration", "speeds")),
    )
    theirs = ComputingNeed("CUDA0", "model", 4096, 512, flash_attention=True, types=("f16", "f16"), overhead_bytes=GIB)
    choice = MeasuredChoice("n_ubatch", 1024, 512, 1.3, 1.2, 1.4, "here", "load")

    def load(check: LoadCheck, device: Device) -> list[Check]:
        check.learn = lambda stored: replace(stored, overheads={**stored.overheads, device.id: (MIB,)})
        return []

    def measure(_rig: Rig, book: SpeedBook, *_rest: object) -> tuple[SpeedBook, tuple[str, ...]]:
        write_speed_book(files.speeds, book.with_choices([choice]))
        return book.with_device(card, StoredDevice(1e11, 1e-4, 1e9)), ()

    monkeypatch.setattr(LoadCheck, "on", load)
    monkeypatch.setattr(machine, "measured_book", measure)
    with MachineSteps(rig, files, CancelToken()) as examined:
        on_card, on_host, speed = (step for step in examined.steps() if step.name in ("load", "speed"))
        list(on_card.look())
        write_calibration(files.calibration, read_calibration(files.calibration).with_need(theirs))
        list(on_host.look())
        list(speed.look())
    kept = read_calibration(files.calibration)
    assert (set(kept.overheads), kept.computing) == ({"CUDA0", "CPU"}, (theirs,))
    speeds = read_speed_book(files.speeds)
    assert (len(speeds.devices), speeds.choices) == (1, (choice,))
