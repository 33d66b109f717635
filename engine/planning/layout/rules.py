"""The restrictions of llama.cpp that a layout breaks, each with a sentence for the user and a remedy.

They include features that the engine's self-test found broken on a device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from engine.base.language import tr
from engine.base.units import format_bytes
from engine.devices.device import CPU_ID, Device, Fault, Rig
from engine.model.architectures.registry import architecture_rules
from engine.model.gguf.model_file import ModelFile, TensorInfo
from engine.planning.layout.cache_rules import (
    CUDA_LACKS_WEIGHTS,
    KV_BLOCK_ELEMENTS,
    REMOTE_CUDA,
    cache_violations,
    cuda_flash_gaps,
    member_attention_violations,
    without_flash_attention,
)
from engine.planning.layout.engine_parameters import (
    MAX_DEVICES,
    MAX_ENTRIES,
    entries,
    entry_count,
    leading_cpu_layers,
    split_members,
    tensor_overrides,
    used_devices,
)
from engine.planning.layout.layout import Layout, Violation
from engine.planning.layout.patterns import pattern_finder
from engine.planning.layout.recurrent_kernels import recurrent_gap
from engine.planning.layout.row_mode import row_violations
from engine.planning.layout.split_modes import (
    shared_cache_violations,
    single_head_violations,
    tensor_context_violations,
    tensor_model_violations,
    tensor_override_violations,
    uneven_head_violations,
)
from engine.planning.settings.context_settings import ContextSettings


def fault_violations(layout: Layout, model: ModelFile, rig: Rig, context: ContextSettings) -> Iterator[Violation]:
    """Yield a violation for each feature that the layout needs and that crashes or gives wrong results on its device.

    Such faults are known from the device's self-test; for a lent (RPC) device also from its backend's kernels.
    """
    # In modes tensor and row each member has a part of the output matrix.
    with_output = split_members(layout) if layout.split_mode in ("tensor", "row") else (layout.output_device,)
    for device in _used(layout, rig):
        fault = weight_fault(device, model, with_output=device.id in with_output)
        if fault is not None:
            yield Violation(
                "engine_fault",
                tr(
                    "The engine cannot use {of} weights on {id}: {reason}",
                    of=fault.of,
                    id=device.id,
                    reason=fault.reason,
                ),
                tr("Move layers off {id}, or use a file with weights of another type.", id=device.id),
            )
        # A layout for another number of layers is refused by a rule of its own (`layer_count`).
        layers = range(min(len(model.blocks), layout.n_layers))
        own = [n for n in layers if layout.device_of(n) == device.id]
        gap = lent_gap(device, model, own)
        if gap is not None:
            yield Violation(
                "engine_fault",
                tr(
                    "The RPC worker of {id} would crash, because its backend has no kernel for this operation: "
                    "{operation}.",
                    id=device.id,
                    operation=gap.operation,
                ),
                tr("Move the recurrent layers off {id}.", id=device.id)
                if gap.is_recurrent
                else tr("Move the layers with hyper-connections off {id}.", id=device.id),
            )
        tensor = _too_large_on(device, layout, model)
        if tensor is not None:
            yield Violation(
                "engine_fault",
                tr(
                    "{id} cannot compute with tensors larger than {limit}, but {tensor} has {size}. The RPC worker of "
                    "{id} would crash or compute wrong results.",
                    id=device.id,
                    limit=format_bytes(device.buffers.largest_tensor_bytes or 0),
                    tensor=tensor.name,
                    size=format_bytes(tensor.size_bytes),
                ),
                tr("Move the layer of {tensor}, or the output layer, to another device.", tensor=tensor.name),
            )
    found = flash_fault(layout, rig, context, model)
    if found is not None and context.flash_attn != "off":
        device, fault = found
        yield Violation(
            "engine_fault",
            tr(
                "Flash attention with a {of} cache cannot be used on {id}: {reason}",
                of=fault.of,
                id=device.id,
                reason=fault.reason,
            ),
            tr("Set flash attention to off and the KV cache types to f16, or choose other cache types."),
        )


def weight_fault(device: Device, model: ModelFile, *, with_output: bool) -> Fault | None:
    """Return a known fault of `device` that makes it unusable for layers of `model`; None if there is none.

    `with_output`: whether the output layer would be on the device too.
    """
    # Most devices have no faults, and this runs at every step of a drag, so the types of all tensors are collected
    # late.
    lacks = CUDA_LACKS_WEIGHTS if _is_remote_cuda(device) else frozenset[str]()
    if not device.findings.faults and not lacks:
        return None
    types = {tensor.type_name for block in model.blocks for tensor in block.tensors}
    # The output matrix often has another type than the layers.
    if with_output and (matrix := _output_matrix(model)) is not None:
        types.add(matrix.type_name)
    missing = min(types & lacks, default=None)
    if missing is not None:
        return Fault(
            "weights",
            tr("the backend of the device has no kernel for these weights, so the RPC worker would crash."),
            missing,
        )
    return next((fault for name in sorted(types) if (fault := device.fault("weights", name)) is not None), None)


class LentGap(NamedTuple):
    """An operation for which a lent device (RPC device of another computer) has no kernel.

    `operation`: its name for users, such as "scan with a state size of 64 in recurrent layers".
    `is_recurrent`: True if recurrent layers need it; False if layers that mix residual streams need it.
    """

    operation: str
    is_recurrent: bool


def lent_gap(device: Device, model: ModelFile, layers: Sequence[int]) -> LentGap | None:
    """Return an operation that the layers need and for which a lent (RPC) device has no kernel; None if none is known.

    `layers`: indices of the layers on the device.
    """
    if device.remote is None or not layers:
        return None
    # The RPC client does not ask for the kernel of ggml_dsv4_hc_comb, and ggml-vulkan dispatches a pipeline that it has
    # not made.
    if not device.buffers.mixes_streams and any(_mixes_streams(model, index) for index in layers):
        return LentGap(tr("mixing of residual streams (hyper-connections)"), is_recurrent=False)
    operation = recurrent_gap(model, device.remote.backend, layers)
    return None if operation is None else LentGap(operation, is_recurrent=True)


def _mixes_streams(model: ModelFile, index: int) -> bool:
    """Return whether a layer mixes its residual streams with each other (`build_hc_sinkhorn`).

    The weight `hc_attn_fn` has two columns for each stream, one for reading and one for writing (`build_hc_pre`). More
    columns are for mixing.
    """
    count = model.hyper_parameter("hyper_connection.count")
    if not isinstance(count, int) or count < 2:
        return False
    tensors = model.blocks[index].tensors
    return any(t.name.endswith(".hc_attn_fn.weight") and t.shape[-1] > 2 * count for t in tensors)


def lent_too_large(device: Device, model: ModelFile, layers: Sequence[int], *, with_output: bool) -> TensorInfo | None:
    """Return a weight tensor that is too large for the kernels of a lent (RPC) device; None if there is none.

    On a local card, the scheduler assigns such a tensor to the CPU. The RPC client does not ask the worker for its
    limit, and ggml-vulkan binds only the first `maxStorageBufferRange` bytes of the tensor (`ggml_vk_subbuffer`).

    `layers`: indices of the layers on the device.
    `with_output`: whether the output layer is on the device too.
    """
    limit = device.buffers.largest_tensor_bytes
    if device.remote is None or limit is None:
        return None
    tensors = [tensor for index in layers for tensor in model.blocks[index].tensors]
    if with_output:
        tensors += [each for each in (_output_matrix(model),) if each is not None]
    return next((tensor for tensor in tensors if tensor.size_bytes > limit), None)


def _too_large_on(device: Device, layout: Layout, model: ModelFile) -> TensorInfo | None:
    """Return a weight tensor that is too large for the lent (RPC) device on which the layout places it, or None."""
    limit = device.buffers.largest_tensor_bytes
    # In modes tensor and row each member has a part of each matrix, which may be small enough.
    if device.remote is None or limit is None or layout.split_mode in ("tensor", "row"):
        return None
    moved = [(pattern_finder(each.pattern), each.device) for each in tensor_overrides(layout)]
    matrix = _output_matrix(model)
    homes = [
        (tensor, layout.device_of(index))
        for index in range(min(len(model.blocks), layout.n_layers))
        for tensor in model.blocks[index].tensors
    ]
    if matrix is not None:
        homes.append((matrix, layout.output_device))
    for tensor, home in homes:
        if tensor.size_bytes > limit:
            target = next((target for finds, target in moved if finds(tensor.name)), home)
            if target == device.id:
                return tensor
    return None


def _is_remote_cuda(device: Device) -> bool:
    return device.remote is not None and device.remote.backend in REMOTE_CUDA


def _output_matrix(model: ModelFile) -> TensorInfo | None:
    """Return the output layer's matrix, which may be the token embeddings; None if there is none."""
    tensors = {tensor.name: tensor for tensor in model.global_tensors}
    found = tensors.get("output.weight")
    if found is None and architecture_rules(model.architecture).ties_output:
        found = tensors.get("token_embd.weight")
    return found


