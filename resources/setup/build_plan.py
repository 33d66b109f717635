"""Decides for which backend and with which CMake options the engine is built."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import sys
from dataclasses import asdict, dataclass, replace

from resources.packs.recipes import PORTABLE
from resources.setup.compiler_flags import amx_switches, leave_out
from resources.setup.cuda import Cuda, find_cuda
from resources.setup.errors import SetupError
from resources.setup.machine import Machine, find_machine, instruction_sets
from resources.setup.places import ROOT
from resources.setup.steps import say
from resources.vulkan import needs as vulkan

ENGINE = "llama-cpp-python"
BACKENDS = ("auto", "cpu", "cuda", "vulkan", "hip", "metal", "portable")
"""Values of `--backend`.

`portable` is the bundle's engine: for any processor, with packs for cards (`resources/packs`). All others are built for
this machine only.
"""


@dataclass(frozen=True)
class Build:
    """Everything that a build of the engine depends on."""

    version: str
    backend: str
    options: tuple[str, ...]
    toolkit: str
    machine: Machine

    @property
    def key(self) -> str:
        """Name of its folder in the cache. Builds with equal keys are interchangeable."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return f"{self.version}-{self.backend}-{digest[:16]}"


def plan_build(requested: str, extra: str) -> tuple[Build, Cuda | None]:
    """Decide how the engine is built on this machine; return the build, and the CUDA toolkit if one was found.

    `requested`: one of `BACKENDS`. `extra`: the user's CMAKE_ARGS.
    """
    cuda = find_cuda() if requested in ("auto", "cuda") else None
    backend = choose_backend(requested, sys.platform, cuda)
    toolkit = f"{cuda.version} for {','.join(cuda.capabilities)}" if cuda and backend == "cuda" else ""
    if backend == "vulkan":
        toolkit = f"headers {require_vulkan().headers}"
    options, machine = build_options(backend, sys.platform, extra), find_machine()
    if backend == "portable":
        machine = replace(machine, cpu_flags="any")
    else:
        options = leave_out(amx_switches(instruction_sets()), options)
    build = Build(engine_version(), backend, options, toolkit, machine)
    return build, cuda


def choose_backend(requested: str, system: str, cuda: Cuda | None) -> str:
    """Return the backend to build for.

    "auto" means Metal on macOS, CUDA if a card and the toolkit are there, else the CPU.

    Raises:
        SetupError: the requested backend is unknown or cannot be built here.
    """
    if requested not in BACKENDS:
        raise SetupError(f'LAYERDECK_BACKEND is "{requested}"; it may be {", ".join(BACKENDS)}.')
    if requested == "cuda" and cuda is None:
        raise SetupError(
            "LAYERDECK_BACKEND=cuda needs an NVIDIA driver with a card (nvidia-smi) and the CUDA toolkit (nvcc); "
            "install what is missing, or use LAYERDECK_BACKEND=cpu."
        )
    if requested == "metal" and system != "darwin":
        raise SetupError("LAYERDECK_BACKEND=metal works on macOS only; use auto, cpu, cuda, vulkan or hip here.")
    if requested != "auto":
        return requested
    if system == "darwin":
        return "metal"
    return "cuda" if cuda else "cpu"


def build_options(backend: str, system: str, extra: str) -> tuple[str, ...]:
    """Return the CMake options for `backend`.

    `extra`: the user's CMAKE_ARGS, which come last and so take precedence.
    """
    options = ["-DGGML_RPC=ON"]
    if backend == "cuda":
        options += ["-DGGML_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=native"]
    elif backend in ("vulkan", "hip"):
        options.append(f"-DGGML_{backend.upper()}=ON")
    elif backend == "portable":
        options += PORTABLE
    if system == "darwin":
        options.append(f"-DGGML_METAL={'ON' if backend == 'metal' else 'OFF'}")
    return (*options, *shlex.split(extra))


def require_vulkan() -> vulkan.Found:
    """Return what a build with Vulkan finds on this machine.

    Raises:
        SetupError: something that the build needs is missing.
    """
    found = vulkan.look(os.environ)
    if fault := vulkan.find_settings_error(found):
        raise SetupError(fault)
    if sys.platform == "linux" and not vulkan.has_driver(os.environ):
        say("No Vulkan driver is installed: install your card's (Debian's mesa-vulkan-drivers has most of them).")
    return found


def engine_version() -> str:
    """Return the version of llama-cpp-python that pyproject.toml pins."""
    return pinned_version(ENGINE, (ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pinned_version(package: str, pyproject: str) -> str:
    """Return the version to which `pyproject` (the text of pyproject.toml) pins `package`."""
    match = re.search(rf'"{re.escape(package)}==([^"]+)"', pyproject)
    if match is None:
        raise SetupError(f"pyproject.toml does not pin {package} with ==.", exit_code=1)
    return match.group(1)
