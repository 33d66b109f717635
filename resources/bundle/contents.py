"""Contents of the bundle: equal libraries are replaced by links, and a table lists the parts by size."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

MODELS = "models"
"""Folder of the bundle for the demo model."""
WHY = {
    "PySide6": "the window: Qt's core, widgets, pictures, platforms",
    "numpy": "graphs of memory, weights of the demo model",
    "numpy.libs": "OpenBLAS, which numpy is linked with",
    "llama_cpp": "the engine: llama.cpp and its CPU and RPC backends",
    "python": "Python and its standard library",
    "cryptography": "access tokens in the desktop's key ring, TLS to workers, signatures of packs",
    "PIL": "images that are attached",
    "pillow.libs": "kinds of images",
    "docs": "the handbook with its pictures",
    "re2": "patterns of tensors from other people's files",
    "yaml": "settings in the cards of models",
    "zeroconf": "workers that announce themselves on the local network",
    "system libraries": "X11, Wayland, fonts, SSL: as far as something above needs them",
    "ziamath": "formulas in answers",
    "ziafont": "fonts of formulas",
    "pyqtgraph": "graphs of memory",
    "program": "Layerdeck itself, and what is pure Python",
}
"""Purpose of each part, by its row in the table. Others are small libraries that one of these needs."""
SMALL_BYTES = 500_000
"""Parts smaller than this share one row."""


def files_in(folder: Path) -> Iterator[Path]:
    """Yield the regular files below `folder`, without symbolic links."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            yield path


def program_files(folder: Path) -> Iterator[Path]:
    """Yield the regular files of the bundle at `folder`, without the demo model, which does not count in its size."""
    return (path for path in files_in(folder) if path.relative_to(folder).parts[0] != MODELS)


def link_copies(folder: Path) -> int:
    """Replace each library that equals another one in its folder by a link to it; return the saved bytes."""
    kept: dict[tuple[Path, str], Path] = {}
    saved_bytes = 0
    # The longest name is the one with the whole version: the links lead to it, as a package would have them.
    for path in sorted(files_in(folder), key=lambda each: (each.parent, -len(each.name), each.name)):
        if ".so" not in path.name:
            continue
        key = (path.parent, hashlib.sha256(path.read_bytes()).hexdigest())
        if key not in kept:
            kept[key] = path
            continue
        saved_bytes += path.stat().st_size
        path.unlink()
        path.symlink_to(kept[key].name)
    return saved_bytes


def size_table(folder: Path) -> str:
    """Return a Markdown table of the parts of the bundle at `folder` without the demo model, the largest first."""
    sizes: dict[str, int] = defaultdict(int)
    for path in program_files(folder):
        sizes[_row(path.relative_to(folder))] += path.stat().st_size
    total_bytes = sum(sizes.values())
    small_bytes = sum(size for name, size in sizes.items() if size < SMALL_BYTES)
    rows = [(name, size) for name, size in sizes.items() if size >= SMALL_BYTES]
    lines = ["| part | MB | why |", "|---|---|---|"]
    for name, size in sorted(rows, key=lambda row: -row[1]):
        lines.append(f"| {name} | {size / 1e6:.1f} | {WHY.get(name, 'needed by one of the above')} |")
    lines.append(f"| everything under {SMALL_BYTES / 1e6} MB | {small_bytes / 1e6:.1f} | |")
    lines.append(f"| **all** | **{total_bytes / 1e6:.1f}** | |")
    return "\n".join(lines) + "\n"


def _row(path: Path) -> str:
    match path.parts:
        case ("_internal", name) if name.startswith("libpython") or name == "base_library.zip":
            return "python"
        case ("_internal", "python3.11" | "python3.12" | "python3.13", *_):
            return "python"
        case ("_internal", name) if ".so" in name:
            return "system libraries"
        case ("_internal", name, *_):
            return name.partition("-")[0] if name.endswith(".dist-info") else name
        case _:
            return "program"
