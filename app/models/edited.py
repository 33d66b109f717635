"""Whether what is edited is what is loaded."""

from __future__ import annotations

from app.models.document import LayoutDocument
from engine.plan.preview import LoadedLayout


def is_edited(document: LayoutDocument, loaded: LoadedLayout | None) -> bool:
    """Return whether what is edited is not what is `loaded` of its model."""
    edit = document.edit
    return loaded is not None and edit is not None and loaded.edit != edit
