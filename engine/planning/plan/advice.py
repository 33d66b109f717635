"""What a layout costs although the engine takes it, one sentence and one remedy each: never a reason to refuse."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from engine.base.language import tr
from engine.devices.device import CPU_ID, Rig
from engine.model.architectures.registry import architecture_rules
from engine.model.gguf.model_file import ModelFile
from engine.planning.layout.engine_parameters import entries, split_members, used_devices
from engine.planning.layout.layout import Layout
from engine.planning.memory.backends import backend_traits
from engine.planning.plan.decisions.context_length import trained_length
from engine.planning.settings.context_settings import ContextSettings


class Advice(msgspec.Struct, frozen=True):
    """Something to know about a layout. `rule` is a stable identifier such as `cpu_entry`."""

    rule: str
    message: str
    remedy: str


def advice(layout: Layout, model: ModelFile, rig: Rig, context: ContextSettings) -> tuple[Advice, ...]:
    """Return what this layout costs, most telling first; the same arguments as `violations`.

    Rules: `worker_in_use`, `cpu_entry`, `output_on_cpu`, `shared_cache`, `override_leaves_cache`,
    `override_stops_pipeline`, `split_one_member`, `split_runs`, `cache_on_host`, `context_above_training`,
    `full_sliding_window`, `extra_buffers_off`.
    """
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


def _extra_buffers(layout: Layout, rig: Rig) -> Iterator[Advice]:
    fault = rig.host.fault("extra_buffers")
    if fault is not None and layout.runs[0].device == CPU_ID:
        yield Advice(
            "extra_buffers_off",
            tr("The CPU computes with weights as they are in the file, which is slower: {reason}", reason=fault.reason),
            tr("Check this machine again after the engine was built anew."),
        )


def _workers_in_use(layout: Layout, rig: Rig) -> Iterator[Advice]:
    """One client at a time is a rule of the worker, but not a refusal: the model that holds it can be unloaded."""
    used = used_devices(layout)
    taken = [device for device in rig.devices if device.is_rpc and device.id in used and device.holdings]
    for device in taken:
        yield Advice(
            "worker_in_use",
            tr(
                "{id} works for {model}, and a worker serves one model at a time.",
                id=device.id,
                model=device.holdings[0].model,
            ),
            tr(
                "Unload {model}, or move what is on {id} to a device that is not in use.",
                model=device.holdings[0].model,
                id=device.id,
            ),
        )


def _between_layers(layout: Layout, rig: Rig, context: ContextSettings) -> Iterator[Advice]:
    listed = [run.device for run in entries(layout)]
    devices = [device for name in dict.fromkeys(listed) if (device := rig.device(name)) is not None]
    offloads = context.op_offload and any(backend_traits(device).op_offload for device in devices)
    if CPU_ID in listed and offloads:
        yield Advice(
            "cpu_entry",
            tr(
                "CPU layers behind other devices keep large prompts from being computed on a GPU with "
                "weights that lie in host memory."
            ),
            tr("Move the CPU layers to the front to have it back."),
        )
    if layout.output_device == CPU_ID and any(device != CPU_ID for device in layout.devices):
        yield Advice(
            "output_on_cpu",
            tr("The output layer is on the CPU, where every token waits for it."),
            tr("Move it to the device of the last layers."),
        )


def _inside_layers(layout: Layout) -> Iterator[Advice]:
    members = split_members(layout)
    if len(members) == 1:
        yield Advice(
            "split_one_member",
            tr(
                "Only {members} has a share, so that split mode {split_mode} has its costs and no use.",
                members=members[0],
                split_mode=layout.split_mode,
            ),
            tr("Give another device a share, or choose split mode layer."),
        )
    else:
        yield Advice(
            "split_runs",
            tr(
                "In split mode {split_mode} every device holds a part of every layer that is not on the "
                "CPU; the lanes show shares, not places.",
                split_mode=layout.split_mode,
            ),
            tr("Change the shares to move memory between devices."),
        )


def _shared_cache(layout: Layout, model: ModelFile) -> Iterator[Advice]:
    first = _first_shared_layer(model)
    if first is None or not 2 <= first < layout.n_layers:
        return
    sources = {layout.device_of(first - 2), layout.device_of(first - 1)}
    away = {layout.device_of(layer) for layer in range(first, layout.n_layers)} - sources
    if away:
        yield Advice(
            "shared_cache",
            tr(
                "Layers {first}-{n_layers} read the KV cache of layers {first2} and {first3}; from "
                "{names} it is copied for every token.",
                first=first,
                n_layers=layout.n_layers - 1,
                first2=first - 2,
                first3=first - 1,
                names=", ".join(sorted(away)),
            ),
            tr("Keep them on the device of layers {first} and {first2}.", first=first - 2, first2=first - 1),
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
        tr("Overrides move weights only: KV cache and attention stay on the device of their layer."),
        tr("Move whole layers where the cache should go along."),
    )
    if layout.split_mode == "layer" and len(entries(layout)) > 1 and context.offload_kqv:
        yield Advice(
            "override_stops_pipeline",
            tr("With overrides the devices compute a long prompt one after the other."),
            tr("Move whole layers instead where prompts are long."),
        )


def _settings(layout: Layout, model: ModelFile, context: ContextSettings) -> Iterator[Advice]:
    if not context.offload_kqv and any(device != CPU_ID for device in layout.devices):
        yield Advice(
            "cache_on_host",
            tr("The KV cache stays in host memory, and attention goes back and forth for every layer on a device."),
            tr("Turn on offloading of the KV cache where there is room."),
        )
    trained = trained_length(model)
    if trained is not None and trained < context.n_ctx_each:
        yield Advice(
            "context_above_training",
            tr(
                "The context of {n_ctx_each} tokens is longer than the {trained} that the model was trained with.",
                n_ctx_each=context.n_ctx_each,
                trained=trained,
            ),
            tr("Answers get worse behind {trained} tokens; a shorter context also saves memory.", trained=trained),
        )
    window = model.hyper_parameter("attention.sliding_window")
    if context.swa_full and isinstance(window, int) and 0 < window < context.n_ctx:
        yield Advice(
            "full_sliding_window",
            tr(
                "Layers that look back {window} tokens only get a KV cache for all {n_ctx}.",
                window=window,
                n_ctx=context.n_ctx,
            ),
            tr("Turn off swa_full, unless parts of the conversation are to be reused in another order."),
        )
