"""Stores: the folders that are scanned for model files.

They are folders that the user added, and the model folders of other programs, which are read-only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from msgspec import Struct

from engine.base.files import hugging_face_cache
from engine.base.language import tr
from engine.library.walking import is_text

StoreKind = Literal["folder", "huggingface", "llama_cpp", "lm_studio", "ollama", "opened"]

_OPENED = tr("Opened")
# Store of the service that Ollama installs on Linux.
_OLLAMA_SERVICE = Path("/usr/share/ollama/.ollama/models")


class Store(Struct, frozen=True, gc=False):
    """A folder that is scanned for model files, or a single model file that the user opened.

    `root`: the folder; for an opened model, the path of its only file or of its first part.
    `owner`: name of the program that the store belongs to, empty for folders that the user added and opened files.
    """

    kind: StoreKind
    root: Path
    owner: str = ""

    @property
    def is_ours(self) -> bool:
        """Whether the user chose the folder or file of the store.

        A model file that is missing in such a store stays in the list.
        """
        return self.kind in ("folder", "opened")

    @property
    def label(self) -> str:
        """Name of the store for people: the program that owns it, or "Opened" for a single file that the user opened.

        Empty for folders that the user added.
        """
        return _OPENED if self.kind == "opened" else self.owner

    @property
    def words(self) -> str:
        """Name of the store for people: the label, else the path of the folder."""
        return self.label or str(self.root)


def folder_stores(folders: Iterable[Path]) -> tuple[Store, ...]:
    """Return the stores of folders that the user added."""
    return tuple(Store("folder", folder) for folder in folders)


def opened_stores(paths: Iterable[Path]) -> tuple[Store, ...]:
    """Return a store for each of `paths`: files of models that the user opened outside of all scanned folders."""
    return tuple(Store("opened", path) for path in paths)


def known_stores(environment: Mapping[str, str], home: Path) -> tuple[Store, ...]:
    """Return the stores of other programs. Their folders depend on `environment` and on the user's folder `home`.

    The folders need not exist. Those whose path is not valid text are left out. Sources of the paths: huggingface_hub's
    constants.py, llama.cpp's common/hf-cache.cpp and fs_get_cache_directory, LM Studio's and Ollama's documentation.
    """
    found: dict[Path, Store] = {}
    for store in _candidates(environment, home):
        # Two variables may name the same folder; the first store counts. The index stores text as UTF-8.
        if is_text(str(store.root)):
            found.setdefault(store.root, store)
    return tuple(found.values())


def _candidates(environment: Mapping[str, str], home: Path) -> Iterator[Store]:
    cache = _path(environment.get("XDG_CACHE_HOME"), home) or home / ".cache"
    llama_cache = _path(environment.get("LLAMA_CACHE"), home)
    if llama_cache is not None:
        yield Store("llama_cpp", llama_cache, "llama.cpp")
    yield Store("huggingface", hugging_face_cache(environment, home), tr("Hugging Face cache"))
    yield Store("llama_cpp", cache / "llama.cpp", "llama.cpp")
    for folder in (".lmstudio/models", ".cache/lm-studio/models"):
        yield Store("lm_studio", home / folder, "LM Studio")
    named = _path(environment.get("OLLAMA_MODELS"), home)
    if named is not None:
        yield Store("ollama", named, "Ollama")
    yield Store("ollama", home / ".ollama/models", "Ollama")
    yield Store("ollama", _OLLAMA_SERVICE, tr("Ollama service"))


def models_folder(opened: Iterable[Path], added: Iterable[Path], stores: Iterable[Store]) -> Path | None:
    """Return the folder in which a file dialog for models starts; None if no candidate exists.

    Candidates, in this order: the folders of the models `opened`, the folders `added`, the folders of `stores`.

    `opened`: paths of opened models, the most recent first.
    `added`: folders that the user added to the library.
    `stores`: stores of other programs. Ollama's is skipped, because its files have no names that a user knows.
    """
    named = (store.root for store in stores if store.kind != "ollama")
    # `Path.is_dir` raises for a path that is too long, which an environment variable may name.
    candidates = (*(path.parent for path in opened), *added, *named)
    return next((folder for folder in candidates if os.path.isdir(folder)), None)  # noqa: PTH112


def _path(text: str | None, home: Path) -> Path | None:
    if not text or "\0" in text:
        return None
    path = home / text[2:] if text.startswith("~/") else Path(text)
    return path if path.is_absolute() else None
