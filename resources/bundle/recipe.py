"""Contents of the bundle: our modules, the files that they read, and data files of the libraries.

PyInstaller's specification (`layerdeck.spec`) uses these lists. The everyday tests compare them with the source tree
and with the installed packages, so that a missing entry is found without a build.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from resources.packs.recipes import LEFT_OUT

OWN_PACKAGES = ("app", "engine", "widgets")
"""Packages of which every module is bundled. PyInstaller would miss modules that are named only in strings."""
READ_RESOURCES = "resources/loader.py"
"""The only module of `resources` that the program uses at run time."""
BUILD_FOLDERS = ("bundle", "desktop", "macos", "packs", "setup", "vulkan", "windows")
"""Folders of `resources` that are used only to build and package the program."""
LIBRARY_DATA = ("latex2mathml", "ziafont", "ziamath")
"""Packages whose data files are read at run time: symbols and fonts of formulas."""
HOOKED_DATA = ("certifi", "numpy", "pyqtgraph", "PySide6", "shiboken6")
"""Packages whose data files PyInstaller's own hooks collect."""
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
"""Packages with data files that the program does not read, and what these files are."""
METADATA = ("layerdeck", "llama_cpp_python", "PySide6_Essentials")
"""Distributions whose version is read at run time, so that their metadata is bundled."""

OF_THE_SYSTEM = ("libgcc_s", "libstdc++", "libX11", "libX11-xcb", "libdbus-1", "libmvec")
"""Libraries that are not bundled; the system's are used.

Graphics drivers of the system are loaded into our processes and use these libraries too. On a newer system the drivers
need newer versions, but a bundled library would be found first, and the drivers would not load. PyInstaller leaves out
the libraries of OpenGL, DRM, XCB and Wayland for the same reason. libdbus must fit the system's bus. libmvec is a part
of the C library, and must have its version.
"""


def is_of_the_system(name: str) -> bool:
    """Return whether the library `name` is one of `OF_THE_SYSTEM`."""
    return name.partition(".so")[0] in OF_THE_SYSTEM


def is_library(path: Path) -> bool:
    """Return whether a file name is that of a shared library, on any system."""
    return ".so" in path.name or path.suffix in (".dylib", ".dll")


def engine_libraries(folder: Path) -> list[Path]:
    """Return llama.cpp's libraries in `folder` that are bundled."""
    libraries = (path for path in sorted(folder.iterdir()) if is_library(path))
    return [path for path in libraries if path.name.removeprefix("lib").partition(".")[0] not in LEFT_OUT]


def own_modules(root: Path) -> list[str]:
    """Return the names of all our modules below the repository's `root`, also of those that run as programs."""
    files = [path for package in OWN_PACKAGES for path in (root / package).rglob("*.py")]
    return sorted(_module(path.relative_to(root)) for path in [*files, root / READ_RESOURCES])


def data_files(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield each data file that our modules read, with its folder in the bundle."""
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
    """Yield the files below `folder` that are not code."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix not in (".py", ".pyc") and "__pycache__" not in path.parts:
            yield path


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
