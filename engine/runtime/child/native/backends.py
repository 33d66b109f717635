"""The engine's backends: those it was built with, and those of packs.

There are two builds of the engine, and `is_portable` is where they are told apart. `make.py setup` builds one for the
machine it runs on, with its backends linked in. The bundle's is built with GGML_BACKEND_DL: its CPU and RPC backends
are libraries beside it, of the CPU's one for each kind of processor. Both load packs.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

from engine.base.engine_build import engine_build
from engine.devices.packs.store import PackLibrary, libraries_to_load
from engine.runtime.child.native.bindings import Bindings
from engine.runtime.protocol.messages import PackLoad

_CPU_VARIANTS = "*ggml-cpu-*"


def is_portable(folder: Path) -> bool:
    """Return whether the engine in `folder` has a CPU backend for each kind of processor, to be loaded when it runs."""
    return next(folder.glob(_CPU_VARIANTS), None) is not None


def load_own_backends(engine: Bindings) -> None:
    """Load the CPU backend for this processor and RPC, where the engine has them as libraries. No device is touched."""
    if is_portable(engine.folder):
        engine.load_backends_in(os.fsencode(engine.folder))


def load_packs(engine: Bindings) -> tuple[PackLoad, ...]:
    """Load the packs that were checked and are switched on, and return what came of each."""
    # The build is a digest of many lines, and looked at only where there are packs.
    libraries = libraries_to_load(os.environ, engine_build)
    return tuple(_load(engine, library) for library in libraries)


def _load(engine: Bindings, library: PackLibrary) -> PackLoad:
    before = {engine.device_name(device) for device in engine.devices()}
    try:
        # ggml would say no more than that it could not; what is open already it opens again for nothing.
        ctypes.CDLL(str(library.path))
    except OSError as error:
        # The application's ctypes has words of its own for it; the system's are the cause of them.
        return PackLoad(name=library.pack, reason=f"Its library cannot be loaded: {error.__cause__ or error}.")
    registry = engine.load_backend(os.fsencode(library.path))
    if not registry:
        return PackLoad(name=library.pack, reason="Its library is no backend that this engine can use.")
    devices = tuple(_names(engine, registry))
    if doubled := sorted(before.intersection(devices)):
        engine.unload_backend(registry)
        return PackLoad(name=library.pack, reason=f"The engine has {', '.join(doubled)} already.")
    return PackLoad(name=library.pack, devices=devices)


def _names(engine: Bindings, registry: int) -> Iterable[str]:
    for index in range(engine.registry_device_count(registry)):
        yield engine.device_name(engine.registry_device_get(registry, index))
