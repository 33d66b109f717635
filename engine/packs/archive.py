"""Unpacking the archive of a pack. It comes from anywhere: nothing but the files that its manifest lists is written."""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
import tarfile
import zlib
from pathlib import Path
from typing import IO

from engine.errors import PackError
from engine.files import open_regular
from engine.packs.manifest import MANIFEST, MAX_FILES, MAX_MANIFEST_BYTES, Manifest, PackFile, parse_manifest
from engine.texts import show
from engine.units import MIB, format_bytes

RESERVE_BYTES = 256 * MIB
"""What stays free on the disk."""
_READ_BYTES = 1 << 20
_SHOWN_NAME = 200
_HEADER_BYTES = 1 << 16
"""For what stands in an archive before a file: longer headers would be read into memory whole."""
_BROKEN = (tarfile.TarError, EOFError, zlib.error)


def unpack(archive: Path, folder: Path, engine: str) -> Manifest:
    """Write the pack in `archive` (.tar.gz: its manifest first, then its files, all in one folder) into `folder`.

    `engine` is the engine that is here. Files are hashed as they are written, and never larger than listed.

    Raises:
        PackError: where it is no pack, a damaged one, or one for another engine or computer.
    """
    shown = show(archive.name, _SHOWN_NAME)
    try:
        with (
            open_regular(archive) as opened,
            gzip.GzipFile(fileobj=opened) as unzipped,
            _Metered(unzipped) as metered,
            tarfile.open(mode="r|", fileobj=metered) as tar,
        ):
            manifest = _manifest(tar, metered)
            if misfit := manifest.misfit(engine):
                raise PackError(f"{shown}: {misfit}")
            _require_room(folder, manifest)
            missing = dict(manifest.files)
            while member := _next(tar, metered):
                name = _name(member, manifest.name)
                file = missing.pop(name, None)
                if file is None:
                    raise PackError(f"{shown}: it has {name} twice, or its manifest does not list it.")
                metered.allow(file.bytes)
                _write(_content(tar, member), folder / name, file)
    except PackError:
        raise
    except _BROKEN as error:
        raise PackError(f"{shown} is no engine pack, or it is damaged ({error}). Fetch it again.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PackError(f"{shown} cannot be unpacked: {reason}.") from None
    if missing:
        raise PackError(f"{shown} ends before {next(iter(missing))}. Fetch it again.")
    return manifest


class _Metered(io.RawIOBase):
    """What comes out of an archive, as much as was allowed: a few bytes may unpack to any number."""

    def __init__(self, source: gzip.GzipFile) -> None:
        super().__init__()
        self._source = source
        self._left_bytes = _HEADER_BYTES

    def allow(self, size_bytes: int) -> None:
        """Have so many bytes more pass."""
        self._left_bytes += size_bytes

    def read(self, size: int = -1) -> bytes:
        data = self._source.read(size)
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            raise PackError("It is no engine pack: more is in it than its manifest says.")
        return data


def _next(tar: tarfile.TarFile, metered: _Metered) -> tarfile.TarInfo | None:
    """Return the next member that is no folder."""
    for _ in range(MAX_FILES):
        metered.allow(_HEADER_BYTES)
        member = tar.next()
        if member is None or not member.isdir():
            return member
    raise PackError("It is no engine pack: it is made of folders.")


def _manifest(tar: tarfile.TarFile, metered: _Metered) -> Manifest:
    member = _next(tar, metered)
    head, _, name = ("", "", "") if member is None else member.name.partition("/")
    if member is None or name != MANIFEST or member.size > MAX_MANIFEST_BYTES:
        raise PackError(f"It is no engine pack: it does not begin with NAME/{MANIFEST}.")
    metered.allow(member.size)
    manifest = parse_manifest(_content(tar, member).read(MAX_MANIFEST_BYTES + 1))
    if head != manifest.name:
        raise PackError(f'It is no engine pack: its folder is not called "{manifest.name}" as the pack is.')
    return manifest


def _name(member: tarfile.TarInfo, folder: str) -> str:
    """Return the file's name where it lies in the pack's folder itself: no path leads anywhere else."""
    head, _, name = member.name.partition("/")
    if head != folder or not name or "/" in name or name in (".", ".."):
        raise PackError(f"It is no engine pack: {member.name[:80]} does not lie in its folder.")
    return name


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    content = tar.extractfile(member) if member.isreg() and not member.issparse() else None
    if content is None:
        raise PackError(f"It is no engine pack: {member.name[:80]} is no plain file.")
    return content


def _write(content: IO[bytes], path: Path, listed: PackFile) -> None:
    digest, left_bytes = hashlib.sha256(), listed.bytes
    with path.open("xb") as file:
        while part := content.read(_READ_BYTES):
            left_bytes -= len(part)
            if left_bytes < 0:
                break
            digest.update(part)
            file.write(part)
    if left_bytes != 0 or digest.hexdigest() != listed.sha256:
        raise PackError(f"{path.name} is not the file that the manifest describes. Fetch the pack again.")


def _require_room(folder: Path, manifest: Manifest) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if manifest.total_bytes > free_bytes - RESERVE_BYTES:
        raise PackError(
            f"The pack needs {format_bytes(manifest.total_bytes)} in {folder}, and {format_bytes(free_bytes)} are "
            "free there. Free some and install it again."
        )
