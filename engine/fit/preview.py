"""One object that every bar and warning of the window reads: the edited layout with its forecast."""

from __future__ import annotations

from dataclasses import dataclass

from engine.devices.device import Rig
from engine.fit.report import DeviceRow, FitReport
from engine.layout.context_settings import ContextSettings
from engine.layout.layout import Layout


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """What the editor draws of one layer: weights by part and the layer's KV cache (or recurrent state)."""

    index: int
    attention_bytes: int
    ffn_bytes: int
    expert_bytes: int
    other_bytes: int
    kv_bytes: int

    @property
    def weights_bytes(self) -> int:
        return self.attention_bytes + self.ffn_bytes + self.expert_bytes + self.other_bytes


@dataclass(frozen=True, slots=True)
class Preview:
    """A layout as edited, with its forecast on a rig."""

    model_name: str
    rig: Rig
    layout: Layout
    context: ContextSettings
    layers: tuple[LayerBytes, ...]
    token_embedding_bytes: int
    output_weights_bytes: int
    report: FitReport


@dataclass(frozen=True, slots=True)
class LoadedLayout:
    """What is loaded now: the layout and settings it was loaded with, measured rows and the forecast of that moment."""

    layout: Layout
    context: ContextSettings
    measured: tuple[DeviceRow, ...]
    forecast: tuple[DeviceRow, ...]
