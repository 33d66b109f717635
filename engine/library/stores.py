"""Where models may be: folders that people added, and the stores of other programs, which are only read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from engine.base.files import hugging_face_cache
from engine.base.language import tr

StoreKind = Literal["folder", "huggingface", "llama_cpp", "lm_studio", "ollama", "opened"]

_OPENED = tr("Opened")
_OLLAMA_SERVICE = Path("/usr/share/ollama/.ollama/models")
"""Where Ollama's own installer for Linux has the service keep them."""


class Store(msgspec.Struct, frozen=True, gc=False):
    """A place with models. `owner` is whose it is, for sentences; empty for folders that people added.

    What was only opened is a store of its own: `root` is the file, the first one of several parts.
    """

    kind: StoreKind
    root: Path
    owner: str = ""

    @property
    def is_ours(self) -> bool:
        """Whether people put the files there themselves."""
        return self.kind in ("folder", "opened")

    @property
    def label(self) -> str:
        """Whose it is, or how it came to be known, for people; empty for folders that people added."""
        return _OPENED if self.kind == "opened" else self.owner

    @property
    def words(self) -> str:
        """The same, or which folder."""
        return self.label or str(self.root)


def folder_stores(folders: Iterable[Path]) -> tuple[Store, ...]:
    """Return the stores of folders that people added."""
    return tuple(Store("folder", folder) for folder in folders)


def opened_stores(paths: Iterable[Path]) -> tuple[Store, ...]:
    """Return the stores of models that people opened, wherever they are."""
    return tuple(Store("opened", path) for path in paths)


def known_stores(environment: Mapping[str, str], home: Path) -> tuple[Store, ...]:
    """Return where other programs keep models by `environment` and `home`; none of them need be there.

    Sources: huggingface_hub's constants.py, llama.cpp's common/hf-cache.cpp and fs_get_cache_directory, LM Studio's
    and Ollama's documentation.
    """
    found: dict[Path, Store] = {}
    for store in _candidates(environment, home):
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


def _path(text: str | None, home: Path) -> Path | None:
    if not text or "\0" in text:
        return None
    path = home / text[2:] if text.startswith("~/") else Path(text)
    return path if path.is_absolute() else None
