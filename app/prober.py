"""Asks the engine about the edited layout when editing pauses, so that forecasts on the screen become probed ones."""

from __future__ import annotations

import logging
from collections.abc import Callable

from PySide6.QtCore import QObject, QTimer

from app.background import Background
from app.document import LayoutDocument
from engine.errors import EngineError
from engine.fit.report import FitReport
from engine.runner.probe import DEFAULT_TIMEOUT_S, ProbeRun
from engine.runner.probe_cache import ProbeCache
from engine.runner.spare import SpareChild

_log = logging.getLogger("layerdeck.prober")

PAUSE_MS = 500
"""A probe starts when nothing was edited for this long."""


class Prober(QObject):
    """Probes one layout at a time; a newer one ends what runs. `may_probe` says whether devices may be asked now."""

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
        self._run: ProbeRun | None = None
        self.cache = ProbeCache()
        self._spare = SpareChild(timeout_s=DEFAULT_TIMEOUT_S)
        self._pause = QTimer(self)
        self._pause.setSingleShot(True)
        self._pause.setInterval(PAUSE_MS)
        self._pause.timeout.connect(self._start)
        document.edit_settled.connect(self.restart)
        document.edit_settled.connect(self._prepare)

    def restart(self) -> None:
        """Probe what is edited after the next pause."""
        self._pause.start()

    def cancel(self) -> None:
        """End the probe that runs."""
        run, self._run = self._run, None
        if run is not None:
            run.cancel()

    def close(self) -> None:
        """Begin nothing any more and end what runs."""
        self._pause.stop()
        self.cancel()
        self._spare.close()

    def _prepare(self) -> None:
        """Start the child of the next probe while people still edit, in a thread: a start takes some milliseconds."""
        if self._may_probe():
            self._background.run("probe", self._spare.prepare, _nothing, self._skip, quiet=True)

    def _skip(self, error: EngineError) -> None:
        _log.info("probe: %s", error.summary())

    def _start(self) -> None:
        document = self._document
        edit, model, preview = document.edit, document.model, document.preview
        if edit is None or model is None or preview is None or document.is_dragging or preview.report.violations:
            return
        if not self._may_probe():
            return
        self.cancel()
        run = self._run = ProbeRun(
            model, preview.rig, edit.layout, edit.context, self.cache, self._spare, edit.side_files
        )

        def show(report: FitReport) -> None:
            if self._run is run:
                self._run = None
                document.show_probed(edit, report)

        def skip(error: EngineError) -> None:
            if self._run is run:
                self._run = None
                self._skip(error)

        self._background.run("probe", run.run, show, skip, quiet=True)


def _nothing(_result: None) -> None:
    """A child waits; nobody need be told."""
