"""Split modes: layouts in another mode, what keeps a rig or a model from one, and the rules of mode tensor.

The rules are found in the engine's source (`llm_arch_supports_sm_tensor`, `llama_meta_device_get_split_state`) and,
where that aborts or computes nonsense, by loading on RPC workers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from engine.base.language import tr, tr_count
from engine.devices.device import CPU_ID, Device, Rig
from engine.model.architectures.registry import architecture_rules
from engine.model.gguf.model_file import Block, ModelFile
from engine.planning.layout.engine_parameters import MAX_DEVICES, TensorOverride, leading_cpu_layers, tensor_overrides
from engine.planning.layout.layout import Layout, Run, SplitMode, Violation
from engine.planning.layout.patterns import pattern_finder
from engine.planning.settings.context_settings import ContextSettings


def count_unlisted_layers(model: ModelFile) -> int:
    """Return how many there are: repeats of all layers (Nanbeige), or one that routes to adapters (Granite Switch)."""
    architecture = architecture_rules(model.architecture)
    if architecture.routed:
        return 1
    loops = model.hyper_parameter("num_loops") if architecture.looped else None
    is_count = isinstance(loops, int) and not isinstance(loops, bool) and loops > 1
    return model.n_layers * (loops - 1) if is_count and isinstance(loops, int) else 0


_FEED_FORWARD = re.compile(r"ffn_(gate_up|gate|up|down)((?:_(?:ch)?exps|_shexp)?)\.(?:weight|bias)")
_MIRRORED = re.compile(r"\w*norm\w*\..*|ffn_gate_inp(?:_\w+)?\..*|attn_output\.(?:weight|bias)")
"""Weights that may leave the members one by one: those that each has whole, and the ends of both halves of a layer."""


def tensor_model_violations(model: ModelFile, leading: int = 0) -> Iterator[Violation]:
    """Yield why the model cannot be split inside its layers, with so many of them on the CPU."""
    split = architecture_rules(model.architecture).split
    if not split.allowed:
        yield Violation(
            "split_architecture",
            tr("The engine cannot split {architecture} models inside their layers.", architecture=model.architecture),
            tr("Choose split mode layer, which divides the model between layers."),
        )
    elif count_unlisted_layers(model):
        yield Violation(
            "split_architecture",
            tr(
                "The engine cannot split layers that it repeats or adds, as it does for this {architecture} model.",
                architecture=model.architecture,
            ),
            tr("Choose split mode layer, which divides the model between layers."),
        )
    elif split.may_lack_heads and _lacks_heads(model, leading):
        yield Violation(
            "split_architecture",
            tr(
                "The engine cannot split this {architecture} model: some of its layers have no key heads.",
                architecture=model.architecture,
            ),
            tr("Choose split mode layer, which divides the model between layers."),
        )
    elif leading and split.whole_model:
        yield Violation(
            "leading_cpu_only",
            tr(
                "In split mode tensor {architecture} models cannot have layers on the CPU.",
                architecture=model.architecture,
            ),
            tr("Move the CPU layers to the devices, or choose split mode layer."),
        )


def _lacks_heads(model: ModelFile, leading: int) -> bool:
    heads = model.hyper_parameter("attention.head_count_kv")
    return 0 in heads[leading:] if isinstance(heads, tuple) else heads == 0


def tensor_context_violations(context: ContextSettings) -> Iterator[Violation]:
    """Yield settings that split mode tensor cannot have."""
    if context.flash_attn == "off":
        yield Violation(
            "flash_attention",
            tr("Split mode tensor needs flash attention, which is off."),
            tr("Set flash attention to auto or on."),
        )
    if not context.offload_kqv:
        yield Violation(
            "split_cache_on_host",
            tr("In split mode tensor the engine computes wrong results where the KV cache stays in host memory."),
            tr("Turn on offloading of the KV cache (offload_kqv), or choose split mode layer."),
        )


def tensor_override_violations(layout: Layout, model: ModelFile) -> Iterator[Violation]:
    """Yield overrides that abort the engine in split mode tensor, at most one of each kind."""
    target = next((override.device for override in layout.overrides if override.device != CPU_ID), None)
    if target is not None:
        yield Violation(
            "split_override",
            tr(
                "In split mode tensor weights can only be moved to the CPU, and an override moves some to {target}.",
                target=target,
            ),
            tr(
                "Send the override to the CPU, or choose split mode layer, where {target} can take them.", target=target
            ),
        )
    leading = leading_cpu_layers(layout)
    rules = tensor_overrides(layout)
    name = next((name for block in model.blocks[leading:] if (name := _inseparable(block, rules)) is not None), None)
    if rules and name is not None:
        yield Violation(
            "split_override",
            tr(
                "In split mode tensor an override cannot move {name} away from the weights that it works with.",
                name=name,
            ),
            tr("Override whole feed-forward parts (ffn, experts), or choose split mode layer."),
        )


def _inseparable(block: Block, overrides: tuple[TensorOverride, ...]) -> str | None:
    """Return a weight that the overrides tear from its fellows, None if there is none."""
    finders = [pattern_finder(override.pattern) for override in overrides]
    moved, stayed = [], set()
    for tensor in block.tensors:
        stem = tensor.name.split(".", 2)[-1]
        if any(finds(tensor.name) for finds in finders):
            moved.append((tensor.name, stem))
        elif match := _FEED_FORWARD.fullmatch(stem):
            stayed.add(match[2])
    for name, stem in moved:
        match = _FEED_FORWARD.fullmatch(stem)
        if match is None:
            if not _MIRRORED.fullmatch(stem):
                return name
        elif match[1] != "down" and match[2] in stayed:
            return name
    return None


_INSTEAD = tr("Choose Layer: any layer on any device.")


def split_mode_obstacles(rig: Rig, model: ModelFile | None = None) -> dict[SplitMode, str]:
    """Return, for each split mode that cannot be chosen on `rig`, a sentence on why and what to do instead."""
    found: dict[SplitMode, str | None] = {"tensor": _tensor_obstacle(rig, model), "row": _row_obstacle(rig)}
    return {mode: sentence for mode, sentence in found.items() if sentence is not None}


def layout_in_mode(layout: Layout, mode: SplitMode, rig: Rig) -> Layout:
    """Return `layout` in another split mode.

    Modes tensor and row go over every able device of the rig with shares by free memory. Leading CPU layers stay where
    they are; the runs of the other layers follow the shares, for the way back to mode layer.
    """
    if mode == layout.split_mode or mode in ("layer", "none"):
        return layout.with_split_mode(mode)
    members = [device for device in rig.devices if _able(device, mode)][:MAX_DEVICES]
    if not members:
        return layout.with_split_mode(mode)
    leading = leading_cpu_layers(layout)
    if leading == layout.n_layers:
        leading = 0
    weights = {device.id: max(0, device.available_bytes - device.margin_bytes) for device in members}
    if not any(weights.values()):
        weights = dict.fromkeys(weights, 1)
    shares = tuple((device, _percent(size, sum(weights.values()))) for device, size in weights.items())
    return with_shares(_with_runs(layout, leading, shares, mode), shares)


def with_shares(layout: Layout, shares: tuple[tuple[str, float], ...]) -> Layout:
    """Return a layout of mode tensor or row with other shares; its runs follow them."""
    return _with_runs(layout, leading_cpu_layers(layout), shares, layout.split_mode)


def split_shares(layout: Layout, rig: Rig) -> tuple[tuple[str, float], ...]:
    """Return the shares of the layout, then 0 for every other device that could be a member; empty in mode layer."""
    if layout.split_mode not in ("tensor", "row"):
        return ()
    named = {device for device, _ in layout.tensor_split}
    others = (device.id for device in rig.devices if device.id not in named and _able(device, layout.split_mode))
    return (*layout.tensor_split, *((device, 0.0) for device in others))


def _with_runs(layout: Layout, leading: int, shares: tuple[tuple[str, float], ...], mode: SplitMode) -> Layout:
    taking = [(device, share) for device, share in shares if share > 0]
    total = sum(share for _, share in taking)
    split_layers = layout.n_layers - leading
    bounds = [leading]
    reached = 0.0
    for _, share in taking:
        reached += share
        bounds.append(leading + round(split_layers * reached / total))
    front = (Run(CPU_ID, 0, leading - 1),) if leading else ()
    parts = zip(taking, pairwise(bounds), strict=True)
    runs = tuple(Run(device, first, stop - 1) for (device, _), (first, stop) in parts if stop > first)
    return Layout(
        n_layers=layout.n_layers,
        runs=(*front, *runs),
        output_device=runs[-1].device,
        split_mode=mode,
        tensor_split=shares,
        main_device=layout.main_device if mode == "row" else None,
        overrides=layout.overrides,
    )


def _percent(size: int, total: int) -> float:
    """Return a share that reads well, at least 1 of 100 where there is any memory at all."""
    return float(max(1, round(100 * size / total))) if size else 0.0


def _able(device: Device, mode: SplitMode) -> bool:
    return device.capabilities.row_split if mode == "row" else device.capabilities.tensor_split


def _tensor_obstacle(rig: Rig, model: ModelFile | None) -> str | None:
    if not rig.devices:
        return tr("Tensor split needs devices besides the CPU. Choose Layer.")
    if not any(_able(device, "tensor") for device in rig.devices):
        faults = (device.fault("tensor_split") for device in rig.devices)
        reason = next((f" {fault.reason}" for fault in faults if fault is not None), "")
        return tr(
            "None of the devices can be a member of a tensor split.{reason} {instead}", reason=reason, instead=_INSTEAD
        )
    refusal = next(tensor_model_violations(model), None) if model is not None else None
    return f"{refusal.message} {_INSTEAD}" if refusal is not None else None


def _row_obstacle(rig: Rig) -> str | None:
    if not rig.devices:
        return tr("Row split needs devices besides the CPU. Choose Layer.")
    unable = [device.id for device in rig.devices if not _able(device, "row")]
    if unable:
        return tr_count(
            "Row split needs split buffers, which {names} has not. {instead}",
            "Row split needs split buffers, which {names} have not. {instead}",
            len(unable),
            names=_join(unable),
            instead=_INSTEAD,
        )
    return None


def _join(names: list[str]) -> str:
    return names[0] if len(names) == 1 else tr("{names} and {names2}", names=", ".join(names[:-1]), names2=names[-1])
