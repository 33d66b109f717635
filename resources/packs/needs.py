"""Requirements of a pack: what the machine that builds it needs, and what the built library needs at run time."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from resources.packs.cuda_parts import find_cublas, knows_cublas, site_folders, toolkit_version, wheel_of
from resources.setup.places import venv_program
from resources.vulkan import needs as vulkan

_EVERYWHERE = re.compile(
    r"(libggml-base|libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s|libgomp|ld-linux-x86-64)\.so"
)
"""Libraries that the engine itself needs or contains, so that a pack need not list them."""


def find_nvcc(environ: Mapping[str, str]) -> str | None:
    """Return the path of nvcc; None if there is none.

    It is searched for in CUDACXX, CUDA_HOME, CUDA_PATH, PATH and NVIDIA's default folder, in this order.
    """
    homes = [environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    places = [environ.get("CUDACXX"), *(str(Path(home, "bin", "nvcc")) for home in homes)]
    places += [shutil.which("nvcc", path=environ.get("PATH")), "/usr/local/cuda/bin/nvcc"]
    return next((place for place in places if place and os.access(place, os.X_OK)), None)


def find_settings_error(backend: str, environ: Mapping[str, str]) -> str | None:
    """Return a sentence about what is missing to build a pack for `backend`; None if nothing is."""
    if backend == "vulkan":
        return vulkan.find_settings_error(vulkan.look(environ))
    if backend == "cuda":
        return _cuda_fault(find_nvcc(environ))
    if backend == "hip" and shutil.which("hipcc", path=environ.get("PATH")) is None:
        return "A HIP pack cannot be built: hipcc cannot be found. Install ROCm, with its bin folder on the path."
    return None


def _cuda_fault(nvcc: str | None) -> str | None:
    whole = "Install the whole CUDA toolkit and let CUDA_HOME name it"
    if nvcc is None:
        return f"A CUDA pack cannot be built: nvcc cannot be found. {whole}; a card is not needed."
    if knows_cublas(nvcc):
        return None
    fault = f"A CUDA pack cannot be built: {nvcc} finds no cuBLAS. {whole}"
    version = toolkit_version(nvcc)
    if version is None:
        return f"{fault}; a card is not needed."
    if find_cublas(version[0], site_folders()):
        return None
    pip = f"{shlex.quote(str(venv_program('python')))} -m pip install '{wheel_of(*version)}'"
    return f"{fault}, or take NVIDIA's wheel of cuBLAS: {pip}"


def compiler_flags(backend: str, environ: Mapping[str, str]) -> list[str]:
    """Return additional flags for the C++ compiler: with Vulkan headers that lack VK_EXT_layer_settings, an include."""
    if backend != "vulkan" or not vulkan.lacks_layer_settings(vulkan.look(environ)):
        return []
    return ["-include", shlex.quote(str(vulkan.LAYER_SETTINGS))]


def linked_libraries(library: Path) -> list[str]:
    """Return the shared libraries that `library` is directly linked with."""
    return re.findall(r"\(NEEDED\).*\[([^]]+)\]", _readelf("-d", library))


def needed_libraries(library: Path) -> tuple[str, ...]:
    """Return the shared libraries that `library` is linked with, except those that the engine needs anyway."""
    return tuple(sorted(name for name in linked_libraries(library) if not _EVERYWHERE.match(name)))


def needed_glibc(library: Path) -> str:
    """Return the oldest version of glibc that `library` runs with, such as "2.34"."""
    versions = re.findall(r"\bGLIBC_(\d+(?:\.\d+)+)", _readelf("-V", library))
    return max(versions, key=lambda version: tuple(map(int, version.split("."))), default="")


def _readelf(option: str, library: Path) -> str:
    command = ["readelf", "-W", option, str(library)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=True)
    return done.stdout
