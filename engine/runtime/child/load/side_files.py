"""Loads the side files of a model: LoRA adapters, and the projector for images or sound.

The bytes of a projector on each device come from a C++ function that is not part of the C interface
(`clip_get_mem_usage`) and returns a `std::map`. If the function is not exported, or `read_map` cannot read the map, the
sizes come from the log.
"""

from __future__ import annotations

import ctypes
import re
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

from engine.base.processor import default_threads
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.child.load.largest_media import ProjectorLimits, reserve_largest
from engine.runtime.child.native.bindings import Bindings
from engine.runtime.child.native.breakdown import read_map
from engine.runtime.child.native.devices import CPU_ID, ResolvedDevices
from engine.runtime.child.native.failures import RequestError, failure
from engine.runtime.child.native.log import EngineLog, FailedAllocation, FreeMemory, allocation_failure
from engine.runtime.child.native.stop import StopFlag
from engine.runtime.media.images.pictures import CHANNELS
from engine.runtime.media.sounds.recordings import sample_count
from engine.runtime.protocol.messages import PROJECTOR, AllocationFailure, BufferMemory, Message
from engine.runtime.protocol.requests import AdapterFile, Load, MediaFile, ProjectorFile, SoundFile

_OF_ENCODER = "_Z18clip_get_mem_usagePK8clip_ctx"
_ENCODERS = 2
"""Number of encoder addresses (`clip_ctx`) with which `mtmd_context` begins: for images and for sound; null for
none.
"""


def loaded_bytes(library: Any, handle: int) -> dict[int, int] | None:
    """Return the bytes of a loaded projector by device address; None if unknown. Padding of weights is not included.

    `library`: the binding of mtmd. `handle`: address of the projector.
    """
    function = _function(library, _OF_ENCODER, ctypes.c_void_p)
    if function is None:
        return None
    total: dict[int, int] = {}
    for encoder in (ctypes.c_void_p * _ENCODERS).from_address(handle):
        if encoder is None:
            continue
        found = read_map(lambda space, encoder=encoder: function(space, encoder), 1)  # type: ignore[misc]
        if found is None:
            return None
        for device, (size_bytes,) in found.items():
            total[device] = total.get(device, 0) + size_bytes
    return total


def exact_buffers(
    devices: ResolvedDevices, file: ProjectorFile, sizes: dict[int, int] | None
) -> tuple[BufferMemory, ...] | None:
    """Return weights and compute buffers of a projector; None if `sizes` do not agree with the file's header.

    `sizes`: bytes by device address, from `loaded_bytes`.
    """
    home = devices.by_id[file.device]
    if sizes is None or not file.plain_bytes or sizes.get(home, 0) < file.plain_bytes:
        return None
    ids = {device: device_id for device_id, device in devices.by_id.items()}
    if not sizes.keys() <= ids.keys():
        return None
    computing = {ids[device]: size - (file.plain_bytes if device == home else 0) for device, size in sizes.items()}
    return (
        BufferMemory(device=file.device, buffer_type=PROJECTOR, weights_bytes=file.weights_bytes),
        *(
            BufferMemory(device=device_id, buffer_type=PROJECTOR, compute_bytes=size_bytes)
            for device_id, size_bytes in computing.items()
            if size_bytes
        ),
    )


def _function(library: Any, name: str, *arguments: Any) -> Any:
    """Return the C++ function `name` of mtmd, which writes a map to its first argument; None if it is not exported.

    `library`: the binding of mtmd. `arguments`: ctypes types of the other arguments.
    """
    try:
        function = library._libmtmd[name]
    except (AttributeError, ValueError):
        return None
    function.restype, function.argtypes = None, [ctypes.c_void_p, *arguments]
    return function


AUTO_FLASH_ATTENTION = -1
_LIMIT = re.compile(r"image_max_pixels \((\d+)\) is less than image_min_pixels \((\d+)\)")
"""Pattern of clip.cpp's error message for image limits that the projector refuses."""


class Adapters(Struct, frozen=True):
    """The loaded LoRA adapters. llama.cpp frees them with the model."""

    engine: Bindings
    handles: tuple[Any, ...] = ()
    scales: tuple[float, ...] = ()

    def apply(self, context: int) -> None:
        """Apply the adapters to a context. The next batch allocates new compute buffers, as its graph is larger."""
        if self.handles:
            count = len(self.handles)
            handles = (self.engine.low.llama_adapter_lora_p_ctypes * count)(*self.handles)
            scales = (ctypes.c_float * count)(*self.scales)
            self.engine.low.llama_set_adapters_lora(context, handles, count, scales)


