"""A layout: which device holds which layers. A value; every operation returns a new one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SplitMode = Literal["layer", "none", "tensor", "row"]
SPLIT_MODES: tuple[SplitMode, ...] = ("layer", "none", "tensor", "row")
OverridePart = Literal["experts", "ffn", "attention", "all"]


@dataclass(frozen=True, slots=True)
class Run:
    """Layers `first` to `last`, both included, on one device."""

    device: str
    first: int
    last: int

    @property
    def length(self) -> int:
        return self.last - self.first + 1


@dataclass(frozen=True, slots=True)
class Override:
    """Weights that live elsewhere than their layer: a `part` of layers, or a regex on tensor names. KV stays."""

    device: str
    part: OverridePart | None = None
    first: int | None = None
    last: int | None = None
    pattern: str | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """`runs` cover layers 0..n_layers-1 in order, neighbours on different devices; `output_device` holds the output layer.

    `tensor_split` (device id, share) is for modes tensor and row only.
    """

    n_layers: int
    runs: tuple[Run, ...]
    output_device: str
    split_mode: SplitMode = "layer"
    tensor_split: tuple[tuple[str, float], ...] = ()
    main_device: str | None = None
    overrides: tuple[Override, ...] = ()