def flash_fault(layout: Layout, rig: Rig, context: ContextSettings, model: ModelFile) -> tuple[Device, Fault] | None:
    """Return the first device of the layout on which flash attention has a fault with the cache types in `context`.

    None if no fault is known. A lent (RPC) device without a kernel for these cache types also has a fault, because its
    worker would abort.
    """
    # Without `offload_kqv` the CPU computes attention for all layers.
    has_flash = context.offload_kqv and not without_flash_attention(model, context)
    for device in _used(layout, rig):
        if has_flash and _is_remote_cuda(device) and any(run.device == device.id for run in layout.runs):
            lacking, odd = cuda_flash_gaps(model, context)
            if lacking is not None:
                reason = tr(
                    "the backend of the device has no kernel for this cache type, so the RPC worker would crash."
                )
                return device, Fault("flash_attention", reason, lacking)
            if odd is not None:
                reason = tr(
                    "the backend of the device has no kernel for heads of width {width}, so the RPC "
                    "worker would crash.",
                    width=odd,
                )
                return device, Fault("flash_attention", reason, context.type_k)
        for cache_type in dict.fromkeys((context.type_k, context.type_v)):
            fault = device.fault("flash_attention", cache_type)
            if fault is not None:
                return device, fault
    return None


def _used(layout: Layout, rig: Rig) -> tuple[Device, ...]:
    used = used_devices(layout)
    return tuple(device for device in rig.all_devices if device.id in used)


