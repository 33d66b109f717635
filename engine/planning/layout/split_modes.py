"""llama.cpp's split modes: changing a layout's mode, reasons why a mode is unavailable, and the rules of mode tensor.

The rules follow llama.cpp's `llm_arch_supports_sm_tensor` and `llama_meta_device_get_split_state`. Rules for cases in
which llama.cpp aborts or computes wrong results were found by loading on RPC workers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from engine.base.language import join_names, tr, tr_count
from engine.devices.device import CPU_ID, Device, Rig
from engine.model.architectures.registry import architecture_rules
from engine.model.gguf.model_file import Block, ModelFile
from engine.planning.layout.cache_rules import KV_BLOCK_ELEMENTS
from engine.planning.layout.engine_parameters import MAX_DEVICES, TensorOverride, leading_cpu_layers, tensor_overrides
from engine.planning.layout.layout import Layout, Run, SplitMode, Violation
from engine.planning.layout.patterns import pattern_finder
from engine.planning.settings.context_settings import ContextSettings


def count_unlisted_layers(model: ModelFile) -> int:
    """Return the number of layers that llama.cpp adds when it runs the model, beyond the layers in the file.

    Nanbeige repeats all its layers; Granite Switch has one layer that routes to adapters.
    """
    architecture = architecture_rules(model.architecture)
    if architecture.routed:
        return 1
    loops = model.hyper_parameter("num_loops") if architecture.looped else None
    is_count = isinstance(loops, int) and not isinstance(loops, bool) and loops > 1
    return model.n_layers * (loops - 1) if is_count and isinstance(loops, int) else 0


_FEED_FORWARD = re.compile(r"ffn_(gate_up|gate|up|down)((?:_(?:ch)?exps|_shexp)?)\.(?:weight|bias)")
_MIRRORED = re.compile(r"\w*norm\w*\..*|ffn_gate_inp(?:_\w+)?\..*|attn_output\.(?:weight|bias)")
"""Names of weights that an override may move in mode tensor while other weights of their layer stay.

