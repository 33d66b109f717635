"""Compiler flags for the engine: without AMX, and with declarations that old Vulkan headers lack."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Sequence

from resources.setup.machine import find_compiler
from resources.setup.steps import output_of
from resources.vulkan import needs as vulkan

FLAG_VARIABLES = {"CC": ("CFLAGS", "CMAKE_C_FLAGS"), "CXX": ("CXXFLAGS", "CMAKE_CXX_FLAGS")}
"""For each compiler variable the environment variable with its flags, and CMake's variable for them."""


def amx_switches(flags: str) -> tuple[str, ...]:
    """Return the compiler switches that disable AMX, the matrix unit of newer Xeons; none if the CPU lacks it.

    `flags`: instruction sets of the CPU. llama.cpp compiled with AMX loads a model and then crashes at `ldtilecfg` in
    ggml_backend_amx_mul_mat (llama.cpp#20824, seen with GCC 12). Without it the same model answers, and its weights are
    not copied a second time.
    """
    return tuple(f"-mno-{flag.replace('_', '-')}" for flag in flags.split() if flag.startswith("amx_"))


def accepted_switches(compiler: str | None, switches: Iterable[str]) -> list[str]:
    """Return the `switches` that `compiler` accepts. A compiler that rejects a switch does not use its feature."""
    command = [*shlex.split(compiler or ""), "-E", "-x", "c", os.devnull]
    return [switch for switch in switches if compiler and output_of([*command, switch]) is not None]


def add_compiler_flags(options: Sequence[str], name: str, flags: Sequence[str], inherited: str) -> tuple[str, ...]:
    """Return CMake options in which `flags` come first in the variable `name`.

    The user's own flags come after them, and so take precedence. They are in the last of `options` that sets `name`, or
    else in `inherited`, the flags of the environment. CMake ignores the latter once the variable is set, so they are
    added here.
    """
    if not flags:
        return tuple(options)
    own, others = inherited, []
    for option in re.sub(r"(^|\0)-D\0", r"\1-D", "\0".join(options)).split("\0"):
        if match := re.fullmatch(rf"-D{name}(?::\w+)?=(.*)", option, re.DOTALL):
            own = match.group(1)
        else:
            others.append(option)
    return (*others, f"-D{name}={' '.join([*flags, own]).strip()}")


def leave_out(switches: Sequence[str], options: tuple[str, ...]) -> tuple[str, ...]:
    """Return CMake options with the `switches` that the C compiler and the C++ compiler accept."""
    for compiler, (variable, name) in FLAG_VARIABLES.items():
        accepted = accepted_switches(find_compiler(compiler), switches)
        options = add_compiler_flags(options, name, accepted, os.environ.get(variable, ""))
    return options


def declare_layer_settings(options: tuple[str, ...]) -> tuple[str, ...]:
    """Return CMake options that include the declarations which older Vulkan headers lack.

    The key of the build does not depend on them.
    """
    if not vulkan.lacks_layer_settings(vulkan.look(os.environ)):
        return options
    flags = ["-include", shlex.quote(str(vulkan.LAYER_SETTINGS))]
    return add_compiler_flags(options, "CMAKE_CXX_FLAGS", flags, os.environ.get("CXXFLAGS", ""))
