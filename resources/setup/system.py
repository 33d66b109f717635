"""Checks the system before anything is built: installs missing packages, or names all that is missing at once."""

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
"""Libraries that Qt needs, searched for on systems without Debian's packages."""


def require_system(*, tests: bool, backend: str) -> None:
    """Install the missing system packages.

    Raises:
        SetupError: something is missing that cannot be installed from here.
    """
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
    """Check the requirements that no Debian package provides.

    Raises:
        SetupError: one is missing.
    """
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
    """Print libraries and programs that seem to be missing, on systems whose package names we do not know."""
    missing = [f"lib{name}" for name in QT_LIBRARIES if ctypes.util.find_library(name) is None]
    missing += [name for name in ("Xvfb", "xdotool", "openbox") if tests and shutil.which(name) is None]
    if missing:
        say(f"Not found: {', '.join(missing)}. The window or its tests need them; install them if it does not start.")
