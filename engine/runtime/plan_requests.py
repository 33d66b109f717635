"""Functions that make the requests `Load` and `Probe` from a plan, and the environment of the child that gets them."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from engine.base.errors import ModelFileError
from engine.base.language import tr
from engine.base.pci import parse_pci_id
from engine.base.processor import core_cpus
from engine.base.thread_binding import BINDS_THREADS
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Rig
from engine.devices.telemetry.cards import list_nvidia_cards
from engine.model.gguf.model_file import ModelFile, identify
from engine.planning.memory.backends import backend_traits
from engine.planning.memory.side_files import Projector
from engine.planning.memory.tensors import OverrideMatches
from engine.planning.plan.decisions.threads import binds_threads
from engine.planning.plan.plan import Plan
from engine.runtime.protocol.requests import (
    OFFLOAD_VARIABLE,
    AdapterFile,
    DeviceRef,
    DraftSource,
    EarlyWeights,
    FileAccess,
    Load,
    Probe,
    ProjectorFile,
    WeightSpan,
)

CUDA_VARIABLE = "CUDA_VISIBLE_DEVICES"
HIP_VARIABLE = "HIP_VISIBLE_DEVICES"
VULKAN_VARIABLE = "GGML_VK_VISIBLE_DEVICES"
NO_DEVICE = "-1"
"""Value of `HIP_VISIBLE_DEVICES` that hides all devices. An empty value counts as not set [unverified on a card]."""


def load_request(plan: Plan, *, sequences: Path | None = None, is_known: bool = False) -> Load:
    """Return the request that loads the model of a plan.

    `sequences`: folder in which the child may save and restore KV states; None if it may not.
    `is_known`: whether the same load succeeded before (`Load.is_known`).

    Raises:
        ModelFileError: a path is not UTF-8 text, which JSON and llama.cpp need.
        RuleViolationError, LayoutError: the layout cannot be loaded (`Plan.parameters`).
    """
    side_files = plan.edit.side_files
    # Landlock lets the child open only these files, all parts of a split model included.
    side_paths = [each.path for each in side_files.adapters]
    side_paths += [side_files.projector.path] if side_files.projector is not None else []
    side_paths += _draft_paths(plan)
    writable = () if sequences is None else (path_text(sequences),)
    return Load(
        early=early_weights(plan),
        path=path_text(plan.model.paths[0]),
        devices=device_refs(plan.rig),
        parameters=plan.parameters,
        context=plan.settings,
        positions=_learned_positions(plan.model),
        adapters=tuple(AdapterFile(path_text(each.path), each.scale) for each in side_files.adapters),
        projector=None if side_files.projector is None else _projector_file(plan, side_files.projector),
        draft=_draft_source(plan),
        access=FileAccess(readable=tuple(map(path_text, (*plan.model.paths, *side_paths))), writable=writable),
        is_known=is_known,
    )


EARLY_BYTES = 10 << 20
"""Size in bytes above which a worker caches a tensor: `HASH_THRESHOLD` of ggml-rpc."""
EARLY_LEAST_BYTES = 400 << 20
"""Least total size of the large weights, in bytes, for which they are sent before the load.

