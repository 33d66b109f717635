"""Whether what is edited is what is loaded."""

from __future__ import annotations

from app.document import LayoutDocument
from engine.fit.loaded_models import needs_reload
from engine.fit.preview import LoadedLayout


def is_edited(document: LayoutDocument, loaded: LoadedLayout | None) -> bool:
    """Return whether the edited layout is not the one that is `loaded` of its model."""
    edit = document.edit
    return loaded is not None and edit is not None and needs_reload(loaded, edit.layout, edit.context, edit.side_files)
