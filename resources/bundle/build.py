"""`python -m resources.bundle.build`: builds the bundle in `dist/`, as folder, `.tar.gz` and `.deb`, with a size table.

`python3 make.py bundle` runs it inside the environment of the program.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

from resources.bundle.contents import MODELS, link_copies, size_table
from resources.bundle.debian import write_package
from resources.bundle.desktop_files import write_share
from resources.bundle.notices import write_notices
from resources.setup.demo_model import fetch_demo_model
from resources.setup.places import model_folder

ROOT = Path(__file__).resolve().parents[2]
DIST = ROOT / "dist"
WORK = ROOT / "build" / "bundle"
NAME = "layerdeck"
CLI = "layerdeck-cli"
STRIPPED = (
    "libpython*.so*",
    "python3.*/lib-dynload/*.so",
    "cryptography/hazmat/bindings/*.so",
    "yaml/*.so",
    "zeroconf/**/*.so",
)
"""Libraries in the bundle that some of their publishers ship with all symbols."""


def main() -> int:
    """Build folder, tarball, package and size table; return the exit code."""
    version = metadata.version(NAME)
    folder = _freeze()
    if sys.platform != "linux":
        return _finish_elsewhere(folder)
    saved_bytes = link_copies(folder / "_internal")
    _strip(folder / "_internal")
    # One program under two names: it looks at the one it was called by.
    (folder / CLI).symlink_to(NAME)
    shutil.copy2(ROOT / "LICENSE", folder)
    shutil.copyfile(ROOT / "resources" / "bundle" / "menu.sh", folder / "add-to-menu")
    (folder / "add-to-menu").chmod(0o755)
    _bring_demo(folder)
    write_notices(folder, folder)
    write_share(folder / "share")
    archive = _pack(folder, DIST / f"{NAME}-{version}-linux-{os.uname().machine}.tar.gz")
    package = write_package(folder, DIST, version, WORK)
    table = size_table(folder)
    (DIST / "contents.txt").write_text(table, encoding="utf-8")
    sys.stdout.write(f"{table}\nCopies that became links: {saved_bytes / 1e6:.1f} MB\n")
    for path in (folder, archive, package):
        sys.stdout.write(f"{path.relative_to(ROOT)}\n")
    return 0


def _finish_elsewhere(folder: Path) -> int:
    """Add demo model and licences to the application for macOS or Windows. Untested.

    `resources/macos` and `resources/windows` then make packages of it.
    """
    notices = DIST / "Layerdeck.app" / "Contents" / "Resources" if sys.platform == "darwin" else folder
    _bring_demo(notices)
    write_notices(folder, notices)
    shutil.copy2(ROOT / "LICENSE", notices)
    (DIST / "contents.txt").write_text(size_table(folder), encoding="utf-8")
    return 0


def _bring_demo(folder: Path) -> None:
    """Copy the demo model into `models` below `folder`, so that the first start needs no download."""
    model = fetch_demo_model(model_folder(sys.platform, os.environ, Path.home()))
    if model is None:
        sys.stdout.write("The bundle is without the demo model that answers: its window offers the made-up one.\n")
        return
    (folder / MODELS).mkdir(exist_ok=True)
    shutil.copyfile(model, folder / MODELS / model.name)


def _freeze() -> Path:
    """Run PyInstaller; return the folder that it wrote."""
    folder = DIST / NAME
    shutil.rmtree(folder, ignore_errors=True)
    spec = ROOT / "resources" / "bundle" / f"{NAME}.spec"
    subprocess.run(
        [
            *(sys.executable, "-m", "PyInstaller", "--noconfirm", "--log-level", "WARN"),
            *("--distpath", str(DIST), "--workpath", str(WORK), str(spec)),
        ],
        cwd=ROOT,
        # What stands there already is the engine that goes into the bundle.
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])},
        check=True,
    )
    return folder


def _strip(internal: Path) -> None:
    """Remove the symbols from the libraries in `STRIPPED`, which saves 25 MB.

    Other libraries are left alone: numpy's, which were relinked for the wheel, may break, and Qt's must stay unchanged.
    """
    libraries = [library for pattern in STRIPPED for library in internal.glob(pattern) if not library.is_symlink()]
    if libraries and shutil.which("strip"):
        subprocess.run(["strip", "--strip-unneeded", *map(str, libraries)], check=True)


def _pack(folder: Path, archive: Path) -> Path:
    """Write `folder` as a tarball in which all files belong to root."""

    def of_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = "root"
        return member

    with tarfile.open(archive, "w:gz", compresslevel=6) as tar:
        tar.add(folder, NAME, filter=of_root)
    return archive


if __name__ == "__main__":
    sys.exit(main())
