"""What the system has to have before anything is built: installed, or all that is missing is named at once."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import shutil
import sys

from resources.setup import machine
from resources.setup.debian import has_debian_packages, require_packages, wanted_packages
from resources.setup.errors import SetupError
from resources.setup.missing import find_missing, sentence
from resources.setup.places import ROOT
from resources.setup.steps import say
from resources.setup.uv import find_uv
from resources.vulkan import needs as vulkan

QT_LIBRARIES = ("EGL", "GL", "xkbcommon", "xkbcommon-x11", "xcb-cursor", "xcb-icccm", "xcb-image", "xcb-keysyms")
"""Names to look for where there is no Debian package database."""


def require_system(*, tests: bool, backend: str) -> None:
    """Install or name the system packages that are missing."""
    has_compiler = machine.has_compiler(sys.platform)
    has_venv = importlib.util.find_spec("ensurepip") is not None or find_uv() is not None
    if backend == "vulkan" and (fault := vulkan.find_old_headers(vulkan.look(os.environ))):
        raise SetupError(fault)
    refuse_missing(backend, has_compiler=has_compiler, has_venv=has_venv)
    if has_debian_packages():
        require_packages(wanted_packages(tests=tests, backend=backend, has_compiler=has_compiler, has_venv=has_venv))
        return
    if sys.platform == "linux":
        name_missing_libraries(tests=tests)


def refuse_missing(backend: str, *, has_compiler: bool, has_venv: bool) -> None:
    """End before anything is built where something is missing that no package of Debian's would bring."""
    on_debian = has_debian_packages()
    missing = find_missing(
        sys.platform,
        backend,
        has_compiler=has_compiler or on_debian,
        has_venv=has_venv or on_debian,
        free_bytes=shutil.disk_usage(ROOT).free,
    )
    if missing:
        raise SetupError(sentence(missing))


def name_missing_libraries(*, tests: bool) -> None:
    """Say which libraries or programs seem to be missing where we do not know the package names."""
    missing = [f"lib{name}" for name in QT_LIBRARIES if ctypes.util.find_library(name) is None]
    missing += [name for name in ("Xvfb", "xdotool", "openbox") if tests and shutil.which(name) is None]
    if missing:
        say(f"Not found: {', '.join(missing)}. The window or its tests need them; install them if it does not start.")
