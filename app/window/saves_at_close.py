"""Delays the end of the program until KV states (cached keys and values of conversations) are saved.

The wait begins when the window closes. If it is long, a dialog shows its progress. It ends after `SILENT_S` seconds
without progress.

The child process of each model saves its KV state. If the disk does not answer, the child gives up before `SILENT_S`
seconds have passed. So a child without progress for that time has not begun to save. It may compute a long batch.
"""

from __future__ import annotations

import time

from PySide6.QtCore import QEventLoop, Qt, QTimer

from app.models.open_models import OpenModels
from engine.base.language import tr
from engine.base.units import format_bytes
from engine.runtime.session.events import Saving
from widgets.common.dialog import StatusDialog

SHOW_AFTER_S = 2.0
SILENT_S = 15.0
_POLL_MS = 50


def wait_for_saves(models: OpenModels) -> None:
    """Save the KV states (cached keys and values of conversations) of all models, and wait for that.

    The wait ends when they are saved, when the user ends it, or after `SILENT_S` seconds without progress. If the wait
    takes longer than `SHOW_AFTER_S` seconds, a dialog shows the progress, with a button to close at once.
    Called in the GUI thread after the window was hidden, while all objects still exist. Events are processed meanwhile.
    """
    begun_s = latest_s = time.monotonic()
    for model in models.all:
        model.loading.prepare_close()
    saving = [model for model in models.all if model.loading.is_saving]
    if not saving:
        return
    loop, poll = QEventLoop(), QTimer()
    dialog = StatusDialog(tr("Saving KV states"))
    dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose, False)  # deleted below
    dialog.close_button.setText(tr("Close Now"))
    dialog.lay_out(dialog.status_label)
    dialog.show_status(tr("Saving the KV state of the conversation…"))

    def show_progress(event: Saving) -> None:
        nonlocal latest_s
        latest_s = time.monotonic()
        saved, size = format_bytes(event.saved_bytes), format_bytes(event.size_bytes)
        dialog.show_status(tr("Saving the KV state of the conversation… ({saved} of {size})", saved=saved, size=size))

    def look() -> None:
        if not any(model.loading.is_saving for model in saving) or time.monotonic() - latest_s >= SILENT_S:
            loop.quit()
        elif dialog.isHidden() and time.monotonic() - begun_s >= SHOW_AFTER_S:
            dialog.show()

    for model in saving:
        model.loading.bridge.saving.connect(show_progress)
    dialog.finished.connect(loop.quit)
    poll.timeout.connect(look)
    poll.start(_POLL_MS)
    try:
        loop.exec()
    finally:
        poll.stop()
        for model in saving:
            model.loading.bridge.saving.disconnect(show_progress)
            # Otherwise the session would wait some seconds more for what the user does not wait for.
            model.loading.stop_saving()
        dialog.finished.disconnect(loop.quit)
        dialog.close()
        dialog.deleteLater()
