"""Finds out which card each CUDA device is, by calls of CUDA's driver.

ggml reports the PCI id of a device only together with its free memory, and reading that makes a CUDA context of
several hundred MiB (`ggml_backend_cuda_device_get_props`). The calls here make none.
"""

from __future__ import annotations

import ctypes
import sys
import uuid

from msgspec import Struct

_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_PCI_ID_SIZE = 32


class DriverCard(Struct, frozen=True):
    """A CUDA device. `uuid`: its UUID in NVML's form; for a slice of a card (MIG) the UUID of the slice."""

    pci_bus_id: str
    uuid: str
    total_bytes: int


def list_driver_cards() -> tuple[DriverCard, ...]:
    """Return the CUDA devices of this process in CUDA's order, which is ggml's too; empty if the driver reports none.

    The driver itself applies CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.
    """
    try:
        # ggml's CUDA backend has opened it already.
        library = ctypes.CDLL(_LIBRARY)
        count = ctypes.c_int()
        if library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count)):
            return ()
        cards = tuple(_read(library, number) for number in range(count.value))
    except (OSError, AttributeError):  # no driver, or one older than these functions (CUDA 11.4)
        return ()
    return tuple(card for card in cards if card is not None) if None not in cards else ()


def _read(library: ctypes.CDLL, number: int) -> DriverCard | None:
    device, total_bytes = ctypes.c_int(), ctypes.c_size_t()
    pci_bus_id, digits = ctypes.create_string_buffer(_PCI_ID_SIZE), (ctypes.c_ubyte * 16)()
    # The functions behind the names of `cuda.h`, which has macros for the second versions.
    refused = (
        library.cuDeviceGet(ctypes.byref(device), number)
        or library.cuDeviceGetPCIBusId(pci_bus_id, _PCI_ID_SIZE, device)
        or library.cuDeviceGetUuid_v2(ctypes.byref(digits), device)
        or library.cuDeviceTotalMem_v2(ctypes.byref(total_bytes), device)
    )
    if refused:
        return None
    # ggml writes PCI ids in lower case.
    name = pci_bus_id.value.decode("ascii", "replace").lower()
    return DriverCard(name, f"GPU-{uuid.UUID(bytes=bytes(digits))}", total_bytes.value)
