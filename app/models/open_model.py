"""An open model with all its parts: file, edit (layout and settings), session, conversation and idle time."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QObject, Signal

from app.models.conversation import Conversation
from app.models.document import EditState
from app.models.loading import Loading
from app.rig.calibrator import Calibrator
from engine.devices.device import Rig
from engine.devices.telemetry.processes import is_local
from engine.model.gguf.model_file import FileIdentity, ModelFile
from engine.planning.fit.loaded_models import UNTIL_UNLOADED_S, HeldModel, held_bytes
from engine.planning.plan.edit import Edit
from engine.runtime.session.status import ModelStatus, Phase


class OpenModel(QObject):
    """One of the open models, with the objects that belong to it.

    At the start of the window there is one open model, which has no file.

    `loading`: the model's session. `conversation`: the conversation that its chat shows.
    `status`: a summary for the window; `status_changed` is emitted when it changes.
    """

    changed = Signal()
    """Emitted when the device memory of the model (`held`) has changed."""
    status_changed = Signal(ModelStatus)
    parked_changed = Signal(bool)
    planned_changed = Signal()
    """Emitted when the context size after the next load (`planned_context`) has changed."""

    def __init__(
        self,
        number: int,
        calibrator: Calibrator,
        clock: Callable[[], float],
        parent: QObject | None = None,
        *,
        keep_alive_s: float = UNTIL_UNLOADED_S,
    ) -> None:
        super().__init__(parent)
        self.number = number
        """Index of this model in the order in which models were opened, counted from 0."""
        self.file: ModelFile | None = None
        self.key: FileIdentity | None = None
        self.edit_state: EditState | None = None
        """Layout, settings and undo stack of this model while another model is current; None for the current model."""
        self.loading = Loading(calibrator, self)
        self.conversation = Conversation(self.loading, self)
        self.held: HeldModel | None = None
        """Device memory that the model holds; None if the model is neither loaded nor being loaded."""
        self.is_of_program = False
        """Whether the model was opened for a client of the API server, whose requests then set its idle time."""
        self.planned_rig: Rig | None = None
        """The devices for whose free memory the layout was found; None if the layout was not found by a search."""
        self._keep_alive_s = self._default_keep_alive_s = keep_alive_s
        self._clock = clock
        self._phase = Phase.STOPPED
        self.status = ModelStatus()
        self._edit: Edit | None = None
        """Layout and settings of the model, also while another model is current; None before the first layout."""
        self._waits = ""
        self.is_parked = False
        """Whether the model was unloaded to free its memory, and the next question loads it again."""
        self.loading.phase_changed.connect(self._on_changed)
        self.loading.loaded_changed.connect(self._on_changed)
        self.loading.held_changed.connect(self._on_changed)
        self.loading.lost_changed.connect(self._refresh_status)

    @property
    def name(self) -> str:
        return "" if self.file is None else self.file.name

    @property
    def is_blank(self) -> bool:
        """Whether another file may take the place of this model in the window.

        True if the model is not loaded, no load of it waits, its conversation is empty, and it has no proposals
        (changes after which a failed load should fit). If no file is open yet, there may be messages: they continue
        with the opened file.
        """
        loading = self.loading
        has_no_text = self.file is None or self.conversation.is_empty
        return loading.phase is Phase.STOPPED and not self._waits and has_no_text and not loading.proposals

    def begin(self, file: ModelFile, key: FileIdentity) -> None:
        """Make this object the open model of `file`. There is no layout yet. `key`: identity of the file."""
        self.file, self.key, self.edit_state, self._edit = file, key, None, None
        self.planned_rig = None
        # The idle time of an API client's request must not stay with the next file.
        if self.is_of_program:
            self.is_of_program = False
            self._keep_alive_s = self._default_keep_alive_s
        self.loading.forget_lost()
        self.set_parked(False)
        self._refresh_status()

    def set_parked(self, parked: bool) -> None:
        """Set whether the model is parked, so that its next question loads it again. A load ends the parked state."""
        if parked != self.is_parked:
            self.is_parked = parked
            self._refresh_status()
            self.parked_changed.emit(parked)

    def park(self) -> bool:
        """Unload the model so that its next question loads it again; return False if it was not loaded."""
        if not self.loading.unload():
            return False
        self.set_parked(True)
        return True

    def show_edit(self, edit: Edit | None) -> None:
        """Store `edit`, the edited layout and settings. The status shows whether it differs from the loaded edit."""
        before = self.planned_context
        self._edit = edit
        if self.planned_context != before:
            self.planned_changed.emit()
        self._refresh_status()

    @property
    def planned_context(self) -> int | None:
        """Context size in tokens that each request will have after the next load; None if unknown.

        If the setting is automatic, this is the context size that the model was trained for.
        """
        if self._edit is None or self.file is None:
            return None
        return self._edit.context.n_ctx_each or self.file.n_ctx_train or None

    def set_wait_text(self, waits: str) -> None:
        """Show in the status why a load waits, for example for memory. `waits`: a sentence; empty if no load waits."""
        self._waits = waits
        self._refresh_status()

    @property
    def holds_remote(self) -> bool:
        """Whether the model uses an RPC worker on another computer, whose memory only the model's child can read."""
        return self.held is not None and any(not is_local(endpoint) for endpoint in self.held.endpoints)

    @property
    def keep_alive_s(self) -> float:
        return self._keep_alive_s

    def keep_alive(self, keep_alive_s: float) -> None:
        """Set the idle time in seconds after which the model is unloaded, counted from now."""
        self._keep_alive_s = keep_alive_s
        if self.held is not None:
            self._set_held(self.held.kept_alive(keep_alive_s, self._clock()))

    def set_default_keep_alive(self, keep_alive_s: float) -> None:
        """Set the default idle time in seconds. A time that was set for this model with `keep_alive` has precedence."""
        # An idle time other than the former default was chosen for this model.
        follows = self._keep_alive_s == self._default_keep_alive_s and not self.is_of_program
        self._default_keep_alive_s = keep_alive_s
        if follows:
            self.keep_alive(keep_alive_s)

    def _on_changed(self) -> None:
        if self.loading.phase.is_loaded:
            self.set_parked(False)
        self._set_held(self._held_now())
        self._refresh_status()

    def _refresh_status(self) -> None:
        loading, edit = self.loading, self._edit
        is_edited = loading.loaded is not None and edit is not None and loading.loaded.differs_from(edit)
        status = ModelStatus(self.name, loading.phase, is_edited, self._waits, loading.fault, self.is_parked)
        if status != self.status:
            self.status = status
            self.status_changed.emit(status)

    def _held_now(self) -> HeldModel | None:
        loading, before = self.loading, self.held
        if self.key is None or loading.phase is Phase.STOPPED:
            self._phase = Phase.STOPPED
            return None
        if before is None:
            before = HeldModel(self.key, self.name, keep_alive_s=self._keep_alive_s)
        held_now = {} if loading.loaded is None else held_bytes(loading.loaded, loading.checkpoint_bytes)
        held = before.holding(held_now, loading.endpoints)
        phase_before, self._phase = self._phase, loading.phase
        if loading.phase is not Phase.READY:
            return held.busy()
        # The idle time began when the model became ready, not at this change.
        if phase_before is Phase.READY:
            return held
        return held.idle(self._clock(), answered=phase_before is Phase.ANSWERING)

    def _set_held(self, held: HeldModel | None) -> None:
        if held != self.held:
            self.held = held
            self.changed.emit()
