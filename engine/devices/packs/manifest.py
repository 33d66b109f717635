"""The manifest of an engine pack: `manifest.json` in its folder. It may come from strangers, so every value is limited.

`unpack` extracts the files that the manifest lists from a pack's archive, and no others.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import platform
import re
import shutil
import sys
import tarfile
import zlib
from pathlib import Path
from typing import IO

import msgspec
from msgspec import Struct

from engine.base.errors import PackError
from engine.base.files import open_regular, read_at_most
from engine.base.json_file import UNREADABLE
from engine.base.texts import show
from engine.base.units import GIB, MIB, format_bytes

MANIFEST = "manifest.json"
VERSION = 1
MAX_MANIFEST_BYTES = 1 << 16
MAX_FILES = 64
MAX_PACK_BYTES = 4 * GIB
"""Largest total size of a pack's files. CUDA's kernels for all cards with cuBLAS take 1.5 GiB."""
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,31}", re.ASCII)
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,127}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_MAX_WORDS = 200
RESERVE_BYTES = 256 * MIB
"""Free space in bytes that an installation leaves on the disk."""
_READ_BYTES = 1 << 20
_SHOWN_NAME = 200
_HEADER_BYTES = 1 << 16
"""Largest size in bytes of the tar headers before a file; tarfile would read longer headers into memory."""
_BROKEN = (tarfile.TarError, EOFError, zlib.error)


class PackFile(Struct, frozen=True):
    """Size and SHA-256 of one file of an engine pack (an installable llama.cpp backend)."""

    bytes: int
    sha256: str


class Needs(Struct, frozen=True, omit_defaults=True):
    """What an engine pack (an installable llama.cpp backend) needs from the system.

    `libraries`: shared libraries that must be installed.
    `glibc`: oldest version of the C library, such as "2.34"; empty: any.
    `words`: a remark for people.
    """

    libraries: tuple[str, ...] = ()
    glibc: str = ""
    words: str = ""


class Manifest(Struct, frozen=True, omit_defaults=True):
    """The manifest (description and list of files) of an engine pack, which is an installable llama.cpp backend.

    `engine`: name and version of the engine for which the pack was built.
    `backend`: name of the ggml backend.
    `system`, `machine`: `sys.platform` and `platform.machine()` for which the pack was built.
    `library`: file of the backend library, one of `files`.
    `key`, `signature`: public key and signature of the maker (`engine/devices/packs/signing.py`); empty: not signed.

    Defaults are left out of the JSON, so that the signature of a pack stays valid when a field is added here.
    """

    version: int
    name: str
    engine: str
    backend: str
    system: str
    machine: str
    library: str
    files: dict[str, PackFile]
    needs: Needs = Needs()
    key: str = ""
    signature: str = ""

    @property
    def total_bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    def misfit(self, engine: str) -> str:
        """Return a sentence that says why the engine pack (a llama.cpp backend) does not fit; empty if it fits.

        A pack fits if it was built for this engine and for this kind of computer.
        """
        if self.engine != engine:
            return f"It is for {show(self.engine, 60)}, but this program has {engine}: get the pack for this engine."
        if (self.system, self.machine) != (sys.platform, platform.machine()):
            theirs = show(f"{self.system} {self.machine}", 60)
            return f"It is for {theirs}, but this computer is {sys.platform} {platform.machine()}."
        found = platform.libc_ver()[1] if sys.platform == "linux" else ""
        # Other C libraries, such as musl, report no version here; loading the pack then decides.
        if self.needs.glibc and found and _numbers(found) < _numbers(self.needs.glibc):
            return f"It needs glibc {self.needs.glibc} or later, but this system has {found}."
        return ""


def parse_manifest(data: bytes) -> Manifest:
    """Return the checked manifest in a JSON document.

    Raises:
        PackError: the document is not a valid manifest; the message has the fault.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise PackError(f"{MANIFEST} is larger than {format_bytes(MAX_MANIFEST_BYTES)}, which no pack needs.")
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except UNREADABLE as error:
        raise PackError(f"{MANIFEST} cannot be read: {error}.") from None
    if fault := _fault(manifest):
        raise PackError(f"{MANIFEST} cannot be used: {fault}.")
    return manifest


