"""Rules of the engine that a layout may break, one sentence and one remedy each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby

import msgspec

from engine.devices.device import CPU_ID, Rig
from engine.gguf.model_file import ModelFile
from engine.layout.context_settings import ContextSettings, KvType
from engine.layout.engine_parameters import MAX_ENTRIES, entries, entry_count
from engine.layout.layout import Layout

KV_BLOCK_ELEMENTS: Mapping[KvType, int] = {
    "f32": 1, "f16": 1, "bf16": 1, "q8_0": 32, "q5_1": 32, "q5_0": 32, "q4_1": 32, "q4_0": 32, "iq4_nl": 32,
}  # fmt: skip
"""Elements in one block of a cache type, `ggml_blck_size`; a row of the cache is whole blocks."""


class Violation(msgspec.Struct, frozen=True):
    """A broken rule. `rule` is a stable identifier such as `too_many_entries`."""

    rule: str
    message: str
    remedy: str


def violations(layout: Layout, model: ModelFile, rig: Rig, context: ContextSettings) -> tuple[Violation, ...]:
    """Return every rule of the engine that this layout breaks with this model, rig and context; none means loadable.

    Rules: `layer_count`, `unknown_device`, `too_many_entries`, `repeated_device`, `flash_attention`,
    `cache_block_size`, `cache_types_differ`, `split_mode_unavailable`, `split_member`, `leading_cpu_only`.
    """
    return (
        *_layer_count(layout, model),
        *_unknown_devices(layout, rig),
        *(_split_mode(layout, rig) if layout.split_mode in ("tensor", "row") else _entries(layout, rig)),
        *_flash_attention(layout, context),
        *_cache_types(model, context),
    )


def _layer_count(layout: Layout, model: ModelFile) -> Iterator[Violation]:
    if layout.n_layers != model.n_layers:
        yield Violation(
            "layer_count",
            f"The layout is for {layout.n_layers} layers and {model.name or 'the model'} has {model.n_layers}.",
            "Open the layout that belongs to this model, or start from the initial layout.",
        )


def _unknown_devices(layout: Layout, rig: Rig) -> Iterator[Violation]:
    named = [*layout.devices, *(device for device, _ in layout.tensor_split), layout.main_device or CPU_ID]
    named += [override.device for override in layout.overrides]
    for device in dict.fromkeys(named):
        if rig.device(device) is None:
            yield Violation(
                "unknown_device",
                f"The layout uses {device}, which is not among the devices ({', '.join(rig.ids)}).",
                f"Move what is on {device} to another device, or open the rig that has it.",
            )


def _entries(layout: Layout, rig: Rig) -> Iterator[Violation]:
    count = entry_count(layout)
    accelerators = sum(device.kind == "accel" for device in rig.devices)
    if count > MAX_ENTRIES - accelerators:
        yield Violation(
            "too_many_entries",
            f"The layout needs {count} device entries and the engine takes {MAX_ENTRIES - accelerators}.",
            "Join runs so that fewer remain; leading CPU layers and an output on the last layer's device cost none.",
        )
    for name, runs in groupby(sorted(run.device for run in entries(layout))):
        device = rig.device(name)
        if len(tuple(runs)) > 1 and device is not None and not (device.is_host or device.is_rpc):
            yield Violation(
                "repeated_device",
                f"{name} appears more than once, and two streams on one {device.backend} device are not safe yet.",
                f"Bring the layers on {name} together in one run, with the output layer only if that run is the last.",
            )


def _split_mode(layout: Layout, rig: Rig) -> Iterator[Violation]:
    mode = layout.split_mode
    yield Violation(
        "split_mode_unavailable",
        f"Split mode {mode} is not available yet.",
        "Choose split mode layer, which divides the model between layers.",
    )
    if any(run.device == CPU_ID for run in layout.runs[1:]) or layout.output_device == CPU_ID:
        yield Violation(
            "leading_cpu_only",
            f"In split mode {mode} only the first layers can be on the CPU.",
            "Move the CPU layers to the front, and the output layer to a device.",
        )
    for name, _ in layout.tensor_split:
        device = rig.device(name)
        able = device is None or (device.capabilities.row_split if mode == "row" else device.capabilities.tensor_split)
        if name == CPU_ID or not able:
            yield Violation(
                "split_member",
                f"{name} cannot be a member of split mode {mode}.",
                f"Leave {name} out of the shares, or choose split mode layer.",
            )


def _flash_attention(layout: Layout, context: ContextSettings) -> Iterator[Violation]:
    if context.flash_attn != "off":
        return
    if KV_BLOCK_ELEMENTS[context.type_v] > 1:
        yield Violation(
            "flash_attention",
            f"A V cache of type {context.type_v} needs flash attention, which is off.",
            "Set flash attention to auto or on, or the V cache type to f16.",
        )
    if layout.split_mode == "tensor":
        yield Violation(
            "flash_attention",
            "Split mode tensor needs flash attention, which is off.",
            "Set flash attention to auto or on.",
        )


def _cache_types(model: ModelFile, context: ContextSettings) -> Iterator[Violation]:
    if context.type_k != context.type_v and _same_cache_types_needed(model):
        yield Violation(
            "cache_types_differ",
            f"{model.architecture} models keep K and V in one cache; K is {context.type_k} and V is {context.type_v}.",
            "Give K and V the same type.",
        )
    without_flash = context.flash_attn == "off"
    caches = [("K", context.type_k, "key"), ("V", context.type_v, "value")]
    # Without flash attention a V cache with blocks is refused as such, whatever its width.
    for letter, cache_type, key in caches[:1] if without_flash else caches:
        block = KV_BLOCK_ELEMENTS[cache_type]
        width = _cache_width(model, key, whole_row=without_flash)
        if width is not None and width % block:
            yield Violation(
                "cache_block_size",
                f"The {letter} cache of this model is {width} wide, which is no multiple of {cache_type}'s {block}.",
                f"Choose f16 or another type without blocks for the {letter} cache.",
            )


def _same_cache_types_needed(model: ModelFile) -> bool:
    return model.architecture == "deepseek4" or model.hyper_parameter("attention.key_length_mla") is not None


def _cache_width(model: ModelFile, key: str, *, whole_row: bool) -> int | None:
    """Return the elements that have to be whole blocks: a head, or all heads of a layer without flash attention.

    None where the header does not say one number for all layers; then the engine decides.
    """
    heads = model.hyper_parameter("attention.head_count")
    width = model.hyper_parameter(f"attention.{key}_length")
    if width is None:
        embedding = model.hyper_parameter("embedding_length")
        width = embedding // heads if isinstance(embedding, int) and isinstance(heads, int) and heads > 0 else None
    if not whole_row:
        return width if isinstance(width, int) else None
    kv_heads = model.hyper_parameter("attention.head_count_kv")
    kv_heads = heads if kv_heads is None else kv_heads
    return width * kv_heads if isinstance(width, int) and isinstance(kv_heads, int) else None
