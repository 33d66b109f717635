"""What the library's child is told and what it answers: frames of msgpack, each behind its length.

The first frame is the order. Answers come in lists of pairs, the number of a model in the order and what was found;
an empty list is the last one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from struct import Struct
from typing import IO, Any

import msgspec

from engine.devices.device import Rig
from engine.fit.strategies.constraints import Constraints
from engine.settings.context_settings import KvType
from engine.speed.speeds import Speeds

MAX_ORDER_BYTES = 256 * 1024 * 1024
MAX_ANSWER_BYTES = 16 * 1024 * 1024
"""Of one frame; an answer has some kilobytes."""
_LENGTH = Struct("<I")


class ReadHeaders(msgspec.Struct, frozen=True, tag=True):
    """Read the headers of models, each with all of its parts. Paths are bytes: a name need not be text."""

    models: tuple[tuple[bytes, ...], ...]


class PlanModels(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Forecast models, each by the path of its first part. `order` to `speeds` are those of `Constraints`."""

    models: tuple[bytes, ...]
    rig: Rig
    strategy: str
    order: tuple[str, ...]
    off: frozenset[str]
    split: bool
    kv_types: tuple[KvType, ...]
    speeds: Speeds

    @property
    def constraints(self) -> Constraints:
        return Constraints(order=self.order, off=self.off, split=self.split, kv_types=self.kv_types, speeds=self.speeds)


Order = ReadHeaders | PlanModels


def read_order(models: Iterable[Iterable[Path]]) -> ReadHeaders:
    """Return the order to read the headers of `models`."""
    return ReadHeaders(tuple(tuple(map(os.fsencode, paths)) for paths in models))


def plan_order(models: Iterable[Path], rig: Rig, strategy: str, constraints: Constraints) -> PlanModels:
    """Return the order to forecast `models`."""
    return PlanModels(
        models=tuple(map(os.fsencode, models)),
        rig=rig,
        strategy=strategy,
        order=constraints.order,
        off=constraints.off,
        split=constraints.split,
        kv_types=constraints.kv_types,
        speeds=constraints.speeds,
    )


def path_of(encoded: bytes) -> Path:
    """Return a path of an order."""
    return Path(os.fsdecode(encoded))


def write_frame(stream: IO[bytes], value: Any) -> None:
    """Write one frame and send it off."""
    data = msgspec.msgpack.encode(value)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def read_frame(stream: IO[bytes], max_bytes: int) -> bytes | None:
    """Return what the next frame holds; None at the end, in the middle of one and where one is too long."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data = stream.read(length) if length <= max_bytes else b""
    return data if len(data) == length else None
