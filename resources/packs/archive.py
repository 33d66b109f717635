"""Writes an engine pack: a `.tar.gz` with one folder, in which `manifest.json` is the first file.

`engine/devices/packs` reads it.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

from resources.packs.needs import needed_glibc, needed_libraries
from resources.packs.recipes import Recipe

_READ_BYTES = 1 << 20


def write_pack(
    recipe: Recipe, files: Sequence[Path], engine: str, folder: Path, sign: Callable[[bytes], bytes] = bytes
) -> Path:
    """Write the pack with `files` into `folder`; return its path.

    `files`: the backend's library first.
    `engine`: version of llama-cpp-python whose sources the backend was built from.
    `sign`: receives the manifest (JSON) and returns the signed one.
    """
    manifest = {
        "version": 1,
        "name": recipe.name,
        "engine": f"llama-cpp-python {engine}",
        "backend": recipe.backend,
        "system": sys.platform,
        "machine": platform.machine(),
        "library": files[0].name,
        "files": {file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in files},
        "needs": {
            "libraries": needed_libraries(files[0]),
            "glibc": needed_glibc(files[0]),
            "words": recipe.words,
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / f"layerdeck-pack-{recipe.name}-{engine}-{sys.platform}-{platform.machine()}.tar.gz"
    unfinished = archive.with_name(f".{archive.name}.part")
    with tarfile.open(unfinished, "w:gz", compresslevel=6) as tar:
        signed = sign((json.dumps(manifest, indent=2) + "\n").encode())
        _add(tar, f"{recipe.name}/manifest.json", signed, 0o644)
        for file in files:
            _add(tar, f"{recipe.name}/{file.name}", file.read_bytes(), 0o755)
    unfinished.replace(archive)
    return archive


def _add(tar: tarfile.TarFile, name: str, data: bytes, mode: int) -> None:
    """Add a file that belongs to root and has the modification time 0, so that equal builds make equal packs."""
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.uname, member.gname = len(data), mode, "root", "root"
    tar.addfile(member, io.BytesIO(data))


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as source:
        while part := source.read(_READ_BYTES):
            digest.update(part)
    return digest.hexdigest()
