"""The Linux control groups that limit this process, in version 1 and 2 of the interface."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
"""Lists the groups of this process."""


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """The folder of a control group. `version` (1 or 2) decides the names of its files."""

    version: int
    folder: Path

    def text(self, name: str) -> str:
        """Return the text of a control file, empty if there is none."""
        return _text(self.folder / name)

    def number(self, name: str) -> int | None:
        """Return the number in a control file; None if there is none or if it says "no limit" (`max`, -1)."""
        text = self.text(name).strip()
        return int(text) if text.isdecimal() else None


def control_groups(controller: str, root: Path = ROOT, own: Path = OWN) -> Iterator[ControlGroup]:
    """Yield the groups that may limit `controller` ("memory", "cpu"), from our own up to the root.

    Inside a container our own path may be that of the outer machine. Then only the visible root group counts.
    """
    for line in _text(own).splitlines():
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


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
