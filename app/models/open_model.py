"""A model that is open: its file, its edit, its child and its conversation, and since when it has been idle."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QObject, Signal

from app.models.conversation import Conversation
from app.models.document import Sheet
from app.models.loading import Loading, ModelState
from app.rig.calibrator import Calibrator
from engine.fit.loaded_models import UNTIL_UNLOADED_S, HeldModel, held_bytes
from engine.gguf.identity import FileIdentity
from engine.gguf.model_file import ModelFile
from engine.telemetry.processes import is_local


class OpenModel(QObject):
    """One of several; before the first is opened there is one without a file."""

    changed = Signal()
    """What `held` tells is not what it was."""

    def __init__(
        self, number: int, calibrator: Calibrator, clock: Callable[[], float], parent: QObject | None = None
    ) -> None:
        super().__init__(parent)
        self.number = number
        """Tells it from others for as long as the window is open."""
        self.file: ModelFile | None = None
        self.key: FileIdentity | None = None
        self.sheet: Sheet | None = None
        """Its edit, while another model is current."""
        self.loading = Loading(calibrator, self)
        self.conversation = Conversation(self.loading, self)
        self.held: HeldModel | None = None
        """What it holds of the devices; None where it is neither loaded nor being loaded."""
        self._keep_alive_s = UNTIL_UNLOADED_S
        self._clock = clock
        self._state = ModelState.EMPTY
        self.loading.state_changed.connect(self._on_changed)
        self.loading.loaded_changed.connect(self._on_changed)
        self.loading.held_changed.connect(self._on_changed)

    @property
    def name(self) -> str:
        return "" if self.file is None else self.file.name

    @property
    def is_blank(self) -> bool:
        """Whether another model may take its place: nothing is loaded, nothing was said to it, no load left a proposal.

        What is shown before the first model is opened goes on with that one.
        """
        loading = self.loading
        nothing_said = self.file is None or self.conversation.is_empty
        return loading.state is ModelState.EMPTY and nothing_said and not loading.proposals

    @property
    def holds_remote(self) -> bool:
        """Whether it holds a worker on another machine, whose memory only its child can read."""
        return self.held is not None and any(not is_local(endpoint) for endpoint in self.held.endpoints)

    @property
    def keep_alive_s(self) -> float:
        return self._keep_alive_s

    def keep_alive(self, keep_alive_s: float) -> None:
        """Unload it once it has been idle for so long, counted from now; see `HeldModel`."""
        self._keep_alive_s = keep_alive_s
        if self.held is not None:
            self._set_held(self.held.kept_alive(keep_alive_s, self._clock()))

    def _on_changed(self) -> None:
        self._set_held(self._held_now())

    def _held_now(self) -> HeldModel | None:
        loading, before = self.loading, self.held
        if self.key is None or loading.state is ModelState.EMPTY:
            self._state = ModelState.EMPTY
            return None
        if before is None:
            before = HeldModel(self.key, self.name, keep_alive_s=self._keep_alive_s)
        held_now = {} if loading.loaded is None else held_bytes(loading.loaded, loading.checkpoint_bytes)
        held = before.holding(held_now, loading.endpoints)
        before_state, self._state = self._state, loading.state
        if loading.state is not ModelState.READY:
            return held.busy()
        if before_state is ModelState.READY:
            return held
        return held.idle(self._clock(), answered=before_state is ModelState.GENERATING)

    def _set_held(self, held: HeldModel | None) -> None:
        if held != self.held:
            self.held = held
            self.changed.emit()
