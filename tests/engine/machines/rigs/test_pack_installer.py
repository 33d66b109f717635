"""A new pack is tried in a child first: a crash there, or a library without a backend, switches it off."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from engine.base.engine_build import engine_build, engine_version
from engine.base.errors import EngineError, WorkerCrashedError
from engine.base.files import open_lock
from engine.devices.device import Rig
from engine.devices.packs.store import PACKS_VARIABLE, Pack, PackBook, PackStore, file_states, read_book, write_book
from engine.devices.packs.store import Verdict as PackVerdict
from engine.machines.rigs import pack_installer
from engine.machines.rigs.discovery import discover, host_device
from engine.machines.rigs.pack_installer import PackInstaller
from tests.support.packs import (
    CRASHES,
    IS_ANOTHER_INTERFACE,
    IS_NO_BACKEND,
    NEEDS_WHAT_IS_NOT_THERE,
    compiled,
    write_pack,
)

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None and shutil.which("gcc") is None, reason="needs a C compiler for tiny libraries"
)


@pytest.fixture
def keeper(tmp_path: Path) -> PackInstaller:
    return PackInstaller(PackStore(tmp_path / "packs"), tmp_path / "packs.json")


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (CRASHES, r"The engine dies \(SIG(ILL|TRAP)\) when it loads the pack\."),
        (IS_NO_BACKEND, "is not a backend for this engine"),
        (IS_ANOTHER_INTERFACE, "is not a backend for this engine"),
        (NEEDS_WHAT_IS_NOT_THERE, "cannot be loaded: .*undefined symbol: not_anywhere"),
    ],
)
def test_a_library_that_does_not_work_is_not_used(
    keeper: PackInstaller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, sentence: str
) -> None:
    verdict = keeper.install(write_pack(tmp_path / "x.tar.gz", "x", compiled(code, tmp_path)))
    (listed,) = keeper.listed()
    assert (verdict.ok, listed.state, listed.devices) == (False, "broken", ())
    import re

    assert re.search(sentence, listed.reason), listed.reason
    assert keeper.check_new() == ()
    monkeypatch.setenv(PACKS_VARIABLE, str(keeper.book))
    assert isinstance(discover(), Rig)


@pytest.mark.skipif(os.name == "nt", reason="nothing is locked on Windows")
def test_the_results_are_read_and_written_under_one_lock(
    keeper: PackInstaller, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int | None] = []

    def read(path: Path) -> PackBook:
        seen.append(open_lock(path, wait=False))
        return PackBook()

    monkeypatch.setattr(pack_installer, "read_book", read)
    pack = Pack("x", keeper.store.user / "x", None, "It is broken.")
    assert not keeper.check(pack).ok
    assert seen == [None], "another process gets the lock in between"


def test_what_was_changed_behind_our_back_is_checked_anew_and_refused(keeper: PackInstaller, tmp_path: Path) -> None:
    archive = write_pack(tmp_path / "x.tar.gz", "x", compiled(IS_NO_BACKEND, tmp_path))
    pack = keeper.store.install(archive, engine_version())
    (pack.folder / "libggml-x.so").write_bytes(b"another")
    (verdict,) = keeper.check_new()
    assert (verdict.ok, verdict.reason) == (
        False,
        "libggml-x.so was changed after the pack was made. Install the pack again.",
    )
    (pack.folder / "libggml-x.so").unlink()
    (verdict,) = keeper.check_new()
    assert verdict.reason == "libggml-x.so is missing. Install the pack again."


def test_a_pack_that_was_good_and_breaks_the_search_costs_itself_only(
    keeper: PackInstaller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after another driver was installed: the book says that it works, and the child dies."""
    archive = write_pack(tmp_path / "x.tar.gz", "x", compiled(CRASHES, tmp_path))
    pack = keeper.store.install(archive, engine_version())
    states = file_states(pack.folder, ["libggml-x.so"])
    good = PackVerdict("x", str(pack.folder), engine_build(), "libggml-x.so", states, ok=True)
    write_book(keeper.book, PackBook().with_verdict(good))
    monkeypatch.setenv(PACKS_VARIABLE, str(keeper.book))
    with pytest.raises(WorkerCrashedError):
        discover()
    rig = pack_installer.find_packed_devices(keeper, tmp_path / "verdicts.json")
    assert rig.host.total_bytes == host_device().total_bytes
    (listed,) = keeper.listed()
    assert listed.state == "broken"


def test_a_search_that_breaks_without_packs_breaks(
    keeper: PackInstaller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(*_: object, **__: object) -> Rig:
        raise WorkerCrashedError("The engine process was ended by SIGSEGV.", signal=11)

    monkeypatch.setattr(pack_installer, "find_devices", find)
    with pytest.raises(EngineError, match="SIGSEGV"):
        pack_installer.find_packed_devices(keeper, tmp_path / "verdicts.json")


def test_switched_off_it_is_neither_checked_nor_loaded_and_removed_it_is_forgotten(
    keeper: PackInstaller, tmp_path: Path
) -> None:
    archive = write_pack(tmp_path / "x.tar.gz", "x", compiled(IS_NO_BACKEND, tmp_path))
    keeper.install(archive)
    keeper.switch("x", on=False)
    (keeper.store.pack("x").folder / "libggml-x.so").write_bytes(b"another")
    assert keeper.check_new() == ()
    assert [pack.state for pack in keeper.listed()] == ["off"]
    keeper.switch("x", on=True)
    assert [pack.state for pack in keeper.listed()] == ["unchecked"]
    keeper.remove("x")
    assert keeper.listed() == ()
    assert read_book(keeper.book) == PackBook()