For less, the test whether a worker caches weights would cost too much: it sends up to 20 MiB to the worker.
"""


def early_weights(plan: Plan) -> tuple[EarlyWeights, ...]:
    """Return the large weights of each RPC device, to be sent before the load; empty for fewer than two workers.

    Also empty in row and tensor split, where llama.cpp sends slices, so whole tensors in a worker's cache are no use.
    """
    layout, model = plan.edit.layout, plan.model
    if layout.split_mode != "layer":
        return ()
    homes = OverrideMatches(model).devices(plan.parameters.overrides)
    remote = {device.id: device.endpoint for device in plan.rig.devices if device.endpoint is not None}
    found: dict[str, list[WeightSpan]] = {}
    tensors = [(each, layout.device_of(index)) for index, block in enumerate(model.blocks) for each in block.tensors]
    tensors += [(tensor, layout.output_device) for tensor in model.global_tensors if tensor.name == "output.weight"]
    for tensor, usual in tensors:
        device = homes.get(tensor.name, usual)
        if tensor.size_bytes > EARLY_BYTES and device in remote:
            span = WeightSpan(path_text(model.paths[tensor.file_index]), tensor.offset, tensor.size_bytes)
            found.setdefault(device, []).append(span)
    total_bytes = sum(span.size_bytes for spans in found.values() for span in spans)
    if len({remote[device] for device in found}) < 2 or total_bytes < EARLY_LEAST_BYTES:
        return ()
    return tuple(EarlyWeights(device, tuple(spans)) for device, spans in found.items())


def _draft_paths(plan: Plan) -> list[Path]:
    """Return the files of the draft model; empty if there is none.

    Raises:
        ModelFileError: a file is gone, or was replaced after its header was read.
    """
    draft = plan.edit.side_files.draft
    if plan.draft_plan is None or draft is None:
        return []
    paths = list(plan.draft_plan.model.paths)
    missing = next((path for path in paths if not path.exists()), None)
    if missing is not None:
        raise ModelFileError(
            missing, tr("the file of the draft model no longer exists. Choose another one, or load without the draft")
        )
    # Its layers, and so its devices and its memory, may be others now.
    if draft.files is not None and identify(paths) != draft.files:
        raise ModelFileError(
            paths[0],
            tr("the draft model has changed since it was chosen. Choose it again, or load without the draft"),
        )
    return paths


def _draft_source(plan: Plan) -> DraftSource | None:
    draft, of_draft = plan.edit.side_files.draft, plan.draft_plan
    if draft is None:
        return None
    if of_draft is None:
        return DraftSource(kind=draft.kind, n_tokens=draft.n_tokens)
    return DraftSource(
        kind=draft.kind,
        n_tokens=draft.n_tokens,
        path=path_text(of_draft.model.paths[0]),
        parameters=of_draft.parameters,
        context=of_draft.settings,
    )


def _learned_positions(model: ModelFile) -> int | None:
    """Return the number of learned position embeddings of the model; None if it has none, such as a model with RoPE.

    ggml aborts at a position beyond them (`ggml_get_rows`), and llama.cpp does not check this.
    """
    shapes = (tensor.shape for tensor in model.global_tensors if tensor.name == "position_embd.weight")
    return next((shape[1] for shape in shapes if len(shape) > 1), None)


def probe_request(plan: Plan) -> Probe:
    """Return the request of a dry run, which is a load without memory (`no_alloc`).

    Raises:
        ModelFileError: a path is not UTF-8 text, which JSON and llama.cpp need.
        RuleViolationError, LayoutError: the layout cannot be loaded (`Plan.parameters`).
    """
    projector = plan.edit.side_files.projector
    side_paths = (*(() if projector is None else (projector.path,)), *_draft_paths(plan))
    return Probe(
        path=path_text(plan.model.paths[0]),
        devices=device_refs(plan.rig),
        parameters=plan.parameters,
        context=plan.settings,
        projector=None if projector is None else _projector_file(plan, projector),
        access=FileAccess(readable=tuple(map(path_text, (*plan.model.paths, *side_paths)))),
        memory_bytes=probe_memory_bytes(plan),
    )


def draft_probe_request(plan: Plan) -> Probe | None:
    """Return the request of a dry run (a load without memory) of the draft model alone.

    None if the plan has no draft model. The request allows the child the same files, devices and host memory as
    `probe_request`, so one child can carry out both.

    Raises:
        ModelFileError: a path is not UTF-8 text, which JSON and llama.cpp need.
        RuleViolationError, LayoutError: the layout cannot be loaded (`Plan.parameters`).
    """
    of_draft = plan.draft_plan
    if of_draft is None:
        return None
    return replace(
        probe_request(plan),
        path=path_text(of_draft.model.paths[0]),
        parameters=of_draft.parameters,
        context=of_draft.settings,
        projector=None,
    )


_PROBE_BASE_BYTES = 1 << 30
"""Part of a probe's memory limit that does not depend on the model: a graph of 65,536 nodes, and lazily loaded code."""
_DRIVER_BYTES = 4 << 30
"""Memory that a probe may use for contexts of drivers on many cards; the same as for device discovery."""
_TOKEN_BYTES = 1 << 10
"""Memory that a probe may use for each token of the vocabulary: its text, its entries in maps, and its merges.

Measured: 380 bytes (BPE, 49,152 tokens).
"""
_IMAGE_BYTES = 8 << 30
"""Memory that a probe may use for a projector's compute buffers, which are reserved for the largest image."""