def _fault(manifest: Manifest) -> str:
    if manifest.version != VERSION:
        return f"it has version {manifest.version}, but this program reads version {VERSION}; update Layerdeck"
    if not NAME.fullmatch(manifest.name):
        return f'"{manifest.name[:40]}" is not a valid pack name; use small letters, digits, dots and dashes'
    if not 0 < len(manifest.files) <= MAX_FILES:
        return f"it lists {len(manifest.files)} files, but a pack must have 1 to {MAX_FILES}"
    for name, file in manifest.files.items():
        if not _FILE_NAME.fullmatch(name) or name == MANIFEST:
            return f'"{name[:40]}" is not a valid name of a file in a pack'
        if file.bytes < 0 or not _SHA256.fullmatch(file.sha256):
            return f"{name} has no size or no checksum"
    if manifest.library not in manifest.files:
        return f'its library "{manifest.library[:40]}" is not among its files'
    if manifest.total_bytes > MAX_PACK_BYTES:
        most = format_bytes(MAX_PACK_BYTES)
        return f"its files take {format_bytes(manifest.total_bytes)}, but a pack may take at most {most}"
    texts = (
        manifest.engine, manifest.backend, manifest.system, manifest.machine, manifest.needs.words, manifest.key,
        manifest.signature,
    )  # fmt: skip
    if any(len(text) > _MAX_WORDS for text in texts):
        return f"a text in it is longer than {_MAX_WORDS} characters"
    if not re.fullmatch(r"\d{1,3}(\.\d{1,3}){0,2}|", manifest.needs.glibc, re.ASCII):
        return f'"{manifest.needs.glibc[:40]}" is not a version of glibc'
    return ""


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest (list of files) of the engine pack (a llama.cpp backend) in `folder`.

    Raises:
        PackError: if there is no valid manifest.
    """
    try:
        data = read_at_most(folder / MANIFEST, MAX_MANIFEST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise PackError(f"{MANIFEST} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    return parse_manifest(data)


def find_damage(folder: Path, manifest: Manifest) -> str:
    """Return a sentence on the first file that differs from the manifest; empty if no file differs. Reads all files."""
    for name, file in manifest.files.items():
        path = folder / name
        try:
            # A link could lead to another file after the check.
            if path.is_symlink() or not path.is_file():
                return f"{name} is missing. Install the pack again."
            if path.stat().st_size != file.bytes or _sha256(path) != file.sha256:
                return f"{name} was changed after the pack was made. Install the pack again."
        except OSError as error:
            return f"{name} cannot be read: {error.strerror or error}."
    return ""


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            digest.update(part)
    return digest.hexdigest()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d{1,9}", version))


def read_archive_manifest(archive: Path) -> Manifest:
    """Return the manifest (list of files) of the engine pack (a llama.cpp backend) in `archive`.

    The files after the manifest are not read.

    Raises:
        PackError: the archive is not a pack.
    """
    shown = show(archive.name, _SHOWN_NAME)
    try:
        with (
            open_regular(archive) as opened,
            gzip.GzipFile(fileobj=opened) as unzipped,
            _Metered(unzipped) as metered,
            tarfile.open(mode="r|", fileobj=metered) as tar,
        ):
            return _manifest(tar, metered)
    except PackError:
        raise
    except _BROKEN as error:
        raise PackError(f"{shown} is not an engine pack, or is damaged ({error}). Download it again.") from None
    except (OSError, ValueError) as error:
        raise PackError(f"{shown} cannot be unpacked: {getattr(error, 'strerror', None) or error}.") from None


def unpack(archive: Path, folder: Path, engine: str) -> Manifest:
    """Extract the engine pack (a llama.cpp backend) in `archive` into `folder`; return its manifest (list of files).

    The archive is a .tar.gz with the manifest first, then its files, all in one folder. Files are hashed while they are
    written, and never exceed their listed size. `engine`: name and version of the installed engine.

    Raises:
        PackError: if the archive is not a pack, is damaged, or is for another engine or computer.
    """
    shown = show(archive.name, _SHOWN_NAME)
    try:
        with (
            open_regular(archive) as opened,
            gzip.GzipFile(fileobj=opened) as unzipped,
            _Metered(unzipped) as metered,
            # As a stream: nothing in the archive can refer back, and each byte passes the limit once.
            tarfile.open(mode="r|", fileobj=metered) as tar,
        ):
            manifest = _manifest(tar, metered)
            if misfit := manifest.misfit(engine):
                raise PackError(f"{shown}: {misfit}")
            _require_room(folder, manifest)
            # Files are taken out as they come, so a doubled one is noticed, and at the end those that never came.
            missing = dict(manifest.files)
            while member := _next(tar, metered):
                name = _name(member, manifest.name)
                file = missing.pop(name, None)
                if file is None:
                    raise PackError(f"{shown}: {name} is in it twice, or is missing in its manifest.")
                metered.allow(file.bytes)
                _write(_content(tar, member), folder / name, file)
    except PackError:
        raise
    except _BROKEN as error:
        raise PackError(f"{shown} is not an engine pack, or is damaged ({error}). Download it again.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PackError(f"{shown} cannot be unpacked: {reason}.") from None
    if missing:
        raise PackError(f"{shown} ends before {next(iter(missing))}. Download it again.")
    return manifest


class _Metered(io.RawIOBase):
    """The decompressed archive as a stream that refuses to deliver more bytes than a limit.

    The limit is needed because a small archive may expand to any size.
    """

    def __init__(self, source: gzip.GzipFile) -> None:
        super().__init__()
        self._source = source
        self._left_bytes = _HEADER_BYTES

    def allow(self, size_bytes: int) -> None:
        """Raise the stream's limit by `size_bytes` bytes."""
        self._left_bytes += size_bytes

    def read(self, size: int = -1) -> bytes:
        data = self._source.read(size)
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            raise PackError("It is not an engine pack: it contains more than its manifest lists.")
        return data


