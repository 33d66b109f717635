"""What goes into the bundle: modules of ours, files that they read, and files of the libraries that they use.

The recipe for PyInstaller (`layerdeck.spec`) takes it from here; the ordinary tests hold it against the tree and what
is installed, so that what is missing is seen before anybody builds a bundle.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from resources.packs.recipes import LEFT_OUT

OWN_PACKAGES = ("app", "engine", "widgets")
"""All of these is in it: children and what is imported late are named in texts, which PyInstaller does not follow."""
READ_RESOURCES = "resources/loader.py"
"""The only module of `resources` that the program uses; the others make it."""
BUILD_FOLDERS = ("bundle", "desktop", "macos", "packs", "setup", "vulkan", "windows")
"""Folders of `resources` with what the program is made and packed with."""
LIBRARY_DATA = ("latex2mathml", "ziafont", "ziamath")
"""Packages whose data files are read: symbols and fonts of formulas."""
HOOKED_DATA = ("certifi", "numpy", "pyqtgraph", "PySide6", "shiboken6")
"""Packages for which PyInstaller has rules of its own."""
UNREAD_DATA = {
    "huggingface_hub": "templates of cards; it is here for tests",
    "jeepney": "an interface for its tests",
    "keyring": "completion in shells",
    "llama_cpp_python": "for those who build against it",
    "markdown_it_py": "where it was ported from",
    "markupsafe": "its source in C",
    "mdit_py_plugins": "where they were ported from",
    "pycparser": "what its own code was made from",
    "tqdm": "completion in shells",
    "urllib3": "for browsers",
}
"""Packages with data files that nothing here reads, and what they are."""
METADATA = ("layerdeck", "llama_cpp_python", "PySide6_Essentials")
"""Distributions that are asked for their version while the program runs."""

OF_THE_SYSTEM = ("libgcc_s", "libstdc++", "libX11", "libX11-xcb", "libdbus-1", "libmvec")
"""Libraries that are left to the system: its graphics drivers use them too, are loaded into our processes, and on a
newer system are built with newer ones. The bundle's would be found first, and the drivers not loaded. PyInstaller
leaves out those of OpenGL, DRM, XCB and Wayland for the same reason. D-Bus's goes with the system's own bus, and
libmvec is a part of the C library, which has to be of one version."""


def is_of_the_system(name: str) -> bool:
    """Say whether a library called `name` is one of `OF_THE_SYSTEM`."""
    return name.partition(".so")[0] in OF_THE_SYSTEM


def is_library(path: Path) -> bool:
    """Say whether a file is a shared library of some system."""
    return ".so" in path.name or path.suffix in (".dylib", ".dll")


def engine_libraries(folder: Path) -> list[Path]:
    """Return the engine's libraries in the `folder` that it keeps them in, without those that are not shipped."""
    libraries = (path for path in sorted(folder.iterdir()) if is_library(path))
    return [path for path in libraries if path.name.removeprefix("lib").partition(".")[0] not in LEFT_OUT]


def own_modules(root: Path) -> list[str]:
    """Return the names of all our modules below the repository's `root`, those that run as programs included."""
    files = [path for package in OWN_PACKAGES for path in (root / package).rglob("*.py")]
    return sorted(_module(path.relative_to(root)) for path in [*files, root / READ_RESOURCES])


def data_files(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield each file that our modules read, with the folder of the bundle that it goes to."""
    for package in (*OWN_PACKAGES, "resources"):
        for path in _others(root / package):
            folder = path.relative_to(root).parent
            # Pages beside packages are for developers.
            if path.suffix != ".md" and folder.parts[:2] not in [("resources", name) for name in BUILD_FOLDERS]:
                yield path, str(folder)
    # Where `resources.loader.handbook` looks: beside the folder of resources.
    for path in _others(root / "docs" / "handbook"):
        yield path, str(path.relative_to(root).parent)


def _others(folder: Path) -> Iterator[Path]:
    """Yield the files below `folder` that are no code."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix not in (".py", ".pyc") and "__pycache__" not in path.parts:
            yield path


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
