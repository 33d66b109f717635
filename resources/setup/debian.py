"""Packages of the system, by Debian's names: installed where we are root, else named in one line to copy."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence

from resources.setup.build_log import TAIL_LINES
from resources.setup.errors import SetupError
from resources.setup.steps import output_of, say
from resources.vulkan import needs as vulkan

QT_PACKAGES = (
    "fonts-dejavu-core",
    "libdbus-1-3",
    "libegl1",
    "libfontconfig1",
    "libfreetype6",
    "libgl1",
    "libglib2.0-0",
    "libgssapi-krb5-2",
    "libopengl0",
    "libwayland-client0",
    "libwayland-cursor0",
    "libwayland-egl1",
    "libx11-xcb1",
    "libxcb-cursor0",
    "libxcb-icccm4",
    "libxcb-image0",
    "libxcb-keysyms1",
    "libxcb-randr0",
    "libxcb-render-util0",
    "libxcb-shape0",
    "libxcb-shm0",
    "libxcb-sync1",
    "libxcb-util1",
    "libxcb-xfixes0",
    "libxcb-xkb1",
    "libxkbcommon-x11-0",
    "libxkbcommon0",
)
"""What the libraries and the xcb platform plugin in PySide6-Essentials link to and do not bring along."""
TEST_PACKAGES = ("openbox", "xdotool", "xvfb")
"""End-to-end tests drive the real window by mouse in an X server of their own."""
BUNDLE_PACKAGES = (
    "appstream",
    "binutils",
    "desktop-file-utils",
    "dpkg-dev",
    "libglib2.0-bin",
    "lintian",
    "shared-mime-info",
    "xdg-utils",
)
"""What the application is made with and checked by, on Debian."""
VULKAN_TEST_DRIVER = "mesa-vulkan-drivers"
"""Has llvmpipe, a Vulkan device that needs no card."""


def has_debian_packages() -> bool:
    """Say whether packages can be looked up and installed by Debian's names."""
    return sys.platform == "linux" and bool(shutil.which("dpkg-query") and shutil.which("apt-get"))


def wanted_packages(*, tests: bool, backend: str, has_compiler: bool, has_venv: bool) -> list[str]:
    """Return the Debian packages that this set-up needs."""
    wanted = [*QT_PACKAGES, *(vulkan.look(os.environ).packages if backend == "vulkan" else ())]
    wanted += TEST_PACKAGES if tests else ()
    wanted += [] if has_compiler else ["g++"]
    wanted += [] if has_venv else ["python3-venv"]
    return wanted


def missing_packages(wanted: Iterable[str], installed: str) -> list[str]:
    """Return those of `wanted` that dpkg's list does not have, a line of it being "status|package|provides".

    Newer Debian releases renamed some of them (libglib2.0-0t64), and provide the old name.
    """
    present: set[str] = set()
    for line in installed.splitlines():
        status, _, names = line.partition("|")
        if status.strip().endswith("i"):
            present.update(re.findall(r"(?:^|[|,])\s*([a-z0-9][a-z0-9+.-]*)", names))
    return sorted(set(wanted) - present)


def require_packages(wanted: Iterable[str]) -> None:
    """Install those Debian packages of `wanted` that are missing, or name them."""
    listed = output_of(["dpkg-query", "-W", "-f", "${db:Status-Abbrev}|${Package}|${Provides}\n"]) or ""
    if missing := missing_packages(wanted, listed):
        install_packages(missing)


def install_packages(packages: Sequence[str]) -> None:
    """Install with apt-get where we are root, else end with the one line to copy."""
    command = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    if os.geteuid() != 0:
        line = f"sudo apt-get update && sudo {shlex.join(command)}"
        raise SetupError(f"System packages are missing; install them and start again:\n  {line}")
    say(f"Installing system packages: {' '.join(packages)}")
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for step in (["apt-get", "update", "-qq"], command):
        done = subprocess.run(
            step, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        if done.returncode != 0:
            tail = done.stdout.decode(errors="replace").splitlines()[-TAIL_LINES:]
            raise SetupError(
                "\n".join([*tail, f"{shlex.join(step)} failed (exit code {done.returncode})."]), exit_code=1
            )
