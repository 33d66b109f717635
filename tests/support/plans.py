"""Plans, forecasts and estimates of one layout, each with tables of its own."""

from __future__ import annotations

from engine.devices.device import Rig
from engine.model.gguf.model_file import ModelFile
from engine.planning.layout.layout import Layout
from engine.planning.memory.estimate import MemoryEstimate
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.memory.side_files import NO_SIDE_FILES, SideFiles
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.plan.report import FitReport
from engine.planning.settings.context_settings import ContextSettings


def make_plan(model: ModelFile, rig: Rig, edit: Edit) -> Plan:
    return Plan(ModelMemory(model), rig, edit)


def make_report(
    model: ModelFile | ModelMemory,
    rig: Rig,
    layout: Layout,
    context: ContextSettings,
    side_files: SideFiles = NO_SIDE_FILES,
) -> FitReport:
    memory = model if isinstance(model, ModelMemory) else ModelMemory(model)
    return Plan(memory, rig, Edit(layout, context, side_files)).report


def estimate(model: ModelFile, layout: Layout, context: ContextSettings, rig: Rig) -> MemoryEstimate:
    return ModelMemory(model).estimate(layout, context, rig)
