"""Where files of a repository go: a folder that somebody chose, or the Hugging Face cache as others expect it.

Names come from a server. Nothing is placed outside of its folder, and nothing that is there is overwritten.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from engine.base.errors import ArgumentError
from engine.base.files import write_whole
from engine.library.downloads.part_file import storage_error
from engine.library.hub.addresses import WebAddress, is_safe_name, is_safe_path
from engine.library.hub.client import file_url
from engine.library.hub.listing import HubFile, RepoListing
from engine.library.hub.settings import HubSettings
from engine.model.gguf.quoting import quote
from engine.runtime.protocol.network import TransferFile


def in_folder(
    listing: RepoListing, files: Sequence[HubFile], hub: HubSettings, folder: Path
) -> tuple[TransferFile, ...]:
    """Return the transfers of `files` into `folder`, under their own names without the folders of the repository.

    Raises:
        ArgumentError: for names that are not safe, and for two files of one name.
    """
    if len({file.name for file in files}) < len(files):
        raise ArgumentError(f"Two files of {listing.repo} have one name; choose the cache instead of a folder.")
    return tuple(
        _transfer(listing, file, hub, _inside(folder, file.name), None) for file in files
    )  # fmt: skip


def in_cache(
    listing: RepoListing, files: Sequence[HubFile], hub: HubSettings, cache: Path
) -> tuple[tuple[TransferFile, ...], tuple[tuple[str, str], ...]]:
    """Return the transfers of `files` into the Hugging Face cache, and the refs that name their commit.

    Raises:
        ArgumentError: for names that are not safe.
    """
    home = cache / f"models--{listing.repo.replace('/', '--')}"
    snapshot = home / "snapshots" / listing.commit
    transfers = tuple(
        _transfer(
            listing, file, hub, _inside(home / "blobs", file.etag), str(_inside(snapshot, file.path))
        ) for file in files
    )  # fmt: skip
    return transfers, ((str(_inside(home / "refs", listing.revision)), listing.commit),)


def from_web(address: WebAddress, folder: Path) -> TransferFile:
    """Return the transfer of a file of any server; nothing is known of it but its name."""
    return TransferFile(url=address.url, target=str(_inside(folder, address.name)))


def lead_to(link: Path, target: Path) -> None:
    """Make `link` lead to `target`: as a relative link, else as the same file under a second name.

    Raises:
        StorageError: where neither can be made.
    """
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(link):
            if link.resolve() == target.resolve():
                return
            link.unlink()
        try:
            link.symlink_to(os.path.relpath(target, link.parent))
        except (OSError, NotImplementedError):
            link.hardlink_to(target)
    except OSError as error:
        raise storage_error(error, link) from error


def write_refs(refs: Iterable[tuple[str, str]]) -> None:
    """Write the small files that say which commit a name such as "main" is.

    Raises:
        StorageError: where one cannot be written.
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
        url=file_url(hub, listing.repo, listing.commit, file.path),
        target=str(target),
        size_bytes=file.size_bytes,
        sha256=file.sha256,
        etag=file.etag,
        commit=listing.commit,
        link=link,
    )


def _inside(folder: Path, path: str) -> Path:
    if not (is_safe_path(path) if "/" in path else is_safe_name(path)):
        raise ArgumentError(f"{quote(path)} is no name for a file; nothing was placed.")
    return folder / path
