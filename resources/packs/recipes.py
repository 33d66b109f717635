"""What CMake is told for each backend that can be a pack, and what a computer needs to build and to use it."""

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
"""The engine that packs are for: CPU (one library for each kind of processor from SSE4.2 on) and RPC, loaded when it
runs."""
LEFT_OUT = ("ggml-cpu-sapphirerapids", "ggml-cpu-cannonlake", "ggml-cpu-cooperlake")
"""Parts of that build that are not shipped. With AMX, llama.cpp dies (`resources/setup/compiler_flags.py`: where). The
others are for one notebook's processor and for servers of four sockets; the library before theirs serves them."""
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
    """`backend` as people call it; `words`: what a computer needs to use the pack; `architectures`: CMake's name of
    the cards that it is built for, empty where it is the same for all."""

    name: str
    backend: str
    options: tuple[str, ...]
    words: str
    architectures: str = ""

    @property
    def target(self) -> str:
        """CMake's name for it."""
        return f"ggml-{self.name}"

    @property
    def library(self) -> str:
        """The file that is built."""
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
    """Return what CMake is told to build one pack; `architectures` are CMake's, such as "75;90" (empty: ggml's choice,
    which is most of those that are in use), `flags` more for the C++ compiler."""
    options = [*_MODULE, *recipe.options]
    if architectures:
        options.append(f"-D{recipe.architectures}={architectures}")
    if flags:
        options.append(f"-DCMAKE_CXX_FLAGS={' '.join(flags)}")
    return tuple(options)