class Projector(Struct, frozen=True):
    """A loaded projector.

    `library`: the binding of mtmd.
    `marker`: text that marks an image or sound in a prompt.
    `resource_limits`: the callback that ggml calls for the projector's graph nodes, with limits of time and memory. It
    must live as long as the projector. None in tests.
    `limits`: limits for images from the settings, as text (`limits_of`).
    """

    library: Any
    handle: int
    path: Path
    marker: str
    resource_limits: ProjectorLimits | None
    limits: str = ""

    def preparing(self, file: MediaFile) -> AbstractContextManager[None]:
        """Return a context manager that limits time and memory while mtmd prepares a file for the projector."""
        if self.resource_limits is None:
            return nullcontext()
        if isinstance(file, SoundFile):
            rate = int(self.library.mtmd_get_audio_sample_rate(self.handle))
            return self.resource_limits.preparing(ctypes.sizeof(ctypes.c_float) * sample_count(file.length_ms, rate))
        return self.resource_limits.preparing(CHANNELS * file.width_px * file.height_px)

    def computing(self) -> AbstractContextManager[None]:
        """Return a context manager that limits the time in which mtmd computes embeddings."""
        return nullcontext() if self.resource_limits is None else self.resource_limits.computing

    def free(self) -> None:
        self.library.mtmd_free(self.handle)


class LoadedSideFiles(Struct, frozen=True):
    """Loaded adapters and projector of a model.

    `parts`: their memory. Sizes that are known only from llama.cpp's log are rounded to 0.01 MiB.
    """

    adapters: Adapters
    projector: Projector | None = None
    parts: tuple[BufferMemory, ...] = ()

    def free(self) -> None:
        """Free the projector. The adapters are freed with the model."""
        if self.projector is not None:
            self.projector.free()


class SideFileLoader:
    """Loads adapters and projector after the model's weights.

    `send_final`: sends the last message if the process ends inside native code.
    """

    def __init__(
        self,
        engine: Bindings,
        devices: ResolvedDevices,
        log: EngineLog,
        free: FreeMemory,
        stop: StopFlag,
        send_final: Callable[[Message], None],
    ) -> None:
        self._engine, self._devices, self._log, self._free, self._stop = engine, devices, log, free, stop
        self._send_final = send_final

    def load(self, load: Load, model: int, placed: tuple[BufferMemory, ...]) -> LoadedSideFiles:
        """Load the side files of a request.

        `model`: address of the loaded model.
        `placed`: memory that was allocated before, for the report of a failure.

        Raises:
            RequestError: a device refused memory, or a file cannot be used. The caller then frees only the model.
        """
        handles = tuple(self._adapter(model, file, placed) for file in load.adapters)
        adapters = Adapters(self._engine, handles, tuple(file.scale for file in load.adapters))
        parts = self._adapter_buffers()
        if load.projector is None:
            return LoadedSideFiles(adapters, None, parts)
        n_threads = load.context.threads_batch or load.context.threads or default_threads()
        projector, further = self._projector(model, load.projector, n_threads, load.context, (*placed, *parts))
        return LoadedSideFiles(adapters, projector, (*parts, *further))

    def _adapter_buffers(self) -> tuple[BufferMemory, ...]:
        return tuple(
            BufferMemory(device=self._devices.id_of_buffer_name(name), buffer_type=name, weights_bytes=size_bytes)
            for name, size_bytes in self._log.facts.logged_bytes("lora").items()
        )

    def _projector(
        self,
        model: int,
        file: ProjectorFile,
        n_threads: int,
        context: ContextSettings,
        placed: tuple[BufferMemory, ...],
    ) -> tuple[Projector, tuple[BufferMemory, ...]]:
        self._make_sure_of_room(file, placed)
        library = projector_library()
        library.mtmd_log_set(self._engine.projector_log_callback, ctypes.c_void_p(0))
        resource_limits = ProjectorLimits(self._engine, lambda: self._stop.requested, Path(file.path).name)
        parameters = projector_parameters(library, self._devices, file, n_threads, context)
        marker = new_marker()
        parameters.media_marker = marker.encode()
        parameters.cb_eval = resource_limits.callback
        buffers = self._log.facts.buffers
        logged_before = len(buffers)
        handle = library.mtmd_init_from_file(file.path.encode(), model, parameters)
        if handle:
            end = partial(self._end_refused, placed)
            reserve_largest(library, int(handle), marker, resource_limits, self._log, end)
        # mtmd logs compute buffers with the same words as the model's context; they must not be counted for that.
        logged = buffers[logged_before:]
        del buffers[logged_before:]
        if not handle:
            check_image_limit(self._log, context)
            raise self._refusal(file.path, "llama.cpp cannot load it as this model's projector")
        exact = exact_buffers(self._devices, file, loaded_bytes(library, int(handle)))
        projector = Projector(library, int(handle), Path(file.path), marker, resource_limits, limits_of(context))
        if exact is not None:
            return projector, exact
        weights = BufferMemory(device=file.device, buffer_type=PROJECTOR, weights_bytes=self._log.facts.projector_bytes)
        computing = (
            BufferMemory(
                device=self._devices.id_of_buffer_name(each.buffer_type),
                buffer_type=PROJECTOR,
                compute_bytes=each.size_bytes,
            )
            for each in logged
        )
        return projector, (weights, *computing)

    def _adapter(self, model: int, file: AdapterFile, placed: tuple[BufferMemory, ...]) -> Any:
        failed_before = len(self._log.facts.failed)
        handle = self._engine.low.llama_adapter_lora_init(model, file.path.encode())
        if handle:
            return handle
        if len(self._log.facts.failed) > failed_before:
            refused = allocation_failure(self._devices, self._log.facts, self._free, "read", placed)
            if refused is not None:
                raise RequestError(refused)
        raise self._refusal(file.path, "llama.cpp cannot use it as an adapter of this model")

    def _end_refused(self, placed: tuple[BufferMemory, ...], failed: FailedAllocation) -> None:
        """Report that a device has no room for the projector's largest image. The caller then exits the process."""
        self._free.note(failed)
        self._send_final(
            AllocationFailure(
                stage="read",
                device=self._devices.id_of_buffer_name(failed.buffer_type),
                buffer_type=failed.buffer_type,
                requested_bytes=failed.requested_bytes,
                free_bytes=self._free.of(failed.buffer_type),
                parts=placed,
                text=failed.text,
            )
        )

    def _make_sure_of_room(self, file: ProjectorFile, placed: tuple[BufferMemory, ...]) -> None:
        """Raise `RequestError` if there is no room for a projector's weights.

        Memory of their size is allocated and freed again, because mtmd aborts the process if its own allocation fails.
        """
        buffer_type = self._engine.device_buffer_type(self._devices.by_id[file.device])
        buffer = self._engine.allocate_buffer(buffer_type, file.weights_bytes)
        if buffer:
            self._engine.free_buffer(buffer)
            return
        name = self._engine.buffer_type_name(buffer_type)
        raise RequestError(
            AllocationFailure(
                stage="read",
                device=file.device,
                buffer_type=name,
                requested_bytes=file.weights_bytes,
                free_bytes=self._devices.free_bytes(file.device),
                parts=placed,
                text=f"failed to allocate {name} buffer of size {file.weights_bytes} for the projector",
            )
        )

    def _refusal(self, path: str, what: str) -> RequestError:
        # The first error line names the cause, later ones its consequences.
        reason = next(iter(self._log.facts.reasons()), "it gave no reason").removeprefix("error: ").rstrip(".")
        return failure("model_file", f"{Path(path).name}: {what}: {reason}.")


