"""The status of one open model, as the window shows it.

This module imports nothing heavy, because the window needs it for its first frame.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Literal

from msgspec import Struct

LossKind = Literal["", "lost", "crashed"]
"""Why a model is no longer loaded, though it was not unloaded; empty if this has not happened.

"crashed": its process crashed. "lost": any other reason.
"""


class Phase(Enum):
    """Phase of a model.

    STOPPED: no model is loaded.
    STARTING: a load has begun; its child has not sent its first message.
    LOADING: the child loads the model.
    READY: the model is loaded and has no request.
    ANSWERING: a request is under way.
    STOPPING: the load or all requests are ending, or the child is.
    FAILED: no model is loaded, because the last load failed or its child was lost.
    """

    STOPPED = auto()
    STARTING = auto()
    LOADING = auto()
    READY = auto()
    ANSWERING = auto()
    STOPPING = auto()
    FAILED = auto()

    @property
    def is_loaded(self) -> bool:
        """Whether a model is loaded, so that it can get requests or be unloaded."""
        return self in (Phase.READY, Phase.ANSWERING)


class ModelStatus(Struct, frozen=True):
    """Status of a model, as the settings bar, the chat, the menus and the list of loaded models show it.

    `name`: name of the model; empty if no file is open.
    `phase`: one of STOPPED, LOADING, READY, ANSWERING and STOPPING. Requests that the window makes for itself, such as
    counting tokens, do not count as ANSWERING. A question in the chat does, from the moment it is sent until its answer
    has ended.
    `is_edited`: whether the edited layout or settings differ from those that are loaded.
    `waits`: reason why a load has not begun, as a sentence; empty if no load waits.
    `fault`: why the loaded model was lost, if it can be loaded again with the same settings; else empty.
    `is_parked`: whether it was unloaded to free memory, so that the next question loads it again.
    """

    name: str = ""
    phase: Phase = Phase.STOPPED
    is_edited: bool = False
    waits: str = ""
    fault: LossKind = ""
    is_parked: bool = False

    @property
    def is_loading(self) -> bool:
        """Whether a load runs, or waits to begin. Such a load can be cancelled."""
        return bool(self.waits) or self.phase is Phase.LOADING

    @property
    def is_loaded(self) -> bool:
        """Whether a model is loaded, so that it can get requests or be unloaded."""
        return self.phase.is_loaded

    @property
    def can_load(self) -> bool:
        """Whether the edited layout can be loaded: no model is loaded, or the layout or settings were edited since the
        load.
        """
        if not self.name or self.waits:
            return False
        return self.phase is Phase.STOPPED or (self.is_loaded and self.is_edited)
