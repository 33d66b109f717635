"""Decides every setting that the user left on auto, by trying values until the memory forecast fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from engine.devices.device import CPU_ID, Rig
from engine.planning.layout.layout import Layout
from engine.planning.memory.estimate import MemoryEstimate
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.memory.placement import place
from engine.planning.memory.side_files import NO_SIDE_FILES, SideFiles, side_file_bytes, with_side_files
from engine.planning.plan.decisions.attention import decide_cache_types, decide_flash_attention, usable_flash_attention
from engine.planning.plan.decisions.context_length import context_lengths, decide_context
from engine.planning.plan.decisions.decision import Decision
from engine.planning.plan.decisions.load_mode import ModeChoice, decide_load_mode, load_modes
from engine.planning.plan.decisions.op_offload import decide_op_offload, offload_choices
from engine.planning.plan.decisions.pipeline import decide_pipeline, pipeline_choices
from engine.planning.plan.decisions.side_files import decide_side_files, projector_device
from engine.planning.plan.decisions.threads import HostFacts, decide_threads, own_host, thread_counts
from engine.planning.plan.report import device_needs, shortfalls, usable_bytes
from engine.planning.settings.context_settings import ContextSettings


@dataclass(frozen=True, slots=True)
class Resolved:
    """The settings of a load with a value for everything, the reasons, and the memory forecast.

    `context`: settings of the load; only flash attention may still be "auto", because llama.cpp checks the devices
    itself.
    `decisions`: settings with their reasons for the user.
    `estimate`: memory with side files (projector and LoRA adapters).
    `model_estimate`: memory of the model alone.
    `projector_device`: device id of the projector; the CPU if there is no projector.
    """

    context: ContextSettings
    decisions: tuple[Decision, ...]
    estimate: MemoryEstimate
    model_estimate: MemoryEstimate
    projector_device: str = CPU_ID


@dataclass(frozen=True, slots=True)
class _Tried:
    """One combination of settings with its memory forecast.

    `mode`: load mode with its reason.
    `estimate`: memory with side files; `model_estimate`: memory without them.
    `projector_device`: device id of the projector.
    `short`: ids of the devices without enough memory.
    """

    context: ContextSettings
    mode: ModeChoice
    estimate: MemoryEstimate
    model_estimate: MemoryEstimate
    projector_device: str
    short: frozenset[str]


def resolve(
    memory: ModelMemory,
    rig: Rig,
    layout: Layout,
    asked: ContextSettings,
    side_files: SideFiles = NO_SIDE_FILES,
    host: HostFacts | None = None,
) -> Resolved:
    """Return the settings of a load, with a value for each setting that is on auto in `asked`.

    A setting that the user chose never changes. Combinations of the others are tried from the most wanted one on. The
    first one whose forecast fits is used; if none fits, the last one.

    `host`: platform and processor of the machine that loads; None for this machine.
    """
    facts = host or own_host()
    tried = _first_fitting(_Trials(memory, rig, layout, asked, side_files, facts))
    used = tried.context
    decisions = (
        *decide_context(memory.model, rig, asked, used, fits=not tried.short),
        *decide_cache_types(memory.model, used),
        decide_flash_attention(memory, rig, layout, used, asked.flash_attn),
        decide_load_mode(asked.load_mode, tried.mode),
        *decide_threads(asked, facts),
        *decide_op_offload(rig, layout, asked.op_offload, used),
        decide_pipeline(layout, asked, used, tried.estimate),
        *decide_side_files(side_files, rig, tried.projector_device),
    )
    return Resolved(used, decisions, tried.estimate, tried.model_estimate, tried.projector_device)


def estimate_beside(
    memory: ModelMemory,
    rig: Rig,
    layout: Layout,
    context: ContextSettings,
    side_files: SideFiles,
    alone: MemoryEstimate,
) -> tuple[MemoryEstimate, str]:
    """Return the memory estimate with side files (projector, LoRA adapters), and the device id of the projector.

    `alone`: estimate without side files; returned unchanged if there are none, or if the layout is for another model.
    """
    # A layout of another model has no estimate that anything could be added to.
    if not side_files or layout.n_layers != memory.model.n_layers:
        return alone, CPU_ID
    device_id = projector_device(side_files.projector, rig, device_needs(alone, rig))
    placement = place(layout, rig, context)
    return with_side_files(alone, side_file_bytes(side_files, placement, rig, device_id), placement), device_id


def _first_fitting(trials: _Trials) -> _Tried:
    tried = None
    for tried in trials.each():
        if not tried.short:
            break
    assert tried is not None  # There is at least one length and one mode.
    return tried


@dataclass(frozen=True, slots=True)
class _Trials:
    """Generator of combinations of settings with their forecasts, from the most wanted one to the last resort."""

    memory: ModelMemory
    rig: Rig
    layout: Layout
    asked: ContextSettings
    side_files: SideFiles
    host: HostFacts

    def each(self) -> Iterator[_Tried]:
        """Yield combinations of settings with their forecasts.

        A value is skipped if it cannot save memory on the devices that are short: the load mode affects the host only,
        op offload affects the other devices only.
        """
        # The innermost choice gives way first: the load mode, then op offload, the pipeline, last the context length.
        model = self.memory.model
        modes = load_modes(
            model, self.rig, self.layout, self.asked.load_mode, self.host, has_adapters=bool(self.side_files.adapters)
        )
        threads, threads_batch = thread_counts(self.asked, self.host)
        flash_attention = usable_flash_attention(self.rig, self.layout, self.asked, self.memory.model)
        for n_ctx in context_lengths(model, self.rig, self.asked):
            sized = msgspec.structs.replace(
                self.asked, n_ctx=n_ctx, threads=threads, threads_batch=threads_batch, flash_attn=flash_attention
            )
            for pipeline in pipeline_choices(self.layout, sized):
                yield from self._each_lending(msgspec.structs.replace(sized, pipeline=pipeline), modes)

    def _each_lending(self, context: ContextSettings, modes: Sequence[ModeChoice]) -> Iterator[_Tried]:
        for offload in offload_choices(self.rig, self.layout, self.asked):
            for mode in modes:
                used = msgspec.structs.replace(context, op_offload=offload, load_mode=mode.mode)
                tried = self._try(used, mode)
                if CPU_ID not in tried.short:
                    break  # Another load mode changes only the host's memory.
            yield tried
            if not tried.short - {CPU_ID}:
                break  # Op offload takes memory of devices only; turning it off does not help the host.

    def _try(self, context: ContextSettings, mode: ModeChoice) -> _Tried:
        alone = self.memory.estimate(self.layout, context, self.rig)
        estimate, device_id = estimate_beside(self.memory, self.rig, self.layout, context, self.side_files, alone)
        short = frozenset(shortfalls(device_needs(estimate, self.rig), usable_bytes(self.rig)))
        return _Tried(context, mode, estimate, alone, device_id, short)
