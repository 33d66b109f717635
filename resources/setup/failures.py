"""Finds cause and remedy of a failed build of the engine in its log."""

from __future__ import annotations

import re
import sys

from resources.setup.missing import compiler_remedy

FAILURES = (
    (r"No space left on device", "the disk is full", "free about 1 GB and start again"),
    (
        r"internal compiler error: Killed|Killed signal terminated program|virtual memory exhausted|out of memory",
        "the compiler ran out of memory",
        "close other programs, or build one file at a time: CMAKE_BUILD_PARALLEL_LEVEL=1 python3 make.py setup",
    ),
    (
        r"Temporary failure in name resolution|Network is unreachable|Failed to establish a new connection"
        r"|No matching distribution found|Could not find a version that satisfies|ConnectTimeout|CERTIFICATE_VERIFY",
        "something could not be downloaded",
        "look at the network (behind a proxy set HTTPS_PROXY) and start again",
    ),
    (
        r"unsupported GNU version",
        "this CUDA toolkit does not know so new a compiler",
        "install an older g++ and name it: CUDAHOSTCXX=g++-12 python3 make.py setup",
    ),
    (
        r"Unsupported gpu architecture",
        "this CUDA toolkit does not know this card",
        "install a newer toolkit, or use LAYERDECK_BACKEND=cpu",
    ),
    (
        r"Could NOT find Vulkan|glslc: not found|SPIRV-HeadersConfig\.cmake",
        "parts of Vulkan are missing",
        "install its headers, glslc and the SPIR-V headers, or use LAYERDECK_BACKEND=cpu",
    ),
    (
        r"hip-config\.cmake|Could NOT find HIP|provided by \"hip",
        "ROCm is missing or incomplete",
        "install it with its development files, or use LAYERDECK_BACKEND=cpu",
    ),
    (
        r"No CMAKE_C(?:XX)?_COMPILER could be found|is not able to compile a simple test program",
        "the compiler does not work",
        f"{compiler_remedy(sys.platform)} (or look at what CC and CXX name), and start again",
    ),
    (
        r"unrecognized command[- ]line option|The compiler feature \"cxx_std_17\"",
        "the compiler is too old",
        "install g++ 9 or later, or name a newer one: CC=gcc-12 CXX=g++-12 python3 make.py setup",
    ),
    (r"Permission denied", "a file or folder cannot be written", "give this user the right to, and start again"),
)
"""Text in the log, cause and remedy. The first entry whose text is found is used."""
UNKNOWN = ("the log says why", "start again; if it ends the same, LAYERDECK_BACKEND=cpu needs the least")


def explain(log: str, unknown: tuple[str, str] = UNKNOWN) -> tuple[str, str]:
    """Return cause and remedy of a failed build with this log; `unknown` if no known text is found."""
    for pattern, cause, remedy in FAILURES:
        if re.search(pattern, log):
            return cause, remedy
    return unknown
