"""Reads Ollama's store, in which a manifest names the blobs of a model: GGUF files, template and parameters.

The layout `manifests/HOST/NAMESPACE/MODEL/TAG` is that of Ollama's types/model/name.go and server/manifest.go.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from engine.base.files import read_at_most
from engine.base.json_file import UNREADABLE
from engine.base.values import replace
from engine.library.census import FoundFile, found_file
from engine.library.names import Role
from engine.library.stores import Store
from engine.library.walking import NOT_READABLE, Walk

MAX_MANIFEST_BYTES = 1 << 20
MAX_MANIFESTS = 10_000
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_MEDIA = "application/vnd.ollama.image."
_ROLES: dict[str, Role] = {"model": "model", "projector": "projector", "adapter": "adapter", "draft": "draft"}
_TEXTS = ("template", "params", "system")
_USUAL_HOST, _USUAL_NAMESPACE = "registry.ollama.ai", "library"


class _Layer(Struct, frozen=True, rename="camel"):
    media_type: str
    digest: str
    size: int = 0


class _Manifest(Struct, frozen=True):
    layers: tuple[_Layer, ...] = ()
    config: _Layer | None = None


def scan_ollama(store: Store, walk: Walk) -> Iterator[FoundFile]:
    """Yield the models and side files that the manifests of an Ollama store name.

    `walk`: collects the visited folders and the problems.
    """
    for path in manifest_paths(store.root, walk):
        try:
            manifest = _read(path)
        except (OSError, *UNREADABLE):
            walk.problems.append(f"{path}: this manifest cannot be read; pull the model again.")
            continue
        yield from _manifest_files(store, path, manifest, walk)


def manifest_paths(root: Path, walk: Walk) -> Iterator[Path]:
    """Yield the paths of the manifests in Ollama's store at `root`, in a fixed order.

    `walk`: collects the visited folders and the problems.
    """
    pending, count = [(root / "manifests", 0)], 0
    while pending:
        folder, depth = pending.pop()
        try:
            walk.folders[str(folder)] = folder.stat().st_mtime_ns
            # Sorted, because `scandir` has no fixed order; reversed, because `pop` takes the last folder.
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name, reverse=True)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            reason = NOT_READABLE if isinstance(error, PermissionError) else error.strerror
            walk.problems.append(f"{folder}: {reason}.")
            continue
        for entry in entries:
            # HOST, NAMESPACE and MODEL are folders, TAG is the file of the manifest.
            if depth < 3 and entry.is_dir():
                pending.append((Path(entry.path), depth + 1))
            elif depth == 3 and entry.is_file() and count < MAX_MANIFESTS:
                count += 1
                yield Path(entry.path)


def model_name(manifest: Path) -> str:
    """Return Ollama's name of the model with this manifest path, such as `llama3.2:1b`."""
    host, namespace, model, tag = manifest.parts[-4:]
    prefix = "" if namespace == _USUAL_NAMESPACE else f"{namespace}/"
    if host != _USUAL_HOST:
        prefix = f"{host}/{namespace}/"
    return f"{prefix}{model}:{tag}"


def blobs_of(root: Path, manifest: Path) -> tuple[Path, ...]:
    """Return the paths of all blobs that a manifest of Ollama names.

    Raises:
        OSError: if the manifest cannot be read.
        Exceptions of the tuple `UNREADABLE`: if the manifest is not valid JSON.
    """
    document = _read(manifest)
    layers = (*document.layers, *((document.config,) if document.config is not None else ()))
    blobs = (_blob(root, layer) for layer in layers)
    return tuple(blob for blob in blobs if blob is not None)


def _read(path: Path) -> _Manifest:
    return msgspec.json.decode(read_at_most(path, MAX_MANIFEST_BYTES), type=_Manifest)


def _manifest_files(store: Store, path: Path, manifest: _Manifest, walk: Walk) -> Iterator[FoundFile]:
    name = model_name(path)
    found: list[FoundFile] = []
    texts: list[tuple[str, Path]] = []
    for layer in manifest.layers:
        kind, blob = layer.media_type.removeprefix(_MEDIA), _blob(store.root, layer)
        if blob is None or not layer.media_type.startswith(_MEDIA):
            continue
        if kind in _TEXTS:
            texts.append((kind, blob))
        elif kind in _ROLES:
            try:
                state = blob.stat()
            except OSError as error:
                walk.problems.append(f"{name}: its {kind} cannot be read ({error.strerror}); pull the model again.")
                continue
            file = found_file(blob, state, store, name, name.partition(":")[0])
            found.append(replace(file, sha256=blob.name.removeprefix("sha256-"), role=_ROLES[kind]))
    model = next((file for file in found if file.role == "model"), None)
    for file in found:
        if file is model:
            yield replace(file, texts=(("manifest", path), *texts))
        elif file.role != "model" and model is not None:
            yield replace(file, beside=model.path)


def _blob(root: Path, layer: _Layer) -> Path | None:
    """Return the path of the blob that an entry ("layer") of a manifest names; None if its digest is not a SHA-256.

    The digest becomes part of a path, so no other text is accepted.
    """
    match = _DIGEST.fullmatch(layer.digest)
    return root / "blobs" / f"sha256-{match[1]}" if match else None
