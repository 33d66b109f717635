"""Unloads and parks models: on request, before their lab rig is stopped, and after their idle time.

A lab rig consists of RPC workers on this computer. Parking a model unloads it until its next question, which loads it
again, even after a restart of the window.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf

from PySide6.QtCore import QObject, QTimer

from app.models.open_model import OpenModel
from app.models.open_models import OpenModels
from app.models.opener import ModelOpener
from app.notices import Notices
from app.rig.lab import Lab
from app.settings import Settings
from engine.base.language import tr
from engine.model.gguf.model_file import FileIdentity

MAX_WAIT_S = 5.0
"""Longest time in seconds to wait until models on lab workers have saved their KV states and exited."""
LOOK_MS = 20


class Unloader(QObject):
    """Unloads models, and shows a notice for each on the status line.

    A parked model is unloaded until its next question, which loads it again. The settings store which models are
    parked, so such a model is parked again when it is opened after a restart.
    """

    def __init__(
        self,
        models: OpenModels,
        opener: ModelOpener,
        lab: Lab,
        settings: Settings,
        notices: Notices,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._models = models
        self._lab = lab
        self._settings = settings
        self._notices = notices
        models.expired.connect(self._on_expired)
        for model in models.all:
            self._follow(model)
        models.added.connect(self._follow)
        opener.model_changed.connect(self._on_model_changed)

    def unload_current(self) -> None:
        """Unload the current model, and show a notice."""
        self.unload(self._models.current)

    def park_current(self) -> None:
        """Park the current model: unload it and save its KV state. Its next question loads it again."""
        self.park(self._models.current)

    def park(self, model: OpenModel) -> None:
        """Park `model`: unload it and save its KV state. Its next question loads it again."""
        if model.park():
            self._notices.show(tr("Parked {name}. The next question loads the model again.", name=model.name))

    def unload(self, model: OpenModel) -> None:
        """Unload `model`, and show a notice if it was loaded."""
        if model.loading.unload():
            self._notices.show(tr("Unloaded {name}", name=model.name))

    def unload_other(self, key: FileIdentity) -> None:
        """Unload the model with this file identity, which is not the current one."""
        other = self._models.find(key)
        if other is None or other.held is None or other is self._models.current:
            self._notices.show(tr("The model to unload is no longer loaded. Load your model again."), bad=True)
        else:
            self.unload(other)

    def stop_lab(self) -> None:
        """Stop the workers of the lab rig (RPC workers on this computer).

        Models that use them are unloaded first, so that they can save their KV states.
        """
        going = [
            model
            for model in self._models.all
            if model.held is not None and not self._lab.endpoints.isdisjoint(model.held.endpoints)
        ]
        for model in going:
            # A load that uses a worker is cancelled; a loaded model is unloaded. The other call does nothing.
            model.loading.cancel()
            self.unload(model)
        self.when_gone(going, self._lab.stop, time.monotonic() + MAX_WAIT_S)

    def when_gone(self, models: Sequence[OpenModel], then: Callable[[], None], end_s: float = inf) -> None:
        """Call `then` when the child processes of `models` have ended, or at the time `end_s`.

        `end_s`: a time on the clock `time.monotonic`.
        """
        # Polled: the children save KV states and end by themselves.
        if time.monotonic() < end_s and any(model.loading.has_child for model in models):
            QTimer.singleShot(LOOK_MS, self, lambda: self.when_gone(models, then, end_s))
        else:
            then()

    def _follow(self, model: OpenModel) -> None:
        model.parked_changed.connect(partial(self._on_parked, model))

    def _on_parked(self, model: OpenModel, parked: bool) -> None:
        # Another file that takes the place of a parked model must not change what is stored of it.
        if model.file is not None and (parked or model.held is not None):
            self._settings.keep_parked(model.file.paths[0], parked=parked)

    def _on_model_changed(self) -> None:
        model = self._models.current
        if model.file is not None and model.held is None and model.file.paths[0] in self._settings.parked_models:
            model.set_parked(True)

    def _on_expired(self, model: OpenModel) -> None:
        model.set_parked(True)
        self._notices.show(tr("Unloaded {name} because it was idle", name=model.name))
