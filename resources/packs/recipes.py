"""CMake options of each backend that can be built as a pack, and what a computer needs to use the pack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PORTABLE = (
    "-DGGML_BACKEND_DL=ON",
    "-DGGML_CPU_ALL_VARIANTS=ON",
    "-DGGML_NATIVE=OFF",
    # Where CMake puts the backends of such a build: beside the engine's other libraries in the wheel.
    "-DCMAKE_INSTALL_BINDIR=llama_cpp/lib",
    # Linux's word for a library's own folder; macOS has another, and Windows needs none.
    "-DCMAKE_INSTALL_RPATH=$ORIGIN",
)
"""CMake options of the engine that packs are for. Its backends are loaded at run time.

They are RPC, and one CPU library for each generation of processors from SSE4.2 on.
"""
LEFT_OUT = ("ggml-cpu-sapphirerapids", "ggml-cpu-cannonlake", "ggml-cpu-cooperlake")
"""CPU libraries of that build that are not shipped.

llama.cpp crashes in the one with AMX (`resources/setup/compiler_flags.py`). The others are for one notebook processor
and for servers with four sockets; the next older library serves these.
"""
_MODULE = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    "-DGGML_BACKEND_DL=ON",
    "-DGGML_CPU=OFF",
    "-DGGML_NATIVE=OFF",
    "-DGGML_CCACHE=OFF",
    "-DGGML_BUILD_TESTS=OFF",
    "-DGGML_BUILD_EXAMPLES=OFF",
    # What a pack brings lies beside its library.
    "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
    "-DCMAKE_INSTALL_RPATH=$ORIGIN",
)


@dataclass(frozen=True)
class Recipe:
    """How one backend is built as a pack.

    `backend`: its name in texts.
    `words`: what a computer needs to use the pack, as a text.
    `architectures`: CMake's variable for the cards to build for; empty if one build is for all cards.
    """

    name: str
    backend: str
    options: tuple[str, ...]
    words: str
    architectures: str = ""

    @property
    def target(self) -> str:
        """CMake's target of the backend."""
        return f"ggml-{self.name}"

    @property
    def library(self) -> str:
        """File name of the built library."""
        return f"lib{self.target}.so"


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("vulkan", "Vulkan", ("-DGGML_VULKAN=ON",), "the Vulkan loader and a driver of the card"),
        Recipe(
            "cuda",
            "CUDA",
            # llama.cpp's own build has graphs on; NCCL would be one more library to have.
            ("-DGGML_CUDA=ON", "-DGGML_CUDA_GRAPHS=ON", "-DGGML_CUDA_NCCL=OFF"),
            "NVIDIA's driver, and the CUDA runtime and cuBLAS of the version that the pack names",
            "CMAKE_CUDA_ARCHITECTURES",
        ),
        Recipe(
            "hip",
            "HIP",
            ("-DGGML_HIP=ON", "-DGGML_CUDA_GRAPHS=ON"),
            "AMD's driver, and the libraries of ROCm that the pack names",
            "CMAKE_HIP_ARCHITECTURES",
        ),
    )
}


def configure_options(recipe: Recipe, architectures: str, flags: Sequence[str]) -> tuple[str, ...]:
    """Return the CMake options to build one pack.

    `architectures`: cards to build for, in CMake's form, such as "75;90"; empty: ggml's default, most cards in use.
    `flags`: additional flags for the C++ compiler.
    """
    options = [*_MODULE, *recipe.options]
    if architectures:
        options.append(f"-D{recipe.architectures}={architectures}")
    if flags:
        options.append(f"-DCMAKE_CXX_FLAGS={' '.join(flags)}")
    return tuple(options)