__all__ = ["Violation", "violations"]


def violations(layout: Layout, model: ModelFile, rig: Rig, context: ContextSettings) -> tuple[Violation, ...]:
    """Return a violation for each rule of llama.cpp that this layout breaks; if empty, the model can be loaded.

    Identifiers of the rules: `layer_count`, `draft_model`, `unknown_device`, `too_many_entries`, `repeated_device`,
    `flash_attention`, `cache_block_size`, `cache_types_differ`, `too_many_sequences`, `sequences_over_batch`,
    `separate_sequences`, `split_member`, `split_architecture`, `split_attention`, `split_override`,
    `split_cache_on_host`, `single_head`, `leading_cpu_only`, `engine_fault`, `row_weights`.
    """
    inside_layers = layout.split_mode in ("tensor", "row")
    return (
        *_layer_count(layout, model),
        *_draft_model(model),
        *_unknown_devices(layout, rig),
        *(_split_mode(layout, rig) if inside_layers else _entries(layout, rig)),
        *(_tensor_mode(layout, model, rig, context) if layout.split_mode == "tensor" else ()),
        *(row_violations(layout, model, rig) if layout.split_mode == "row" else ()),
        *cache_violations(model, context),
        *_quantised_streams(layout, model, rig, context),
        *fault_violations(layout, model, rig, context),
    )


