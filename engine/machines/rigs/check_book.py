"""What the engine's check of itself found, kept between runs by engine, driver and device, and laid over a rig."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import msgspec

from engine.base.engine_build import engine_build
from engine.base.errors import PlacedError
from engine.base.json_file import read_kept, write_kept
from engine.devices.device import FEATURES, Device, Fault, Feature, Findings, Rig
from engine.machines.rigs.engine_checks import Checked
from engine.planning.fit.calibration import device_key

VERSION = 1
MAX_FILE_BYTES = 1 << 20
KEPT_DEVICES = 64
NO_DRIVERS: Mapping[str, str] = MappingProxyType({})
_ABOUT_A_TYPE = ("weights", "flash_attention")
"""Features that can be left out for one type; the others are used or not."""


class KeptCheck(msgspec.Struct, frozen=True):
    """Whether a feature worked, for a type of weights or cache where it is about one; `reason` where it did not."""

    feature: str
    of: str
    ok: bool
    reason: str = ""


class CheckBook(msgspec.Struct, frozen=True):
    """Checks by what they hold for (`book_key`)."""

    version: int = VERSION
    devices: dict[str, tuple[KeptCheck, ...]] = {}

    def with_results(self, rig: Rig, drivers: Mapping[str, str], results: Iterable[Checked]) -> CheckBook:
        """Return the book with what was found out on devices of `rig`; of other builds of the engine nothing stays."""
        engine = engine_build()
        devices = {key: kept for key, kept in self.devices.items() if key.startswith(f"{engine} |")}
        for result in results:
            if not result.is_known:
                continue
            case = result.case
            fresh = KeptCheck(case.feature, case.of, result.ok, result.reason)
            for device in filter(None, map(rig.device, case.devices)):
                key = book_key(device, drivers)
                before = devices.pop(key, ())
                same = (case.feature, case.of)
                devices[key] = (*(kept for kept in before if (kept.feature, kept.of) != same), fresh)
        return CheckBook(devices=dict(list(devices.items())[-KEPT_DEVICES:]))

    def apply(self, rig: Rig, drivers: Mapping[str, str]) -> Rig:
        """Return `rig` with what is known of its devices."""
        return Rig(tuple(self.judged(each, drivers) for each in rig.devices), self.judged(rig.host, drivers))

    def judged(self, device: Device, drivers: Mapping[str, str] = NO_DRIVERS) -> Device:
        """Return `device` with what is known of it; workers have no driver."""
        kept = self.devices.get(book_key(device, drivers))
        if kept is None:
            return device
        faults = tuple(_fault(each) for each in kept if not each.ok and each.feature in FEATURES)
        off = {fault.feature for fault in faults}
        can_split = device.capabilities.tensor_split or device.fault("tensor_split") is not None
        able = replace(
            device.capabilities,
            # What only an earlier verdict took away comes back with a better one.
            tensor_split=can_split and "tensor_split" not in off,
            repeatable=device.capabilities.repeatable and "repeated" not in off,
        )
        return replace(device, findings=Findings(faults, is_checked=True), capabilities=able)


def _fault(kept: KeptCheck) -> Fault:
    feature: Feature = kept.feature  # type: ignore[assignment]
    return Fault(feature, kept.reason, kept.of if feature in _ABOUT_A_TYPE else "")


def book_key(device: Device, drivers: Mapping[str, str]) -> str:
    """Return what a check holds for: this build of the engine, this driver, this device."""
    return f"{engine_build()} | {drivers.get(device.id, '')} | {device_key(device)} {device.name}"


def read_check_book(path: Path) -> CheckBook:
    """Return what was kept; a file that is missing, damaged or of another version holds nothing."""
    book = read_kept(path, CheckBook, MAX_FILE_BYTES)
    return book if book is not None and book.version == VERSION else CheckBook()


def write_check_book(path: Path, book: CheckBook) -> None:
    """Keep the book.

    Raises:
        PlacedError: where the file cannot be written.
    """
    write_kept(path, book, what="engine's checks", fail=PlacedError)
