"""Folders that the window needs and cannot use: it starts without them and shows a notice."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from app.language import find_language
from app.logs import start_logging
from app.settings import Settings, StoredSideFiles
from app.window.chat.code_saver import code_bytes
from app.window.dialogs import write_chosen
from engine.base.errors import ArgumentError, PackError
from engine.base.files import read_at_most, write_whole
from engine.devices.packs.manifest import unpack
from engine.library.facts import fingerprint
from engine.library.scan import scan
from engine.library.stores import Store
from tests.support.stores import model_bytes, put
from widgets.library.recent_models import RecentModel


def _file(folder: Path) -> None:
    folder.write_text("in the way")


def _loop(folder: Path) -> None:
    folder.symlink_to(folder.with_name("other"))
    folder.with_name("other").symlink_to(folder)


def _pipe(folder: Path) -> None:
    folder.mkdir()
    os.mkfifo(folder / "layerdeck.ini")


def _folder(folder: Path) -> None:
    (folder / "layerdeck.ini").mkdir(parents=True)


@pytest.mark.parametrize("spoil", [_file, _loop, _pipe, _folder])
def test_settings_live_in_memory_where_there_is_no_place(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    spoil(tmp_path / "config")
    settings = Settings(tmp_path / "config" / "layerdeck.ini")
    assert "config" in settings.fault
    settings.theme = "dark"
    settings.add_recent_model(RecentModel(Path("/m.gguf"), "M", "1 GiB"))
    settings.sync()
    assert settings.theme == "dark"
    assert [model.title for model in settings.recent_models] == ["M"]


def test_a_folder_that_cannot_be_written_to_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "Permission denied" in Settings(tmp_path / "layerdeck.ini").fault


def test_a_path_that_is_no_text_is_not_kept_and_hurts_nothing(tmp_path: Path) -> None:
    settings = Settings(tmp_path / "layerdeck.ini")
    assert settings.fault == ""
    settings.add_recent_model(RecentModel(Path("/m.gguf"), "M", ""))
    settings.add_recent_model(RecentModel(Path("/\udcff.gguf"), "N", ""))
    settings.store_side_files(Path("/\udcff.gguf"), StoredSideFiles("/p"))
    assert [model.title for model in settings.recent_models] == ["M"]


@pytest.mark.parametrize("spoil", [_file, _loop])
@pytest.mark.usefixtures("own_log")
def test_without_a_log_file_there_is_a_word_on_standard_error(
    tmp_path: Path, spoil: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(tmp_path / "log")
    start_logging(tmp_path / "log" / "layerdeck.log")
    assert "No log file" in capsys.readouterr().err


def test_a_loop_of_links_is_an_error_of_the_system(tmp_path: Path) -> None:
    _loop(tmp_path / "a")
    with pytest.raises(OSError, match="symbolic links"):
        write_whole(tmp_path / "a", b"")


def test_reading_a_folder_leaves_nothing_open(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        with pytest.raises(IsADirectoryError):
            read_at_most(tmp_path / "folder", 100)
    assert len(list(Path("/proc/self/fd").iterdir())) < before + 10


@pytest.mark.parametrize("spoil", [os.mkfifo, os.mkdir, _loop])
def test_code_of_an_answer_replaces_no_pipe_and_no_folder(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    spoil(tmp_path / "code.py")
    with pytest.raises(ArgumentError, match="choose another place"):
        write_chosen(tmp_path / "code.py", b"print()")


def test_code_of_an_answer_may_hold_half_a_character(tmp_path: Path) -> None:
    write_chosen(tmp_path / "code.py", code_bytes("\ud800"))
    assert (tmp_path / "code.py").read_text(encoding="utf-8") == "?\n"


@pytest.mark.parametrize("spoil", [os.mkfifo, os.mkdir, _loop, Path.touch])
def test_what_is_no_file_is_no_pack_and_nobody_waits_for_it(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    spoil(tmp_path / "pack.tar.gz")
    with pytest.raises(PackError, match=r"^pack.tar.gz cannot be unpacked"):
        unpack(tmp_path / "pack.tar.gz", tmp_path, "1")
    with pytest.raises(PackError) as refused:
        unpack(Path("x" * 5000), tmp_path, "1")
    assert len(refused.value.summary()) < 400


@pytest.mark.parametrize("spoil", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir])
def test_a_store_with_a_pipe_in_place_of_a_name_is_looked_through(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    repository = tmp_path / "models--a--b"
    put(repository / "snapshots" / ("0" * 40) / "m.gguf", model_bytes())
    (repository / "refs").mkdir()
    spoil(repository / "refs" / "main")
    assert len(scan([Store("huggingface", tmp_path, "Hugging Face")]).files) == 1


@pytest.mark.parametrize("spoil", [os.mkfifo, os.mkdir])
def test_nobody_waits_for_a_language_or_for_what_a_crash_left(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    spoil(tmp_path / "x.po")
    with pytest.raises(ArgumentError, match="not a readable translation"):
        find_language(str(tmp_path / "x.po"))
    assert fingerprint(tmp_path / "x.po") == ""
