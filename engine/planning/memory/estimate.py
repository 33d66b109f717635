"""What a layout takes on each device, in bytes, and how we know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from engine.base.language import tr

Part = Literal["weights", "state", "compute"]
"""Parts of an estimate: state is KV cache and recurrent state, compute the scheduler's buffers."""


class Grade(StrEnum):
    """Where a number comes from: arithmetic, a no-alloc load, or a real load."""

    ESTIMATED = "estimated"
    PROBED = "probed"
    MEASURED = "measured"


_GRADE_WORDS = {
    Grade.ESTIMATED: tr("estimated"),
    Grade.PROBED: tr("probed"),
    Grade.MEASURED: tr("measured"),
}


def grade_words(grade: Grade) -> str:
    """Return where numbers of `grade` come from, for people."""
    return _GRADE_WORDS[grade]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes on one device. `mapped_bytes` (host only) is reclaimable page cache and no part of the need.

    `pipeline_bytes` is the part of `compute_bytes` that further copies for a pipeline take.
    """

    weights_bytes: int = 0
    mapped_bytes: int = 0
    kv_cache_bytes: int = 0
    recurrent_bytes: int = 0
    compute_bytes: int = 0
    output_bytes: int = 0
    overhead_bytes: int = 0
    pipeline_bytes: int = 0

    @property
    def need_bytes(self) -> int:
        return (
            self.weights_bytes
            + self.kv_cache_bytes
            + self.recurrent_bytes
            + self.compute_bytes
            + self.output_bytes
            + self.overhead_bytes
        )


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Memory of one layout by device id, one entry per device of the rig.

    `probe_only` is the reason why arithmetic cannot tell everything (an unknown architecture); `unknown` names the
    parts that are missing from `devices` then, where they are 0.
    """

    devices: Mapping[str, DeviceMemory]
    grade: Grade
    probe_only: str | None = None
    unknown: tuple[Part, ...] = ()
