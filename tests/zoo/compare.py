"""Compares our estimates with the zoo and prints the differences: `python -m tests.zoo.compare [NAME...]`."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from msgspec import Struct, field

from engine.base.units import MIB
from engine.devices.device import CPU_ID
from engine.planning.memory.estimate import DeviceMemory
from engine.planning.memory.model_memory import ModelMemory
from tests.support.truth import MODEL_NAMES, Measured, TruthCase, truth_cases, truth_model

EXACT_BYTES = MIB // 100
"""The engine prints sizes with this resolution; nothing may differ by more."""


class Difference(Struct, frozen=True):
    """One number of one device in one case: what the engine counted and what we say, in bytes."""

    model: str
    case: str
    device: str
    part: str
    measured_bytes: int
    found_bytes: int

    @property
    def excess_bytes(self) -> int:
        return self.found_bytes - self.measured_bytes

    def __str__(self) -> str:
        return (
            f"{self.model:24} {self.case:48} {self.device:4} {self.part:8} "
            f"engine {self.measured_bytes:>15,}  ours {self.found_bytes:>15,}  {self.excess_bytes:+,}"
        )


class Tally(Struct):
    """How many numbers were compared and which differ; `unknown`: cases left to the probe, with why."""

    n_cases: int = 0
    n_numbers: int = 0
    unknown: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)

    def add(self, number: Difference) -> None:
        """Count a number, and keep it where it is off."""
        self.n_numbers += 1
        if number.excess_bytes:
            self.differences.append(number)


def exact_buffers(
    memory: DeviceMemory, measured: Measured, *, maps_file: bool, tells_mapped: bool
) -> dict[str, tuple[int, int]]:
    """Return what has to agree exactly on one device, as pairs of measured and found bytes."""
    parts = {
        "weights": (measured.weights_bytes, memory.weights_bytes + memory.mapped_bytes),
        "state": (measured.state_bytes, memory.kv_cache_bytes + memory.recurrent_bytes),
    }
    if tells_mapped:
        mapped_bytes = measured.weights_bytes - measured.repacked_bytes if maps_file else 0
        parts["mapped"] = (mapped_bytes, memory.mapped_bytes)
    return parts


def compare_model(name: str, cases: Iterable[TruthCase]) -> Tally:
    """Compare weights and state in those of the recorded `cases` of one model that the engine did not refuse."""
    tally = Tally()
    memory = ModelMemory(truth_model(name))
    for case in cases:
        if case.refused is None:
            _compare_case(name, memory, case, tally)
    return tally


def _compare_case(name: str, memory: ModelMemory, case: TruthCase, tally: Tally) -> None:
    found = memory.estimate(case.layout, case.context, case.rig, with_compute=False)
    tally.n_cases += 1
    if "state" in found.unknown:
        tally.unknown.append(f"{case.name}: {found.probe_only}")
        return
    if case.largest is not None:
        members = [memory for device_id, memory in found.devices.items() if device_id != CPU_ID]
        weights_bytes = max(memory.weights_bytes for memory in members)
        state_bytes = max(memory.kv_cache_bytes + memory.recurrent_bytes for memory in members)
        tally.add(Difference(name, case.name, "most", "weights", case.largest.weights_bytes, weights_bytes))
        tally.add(Difference(name, case.name, "most", "state", case.largest.state_bytes, state_bytes))
    for device_id in case.rig.ids if case.compares_devices else (CPU_ID,):
        measured = case.measured.get(device_id, Measured(0, 0, 0))
        # A dry run maps nothing, whatever a load would leave in the file.
        tells_mapped = device_id == CPU_ID and case.is_real
        parts = exact_buffers(found.devices[device_id], measured, maps_file=case.maps_file, tells_mapped=tells_mapped)
        for part, (expected, actual) in parts.items():
            tally.add(Difference(name, case.name, device_id, part, expected, actual))


def main(names: Iterable[str]) -> int:
    """Print a line per difference and a total; return 1 if anything differs."""
    tallies = [compare_model(name, truth_cases(name)) for name in names]
    for tally in tallies:
        for line in (*tally.unknown, *tally.differences):
            print(line)
    print(
        f"{sum(tally.n_cases for tally in tallies)} cases, {sum(tally.n_numbers for tally in tallies)} numbers, "
        f"{sum(len(tally.differences) for tally in tallies)} differ, "
        f"{sum(len(tally.unknown) for tally in tallies)} cases left to the probe"
    )
    return 1 if any(tally.differences or tally.unknown for tally in tallies) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or MODEL_NAMES))
