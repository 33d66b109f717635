"""The steps of a scan of the library: find files, read their headers, and make the rows of the list.

The window runs the steps one by one in the background, the command line all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from engine.base.cancellation import CancelToken
from engine.base.engine_build import own_version
from engine.base.errors import LibraryError
from engine.base.language import tr
from engine.base.texts import quote
from engine.library.census import Census, Changes, FoundFile, compare, with_missing
from engine.library.children import read_headers
from engine.library.facts import Facts, fingerprint
from engine.library.fit import Fit
from engine.library.grouping import FactsOf, group, join_parts
from engine.library.index import LibraryIndex, State
from engine.library.listed import Listed, by_name, listed
from engine.library.notes import Notes
from engine.library.scan import scan
from engine.library.stores import Store
from engine.library.walking import is_text

Known = Mapping[Path, tuple[State, Facts]]


def rescan(index: LibraryIndex, stores: Sequence[Store]) -> tuple[Census, Changes]:
    """Scan `stores` for files, save the result in `index`, and return it with the differences to the previous scan."""
    before, after = index.census(), scan(stores)
    changes = _changes(before, after, current_facts(before, index.facts()))
    after = with_missing(after, changes)
    index.save_census(after)
    return after, changes


def _changes(before: Census, after: Census, facts: FactsOf) -> Changes:
    there = {file.path for file in after.files}
    known = {file.path for file in before.files}
    lost_sizes = {file.size_bytes for file in before.files if file.path not in there}
    # A fingerprint reads the disk. Only a new file of the size of a lost one can be that file.
    arrived = (file for file in after.files if file.path not in known and file.size_bytes in lost_sizes)
    return compare(before, after, facts, {file.path: fingerprint(file.path) for file in arrived})


def current_facts(census: Census, known: Known) -> dict[Path, Facts]:
    """Return the saved header values that are still valid, by path of the file.

    They are valid if size, modification time and inode of the model (`Copy.state`) are the same as when its headers
    were read.

    `census`: the files that a scan has just found.
    `known`: the saved header values by path of the first part, with size, modification time and inode of that time.
    """
    found = {}
    for copy in join_parts(census.files):
        kept = known.get(copy.path)
        if kept is not None and kept[0] == copy.state:
            found[copy.path] = kept[1]
    return found


def unread(census: Census, facts: FactsOf, *, retries: bool = True) -> tuple[tuple[Path, ...], ...]:
    """Return the models and side files whose headers have to be read, each as the paths of its parts.

    `facts`: header values by path of the first part.
    `retries`: whether to try again headers that could not be read: permissions or the disk may have changed since. A
        file that crashed the child process is tried again only by another version of this program.
    """
    copies = join_parts(file for file in census.files if not file.is_missing)
    wanted = (copy for copy in copies if not _is_read(facts.get(copy.path)))
    return tuple(copy.paths for copy in wanted if retries or copy.path not in facts)


def _is_read(facts: Facts | None) -> bool:
    # A header that was read and is of no language model has an error and an architecture.
    return facts is not None and (not facts.error or facts.architecture != "" or facts.crashed == own_version())


def read_missing(
    index: LibraryIndex,
    census: Census,
    wanted: Sequence[tuple[Path, ...]],
    on_facts: Callable[[Path, Facts], None],
    token: CancelToken,
) -> None:
    """Read the headers of the models `wanted` in a child process, and save their values in `index`.

    If an error occurs, the values that were read before are saved too.

    `census`: the files found by a scan of the folders, with their states.
    `wanted`: the paths of the parts of each model.
    `on_facts`: called in the caller's thread with the path and the header values of each model.

    Raises:
        LibraryError: no child can be started, children crash again and again, or the index cannot be written.
    """
    states = {copy.path: copy.state for copy in join_parts(census.files)}
    found: dict[Path, tuple[State, Facts]] = {}

    def take(paths: tuple[Path, ...], facts: Facts) -> None:
        found[paths[0]] = (states[paths[0]], facts)
        on_facts(paths[0], facts)

    try:
        read_headers(wanted, take, token)
    finally:
        index.save_facts(found)


def list_models(
    files: Sequence[FoundFile], facts: FactsOf, notes: Mapping[str, Notes], fits: Mapping[str, Fit]
) -> tuple[Listed, ...]:
    """Return the rows of the library's list, sorted by name.

    `facts`: header values by path. `notes`, `fits`: the saved notes and forecasts by fingerprint.
    """
    return by_name(listed(entry, notes, fits) for entry in group(files, facts))


def check_folder(path: Path) -> Path:
    """Return the absolute path of a folder that the user wants to add to the library.

    Raises:
        LibraryError: if `path` is not a folder, cannot be read, or is not valid text.
    """
    try:
        folder = path.expanduser().absolute()
        # `iterdir` may open the folder only for the first entry.
        with_entries = folder.iterdir()
        next(with_entries, None)
    except NotADirectoryError as error:
        raise LibraryError(tr("{path} is a file; choose the folder of the file.", path=path)) from error
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise LibraryError(
            tr("{path} cannot be opened ({reason}); choose another folder.", path=path, reason=reason)
        ) from error
    # File names may be any bytes; the index stores text as UTF-8.
    if not is_text(str(folder)):
        raise LibraryError(
            tr("The path {path} is not valid text; rename the folder or choose another one.", path=quote(str(folder)))
        )
    return folder