def _quantised_streams(layout: Layout, model: ModelFile, rig: Rig, context: ContextSettings) -> Iterator[Violation]:
    """Yield a violation if op offload makes a CUDA or HIP device compute the attention of CPU layers that have a
    quantised K cache.

    This happens if the first layers are on the CPU, each sequence has its own cache and flash attention is off.
    """
    # Op offload copies K of a CPU layer to the card as a view of several streams, which is not contiguous. mmvq.cu then
    # fails GGML_ASSERT(ggml_is_contiguously_allocated(src0)). With flash attention no such product is computed.
    is_apart = context.n_seq_max > 1 and not context.kv_unified
    is_quantised = KV_BLOCK_ELEMENTS[context.type_k] > 1 and without_flash_attention(model, context)
    if not (is_apart and is_quantised and context.op_offload and context.offload_kqv and leading_cpu_layers(layout)):
        return
    card = next((device for device in _used(layout, rig) if device.backend in ("CUDA", "HIP")), None)
    if card is not None:
        yield Violation(
            "separate_sequences",
            tr(
                "Op offload makes {device} compute the attention of the CPU layers, which fails with these settings: "
                "flash attention is off, and each of {n_seq_max} sequences has a separate K cache of type {type_k}.",
                device=card.id,
                n_seq_max=context.n_seq_max,
                type_k=context.type_k,
            ),
            tr(
                "Change one of these settings: flash attention to on, the K cache type to f16, kv_unified to on, or "
                "op_offload to off."
            ),
        )


def _layer_count(layout: Layout, model: ModelFile) -> Iterator[Violation]:
    if layout.n_layers != model.n_layers:
        yield Violation(
            "layer_count",
            tr(
                "The layout is for {n_layers} layers, but {name} has {model_layers} layers.",
                n_layers=layout.n_layers,
                name=model.name or tr("the model"),
                model_layers=model.n_layers,
            ),
            tr("Open the layout that belongs to this model, or start from the initial layout."),
        )


def _draft_model(model: ModelFile) -> Iterator[Violation]:
    drafts = architecture_rules(model.architecture).drafts
    dependent = drafts == "always"
    if drafts == "without_embedding":
        names = {tensor.name for tensor in model.global_tensors}
        dependent = not {"token_embd.weight", "output.weight"} <= names
    if dependent:
        yield Violation(
            "draft_model",
            tr(
                "{name} ({architecture}) is a draft model for another model and cannot be loaded alone.",
                name=model.name or tr("This model"),
                architecture=model.architecture,
            ),
            tr("Open the model that the draft model belongs to."),
        )


def _unknown_devices(layout: Layout, rig: Rig) -> Iterator[Violation]:
    named = [*layout.devices, *(device for device, _ in layout.tensor_split), layout.main_device or CPU_ID]
    named += [override.device for override in layout.overrides]
    for device in dict.fromkeys(named):
        if rig.device(device) is None:
            yield Violation(
                "unknown_device",
                tr(
                    "The layout uses {device}, which is not available (devices: {names}).",
                    device=device,
                    names=", ".join(rig.ids),
                ),
                tr("Move the layers on {device} to another device, or open a rig with {device}.", device=device),
            )


def _entries(layout: Layout, rig: Rig) -> Iterator[Violation]:
    count = entry_count(layout)
    accelerators = sum(device.kind == "accel" for device in rig.devices)
    if count > MAX_ENTRIES - accelerators:
        yield Violation(
            "too_many_entries",
            tr(
                "The layout has too many separate groups of layers. Each group needs an entry in the engine's list of "
                "devices: this layout needs {count} entries, and at most {max_entries} are allowed.",
                count=count,
                max_entries=MAX_ENTRIES - accelerators,
            ),
            tr(
                "Merge groups: put the layers of a device next to each other. No entry is needed for first "
                "layers on the CPU, or for an output layer on the device of the last layer."
            ),
        )
    for name, runs in groupby(sorted(run.device for run in entries(layout))):
        device = rig.device(name)
        if len(tuple(runs)) == 1 or device is None or device.is_host or device.is_rpc:
            continue
        if not device.capabilities.repeatable:
            fault = device.fault("repeated")
            # llama.cpp makes a backend for each entry. Two backends of one device are two streams over the same
            # memory; whether results stay right is found by the self-test of the device.
            unknown = tr(
                "it is not known whether the engine works correctly if one {backend} device is used twice.",
                backend=device.backend,
            )
            yield Violation(
                "repeated_device",
                tr(
                    "{name} has more than one group of layers: {reason}",
                    name=name,
                    reason=unknown if fault is None else fault.reason,
                ),
                tr(
                    "Put all layers on {name} next to each other; put the output layer there only if the last layer is "
                    "there too. Or run the self-test of {name} (Devices > Test Devices with Two Groups of Layers).",
                    name=name,
                ),
            )


