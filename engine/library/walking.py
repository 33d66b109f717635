"""Walks through folders to find model files, without opening files.

Links are followed. The depth and the numbers of folders and files are limited.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct, field

from engine.base.language import tr
from engine.base.texts import quote
from engine.library.names import is_wanted

# Deepest level of folders below the root.
MAX_DEPTH = 12
NOT_READABLE = tr("cannot be read (no permission); change the permissions of the folder")
MAX_FOLDERS = 20_000
MAX_FILES = 100_000
# Ending of the control file that aria2 keeps next to an unfinished file with its final name and size.
_CONTROL_FILE = ".aria2"


class Walk(Struct):
    """A walk through the folders below one or more roots, with a record of visited folders and problems.

    `folders`: paths of the visited folders, with their modification times (ns).
    `problems`: sentences about folders and files that were skipped.
    `n_files`: number of model files found so far.
    """

    folders: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    n_files: int = 0
    _seen: set[tuple[int, int]] = field(default_factory=set)

    def files(self, root: Path) -> Iterator[tuple[Path, os.stat_result]]:
        """Yield path and `stat` result of each model file or side file below `root`, in a fixed order.

        Nothing is yielded if `root` does not exist.
        """
        pending = [(str(root), 0)]
        while pending:
            folder, depth = pending.pop()
            if not self._enter(folder):
                continue
            entries = self._entries(folder)
            names = {entry.name for entry in entries}
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if not is_text(entry.name):
                    self.problems.append(
                        tr(
                            "The name of a file in {folder} is not valid text; rename {name}.",
                            folder=folder,
                            name=quote(entry.name),
                        )
                    )
                    continue
                try:
                    if is_wanted(entry.name):
                        state = entry.stat()
                        if not _is_regular(state) or entry.name + _CONTROL_FILE in names:
                            continue
                        if self.n_files == MAX_FILES:
                            self.problems.append(
                                tr(
                                    "{root} has more than {max_files} files; the other files are not listed. Add its "
                                    "subfolders to the library to list them.",
                                    root=root,
                                    max_files=MAX_FILES,
                                )
                            )
                            return
                        self.n_files += 1
                        yield Path(entry.path), state
                    elif depth < MAX_DEPTH and entry.is_dir():
                        pending.append((entry.path, depth + 1))
                except OSError:
                    continue  # A link to nowhere, or a file that has just gone: there is no model.

    def _enter(self, folder: str) -> bool:
        """Record `folder` as visited, and return whether to read it.

        False if `folder` cannot be read, if it was visited by another path, or if `MAX_FOLDERS` folders were visited.
        """
        try:
            state = Path(folder).stat()
        except FileNotFoundError:
            return False
        except OSError as error:
            self._refuse(folder, error)
            return False
        if (state.st_dev, state.st_ino) in self._seen:
            return False
        if len(self.folders) == MAX_FOLDERS:
            self.problems.append(
                tr(
                    "{folder} was skipped: only the first {max_folders} folders are searched. Add this folder to the "
                    "library to search it.",
                    folder=folder,
                    max_folders=MAX_FOLDERS,
                )
            )
            return False
        self._seen.add((state.st_dev, state.st_ino))
        self.folders[folder] = state.st_mtime_ns
        return True

    def _entries(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as entries:
                # Folders are taken from the end of a list: the last one first.
                return sorted(entries, key=lambda entry: entry.name, reverse=True)
        except OSError as error:
            self._refuse(folder, error)
            return []

    def _refuse(self, folder: str, error: OSError) -> None:
        reason = NOT_READABLE if isinstance(error, PermissionError) else error.strerror
        self.problems.append(f"{folder}: {reason}.")


def is_text(name: str) -> bool:
    """Return whether a file name is valid Unicode. On Linux it may consist of any bytes."""
    return name.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in name)


def _is_regular(state: os.stat_result) -> bool:
    return stat.S_ISREG(state.st_mode) and state.st_size > 0
