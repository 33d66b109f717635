"""ggml's sources from the source package of llama-cpp-python, kept in the user's cache folder.

A pack must be built from the sources of the engine's version.
"""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

_INSIDE = ("vendor", "llama.cpp", "ggml")


def find_source(cache: Path, version: str) -> Path | None:
    """Return the folder of ggml's sources in `cache`; None if they are not there."""
    folder = cache / "sources" / version / "ggml"
    return folder if (folder / "CMakeLists.txt").is_file() else None


def fetch_ggml(cache: Path, version: str, python: str) -> Path | None:
    """Download the source package with pip, and return its ggml folder in `cache`; None if the download fails."""
    kept = cache / "sources" / version
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="source-", dir=kept.parent) as scratch:
        download = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", "download", "--no-deps"]
        download += ["--no-binary", "llama-cpp-python", "--dest", scratch, f"llama-cpp-python=={version}"]
        if subprocess.run(download, stdin=subprocess.DEVNULL, check=False).returncode != 0:
            return None
        unpacked = Path(scratch, "unpacked")
        _unpack_ggml(next(Path(scratch).glob("*.tar.gz")), unpacked)
        shutil.rmtree(kept, ignore_errors=True)
        unpacked.rename(kept)
    return find_source(cache, version)


def _unpack_ggml(archive: Path, folder: Path) -> None:
    """Extract NAME/vendor/llama.cpp/ggml of the package to `folder`/ggml."""
    with tarfile.open(archive) as tar:
        for member in tar:
            _, *inside = member.name.split("/")
            if member.isfile() and tuple(inside[: len(_INSIDE)]) == _INSIDE and ".." not in inside:
                target = folder.joinpath("ggml", *inside[len(_INSIDE) :])
                target.parent.mkdir(parents=True, exist_ok=True)
                content = tar.extractfile(member)
                assert content is not None
                target.write_bytes(content.read())
