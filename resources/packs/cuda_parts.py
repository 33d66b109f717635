"""Parts of CUDA that a toolkit may lack: cuBLAS, which NVIDIA has as a wheel too, and what to link for the driver.

The wheel is looked for in .venv. Nothing of either is in a pack: whoever uses one has NVIDIA's.
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
    """cuBLAS as the wheel has it: its headers and its libraries, for one major version of CUDA."""

    headers: Path
    libraries: Path
    major: int

    @property
    def options(self) -> tuple[str, ...]:
        """What CMake is told, whose rules look in the toolkit alone."""
        return (
            f"-DCMAKE_CUDA_FLAGS=-I{self.headers}",
            f"-DCUDA_cublas_LIBRARY={self.libraries / f'libcublas.so.{self.major}'}",
            f"-DCUDA_cublasLt_LIBRARY={self.libraries / f'libcublasLt.so.{self.major}'}",
        )


def wheel_of(major: int, minor: int) -> str:
    """Return the wheel for a toolkit of this version, as pip is told."""
    name = "nvidia-cublas" if major >= 13 else f"nvidia-cublas-cu{major}"
    return f"{name}=={major}.{minor}.*"


def site_folders() -> tuple[Path, ...]:
    """Return where .venv keeps packages."""
    return tuple(sorted(VENV.glob("lib/python3*/site-packages")))


def find_cublas(major: int, folders: Iterable[Path]) -> Cublas | None:
    """Return the wheel's cuBLAS for this version of CUDA in `folders` of packages, None if none fits."""
    for folder in folders:
        for header in sorted(folder.glob("nvidia/*/include/cublas_v2.h")):
            found = Cublas(header.parent, header.parents[1] / "lib", major)
            if (found.libraries / f"libcublas.so.{major}").is_file():
                return found
    return None


def knows_cublas(nvcc: str) -> bool:
    """Say whether the compiler finds cuBLAS by itself. It alone knows where it looks: it may be a script or a link."""
    looked = subprocess.run(
        [nvcc, "-E", "-x", "cu", "-include", "cublas_v2.h", "/dev/null"], capture_output=True, check=False
    )
    return looked.returncode == 0


def toolkit_version(nvcc: str) -> tuple[int, int] | None:
    """Return the toolkit's version, (13, 0) of 13.0.88; None where the compiler does not tell it."""
    match = re.match(r"(\d+)\.(\d+)", parse_nvcc_version(output_of([nvcc, "--version"]) or ""))
    return (int(match.group(1)), int(match.group(2))) if match else None


def toolkit_folder(nvcc: str) -> Path | None:
    """Return the toolkit's folder as its compiler tells it, None where it does not."""
    told = subprocess.run([nvcc, "--dryrun", "-x", "cu", "/dev/null"], capture_output=True, text=True, check=False)
    match = re.search(r"^#\$ TOP=(.+)$", told.stderr, re.MULTILINE)
    return Path(match.group(1).strip()) if match else None


def missing_parts(nvcc: str, scratch: Path, compiler: str) -> list[str]:
    """Return what CMake is told of those parts that the toolkit lacks; `scratch` takes what has to be made."""
    options: list[str] = []
    version = None if knows_cublas(nvcc) else toolkit_version(nvcc)
    if version is not None and (cublas := find_cublas(version[0], site_folders())):
        options += cublas.options
    toolkit = toolkit_folder(nvcc)
    if toolkit is not None and not any(toolkit.glob("**/stubs/libcuda.so")):
        options.append(f"-DCUDA_cuda_driver_LIBRARY={write_driver_library(scratch / 'driver', compiler)}")
    return options


def write_driver_library(folder: Path, compiler: str) -> Path:
    """Compile a library that is called as the driver's: what is linked with it asks for the driver.

    It has one function of the driver's that ggml calls, as a linker leaves out libraries that nothing is found in.
    """
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libcuda.so"
    command = [compiler, "-shared", f"-Wl,-soname,{_DRIVER}", "-o", str(library), "-x", "c", "-"]
    subprocess.run(command, check=True, capture_output=True, input=f"int {_CALLED}(void) {{ return 1; }}\n".encode())
    return library
