"""The steps of an examination of this machine: software, cards, engine checks, loads of a model, and speeds."""

from __future__ import annotations

import getpass
import platform
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from msgspec import Struct

from engine.base.cancellation import CancelToken
from engine.base.errors import EngineError, WorkerCrashedError
from engine.base.pci import parse_pci_id
from engine.base.units import format_bytes
from engine.devices.device import Device, Feature, Rig, machine_name
from engine.devices.packs.store import ListedPack
from engine.devices.telemetry.cards import Nvml, NvmlReader, read_drivers
from engine.devices.telemetry.sample import Sample
from engine.machines.doctor.installed import (
    backends_built,
    card_checks,
    cards_on_bus,
    environment_checks,
    installed_checks,
    pack_checks,
)
from engine.machines.doctor.loads import LoadCheck
from engine.machines.doctor.report import Check, Figure, Step
from engine.machines.rigs.check_results import read_check_results, write_check_results
from engine.machines.rigs.discovery import host_device
from engine.machines.rigs.engine_checks import (
    FELL_SILENT,
    Case,
    Checked,
    Checker,
    Trial,
    cases_of,
    shared_cases,
    write_models,
)
from engine.machines.rigs.self_test import keep_verdict, try_repeated
from engine.machines.rigs.speeds import known_speeds, measured_book
from engine.planning.fit.calibration import change_calibration, read_calibration
from engine.planning.fit.speed_book import change_speed_book, read_speed_book
from engine.planning.speed.speeds import Link
from engine.runtime.process.blocking_child import raise_if_cancelled

NVML_TOLERANCE = 0.02
"""Largest relative difference between the total memory of a card in NVML and in the engine.

Only one of the two totals includes the memory that is reserved for firmware.
"""

_FEATURES: Mapping[bool, tuple[Feature, ...]] = {
    True: ("weights", "extra_buffers", "flash_attention"),
    False: ("weights", "flash_attention"),
}
"""Features of the engine that are checked on a device. The key is whether the device is the host."""
_SPLIT_NEEDS = 2
"""Split mode tensor is checked only on a machine with more devices than this: the host and at least two others."""


class Files(Struct, frozen=True):
    """Paths of the files of an examination.

    `demo`: model to load.
    `checks`: results of the engine's self-check.
    `verdicts`: results of the tests whether a device may be used several times in one layout.
    `calibration`: memory overheads of devices.
    `speeds`: measured speeds of devices.
    """

    demo: Path
    checks: Path
    verdicts: Path
    calibration: Path
    speeds: Path


