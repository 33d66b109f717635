"""Which engine is installed: its version, and a digest that tells one build of it from another."""

from __future__ import annotations

import hashlib
from functools import cache


def engine_version() -> str:
    """Return name and version of the engine that children run."""
    from importlib import metadata  # brings the parser of mails along

    return f"llama-cpp-python {metadata.version('llama_cpp_python')}"


@cache
def engine_build() -> str:
    """Return the engine's version and a digest of what was installed: one built anew with other flags is another."""
    from importlib import metadata

    record = metadata.distribution("llama_cpp_python").read_text("RECORD") or ""
    libraries = sorted(line for line in record.splitlines() if "/lib/" in line)
    return f"{engine_version()} {hashlib.sha256(chr(10).join(libraries).encode()).hexdigest()[:12]}"
