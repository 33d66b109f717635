"""Compiler flags of the engine, and the instruction sets of a CPU."""

from __future__ import annotations

import os
import platform
import re
import sys
from pathlib import Path

import pytest

from resources.setup.compiler_flags import (
    accepted_switches,
    add_compiler_flags,
    amx_switches,
    declare_layer_settings,
    leave_out,
)
from resources.setup.machine import find_compiler, parse_cpu_flags
from resources.setup.steps import output_of

NO_AMX = ("-mno-amx-bf16", "-mno-amx-int8", "-mno-amx-tile")


def test_amx_of_the_cpu_is_left_out() -> None:
    cpuinfo = "flags : avx2 amx_bf16 avx512_vnni amx_tile amx_int8\n"
    assert amx_switches(parse_cpu_flags(cpuinfo)) == NO_AMX
    assert amx_switches("avx2 avx512_vnni") == ()
    assert amx_switches("Apple M2") == ()


@pytest.mark.parametrize(
    ("options", "inherited", "expected"),
    [
        (["-DGGML_RPC=ON"], "", ["-DGGML_RPC=ON", "-DCMAKE_C_FLAGS=-mno-x -mno-y"]),
        (["-DGGML_RPC=ON"], "-O2 -g", ["-DGGML_RPC=ON", "-DCMAKE_C_FLAGS=-mno-x -mno-y -O2 -g"]),
        (["-DCMAKE_C_FLAGS=-O3 -mx", "-DB=1"], "-O2", ["-DB=1", "-DCMAKE_C_FLAGS=-mno-x -mno-y -O3 -mx"]),
        (["-DCMAKE_C_FLAGS:STRING=-O3"], "", ["-DCMAKE_C_FLAGS=-mno-x -mno-y -O3"]),
        (["-D", "CMAKE_C_FLAGS=-O1", "-DCMAKE_C_FLAGS=-O3"], "", ["-DCMAKE_C_FLAGS=-mno-x -mno-y -O3"]),
        (["-DCMAKE_CXX_FLAGS=-O3"], "", ["-DCMAKE_CXX_FLAGS=-O3", "-DCMAKE_C_FLAGS=-mno-x -mno-y"]),
    ],
)
def test_flags_come_before_those_of_the_user(options: list[str], inherited: str, expected: list[str]) -> None:
    assert add_compiler_flags(options, "CMAKE_C_FLAGS", ["-mno-x", "-mno-y"], inherited) == tuple(expected)


def test_without_flags_to_add_the_options_stay_as_they_are() -> None:
    options = ("-D", "CMAKE_C_FLAGS=-O1")
    assert add_compiler_flags(options, "CMAKE_C_FLAGS", [], "-O2") == options
    assert leave_out((), options) == options


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="switches of compilers for x86")
def test_only_switches_that_the_compiler_knows_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CFLAGS", raising=False)
    monkeypatch.setenv("CXXFLAGS", "-O2")
    assert leave_out(["-mno-avx512f", "-mno-such-unit"], ("-DGGML_RPC=ON",)) == (
        "-DGGML_RPC=ON",
        "-DCMAKE_C_FLAGS=-mno-avx512f",
        "-DCMAKE_CXX_FLAGS=-mno-avx512f -O2",
    )
    assert accepted_switches(None, NO_AMX) == []


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="switches of compilers for x86")
@pytest.mark.parametrize("after", [[], ["-march=sapphirerapids"]], ids=["architecture first", "architecture last"])
def test_what_is_left_out_stays_out_whatever_else_the_compiler_is_told(after: list[str]) -> None:
    compiler = find_compiler("CC")
    switches = accepted_switches(compiler, [*NO_AMX, "-mno-avx512vnni"])
    before = [] if after else ["-march=sapphirerapids"]
    macros = output_of([str(compiler), *before, *switches, *after, "-dM", "-E", "-x", "c", os.devnull])
    assert macros is not None
    assert "__AVX512F__" in macros
    assert not re.search("__AMX|__AVX512VNNI__", macros)


def test_cpu_flags_do_not_depend_on_their_order() -> None:
    assert parse_cpu_flags("model name : X\nflags\t\t: sse avx2\n\nflags : none\n") == "avx2 sse"
    assert parse_cpu_flags("Features : fp asimd\n") == "asimd fp"
    assert parse_cpu_flags("") == ""


def _make_headers(folder: Path, version: int) -> None:
    headers = folder / "include" / "vulkan"
    headers.mkdir(parents=True, exist_ok=True)
    (headers / "vulkan.hpp").touch()
    (headers / "vulkan_core.h").write_text(f"// core\n#define VK_HEADER_VERSION {version}\n", encoding="utf-8")


@pytest.mark.parametrize(("headers", "given"), [(239, True), (272, False)])
def test_older_vulkan_headers_get_what_they_lack(
    headers: int, given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _make_headers(tmp_path, headers)
    monkeypatch.setenv("VULKAN_SDK", str(tmp_path))
    monkeypatch.delenv("CXXFLAGS", raising=False)
    options = declare_layer_settings(("-DGGML_VULKAN=ON", "-DCMAKE_CXX_FLAGS=-g"))
    added = [option for option in options if "layer_settings.h" in option]
    assert len(added) == given
    assert all(option.startswith("-DCMAKE_CXX_FLAGS=-include ") and option.endswith(" -g") for option in added)
