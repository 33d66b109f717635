"""Advice: disadvantages of a layout that can be loaded, each with a sentence and a remedy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct

from engine.base.language import tr
from engine.base.units import format_bytes
from engine.devices.device import CPU_ID, Rig
from engine.model.architectures.registry import architecture_rules
from engine.model.gguf.model_file import ModelFile
from engine.planning.layout.engine_parameters import entries, split_members, used_devices
from engine.planning.layout.layout import Layout
from engine.planning.memory.backends import backend_traits
from engine.planning.memory.drafts import Draft
from engine.planning.memory.side_files import SideFiles
from engine.planning.settings.context_settings import ContextSettings


class Advice(Struct, frozen=True):
    """One disadvantage of a layout that can be loaded.

    `rule`: stable identifier such as `cpu_entry`.
    `message`: sentence for the user.
    `remedy`: sentence on what to change.
    """

    rule: str
    message: str
    remedy: str


def advice(layout: Layout, model: ModelFile, rig: Rig, context: ContextSettings) -> tuple[Advice, ...]:
    """Return the disadvantages of this layout, the most important one first; empty if the layout is not for this model.

    Rules: `worker_in_use`, `cpu_entry`, `output_on_cpu`, `shared_cache`, `override_leaves_cache`,
    `override_stops_pipeline`, `row_deprecated`, `split_one_member`, `split_runs`, `cache_on_host`,
    `context_above_training`, `full_sliding_window`, `extra_buffers_off`.
    """
    # A violation already says so, and what follows looks up layers of the model.
    if layout.n_layers != model.n_layers:
        return ()
    inside_layers = layout.split_mode in ("tensor", "row")
    return (
        *_workers_in_use(layout, rig),
        *(_inside_layers(layout) if inside_layers else _between_layers(layout, rig, context)),
        *(() if inside_layers else _shared_cache(layout, model)),
        *_overrides(layout, context),
        *_settings(layout, model, context),
        *_extra_buffers(layout, rig),
    )


def swap_advice(need_bytes: int, margin_bytes: int, free_bytes: int, swap_bytes: int | None) -> Iterator[Advice]:
    """Yield advice if a load needs more than the free host memory.

    The advice says that the load would use swap space, or that even the swap space is too small.

    Rules: `swap_used`, `beyond_swap`.

    `need_bytes`: host memory that the plan needs.
    `margin_bytes`: host memory that must stay free.
    `free_bytes`: free host memory.
    `swap_bytes`: free swap space; None if unknown.
    """
    short_bytes = need_bytes + margin_bytes - free_bytes
    if not need_bytes or short_bytes <= 0 or swap_bytes is None:
        return
    remedy = tr("Move layers to other devices, or choose a shorter context or a smaller model.")
    need, free, swap = (format_bytes(size) for size in (need_bytes, free_bytes, swap_bytes))
    if short_bytes > swap_bytes:
        yield Advice(
            "beyond_swap",
            tr(
                "The model needs {need} of this computer's memory. Only {available} are available: {free} of memory "
                "and {swap} of swap.",
                need=need,
                available=format_bytes(free_bytes + swap_bytes),
                free=free,
                swap=swap,
            ),
            remedy,
        )
        return
    yield Advice(
        "swap_used",
        tr(
            "{short} of the model would be in swap, so answers would be very slow. The model needs {need} of this "
            "computer's memory, but only {free} are free (free swap: {swap}).",
            short=format_bytes(short_bytes),
            swap=swap,
            need=need,
            free=free,
        ),
        remedy,
    )


def side_file_advice(side_files: SideFiles, layout: Layout, context: ContextSettings) -> Iterator[Advice]:
    """Yield disadvantages of LoRA adapters and image limits with this layout and settings.

    Rules: `row_adapter`, `image_limit_unused`.
    """
    if side_files.adapters and layout.split_mode == "row":
        # `llama_adapter_lora_init_impl` creates each matrix in the buffer type of the weight that it changes.
        yield Advice(
            "row_adapter",
            tr(
                "In split mode row the engine also splits the matrices of a LoRA adapter by rows. It is not known "
                "whether the results are then correct."
            ),
            tr("Choose split mode layer, or remove the adapter."),
        )
    projector = side_files.projector
    if (context.image_max_tokens or context.image_min_tokens) and not (projector and projector.sees):
        yield Advice(
            "image_limit_unused",
            tr("The limits for images have no effect: the model has no projector that reads images."),
            tr("Choose a projector, or set “Largest image” and “Smallest image” to auto."),
        )


_LARGE_DRAFT = 2
"""Divisor of the main model's size: a draft model above the quotient hardly saves time, so it gets advice."""