def _next(tar: tarfile.TarFile, metered: _Metered) -> tarfile.TarInfo | None:
    """Return the next member of the archive that is not a folder; None at the end.

    `metered`: the stream that `tar` reads; its limit is raised by the size of the headers.
    """
    for _ in range(MAX_FILES):
        metered.allow(_HEADER_BYTES)
        member = tar.next()
        if member is None or not member.isdir():
            return member
    raise PackError("It is not an engine pack: it contains only folders.")


def _manifest(tar: tarfile.TarFile, metered: _Metered) -> Manifest:
    member = _next(tar, metered)
    head, _, name = ("", "", "") if member is None else member.name.partition("/")
    if member is None or name != MANIFEST or member.size > MAX_MANIFEST_BYTES:
        raise PackError(f"It is not an engine pack: it does not begin with NAME/{MANIFEST}.")
    metered.allow(member.size)
    manifest = parse_manifest(_content(tar, member).read(MAX_MANIFEST_BYTES + 1))
    if head != manifest.name:
        raise PackError(
            f'It is not an engine pack: the name of its folder is not "{manifest.name}", which is the name of the pack.'
        )
    return manifest


def _name(member: tarfile.TarInfo, folder: str) -> str:
    """Return the file name of a member of an engine pack's archive.

    Raise `PackError` if the member is not directly in the folder of the pack.
    """
    head, _, name = member.name.partition("/")
    if head != folder or not name or "/" in name or name in (".", ".."):
        raise PackError(f"It is not an engine pack: {member.name[:80]} is outside of its folder.")
    return name


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    # Links, devices and sparse files of an archive could write elsewhere, or more than their size says.
    content = tar.extractfile(member) if member.isreg() and not member.issparse() else None
    if content is None:
        raise PackError(f"It is not an engine pack: {member.name[:80]} is not a regular file.")
    return content


def _write(content: IO[bytes], path: Path, listed: PackFile) -> None:
    digest, left_bytes = hashlib.sha256(), listed.bytes
    # Exclusive: a file or a link that is already there is never written through.
    with path.open("xb") as file:
        while part := content.read(_READ_BYTES):
            left_bytes -= len(part)
            if left_bytes < 0:
                break
            digest.update(part)
            file.write(part)
    if left_bytes != 0 or digest.hexdigest() != listed.sha256:
        raise PackError(f"{path.name} is not the file that the manifest describes. Download the pack again.")


def _require_room(folder: Path, manifest: Manifest) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if manifest.total_bytes > free_bytes - RESERVE_BYTES:
        raise PackError(
            f"The pack needs {format_bytes(manifest.total_bytes)} in {folder}, but {format_bytes(free_bytes)} are "
            "free there. Free some space and install it again."
        )
