"""The error of the library."""

from __future__ import annotations

from engine.errors import EngineError


class LibraryError(EngineError):
    """Something of the library cannot be read, kept or removed; the message names it and the remedy."""
