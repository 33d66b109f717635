"""The folder of an interrupted build: found again by the same build, and by no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from resources.setup.kept_build import BuildFolder, build_folder


def leave(parent: Path, key: str, error: type[BaseException]) -> Path:
    """Begin a build, make an object and end with `error`; return the folder."""
    found: list[Path] = []

    def build() -> None:
        with build_folder(parent, key) as folder:
            found.append(folder.path)
            folder.objects.mkdir(exist_ok=True)
            (folder.objects / "a.o").touch()
            (folder.temporary / "half").touch()
            raise error

    with pytest.raises(error):
        build()
    return found[0]


def look(parent: Path, key: str) -> BuildFolder:
    """Begin a build and stop it."""
    with pytest.raises(KeyboardInterrupt), build_folder(parent, key) as folder:
        raise KeyboardInterrupt
    return folder


def test_a_stopped_build_is_gone_on_with_and_its_temporary_files_are_not(tmp_path: Path) -> None:
    path = leave(tmp_path, "cpu", KeyboardInterrupt)
    folder = look(tmp_path, "cpu")
    assert (folder.path, folder.goes_on) == (path, True)
    assert (folder.objects / "a.o").exists()
    assert list(folder.temporary.iterdir()) == []


def test_a_build_that_fails_twice_begins_anew(tmp_path: Path) -> None:
    path = leave(tmp_path, "cpu", ValueError)
    assert (path / "objects" / "a.o").exists(), "memory may have been short"
    leave(tmp_path, "cpu", ValueError)
    assert not path.exists()
    assert not look(tmp_path, "cpu").goes_on


def test_a_whole_build_leaves_nothing(tmp_path: Path) -> None:
    with build_folder(tmp_path, "cpu") as folder:
        folder.objects.mkdir()
    assert not folder.path.exists()


def test_what_other_builds_left_is_removed_unless_they_run(tmp_path: Path) -> None:
    old = leave(tmp_path, "old", KeyboardInterrupt)
    with build_folder(tmp_path, "running") as running:
        look(tmp_path, "cpu")
        assert running.path.exists()
    assert not old.exists()


def test_two_builds_at_once_have_folders_of_their_own(tmp_path: Path) -> None:
    with build_folder(tmp_path, "cpu") as first:
        first.objects.mkdir()
        with build_folder(tmp_path, "cpu") as second:
            assert second.path != first.path
            assert not second.goes_on
        assert not second.path.exists()
        assert first.objects.exists()
