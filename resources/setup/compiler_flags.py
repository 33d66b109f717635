"""Flags for the compilers of the engine: what they are not to use, and what they are given besides the user's own."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Sequence

from resources.setup.machine import find_compiler
from resources.setup.steps import output_of
from resources.vulkan import needs as vulkan

FLAG_VARIABLES = {"CC": ("CFLAGS", "CMAKE_C_FLAGS"), "CXX": ("CXXFLAGS", "CMAKE_CXX_FLAGS")}
"""Where the flags of a language's compiler stand in the environment, and what CMake calls them."""


def amx_switches(flags: str) -> tuple[str, ...]:
    """Return the compiler's switches that leave out AMX, the matrix unit of newer Xeons, where `flags` have it.

    llama.cpp compiled with it loads a model and then dies at `ldtilecfg` in ggml_backend_amx_mul_mat
    (llama.cpp#20824, seen with GCC 12); without it the same model answers, and takes no second copy of its weights.
    """
    return tuple(f"-mno-{flag.replace('_', '-')}" for flag in flags.split() if flag.startswith("amx_"))


def accepted_switches(compiler: str | None, switches: Iterable[str]) -> list[str]:
    """Return those of `switches` that `compiler` knows. One that it does not know stands for nothing it could use."""
    command = [*shlex.split(compiler or ""), "-E", "-x", "c", os.devnull]
    return [switch for switch in switches if compiler and output_of([*command, switch]) is not None]


def add_compiler_flags(options: Sequence[str], name: str, flags: Sequence[str], inherited: str) -> tuple[str, ...]:
    """Return CMake `options` in which the variable `name` begins with `flags`: the user's own come last and win.

    Theirs are in the last of `options` that sets `name`, else they are the `inherited` ones of the environment, which
    CMake would not look at any more.
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
    """Return CMake `options` with the `switches` that the C and the C++ compiler know, for those two."""
    for compiler, (variable, name) in FLAG_VARIABLES.items():
        accepted = accepted_switches(find_compiler(compiler), switches)
        options = add_compiler_flags(options, name, accepted, os.environ.get(variable, ""))
    return options


def declare_layer_settings(options: tuple[str, ...]) -> tuple[str, ...]:
    """Return CMake `options` with what older Vulkan headers do not declare; a wheel's key does not depend on it."""
    if not vulkan.lacks_layer_settings(vulkan.look(os.environ)):
        return options
    flags = ["-include", shlex.quote(str(vulkan.LAYER_SETTINGS))]
    return add_compiler_flags(options, "CMAKE_CXX_FLAGS", flags, os.environ.get("CXXFLAGS", ""))
