"""Parts that an installed CUDA toolkit may lack: cuBLAS, also published as a wheel, and a driver library to link with.

The wheel is searched for in .venv. A pack contains neither: its users have NVIDIA's.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from resources.setup.cuda import parse_nvcc_version
from resources.setup.places import VENV
from resources.setup.steps import output_of

_DRIVER = "libcuda.so.1"
_CALLED = "cuMemCreate"


@dataclass(frozen=True)
class Cublas:
    """cuBLAS of NVIDIA's wheel: its folders of headers and libraries, and the major version of CUDA."""

    headers: Path
    libraries: Path
    major: int

    @property
    def options(self) -> tuple[str, ...]:
        """CMake options for this cuBLAS. CMake itself searches only the toolkit."""
        return (
            f"-DCMAKE_CUDA_FLAGS=-I{self.headers}",
            f"-DCUDA_cublas_LIBRARY={self.libraries / f'libcublas.so.{self.major}'}",
            f"-DCUDA_cublasLt_LIBRARY={self.libraries / f'libcublasLt.so.{self.major}'}",
        )


def wheel_of(major: int, minor: int) -> str:
    """Return pip's requirement for the cuBLAS wheel of this toolkit version."""
    name = "nvidia-cublas" if major >= 13 else f"nvidia-cublas-cu{major}"
    return f"{name}=={major}.{minor}.*"


def site_folders() -> tuple[Path, ...]:
    """Return the `site-packages` folders of .venv."""
    return tuple(sorted(VENV.glob("lib/python3*/site-packages")))


def find_cublas(major: int, folders: Iterable[Path]) -> Cublas | None:
    """Return the wheel's cuBLAS of this CUDA version in the `site-packages` folders; None if there is none."""
    for folder in folders:
        for header in sorted(folder.glob("nvidia/*/include/cublas_v2.h")):
            found = Cublas(header.parent, header.parents[1] / "lib", major)
            if (found.libraries / f"libcublas.so.{major}").is_file():
                return found
    return None


def knows_cublas(nvcc: str) -> bool:
    """Return whether nvcc finds the headers of cuBLAS itself.

    nvcc is run, since it may be a script or a link, so that its own folder says nothing about its search path.
    """
    looked = subprocess.run(
        [nvcc, "-E", "-x", "cu", "-include", "cublas_v2.h", "/dev/null"], capture_output=True, check=False
    )
    return looked.returncode == 0


def toolkit_version(nvcc: str) -> tuple[int, int] | None:
    """Return major and minor version of the toolkit, such as (13, 0); None if nvcc does not print it."""
    match = re.match(r"(\d+)\.(\d+)", parse_nvcc_version(output_of([nvcc, "--version"]) or ""))
    return (int(match.group(1)), int(match.group(2))) if match else None


def toolkit_folder(nvcc: str) -> Path | None:
    """Return the toolkit's folder as nvcc prints it; None if it does not."""
    told = subprocess.run([nvcc, "--dryrun", "-x", "cu", "/dev/null"], capture_output=True, text=True, check=False)
    match = re.search(r"^#\$ TOP=(.+)$", told.stderr, re.MULTILINE)
    return Path(match.group(1).strip()) if match else None


def missing_parts(nvcc: str, scratch: Path, compiler: str) -> list[str]:
    """Return the CMake options for parts that the toolkit lacks. `scratch`: folder for a generated driver library."""
    options: list[str] = []
    version = None if knows_cublas(nvcc) else toolkit_version(nvcc)
    if version is not None and (cublas := find_cublas(version[0], site_folders())):
        options += cublas.options
    toolkit = toolkit_folder(nvcc)
    if toolkit is not None and not any(toolkit.glob("**/stubs/libcuda.so")):
        options.append(f"-DCUDA_cuda_driver_LIBRARY={write_driver_library(scratch / 'driver', compiler)}")
    return options


def write_driver_library(folder: Path, compiler: str) -> Path:
    """Compile a stand-in with the name of the driver's library; return its path.

    A backend linked with it loads the real driver at run time. It contains one driver function that ggml calls, since a
    linker drops libraries of which nothing is used.
    """
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libcuda.so"
    command = [compiler, "-shared", f"-Wl,-soname,{_DRIVER}", "-o", str(library), "-x", "c", "-"]
    subprocess.run(command, check=True, capture_output=True, input=f"int {_CALLED}(void) {{ return 1; }}\n".encode())
    return library
