"""Read-only folders for tests that run as any user; mode bits would not stop root."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_MOUNT = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
_NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]
_AS_ROOT = ["unshare", "--mount"]


def within_read_only(folder: Path, *command: str | Path) -> list[str]:
    """Return a command that runs `command` with `folder` mounted read-only.

    The test is skipped if the system does not allow such a mount.
    """
    if sys.platform != "linux":
        pytest.skip("only Linux has mounts of one process")
    prefix = [*(_AS_ROOT if os.geteuid() == 0 else _NAMESPACE), "sh", "-c", _MOUNT, str(folder)]
    tried = subprocess.run([*prefix, "true"], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip("this system lets no process mount a folder read-only")
    return [*prefix, *map(str, command)]
