"""The project as a whole: packages, pinned dependencies, imports, forbidden paths, and a workaround for PySide6."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

from PySide6.QtGui import QImage, QPainter
from PySide6.QtWidgets import QApplication

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ("app", "engine", "resources", "widgets")

IMPORT = """
import importlib, sys, threading

blocked = sys.argv[1].split(",")

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
for name in sys.argv[2:]:
    importlib.import_module(name)
assert threading.active_count() == 1, threading.enumerate()
"""


def _modules(folder: str) -> list[str]:
    paths = sorted((ROOT / folder).rglob("*.py"))
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths)
    return [name.removesuffix(".__init__") for name in names]


def _tracked_files() -> list[Path]:
    """Return the files that git knows or would add; where this is no clone, every file outside of hidden folders."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        paths = [path for path in ROOT.rglob("*") if not any(part.startswith(".") for part in path.parts)]
    return [path for path in paths if path.is_file()]


def _text(path: Path) -> str:
    return path.read_bytes().decode("utf-8", errors="replace")


def test_every_package_is_listed() -> None:
    listed = tomllib.loads(_text(ROOT / "pyproject.toml"))["tool"]["setuptools"]["packages"]
    folders = {path.parent for name in SHIPPED for path in (ROOT / name).rglob("*.py")}
    assert listed == sorted(".".join(folder.relative_to(ROOT).parts) for folder in folders)


def test_every_package_says_what_it_is() -> None:
    folders = {path.parent for name in SHIPPED for path in (ROOT / name).rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_dependencies_are_pinned() -> None:
    project = tomllib.loads(_text(ROOT / "pyproject.toml"))["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    assert [requirement for requirement in requirements if "==" not in requirement] == []


def _import_all(folders: tuple[str, ...], *, blocked: tuple[str, ...]) -> str:
    """Import every module of `folders` in a fresh process; return what it complains about."""
    modules = [module for folder in folders for module in _modules(folder)]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT, ",".join(blocked), *modules],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stderr


def test_engine_imports_without_qt_and_starts_nothing() -> None:
    assert _import_all(("resources", "engine"), blocked=("PySide6", "shiboken6", "pyqtgraph")) == ""


def test_window_imports_without_the_engine_library_and_starts_nothing() -> None:
    assert _import_all(("widgets", "app"), blocked=("llama_cpp",)) == ""


def test_no_file_names_a_place_of_one_machine() -> None:
    # Put together here, so that this file does not name them.
    places = ["/" + name for name in ("work/", "root/", "opt/pypi", "opt/wheels", "tmp/build")]
    named = [
        f"{path.relative_to(ROOT)}: {place}" for path in _tracked_files() for place in places if place in _text(path)
    ]
    assert named == []


def test_painting_does_not_lose_references_to_none(qapp: QApplication) -> None:
    """PySide6 6.12.0 on CPython 3.11 loses one per call, and aborts after some thousand."""
    image = QImage(8, 8, QImage.Format.Format_ARGB32)
    painter = QPainter(image)
    before = sys.getrefcount(None)
    for _ in range(10_000):
        painter.drawLine(0, 0, 7, 7)
    drift = sys.getrefcount(None) - before
    painter.end()
    assert abs(drift) < 1_000
