"""Library models as values, for widget tests."""

from __future__ import annotations

from pathlib import Path

from engine.base.units import GIB
from engine.library.census import FoundFile
from engine.library.entry import Copy, Entry, Quantisation, SideFile
from engine.library.facts import Facts
from engine.library.fit import Fit
from engine.library.listed import Listed, listed
from engine.library.names import Role
from engine.library.notes import NO_NOTES, Notes
from engine.library.stores import Store

STORE = Store("folder", Path("/models"))
ON_CARD = Fit("devices", "fewest", 8192, (("CUDA0", 28),), 30.0, 40.0, layout="CUDA0", source="measured")
TOO_LARGE = Fit("no", "fewest", 2048, reason="3.0 GiB missing on CUDA0.")


def found(name: str, *, size_bytes: int = GIB, is_missing: bool = False, role: Role | None = None) -> FoundFile:
    return FoundFile(
        STORE.root / name, STORE, name, "", size_bytes, 1, 1, abs(hash(name)), role=role, is_missing=is_missing
    )


def model(
    title: str,
    *labels: str,
    notes: Notes = NO_NOTES,
    fit: Fit | None = ON_CARD,
    sides: tuple[str, ...] = (),
    is_missing: bool = False,
    n_parameters: int = 7_200_000_000,
    capabilities: tuple[str, ...] = (),
) -> Listed:
    """Return a model with these quantisations, each as large as its place in the list in GiB."""
    quantisations = []
    for place, label in enumerate(labels or ("Q4_K_M",)):
        facts = Facts(
            kind="model", architecture="llama", name=title, n_layers=28, n_ctx_train=8192, n_parameters=n_parameters,
            capabilities=capabilities, fingerprint=f"{title}-{label}",
        )  # fmt: skip
        file = found(f"{title}-{label}.gguf", size_bytes=(place + 1) * GIB, is_missing=is_missing)
        quantisations.append(Quantisation(label, (Copy((file,)),), facts))
    beside = tuple(SideFile("projector", found(name, role="projector"), None) for name in sides)
    marks = [each.facts.fingerprint for each in quantisations if each.facts is not None]
    fits = {} if fit is None else dict.fromkeys(marks, fit)
    return listed(Entry(title, title, tuple(quantisations), beside), dict.fromkeys(marks, notes), fits)
