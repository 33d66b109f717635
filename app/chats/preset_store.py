"""The file of presets (named prompts with sampling settings): read at the start, and written after each change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from PySide6.QtCore import QObject, Signal

from app.background import Background, Worker
from app.models.open_model import OpenModel
from app.models.open_models import OpenModels
from app.notices import Notices
from engine.base.language import tr
from engine.chat.presets import Preset, read_presets, update_presets


class PresetStore(QObject):
    """Stores presets (named prompts with sampling settings) for the conversations of all models, and reads them."""

    changed = Signal()

    def __init__(
        self, path: Path, models: OpenModels, background: Background, notices: Notices, parent: QObject | None = None
    ) -> None:
        super().__init__(parent)
        self._path = path
        self._background = background
        self._worker = Worker("presets")
        self._notices = notices
        self._presets: dict[str, Preset] = {}
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
        self._background.run(
            "Reading presets",
            lambda: read_presets(self._path),
            self._show,
            self._notices.show_error,
            quiet=True,
            worker=self._worker,
        )

    def save(self, preset: Preset, on_saved: Callable[[], None]) -> None:
        """Store a preset in the background, then call `on_saved`. A stored preset with the same name is replaced.

        If the file cannot be changed, the error is shown and nothing else happens.
        """
        words = tr("Preset “{name}” saved", name=preset.name)
        self._change(lambda presets: presets.update({preset.name: preset}), words, on_saved)

    def delete(self, name: str) -> None:
        """Delete the preset with this name in the background."""
        if name in self._presets:
            self._change(lambda presets: presets.pop(name, None), tr("Preset “{name}” deleted", name=name))

    def _change(
        self,
        change: Callable[[dict[str, Preset]], object],
        words: str,
        on_changed: Callable[[], None] = lambda: None,
    ) -> None:
        def show(presets: tuple[Preset, ...]) -> None:
            self._show(presets)
            on_changed()
            self._notices.show(words)

        # The file and not `_presets` is changed: other windows write to the same file.
        self._background.run(
            "Saving presets",
            lambda: update_presets(self._path, change),
            show,
            self._notices.show_error,
            quiet=True,
            worker=self._worker,
        )

    def _show(self, presets: tuple[Preset, ...]) -> None:
        self._presets.clear()
        self._presets.update({preset.name: preset for preset in presets})
        self.changed.emit()

    def _follow(self, model: OpenModel) -> None:
        model.conversation.presets = self.presets
