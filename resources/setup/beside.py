"""Uses another build of the engine than the installed one, for the processes that are started afterwards."""

from __future__ import annotations

import os
import sys
import tempfile
import zipfile
from pathlib import Path

from resources.setup.build_plan import plan_build
from resources.setup.debian import VULKAN_TEST_DRIVER, has_debian_packages, require_packages
from resources.setup.engine_wheel import require_wheel
from resources.setup.environment import install_packages
from resources.setup.errors import SetupError
from resources.setup.places import cache_folder
from resources.setup.stamp import read_stamp
from resources.vulkan import needs as vulkan

CUDA_HEADERS = ("nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88")
"""NVIDIA's headers as Python packages. The CUDA tests compile their stand-in for NVIDIA's libraries with them."""
CUDA_WHEEL_VARIABLE = "LAYERDECK_CUDA_WHEEL"
"""Path of a llama-cpp-python wheel with CUDA, for a machine without the toolkit. Its CUDA major version must be 13."""


def use_engine(backend: str) -> str:
    """Put the engine built for `backend` first in PYTHONPATH; return the backend's name."""
    if backend == "vulkan" and has_debian_packages():
        require_packages([*vulkan.look(os.environ).packages, VULKAN_TEST_DRIVER])
    if backend == "cuda":
        install_packages(CUDA_HEADERS)
    given = os.environ.get(CUDA_WHEEL_VARIABLE) if backend == "cuda" else None
    if given:
        wheel = Path(given)
        if not wheel.is_file():
            raise SetupError(f"{CUDA_WHEEL_VARIABLE} names {given}, which is not a file.")
        key, name = f"{wheel.stem}-{wheel.stat().st_size}", backend
    else:
        build, cuda = plan_build(backend, read_stamp().get("cmake_args", ""))
        wheel, key, name = require_wheel(build, cuda), build.key, build.backend
    folder = cache_folder(sys.platform, os.environ, Path.home()) / "engines" / f"{key}-library"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="engine-", dir=folder.parent) as scratch:
            unpacked = Path(scratch, "unpacked")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked)
            unpacked.rename(folder)
    # Our own package comes first, then what stands here, and last what is installed.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return name
