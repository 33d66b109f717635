"""The preview: a plan with the numbers that the window draws, and the layout that is loaded.

All bars and warnings of the window read one `Preview`. A step of a drag makes one with `make_preview`, from tables that
were made when the model was opened.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from engine.devices.device import Rig
from engine.model.gguf.model_file import ModelFile
from engine.planning.layout.engine_parameters import leading_cpu_layers
from engine.planning.layout.layout import Layout
from engine.planning.layout.parts import EMBEDDING, ties_embedding
from engine.planning.memory.backends import HOST_RULE
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.memory.side_files import NO_SIDE_FILES, SideFiles
from engine.planning.plan.edit import Edit
from engine.planning.plan.placement_check import PlaceDifference
from engine.planning.plan.plan import Plan
from engine.planning.plan.report import DeviceRow, FitReport
from engine.planning.plan.slices import Slices, layer_slices
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.speed.hop_costs import HopCosts, hop_costs
from engine.planning.speed.prediction import CostModel, SpeedForecast
from engine.planning.speed.speeds import NO_MEASUREMENTS, Sending, Speeds, sendings
from engine.planning.speed.work import Work


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes of one layer as the editor draws them: weights by part, and KV cache or recurrent state."""

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

    `speed`: None if the edit does not fit, or if its speed cannot be predicted.
    `answered_per_second`: tokens per second of the last answer by this edit; None before the first one.
    `sendings`: the weights that a load sends to each worker; only for workers whose link was measured.
    `slices`: parts of layers on the members of modes tensor and row; None in other modes.
    `hops`: what a token's way between devices costs; None if it is unknown.
    `embedding_moves`: the token embedding can be placed; not if it is the output layer too.
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
    embedding_moves: bool = False
    slices: Slices | None = None
    hops: HopCosts | None = None

    @property
    def layout(self) -> Layout:
        return self.edit.layout

    @property
    def context(self) -> ContextSettings:
        return self.edit.context


@dataclass(frozen=True, slots=True)
class LoadedLayout:
    """A loaded layout.

    `edit`: the edit it was loaded with; `used`: the settings that were decided.
    `measured`: rows after the load; `forecast`: rows before it.
    `flash_attention`: whether the engine uses it; None if it did not report that.
    `elsewhere`: layers and caches that are on another device than the layout asks for.
    """

    edit: Edit
    measured: tuple[DeviceRow, ...]
    forecast: tuple[DeviceRow, ...]
    used: ContextSettings | None = None
    flash_attention: bool | None = None
    elsewhere: tuple[PlaceDifference, ...] = ()

    def differs_from(self, edit: Edit) -> bool:
        """Return whether `edit` has another layout, other settings or other side files than the loaded one."""
        return self.edit != edit


class PreviewTables:
    """Tables that all previews of one opened model share. One thread at a time."""

    def __init__(self, model: ModelFile | ModelMemory) -> None:
        self.memory = model if isinstance(model, ModelMemory) else ModelMemory(model)
        self._last: tuple[ContextSettings, tuple[LayerBytes, ...]] | None = None
        self._last_slices: tuple[tuple[object, ...], Slices | None] | None = None

    @cached_property
    def work(self) -> Work:
        """Bytes and operations of a token, layer by layer."""
        return Work(self.memory.model)

    @cached_property
    def embedding_moves(self) -> bool:
        """Whether the token embedding can be placed apart from the output layer."""
        model = self.memory.model
        return any(each.name == EMBEDDING for each in model.global_tensors) and not ties_embedding(model)

    def slices(self, plan: Plan) -> Slices | None:
        """Return the slices of a layout of mode tensor or row. The last result is cached for its shares."""
        layout = plan.edit.layout
        if layout.split_mode not in ("tensor", "row"):
            return None
        key = (layout.split_mode, layout.tensor_split, leading_cpu_layers(layout))
        if self._last_slices is None or self._last_slices[0] != key:
            tables = self.memory.for_context(plan.settings)
            found = layer_slices(layout, self.memory.model, None if tables is None else tables.hyper)
            self._last_slices = (key, found)
        return self._last_slices[1]

    def layers(self, context: ContextSettings) -> tuple[LayerBytes, ...]:
        """Return the bytes of each layer. The last result is cached: a drag does not change the settings."""
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
    """Return the report of a plan that is not needed otherwise."""
    memory = model if isinstance(model, ModelMemory) else ModelMemory(model)
    return Plan(memory, rig, Edit(layout, context, side_files)).report


def cost_model(work: Work, plan: Plan, speeds: Speeds) -> CostModel | None:
    """Return the cost model for `plan`; None if it breaks a rule, or if the model's memory is known by probe only."""
    # A layout that cannot be loaded has no speed, and the cost model relies on valid runs and shares.
    tables = None if plan.violations else plan.memory.for_context(plan.settings)
    return None if tables is None else CostModel(work, plan.rig, plan.settings, tables, speeds)


def plan_speed(work: Work, plan: Plan, speeds: Speeds, fill_tokens: int | None = None) -> SpeedForecast | None:
    """Return the predicted time of a token with `fill_tokens` in the context; None: as many as usual.

    None is returned for a plan without a cost model.
    """
    costs = cost_model(work, plan, speeds)
    return None if costs is None else costs.answer(plan.edit.layout, fill_tokens)


def plan_prompt(work: Work, plan: Plan, speeds: Speeds, n_tokens: int) -> SpeedForecast | None:
    """Return the predicted speed of a prompt of `n_tokens`, None for a plan without a cost model."""
    costs = cost_model(work, plan, speeds)
    return None if costs is None else costs.prompt(plan.edit.layout, n_tokens)


def plan_sendings(plan: Plan, speeds: Speeds) -> tuple[Sending, ...]:
    """Return the bytes that a load of `plan` sends to each worker, and how long that takes."""
    return sendings({row.id: row.weights_bytes for row in plan.report.rows}, plan.rig, speeds)


def make_preview(
    tables: PreviewTables, plan: Plan, speeds: Speeds = NO_MEASUREMENTS, answered_per_second: float | None = None
) -> Preview:
    """Return the preview of `plan`. `tables` must be those of its model."""
    return Preview(
        model_name=plan.model.name,
        rig=plan.rig,
        edit=plan.edit,
        layers=tables.layers(plan.settings),
        token_embedding_bytes=plan.memory.weights.token_embedding_bytes,
        output_weights_bytes=plan.memory.weights.output_bytes(HOST_RULE),
        report=plan.report,
        # A layout that does not fit has no speed: "short 30 GiB" and "49 tokens/s" side by side help nobody.
        speed=plan_speed(tables.work, plan, speeds) if plan.report.fits else None,
        answered_per_second=answered_per_second,
        sendings=plan_sendings(plan, speeds),
        embedding_moves=tables.embedding_moves,
        slices=tables.slices(plan),
        hops=hop_costs(tables.work, plan.rig, speeds),
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
