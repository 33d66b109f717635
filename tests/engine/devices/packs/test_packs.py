"""Engine packs in their folder: found, installed completely or not at all, replaced, removed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import pytest

from engine.base.engine_build import engine_version
from engine.base.errors import PackError
from engine.devices.packs.manifest import Manifest, Needs, PackFile, find_damage, parse_manifest
from engine.devices.packs.store import (
    NO_PACKS,
    PACKS_VARIABLE,
    PackBook,
    PackStore,
    Verdict,
    file_states,
    libraries_to_load,
    list_packs,
    read_book,
    write_book,
)
from tests.support.packs import write_pack

BUILD = "engine 1 abc"


@pytest.fixture
def store(tmp_path: Path) -> PackStore:
    return PackStore(tmp_path / "packs", (tmp_path / "beside",))


def install(store: PackStore, tmp_path: Path, name: str = "vulkan", data: bytes = b"library") -> Path:
    return store.install(write_pack(tmp_path / f"{name}.tar.gz", name, data), engine_version()).folder


def verdict(folder: Path, *, ok: bool = True, engine: str = BUILD) -> Verdict:
    files = file_states(folder, ["libggml-vulkan.so"])
    return Verdict(folder.name, str(folder), engine, "libggml-vulkan.so", files, ok, devices=("Vulkan0",))


def test_a_pack_is_installed_found_and_removed(store: PackStore, tmp_path: Path) -> None:
    assert store.packs() == ()
    folder = install(store, tmp_path)
    (found,) = store.packs()
    assert (found.name, found.folder, found.fault) == ("vulkan", folder, "")
    assert found.manifest is not None
    assert find_damage(folder, found.manifest) == ""
    assert store.remove("vulkan") == folder
    assert store.packs() == ()
    assert list(store.user.iterdir()) == []


def test_a_pack_takes_the_place_of_one_of_its_name_and_a_bad_one_does_not(store: PackStore, tmp_path: Path) -> None:
    library = install(store, tmp_path) / "libggml-vulkan.so"
    install(store, tmp_path, data=b"newer")
    assert library.read_bytes() == b"newer"
    bad = write_pack(tmp_path / "bad.tar.gz", "vulkan", b"bad", engine="llama-cpp-python 0.0.1")
    with pytest.raises(PackError, match=r"It is for llama-cpp-python 0\.0\.1, but this program has llama-cpp-python"):
        store.install(bad, engine_version())
    assert library.read_bytes() == b"newer"
    assert [path.name for path in store.user.iterdir()] == ["vulkan"]


def test_a_pack_that_is_not_the_agreed_one_is_not_installed(store: PackStore, tmp_path: Path) -> None:
    agreed, _maker = store.read_archive(write_pack(tmp_path / "a.tar.gz", "vulkan", b"library"))
    replaced = write_pack(tmp_path / "a.tar.gz", "vulkan", b"another")
    with pytest.raises(PackError, match="replaced by another pack"):
        store.install(replaced, engine_version(), agreed)
    assert list(store.user.iterdir()) == []
    again = write_pack(tmp_path / "a.tar.gz", "vulkan", b"library")
    assert store.install(again, engine_version(), agreed).manifest == agreed


class Killed(BaseException):
    """Ends an installation between its two renames, as an interrupt does."""


@pytest.mark.parametrize("cleans_up", [True, False], ids=["interrupted", "killed"])
def test_an_installation_that_ends_early_loses_no_pack(
    store: PackStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cleans_up: bool
) -> None:
    library = install(store, tmp_path) / "libggml-vulkan.so"
    rename = Path.rename

    def until(path: Path, target: Path) -> Path:
        moved = rename(path, target)
        if path == library.parent:
            if not cleans_up:
                # What a kill leaves.
                shutil.copytree(target.parent.parent, store.user / ".installing-killed", symlinks=True)
                shutil.rmtree(target.parent)
            raise Killed
        return moved

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", until)
        with pytest.raises(Killed):
            install(store, tmp_path, data=b"newer")
    assert library.exists() == cleans_up
    install(store, tmp_path, "other")
    assert library.read_bytes() == b"library"
    assert sorted(path.name for path in store.user.iterdir()) == ["other", "vulkan"]


def test_the_users_pack_comes_before_one_beside_the_program_which_stays(store: PackStore, tmp_path: Path) -> None:
    read_only = PackStore(store.read_only[0])
    install(read_only, tmp_path, "vulkan", b"theirs")
    (found,) = store.packs()
    assert (found.folder.parent, found.ours) == (store.read_only[0], False)
    with pytest.raises(PackError, match="came with the program"):
        store.remove("vulkan")
    install(store, tmp_path, "vulkan", b"mine")
    (found,) = store.packs()
    assert (found.folder.parent, found.ours) == (store.user, True)


def test_a_folder_that_is_no_pack_is_told_with_its_fault(store: PackStore, tmp_path: Path) -> None:
    install(store, tmp_path).rename(store.user / "other")
    (store.user / "empty").mkdir()
    (store.user / ".hidden").mkdir()
    faults = {pack.name: pack.fault for pack in store.packs()}
    assert "but its folder has another name" in faults["other"]
    assert "manifest.json cannot be read" in faults["empty"]
    assert set(faults) == {"other", "empty"}
    states = {pack.name: (pack.state, pack.reason) for pack in list_packs(store, PackBook(), BUILD)}
    assert states["empty"] == ("broken", faults["empty"])
    with pytest.raises(PackError, match="There is no engine pack cuda; there are: empty, other"):
        store.pack("cuda")


def test_a_link_is_removed_and_not_what_it_leads_to(store: PackStore, tmp_path: Path) -> None:
    folder = install(store, tmp_path)
    elsewhere = tmp_path / "elsewhere"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    store.remove("vulkan")
    assert (elsewhere / "manifest.json").is_file()
    assert store.packs() == ()


def test_a_verdict_holds_for_an_engine_and_these_files(store: PackStore, tmp_path: Path) -> None:
    folder = install(store, tmp_path)
    book = PackBook().with_verdict(verdict(folder, ok=False)).with_verdict(verdict(folder))
    assert len(book.verdicts) == 1
    assert [pack.state for pack in list_packs(store, book, BUILD)] == ["used"]
    assert [pack.state for pack in list_packs(store, book, "engine 2")] == ["unchecked"]
    assert [pack.state for pack in list_packs(store, book.switched("vulkan", on=False), BUILD)] == ["off"]
    state = (folder / "libggml-vulkan.so").stat()
    os.utime(folder / "libggml-vulkan.so", ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    assert [pack.state for pack in list_packs(store, book, BUILD)] == ["unchecked"]
    assert book.in_use(BUILD) == ()
    assert book.without(folder).verdicts == ()


def test_a_child_loads_what_was_found_good_and_is_switched_on(store: PackStore, tmp_path: Path) -> None:
    folder, path = install(store, tmp_path), tmp_path / "packs.json"
    environment = {PACKS_VARIABLE: str(path)}

    def names(environment: dict[str, str]) -> list[str]:
        return [each.pack for each in libraries_to_load(environment, lambda: BUILD)]

    assert names(environment) == []
    good = PackBook().with_verdict(verdict(folder))
    write_book(path, good)
    assert names(environment) == ["vulkan"]
    assert names({}) == names({PACKS_VARIABLE: NO_PACKS}) == []
    for other in (
        good.switched("vulkan", on=False),
        PackBook().with_verdict(verdict(folder, ok=False)),
        PackBook().with_verdict(verdict(folder, engine="engine 2")),
    ):
        write_book(path, other)
        assert names(environment) == []
    path.write_text("{")
    assert read_book(path) == PackBook()
    assert names(environment) == []


def manifest(**changed: object) -> Manifest:
    plain = Manifest(1, "x", engine_version(), "X", "linux", "x86_64", "l.so", {"l.so": PackFile(1, "0" * 64)})
    return msgspec.structs.replace(plain, **changed)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"version": 2}, "version 2, but this program reads version 1"),
        ({"name": "../x"}, "not a valid pack name"),
        ({"name": "X"}, "not a valid pack name"),
        ({"files": {}}, "lists 0 files"),
        ({"files": {"../l.so": PackFile(1, "0" * 64)}}, "not a valid name of a file"),
        ({"files": {"manifest.json": PackFile(1, "0" * 64)}}, "not a valid name of a file"),
        ({"files": {"l.so": PackFile(-1, "0" * 64)}}, "no size or no checksum"),
        ({"files": {"l.so": PackFile(1, "zz")}}, "no size or no checksum"),
        ({"files": {"l.so": PackFile(5 << 30, "0" * 64)}}, "a pack may take at most 4.00 GiB"),
        ({"library": "other.so"}, "not among its files"),
        ({"needs": Needs(glibc="2.x")}, "not a version of glibc"),
        ({"backend": "b" * 300}, "longer than 200 characters"),
    ],
)
def test_a_manifest_that_cannot_be_says_why(changed: dict[str, object], sentence: str) -> None:
    with pytest.raises(PackError, match=sentence):
        parse_manifest(msgspec.json.encode(manifest(**changed)))


def test_what_a_pack_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.36"))
    assert manifest(needs=Needs(glibc="2.36")).misfit(engine_version()) == ""
    assert "It needs glibc 2.38 or later, but this system has 2.36" in manifest(needs=Needs(glibc="2.38")).misfit(
        engine_version()
    )
    assert "It is for win32 x86_64" in manifest(system="win32").misfit(engine_version())
    assert "this program has engine 3" in manifest().misfit("engine 3")


def test_the_old_pack_is_kept_if_the_new_one_cannot_take_its_place(
    store: PackStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = install(store, tmp_path) / "libggml-vulkan.so"
    rename = Path.rename

    def fail_for_new(path: Path, target: Path) -> Path:
        if path.name == "new":
            raise OSError(28, "No space left on device")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_for_new)
    with pytest.raises(PackError, match="No space left on device"):
        install(store, tmp_path, data=b"newer")
    assert library.read_bytes() == b"library"
