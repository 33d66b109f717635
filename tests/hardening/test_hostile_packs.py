"""Malformed archives of engine packs: none writes outside of its folder, or more than it declares."""

from __future__ import annotations

import gzip
import json
import random
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from engine.base.engine_build import engine_version
from engine.base.errors import PackError
from engine.devices.packs.manifest import MAX_MANIFEST_BYTES
from engine.devices.packs.store import PackStore
from tests.support.packs import manifest_of, write_archive, write_pack
from tests.support.selection import examples

LIBRARY = "libggml-x.so"
FILES = {LIBRARY: b"library"}
Members = list[tuple[str | tarfile.TarInfo, bytes]]


def begun(**changed: object) -> Members:
    """Return the beginning of an archive: a manifest."""
    return [("x/manifest.json", json.dumps(manifest_of("x", FILES, **changed)).encode())]


def member(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type, found.linkname = kind, link
    return found


ARCHIVES: dict[str, tuple[Callable[[], Members], str]] = {
    "nothing": (list, "does not begin with NAME/manifest.json"),
    "no manifest": (lambda: [(f"x/{LIBRARY}", b"library")], "does not begin with NAME/manifest.json"),
    "manifest alone": (begun, "ends before libggml-x.so"),
    "manifest outside": (lambda: [("manifest.json", b"{}")], "does not begin with NAME/manifest.json"),
    "manifest too long": (
        lambda: [("x/manifest.json", b" " * (MAX_MANIFEST_BYTES + 1))],
        "does not begin with NAME/manifest.json",
    ),
    "manifest is no JSON": (lambda: [("x/manifest.json", b"\xff{")], "manifest.json cannot be read"),
    "manifest nested": (lambda: [("x/manifest.json", b"[" * 60_000)], "manifest.json cannot be read"),
    "folder of another name": (lambda: [("y/manifest.json", begun()[0][1])], 'the name of its folder is not "x"'),
    "upwards": (lambda: [*begun(), ("x/../../escaped", b"library")], "is outside of its folder"),
    "absolute": (lambda: [*begun(), ("/tmp/escaped", b"library")], "is outside of its folder"),
    "beside": (lambda: [*begun(), (LIBRARY, b"library")], "is outside of its folder"),
    "two folders down": (lambda: [*begun(), (f"x/y/{LIBRARY}", b"library")], "is outside of its folder"),
    "dots": (lambda: [*begun(), ("x/..", b"library")], "is outside of its folder"),
    "not listed": (lambda: [*begun(), ("x/more.so", b"library")], "is missing in its manifest"),
    "manifest twice": (lambda: [*begun(), *begun()], "is missing in its manifest"),
    "file twice": (lambda: [*begun(), *[(f"x/{LIBRARY}", b"library")] * 2], "is in it twice"),
    "link": (
        lambda: [*begun(), (member(f"x/{LIBRARY}", tarfile.SYMTYPE, "/etc/passwd"), b"")],
        "is not a regular file",
    ),
    "hard link": (
        lambda: [*begun(), (member(f"x/{LIBRARY}", tarfile.LNKTYPE, "/etc/passwd"), b"")],
        "not a regular file",
    ),
    "pipe": (lambda: [*begun(), (member(f"x/{LIBRARY}", tarfile.FIFOTYPE), b"")], "is not a regular file"),
    "device": (lambda: [*begun(), (member(f"x/{LIBRARY}", tarfile.CHRTYPE), b"")], "is not a regular file"),
    "manifest is a link": (
        lambda: [(member("x/manifest.json", tarfile.SYMTYPE, "/etc/passwd"), b"")],
        "manifest.json is not a regular file",
    ),
    "too short": (lambda: [*begun(), (f"x/{LIBRARY}", b"librar")], "is not the file that the manifest describes"),
    "other bytes": (lambda: [*begun(), (f"x/{LIBRARY}", b"librarY")], "is not the file that the manifest describes"),
    "longer by a byte": (lambda: [*begun(), (f"x/{LIBRARY}", b"library!")], "is not the file"),
    "much longer": (
        lambda: [*begun(), (f"x/{LIBRARY}", bytes(1 << 22))],
        "it contains more than its manifest lists|is not",
    ),
    "folders only": (lambda: [(member("x", tarfile.DIRTYPE), b"")] * 500, "it contains only folders"),
    "more than the disk": (
        lambda: begun(files={LIBRARY: {"bytes": 4 << 30, "sha256": "0" * 64}}),
        "ends before|Free some space and install it again",
    ),
}


@pytest.fixture
def store(tmp_path: Path) -> PackStore:
    return PackStore(tmp_path / "packs")


def refuse(store: PackStore, archive: Path) -> str:
    """Return the sentence with which a file is refused; nothing of it stays."""
    with pytest.raises(PackError) as caught:
        store.install(archive, engine_version())
    assert list(store.user.iterdir()) == []
    return caught.value.summary()


@pytest.mark.parametrize("name", ARCHIVES)
def test_it_is_refused_with_a_sentence(store: PackStore, tmp_path: Path, name: str) -> None:
    members, sentence = ARCHIVES[name]
    archive = write_archive(tmp_path / "pack.tar.gz", members())
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(PackError, match=sentence):
        store.install(archive, engine_version())
    store.user.rmdir()
    assert sorted(path for path in tmp_path.rglob("*") if path.suffix != ".lock") == before


def test_a_header_that_unpacks_to_gigabytes_is_not_read(store: PackStore, tmp_path: Path) -> None:
    """A long name is a header with a length of its own: tarfile would read what it promises into memory."""
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 8 << 30
    archive = tmp_path / "bomb.tar.gz"
    with gzip.open(archive, "wb", compresslevel=1) as file:
        file.write(header.tobuf(tarfile.GNU_FORMAT))
        for _ in range(64):
            file.write(bytes(1 << 20))
    assert "it contains more than its manifest lists" in refuse(store, archive)


@pytest.mark.parametrize(
    "data",
    [b"", b"no archive", gzip.compress(b"no tar" * 1000, mtime=0), gzip.compress(b"", mtime=0)],
    ids=["empty", "text", "no tar", "zipped nothing"],
)
def test_what_is_no_archive(store: PackStore, tmp_path: Path, data: bytes) -> None:
    archive = tmp_path / "pack.tar.gz"
    archive.write_bytes(data)
    assert "pack.tar.gz" in refuse(store, archive) or "not an engine pack" in refuse(store, archive)


def test_a_file_that_is_not_there_and_a_folder(store: PackStore, tmp_path: Path) -> None:
    assert "No such file" in refuse(store, tmp_path / "none.tar.gz")
    assert "Is a directory" in refuse(store, tmp_path)


def test_damaged_archives_are_refused_or_whole(store: PackStore, tmp_path: Path) -> None:
    library = random.Random(1).randbytes(5000)
    unzipped = gzip.decompress(write_pack(tmp_path / "pack.tar.gz", "x", library).read_bytes())
    generator = random.Random(7)
    damaged = tmp_path / "damaged.tar.gz"
    for _ in range(examples(200)):
        data = bytearray(unzipped)
        for _ in range(generator.randint(1, 4)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        if generator.random() < 0.3:
            del data[generator.randrange(len(data)) :]
        zipped = bytearray(gzip.compress(bytes(data), compresslevel=1))
        if generator.random() < 0.3:
            zipped[generator.randrange(len(zipped))] ^= 1 << generator.randrange(8)
        damaged.write_bytes(zipped)
        with suppress(PackError):
            pack = store.install(damaged, engine_version())
            assert (pack.folder / LIBRARY).read_bytes() == library
            store.remove(pack.name)
        assert list(store.user.iterdir()) == []
