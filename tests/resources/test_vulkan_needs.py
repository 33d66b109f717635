"""Requirements of a Vulkan build, searched for in made-up folders, without a build."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from resources.vulkan import needs

LIBRARY = {"linux": "lib/x86_64-linux-gnu/libvulkan.so", "darwin": "lib/libvulkan.dylib", "win32": "Lib/vulkan-1.lib"}


def _make(folder: Path, *, headers: int = 239, system: str = "linux", without: str = "") -> Path:
    """Put everything that a build needs into `folder`, but for one of the files."""
    files = {
        "headers": "include/vulkan/vulkan.hpp",
        "loader": LIBRARY[system],
        "spirv": "share/cmake/SPIRV-Headers/SPIRV-HeadersConfig.cmake",
        "glslc": "bin/glslc",
    }
    for name, path in files.items():
        if name != without:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).touch(mode=0o755)
    if without != "headers":
        text = f"#define VK_HEADER_VERSION {headers}\n#define VK_HEADER_VERSION_COMPLETE VK_MAKE(1, 3)\n"
        (folder / "include/vulkan/vulkan_core.h").write_text(text, encoding="utf-8")
    return folder


def _look(folder: Path, *, system: str = "linux") -> needs.Found:
    return needs.look({"PATH": str(folder / "bin")}, system, [folder])


@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_everything_that_is_there_is_found(system: str, tmp_path: Path) -> None:
    found = _look(_make(tmp_path, system=system), system=system)
    assert needs.find_settings_error(found) is None
    assert found.packages == ()
    assert found.headers == 239


@pytest.mark.parametrize(
    ("without", "words", "package"),
    [
        ("headers", "the Vulkan headers", "libvulkan-dev"),
        ("loader", "the Vulkan loader's library", "libvulkan-dev"),
        ("glslc", "the shader compiler glslc", "glslc"),
        ("spirv", "the SPIR-V headers", "spirv-headers"),
    ],
)
def test_what_is_missing_is_named_with_its_package(without: str, words: str, package: str, tmp_path: Path) -> None:
    found = _look(_make(tmp_path, without=without))
    fault = needs.find_settings_error(found)
    assert found.missing == (words,)
    assert found.packages == (package,)
    assert fault is not None
    assert words in fault
    assert package in fault
    assert "\n" not in fault


def test_headers_of_ubuntu_22_are_too_old_whatever_else_is_missing(tmp_path: Path) -> None:
    fault = needs.find_settings_error(_look(_make(tmp_path, headers=204, without="glslc")))
    assert fault is not None
    assert "1.3.204" in fault
    assert "VULKAN_SDK" in fault


def test_the_sdk_comes_before_the_system(tmp_path: Path) -> None:
    system, sdk = _make(tmp_path / "usr", headers=204, without="glslc"), _make(tmp_path / "sdk", headers=290)
    found = needs.look({"PATH": str(system / "bin"), "VULKAN_SDK": str(sdk)}, "linux", [system])
    assert needs.find_settings_error(found) is None
    assert found.headers == 290
    assert found.headers_folder == sdk


@pytest.mark.parametrize(("headers", "lacks"), [(239, True), (271, True), (272, False), (350, False)])
def test_layer_settings_are_given_to_older_headers_only(headers: int, lacks: bool, tmp_path: Path) -> None:
    assert needs.lacks_layer_settings(_look(_make(tmp_path, headers=headers))) is lacks


def test_drivers_are_seen_by_their_descriptions(tmp_path: Path) -> None:
    folder = tmp_path / "icd.d"
    assert not needs.has_driver({}, [str(folder)])
    folder.mkdir()
    assert not needs.has_driver({}, [str(folder)])
    (folder / "lvp_icd.x86_64.json").touch()
    assert needs.has_driver({}, [str(folder)])
    assert needs.has_driver({"VK_DRIVER_FILES": "/here.json"}, [])


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler by its usual name")
def test_the_header_says_what_the_engine_uses(tmp_path: Path) -> None:
    """Compiled by itself, used as ggml-vulkan.cpp does; sizes and number are those of the Vulkan specification."""
    source = tmp_path / "use.cpp"
    source.write_text(
        """
        unsigned on = 1;
        std::vector<vk::LayerSettingEXT> settings = {{"layer", "name", vk::LayerSettingTypeEXT::eBool32, 1, &on}};
        vk::LayerSettingsCreateInfoEXT info(settings);
        static_assert(sizeof(vk::LayerSettingEXT) == 2 * sizeof(void *) + 8 + sizeof(void *));
        static_assert(sizeof(vk::LayerSettingsCreateInfoEXT) == 4 * sizeof(void *));
        bool told = info.sType == 1000496000 && info.settingCount == 1 && info.pSettings == settings.data();
        int main() { return !told; }
        """,
        encoding="utf-8",
    )
    program = tmp_path / "use"
    command = ["c++", "-std=c++17", "-Wall", "-Werror", "-include", str(needs.LAYER_SETTINGS), str(source)]
    subprocess.run([*command, "-o", str(program)], check=True)
    assert subprocess.run([program], check=False).returncode == 0


def test_the_header_includes_nothing_of_vulkan() -> None:
    """ggml sets macros before it includes vulkan.hpp, so that nothing may do it earlier."""
    included = re.findall(r"#include <(.*)>", needs.LAYER_SETTINGS.read_text(encoding="utf-8"))
    assert included == ["cstdint", "vector"]
