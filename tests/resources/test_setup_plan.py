"""The planned build of the engine: backend, CMake options, and which builds are interchangeable."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from resources.setup.build_plan import Build, build_options, choose_backend, pinned_version, plan_build
from resources.setup.compiler_flags import add_compiler_flags
from resources.setup.cuda import Cuda, parse_nvcc_version
from resources.setup.errors import SetupError
from resources.vulkan import needs as vulkan_needs
from tests.support.engine_builds import BUILD, MACHINE

CUDA = Cuda(nvcc="nvcc", version="12.4.131", capabilities=("8.6", "9.0"))


@pytest.mark.parametrize(
    ("requested", "system", "cuda", "chosen"),
    [
        ("auto", "linux", None, "cpu"),
        ("auto", "linux", CUDA, "cuda"),
        ("auto", "win32", CUDA, "cuda"),
        ("auto", "darwin", None, "metal"),
        ("cpu", "linux", CUDA, "cpu"),
        ("cpu", "darwin", None, "cpu"),
        ("vulkan", "linux", None, "vulkan"),
        ("hip", "linux", None, "hip"),
    ],
)
def test_backend_is_what_is_there_or_asked_for(requested: str, system: str, cuda: Cuda | None, chosen: str) -> None:
    assert choose_backend(requested, system, cuda) == chosen


@pytest.mark.parametrize(
    ("requested", "sentence"),
    [
        ("opencl", 'LAYERDECK_BACKEND is "opencl"; it may be auto, cpu'),
        ("cuda", "needs an NVIDIA driver with a card"),
        ("metal", "works on macOS only"),
    ],
)
def test_backend_that_cannot_be_is_refused(requested: str, sentence: str) -> None:
    with pytest.raises(SetupError, match=sentence) as caught:
        choose_backend(requested, "linux", None)
    assert caught.value.exit_code == 2


def test_options_always_have_rpc_and_end_with_the_users_own() -> None:
    assert build_options("cpu", "linux", "") == ("-DGGML_RPC=ON",)
    assert build_options("cuda", "linux", "-DGGML_CUDA_F16=ON -DX='a b'") == (
        "-DGGML_RPC=ON",
        "-DGGML_CUDA=ON",
        "-DCMAKE_CUDA_ARCHITECTURES=native",
        "-DGGML_CUDA_F16=ON",
        "-DX=a b",
    )
    assert build_options("vulkan", "linux", "") == ("-DGGML_RPC=ON", "-DGGML_VULKAN=ON")
    assert build_options("metal", "darwin", "") == ("-DGGML_RPC=ON", "-DGGML_METAL=ON")
    assert build_options("cpu", "darwin", "") == ("-DGGML_RPC=ON", "-DGGML_METAL=OFF")


@pytest.mark.skipif(sys.platform == "win32", reason="the compilers are looked for by their names on Unix")
def test_machine_with_amx_builds_without(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CFLAGS", "CXXFLAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("resources.setup.build_plan.instruction_sets", lambda: "amx_int8 amx_tile avx2")
    monkeypatch.setattr("resources.setup.compiler_flags.accepted_switches", lambda _, switches: list(switches))
    build, _ = plan_build("cpu", "-DCMAKE_CXX_FLAGS=-mamx-tile")
    flags = [option for option in build.options if "_FLAGS" in option]
    assert flags == [
        "-DCMAKE_C_FLAGS=-mno-amx-int8 -mno-amx-tile",
        "-DCMAKE_CXX_FLAGS=-mno-amx-int8 -mno-amx-tile -mamx-tile",
    ]
    monkeypatch.setattr("resources.setup.build_plan.instruction_sets", lambda: "avx2")
    assert plan_build("cpu", "")[0].options == build_options("cpu", sys.platform, "")


def test_wheel_with_amx_is_not_taken_for_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CFLAGS", raising=False)
    options = add_compiler_flags(BUILD.options, "CMAKE_C_FLAGS", ["-mno-amx-tile"], "")
    assert dataclasses.replace(BUILD, options=options).key != BUILD.key


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(BUILD, version="0.3.37"),
        dataclasses.replace(BUILD, backend="vulkan"),
        dataclasses.replace(BUILD, options=()),
        dataclasses.replace(BUILD, toolkit="12.4 for 8.6"),
        dataclasses.replace(BUILD, machine=dataclasses.replace(MACHINE, compiler="g++ 13.1.0")),
        dataclasses.replace(BUILD, machine=dataclasses.replace(MACHINE, cpu_flags="cd34")),
        dataclasses.replace(BUILD, machine=dataclasses.replace(MACHINE, libc="glibc-2.41")),
    ],
)
def test_wheel_is_shared_only_by_equal_builds(other: Build) -> None:
    assert dataclasses.replace(BUILD).key == BUILD.key
    assert other.key != BUILD.key


def test_key_is_a_readable_folder_name() -> None:
    assert BUILD.key.startswith("0.3.36-cpu-")
    assert set(BUILD.key) <= set("0123456789abcdefghijklmnopqrstuvwxyz.-")


def test_pinned_version_is_read_and_required() -> None:
    assert pinned_version("llama-cpp-python", '  "llama-cpp-python==0.3.36",') == "0.3.36"
    with pytest.raises(SetupError, match=r"does not pin gguf with =="):
        pinned_version("gguf", '"gguf>=0.19"')


def test_nvcc_version_is_found() -> None:
    text = "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release 12.4, V12.4.131\n"
    assert parse_nvcc_version(text) == "12.4.131"


def test_vulkan_is_looked_for_before_anything_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vulkan_needs, "SYSTEM_FOLDERS", {sys.platform: (str(tmp_path),)})
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("VULKAN_SDK", raising=False)
    with pytest.raises(SetupError) as caught:
        plan_build("vulkan", "")
    assert "\n" not in str(caught.value)
    assert "glslc libvulkan-dev spirv-headers" in str(caught.value)
