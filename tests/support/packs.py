"""Engine packs for tests, as a folder or an archive: a tiny library compiled here, with its manifest."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from app.paths import pack_book_path, pack_key_path, pack_publishers_path, packs_path
from engine.base.engine_build import engine_version
from engine.devices.packs.manifest import parse_manifest
from engine.devices.packs.signing import PackKeys

CRASHES = "__attribute__((constructor)) static void begin(void) { __builtin_trap(); }"
IS_NO_BACKEND = "int nothing;"
NEEDS_WHAT_IS_NOT_THERE = "void not_anywhere(void); void begin(void) { not_anywhere(); }"
IS_ANOTHER_INTERFACE = "static int registry[64] = {9999}; void *ggml_backend_init(void) { return registry; }"
"""C code of a backend whose registry has version 9999 of ggml's interface."""


@contextmanager
def no_packs() -> Iterator[None]:
    """Remove all packs before and after the context, since the tests of a process share a home folder."""

    def clear() -> None:
        shutil.rmtree(packs_path(), ignore_errors=True)
        for path in (pack_book_path(), pack_key_path(), pack_publishers_path()):
            path.unlink(missing_ok=True)

    clear()
    yield
    clear()


def compiled(code: str, folder: Path) -> bytes:
    """Return a shared library of this C code."""
    source, library = folder / "tiny.c", folder / "tiny.so"
    source.write_text(code)
    compiler = shutil.which("cc") or shutil.which("gcc") or "cc"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    return library.read_bytes()


def manifest_of(name: str, files: Mapping[str, bytes], /, **changed: object) -> dict[str, object]:
    """Return the manifest of a pack with these files, its library first. `changed`: keys with other values."""
    listed = {file: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for file, data in files.items()}
    return {
        "version": 1,
        "name": name,
        "engine": engine_version(),
        "backend": "Vulkan",
        "system": sys.platform,
        "machine": platform.machine(),
        "library": next(iter(files), ""),
        "files": listed,
        **changed,
    }


def write_archive(path: Path, members: Iterable[tuple[str | tarfile.TarInfo, bytes]]) -> Path:
    """Write a .tar.gz with these members, in this order."""
    with tarfile.open(path, "w:gz") as tar:
        for named, data in members:
            member = tarfile.TarInfo(named) if isinstance(named, str) else named
            if isinstance(named, str):
                member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def write_pack(path: Path, name: str, data: bytes = b"library", **changed: object) -> Path:
    """Write the archive of a pack whose library is `data`."""
    files = {f"libggml-{name}.so": data}
    manifest = json.dumps(manifest_of(name, files, **changed)).encode()
    return write_archive(
        path, [(f"{name}/manifest.json", manifest), *((f"{name}/{file}", each) for file, each in files.items())]
    )


def write_signed_pack(
    path: Path, name: str, keys: PackKeys, data: bytes = b"library", changed: Mapping[str, object] | None = None
) -> Path:
    """Write the archive of a pack signed with `keys`. `changed`: keys of the manifest that change after signing."""
    files = {f"libggml-{name}.so": data}
    manifest = keys.sign(parse_manifest(json.dumps(manifest_of(name, files)).encode()))
    written = json.dumps({**msgspec.to_builtins(manifest), **(changed or {})}).encode()
    return write_archive(path, [(f"{name}/manifest.json", written), (f"{name}/libggml-{name}.so", data)])
