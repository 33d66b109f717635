"""The properties of this machine on which a built engine depends."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from resources.setup.steps import output_of

COMPILERS = {"CC": ("cc", "gcc", "clang"), "CXX": ("c++", "g++", "clang++")}


@dataclass(frozen=True)
class Machine:
    """Everything about a machine on which a built engine depends."""

    system: str
    architecture: str
    libc: str
    compiler: str
    cpu_flags: str


def find_machine() -> Machine:
    """Return the properties of this machine."""
    return Machine(
        system=sys.platform,
        architecture=platform.machine(),
        libc="-".join(platform.libc_ver()),
        compiler=compiler_version(),
        cpu_flags=cpu_digest(),
    )


def find_compiler(variable: str = "CXX") -> str | None:
    """Return the compiler that CMake will use; None if there is none. `variable`: "CXX" for C++, "CC" for C."""
    if variable in os.environ:
        return os.environ[variable]
    names = COMPILERS[variable][:: -1 if sys.platform == "darwin" else 1]
    return next((path for path in map(shutil.which, names) if path), None)


def find_visual_studio() -> str | None:
    """Return the folder of Visual Studio or its build tools with C++; None if there is none.

    `vswhere.exe` is asked, as CMake does. Its installer always puts it into the same folder.
    """
    folder = os.environ.get("PROGRAMFILES(X86)", "")
    asked = str(Path(folder, "Microsoft Visual Studio", "Installer", "vswhere.exe"))
    wanted = ["-latest", "-products", "*", "-requires", "Microsoft.VisualStudio.Component.VC.Tools.x86.x64"]
    return (output_of([asked, *wanted, "-property", "installationPath"]) or "").strip() or None


def has_compiler(system: str) -> bool:
    """Return whether this machine has a C++ compiler."""
    # On Windows CMake finds Visual Studio without the path.
    return find_compiler() is not None or (system == "win32" and find_visual_studio() is not None)


def compiler_version() -> str:
    """Return name and version of the C++ compiler; on Windows always "msvc"."""
    if sys.platform == "win32":
        return "msvc"
    compiler = find_compiler()
    text = output_of([*shlex.split(compiler), "--version"]) if compiler else None
    return text.splitlines()[0].strip() if text else "unknown"


def cpu_digest() -> str:
    """Return a digest of this CPU's instruction sets, since ggml is compiled for exactly this CPU."""
    if sys.platform == "darwin":
        text = output_of(["sysctl", "-n", "machdep.cpu.brand_string"]) or ""
    else:
        text = instruction_sets() if sys.platform == "linux" else platform.processor()
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def instruction_sets() -> str:
    """Return the instruction sets of this CPU, separated by spaces; empty on systems other than Linux."""
    if sys.platform != "linux":
        return ""
    return parse_cpu_flags(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))


def parse_cpu_flags(cpuinfo: str) -> str:
    """Return the instruction sets of the first CPU in the text of /proc/cpuinfo, sorted."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return " ".join(sorted(value.split()))
    return ""