def check_image_limit(log: EngineLog, context: ContextSettings) -> None:
    """Raise `RequestError` if the projector could not be loaded because of the limits for images in the settings."""
    found = next((match for text in log.facts.reasons() if (match := _LIMIT.search(text))), None)
    if found is None:
        return
    most_px, least_px = int(found[1]), int(found[2])
    # Both limits are tokens times the area of a token. One of them is ours, so that the other follows.
    limit = context.image_max_tokens
    least = None if limit is None else least_px * limit // max(1, most_px)
    if limit is not None:
        raise failure(
            "argument",
            f"The largest image ({limit} tokens) is below the projector's minimum of {least} tokens. Set "
            f"image_max_tokens to at least {least}, or to auto.",
        )
    raise failure(
        "argument",
        f"The smallest image ({context.image_min_tokens} tokens) is above the projector's maximum. Lower "
        "image_min_tokens, or set it to auto.",
    )


def new_marker() -> str:
    """Return the text that marks an image or a sound in a prompt."""
    # Random, so that no message of a conversation can contain it, by chance or on purpose.
    return f"<__media_{secrets.token_hex(16)}__>"


def limits_of(context: ContextSettings) -> str:
    """Return the image limits of the settings as text; empty for the projector's own limits.

    The text becomes a part of the names of images (`Media.name_of`), because embeddings depend on the limits.
    """
    limits = (context.image_min_tokens, context.image_max_tokens)
    return "" if limits == (None, None) else "-".join("" if each is None else str(each) for each in limits)


def projector_parameters(
    library: Any, devices: ResolvedDevices, file: ProjectorFile, n_threads: int, context: ContextSettings
) -> Any:
    """Return `mtmd_context_params` for a projector, without mtmd's warm-up, which `reserve_largest` replaces."""
    parameters = library.mtmd_context_params_default()
    parameters.use_gpu = file.device != CPU_ID
    parameters.device = devices.by_id[file.device] if file.device != CPU_ID else None
    parameters.n_threads = n_threads
    parameters.print_timings = False
    parameters.flash_attn_type = AUTO_FLASH_ATTENTION
    parameters.warmup = False
    if context.image_max_tokens is not None:
        parameters.image_max_tokens = context.image_max_tokens
    if context.image_min_tokens is not None:
        parameters.image_min_tokens = context.image_min_tokens
    return parameters


def projector_library() -> Any:
    """Return the binding of libmtmd.

    Raises:
        RequestError: this build of llama-cpp-python has no libmtmd.
    """
    try:
        from llama_cpp import mtmd_cpp
    except (ImportError, OSError, RuntimeError) as error:
        raise failure(
            "argument", f"This build of llama.cpp loads no projectors ({error}). Load the model without its projector."
        ) from None
    return mtmd_cpp
