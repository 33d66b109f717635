"""The Linux control groups (versions 1 and 2) that limit this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
"""File that lists the control groups of this process."""


class ControlGroup(Struct, frozen=True):
    """A Linux control group, whose limits are in control files.

    `version`: 1 or 2; the names of the control files depend on it. `folder`: folder of the group in /sys/fs/cgroup.
    """

    version: int
    folder: Path

    def text(self, name: str) -> str:
        """Return the text of a control file; empty if the file does not exist."""
        return kernel_text(self.folder / name)

    def number(self, name: str) -> int | None:
        """Return the number in a control file; None if the file does not exist or means "no limit" (`max`, -1)."""
        text = self.text(name)
        return int(text) if text.isdecimal() else None


def control_groups(controller: str, root: Path = ROOT, own: Path = OWN) -> Iterator[ControlGroup]:
    """Yield the control groups that may limit `controller` ("memory", "cpu"), from this process's group up to the root.

    Inside a container `own` may list a path of the host, which is not visible. Then only the root group is used.
    `root`: folder of the control groups. `own`: file that lists the groups of this process.
    """
    for line in kernel_text(own).splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            # A system with both versions has the second one under "unified".
            for top in (root, root / "unified"):
                yield from (ControlGroup(2, folder) for folder in _folders_up(top, path))
        elif controller in controllers.split(","):
            yield from (ControlGroup(1, folder) for folder in _folders_up(root / controller, path))


def _folders_up(top: Path, path: str) -> list[Path]:
    top = top.resolve()
    own = (top / path.lstrip("/")).resolve()
    return [folder for folder in (own, *own.parents) if folder.is_relative_to(top)] or [top]


def kernel_text(path: Path) -> str:
    """Return the text of a file of the kernel (in /proc or /sys) without surrounding space; empty: it is not there."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
