"""Choice of a value for every setting that the user left on auto, by trying values until the memory forecast fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct

from engine.base.language import tr
from engine.base.values import replace
from engine.devices.device import CPU_ID, Rig
from engine.planning.layout.layout import Layout
from engine.planning.memory.drafts import drafted_tokens, uses_mtp, with_draft_memory
from engine.planning.memory.estimate import MemoryEstimate
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.memory.placement import place
from engine.planning.memory.side_files import NO_SIDE_FILES, SideFiles, side_file_bytes, with_side_files
from engine.planning.plan.decisions.attention import decide_cache_types, decide_flash_attention, usable_flash_attention
from engine.planning.plan.decisions.context_length import context_lengths, decide_context
from engine.planning.plan.decisions.decision import Decision, gain_text, load_key, measured_choice
from engine.planning.plan.decisions.drafts import PlacedDraft, decide_draft, place_draft
from engine.planning.plan.decisions.load_mode import ModeChoice, decide_load_mode, load_modes
from engine.planning.plan.decisions.op_offload import decide_op_offload, offload_choices
from engine.planning.plan.decisions.pipeline import decide_pipeline, pipeline_choices
from engine.planning.plan.decisions.side_files import decide_side_files, projector_device
from engine.planning.plan.decisions.threads import HostFacts, decide_threads, own_host, thread_counts
from engine.planning.plan.report import device_needs, shortfalls, usable_bytes
from engine.planning.settings.context_settings import ContextSettings


class Resolved(Struct, frozen=True):
    """The settings of a load with decided values in place of "auto", the reasons for them, and the memory forecast.

    `context`: settings of the load; only flash attention may still be "auto", because llama.cpp checks the devices
    itself.
    `decisions`: settings with their reasons for the user.
    `estimate`: memory with side files (projector, LoRA adapters and draft model).
    `model_estimate`: memory of the model alone.
    `projector_device`: device id of the projector; the CPU if there is no projector.
    `draft`: the draft model on its devices; None if there is none.
    """

    context: ContextSettings
    decisions: tuple[Decision, ...]
    estimate: MemoryEstimate
    model_estimate: MemoryEstimate
    projector_device: str = CPU_ID
    draft: PlacedDraft | None = None


class _Tried(Struct, frozen=True):
    """One combination of settings with its memory forecast.

    `mode`: load mode with its reason.
    `with_side_files`: the memory forecast, with and without side files, and the devices of the side files.
    `short`: ids of the devices without enough memory.
    """

    context: ContextSettings
    mode: ModeChoice
    with_side_files: SideFileEstimate
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

    A setting that the user chose never changes. Combinations of values for the other settings are tried, the preferred
    one first. The first combination whose forecast fits is used; if none fits, the last one.

    `host`: platform and processor of the computer that loads the model; None for this computer.
    """
    facts = (host or own_host()).measured_on(rig)
    threshold, key = None, load_key(memory.model, layout, rig) if rig.host.choices else ""
    if asked.op_offload_min_batch is None:
        threshold = measured_choice(rig, "op_offload_min_batch", key)
    # The value is equal to the base if the measurement found nothing faster.
    if threshold is not None and threshold.value != threshold.base:
        asked = replace(asked, op_offload_min_batch=threshold.value)
    tried = _first_fitting(_Trials(memory, rig, layout, asked, side_files, facts))
    used = tried.context
    decisions = (
        *_decide_sizes(memory, rig, asked, used, key, fits=not tried.short),
        *decide_cache_types(memory.model, used),
        decide_flash_attention(memory, rig, layout, used, asked.flash_attn),
        decide_load_mode(asked.load_mode, tried.mode),
        *decide_threads(asked, facts),
        *decide_op_offload(rig, layout, asked.op_offload, used, threshold),
        decide_pipeline(layout, asked, used, tried.with_side_files.estimate),
        *decide_side_files(side_files, rig, tried.with_side_files.projector_device),
        *decide_draft(side_files.draft, tried.with_side_files.draft, layout, tried.with_side_files.estimate),
    )
    found = tried.with_side_files
    return Resolved(used, decisions, found.estimate, found.alone, found.projector_device, found.draft)


def _decide_sizes(
    memory: ModelMemory, rig: Rig, asked: ContextSettings, used: ContextSettings, key: str, *, fits: bool
) -> Iterator[Decision]:
    """Yield the decisions on context length and batch sizes.

    If measurements found the value of `n_ubatch` to be the fastest, the decision's reason states the measured gain.

    `asked`: settings as the user left them. `used`: settings for the load.
    `key`: key of the model on its devices (`load_key`), under which measurements are stored.
    `fits`: whether a load with `used` is forecast to fit into the memory of all devices.
    """
    choice = measured_choice(rig, "n_ubatch", key)
    is_measured = choice is not None and choice.value == used.n_ubatch
    for each in decide_context(memory.model, rig, asked, used, fits=fits):
        if each.setting != "n_ubatch" or not is_measured:
            yield each
    if choice is not None and is_measured:
        yield Decision(
            "n_ubatch", used.n_ubatch, tr("Chosen by measuring prompt speed: {gain}.", gain=gain_text(choice))
        )


