"""What is installed: the engine and what it was built with, drivers, toolkits, the system."""

from __future__ import annotations

import platform
import re
import shutil
from collections.abc import Iterable

from engine.confinement import landlock_version, limits_memory
from engine.doctor.report import Check
from engine.engine_build import engine_build
from engine.packs.listing import ListedPack
from engine.programs import ask_once
from engine.telemetry.cards import Nvml, nvidia_driver

_NAMES = {"cuda": "CUDA", "vulkan": "Vulkan", "hip": "HIP", "metal": "Metal", "rpc": "RPC", "sycl": "SYCL",
          "blas": "BLAS", "cpu": "CPU"}  # fmt: skip
_TOOLS = {"nvcc": "--version", "glslc": "--version", "hipcc": "--version", "vulkaninfo": "--summary"}
_TIMEOUT_S = 10.0
_MAX_WORDS_BYTES = 1 << 16
_LIBRARY = re.compile(r"(?:lib)?ggml-([a-z]+)(?:-[\w-]+)?\.(?:so|dylib|dll)")


def backends_built() -> tuple[str, ...]:
    """Return the backends that the engine was built with, by the libraries that came with it."""
    from importlib import metadata

    files = [file.name for file in metadata.distribution("llama_cpp_python").files or ()]
    found = {match[1] for name in files if (match := _LIBRARY.match(name))}
    return tuple(sorted(_NAMES[name] for name in found if name in _NAMES))


def installed_checks() -> Iterable[Check]:
    """Yield what is installed. Takes a moment: toolkits are asked for their versions."""
    yield Check(
        name="system",
        detail=f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        figures={"system": platform.system(), "release": platform.release(), "machine": platform.machine()},
    )
    yield _confinement()
    backends = backends_built()
    yield Check(
        name="engine",
        detail=f"{engine_build()}, built with {', '.join(backends)}",
        figures={"build": engine_build(), "backends": " ".join(backends)},
    )
    nvml = Nvml()
    try:
        nvml.open()
        driver, problem = nvidia_driver(nvml), nvml.problem
    finally:
        nvml.close()
    yield Check(
        name="NVIDIA driver",
        ok=True if driver else None,
        detail=driver or f"none ({problem or 'not installed'})",
        figures={"version": driver},
    )
    for tool, option in _TOOLS.items():
        version = _version(tool, option)
        yield Check(name="toolkit", ok=True if version else None, detail=f"{tool} {version or 'is not installed'}")


def pack_checks(packs: Iterable[ListedPack]) -> Iterable[Check]:
    """Yield the engine packs that are installed. One that is switched off by its owner is in order."""
    for pack in packs:
        yield Check(
            name="engine pack",
            ok=None if pack.state == "unchecked" else pack.state != "broken",
            detail=f"{pack.name}: {pack.words}",
            figures={
                "backend": pack.backend,
                "engine": pack.engine,
                "size_bytes": pack.size_bytes,
                "state": pack.state,
            },
        )


def _confinement() -> Check:
    """Return what children give up here before they open what strangers wrote."""
    version, limited = landlock_version(), limits_memory()
    files = (
        f"children reach their own files alone (Landlock version {version})"
        if version
        else "children can reach all that you can: this system has no Landlock (Linux 5.13 and later)"
    )
    memory = "their memory is limited" if limited else "their memory is not limited"
    return Check(
        name="confinement",
        ok=True if version and limited else None,
        detail=f"{files}; {memory}",
        figures={"landlock_version": version, "memory_limits": limited},
    )


def _version(tool: str, option: str) -> str | None:
    path = shutil.which(tool)
    if path is None:
        return None
    try:
        said = ask_once([path, option], b"", timeout_s=_TIMEOUT_S, max_bytes=_MAX_WORDS_BYTES)
    except OSError:
        return None
    match = re.search(r"\d{1,9}(?:\.\d{1,9}){1,5}", said.decode("utf-8", "replace"))
    return match.group() if match else "of unknown version"
