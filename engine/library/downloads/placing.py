"""Chooses the paths of downloaded files: a folder of the user, or the layout of the Hugging Face cache.

File names come from a server. No file is placed outside its folder, and no existing file is overwritten.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from engine.base.errors import ArgumentError
from engine.base.files import write_whole
from engine.base.texts import quote
from engine.library.downloads.part_file import storage_error
from engine.library.hub.addresses import WebAddress, is_safe_name, is_safe_path
from engine.library.hub.listing import HubFile, RepoListing
from engine.library.hub.settings import HubSettings
from engine.runtime.protocol.network import TransferFile


def in_folder(
    listing: RepoListing, files: Sequence[HubFile], hub: HubSettings, folder: Path
) -> tuple[TransferFile, ...]:
    """Return address, target path and hash of `files` for a download into `folder`.

    All files are placed directly in `folder`, also those from subfolders of the repository.

    Raises:
        ArgumentError: if a name is not safe, or if two files have the same name.
    """
    if len({file.name for file in files}) < len(files):
        raise ArgumentError(f"Two files of {listing.repo} have the same name; choose the cache instead of a folder.")
    return tuple(
        _transfer(listing, file, hub, _inside(folder, file.name), None) for file in files
    )  # fmt: skip


def in_cache(
    listing: RepoListing, files: Sequence[HubFile], hub: HubSettings, cache: Path
) -> tuple[tuple[TransferFile, ...], tuple[tuple[str, str], ...]]:
    """Return address, target path and hash of `files` for a download into the Hugging Face cache, and the refs.

    A ref is a small file that states the commit of a branch. Each is returned as (path, commit).

    Raises:
        ArgumentError: if a name is not safe.
    """
    # The layout of huggingface_hub: models--OWNER--NAME with blobs, snapshots and refs.
    home = cache / f"models--{listing.repo.replace('/', '--')}"
    snapshot = home / "snapshots" / listing.commit
    transfers = tuple(
        _transfer(
            listing, file, hub, _inside(home / "blobs", file.etag), str(_inside(snapshot, file.path))
        ) for file in files
    )  # fmt: skip
    return transfers, ((str(_inside(home / "refs", listing.revision)), listing.commit),)


def from_web(address: WebAddress, folder: Path) -> TransferFile:
    """Return address and target path for a download from any server into `folder`. Size and hash are unknown."""
    return TransferFile(url=address.url, target=str(_inside(folder, address.name)))


def make_link(link: Path, target: Path) -> None:
    """Make `link` a relative symbolic link to `target`, or a hard link if the system refuses symbolic links.

    Raises:
        StorageError: if neither is possible.
    """
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        # `exists` would follow the link, and miss a broken one.
        if os.path.lexists(link):
            if link.resolve() == target.resolve():
                return
            link.unlink()
        try:
            link.symlink_to(os.path.relpath(target, link.parent))
        # Windows allows symbolic links only to administrators and in developer mode.
        except (OSError, NotImplementedError):
            link.hardlink_to(target)
    except OSError as error:
        raise storage_error(error, link) from error


def write_refs(refs: Iterable[tuple[str, str]]) -> None:
    """Write refs of the Hugging Face cache: small files that state the commit of a revision such as "main".

    `refs`: pairs of a path and the text to write.

    Raises:
        StorageError: if a file cannot be written.
    """
    for path, text in refs:
        target = Path(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_whole(target, text.encode())
        except OSError as error:
            raise storage_error(error, target) from error


def _transfer(listing: RepoListing, file: HubFile, hub: HubSettings, target: Path, link: str | None) -> TransferFile:
    return TransferFile(
        url=hub.file_url(listing.repo, listing.commit, file.path),
        target=str(target),
        size_bytes=file.size_bytes,
        sha256=file.sha256,
        etag=file.etag,
        commit=listing.commit,
        link=link,
    )


def _inside(folder: Path, path: str) -> Path:
    if not (is_safe_path(path) if "/" in path else is_safe_name(path)):
        raise ArgumentError(f"{quote(path)} is not a valid file name; nothing was saved.")
    return folder / path
