"""The memory that a layout needs on each device, in bytes, and the source of each number."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

from msgspec import Struct

from engine.base.language import tr

MemoryKind = Literal["weights", "state", "compute"]
"""Part of an estimate. `state`: KV cache and recurrent state. `compute`: compute buffers."""


class Grade(StrEnum):
    """Source of a number: arithmetic, a load without allocation (`no_alloc`), or a real load."""

    ESTIMATED = "estimated"
    PROBED = "probed"
    MEASURED = "measured"


_GRADE_TEXTS = {
    Grade.ESTIMATED: tr("estimated"),
    Grade.PROBED: tr("probed"),
    Grade.MEASURED: tr("measured"),
}


def grade_text(grade: Grade) -> str:
    """Return the word for the source of a number, such as "estimated", in the user's language."""
    return _GRADE_TEXTS[grade]


class DeviceMemory(Struct, frozen=True):
    """Memory of a layout on one device, in bytes.

    `weights_bytes`: weights in buffers.
    `mapped_bytes`: weights in the memory-mapped file, on the host only; not in `need_bytes`, because the system can
    reclaim their pages.
    `compute_bytes`: compute buffer.
    `output_bytes`: buffer for logits and embeddings.
    `overhead_bytes`: memory that the process allocates before its first buffer.
    `pipeline_bytes`: part of `compute_bytes` for the additional copies of inputs in pipeline parallelism.
    `answering_bytes`: memory that the backend allocates during generation, with a full context; 0 if unknown.
    `late_bytes`: part of `answering_bytes` that is allocated after the load, while the context fills.
    `projector_bytes`: part of `compute_bytes` in which the projector computes the largest image; 0 if unknown.
    `draft_bytes`: weights, state and buffers of a draft model, which are not in the other fields.
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
    draft_bytes: int = 0

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
            + self.draft_bytes
        )


class MemoryEstimate(Struct, frozen=True):
    """Memory of one layout on each device of the rig.

    `devices`: memory by device id.
    `grade`: source of the numbers.
    `probe_only`: sentence on why not everything could be computed; None if it could.
    `unknown`: parts that could not be computed; they are 0 in `devices`.
    """

    devices: Mapping[str, DeviceMemory]
    grade: Grade
    probe_only: str | None = None
    unknown: tuple[MemoryKind, ...] = ()
