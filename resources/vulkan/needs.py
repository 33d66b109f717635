"""Checks the requirements of a Vulkan build before it starts, since a failure would come only after ten minutes.

It searches the folders that CMake searches: the LunarG SDK named by VULKAN_SDK, then the system's. make.py uses it
before anything is installed, so it needs only the standard library.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LEAST_HEADERS = 230
"""First 1.3 headers with VK_EXT_device_fault, the newest extension that ggml-vulkan.cpp needs besides layer settings.

Ubuntu 22.04 has 204.
"""
LAYER_SETTINGS_HEADERS = 272
"""First headers with VK_EXT_layer_settings. For older ones, such as Debian 12's 239, `LAYER_SETTINGS` is included."""
LAYER_SETTINGS = Path(__file__).with_name("layer_settings.h")

SDK_REMEDY = "take LunarG's Vulkan SDK and let VULKAN_SDK name it"
SYSTEM_FOLDERS = {"linux": ("/usr/local", "/usr"), "darwin": ("/usr/local", "/opt/homebrew")}
_LIBRARIES = {"linux": ("libvulkan.so",), "darwin": ("libvulkan.dylib",), "win32": ("vulkan-1.lib",)}
_DRIVERS = ("/etc/vulkan/icd.d", "/usr/share/vulkan/icd.d", "/usr/local/share/vulkan/icd.d")
_CONFIGURATION = "SPIRV-HeadersConfig.cmake"


@dataclass(frozen=True)
class Found:
    """The requirements of a Vulkan build that were found.

    `headers`: patch number of the headers' version (239 of 1.3.239); None without headers. It keeps growing over minor
    versions.
    """

    headers: int | None
    headers_folder: Path | None
    glslc: bool
    loader: bool
    spirv_headers: bool

    @property
    def packages(self) -> tuple[str, ...]:
        """Debian packages of what is missing. Headers that are too old do not count: their system has no newer ones."""
        wanted = {
            "glslc": self.glslc,
            "libvulkan-dev": self.headers is not None and self.loader,
            "spirv-headers": self.spirv_headers,
        }
        return tuple(name for name, there in wanted.items() if not there)

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of what is missing, for texts."""
        wanted = {
            "the Vulkan headers": self.headers is not None,
            "the Vulkan loader's library": self.loader,
            "the shader compiler glslc": self.glslc,
            "the SPIR-V headers": self.spirv_headers,
        }
        return tuple(name for name, there in wanted.items() if not there)


def look(environ: Mapping[str, str], system: str = sys.platform, folders: Sequence[Path] | None = None) -> Found:
    """Search for the requirements of a Vulkan build.

    `folders`: system folders to search; None: the defaults of `system`.
    """
    if folders is None:
        folders = [Path(folder) for folder in SYSTEM_FOLDERS.get(system, ())]
    sdk = [Path(environ["VULKAN_SDK"])] if environ.get("VULKAN_SDK") else []
    places = [*sdk, *folders]
    headers = next((place for place in places if (place / "include/vulkan/vulkan.hpp").is_file()), None)
    path = [*(str(place / "bin") for place in sdk), environ.get("PATH", "")]
    return Found(
        headers=None if headers is None else read_version(headers / "include/vulkan/vulkan_core.h"),
        headers_folder=headers,
        glslc=shutil.which("glslc", path=(";" if system == "win32" else ":").join(path)) is not None,
        loader=_has_any(places, ("lib*/", "lib*/*/", "Lib/"), _LIBRARIES.get(system, _LIBRARIES["linux"])),
        spirv_headers=_has_any(places, ("share/cmake/*/", "lib*/cmake/*/", "lib/*/cmake/*/"), (_CONFIGURATION,)),
    )


def _has_any(places: Sequence[Path], folders: Sequence[str], names: Sequence[str]) -> bool:
    patterns = [folder + name for folder in folders for name in names]
    return any(next(place.glob(pattern), None) is not None for place in places for pattern in patterns)


def read_version(header: Path) -> int | None:
    """Return VK_HEADER_VERSION of a vulkan_core.h; None if it cannot be read."""
    try:
        text = header.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"^#define VK_HEADER_VERSION (\d+)", text, re.MULTILINE)
    return int(match.group(1)) if match else None


def find_settings_error(found: Found) -> str | None:
    """Return a sentence with the reason why a Vulkan build is impossible here, and the remedy; None if possible."""
    if fault := find_old_headers(found):
        return fault
    if not found.missing:
        return None
    return (
        f"An engine with Vulkan cannot be built: {' and '.join(found.missing)} cannot be found. Install them "
        f"(Debian 12, Ubuntu 24.04 and later call them {' '.join(found.packages)}), or {SDK_REMEDY}, "
        "or choose another backend."
    )


def find_old_headers(found: Found) -> str | None:
    """Return a sentence with the remedy if the installed Vulkan headers are too old; None otherwise."""
    if found.headers is None or found.headers >= LEAST_HEADERS:
        return None
    return (
        f"An engine with Vulkan cannot be built: the Vulkan headers in {found.headers_folder} are 1.3.{found.headers} "
        f"and have to be 1.3.{LEAST_HEADERS} or later; {SDK_REMEDY}, or choose another backend."
    )


def lacks_layer_settings(found: Found) -> bool:
    """Return whether the headers are so old that `LAYER_SETTINGS` must be included."""
    return found.headers is not None and found.headers < LAYER_SETTINGS_HEADERS


def has_driver(environ: Mapping[str, str], folders: Sequence[str] = _DRIVERS) -> bool:
    """Return whether the Vulkan loader on Linux would find a description of any driver."""
    if environ.get("VK_DRIVER_FILES") or environ.get("VK_ICD_FILENAMES"):
        return True
    return any(Path(folder).is_dir() and any(Path(folder).iterdir()) for folder in folders)