def draft_advice(draft: Draft | None, devices: Sequence[str], model: ModelFile, *, is_slow: bool) -> Iterator[Advice]:
    """Yield disadvantages of a draft model on these devices.

    `is_slow`: whether a token of the draft model takes at least half as long as a token of `model`.

    Rules: `draft_larger`, `draft_large`, `draft_on_cpu`.
    """
    if draft is None or draft.model is None:
        return
    name, main = (each.name or each.paths[0].name for each in (draft.model, model))
    if draft.model.size_bytes > model.size_bytes:
        yield Advice(
            "draft_larger",
            tr(
                "The draft model {draft} is larger than {model}, so the draft makes answers slower.",
                draft=name,
                model=main,
            ),
            tr("Choose a smaller draft model, or load without the draft."),
        )
    elif draft.model.size_bytes * _LARGE_DRAFT > model.size_bytes:
        yield Advice(
            "draft_large",
            tr(
                "The draft model {draft} is more than half as large as {model}, so the draft hardly saves time.",
                draft=name,
                model=main,
            ),
            tr("Choose a smaller draft model."),
        )
    if is_slow and CPU_ID in devices:
        yield Advice(
            "draft_on_cpu",
            tr(
                "The draft model is on the CPU, where a drafted token takes at least half as long as a token of the "
                "model."
            ),
            tr(
                "Move the draft model to a graphics card with enough free memory, choose a smaller one, or load "
                "without a draft model."
            ),
        )


def _extra_buffers(layout: Layout, rig: Rig) -> Iterator[Advice]:
    fault = rig.host.fault("extra_buffers")
    if fault is not None and layout.runs[0].device == CPU_ID:
        yield Advice(
            "extra_buffers_off",
            tr("The CPU computes with weights that are not repacked, which is slower: {reason}", reason=fault.reason),
            tr("Run Help > Check This Computer again after an update of the engine."),
        )


def _workers_in_use(layout: Layout, rig: Rig) -> Iterator[Advice]:
    # A worker serves one client at a time. That does not refuse the load: the other model can be unloaded first.
    used = used_devices(layout)
    taken = [device for device in rig.devices if device.is_rpc and device.id in used and device.holdings]
    for device in taken:
        yield Advice(
            "worker_in_use",
            tr(
                "{id} is in use by {model}, and a worker serves one model at a time.",
                id=device.id,
                model=device.holdings[0].model,
            ),
            tr(
                "Unload {model}, or move the layers on {id} to another device.",
                model=device.holdings[0].model,
                id=device.id,
            ),
        )


def _between_layers(layout: Layout, rig: Rig, context: ContextSettings) -> Iterator[Advice]:
    listed = [run.device for run in entries(layout)]
    devices = [device for name in dict.fromkeys(listed) if (device := rig.device(name)) is not None]
    offloads = context.op_offload and any(backend_traits(device).op_offload for device in devices)
    # Op offload takes weights of the scheduler's last backend only. A CPU entry is an earlier backend.
    if CPU_ID in listed and offloads:
        yield Advice(
            "cpu_entry",
            tr("CPU layers are placed after a GPU, where op offload cannot speed up long prompts."),
            tr("Put CPU layers first."),
        )
    if layout.output_device == CPU_ID and any(device != CPU_ID for device in layout.devices):
        yield Advice(
            "output_on_cpu",
            tr("The output layer is on the CPU, so every token waits for the CPU."),
            tr("Move the output layer to the device of the last layers."),
        )


