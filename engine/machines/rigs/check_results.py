"""Stored results of the engine's self-check, by engine build, driver and device.

A failed check becomes a fault of the device, so that the broken feature is not used there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from msgspec import Struct

from engine.base.engine_build import engine_build
from engine.base.errors import DocumentError
from engine.base.json_file import read_struct, write_struct
from engine.base.values import replace
from engine.devices.device import FEATURES, Device, Fault, Feature, Findings, Rig, device_key
from engine.machines.rigs.engine_checks import Checked

VERSION = 1
MAX_FILE_BYTES = 1 << 20
MAX_STORED_DEVICES = 64
NO_DRIVERS: Mapping[str, str] = MappingProxyType({})
_ABOUT_A_TYPE = ("weights", "flash_attention")
"""Features that can be faulty for a single type of weights or cache. Other features are faulty for all types."""


class StoredCheck(Struct, frozen=True):
    """A stored result of the engine's self-check for one feature of a device.

    `feature`: what was checked, such as "weights" or "flash_attention".
    `of`: type of the weights or the KV cache ("Q4_K"); empty for a feature without types.
    `reason`: a sentence if the check failed.
    """

    feature: str
    of: str
    ok: bool
    reason: str = ""


class CheckResults(Struct, frozen=True):
    """Content of the file with the results of the engine's self-check.

    `devices`: results of each device, by a key of engine build, driver and device (`book_key`).
    """

    version: int = VERSION
    devices: dict[str, tuple[StoredCheck, ...]] = {}

    def with_results(self, rig: Rig, drivers: Mapping[str, str], results: Iterable[Checked]) -> CheckResults:
        """Return a copy with new results for devices of `rig`. Results of other engine builds are removed.

        New results without a conclusion (`Checked.is_known` is False) are ignored.

        `drivers`: driver versions by device id.
        """
        engine = engine_build()
        # Another build has other kernels, so its results say nothing about this one.
        devices = {key: kept for key, kept in self.devices.items() if key.startswith(f"{engine} |")}
        for result in results:
            # A lack of memory or a silent child says nothing about the kernels.
            if not result.is_known:
                continue
            case = result.case
            fresh = StoredCheck(case.feature, case.of, result.ok, result.reason)
            for device in filter(None, map(rig.device, case.devices)):
                key = book_key(device, drivers)
                # Taken out and put in again: the dict keeps the order of use, and the oldest devices are dropped below.
                before = devices.pop(key, ())
                same = (case.feature, case.of)
                devices[key] = (*(kept for kept in before if (kept.feature, kept.of) != same), fresh)
        return CheckResults(devices=dict(list(devices.items())[-MAX_STORED_DEVICES:]))

    def apply(self, rig: Rig, drivers: Mapping[str, str]) -> Rig:
        """Return `rig` with the faults and capabilities of its devices set from the stored results.

        `drivers`: driver versions by device id.
        """
        return Rig(tuple(self.judged(each, drivers) for each in rig.devices), self.judged(rig.host, drivers))

    def judged(self, device: Device, drivers: Mapping[str, str] = NO_DRIVERS) -> Device:
        """Return `device` with the faults and capabilities that its stored self-check results show.

        It is unchanged if no results are stored for it.

        `drivers`: driver versions by device id; RPC workers have none.
        """
        kept = self.devices.get(book_key(device, drivers))
        if kept is None:
            return device
        faults = tuple(_fault(each) for each in kept if not each.ok and each.feature in FEATURES)
        off = {fault.feature for fault in faults}
        can_split = device.capabilities.tensor_split or device.fault("tensor_split") is not None
        able = replace(
            device.capabilities,
            # A capability that an earlier failed check removed is restored if the check has passed since.
            tensor_split=can_split and "tensor_split" not in off,
            repeatable=device.capabilities.repeatable and "repeated" not in off,
        )
        return replace(device, findings=Findings(faults, is_checked=True), capabilities=able)


def _fault(kept: StoredCheck) -> Fault:
    feature: Feature = kept.feature  # type: ignore[assignment]
    return Fault(feature, kept.reason, kept.of if feature in _ABOUT_A_TYPE else "")


def book_key(device: Device, drivers: Mapping[str, str]) -> str:
    """Return the key of a device's stored results: engine build, driver version and device.

    `drivers`: driver versions by device id.
    """
    return f"{engine_build()} | {drivers.get(device.id, '')} | {device_key(device)} {device.name}"


def read_check_results(path: Path) -> CheckResults:
    """Return the stored results of the file at `path`; empty if it is missing, damaged or of another version."""
    return read_struct(path, CheckResults, MAX_FILE_BYTES, version=VERSION) or CheckResults()


def write_check_results(path: Path, book: CheckResults) -> None:
    """Write the results of the engine's self-check to a file.

    Raises:
        DocumentError: if the file cannot be written.
    """
    write_struct(path, book, what="engine's checks", fail=DocumentError)
