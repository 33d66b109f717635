"""Packs as people see them: what is there, whether it is used, and why not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.packs.book import PackBook
from engine.packs.store import Pack, PackStore
from engine.texts import show

PackState = Literal["used", "off", "broken", "unchecked"]


@dataclass(frozen=True, slots=True)
class ListedPack:
    """`state`: whether children load it; `reason`: why not, or what there is to know; `ours`: it can be removed."""

    name: str
    backend: str
    engine: str
    folder: str
    size_bytes: int
    state: PackState
    reason: str
    devices: tuple[str, ...]
    needs: str
    ours: bool

    @property
    def words(self) -> str:
        """What there is to say about it, on one line."""
        match self.state:
            case "used":
                what = f"In use: {', '.join(self.devices)}" if self.devices else "In use"
            case "off":
                what = "Switched off"
            case "broken":
                what = "Not used"
            case "unchecked":
                what = "Not checked yet"
        return ". ".join(part.removesuffix(".") for part in (what, self.reason, self._needed) if part) + "."

    @property
    def _needed(self) -> str:
        return f"It needs {self.needs}" if self.needs and self.state == "broken" else ""

    def document(self) -> dict[str, object]:
        """Return it for programs."""
        return {
            "name": self.name,
            "backend": self.backend,
            "engine": self.engine,
            "folder": self.folder,
            "size_bytes": self.size_bytes,
            "state": self.state,
            "reason": self.reason,
            "devices": list(self.devices),
            "removable": self.ours,
        }


def list_packs(store: PackStore, book: PackBook, engine: str) -> tuple[ListedPack, ...]:
    """Return the packs that are there, for this build of the engine."""
    return tuple(_listed(pack, book, engine) for pack in store.packs())


def _listed(pack: Pack, book: PackBook, engine: str) -> ListedPack:
    manifest, verdict = pack.manifest, book.verdict_on(pack.folder, engine)
    state: PackState = "unchecked"
    if pack.name in book.off:
        state = "off"
    elif manifest is None or (verdict is not None and not verdict.ok):
        state = "broken"
    elif verdict is not None:
        state = "used"
    return ListedPack(
        name=pack.name,
        backend="" if manifest is None else show(manifest.backend, 40),
        engine="" if manifest is None else show(manifest.engine, 60),
        folder=str(pack.folder),
        size_bytes=0 if manifest is None else manifest.total_bytes,
        state=state,
        reason=pack.fault if verdict is None else verdict.reason,
        devices=() if verdict is None else verdict.devices,
        needs="" if manifest is None else show(manifest.needs.words),
        ours=pack.ours,
    )
