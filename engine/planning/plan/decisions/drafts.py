"""Chooses devices and settings for the draft (speculative decoding) of a plan, and finds the rules that it breaks.

If the user chose no device for a draft model, `place_draft` chooses the first card with enough memory left beside the
main model, or else the CPU. Cards with their own memory are tried first, those with more bandwidth before others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import inf

from msgspec import Struct

from engine.base.language import tr
from engine.base.units import format_bytes
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Rig
from engine.model.gguf.model_file import ModelFile
from engine.planning.layout.layout import Layout, Violation, single_device
from engine.planning.layout.rules import lent_gap, lent_too_large, violations, weight_fault
from engine.planning.memory.drafts import Draft, draft_context, drafts_for
from engine.planning.memory.estimate import DeviceMemory, MemoryEstimate
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.memory.mtp import mtp_error
from engine.planning.plan.decisions.attention import usable_flash_attention
from engine.planning.plan.decisions.decision import Decision
from engine.planning.plan.report import with_measured_overhead
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.speed.speeds import bandwidth


class PlacedDraft(Struct, frozen=True):
    """A draft model with a device for each of its layers.

    `context`: settings of the draft model's context, with decided values in place of "auto".
    `estimate`: memory of the draft model alone.
    """

    layout: Layout
    context: ContextSettings
    estimate: MemoryEstimate

    @property
    def devices(self) -> tuple[str, ...]:
        """Ids of the draft model's devices, in the order of its layers."""
        return self.layout.devices


def place_draft(
    draft: Draft | None,
    memory: ModelMemory,
    rig: Rig,
    context: ContextSettings,
    needs: Mapping[str, DeviceMemory],
) -> PlacedDraft | None:
    """Choose the devices and the settings of the draft model; return None if there is no draft model.

    `memory`: the main model, with tables for its memory estimates.
    `context`: settings of the main model, with decided values in place of "auto".
    `needs`: memory of the main model and its other side files, by device id.
    """
    if draft is None or draft.model is None:
        return None
    model, tables = draft.model, memory.of_draft(draft.model)
    settings = draft_context(draft, context)

    def placed(layout: Layout) -> PlacedDraft:
        used = replace(settings, flash_attn=usable_flash_attention(rig, layout, settings, model))
        return PlacedDraft(layout, used, tables.estimate(layout, used, rig))

    if draft.layout is not None:
        return placed(draft.layout)
    for device in draft_candidates(rig, model):
        found = placed(single_device(model.n_layers, device.id))
        # The host is the last candidate. It is used even if it is too small; the report then shows the shortage.
        if device.is_host or _room_bytes(device, needs) >= _added_bytes(device, found.estimate, needs):
            return found
    return placed(single_device(model.n_layers, CPU_ID))


def decide_draft(
    draft: Draft | None, placed: PlacedDraft | None, layout: Layout, estimate: MemoryEstimate
) -> Iterator[Decision]:
    """Yield the `Decision` for the draft: its device or "ngram", with the reason for the user.

    Nothing is yielded if there is no draft, or if the model has no MTP head that can draft.

    `layout`: layout of the main model. `estimate`: memory of the main model.
    """
    if draft is None:
        return
    if draft.kind == "mtp":
        draft_bytes = sum(each.draft_bytes for each in estimate.devices.values())
        if not draft_bytes:
            # The model has no MTP head that drafts: a violation says so.
            return
        size, device = format_bytes(draft_bytes), layout.device_of(layout.n_layers - 1)
        reason = tr(
            "The MTP head of the model proposes tokens. In addition to its weights the head takes {size} of memory.",
            size=size,
        )
        yield Decision("draft", device, reason, True)
        return
    if placed is None:
        reason = tr(
            "The draft (n-gram) copies text that occurred before, up to {count} tokens per step.", count=draft.n_tokens
        )
        yield Decision("draft", draft.kind, reason, True)
        return
    # Overhead and what is taken while answering are counted once for both models.
    sizes = (each.need_bytes - each.overhead_bytes - each.answering_bytes for each in placed.estimate.devices.values())
    size = format_bytes(sum(sizes))
    devices = ", ".join(placed.devices)
    if draft.layout is not None:
        reason = tr("You chose this device for the draft model, which takes {size} with its KV cache.", size=size)
    elif placed.devices == (CPU_ID,):
        reason = tr(
            "No graphics card has room for the draft model, which takes {size} with its KV cache, so the CPU runs it.",
            size=size,
        )
    else:
        reason = tr(
            "The first graphics card with room for the draft model runs it. "
            "The draft model takes {size} with its KV cache.",
            size=size,
        )
    yield Decision("draft", devices, reason, draft.layout is not None)


