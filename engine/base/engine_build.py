"""The versions of Layerdeck and of the installed engine (llama-cpp-python), and a digest of the engine's build."""

from __future__ import annotations

import hashlib
from functools import cache


@cache
def own_version() -> str:
    """Return the version of the installed package `layerdeck`; "not installed" if there is none."""
    from importlib import metadata

    try:
        return metadata.version("layerdeck")
    except metadata.PackageNotFoundError:
        return "not installed"


def engine_version() -> str:
    """Return the name and version of the engine that children run."""
    from importlib import metadata  # brings the parser of mails along

    return f"llama-cpp-python {metadata.version('llama_cpp_python')}"


@cache
def engine_build() -> str:
    """Return the engine's version with a digest of its library files. Builds with different flags have different
    digests.
    """
    from importlib import metadata

    # RECORD holds a hash of each installed file, so the libraries need not be read.
    record = metadata.distribution("llama_cpp_python").read_text("RECORD") or ""
    libraries = sorted(line for line in record.splitlines() if "/lib/" in line)
    return f"{engine_version()} {hashlib.sha256(chr(10).join(libraries).encode()).hexdigest()[:12]}"
