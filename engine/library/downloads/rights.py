"""Restricts the file access of a download's process: it may write only into the folders of its files.

The process parses data from untrusted servers. With Landlock (Linux) it can reach no other file of the user, so a flaw
in the HTTP or TLS code can damage no more than a download.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from pathlib import Path

from engine.base.confinement import DOWNLOAD, confine
from engine.library.downloads.part_file import storage_error
from engine.runtime.protocol.network import Download


def give_up_rights(download: Download) -> bool:
    """Restrict this process to the folders of `download`, which are created; return whether the system supports that.

    The process must have a single thread, because older versions of Landlock do not restrict other threads.

    Raises:
        StorageError: if a folder cannot be made.
    """
    writable = tuple(writable_folders(download))
    return confine(DOWNLOAD, _network_files(), writable)


def writable_folders(download: Download) -> Iterator[Path]:
    """Yield the folders that `download` writes into.

    They are created first, because a Landlock rule needs an existing folder.

    Raises:
        StorageError: if a folder cannot be made.
    """
    for file in download.files:
        target = Path(file.target)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error(error, target) from error
        yield target.parent
        # Links and refs of the Hugging Face cache are in other folders of the same repository. Those are made when
        # the file is whole, because others take a snapshot's folder for a model that is there.
        for path in (file.link, *(ref for ref, _ in download.refs)):
            if path is not None:
                yield from _existing_folders(Path(path).parent, Path(os.path.commonpath((target.parent, path))))


def _existing_folders(folder: Path, root: Path) -> Iterator[Path]:
    """Yield the existing folders from `folder` up to `root`."""
    # All of them, because each may be a link to another disk.
    for each in (folder, *folder.parents):
        if each.is_dir():
            yield each
        if each == root:
            return


def _network_files() -> Iterator[Path]:
    """Yield the files outside the system's folders that DNS resolution and TLS read."""
    # Under WSL this is a link into /mnt.
    yield Path(os.path.realpath("/etc/resolv.conf"))
    paths = ssl.get_default_verify_paths()
    for path in (paths.cafile, paths.capath):
        if path is not None:
            yield Path(path)
            yield Path(os.path.realpath(path))
