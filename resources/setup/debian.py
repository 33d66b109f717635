"""System packages by Debian's names: installed if we are root, otherwise the command is printed."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
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
"""Packages that the libraries and the xcb plugin of PySide6-Essentials need and do not contain."""
TEST_PACKAGES = ("openbox", "xdotool", "xvfb")
"""For the end-to-end tests, which drive the real window with a mouse on an X server of their own."""
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
"""Debian packages that build and check the bundle."""
LOCK_WAIT_S = 300.0
"""How long to wait for another package manager. A new system often installs its updates just after the first start."""
VULKAN_TEST_DRIVER = "mesa-vulkan-drivers"
"""Contains llvmpipe, a Vulkan device that needs no card."""


def has_debian_packages() -> bool:
    """Return whether this system has dpkg-query and apt-get."""
    return sys.platform == "linux" and bool(shutil.which("dpkg-query") and shutil.which("apt-get"))


def wanted_packages(*, tests: bool, backend: str, has_compiler: bool, has_venv: bool) -> list[str]:
    """Return the Debian packages that this set-up needs."""
    wanted = [*QT_PACKAGES, *(vulkan.look(os.environ).packages if backend == "vulkan" else ())]
    wanted += TEST_PACKAGES if tests else ()
    wanted += [] if has_compiler else ["g++"]
    wanted += [] if has_venv else ["python3-venv"]
    return wanted


def missing_packages(wanted: Iterable[str], installed: str) -> list[str]:
    """Return the `wanted` packages that are not installed.

    `installed`: output of dpkg-query, with lines "status|package|provides". Newer Debian releases renamed some packages
    (libglib2.0-0t64); they provide the old name.
    """
    present: set[str] = set()
    for line in installed.splitlines():
        status, _, names = line.partition("|")
        if status.strip().endswith("i"):
            present.update(re.findall(r"(?:^|[|,])\s*([a-z0-9][a-z0-9+.-]*)", names))
    return sorted(set(wanted) - present)


def require_packages(wanted: Iterable[str]) -> None:
    """Install those of `wanted` that are missing.

    Raises:
        SetupError: we are not root (the text has the command), or apt-get failed.
    """
    listed = output_of(["dpkg-query", "-W", "-f", "${db:Status-Abbrev}|${Package}|${Provides}\n"]) or ""
    if missing := missing_packages(wanted, listed):
        install_packages(missing)


def install_packages(packages: Sequence[str]) -> None:
    """Install packages with apt-get.

    Raises:
        SetupError: we are not root (the text has the command), or apt-get failed.
    """
    command = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    if os.geteuid() != 0:
        line = f"sudo apt-get update && sudo {shlex.join(command)}"
        raise SetupError(f"System packages are missing; install them and start again:\n  {line}")
    say(f"Installing system packages: {' '.join(packages)}")
    for step in (["apt-get", "update", "-qq"], command):
        call_apt(step)


def call_apt(command: Sequence[str], *, wait_s: float = LOCK_WAIT_S, pause_s: float = 2.0) -> None:
    """Run apt-get, and again while another package manager holds its locks.

    apt-get's own option DPkg::Lock::Timeout does not apply to the lock of the package lists, which `update` takes.

    Raises:
        SetupError: it failed, or the locks were not released within `wait_s` seconds.
    """
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    deadline = time.monotonic() + wait_s
    waiting = False
    while True:
        done = subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode == 0:
            return
        if "Could not get lock" not in done.stdout or time.monotonic() >= deadline:
            tail = done.stdout.splitlines()[-TAIL_LINES:]
            text = f"{shlex.join(command)} failed (exit code {done.returncode})."
            raise SetupError("\n".join([*tail, text]), exit_code=1)
        if not waiting:
            waiting = True
            say("Another program is installing packages. Waiting for it.")
        time.sleep(pause_s)