class MachineSteps:
    """Makes the steps of an examination of this machine and of the devices of a rig.

    A context manager, which deletes its temporary files at the end. `report.examine` runs the steps in a background
    thread. Some steps save their results in `files`, such as measured speeds.

    `packs`: installed engine packs.
    `held`: endpoints of RPC workers in use, which are skipped.
    `problem`: sentence that says why devices could not be found, empty if they were found.
    """

    def __init__(
        self,
        rig: Rig,
        files: Files,
        cancel: CancelToken,
        *,
        packs: Sequence[ListedPack] = (),
        held: frozenset[str] = frozenset(),
        problem: str = "",
    ) -> None:
        self._rig = rig
        self._files = files
        self._cancel = cancel
        self._packs = packs
        self._held = held
        self._problem = problem
        self._drivers = read_drivers(rig.devices)
        self._checker = Checker(rig, cancel=cancel)
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._models: dict[str, Path] = {}
        self._loads: LoadCheck | None = None

    def __enter__(self) -> MachineSteps:
        return self

    def __exit__(self, *_: object) -> None:
        if self._scratch is not None:
            self._scratch.cleanup()

    @property
    def _devices(self) -> tuple[Device, ...]:
        return tuple(
            device for device in self._rig.all_devices if device.kind != "accel" and device.endpoint not in self._held
        )

    def steps(self) -> list[Step]:
        """Return all steps of the examination in their order, without running them."""
        return [
            Step("installed", "Checking what is installed", self._installed),
            Step("card", "Looking for cards", self._cards),
            Step("device", "Examining the devices", self._listed),
            *self.engine_steps(),
            *(
                Step("load", f"Loading a model on {device.id}", partial(self._load, device), device.id)
                for device in self._devices
            ),
            Step("speed", "Measuring how fast the devices are", self._speeds),
        ]

    def engine_steps(self) -> list[Step]:
        """Return only the steps of the engine's self-check.

        If devices could not be found, the first step reports the reason.
        """
        found = [Step("devices", "Examining the devices", self._not_found)] if self._problem else []
        for device in self._devices:
            for feature in _FEATURES[device.is_host]:
                words = f"Checking {feature.replace('_', ' ')} on {device.id}"
                found.append(Step("engine check", words, partial(self._engine, device, feature), device.id))
            if not device.is_rpc and not device.is_host:
                words = f"Checking {device.id} as several devices"
                found.append(Step("repeated device", words, partial(self._repeated, device), device.id))
        if len(self._devices) > _SPLIT_NEEDS:
            found.append(Step("tensor split", "Checking splits over several devices", self._splits))
        return found

    # ------------------------------------------------------------------ what is there

    def _installed(self) -> Iterator[Check]:
        yield from installed_checks()
        yield from environment_checks()
        yield from pack_checks(self._packs)

    def _cards(self) -> Iterable[Check]:
        slots = (parse_pci_id(device.pci_bus_id or "") for device in self._rig.devices if not device.is_rpc)
        return card_checks(cards_on_bus(), {slot for slot in slots if slot is not None}, backends_built(), self._packs)

    def _listed(self) -> Iterator[Check]:
        nvml = Nvml()
        try:
            for device in self._rig.all_devices:
                yield _device_check(device, self._drivers.get(device.id))
                slot = parse_pci_id(device.pci_bus_id or "")
                if not device.is_rpc and slot is not None and nvml.handle(slot) is not None:
                    yield _nvml_check(device, NvmlReader(device.id, slot, nvml).read(0.0))
        finally:
            nvml.close()

    def _not_found(self) -> Iterator[Check]:
        yield Check(name="devices", ok=False, detail=self._problem)

    # ------------------------------------------------------------------ the engine's check of itself

    def _engine(self, device: Device, feature: Feature) -> Iterator[Check]:
        found = self._checker.run(case for case in cases_of(device, self._made()) if case.feature == feature)
        unsaved = _unsaved("engine check", device.id, lambda: self._keep(found))
        yield engine_check(device.id, feature, found)
        yield from unsaved

    def _splits(self) -> Iterator[Check]:
        members = tuple(device for device in self._rig.devices if device in self._devices)
        for case in shared_cases(Rig(members, self._rig.host), self._made()):
            found = self._checker.run([case])
            devices = "+".join(case.devices)
            unsaved = _unsaved("tensor split", devices, partial(self._keep, found))
            yield engine_check(devices, "tensor_split", found)
            yield from unsaved

    def _repeated(self, device: Device) -> Iterator[Check]:
        path = self._made()["F16"]
        trial = Trial(path)
        case = Case("repeated", "", (device.id,), trial, trial)
        try:
            result = try_repeated(self._rig, device.id, path, cancel=self._cancel)
        except WorkerCrashedError as error:
            crash = Checked(case, ok=False, reason=f"It crashes when a layout uses {device.id} twice.")
            unsaved = _unsaved("repeated device", device.id, lambda: self._keep([crash]))
            yield Check(name="repeated device", device=device.id, ok=False, detail=error.summary())
            yield from unsaved
            return
        reason = "" if result.passed else f"It computes wrong values when a layout uses {device.id} twice."

        def keep() -> None:
            keep_verdict(self._files.verdicts, device, result)
            self._keep([Checked(case, ok=result.passed, reason=reason)])

        unsaved = _unsaved("repeated device", device.id, keep)
        yield Check(
            name="repeated device",
            device=device.id,
            ok=result.passed,
            detail=reason or "may be used more than once in a layout",
            figures={"rounds": result.rounds, "different": result.different},
        )
        yield from unsaved

    def _made(self) -> dict[str, Path]:
        # At first use: quantising all types takes seconds, and most steps need none of them.
        if self._scratch is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="layerdeck-check-")
            self._models = write_models(Path(self._scratch.name), self._cancel)
        return self._models

    def _keep(self, found: Iterable[Checked]) -> None:
        # Stored before the step yields, since a cancel may end the step there.
        book = read_check_results(self._files.checks).with_results(self._rig, self._drivers, found)
        write_check_results(self._files.checks, book)

    # ------------------------------------------------------------------ what it does with a model

    def _load(self, device: Device) -> Iterator[Check]:
        if device.endpoint in self._checker.silent:
            raise EngineError(FELL_SILENT)
        if self._loads is None:
            # The results of this examination already hold for these loads.
            rig = read_check_results(self._files.checks).apply(self._rig, self._drivers)
            self._loads = LoadCheck(rig, self._files.demo, self._cancel)
        # Read again for each load: other loads may have been learnt from meanwhile.
        self._loads.calibration, self._loads.learn = read_calibration(self._files.calibration), None
        yield from self._loads.on(device)
        if self._loads.learn is not None:
            change_calibration(self._files.calibration, self._loads.learn)

    def _speeds(self) -> Iterator[Check]:
        before = read_speed_book(self._files.speeds)
        book, problems = measured_book(self._rig, before, self._held, self._cancel)
        raise_if_cancelled(self._cancel)
        # Read again: answers may have been learnt from during the measurement.
        unsaved = _unsaved(
            "speed",
            None,
            lambda: change_speed_book(self._files.speeds, lambda stored: stored.with_changes(before, book)),
        )
        speeds = known_speeds(self._rig, book)
        for device in self._devices:
            read, link = speeds.bandwidths.get(device.id), speeds.links.get(device.id)
            if read is not None:
                yield speed_check(device, read, link)
        for problem in problems:
            yield Check(name="speed", ok=None, detail=problem)
        yield from unsaved