def probe_memory_bytes(plan: Plan) -> int:
    """Return the limit for a probe's private memory in bytes, computed from the model's header and rounded up to whole
    GiB.

    A probe allocates the vocabulary, recurrent state, the output buffer and a projector, but neither weights nor KV
    cache. If it needs more than this limit, the header is damaged.
    """
    projector = plan.edit.side_files.projector
    needed = _PROBE_BASE_BYTES + plan.model.n_vocab * _TOKEN_BYTES
    needed += sum(row.recurrent_bytes + row.output_bytes for row in plan.forecast)
    if plan.draft_plan is not None:
        # The child keeps nothing of a probe, but the allocator may not return it.
        needed += _PROBE_BASE_BYTES + plan.draft_plan.model.n_vocab * _TOKEN_BYTES
        needed += sum(row.recurrent_bytes + row.output_bytes for row in plan.draft_plan.forecast)
    needed += 0 if not plan.rig.devices else _DRIVER_BYTES
    # Its weights are allocated to try whether there is room, and freed before they are loaded.
    needed += 0 if projector is None else 2 * _projector_file(plan, projector).weights_bytes + _IMAGE_BYTES
    # Rounded up to a whole GiB: a shift to the right rounds down, negative numbers too.
    return -(-needed >> 30) << 30


def environment(plan: Plan) -> dict[str, str]:
    """Return environment variables for a child that probes or loads `plan`.

    ggml and CUDA read these settings at their start, and have no other interface for them. Blocks while the driver
    lists its cards.
    """
    tokens = plan.settings.op_offload_min_batch
    switches = {} if tokens is None else {OFFLOAD_VARIABLE: str(tokens)}
    # A chosen number of threads is left to the system's scheduler: only the measured one was compared.
    if binds_threads(plan.rig, plan.edit.context):
        switches |= bound_threads()
    if plan.settings.numa != "off":
        switches[BINDS_THREADS] = "1"
    return switches | environment_for(plan.rig, [device.id for device in plan.devices_in_use])


def bound_threads() -> dict[str, str]:
    """Return environment variables that bind the threads of OpenMP to physical cores; empty if the cores are unknown.

    ggml uses OpenMP's threads if it was built with OpenMP, as its packages are; other builds ignore the variables.
    """
    cores = ",".join("{" + ",".join(map(str, core)) + "}" for core in core_cpus())
    return {"OMP_PLACES": cores, "OMP_PROC_BIND": "spread"} if cores else {}


def environment_for(rig: Rig, used: Collection[str]) -> dict[str, str]:
    """Return environment variables that hide the local cards of `rig` from a child, except those with ids in `used`.

    All cards of a backend stay visible if it is not certain which of them are used. Blocks while the driver lists its
    cards.
    """
    found = {}
    hip, vulkan = _visible_numbers(rig, used, "HIP", "ROCm"), _visible_numbers(rig, used, "Vulkan", "Vulkan")
    if hip is not None:
        found[HIP_VARIABLE] = ",".join(hip) or NO_DEVICE
    if vulkan is not None:
        found[VULKAN_VARIABLE] = ",".join(vulkan)
    # HIP reads CUDA's variable if its own is missing, and would find none of its cards among these UUIDs.
    has_hip = any(device.backend == "HIP" and not device.is_rpc for device in rig.devices)
    cards = None if has_hip and HIP_VARIABLE not in found else _visible_cards(rig, used)
    if cards is not None:
        found[CUDA_VARIABLE] = ",".join(cards)
    return found


