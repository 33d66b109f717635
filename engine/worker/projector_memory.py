"""What a projector takes on each device, to the byte, by the engine's own account.

The functions are C++ and not part of its C interface (`clip_get_mem_usage`, `mtmd_get_memory_usage`); where they are
not exported, or give no map of the form that `breakdown` reads, the caller falls back to the log.
"""

from __future__ import annotations

import ctypes
from typing import Any

from engine.protocol.messages import Part, ProjectorFile
from engine.worker.breakdown import read_map
from engine.worker.devices import ResolvedDevices

PROJECTOR = "projector"
_OF_ENCODER = "_Z18clip_get_mem_usagePK8clip_ctx"
_DRY = "_Z21mtmd_get_memory_usagePKc19mtmd_context_params"
_ENCODERS = 2
"""A loaded projector begins with the addresses of its encoders, for images and for sound; 0 where it has none."""


def loaded_bytes(library: Any, handle: int) -> dict[int, int] | None:
    """Return bytes by device of a loaded projector, weights without their padding; None where they cannot be read."""
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


def dry_bytes(library: Any, file: ProjectorFile, parameters: Any) -> dict[int, int] | None:
    """Return what `loaded_bytes` would of a projector that is not loaded; its buffers are made for a moment."""
    function = _function(library, _DRY, ctypes.c_char_p, library.mtmd_context_params)
    if function is None:
        return None
    found = read_map(lambda space: function(space, file.path.encode(), parameters), 1)
    return {device: size_bytes for device, (size_bytes,) in found.items()} if found else None


def exact_parts(devices: ResolvedDevices, file: ProjectorFile, sizes: dict[int, int] | None) -> tuple[Part, ...] | None:
    """Return weights and compute buffers; None where the engine's account does not go with the file's header."""
    home = devices.by_id[file.device]
    if sizes is None or not file.plain_bytes or sizes.get(home, 0) < file.plain_bytes:
        return None
    ids = {device: device_id for device_id, device in devices.by_id.items()}
    if not sizes.keys() <= ids.keys():
        return None
    computing = {ids[device]: size - (file.plain_bytes if device == home else 0) for device, size in sizes.items()}
    return (
        Part(device=file.device, buffer_type=PROJECTOR, weights_bytes=file.weights_bytes),
        *(
            Part(device=device_id, buffer_type=PROJECTOR, compute_bytes=size_bytes)
            for device_id, size_bytes in computing.items()
            if size_bytes
        ),
    )


def _function(library: Any, name: str, *arguments: Any) -> Any:
    """Return a function that writes a map to an address; None where the engine does not export it."""
    try:
        function = library._libmtmd[name]
    except (AttributeError, ValueError):
        return None
    function.restype, function.argtypes = None, [ctypes.c_void_p, *arguments]
    return function
