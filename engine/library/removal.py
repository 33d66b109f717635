"""Moves models to the trash. Before that, it lists the files to move, the space that is freed, and the owning program.

A blob of the Hugging Face cache is removed together with all links to it. A blob of Ollama is removed together with the
last manifest that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from engine.base.errors import LibraryError
from engine.base.json_file import UNREADABLE
from engine.base.language import tr, tr_count
from engine.base.units import format_bytes
from engine.library.census import FoundFile
from engine.library.entry import Copy, Entry, Quantisation
from engine.library.ollama import blobs_of, manifest_paths
from engine.library.walking import Walk

_SHARED_STORE = ".huggingface-shared-blobs"


class Removal(Struct, frozen=True):
    """The effect of moving one copy of a quantisation to the trash.

    `paths`: paths of the files to move.
    `freed_bytes`: bytes that are free after the trash is emptied.
    `owner`: name of the program whose store has the files, empty for a folder of the user.
    `side_files`: side files that are moved as well, because no other model uses them.
    `refusal`: reason why the copy cannot be removed, else empty.
    """

    paths: tuple[Path, ...]
    freed_bytes: int
    owner: str = ""
    side_files: tuple[FoundFile, ...] = ()
    refusal: str = ""

    def question(self, title: str) -> str:
        """Return the question to the user before the files are moved. `title`: name of the model."""
        files = tr_count("{count} file", "{count} files", len(self.paths))
        parts = [
            tr(
                "Move {title} to the trash? This frees {freed} ({files}).",
                title=title,
                files=files,
                freed=format_bytes(self.freed_bytes),
            )
        ]
        if self.side_files:
            parts.append(
                tr(
                    "Files that belong only to this model, such as a projector, are also moved: {names}.",
                    names=", ".join(file.name for file in self.side_files),
                )
            )
        if self.owner:
            parts.append(tr("{owner} manages this file and will no longer find it.", owner=self.owner))
        return " ".join(parts)


def plan_removal(entry: Entry, quantisation: Quantisation, copy: Copy, others: Sequence[Entry]) -> Removal:
    """Return the effect of moving one copy of a quantisation to the trash.

    The function reads the file system, so it must not be called in the GUI thread.

    `others`: all entries of the library, to find side files that other models use.
    """
    files = [*copy.parts, *_side_files_alone(entry, quantisation, copy, others)]
    side_files = tuple(files[len(copy.parts) :])
    store = copy.first.store
    try:
        match store.kind:
            case "ollama":
                paths = _ollama_paths(copy.first)
            case "huggingface" | "llama_cpp":
                paths = tuple(path for file in files for path in _hub_paths(file))
            case _:
                paths = tuple(file.path for file in files)
    except LibraryError as error:
        return Removal((), 0, store.owner, refusal=error.summary())
    paths = tuple(dict.fromkeys(paths))
    return Removal(paths, _freed_bytes(paths), store.owner, side_files)


def to_trash(paths: Sequence[Path], send: Callable[[str], None] | None = None) -> None:
    """Move files to the system's trash.

    `send`: moves one file, None for Send2Trash.

    Raises:
        LibraryError: if a file could not be moved; the message says how many were moved before.
    """
    move = send or _send2trash()
    for index, path in enumerate(paths):
        try:
            move(str(path))
        except OSError as error:
            moved = tr(" Number of files already moved to the trash: {count}.", count=index) if index else ""
            raise LibraryError(
                tr("{name} could not be moved to the trash ({error}).{moved}", name=path.name, error=error, moved=moved)
            ) from error


def _send2trash() -> Callable[[str], None]:
    from send2trash import send2trash

    def send(path: str) -> None:
        send2trash(path)

    return send


def _side_files_alone(
    entry: Entry, quantisation: Quantisation, copy: Copy, others: Sequence[Entry]
) -> Iterator[FoundFile]:
    """Yield the side files to remove together with a copy of a model: those that no other model uses.

    Nothing is yielded if the model has another copy or quantisation, or if another program owns the store.
    """
    if len(entry.quantisations) > 1 or len(quantisation.copies) > 1 or not copy.first.store.is_ours:
        return
    shared = {side.file.path for other in others if other.key != entry.key for side in other.side_files}
    for side in entry.side_files:
        if side.file.path not in shared and side.file.store == copy.first.store:
            yield side.file


def _hub_paths(file: FoundFile) -> tuple[Path, ...]:
    """Return the paths to remove for a file of the Hugging Face cache.

    They are the snapshot's link, the links of the repository's other snapshots to the same blob, and the blob. The
    library lists these links as one copy.
    """
    path = file.path
    if not path.is_symlink():
        return (path,)
    # One step and not `resolve`: the blob may itself be a link into a store of shared blobs.
    blob = path.parent / path.readlink()
    if blob.is_symlink() or _SHARED_STORE in blob.parts:
        raise LibraryError(
            tr(
                "{name} is stored in blobs shared by several repositories, so Layerdeck cannot remove it; use "
                "`hf cache delete`.",
                name=file.name,
            )
        )
    repository = next((folder for folder in path.parents if folder.name.startswith("models--")), path.parent)
    blob = blob.resolve()
    links = (each for each in (repository / "snapshots").rglob("*") if each.is_symlink() and each != path)
    return (path, *sorted(link for link in links if link.resolve() == blob), blob)


def _ollama_paths(file: FoundFile) -> tuple[Path, ...]:
    """Return the paths to remove for a model of Ollama: its manifest and the blobs that no other manifest names.

    `ollama rm` does the same.
    """
    root = file.store.root
    manifest = next((path for kind, path in file.texts if kind == "manifest"), None)
    if manifest is None:
        raise LibraryError(tr("{name} has no manifest; remove it with `ollama rm {name}`.", name=file.name))
    try:
        own = blobs_of(root, manifest)
        kept = {blob for other in manifest_paths(root, Walk()) if other != manifest for blob in blobs_of(root, other)}
    # Also for a manifest of another model: it may need any of the blobs, so none can be removed.
    except (OSError, *UNREADABLE) as error:
        raise LibraryError(
            tr("Ollama's manifests cannot be read ({error}); use `ollama rm {name}`.", error=error, name=file.name)
        ) from error
    return (manifest, *(blob for blob in dict.fromkeys(own) if blob not in kept and blob.exists()))


def _freed_bytes(paths: Sequence[Path]) -> int:
    """Return the bytes that are freed by removing `paths`.

    Symbolic links, and files that have another hard link, free nothing.
    """
    freed_bytes, seen = 0, set()
    for path in paths:
        try:
            state = path.lstat()
        except OSError:
            continue
        if not path.is_symlink() and state.st_nlink == 1 and state.st_ino not in seen:
            seen.add(state.st_ino)
            freed_bytes += state.st_size
    return freed_bytes