def _split_mode(layout: Layout, rig: Rig) -> Iterator[Violation]:
    mode = layout.split_mode
    if any(run.device == CPU_ID for run in layout.runs[1:]) or layout.output_device == CPU_ID:
        yield Violation(
            "leading_cpu_only",
            tr("In split mode {mode} only the first layers can be on the CPU.", mode=mode),
            tr("Put only the first layers on the CPU, and move the output layer to another device."),
        )
    members = split_members(layout)
    for name in members:
        device = rig.device(name)
        able = device is None or (device.capabilities.row_split if mode == "row" else device.capabilities.tensor_split)
        if name == CPU_ID or not able:
            yield Violation(
                "split_member",
                tr(
                    "{name} cannot be used in split mode {mode}{missing}.",
                    name=name,
                    mode=mode,
                    missing=_missing(mode, device),
                ),
                tr("Give {name} no share of the tensor split, or choose split mode layer.", name=name),
            )
    if len(members) > MAX_DEVICES:
        yield Violation(
            "split_member",
            tr(
                "{count} devices have a share; the engine uses at most {max_devices} devices.",
                count=len(members),
                max_devices=MAX_DEVICES,
            ),
            tr("Reduce the number of devices with a share."),
        )
    if mode == "row":
        yield from _row_order(members, rig)


def _missing(mode: str, device: Device | None) -> str:
    """Return the reason why a device cannot have a share in split mode `mode`, as the end of a sentence.

    Empty if the reason is unknown. `device`: None if the rig lacks the device.
    """
    if device is None or device.is_host:
        return ""
    fault = device.fault("tensor_split") if mode == "tensor" else None
    if fault is not None:
        return f": {fault.reason.rstrip('.')}"
    return tr(": the backend of this device does not support split buffers") if mode == "row" else ""


def _row_order(members: tuple[str, ...], rig: Rig) -> Iterator[Violation]:
    # `ggml_backend_split_buffer_type` reads the shares by the backend's own device numbers: all its devices, in its
    # order. Shares for some of them, or in another order, would split the rows over other devices than asked for.
    found = [device for device in rig.devices if device.id in members]
    backends = {device.backend for device in found}
    expected = tuple(device.id for device in rig.devices if device.backend in backends and not device.is_rpc)
    if found and (len(backends) > 1 or members != expected):
        yield Violation(
            "split_member",
            tr(
                "Split mode row needs shares for all devices of one backend, in their order ({expected}); the layout "
                "has shares for {members}.",
                expected=", ".join(expected),
                members=", ".join(members),
            ),
            tr("Give a share to every device of one backend and to no other device, or choose split mode layer."),
        )


def _tensor_mode(layout: Layout, model: ModelFile, rig: Rig, context: ContextSettings) -> Iterator[Violation]:
    yield from tensor_model_violations(model, leading_cpu_layers(layout))
    members = split_members(layout)
    if len(members) > 1:
        yield from single_head_violations(model, context)
        shares = [share for _, share in layout.tensor_split if share > 0]
        yield from uneven_head_violations(model, shares)
        yield from shared_cache_violations(model, shares)
        # Other kernels of HIP and Vulkan are not known to lack these, and a worker does not tell what it has.
        if any(device.backend == "CUDA" and device.id in members for device in rig.devices):
            yield from member_attention_violations(model, context)
    yield from tensor_context_violations(context)
    if layout.overrides and layout.n_layers == model.n_layers:
        yield from tensor_override_violations(layout, model)
