"""Contents of the bundle: all our modules and files, all imported libraries, and children that start."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from engine.base.programs import CHILDREN
from resources.bundle.recipe import data_files, own_modules
from tests.support.patience import DEADLINE_S
from tests.support.sounds import tone

pytestmark = pytest.mark.bundle
ROOT = Path(__file__).resolve().parents[2]


@cache
def frozen_modules(program: Path) -> frozenset[str]:
    """Return the names of the modules inside of the executable, and of the few that Python starts with."""
    from PyInstaller.archive.readers import CArchiveReader

    with zipfile.ZipFile(program.parent / "_internal" / "base_library.zip") as library:
        base = {name.rpartition(".")[0].replace("/", ".").removesuffix(".__init__") for name in library.namelist()}
    archive = CArchiveReader(str(program))
    return frozenset(base) | frozenset(archive.toc) | frozenset(archive.open_embedded_archive("PYZ.pyz").toc)


def is_in(name: str, dist: Path) -> bool:
    """Say whether the module `name` is in the bundle: frozen, compiled beside the executable, or Python's own."""
    folder = dist / "layerdeck"
    place = folder / "_internal" / Path(*name.split("."))
    return (
        name in frozen_modules(folder / "layerdeck")
        or name.partition(".")[0] in sys.builtin_module_names
        or any(place.parent.glob(f"{place.name}.*.so"))
        or any(place.parent.glob(f"{place.name}.so"))
        or any((folder / "_internal").glob(f"python3.*/lib-dynload/{name}.*.so"))
    )


def imported(source: Path) -> Iterator[str]:
    """Yield the modules that a file of ours imports, wherever in it, but for what only type checkers see."""
    for node in walk_run(ast.parse(source.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def walk_run(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)):
            yield from walk_run(child)


def test_every_module_of_ours_and_all_that_they_import_is_in_it(dist: Path) -> None:
    names = set(own_modules(ROOT))
    for folder in ("app", "engine", "widgets"):
        for source in (ROOT / folder).rglob("*.py"):
            names.update(imported(source))
    assert sorted(name for name in names if not is_in(name, dist)) == []


def test_backends_of_the_key_ring_and_the_lexers_are_in_it_though_nothing_imports_them_by_name(dist: Path) -> None:
    modules = frozen_modules(dist / "layerdeck" / "layerdeck")
    assert is_in("PySide6.QtOpenGL", dist)
    assert is_in("PySide6.QtOpenGLWidgets", dist), "pyqtgraph puts the names together"
    assert {"keyring.backends.SecretService", "secretstorage", "pygments.lexers.rust", "cryptography.x509"} <= modules
    assert list((dist / "layerdeck" / "_internal").glob("keyring-*.dist-info/entry_points.txt"))


def test_every_file_that_is_read_is_in_it(dist: Path) -> None:
    internal = dist / "layerdeck" / "_internal"
    found = list(data_files(ROOT))
    assert len(found) > 20
    for path, folder in found:
        assert (internal / folder / path.name).read_bytes() == path.read_bytes(), path


@pytest.mark.parametrize("child", CHILDREN)
def test_every_kind_of_child_starts_and_ends_with_its_input(child: str, bundle: Path, tmp_path: Path) -> None:
    words = {"worker": ["probe"], "renderer": ["67108864"], "image": ["look"], "sound": ["look"]}.get(child, [])
    done = subprocess.run(
        [str(bundle / "layerdeck"), f"--{child}", *words],
        env={"HOME": str(tmp_path)},
        input=tone() if child == "sound" else b"",
        capture_output=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr
    assert (b"audio/wav" in done.stdout) == (child == "sound"), "its library is imported with the first sound"
