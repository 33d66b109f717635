"""Probes of the edited layout: when editing pauses, llama.cpp's own numbers replace the estimated ones on the screen.

A probe loads the model in a child process without allocating its memory (`no_alloc`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from PySide6.QtCore import QObject

from app.background import Background, Task
from app.models.document import LayoutDocument
from engine.base.errors import EngineError
from engine.planning.plan.plan import Plan
from engine.runtime.probing.probe import DEFAULT_TIMEOUT_S, ProbeRun
from engine.runtime.process.blocking_child import SpareChild
from widgets.common.delayed_call import DelayedCall

_log = logging.getLogger("layerdeck.prober")

PAUSE_MS = 500
"""Milliseconds without an edit after which a probe starts."""


class Prober(QObject):
    """Probes the edited layout: a child process loads it without allocating memory, to get llama.cpp's own numbers.

    One probe runs at a time; a newer one cancels it. `may_probe`: returns whether a probe may run now.
    """

    def __init__(
        self,
        document: LayoutDocument,
        background: Background,
        may_probe: Callable[[], bool],
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._document = document
        self._background = background
        self._may_probe = may_probe
        self._probing = background.latest()
        self._closed = False
        self._spare = SpareChild(timeout_s=DEFAULT_TIMEOUT_S)
        self._pause = DelayedCall(self, self._start, PAUSE_MS)
        document.edit_settled.connect(self.restart)
        document.edit_settled.connect(self._prepare)

    @property
    def waits(self) -> bool:
        """Whether a probe will start when editing has paused long enough."""
        return self._pause.isActive()

    def restart(self) -> None:
        """Start a probe of the edited layout after the next pause in editing; do nothing after `close`."""
        if not self._closed:
            self._pause.start()

    def cancel(self) -> None:
        """Cancel the running probe. The next edit starts another one."""
        self._probing.cancel()

    def close(self) -> None:
        """Cancel the running probe, and prevent further ones."""
        self._closed = True  # Models that are closed after this give memory back, which would ask for a probe.
        self._pause.stop()
        self.cancel()
        self._spare.close()

    def _prepare(self) -> None:
        """Start the child process of the next probe in the background while the user edits; the start takes time."""
        if self._may_probe():
            self._background.run("probe", self._spare.prepare, _nothing, self._skip, quiet=True)

    def _skip(self, error: EngineError) -> None:
        # Not shown: the estimated numbers stay, and a load meets the same error.
        _log.info("probe: %s", error.summary())

    def _start(self) -> None:
        document = self._document
        # The plan is still that of an earlier edit.
        if document.is_behind:
            self.restart()
            return
        plan = document.plan
        if plan is None or plan.probed is not None or plan.violations or document.is_dragging or not self._may_probe():
            return
        run = ProbeRun(plan, document.probes, self._spare)

        def probe(task: Task[None]) -> Plan:
            # The thread waits for the child's answer; a cancelled token ends the child.
            with task.token.waking(run.cancel):
                return run.run()

        self._probing.run("probe", probe, lambda _probed: document.show_probed(), self._skip, quiet=True)


def _nothing(_result: None) -> None:
    """Do nothing. Callback that `Background.run` requires, for work without a result."""
