"""What a layout would take, from a load that allocates nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from engine.runtime.child.load.loaded_context import FLOAT_BYTES, LoadedContext
from engine.runtime.child.load.model_loader import ModelParameters, check_file, context_struct, wanted_devices
from engine.runtime.child.load.side_files import dry_bytes, exact_parts, projector_library, projector_parameters
from engine.runtime.child.native import breakdown
from engine.runtime.child.native.bindings import ACCELERATOR_TYPE, Bindings
from engine.runtime.child.native.breakdown import BufferBytes
from engine.runtime.child.native.devices import ResolvedDevices, resolve_devices
from engine.runtime.child.native.failures import EndOfRequest, failure
from engine.runtime.child.native.log import EngineLog, FreeMemory, allocation_failure, context_failure, model_failure
from engine.runtime.protocol.messages import Part, Probe, Probed


def probe(engine: Bindings, log: EngineLog, request: Probe) -> Probed:
    """Plan the layout with llama.cpp's own graph planner and free everything again.

    Raises:
        EndOfRequest: with the `Failure`.
    """
    log.begin()
    check_file(request.path)
    devices = resolve_devices(engine, request.devices, wanted_devices(request))
    parameters = ModelParameters(engine, request.parameters, devices, request.context, dry=True)
    model = engine.low.llama_model_load_from_file(request.path.encode(), parameters.struct)
    if not model:
        raise EndOfRequest(model_failure(request.path, log.facts))
    context = engine.low.llama_init_from_model(model, context_struct(engine, request.context, None))
    if not context:
        engine.low.llama_model_free(model)
        refused = allocation_failure(devices, log.facts, FreeMemory(devices), "context", ())
        if refused is not None:
            raise failure("does_not_fit", f"{refused.device} refused what even a dry run needs: {refused.text}.")
        raise EndOfRequest(context_failure(request.context.n_ctx, log.facts))
    loaded = LoadedContext(engine, log, devices, request.context, model, context)
    loaded.embedded_tokens = loaded.embeddable_tokens
    try:
        sizes = breakdown.context_bytes(engine, context)
        if sizes is not None:
            buffer_types = backend_buffer_types(engine, devices, request.parameters.devices)
            sizes = counted_once(sizes, buffer_types)
            if log.facts.input_copies > 1:
                sizes = without_surplus(sizes, buffer_types, engine.cpu_buffer_type(), _copies_bytes(loaded))
        return Probed(
            parts=(*loaded.parts(sizes), *dry_projector(engine, devices, request)),
            exact=sizes is not None,
            flash_attention=log.facts.flash_attention,
            graph_splits=log.facts.graph_splits,
        )
    finally:
        loaded.free()


def dry_projector(engine: Bindings, devices: ResolvedDevices, request: Probe) -> tuple[Part, ...]:
    """Return what a projector computes in; nothing where it cannot be told, or its device has no room for it.

    Its weights are told by its header: here they are allocated for a moment and not read.
    """
    file = request.projector
    if file is None:
        return ()
    buffer = engine.allocate_buffer(engine.device_buffer_type(devices.by_id[file.device]), file.weights_bytes)
    if not buffer:
        return ()
    engine.free_buffer(buffer)
    library = projector_library()
    parameters = projector_parameters(library, devices, file, request.context.threads or 1)
    parts = exact_parts(devices, file, dry_bytes(library, file, parameters)) or ()
    return tuple(part for part in parts if part.compute_bytes)


def backend_buffer_types(engine: Bindings, devices: ResolvedDevices, entries: Iterable[str]) -> list[int]:
    """Return the buffer type of each backend of a context: the entries, the accelerators, and the CPU last."""
    listed = [devices.by_id[device_id] for device_id in entries]
    accelerators = [device for device in engine.devices() if engine.device_props(device).type == ACCELERATOR_TYPE]
    buffer_types = [engine.device_buffer_type(device) for device in (*listed, *accelerators)]
    # the CPU computes in the pinned memory of the first device that is listed, where it has such
    pinned = engine.device_host_buffer_type(listed[0]) if listed else None
    return [*buffer_types, pinned or engine.cpu_buffer_type()]


def counted_once(sizes: dict[int, BufferBytes], buffer_types: list[int]) -> dict[int, BufferBytes]:
    """Undo that a dry run counts the one compute buffer of several backends with the same type once for each."""
    return {
        key: replace(size, compute_bytes=size.compute_bytes // max(1, buffer_types.count(key)))
        for key, size in sizes.items()
    }


def without_surplus(
    sizes: dict[int, BufferBytes], buffer_types: list[int], host: int, copies_bytes: int
) -> dict[int, BufferBytes]:
    """Undo how a dry run errs under pipeline parallelism, where it forgets which backend computes the norms.

    It then plans the copies of what crosses a boundary elsewhere than a load does: on a device that is one entry there
    is a set too much; without CPU entries the first entry's device has one less. The last type is the final CPU's.
    """
    listed = buffer_types[:-1]
    corrected = dict(sizes)
    for key in {*listed} - {host}:
        surplus = (listed.count(key) == 1) - (key == listed[0] and host not in listed)
        size = corrected.get(key)
        if size is not None and surplus:
            compute_bytes = max(0, size.compute_bytes - surplus * copies_bytes)
            corrected[key] = replace(size, compute_bytes=compute_bytes)
    return corrected


def _copies_bytes(loaded: LoadedContext) -> int:
    """Return the size of a set of copies of a micro batch's hidden state."""
    low = loaded.engine.low
    width, tokens = low.llama_model_n_embd(loaded.model), low.llama_n_ubatch(loaded.context)
    return int(loaded.log.facts.input_copies * FLOAT_BYTES * width * tokens)
