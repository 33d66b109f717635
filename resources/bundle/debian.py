"""The Debian package: the bundle below `/usr/lib`, links to its programs in `/usr/bin`, and menu entry and icons.

Needs dpkg-deb and, from dpkg-dev, dpkg-shlibdeps. The latter finds the packages and versions of the system libraries
that the bundle uses and does not contain.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from resources.bundle.contents import files_in
from resources.bundle.notices import system_packages

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
CONTROL = """Package: layerdeck
Version: {version}
Section: science
Priority: optional
Architecture: {architecture}
Maintainer: The Layerdeck developers <layerdeck@example.org>
Installed-Size: {size_kib}
Depends: {depends}
Description: place the layers of a language model on your devices, and chat
 Layerdeck runs GGUF language models on graphics cards, the processor and other
 computers, any layer on any of them. It shows the memory of every device, says
 before it loads what each will hold, and chats with the result.
"""
COPYRIGHT = """Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: layerdeck

Files: *
Copyright: 2026 The Layerdeck developers
License: Expat
{license}
Comment: What the package carries of others is named in THIRD-PARTY-NOTICES.txt.
"""
ALSO_NEEDED = "libfontconfig1"
"""Needed for its configuration files, which name the folders of fonts. The library itself is in the bundle."""
AFTER_REMOVAL = """#!/bin/sh
set -e
if [ "$1" = remove ]; then
    echo "Layerdeck is removed. What its users have stays, in the home of each: chats and engine packs in"
    echo "~/.local/share/layerdeck, settings in ~/.config/layerdeck, models in ~/.cache/huggingface or where"
    echo "they were put."
fi
"""
OVERRIDES = (
    # It is the point of the package to run without what the system has or lacks.
    "embedded-library",
    "unstripped-binary-or-object",
    "shared-library-lacks-prerequisites",
    "bad-distribution-in-changes-file",
    "custom-library-search-path",
    "hardening-no-pie",
    # Two small modules of Python that use nothing of the C library.
    "library-not-linked-against-libc",
)


def write_package(folder: Path, dist: Path, version: str, work: Path) -> Path:
    """Write the `.deb` of the bundle at `folder` into `dist`; return its path.

    `work`: folder for intermediate files.
    """
    architecture = ARCHITECTURES[os.uname().machine]
    root = work / "deb"
    shutil.rmtree(root, ignore_errors=True)
    home = root / "usr" / "lib" / "layerdeck"
    shutil.copytree(folder, home, symlinks=True, ignore=shutil.ignore_patterns("share", "add-to-menu"))
    shutil.copytree(folder / "share", root / "usr" / "share")
    programs = root / "usr" / "bin"
    programs.mkdir(parents=True)
    for name in ("layerdeck", "layerdeck-cli"):
        (programs / name).symlink_to(f"../lib/layerdeck/{name}")
    _write_documents(root, version)
    _set_modes(root)
    size_kib = sum(path.stat().st_size for path in files_in(root)) // 1024
    control = root / "DEBIAN" / "control"
    control.parent.mkdir(mode=0o755)
    depends = f"{_needed_packages(root, work, folder, architecture)}, {ALSO_NEEDED}"
    control.write_text(
        CONTROL.format(version=version, architecture=architecture, size_kib=size_kib, depends=depends), encoding="utf-8"
    )
    script = control.with_name("postrm")
    script.write_text(AFTER_REMOVAL, encoding="utf-8")
    script.chmod(0o755)
    package = dist / f"layerdeck_{version}_{architecture}.deb"
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", "-Zxz", "-z3", "--build", str(root), str(package)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return package


def _write_documents(root: Path, version: str) -> None:
    documents = root / "usr" / "share" / "doc" / "layerdeck"
    documents.mkdir(parents=True)
    text = (ROOT / "LICENSE").read_text("utf-8")
    indented = "\n".join(f" {line}" if line else " ." for line in text.splitlines())
    (documents / "copyright").write_text(COPYRIGHT.format(license=indented), encoding="utf-8")
    changelog = documents / "changelog.gz"
    source = f"layerdeck ({version}) stable; urgency=medium\n\n  * See CHANGELOG.md of the sources.\n"
    subprocess.run(["gzip", "-9n"], input=source.encode(), stdout=changelog.open("wb"), check=True)
    overrides = root / "usr" / "share" / "lintian" / "overrides" / "layerdeck"
    overrides.parent.mkdir(parents=True)
    overrides.write_text("".join(f"layerdeck: {tag}\n" for tag in OVERRIDES), encoding="utf-8")


def _set_modes(root: Path) -> None:
    """Set the modes of folders and files to those of Debian packages, whatever the umask is."""
    for path in root.rglob("*"):
        if path.is_symlink():
            continue
        runs = path.is_dir() or (path.name == "layerdeck" and path.parent.name == "layerdeck")
        path.chmod(0o755 if runs else 0o644)


def _needed_packages(root: Path, work: Path, bundle: Path, architecture: str) -> str:
    """Return the value of the field Depends: packages of the libraries that files in `root` need and `root` lacks."""
    stub = work / "debian" / "control"
    stub.parent.mkdir(exist_ok=True)
    stub.write_text(f"Source: layerdeck\n\nPackage: layerdeck\nArchitecture: {architecture}\n", encoding="utf-8")
    linked = [path for path in files_in(root) if ".so" in path.name or path.name == "layerdeck"]
    folders = sorted({path.parent for path in linked})
    done = subprocess.run(
        [
            *("dpkg-shlibdeps", "-O", "--ignore-missing-info", "--warnings=0"),
            # It asks for the package that has a library here, also where that lies in ours.
            *(f"-x{package}" for package in system_packages(bundle)),
            *(f"-l{folder}" for folder in folders),
            *(f"-e{path}" for path in linked if path.read_bytes()[:4] == b"\x7fELF"),
        ],
        cwd=work,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"dpkg-shlibdeps failed: {done.stderr}")
    return done.stdout.strip().removeprefix("shlibs:Depends=")
