"""Scans stores (folders of the user or of other programs) for model files, and checks whether a scan is out of date."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from engine.base.files import read_at_most
from engine.base.language import tr
from engine.base.values import replace
from engine.library.census import Census, FoundFile, Problem, found_file
from engine.library.ollama import scan_ollama
from engine.library.stores import Store
from engine.library.walking import NOT_READABLE, Walk, is_text
from engine.model.gguf.parts import parse_part_name

_REPOSITORY = re.compile(r"models--(.+?)--(.+)")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def scan(stores: Iterable[Store]) -> Census:
    """Return the model files and side files in `stores`. A store whose folder does not exist is empty."""
    looked, files, problems = tuple(stores), [], []
    folders: dict[str, int] = {}
    for store in looked:
        walk = Walk()
        files += list(_files(store, walk))
        problems += [Problem(store, _with_remedy(store, sentence)) for sentence in walk.problems]
        folders |= walk.folders
    return Census(looked, _once_each(files), tuple(problems), tuple(folders.items()))


def is_stale(census: Census) -> bool:
    """Return whether a new scan is needed, because folders or files have changed since the scan `census`.

    Only `stat` results are compared.
    """
    try:
        if any(Path(folder).stat().st_mtime_ns != mtime_ns for folder, mtime_ns in census.folders):
            return True
    except OSError:
        return True
    known = {folder for folder, _ in census.folders}
    known |= {str(file.path) for file in census.files if not file.is_missing}
    if any(_has_appeared(store, known) for store in census.stores):
        return True
    return any(not file.is_missing and not _is_as_found(file) for file in census.files)


def _has_appeared(store: Store, known: set[str]) -> bool:
    root = store.root / "manifests" if store.kind == "ollama" else store.root
    mode = os.R_OK if store.kind == "opened" else os.R_OK | os.X_OK
    return str(root) not in known and os.access(root, mode)


def _is_as_found(file: FoundFile) -> bool:
    try:
        state = file.path.stat()
    except OSError:
        return False
    return (state.st_size, state.st_mtime_ns, state.st_ino) == file.state


def _files(store: Store, walk: Walk) -> Iterator[FoundFile]:
    match store.kind:
        case "ollama":
            yield from scan_ollama(store, walk)
        case "huggingface":
            yield from _hub_files(store, walk)
        case "opened":
            yield from _opened_files(store)
        case "llama_cpp":
            # The same layout since 2026, flat files before.
            yield from _hub_files(store, walk)
            yield from _plain_files(store, walk)
        case _:
            yield from _plain_files(store, walk)


def _plain_files(store: Store, walk: Walk) -> Iterator[FoundFile]:
    for path, state in walk.files(store.root):
        within = path.parent.relative_to(store.root).parts
        # publisher/model/file in LM Studio's store; elsewhere the last folder may name the model.
        title = "/".join(within[:2]) if store.kind == "lm_studio" else "".join(within[-1:])
        yield found_file(path, state, store, path.name, title)


def _opened_files(store: Store) -> Iterator[FoundFile]:
    part = parse_part_name(store.root.name)
    for path in (store.root,) if part is None else part.paths(store.root.parent):
        with suppress(OSError):
            state = path.stat()
            if stat.S_ISREG(state.st_mode) and is_text(str(path)):
                yield found_file(path, state, store, path.name, path.parent.name)


def _hub_files(store: Store, walk: Walk) -> Iterator[FoundFile]:
    for folder in _repositories(store, walk):
        match = _REPOSITORY.fullmatch(folder.name)
        title = f"{match[1]}/{match[2]}" if match else folder.name
        seen: set[tuple[int, int]] = set()
        for snapshot in _snapshots(folder, walk):
            for path, state in walk.files(snapshot):
                # Snapshots of several commits lead to the same blob.
                if (state.st_dev, state.st_ino) in seen:
                    continue
                seen.add((state.st_dev, state.st_ino))
                yield replace(found_file(path, state, store, path.name, title), sha256=_linked_hash(path))


def _repositories(store: Store, walk: Walk) -> list[Path]:
    """Return the folders of the repositories in a Hugging Face cache, sorted.

    The cache folder itself is recorded in `walk`, so that `is_stale` notices new repositories.
    """
    try:
        walk.folders[str(store.root)] = store.root.stat().st_mtime_ns
        return sorted(path for path in store.root.iterdir() if _REPOSITORY.fullmatch(path.name))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        walk.problems.append(f"{store.root}: {error.strerror}.")
        return []


def _snapshots(repository: Path, walk: Walk) -> list[Path]:
    """Return the snapshot folders of a repository, the snapshot of its main branch first."""
    folder = repository / "snapshots"
    try:
        walk.folders[str(folder)] = folder.stat().st_mtime_ns
        snapshots = sorted(folder.iterdir())
    except OSError:
        return []
    try:
        main = read_at_most(repository / "refs" / "main", 80, timeout_s=0.0).decode("ascii", "replace").strip()
    except OSError:
        main = ""
    return sorted(snapshots, key=lambda path: path.name != main)


def _linked_hash(path: Path) -> str | None:
    """Return the SHA-256 of a large file in the Hugging Face cache; None for a small file.

    It is the name of the blob that the snapshot's link leads to.
    """
    try:
        name = path.readlink().name
    except OSError:
        return None
    return name if _SHA256.fullmatch(name) else None


def _once_each(files: Iterable[FoundFile]) -> tuple[FoundFile, ...]:
    """Return the files without duplicates, which occur if the folder of a store is inside another store's.

    A blob of Ollama that has several names is kept once for each name.
    """
    return tuple({(file.path, file.name): file for file in reversed(list(files))}.values())[::-1]


def _with_remedy(store: Store, sentence: str) -> str:
    if store.kind == "ollama" and NOT_READABLE in sentence:
        return sentence.replace(
            NOT_READABLE, tr("cannot be read (no permission); join the group ollama, or make Ollama use another folder")
        )
    return f"{store.owner}: {sentence}" if store.owner else sentence