def _visible_numbers(rig: Rig, used_ids: Collection[str], backend: str, name: str) -> tuple[str, ...] | None:
    """Return the used devices as values of a variable such as `HIP_VISIBLE_DEVICES`, which hides all other devices.

    Return None if the variable must not be set, for instance because a device has no PCI id: a child needs the PCI ids
    to find the devices, since ggml numbers the visible devices anew.

    `backend`: name of ggml's backend.
    `name`: start of ggml's device names, such as "ROCm" of "ROCm0". The number in a name counts only devices that the
    user's own environment variables do not hide.
    """
    local = [device for device in rig.devices if device.backend == backend and not device.is_rpc]
    slots = [parse_pci_id(device.pci_bus_id or "") for device in local]
    numbers = {device.id: device.id.removeprefix(name) for device in local}
    if not local or None in slots or len(set(slots)) < len(slots) or not all(map(str.isdecimal, numbers.values())):
        return None
    if backend == "Vulkan":
        # Without the variable ggml leaves out second drivers of one card, and its numbers are not those of Vulkan.
        chosen = os.environ.get(VULKAN_VARIABLE)
        if chosen is None:
            return None
    else:
        # ROCR_VISIBLE_DEVICES stays as it is: HIP counts what that leaves.
        chosen = os.environ.get(HIP_VARIABLE, os.environ.get(CUDA_VARIABLE))
    entries = None if chosen is None else [entry.strip() for entry in chosen.split(",")]
    used = sorted(int(numbers[device_id]) for device_id in used_ids if device_id in numbers)
    if entries is not None and used and used[-1] >= len(entries):
        return None
    return tuple(str(number) if entries is None else entries[number] for number in used)


def _visible_cards(rig: Rig, used_ids: Collection[str]) -> tuple[str, ...] | None:
    """Return the UUIDs of the used CUDA cards for `CUDA_VISIBLE_DEVICES`; None if a UUID cannot be determined.

    llama.cpp asks every visible card for its memory, which makes a CUDA context of several hundred MiB on each one
    (`ggml_backend_cuda_device_get_memory`: `cudaSetDevice`, `cudaMemGetInfo`). A card without room for it aborts the
    process. UUIDs select the right cards whatever CUDA_DEVICE_ORDER and CUDA_VISIBLE_DEVICES the user has set. Cards
    that the user has hidden are in no plan.
    """
    local = {device.id: parse_pci_id(device.pci_bus_id or "") for device in rig.devices if _is_cuda(device)}
    # None is listed before the search for devices has ended, or if a rig file describes another machine.
    if not local:
        return () if list_nvidia_cards() else None
    # Slices of one card (MIG) have its slot, and the UUID of the card would choose another slice.
    if None in local.values() or len(set(local.values())) < len(local):
        return None
    if "MIG-" in os.environ.get(CUDA_VARIABLE, ""):
        return None
    known = {card.slot: card.uuid for card in list_nvidia_cards() if not card.is_sliced}
    used = [known.get(slot) for device_id in used_ids if (slot := local.get(device_id)) is not None]
    return None if None in used or not known else tuple(uuid for uuid in used if uuid is not None)


def _is_cuda(device: Device) -> bool:
    return device.backend == "CUDA" and not device.is_rpc


def device_refs(rig: Rig) -> tuple[DeviceRef, ...]:
    """Return a `DeviceRef` (PCI id, ggml's name, or endpoint) for each device of the rig except the CPU.

    A child finds the devices by these references. ggml's name is taken from the device's id, which a rig file may have
    changed.
    """
    return tuple(
        DeviceRef(
            id=device.id,
            backend=device.backend,
            name=device.id,
            pci_bus_id=device.pci_bus_id,
            endpoint=device.endpoint,
            endpoint_device=device.endpoint_device,
            address=None if device.fingerprint is None else device.via or "",
        )
        for device in rig.devices
        if device.id != CPU_ID
    )


def _projector_file(plan: Plan, projector: Projector) -> ProjectorFile:
    device_id = plan.resolved.projector_device
    size_rule = backend_traits(plan.rig.device(device_id) or plan.rig.host).size_rule
    weights_bytes = projector.weights_bytes(size_rule)
    return ProjectorFile(path_text(projector.path), device_id, weights_bytes, projector.plain_bytes)


def path_text(path: Path) -> str:
    """Return a path as text for a request. Raises `ModelFileError` if it is not UTF-8: llama.cpp could not open it."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ModelFileError(
            path, tr("the path is not UTF-8 text, so the file cannot be loaded; rename the file or its folder")
        ) from None
    return str(path)
