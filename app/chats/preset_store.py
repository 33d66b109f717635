"""The file of presets (named prompts with sampling settings): read at the start, and written after each change."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from PySide6.QtCore import QObject, Signal

from app.background import Background, Worker
from app.models.open_model import OpenModel
from app.models.open_models import OpenModels
from app.notices import Notices
from engine.base.errors import EngineError
from engine.base.language import tr
from engine.chat.presets import Preset, read_presets, write_presets


class PresetStore(QObject):
    """Stores presets (named prompts with sampling settings) for the conversations of all models, and reads them."""

    changed = Signal()

    def __init__(
        self, path: Path, models: OpenModels, background: Background, notices: Notices, parent: QObject | None = None
    ) -> None:
        super().__init__(parent)
        self._path = path
        self._background = background
        self._writer = Worker("presets")
        self._notices = notices
        self._presets: dict[str, Preset] = {}
        self._is_read = False
        for model in models.all:
            self._follow(model)
        models.added.connect(self._follow)

    @property
    def presets(self) -> Mapping[str, Preset]:
        """All presets by name, as a read-only view that shows later changes."""
        # A view and not a copy: conversations keep it, and see later changes. So the dictionary is never replaced.
        return MappingProxyType(self._presets)

    def start(self) -> None:
        """Read the file of presets in the background."""
        self._background.run("Reading presets", lambda: read_presets(self._path), self._on_read, self._fail, quiet=True)

    def save(self, preset: Preset) -> None:
        """Store a preset. A stored preset with the same name is replaced."""
        self._presets[preset.name] = preset
        self._write(tr("Preset “{name}” saved", name=preset.name))

    def delete(self, name: str) -> None:
        """Delete the preset with this name."""
        if self._presets.pop(name, None) is not None:
            self._write(tr("Preset “{name}” deleted", name=name))

    def _on_read(self, presets: tuple[Preset, ...]) -> None:
        self._is_read = True
        # Presets saved before the file was read win over those in it.
        began = dict(self._presets)
        self._presets.clear()
        self._presets.update({preset.name: preset for preset in presets} | began)
        self.changed.emit()

    def _fail(self, error: EngineError) -> None:
        """Show the error. The unreadable file is not overwritten, since a person may repair it."""
        self._notices.tell(error)

    def _write(self, words: str) -> None:
        self.changed.emit()
        if not self._is_read:
            self._notices.say(tr("The file of presets cannot be read, so this preset is lost when the window closes."))
            return
        presets = tuple(self._presets.values())
        self._background.run(
            "Saving presets",
            lambda: write_presets(self._path, presets),
            lambda _: self._notices.say(words),
            self._notices.tell,
            quiet=True,
            worker=self._writer,
        )

    def _follow(self, model: OpenModel) -> None:
        model.conversation.presets = self.presets
