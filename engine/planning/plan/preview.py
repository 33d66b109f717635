"""One object that every bar and warning of the window reads: a plan as it is drawn, and what is loaded beside it.

`make_preview` is the one call of a drag step: estimate, rules and fit, from tables made when the model was opened.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from engine.devices.device import Rig
from engine.model.gguf.model_file import ModelFile
from engine.planning.layout.layout import Layout
from engine.planning.memory.backends import HOST_RULE
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.memory.side_files import NO_SIDE_FILES, SideFiles
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.plan.report import DeviceRow, FitReport
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.speed.prediction import CostModel, SpeedForecast
from engine.planning.speed.speeds import NO_MEASUREMENTS, Sending, Speeds, sendings
from engine.planning.speed.work import Work


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
    """An edit as it is drawn, with its forecast on a rig.

    `speed` None: nobody can say how fast it would be. `answered_per_second`: tokens that its last answer had, if any.
    `sendings`: what a load sends to workers, where it is known how fast.
    """

    model_name: str
    rig: Rig
    edit: Edit
    layers: tuple[LayerBytes, ...]
    token_embedding_bytes: int
    output_weights_bytes: int
    report: FitReport
    speed: SpeedForecast | None = None
    answered_per_second: float | None = None
    sendings: tuple[Sending, ...] = ()

    @property
    def layout(self) -> Layout:
        return self.edit.layout

    @property
    def context(self) -> ContextSettings:
        return self.edit.context


@dataclass(frozen=True, slots=True)
class LoadedLayout:
    """What is loaded now: the edit it was loaded with, measured rows and the forecast of that moment.

    `edit` is what was asked for, `used` the settings that were decided; `flash_attention` is the engine's word on it.
    """

    edit: Edit
    measured: tuple[DeviceRow, ...]
    forecast: tuple[DeviceRow, ...]
    used: ContextSettings | None = None
    flash_attention: bool | None = None

    def differs_from(self, edit: Edit) -> bool:
        """Return whether `edit` is not what is loaded: another layout, other settings or other side files."""
        return self.edit != edit


class PreviewTables:
    """What previews of one model share. Make one per opened model and keep it."""

    def __init__(self, model: ModelFile | ModelMemory) -> None:
        self.memory = model if isinstance(model, ModelMemory) else ModelMemory(model)
        self._last: tuple[ContextSettings, tuple[LayerBytes, ...]] | None = None

    @cached_property
    def work(self) -> Work:
        """What a token reads of the model."""
        return Work(self.memory.model)

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
    """Return the report of one plan, for who has no other use for it."""
    memory = model if isinstance(model, ModelMemory) else ModelMemory(model)
    return Plan(memory, rig, Edit(layout, context, side_files)).report


def cost_model(work: Work, plan: Plan, speeds: Speeds) -> CostModel | None:
    """Return what the speed of `plan` follows from.

    None for a plan that cannot be loaded, and for a model whose memory is not known by arithmetic.
    """
    tables = None if plan.violations else plan.memory.for_context(plan.settings)
    return None if tables is None else CostModel(work, plan.rig, plan.settings, tables, speeds)


def plan_speed(work: Work, plan: Plan, speeds: Speeds, fill_tokens: int | None = None) -> SpeedForecast | None:
    """Return how long a token takes by `plan` with `fill_tokens` in the context, or as many as usual.

    None if nobody can say.
    """
    costs = cost_model(work, plan, speeds)
    return None if costs is None else costs.answer(plan.edit.layout, fill_tokens)


def plan_prompt(work: Work, plan: Plan, speeds: Speeds, n_tokens: int) -> SpeedForecast | None:
    """Return how fast a prompt of so many tokens is read by `plan`, None if nobody can say."""
    costs = cost_model(work, plan, speeds)
    return None if costs is None else costs.prompt(plan.edit.layout, n_tokens)


def plan_sendings(plan: Plan, speeds: Speeds) -> tuple[Sending, ...]:
    """Return what a load of `plan` sends to each worker, and how long that takes."""
    return sendings({row.id: row.weights_bytes for row in plan.report.rows}, plan.rig, speeds)


def make_preview(
    tables: PreviewTables, plan: Plan, speeds: Speeds = NO_MEASUREMENTS, answered_per_second: float | None = None
) -> Preview:
    """Return what is drawn of `plan`, a plan of the model that `tables` are of."""
    return Preview(
        model_name=plan.model.name,
        rig=plan.rig,
        edit=plan.edit,
        layers=tables.layers(plan.settings),
        token_embedding_bytes=plan.memory.weights.token_embedding_bytes,
        output_weights_bytes=plan.memory.weights.output_bytes(HOST_RULE),
        report=plan.report,
        speed=plan_speed(tables.work, plan, speeds),
        answered_per_second=answered_per_second,
        sendings=plan_sendings(plan, speeds),
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
