"""The bundle's recipe, compared with the source tree and the installed packages, without a build."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

from engine.base.programs import CHILDREN
from resources.bundle.recipe import (
    BUILD_FOLDERS,
    HOOKED_DATA,
    LIBRARY_DATA,
    METADATA,
    UNREAD_DATA,
    data_files,
    engine_libraries,
    is_of_the_system,
    own_modules,
)

ROOT = Path(__file__).resolve().parents[2]
CODE = (".py", ".pyi", ".pyc", ".so", ".pyd", ".dll", ".dylib", ".typed", ".h", ".pxd", ".pyx")
SOURCES = [path for folder in ("app", "engine", "widgets") for path in (ROOT / folder).rglob("*.py")]
RESOURCE = re.compile(r"""(?:\bread_text\(|\bread_bytes\(|\bfolder\(\) / )"([\w./-]+)"|resources:([\w./-]+)""")
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)]+)\)")
ASKED_VERSION = re.compile(r"""version\(\s*["']([\w.-]+)["']\)|metadata\.distribution\(["']([\w.-]+)["']\)""")


@pytest.mark.parametrize("module", CHILDREN.values())
def test_every_kind_of_child_is_in_it(module: str) -> None:
    is_package = (ROOT / module.replace(".", "/")).is_dir()
    assert (f"{module}.__main__" if is_package else module) in own_modules(ROOT)


def test_every_module_of_ours_is_in_it_and_of_the_resources_only_the_loader() -> None:
    modules = own_modules(ROOT)
    assert {
        "app.program",
        "app.cli",
        "app.wiring",
        "engine.runtime.child.generate.renderer",
        "widgets.chat.chat_pane",
    } <= {*modules}
    assert [name for name in modules if name.startswith("resources")] == ["resources.loader"]


def test_every_resource_that_is_read_by_name_is_in_it() -> None:
    shipped = {f"{folder}/{path.name}" for path, folder in data_files(ROOT)}
    style = (ROOT / "resources" / "style.qss").read_text("utf-8")
    texts = [path.read_text("utf-8") for path in SOURCES] + [style.replace("$name", name) for name in ("light", "dark")]
    named = {f"resources/{first or second}" for text in texts for first, second in RESOURCE.findall(text)}
    assert {"resources/style.qss", "resources/layerdeck.svg", "resources/tick-dark.svg"} <= named
    assert named - shipped - {"resources/RECORD"} == set(), "RECORD is of a library's metadata"


def test_the_handbook_is_in_it_with_its_pictures_and_what_makes_the_bundle_is_not() -> None:
    shipped = {f"{folder}/{path.name}" for path, folder in data_files(ROOT)}
    pages = sorted((ROOT / "docs" / "handbook").glob("*.md"))
    assert pages
    pictures = {name for page in pages for name in PICTURE.findall(page.read_text("utf-8"))}
    assert pictures
    assert {f"docs/handbook/{name}" for name in {page.name for page in pages} | pictures} <= shipped
    assert not [name for name in shipped if name.startswith(tuple(f"resources/{each}/" for each in BUILD_FOLDERS))]
    assert not [name for name in shipped if name.endswith(".py")]
    assert not [name for name in shipped if name.endswith("README.md") and not name.startswith("docs/")]


def used_distributions() -> dict[str, metadata.Distribution]:
    """Return what Layerdeck asks for here, directly or not, by name as files spell it."""
    found: dict[str, metadata.Distribution] = {}
    waiting = ["layerdeck"]
    while waiting:
        name = waiting.pop()
        if plain(name) in found:
            continue
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # for another system
            continue
        found[plain(name)] = distribution
        asked = [line for line in distribution.requires or () if "extra ==" not in line]
        waiting += [match.group() for line in asked if (match := re.match(r"[A-Za-z0-9][\w.-]*", line))]
    return {name: each for name, each in found.items() if name != "layerdeck"}


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def has_data(distribution: metadata.Distribution) -> bool:
    """Say whether a library came with files of its package that are no code."""
    return any(
        len(file.parts) > 1 and file.parts[0] != ".." and "-info" not in file.parts[0] and ".so" not in file.name
        for file in distribution.files or ()
        if file.suffix not in CODE
    )


def test_data_of_every_library_is_taken_or_known_to_be_unread() -> None:
    known = {plain(name) for name in (*LIBRARY_DATA, *HOOKED_DATA, *UNREAD_DATA, "PySide6_Essentials")}
    libraries = used_distributions()
    assert len(libraries) > 20
    assert {name for name, each in libraries.items() if has_data(each)} - known == set()


def test_what_is_asked_for_its_version_brings_its_metadata() -> None:
    asked = {a or b for path in SOURCES for a, b in ASKED_VERSION.findall(path.read_text("utf-8"))}
    assert "PySide6_Essentials" in asked
    assert {plain(name) for name in asked} - {plain(name) for name in METADATA} == set()


def test_libraries_of_the_engine_that_are_not_shipped_stay_out(tmp_path: Path) -> None:
    for name in ("libllama.so.0", "libggml-cpu-haswell.so", "libggml-cpu-sapphirerapids.so", "README"):
        (tmp_path / name).touch()
    assert [path.name for path in engine_libraries(tmp_path)] == ["libggml-cpu-haswell.so", "libllama.so.0"]


@pytest.mark.parametrize("name", ["libstdc++.so.6", "libgcc_s.so.1", "libX11-xcb.so.1", "libdbus-1.so.3"])
def test_libraries_that_drivers_use_are_the_systems(name: str) -> None:
    assert is_of_the_system(name)
    assert not is_of_the_system(f"numpy.libs/{name}")
    assert not is_of_the_system("libX11_other.so.6")
