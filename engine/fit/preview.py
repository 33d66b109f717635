"""One object that every bar and warning of the window reads: the edited layout with its forecast.

`make_preview` is the one call of a drag step: estimate, rules and fit, from tables made when the model was opened.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.devices.device import Rig
from engine.fit.advice import advice
from engine.fit.check import check_fit
from engine.fit.decisions.resolve import resolve
from engine.fit.report import DeviceRow, FitReport
from engine.fit.side_file_rules import side_file_violations
from engine.gguf.model_file import ModelFile
from engine.layout.context_settings import ContextSettings
from engine.layout.layout import Layout
from engine.layout.rules import violations
from engine.memory.backends import HOST_RULE
from engine.memory.model_memory import ModelMemory
from engine.memory.side_files import NO_SIDE_FILES, SideFiles


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
    side_files: SideFiles = NO_SIDE_FILES


@dataclass(frozen=True, slots=True)
class LoadedLayout:
    """What is loaded now: the layout and settings it was loaded with, measured rows and the forecast of that moment.

    `context` is what was asked for, `used` what was decided; `flash_attention` is the engine's word on it.
    """

    layout: Layout
    context: ContextSettings
    measured: tuple[DeviceRow, ...]
    forecast: tuple[DeviceRow, ...]
    side_files: SideFiles = NO_SIDE_FILES
    used: ContextSettings | None = None
    flash_attention: bool | None = None


class PreviewTables:
    """What previews of one model share. Make one per opened model and keep it."""

    def __init__(self, model: ModelFile | ModelMemory) -> None:
        self.memory = model if isinstance(model, ModelMemory) else ModelMemory(model)
        self._last: tuple[ContextSettings, tuple[LayerBytes, ...]] | None = None

    def layers(self, context: ContextSettings) -> tuple[LayerBytes, ...]:
        """Return what is drawn of each layer; a drag asks for the same answer many times."""
        if self._last is None or self._last[0] != context:
            self._last = (context, _layers(self.memory, context))
        return self._last[1]


def make_report(
    model: ModelFile | ModelMemory,
    rig: Rig,
    layout: Layout,
    context: ContextSettings,
    side_files: SideFiles = NO_SIDE_FILES,
) -> FitReport:
    """Return the forecast of `layout` on `rig` with what was decided, the rules it breaks and what it costs."""
    memory = model if isinstance(model, ModelMemory) else ModelMemory(model)
    resolved = resolve(memory, rig, layout, context, side_files)
    broken = (
        *violations(layout, memory.model, rig, resolved.context),
        *side_file_violations(side_files, layout, rig),
    )
    report = check_fit(resolved.estimate, rig, broken)
    return replace(
        report,
        advice=advice(layout, memory.model, rig, resolved.context),
        decisions=resolved.decisions,
        context=resolved.context,
    )


def make_preview(
    tables: PreviewTables,
    rig: Rig,
    layout: Layout,
    context: ContextSettings,
    side_files: SideFiles = NO_SIDE_FILES,
) -> Preview:
    """Return `layout` with its forecast on `rig`."""
    memory = tables.memory
    report = make_report(memory, rig, layout, context, side_files)
    return Preview(
        model_name=memory.model.name,
        rig=rig,
        layout=layout,
        context=context,
        layers=tables.layers(report.context or context),
        token_embedding_bytes=memory.weights.token_embedding_bytes,
        output_weights_bytes=memory.weights.output_bytes(HOST_RULE),
        report=report,
        side_files=side_files,
    )


def _layers(memory: ModelMemory, context: ContextSettings) -> tuple[LayerBytes, ...]:
    tables = memory.for_context(context)
    blocks = memory.model.blocks
    kv_bytes = tables.layers_kv_bytes if tables is not None else (0,) * len(blocks)
    return tuple(
        LayerBytes(
            index=block.index,
            attention_bytes=block.attention_bytes,
            ffn_bytes=block.ffn_bytes,
            expert_bytes=block.expert_bytes,
            other_bytes=block.other_bytes,
            kv_bytes=layer_kv_bytes,
        )
        for block, layer_kv_bytes in zip(blocks, kv_bytes, strict=True)
    )
