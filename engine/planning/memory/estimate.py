"""The memory that a layout needs on each device, in bytes, and how each number is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from engine.base.language import tr

Part = Literal["weights", "state", "compute"]
"""Part of an estimate: `state` is KV cache and recurrent state, `compute` the compute buffers."""


class Grade(StrEnum):
    """How a number is known: by arithmetic, by a load without allocation (`no_alloc`), or by a real load."""

    ESTIMATED = "estimated"
    PROBED = "probed"
    MEASURED = "measured"


_GRADE_WORDS = {
    Grade.ESTIMATED: tr("estimated"),
    Grade.PROBED: tr("probed"),
    Grade.MEASURED: tr("measured"),
}


def grade_words(grade: Grade) -> str:
    """Return the word for a grade, for people."""
    return _GRADE_WORDS[grade]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes on one device.

    `weights_bytes`: weights in buffers. `mapped_bytes` (host only): weights in the mapped file. They are page cache,
        which the system can reclaim, so they are not part of the need.
    `compute_bytes`: compute buffer. `pipeline_bytes`: part of it for the extra copies of a pipeline. `projector_bytes`:
        part of it in which the projector computes the largest image; 0 if that is not known.
    `output_bytes`: buffer for logits and embeddings. `overhead_bytes`: what the process takes before its first buffer.
    `answering_bytes`: what the backend takes besides while it answers, with a full context; 0 if that is not known.
        `late_bytes`: part of it that comes after the load, as the context fills.
    """

    weights_bytes: int = 0
    mapped_bytes: int = 0
    kv_cache_bytes: int = 0
    recurrent_bytes: int = 0
    compute_bytes: int = 0
    output_bytes: int = 0
    overhead_bytes: int = 0
    pipeline_bytes: int = 0
    answering_bytes: int = 0
    late_bytes: int = 0
    projector_bytes: int = 0

    @property
    def need_bytes(self) -> int:
        """Return the bytes that must be free on the device."""
        return (
            self.weights_bytes
            + self.kv_cache_bytes
            + self.recurrent_bytes
            + self.compute_bytes
            + self.output_bytes
            + self.overhead_bytes
            + self.answering_bytes
        )


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Memory of one layout, with an entry for each device of the rig.

    `probe_only`: why arithmetic cannot compute everything; None if it can.
    `unknown`: parts that are missing in `devices`, where they are 0.
    """

    devices: Mapping[str, DeviceMemory]
    grade: Grade
    probe_only: str | None = None
    unknown: tuple[Part, ...] = ()