class SideFileEstimate(Struct, frozen=True):
    """Memory of a layout with and without side files (projector, LoRA adapters, draft).

    `estimate`: memory of the layout with side files.
    `alone`: memory of the layout without side files.
    `projector_device`: device id of the projector; the CPU if there is no projector.
    `draft`: the draft model on its devices; None if there is none.
    """

    estimate: MemoryEstimate
    alone: MemoryEstimate
    projector_device: str = CPU_ID
    draft: PlacedDraft | None = None


def estimate_with_side_files(
    memory: ModelMemory, rig: Rig, layout: Layout, context: ContextSettings, side_files: SideFiles
) -> SideFileEstimate:
    """Return the memory estimates of a layout with and without side files (projector, LoRA adapters, draft).

    Side files are left out if the number of layers in `layout` is not that of the model.
    """
    alone = memory.estimate(layout, context, rig)
    # A layout of another model has no estimate that anything could be added to.
    if not side_files or layout.n_layers != memory.model.n_layers:
        return SideFileEstimate(alone, alone)
    n_drafted, estimate = drafted_tokens(side_files.draft), alone
    if n_drafted:
        estimate = memory.estimate(layout, context, rig, n_drafted=n_drafted, mtp=uses_mtp(side_files.draft))
    device_id = projector_device(side_files.projector, rig, device_needs(estimate, rig))
    placement = place(layout, rig, context)
    estimate = with_side_files(estimate, side_file_bytes(side_files, placement, rig, device_id), placement)
    draft = place_draft(side_files.draft, memory, rig, context, device_needs(estimate, rig))
    heads = memory.mtp_estimate(layout, context, rig) if uses_mtp(side_files.draft) else None
    if draft is not None:
        estimate = with_draft_memory(estimate, draft.estimate)
    elif heads is not None:
        estimate = with_draft_memory(estimate, heads, tr("the MTP heads"))
    return SideFileEstimate(estimate, alone, device_id, draft)


def _first_fitting(trials: _Trials) -> _Tried:
    tried = None
    for tried in trials.each():
        if not tried.short:
            break
    assert tried is not None  # There is at least one length and one mode.
    return tried


class _Trials(Struct, frozen=True):
    """Generator of combinations of settings with their memory forecasts, the preferred combination first."""

    memory: ModelMemory
    rig: Rig
    layout: Layout
    asked: ContextSettings
    side_files: SideFiles
    host: HostFacts

    def each(self) -> Iterator[_Tried]:
        """Yield combinations of settings with their forecasts.

        A value that cannot help is skipped: another load mode is tried only if the host lacks memory, and op offload
        is turned off only if another device lacks memory.
        """
        # The innermost choice gives way first: the load mode, then op offload, the pipeline, last the context length.
        model = self.memory.model
        modes = load_modes(
            model, self.rig, self.layout, self.asked.load_mode, self.host, has_adapters=bool(self.side_files.adapters)
        )
        threads, threads_batch = thread_counts(self.asked, self.host)
        flash_attention = usable_flash_attention(self.rig, self.layout, self.asked, self.memory.model)
        for n_ctx in context_lengths(model, self.rig, self.asked):
            sized = replace(
                self.asked, n_ctx=n_ctx, threads=threads, threads_batch=threads_batch, flash_attn=flash_attention
            )
            for pipeline in pipeline_choices(self.layout, sized):
                yield from self._each_lending(replace(sized, pipeline=pipeline), modes)

    def _each_lending(self, context: ContextSettings, modes: Sequence[ModeChoice]) -> Iterator[_Tried]:
        for offload in offload_choices(self.rig, self.layout, self.asked):
            for mode in modes:
                used = replace(context, op_offload=offload, load_mode=mode.mode)
                tried = self._try(used, mode)
                if CPU_ID not in tried.short:
                    break  # Another load mode changes only the host's memory.
            yield tried
            if not tried.short - {CPU_ID}:
                break  # Op offload takes memory of devices only; turning it off does not help the host.

    def _try(self, context: ContextSettings, mode: ModeChoice) -> _Tried:
        found = estimate_with_side_files(self.memory, self.rig, self.layout, context, self.side_files)
        short = frozenset(shortfalls(device_needs(found.estimate, self.rig), usable_bytes(self.rig), self.rig.pool))
        return _Tried(context, mode, found, short)
