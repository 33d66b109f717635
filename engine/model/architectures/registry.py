"""All architecture records by the file's `general.architecture`. Add a new module of records here."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from engine.model.architectures import embedding, latent, recurrent, transformers
from engine.model.architectures.record import Architecture

RECORD_MODULES: tuple[ModuleType, ...] = (transformers, embedding, latent, recurrent)

ARCHITECTURES: Mapping[str, Architecture] = {
    name: record for module in RECORD_MODULES for name, record in module.RECORDS.items()
}

_PLAIN = Architecture()


def find_architecture(name: str) -> Architecture | None:
    """Return the record of an architecture; None if there is none.

    Without a record, the model's memory is only known from a probe: a load in a child process that allocates nothing.
    """
    return ARCHITECTURES.get(name)


def architecture_rules(name: str) -> Architecture:
    """Return the record with the rules of an architecture; for an unknown name, a record without special rules."""
    return ARCHITECTURES.get(name, _PLAIN)