def _inside_layers(layout: Layout) -> Iterator[Advice]:
    members = split_members(layout)
    if layout.split_mode == "row":
        # docs/multi-gpu.md ("Deprecated") and docs/backend/SYCL.md ("not supported") of llama.cpp.
        yield Advice(
            "row_deprecated",
            tr(
                "llama.cpp calls split mode row deprecated, and its SYCL backend does not support this mode: the "
                "engine may crash."
            ),
            tr("Choose split mode layer, or tensor."),
        )
    if len(members) == 1:
        yield Advice(
            "split_one_member",
            tr(
                "Only {device} has a share, so split mode {split_mode} has no benefit.",
                device=members[0],
                split_mode=layout.split_mode,
            ),
            tr("Give another device a share, or choose split mode layer."),
        )
    else:
        yield Advice(
            "split_runs",
            tr(
                "In split mode {split_mode} every device holds a part of each layer that is not on the CPU, "
                "so the layout editor shows shares instead of single layers.",
                split_mode=layout.split_mode,
            ),
            tr("Change the shares to move memory between devices."),
        )


def _shared_cache(layout: Layout, model: ModelFile) -> Iterator[Advice]:
    first = _first_shared_layer(model)
    if first is None or not 2 <= first < layout.n_layers:
        return
    # Layers with a window read the cache of layer `first - 2`, all others that of `first - 1` (`_cache_of` in
    # hyper_parameters.py).
    sources = {layout.device_of(first - 2), layout.device_of(first - 1)}
    away = {layout.device_of(layer) for layer in range(first, layout.n_layers)} - sources
    if away:
        yield Advice(
            "shared_cache",
            tr(
                "Layers {first}-{last} use the KV cache of layers {source} and {other_source}, so this KV cache must "
                "be copied to {devices} for every token.",
                first=first,
                last=layout.n_layers - 1,
                source=first - 2,
                other_source=first - 1,
                devices=", ".join(sorted(away)),
            ),
            tr(
                "Move these layers to the device of layers {source} and {other_source}.",
                source=first - 2,
                other_source=first - 1,
            ),
        )


def _first_shared_layer(model: ModelFile) -> int | None:
    shared = model.hyper_parameter("attention.shared_kv_layers")
    if isinstance(shared, int) and shared > 0:
        return model.n_layers - shared
    return architecture_rules(model.architecture).n_kv_layers


def _overrides(layout: Layout, context: ContextSettings) -> Iterator[Advice]:
    if not layout.overrides:
        return
    yield Advice(
        "override_leaves_cache",
        tr("Overrides move weights only; the KV cache and attention stay on the device of the layer."),
        tr("Move whole layers to move the KV cache too."),
    )
    # These are the other conditions of `can_pipeline`: only the overrides prevent a pipeline.
    if layout.split_mode == "layer" and len(entries(layout)) > 1 and context.offload_kqv:
        yield Advice(
            "override_stops_pipeline",
            tr("With overrides the devices compute a long prompt one after the other."),
            tr("If prompts are long, move whole layers instead."),
        )


def _settings(layout: Layout, model: ModelFile, context: ContextSettings) -> Iterator[Advice]:
    if not context.offload_kqv and any(device != CPU_ID for device in layout.devices):
        yield Advice(
            "cache_on_host",
            tr("The KV cache is in host memory, so each layer on a device exchanges data with the host for attention."),
            tr("Turn on Offload KV cache if there is room."),
        )
    trained = model.n_ctx_train
    # A longer context is what other RoPE frequencies are chosen for.
    is_stretched = bool(context.rope_freq_base or context.rope_freq_scale)
    if trained is not None and trained < context.n_ctx_each and not is_stretched:
        yield Advice(
            "context_above_training",
            tr(
                "The context of {n_ctx_each} tokens is longer than the trained length of {trained} tokens.",
                n_ctx_each=context.n_ctx_each,
                trained=trained,
            ),
            tr("Answers get worse beyond {trained} tokens; a shorter context also saves memory.", trained=trained),
        )
    window = model.hyper_parameter("attention.sliding_window")
    if context.swa_full and isinstance(window, int) and 0 < window < context.n_ctx:
        yield Advice(
            "full_sliding_window",
            tr(
                "Sliding-window layers, which use the last {window} tokens, have a KV cache for all {n_ctx} tokens.",
                window=window,
                n_ctx=context.n_ctx,
            ),
            tr("Turn off Full-size SWA cache (swa_full), unless you edit earlier messages often."),
        )