These are weights of which each device has a full copy (norms, routers), and `attn_output`, the last weight of
attention.
"""


def tensor_model_violations(model: ModelFile, leading: int = 0) -> Iterator[Violation]:
    """Yield a violation if mode tensor is impossible for this model with its first `leading` layers on the CPU."""
    split = architecture_rules(model.architecture).split
    if not split.allowed:
        yield Violation(
            "split_architecture",
            tr(
                "In split mode tensor the engine cannot split {architecture} models inside their layers.",
                architecture=model.architecture,
            ),
            tr("Choose split mode layer, which divides the model between layers."),
        )
    elif count_unlisted_layers(model):
        yield Violation(
            "split_architecture",
            tr(
                "In split mode tensor the engine cannot split this {architecture} model, because the engine "
                "repeats or adds layers when it runs the model.",
                architecture=model.architecture,
            ),
            tr("Choose split mode layer, which divides the model between layers."),
        )
    elif split.may_lack_heads and _lacks_heads(model, leading):
        yield Violation(
            "split_architecture",
            tr(
                "In split mode tensor the engine cannot split this {architecture} model: some layers of the "
                "model have no K heads.",
                architecture=model.architecture,
            ),
            tr("Choose split mode layer, which divides the model between layers."),
        )
    elif any(_joins_delta_net(block) for block in model.blocks):
        yield Violation(
            "split_attention",
            tr(
                "In split mode tensor the engine cannot split this {architecture} model inside its layers: the file "
                "has one tensor for queries, keys, values and gate together.",
                architecture=model.architecture,
            ),
            tr("Convert the model with a current llama.cpp, or choose split mode layer."),
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


def single_head_violations(model: ModelFile, context: ContextSettings) -> Iterator[Violation]:
    """Yield a violation if a model with a single K and V head in each layer cannot use split mode tensor.

    llama.cpp splits inside that head, but computes the K norm, and the rotation of a quantised cache, over whole heads
    (ggml-backend-meta.cpp: GGML_ASSERT(src_ss[0].axis != AXIS_0), "unsupported mul_mat split states").
    """
    if model.hyper_parameter("attention.head_count_kv") != 1 or _has_latent_cache(model):
        return
    if any(tensor.name.endswith("attn_k_norm.weight") for block in model.blocks for tensor in block.tensors):
        yield Violation(
            "single_head",
            tr(
                "In split mode tensor the engine cannot split this model inside its layers: the model has a "
                "single K head, which is normalised."
            ),
            tr("Choose split mode layer, which divides the model between layers."),
        )
    elif KV_BLOCK_ELEMENTS[context.type_k] > 1 or KV_BLOCK_ELEMENTS[context.type_v] > 1:
        yield Violation(
            "single_head",
            tr(
                "In split mode tensor the engine cannot split this model with a quantised KV cache: the model has "
                "a single K head."
            ),
            tr("Set the KV cache types to f16, or choose split mode layer."),
        )


def uneven_head_violations(model: ModelFile, shares: Sequence[float]) -> Iterator[Violation]:
    """Yield a violation if Q or K has one norm per head, and a device's share is not a whole number of K heads.

    llama.cpp rounds the slices of Q to whole K heads, but may cut the norms between any two heads. It aborts if the
    slices do not match (ggml-backend-meta.cpp: GGML_ASSERT(ret.axis != GGML_BACKEND_SPLIT_AXIS_UNKNOWN)).
    """
    n_heads = model.hyper_parameter("attention.head_count_kv") or model.hyper_parameter("attention.head_count")
    if not isinstance(n_heads, int) or n_heads < 2 or not any(_has_head_norms(block) for block in model.blocks):
        return
    if any((share * n_heads / sum(shares)) % 1 for share in shares):
        yield Violation(
            "split_attention",
            tr(
                "Split mode tensor does not work with these shares: each head of this model has a norm of its own, so "
                "each device must get a whole number of the {count} K heads.",
                count=n_heads,
            ),
            tr(
                "Choose shares that give each device a whole number of the {count} K heads, or choose split mode "
                "layer.",
                count=n_heads,
            ),
        )


def shared_cache_violations(model: ModelFile, shares: Sequence[float]) -> Iterator[Violation]:
    """Yield a violation if a model whose last layers read the KV cache of earlier ones cannot be split by these shares.

    llama.cpp rounds shares to whole heads, and starts the rounding at another device in each layer. If a share is not a
    whole number of heads, the last layers have Q heads on other devices than the K heads of the earlier layer that they
    read. Then llama.cpp aborts (ggml-backend-meta.cpp: "Assert that ratio is consistent").
    """
    shares_kv = architecture_rules(model.architecture).shares_kv
    if not shares_kv or not model.hyper_parameter("attention.shared_kv_layers"):
        return
    counts = model.hyper_parameter("attention.head_count_kv") or model.hyper_parameter("attention.head_count")
    for count in sorted(
        {each for each in (counts if isinstance(counts, tuple) else (counts,)) if isinstance(each, int)}
    ):
        if any((share * count / sum(shares)) % 1 for share in shares):
            yield Violation(
                "split_attention",
                tr(
                    "Split mode tensor does not work with these shares: some layers of this model read the KV cache "
                    "of other layers, so each device must get a whole number of the {count} K heads.",
                    count=count,
                ),
                tr(
                    "Choose shares that give each device a whole number of the {count} K heads, or choose split mode "
                    "layer.",
                    count=count,
                ),
            )
            return


def _has_head_norms(block: Block) -> bool:
    names = ("attn_q_norm.weight", "attn_k_norm.weight")
    return any(
        tensor.name.endswith(names) and len(tensor.shape) > 1 and tensor.shape[1] > 1 for tensor in block.tensors
    )


def _joins_delta_net(block: Block) -> bool:
    names = {tensor.name.split(".", 2)[-1] for tensor in block.tensors}
    return {"ssm_in.weight", "ssm_ba.weight"} <= names and "attn_qkv.weight" not in names


def _has_latent_cache(model: ModelFile) -> bool:
    rank = model.hyper_parameter("attention.kv_lora_rank")
    return isinstance(rank, int) and rank > 0


def _lacks_heads(model: ModelFile, leading: int) -> bool:
    heads = model.hyper_parameter("attention.head_count_kv")
    return 0 in heads[leading:] if isinstance(heads, tuple) else heads == 0


def tensor_context_violations(context: ContextSettings) -> Iterator[Violation]:
    """Yield a violation for each context setting that split mode tensor does not support."""
    if context.flash_attn == "off":
        yield Violation(
            "flash_attention",
            tr("Split mode tensor needs flash attention, which is off."),
            tr("Set flash attention to auto or on."),
        )
    if not context.offload_kqv:
        yield Violation(
            "split_cache_on_host",
            tr("In split mode tensor the engine computes wrong results if the KV cache is in host memory."),
            tr("Turn on offloading of the KV cache (offload_kqv), or choose split mode layer."),
        )


def tensor_override_violations(layout: Layout, model: ModelFile) -> Iterator[Violation]:
    """Yield violations for overrides that make llama.cpp abort in mode tensor, at most one for each reason."""
    target = next((override.device for override in layout.overrides if override.device != CPU_ID), None)
    if target is not None:
        yield Violation(
            "split_override",
            tr(
                "Split mode tensor allows overrides to the CPU only; one override points to {target}.",
                target=target,
            ),
            tr("Drop the override, or choose split mode Layer."),
        )
    leading = leading_cpu_layers(layout)
    rules = tensor_overrides(layout)
    name = next((name for block in model.blocks[leading:] if (name := _inseparable(block, rules)) is not None), None)
    if rules and name is not None:
        yield Violation(
            "split_override",
            tr(
                "An override moves {name}, but not the weights that are computed together with this tensor. Split mode "
                "tensor does not allow this.",
                name=name,
            ),
            tr("Override whole parts (ffn, experts), or choose split mode Layer."),
        )


def _inseparable(block: Block, overrides: tuple[TensorOverride, ...]) -> str | None:
    """Return the name of a weight that overrides move although mode tensor forbids it; None if there is none.

    Mode tensor forbids it for weights of attention and recurrent layers, except norms and `attn_output` (`_MIRRORED`).
    `ffn_gate`, `ffn_up` and `ffn_gate_up` may be moved only with all feed-forward weights of the same kind, such as
    experts.
    """
    finders = [pattern_finder(override.pattern) for override in overrides]
    # All weights of the layer are needed first: a later tensor may be the one that stayed.
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


_INSTEAD = tr("Choose split mode Layer, which allows any layer on any device.")


def split_mode_obstacles(rig: Rig, model: ModelFile | None = None) -> dict[SplitMode, str]:
    """Return a sentence with reason and remedy for each split mode that cannot be chosen on `rig` with `model`.

    `model`: None if no model is open.
    """
    found: dict[SplitMode, str | None] = {"tensor": _tensor_obstacle(rig, model), "row": _row_obstacle(rig)}
    return {mode: sentence for mode, sentence in found.items() if sentence is not None}


def layout_in_mode(layout: Layout, mode: SplitMode, rig: Rig) -> Layout:
    """Return `layout` in another split mode.

    In modes tensor and row each device that supports the mode gets a share in proportion to its free memory. The first
    layers stay on the CPU if they are there. The other layers are assigned to devices in proportion to the shares. If
    split mode layer is chosen later, each layer is on the device to which it is assigned.
    """
    if mode == layout.split_mode or mode in ("layer", "none"):
        return layout.with_split_mode(mode)
    members = [device for device in rig.devices if _able(device, mode)][:MAX_DEVICES]
    # The mode is set all the same. The rules then say why this layout cannot be loaded.
    if not members:
        return layout.with_split_mode(mode)
    leading = leading_cpu_layers(layout)
    # The whole model is on the CPU. Who chooses a split wants the devices to be used.
    if leading == layout.n_layers:
        leading = 0
    weights = {device.id: max(0, device.available_bytes - device.margin_bytes) for device in members}
    if not any(weights.values()):
        # No member has free memory. Equal shares are a start, and the forecast shows what is short.
        weights = dict.fromkeys(weights, 1)
    shares = tuple((device, _percent(size, sum(weights.values()))) for device, size in weights.items())
    return with_shares(_with_runs(layout, leading, shares, mode), shares)


def with_shares(layout: Layout, shares: tuple[tuple[str, float], ...]) -> Layout:
    """Return `layout` with new shares, and with layers on each device in proportion to its share.

    `layout` must be in mode tensor or row. The first layers stay on the CPU if they are there.
    """
    return _with_runs(layout, leading_cpu_layers(layout), shares, layout.split_mode)


def split_shares(layout: Layout, rig: Rig) -> tuple[tuple[str, float], ...]:
    """Return (device id, share) for all devices that support the layout's split mode; 0 for devices without a share.

    Empty in modes layer and none.
    """
    if layout.split_mode not in ("tensor", "row"):
        return ()
    named = {device for device, _ in layout.tensor_split}
    others = (device.id for device in rig.devices if device.id not in named and _able(device, layout.split_mode))
    return (*layout.tensor_split, *((device, 0.0) for device in others))


def _with_runs(layout: Layout, leading: int, shares: tuple[tuple[str, float], ...], mode: SplitMode) -> Layout:
    taking = [(device, share) for device, share in shares if share > 0]
    total = sum(share for _, share in taking)
    # Modes tensor and row need a layer to split, even if all layers were moved to the CPU.
    leading = min(leading, layout.n_layers - 1)
    split_layers = layout.n_layers - leading
    bounds = [leading]
    reached = 0.0
    for _, share in taking:
        reached += share
        # Sums are rounded and not single shares, so rounding errors do not add up.
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
    """Return `size` in per cent of `total`, as a whole number: 0 only if `size` is 0, otherwise at least 1."""
    return float(max(1, round(100 * size / total))) if size else 0.0


def _able(device: Device, mode: SplitMode) -> bool:
    return device.capabilities.row_split if mode == "row" else device.capabilities.tensor_split


def _tensor_obstacle(rig: Rig, model: ModelFile | None) -> str | None:
    if not rig.devices:
        return tr("Split mode tensor needs devices besides the CPU. Choose split mode Layer.")
    if not any(_able(device, "tensor") for device in rig.devices):
        faults = (device.fault("tensor_split") for device in rig.devices)
        reason = next((f" {fault.reason}" for fault in faults if fault is not None), "")
        return tr(
            "No device can be used in split mode tensor.{reason} {instead}",
            reason=reason,
            instead=_INSTEAD,
        )
    refusal = next(tensor_model_violations(model), None) if model is not None else None
    return f"{refusal.message} {_INSTEAD}" if refusal is not None else None


def _row_obstacle(rig: Rig) -> str | None:
    if not rig.devices:
        return tr("Split mode row needs devices besides the CPU. Choose split mode Layer.")
    unable = [device.id for device in rig.devices if not _able(device, "row")]
    if unable:
        return tr_count(
            "Split mode row needs split buffers, which {names} does not support. {instead}",
            "Split mode row needs split buffers, which {names} do not support. {instead}",
            len(unable),
            names=join_names(unable),
            instead=_INSTEAD,
        )
    return None