def _unsaved(name: str, device_id: str | None, write: Callable[[], None]) -> list[Check]:
    """Call `write`, which saves results. If it fails, return a list with one check that states the error.

    Otherwise the list is empty. Results are valid even if they cannot be saved, so callers yield this check last.
    """
    try:
        write()
    except EngineError as error:
        return [Check(name=name, device=device_id, ok=None, detail=error.summary())]
    return []


def find_rig(*searches: Callable[[], Rig]) -> tuple[Rig, str]:
    """Return the rig of the first search that succeeds, and sentences on the searches that failed before it.

    If all fail, the rig is the host alone.
    """
    problems: list[str] = []
    for find in searches:
        try:
            return find(), " ".join(problems)
        except EngineError as error:
            problems.append(error.summary())
    return Rig((), host_device()), " ".join(dict.fromkeys(problems))


def personal_names(rig: Rig, home: Path, machines: Iterable[str] = ()) -> dict[str, str]:
    """Return personal names that can occur in texts about `rig`, with the texts that replace them in a report.

    `home`: home folder of the user.
    `machines`: names and addresses (host:port) of other computers, even if none of their devices is in `rig`.
    """
    found = {str(home): "~", platform.node(): "this-machine"}
    with suppress(OSError, KeyError, ImportError):
        found[getpass.getuser()] = "user"
    for number, text in enumerate(filter(None, map(str.strip, machines))):
        # The entry of the whole text comes second: it wins if there is no port, because both keys are then the same.
        found |= {text.rpartition(":")[0] or text: f"machine-of-asked-{number}", text: f"asked-{number}"}
    for number, device in enumerate(rig.devices):
        if device.endpoint is None:
            continue
        # A person chose the name of a paired machine, which is a part of its devices' ids.
        named = device.id if device.fingerprint is None else f"lent-{number}"
        found |= {device.endpoint: named, device.endpoint.rpartition(":")[0]: f"machine-of-{named}"}
        if device.fingerprint is not None:
            names = dict.fromkeys((device.name, machine_name(device)), f"machine-of-{named}")
            found |= {**names, device.id: named}
    return found


def engine_check(device_id: str, feature: Feature, found: Sequence[Checked]) -> Check:
    """Return one check that sums up `found`: results of a feature on a device for all types of weights or caches."""
    wrong = [each.reason for each in found if not each.ok and each.is_known]
    unknown = [each.reason for each in found if not each.is_known]
    types = ", ".join(each.case.of for each in found if each.ok and each.case.of)
    figures: dict[str, Figure] = {(each.case.of or "difference"): each.difference for each in found}
    return Check(
        name=feature.replace("_", " "),
        device=device_id,
        ok=False if wrong else None if unknown else True,
        detail=" ".join([*wrong, *unknown]) or types or "computes the expected values",
        figures=figures,
    )


def speed_check(device: Device, bytes_per_second: float, link: Link | None) -> Check:
    """Return a check that states a device's measured bandwidth and, for a remote device, its link.

    `bytes_per_second`: the measured bandwidth.
    `link`: measured link to a remote device; None for a local one.
    """
    figures: dict[str, Figure] = {"read_bytes_per_second": bytes_per_second}
    detail = f"reads {bytes_per_second / 1e9:.3g} GB/s"
    if link is not None:
        figures |= {"round_trip_s": link.latency_s, "sent_bytes_per_second": link.bytes_per_second}
        how = " through the tunnel" if device.fingerprint is not None else ""
        detail += f", answers in {link.latency_s * 1e3:.2g} ms{how}, takes {link.bytes_per_second / 1e9:.3g} GB/s"
    return Check(name="speed", device=device.id, detail=detail, figures=figures)


def _device_check(device: Device, driver: str | None) -> Check:
    what = device.name if not device.is_rpc else "an RPC worker" + (" through a tunnel" if device.fingerprint else "")
    free = "unknown" if device.free_bytes is None else format_bytes(device.free_bytes)
    return Check(
        name="device",
        device=device.id,
        detail=f"{what}: {format_bytes(device.total_bytes)}, {free} free{f', driver {driver}' if driver else ''}",
        figures={
            "backend": device.backend,
            "kind": device.kind,
            "total_bytes": device.total_bytes,
            "free_bytes": device.free_bytes,
            "driver": driver,
        },
    )


def _nvml_check(device: Device, sample: Sample) -> Check:
    """Return a check that compares the memory of a card as reported by NVML and by the engine."""
    used, total = sample.used_bytes, sample.total_bytes
    figures: dict[str, Figure] = {
        "nvml_total_bytes": total,
        "nvml_used_bytes": used,
        "engine_total_bytes": device.total_bytes,
        "engine_free_bytes": device.free_bytes,
    }
    if used is None or total is None:
        return Check(name="NVML", device=device.id, ok=None, detail=sample.note, figures=figures)
    off_bytes = abs(total - device.total_bytes)
    return Check(
        name="NVML",
        device=device.id,
        ok=off_bytes <= total * NVML_TOLERANCE,
        detail=f"{format_bytes(total)}, {format_bytes(total - used)} free; the engine says "
        f"{format_bytes(device.total_bytes)}",
        figures=figures,
    )