def draft_violations(
    draft: Draft | None,
    placed: PlacedDraft | None,
    model: ModelFile,
    rig: Rig,
    context: ContextSettings,
    layout: Layout,
) -> Iterator[Violation]:
    """Yield a violation for each rule that a draft breaks.

    Rules: `draft_target`, `draft_heads`, `draft_batch`, `draft_device`, `draft_split`. The draft model's layout is also
    checked by the rules for layouts.
    """
    if draft is None:
        return
    if not drafts_for(model):
        yield Violation(
            "draft_target",
            tr("{model} does not write text token by token, so nothing can be drafted for it.", model=model.name),
            tr("Load the model without the draft."),
        )
    if draft.kind == "mtp" and (fault := mtp_error(model)):
        yield Violation(
            "draft_heads",
            fault,
            tr("Choose a draft model or n-gram, or load without the draft."),
        )
    elif draft.kind == "mtp" and layout.split_mode != "layer":
        yield Violation(
            "draft_split",
            tr("MTP heads cannot draft in split mode {mode}.", mode=layout.split_mode),
            tr("Choose split mode layer, or load without the draft."),
        )
    if context.n_seq_max * (draft.n_tokens + 1) > context.n_batch:
        yield Violation(
            "draft_batch",
            tr(
                "{sequences} requests with {tokens} drafted tokens each do not fit into a batch of {batch} tokens.",
                sequences=context.n_seq_max,
                tokens=draft.n_tokens,
                batch=context.n_batch,
            ),
            tr("Draft fewer tokens, answer fewer requests at a time, or raise the batch size."),
        )
    if placed is None or draft.model is None:
        return
    missing = [device for device in placed.devices if rig.device(device) is None]
    if missing:
        yield Violation(
            "draft_device",
            tr(
                "The draft model is set to run on {device}, which is not available (devices: {names}).",
                device=missing[0],
                names=", ".join(rig.ids),
            ),
            tr("Choose another device for the draft, or auto."),
        )
        return
    if placed.layout.split_mode in ("tensor", "row"):
        yield Violation(
            "draft_split",
            tr("A draft model cannot be in split mode {mode}.", mode=placed.layout.split_mode),
            tr("Choose split mode layer for the draft, or load without the draft."),
        )
        return
    yield from _layout_violations(placed, draft.model, rig)


def _layout_violations(placed: PlacedDraft, model: ModelFile, rig: Rig) -> Iterator[Violation]:
    for each in violations(placed.layout, model, rig, placed.context):
        remedy = tr("{remedy} Or load without the draft.", remedy=each.remedy)
        yield Violation(each.rule, tr("The draft model: {message}", message=each.message), remedy)


def draft_candidates(rig: Rig, model: ModelFile) -> list[Device]:
    """Return the devices for an automatic choice of a draft model's device, the best one first, the CPU last.

    Cards with their own memory come before integrated ones, and faster ones before slower ones. RPC devices are used
    only if the user chose one.
    """
    local = [device for device in rig.devices if not device.is_rpc]
    cards = [device for kind in ("gpu", "igpu") for device in _by_speed(local) if device.kind == kind]
    return [*(each for each in cards if _can_hold(each, model)), rig.host]


def _can_hold(device: Device, model: ModelFile) -> bool:
    every_layer = range(len(model.blocks))
    return (
        weight_fault(device, model, with_output=True) is None
        and lent_gap(device, model, every_layer) is None
        and lent_too_large(device, model, every_layer, with_output=True) is None
    )


def _by_speed(devices: Iterable[Device]) -> list[Device]:
    """Return devices sorted by memory bandwidth, fastest first; the bandwidth is looked up by the device's name.

    Devices with equal bandwidth stay in their order.
    """
    return sorted(devices, key=lambda device: -bandwidth(device))


def reads_slower(draft: ModelFile, placed: Layout, model: ModelFile, layout: Layout, rig: Rig) -> bool:
    """Return whether a token of the draft model takes at least half as long as one of the main model.

    Both times are estimated from the bytes of the layers and the devices' memory bandwidths, because the speeds of the
    devices may not have been measured.

    `placed`: layout of the draft model. `layout`: layout of the main model.
    """
    return 2 * _reading_s(draft, placed, rig) > _reading_s(model, layout, rig)


def _reading_s(model: ModelFile, layout: Layout, rig: Rig) -> float:
    speeds = {device.id: bandwidth(device) for device in rig.all_devices}
    homes = zip(model.blocks, layout.assignment(), strict=True)
    return sum(block.total_bytes / speeds.get(home, inf) for block, home in homes)


def _added_bytes(device: Device, estimate: MemoryEstimate, needs: Mapping[str, DeviceMemory]) -> int:
    memory = with_measured_overhead(device, estimate.devices.get(device.id, DeviceMemory()))
    before = needs.get(device.id, DeviceMemory())
    return memory.need_bytes - (memory.overhead_bytes if before.need_bytes else 0)


def _room_bytes(device: Device, needs: Mapping[str, DeviceMemory]) -> int:
    return device.available_bytes - device.margin_bytes - needs.get(device.id, DeviceMemory()).need_bytes
