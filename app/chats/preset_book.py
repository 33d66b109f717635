"""The presets that there are: read once, written when one is saved or deleted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from PySide6.QtCore import QObject, Signal

from app.background import Background
from app.models.open_model import OpenModel
from app.models.open_models import OpenModels
from app.notices import Notices
from engine.base.errors import EngineError
from engine.base.language import tr
from engine.chat.presets import Preset, read_presets, write_presets


class PresetBook(QObject):
    """Gives each conversation the presets by name."""

    changed = Signal()

    def __init__(
        self, path: Path, models: OpenModels, background: Background, notices: Notices, parent: QObject | None = None
    ) -> None:
        super().__init__(parent)
        self._path = path
        self._models = models
        self._background = background
        self._notices = notices
        self._presets: dict[str, Preset] = {}
        self._is_read = False
        for model in models.all:
            self._follow(model)
        models.added.connect(self._follow)

    @property
    def presets(self) -> Mapping[str, Preset]:
        """All of them by name."""
        return MappingProxyType(self._presets)

    def start(self) -> None:
        """Read the file, beside the GUI thread."""
        self._background.run("Reading presets", lambda: read_presets(self._path), self._on_read, self._fail, quiet=True)

    def save(self, preset: Preset) -> None:
        """Keep a preset, in place of one with its name."""
        self._presets[preset.name] = preset
        self._write(tr("The preset “{name}” is saved", name=preset.name))

    def delete(self, name: str) -> None:
        """Forget a preset."""
        if self._presets.pop(name, None) is not None:
            self._write(tr("The preset “{name}” is deleted", name=name))

    def _on_read(self, presets: tuple[Preset, ...]) -> None:
        self._is_read = True
        began = dict(self._presets)
        self._presets.clear()
        self._presets.update({preset.name: preset for preset in presets} | began)
        self.changed.emit()

    def _fail(self, error: EngineError) -> None:
        """A file that cannot be read is left as it is: nothing is written over it."""
        self._notices.tell(error)

    def _write(self, words: str) -> None:
        self.changed.emit()
        if not self._is_read:
            self._notices.say(
                tr("The presets in the file cannot be read, so this one is kept until the window closes.")
            )
            return
        presets = tuple(self._presets.values())
        self._background.run(
            "Saving presets",
            lambda: write_presets(self._path, presets),
            lambda _: self._notices.say(words),
            self._notices.tell,
            quiet=True,
        )

    def _follow(self, model: OpenModel) -> None:
        model.conversation.presets = self.presets
