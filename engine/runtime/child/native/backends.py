"""Loads ggml's backends: the build's own ones, and those of engine packs (additional backend libraries).

There are two builds of llama.cpp, which `is_portable` distinguishes. `make.py setup` builds one for the machine that it
runs on, with its backends linked in. The bundle's build has GGML_BACKEND_DL: its RPC backend and a CPU backend for each
kind of processor are libraries in the same folder. Both builds load packs.
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
    """Return whether the build in `folder` has CPU backends as libraries (GGML_BACKEND_DL)."""
    return next(folder.glob(_CPU_VARIANTS), None) is not None


def load_own_backends(engine: Bindings) -> None:
    """Load the RPC backend and the best CPU backend for this processor, if the build has backends as libraries.

    No device is used.
    """
    if is_portable(engine.folder):
        engine.load_backends_in(os.fsencode(engine.folder))


def load_packs(engine: Bindings) -> tuple[PackLoad, ...]:
    """Load the engine packs that passed the self-test and are switched on; return the result of each."""
    # `engine_build` is passed as a function: it is a digest of many lines, and needed only if there are packs.
    libraries = libraries_to_load(os.environ, engine_build)
    return tuple(_load(engine, library) for library in libraries)


def _load(engine: Bindings, library: PackLibrary) -> PackLoad:
    before = {engine.device_name(device) for device in engine.devices()}
    try:
        # ggml_backend_load does not say why it failed; dlopen does. Its own dlopen of the same file then costs nothing.
        ctypes.CDLL(str(library.path))
    except OSError as error:
        # In the bundle ctypes raises an error of its own, with the system's as its cause.
        return PackLoad(name=library.pack, reason=f"Its library cannot be loaded: {error.__cause__ or error}.")
    registry = engine.load_backend(os.fsencode(library.path))
    if not registry:
        return PackLoad(name=library.pack, reason="Its library is not a backend for this engine.")
    devices = tuple(_names(engine, registry))
    # A second backend for the same devices would list each of them twice.
    if doubled := sorted(before.intersection(devices)):
        engine.unload_backend(registry)
        return PackLoad(name=library.pack, reason=f"The engine already has {', '.join(doubled)}.")
    return PackLoad(name=library.pack, devices=devices)


def _names(engine: Bindings, registry: int) -> Iterable[str]:
    for index in range(engine.registry_device_count(registry)):
        yield engine.device_name(engine.registry_device_get(registry, index))
