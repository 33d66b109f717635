"""The folders that packs lie in: the user's, which packs are installed to, and the program's own."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.errors import PackError
from engine.packs.archive import unpack
from engine.packs.manifest import MANIFEST, NAME, Manifest, read_manifest
from engine.texts import show

_UNFINISHED = ".installing-"


@dataclass(frozen=True, slots=True)
class Pack:
    """A pack that is there. Without a `manifest` it cannot be used, and `fault` says why; `ours`: the user's."""

    name: str
    folder: Path
    manifest: Manifest | None
    fault: str = ""
    ours: bool = True


@dataclass(frozen=True, slots=True)
class PackStore:
    """`user` is the folder of installed packs; `beside` are further ones, which are read only."""

    user: Path
    beside: Sequence[Path] = ()

    def packs(self) -> tuple[Pack, ...]:
        """Return what is there by name; of two packs of one name the user's counts."""
        found: dict[str, Pack] = {}
        for place in (self.user, *self.beside):
            for folder in _folders(place):
                found.setdefault(folder.name, _pack(folder, ours=place == self.user))
        return tuple(found[name] for name in sorted(found))

    def pack(self, name: str) -> Pack:
        """Return the pack called `name`.

        Raises:
            PackError: where there is none.
        """
        packs = self.packs()
        found = next((pack for pack in packs if pack.name == name), None)
        if found is None:
            there = ", ".join(pack.name for pack in packs) or "none"
            raise PackError(f"No engine pack is called {show(name, 40)}; there are: {there}.")
        return found

    def install(self, archive: Path, engine: str) -> Pack:
        """Install the pack in a .tar.gz for the engine that is here, in place of one of its name: whole or not at all.

        Raises:
            PackError: as `unpack`, and where the folder cannot be written.
        """
        try:
            self.user.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=self.user) as scratch:
                unfinished, before = Path(scratch, "new"), Path(scratch, "before")
                unfinished.mkdir()
                manifest = unpack(archive, unfinished, engine)
                # Written from what was understood: what else the file had in it is not kept.
                (unfinished / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2))
                folder = self.user / manifest.name
                if os.path.lexists(folder):
                    folder.rename(before)
                unfinished.rename(folder)
        except OSError as error:
            raise PackError(f"{archive.name} cannot be installed: {error.strerror or error}.") from None
        return Pack(manifest.name, folder, manifest)

    def remove(self, name: str) -> Path:
        """Remove an installed pack; return the folder that it was in.

        Raises:
            PackError: where it is not there, not the user's, or cannot be removed.
        """
        pack = self.pack(name)
        if not pack.ours:
            raise PackError(f"{name} came with the program and stays; switch it off instead.")
        try:
            if pack.folder.is_symlink():
                pack.folder.unlink()
            else:
                shutil.rmtree(pack.folder)
        except OSError as error:
            raise PackError(f"{name} cannot be removed: {error.strerror or error}.") from None
        return pack.folder


def packs_beside_program() -> tuple[Path, ...]:
    """Return the folders of packs that came with the program: `packs` beside the bundle's executable."""
    return (Path(sys.executable).parent / "packs",) if getattr(sys, "frozen", False) else ()


def _folders(place: Path) -> list[Path]:
    try:
        with os.scandir(place) as entries:
            return sorted(Path(entry.path) for entry in entries if NAME.fullmatch(entry.name) and entry.is_dir())
    except OSError:
        return []


def _pack(folder: Path, *, ours: bool) -> Pack:
    try:
        manifest = read_manifest(folder)
        if manifest.name != folder.name:
            raise PackError(f'It calls itself "{manifest.name}" and lies in a folder of another name.')
    except PackError as error:
        return Pack(folder.name, folder, None, error.summary(), ours)
    return Pack(folder.name, folder, manifest, "", ours)
