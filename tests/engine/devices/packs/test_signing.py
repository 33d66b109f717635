"""Signatures of packs: this computer's key, and publishers that the user trusts."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import msgspec
import pytest

from engine.base.engine_build import engine_version
from engine.base.errors import PackError
from engine.base.files import open_lock
from engine.base.values import replace
from engine.devices.packs import signing
from engine.devices.packs.manifest import MANIFEST, Manifest
from engine.devices.packs.signing import PREFIX, PackKeys, _signed_bytes, checked_key
from engine.devices.packs.store import PackBook, PackStore, Verdict, file_states, list_packs
from tests.support.packs import manifest_of, write_pack, write_signed_pack


@pytest.fixture
def keys(tmp_path: Path) -> PackKeys:
    return PackKeys(tmp_path / "here" / "key.pem", tmp_path / "here" / "publishers.json")


@pytest.fixture
def publisher(tmp_path: Path) -> PackKeys:
    return PackKeys(tmp_path / "there" / "key.pem", tmp_path / "there" / "publishers.json")


@pytest.fixture
def store(tmp_path: Path, keys: PackKeys) -> PackStore:
    return PackStore(tmp_path / "packs", (tmp_path / "beside",), keys)


def test_a_pack_that_is_built_here_is_known_again(store: PackStore, keys: PackKeys, tmp_path: Path) -> None:
    archive = write_signed_pack(tmp_path / "a.tar.gz", "vulkan", keys)
    assert store.read_archive(archive)[1].kind == "here"
    assert store.install(archive, engine_version()).maker.words == "It was built on this computer."
    assert [pack.maker.kind for pack in store.packs()] == ["here"], "the written manifest has the signature too"


@pytest.mark.skipif(os.name == "nt", reason="Windows has other rights")
def test_only_our_user_reads_the_key(keys: PackKeys) -> None:
    assert keys.own() == ""
    keys._make()
    assert keys.private.stat().st_mode & 0o777 == 0o600
    keys.private.chmod(0o644)
    own = keys.own()
    assert own.startswith(PREFIX)
    assert keys.private.stat().st_mode & 0o777 == 0o600
    keys.private.write_bytes(b"no key")
    with pytest.raises(PackError, match="cannot be used"):
        keys.own()


def test_a_publisher_is_trusted_from_the_moment_its_key_is_added(
    store: PackStore, keys: PackKeys, publisher: PackKeys, tmp_path: Path
) -> None:
    archive = write_signed_pack(tmp_path / "a.tar.gz", "vulkan", publisher)
    key = publisher.own()
    assert store.read_archive(archive)[1].words == f"It is signed with a key that you do not trust: {key}."
    keys.trust(key, "Ada")
    assert (store.read_archive(archive)[1].is_trusted, store.read_archive(archive)[1].name) == (True, "Ada")
    keys.trust(f" {key}\n", "Bea")
    assert [each.name for each in keys.publishers()] == ["Bea"]
    keys.distrust(key)
    assert not store.read_archive(archive)[1].is_trusted
    with pytest.raises(PackError, match="is not trusted"):
        keys.distrust(key)


@pytest.mark.parametrize(
    "text", ["", "ed25519:", "ed25519:AAAA", "rsa:" + "A" * 44, "ed25519:" + "?" * 44, f"x:{PREFIX}{'A' * 43}="]
)
def test_what_is_no_key(keys: PackKeys, text: str) -> None:
    with pytest.raises(PackError, match="is not the key of a publisher"):
        keys.trust(text)


@pytest.mark.parametrize(
    "changed",
    [{"backend": "CUDA"}, {"signature": "AAAA"}, {"signature": ""}, {"needs": {"glibc": "2.1"}}],
)
def test_a_pack_that_was_changed_after_it_was_signed_is_refused(
    store: PackStore, publisher: PackKeys, tmp_path: Path, changed: dict[str, object]
) -> None:
    archive = write_signed_pack(tmp_path / "a.tar.gz", "vulkan", publisher, b"library", changed)
    for refuse in (lambda: store.read_archive(archive)[1], lambda: store.install(archive, engine_version())):
        with pytest.raises(PackError, match="signature is wrong"):
            refuse()
    assert store.packs() == ()


@pytest.mark.parametrize("form", ["x:{stranger}ed25519:{publisher}", "ed25519:{stranger}ed25519:{publisher}"])
def test_a_key_that_reads_as_two_keys_is_refused(
    store: PackStore, keys: PackKeys, publisher: PackKeys, tmp_path: Path, form: str
) -> None:
    stranger = PackKeys(tmp_path / "far" / "key.pem", tmp_path / "far" / "publishers.json")
    for each in (stranger, publisher):
        each._make()
    keys.trust(publisher.own(), "Ada")
    encoded = {"stranger": stranger.own().removeprefix(PREFIX), "publisher": publisher.own().removeprefix(PREFIX)}
    manifest = msgspec.convert(manifest_of("vulkan", {"libggml-vulkan.so": b"library"}), Manifest)
    forged = msgspec.structs.replace(manifest, key=form.format(**encoded))
    signature = base64.b64encode(stranger._read().sign(_signed_bytes(forged))).decode()
    archive = write_pack(tmp_path / "a.tar.gz", "vulkan", key=forged.key, signature=signature)
    for refuse in (lambda: store.read_archive(archive)[1], lambda: store.install(archive, engine_version())):
        with pytest.raises(PackError, match=r"signature is wrong|is not the key of a publisher"):
            refuse()


@pytest.mark.parametrize("content", [b'{"version": 2, "publishers": []}', b"{"])
def test_publishers_of_another_version_are_not_overwritten(keys: PackKeys, content: bytes) -> None:
    keys.ring.parent.mkdir()
    keys.ring.write_bytes(content)
    for change in (keys.trust, keys.distrust):
        with pytest.raises(PackError, match="cannot be changed"):
            change(f"{PREFIX}{'A' * 43}=")
    assert keys.ring.read_bytes() == content


@pytest.mark.skipif(os.name == "nt", reason="nothing is locked on Windows")
def test_publishers_are_read_and_written_under_one_lock(keys: PackKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int | None] = []

    def read(path: Path, *_rest: object, **_named: object) -> None:
        seen.append(open_lock(path, wait=False))

    monkeypatch.setattr(signing, "read_struct", read)
    keys.trust(f"{PREFIX}{'A' * 43}=")
    assert seen == [None], "another process gets the lock in between"


def test_an_unsigned_pack_says_so_for_as_long_as_it_is_on(store: PackStore, keys: PackKeys, tmp_path: Path) -> None:
    pack = store.install(write_pack(tmp_path / "a.tar.gz", "vulkan"), engine_version())
    states = file_states(pack.folder, ["libggml-vulkan.so"])
    book = PackBook().with_verdict(
        Verdict("vulkan", str(pack.folder), "engine", "libggml-vulkan.so", states, ok=True, devices=("Vulkan0",))
    )
    (used,) = list_packs(store, book, "engine")
    assert used.words == "In use: Vulkan0. It is unsigned, so its publisher is unknown."
    assert used.document()["maker"] == {"kind": "unsigned", "key": "", "name": ""}
    (off,) = list_packs(store, book.switched("vulkan", on=False), "engine")
    assert off.words == "Turned off."
    read_only = replace(store, user=tmp_path / "none", read_only=(store.user,))
    (came,) = list_packs(read_only, book, "engine")
    assert came.words == "In use: Vulkan0."


def test_an_installed_pack_whose_manifest_was_changed_is_not_used(
    store: PackStore, keys: PackKeys, tmp_path: Path
) -> None:
    pack = store.install(write_signed_pack(tmp_path / "a.tar.gz", "vulkan", keys), engine_version())
    assert pack.manifest is not None
    changed = msgspec.structs.replace(pack.manifest, backend="CUDA")
    (pack.folder / MANIFEST).write_bytes(msgspec.json.encode(changed))
    (found,) = store.packs()
    assert (found.manifest, "signature is wrong" in found.fault) == (None, True)


def test_a_library_that_was_replaced_with_its_times_is_not_loaded(store: PackStore, tmp_path: Path) -> None:
    pack = store.install(write_pack(tmp_path / "a.tar.gz", "vulkan"), engine_version())
    library = pack.folder / "libggml-vulkan.so"
    names = [library.name]
    verdict = Verdict("vulkan", str(pack.folder), "engine", library.name, file_states(pack.folder, names), ok=True)
    assert verdict.is_current
    times = library.stat()
    library.write_bytes(b"another"[: times.st_size])
    os.utime(library, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert library.stat().st_size == times.st_size
    assert not verdict.is_current


def test_a_key_has_one_spelling() -> None:
    assert checked_key(f"  {PREFIX}{'A' * 43}=") == f"{PREFIX}{'A' * 43}="
