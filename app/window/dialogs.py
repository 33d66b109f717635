"""File dialogs and other questions to the user."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtWidgets import QFileDialog, QWidget

from engine.language import tr

MODEL_FILTER = tr("GGUF models (*.gguf);;All files (*)")
LAYOUT_FILTER = tr("Layouts (*.json);;All files (*)")
RIG_FILTER = tr("Rigs (*.json);;All files (*)")


def ask_open(parent: QWidget, title: str, file_filter: str, folder: Path | None = None) -> Path | None:
    """Return the file that the user chose to open."""
    name, _ = QFileDialog.getOpenFileName(parent, title, str(folder or ""), file_filter)
    return Path(name) if name else None


def ask_save(parent: QWidget, title: str, file_filter: str, proposal: str) -> Path | None:
    """Return the file that the user chose to write; `.json` is added where no ending was typed."""
    name, _ = QFileDialog.getSaveFileName(parent, title, proposal, file_filter)
    if not name:
        return None
    path = Path(name)
    return path if path.suffix else path.with_suffix(".json")
