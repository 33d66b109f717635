"""Carries out a `Probe`: a load without memory (`no_alloc`) that gives llama.cpp's own sizes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from pathlib import Path

from engine.base.values import replace
from engine.runtime.child.load.largest_media import ProjectorLimits, reserve_largest
from engine.runtime.child.load.loaded_context import FLOAT_BYTES, LoadedContext
from engine.runtime.child.load.model_loader import ModelParameters, check_file, context_struct, wanted_devices
from engine.runtime.child.load.side_files import (
    check_image_limit,
    exact_buffers,
    loaded_bytes,
    new_marker,
    projector_library,
    projector_parameters,
)
from engine.runtime.child.native import breakdown
from engine.runtime.child.native.bindings import ACCELERATOR_TYPE, Bindings
from engine.runtime.child.native.breakdown import BufferBytes
from engine.runtime.child.native.devices import ResolvedDevices, resolve_devices
from engine.runtime.child.native.failures import RequestError, failure
from engine.runtime.child.native.log import (
    EngineLog,
    FailedAllocation,
    FreeMemory,
    allocation_failure,
    context_failure,
    model_failure,
)
from engine.runtime.protocol.messages import BufferMemory, Message, Probed
from engine.runtime.protocol.requests import Probe


def probe(engine: Bindings, log: EngineLog, request: Probe, send_final: Callable[[Message], None]) -> Probed:
    """Load the model without memory, read the planned sizes, and free everything.

    `send_final`: sends the final message to the parent if the process must exit from a callback of native code.

    Raises:
        RequestError: llama.cpp cannot load the model or make the context.
    """
    log.begin()
    check_file(request.path)
    devices = resolve_devices(engine, request.devices, wanted_devices(request))
    parameters = ModelParameters(engine, request.parameters, devices, request.context, dry=True)
    model = engine.low.llama_model_load_from_file(request.path.encode(), parameters.struct)
    if not model:
        raise RequestError(model_failure(request.path, log.facts))
    # With a dry model llama_init_from_model plans all buffers (graph_reserve), and allocates none of the large ones.
    context = engine.low.llama_init_from_model(model, context_struct(engine, request.context, None))
    if not context:
        engine.low.llama_model_free(model)
        refused = allocation_failure(devices, log.facts, FreeMemory(devices), "context", ())
        if refused is not None:
            raise failure("does_not_fit", f"{refused.device} refused what even a dry run needs: {refused.text}.")
        raise RequestError(context_failure(request.context.n_ctx, log.facts))
    loaded = LoadedContext(engine, log, devices, request.context, model, context)
    # A load computes such a batch in its warm-up, for which the output buffer grows.
    loaded.embedded_tokens = loaded.embeddable_tokens
    try:
        sizes = breakdown.context_bytes(engine, context)
        if sizes is not None:
            buffer_types = backend_buffer_types(engine, devices, request.parameters.devices)
            # Two differences between the plans of dry and real loads.
            sizes = counted_once(sizes, buffer_types)
            if log.facts.input_copies > 1:
                sizes = without_surplus(sizes, buffer_types, buffer_types[-1], _copies_bytes(loaded))
        return Probed(
            parts=(*loaded.parts(sizes), *dry_projector(engine, log, devices, request, model, send_final)),
            exact=sizes is not None,
            flash_attention=log.facts.flash_attention,
            graph_splits=log.facts.graph_splits,
        )
    finally:
        loaded.free()


def dry_projector(
    engine: Bindings,
    log: EngineLog,
    devices: ResolvedDevices,
    request: Probe,
    model: int,
    send_final: Callable[[Message], None],
) -> tuple[BufferMemory, ...]:
    """Return the compute buffers that a projector needs for the largest image; empty if they are unknown.

    The projector is loaded, and freed again at the end. Before that, a buffer for its weights is allocated and freed as
    a trial, because mtmd aborts the process if it cannot allocate them. If there is no room for the compute buffers,
    the process ends with a `Failure`.

    `send_final`: sends the final message to the parent if the process must exit from a callback of native code.
    `model`: address of the model.

    Raises:
        RequestError: the projector does not allow the limits for images in the settings.
    """
    file = request.projector
    if file is None:
        return ()
    buffer = engine.allocate_buffer(engine.device_buffer_type(devices.by_id[file.device]), file.weights_bytes)
    if not buffer:
        return ()
    engine.free_buffer(buffer)
    library, marker = projector_library(), new_marker()
    limits = ProjectorLimits(engine, lambda: False, Path(file.path).name)
    library.mtmd_log_set(engine.projector_log_callback, ctypes.c_void_p(0))
    parameters = projector_parameters(library, devices, file, request.context.threads or 1, request.context)
    parameters.media_marker = marker.encode()
    parameters.cb_eval = limits.callback
    handle = library.mtmd_init_from_file(file.path.encode(), model, parameters)
    if not handle:
        check_image_limit(log, request.context)
        return ()

    def end(failed: FailedAllocation) -> None:
        device = devices.id_of_buffer_name(failed.buffer_type)
        send_final(
            failure(
                "does_not_fit", f"{device} has no room for the largest image of the projector: {failed.text}."
            ).message
        )

    try:
        reserve_largest(library, int(handle), marker, limits, log, end)
        parts = exact_buffers(devices, file, loaded_bytes(library, int(handle))) or ()
    finally:
        library.mtmd_free(handle)
    return tuple(part for part in parts if part.compute_bytes)


def backend_buffer_types(engine: Bindings, devices: ResolvedDevices, entries: Iterable[str]) -> list[int]:
    """Return the buffer type of each backend of a context: devices first, then accelerators, the CPU last.

    `entries`: ids of the layout's devices.
    """
    listed = [devices.by_id[device_id] for device_id in entries]
    accelerators = [device for device in engine.devices() if engine.device_props(device).type == ACCELERATOR_TYPE]
    buffer_types = [engine.device_buffer_type(device) for device in (*listed, *accelerators)]
    # As in llama_context: CPU backends, those of entries too, use the pinned host buffer of the first device, if that
    # has one.
    plain = engine.cpu_buffer_type()
    host = (engine.device_host_buffer_type(listed[0]) if listed else None) or plain
    return [*(host if each == plain else each for each in buffer_types), host]


def counted_once(sizes: dict[int, BufferBytes], buffer_types: list[int]) -> dict[int, BufferBytes]:
    """Return the sizes of a dry run (a load without memory) with each compute buffer counted once.

    A dry run counts a buffer again for each backend that shares its buffer type.
    """
    return {
        key: replace(size, compute_bytes=size.compute_bytes // max(1, buffer_types.count(key)))
        for key, size in sizes.items()
    }


def without_surplus(
    sizes: dict[int, BufferBytes], buffer_types: list[int], host: int, copies_bytes: int
) -> dict[int, BufferBytes]:
    """Return the sizes of a dry run (a load without memory) with compute buffers corrected for pipeline parallelism.

    Pipeline parallelism copies the hidden state at boundaries between backends. A dry run assigns the norms to other
    backends than a load does, so it counts other boundaries. Two errors are corrected. A device that appears only once
    in llama.cpp's device list has one set of copies too many. The first device of the list has one set too few if the
    CPU is not in the list.

    `buffer_types`: from `backend_buffer_types`.
    `host`: buffer type of CPU backends.
    `copies_bytes`: size of one set.
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
    """Return the bytes of one set of copies that pipeline parallelism makes: several hidden states of a micro batch."""
    low = loaded.engine.low
    width, tokens = low.llama_model_n_embd(loaded.model), low.llama_n_ubatch(loaded.context)
    return int(loaded.log.facts.input_copies * FLOAT_BYTES * width * tokens)
