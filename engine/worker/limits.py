"""What this process may take: a cap on its memory."""

from __future__ import annotations

import sys
from pathlib import Path


def data_bytes() -> int:
    """Return VmData, what RLIMIT_DATA counts; 0 where the system does not tell."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    line = next((line for line in status.splitlines() if line.startswith("VmData:")), "VmData: 0 kB")
    return int(line.split()[1]) * 1024


def limit_data(limit_bytes: int) -> bool:
    """Have the system refuse private memory beyond `limit_bytes`, for good; False where it cannot."""
    if not sys.platform.startswith("linux"):
        return False
    import resource

    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    return True
