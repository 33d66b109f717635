"""pytest-qt's bot with this project's deadline in place of 5 seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytestqt.qtbot import QtBot

from tests.support.patience import DEADLINE_MS


class PatientBot(QtBot):
    """Waits until the project's deadline, whatever timeout a test gives. A timeout of 0 still checks only once."""

    def waitSignal(self, signal: Any, *, timeout: int = DEADLINE_MS, **options: Any) -> Any:
        return super().waitSignal(signal, timeout=_patient_ms(timeout), **options)

    def waitUntil(self, callback: Callable[[], bool | None], *, timeout: int = DEADLINE_MS) -> None:
        super().waitUntil(callback, timeout=_patient_ms(timeout))

    def waitExposed(self, widget: Any, *, timeout: int = DEADLINE_MS) -> Any:
        return super().waitExposed(widget, timeout=_patient_ms(timeout))

    def waitActive(self, widget: Any, *, timeout: int = DEADLINE_MS) -> Any:
        return super().waitActive(widget, timeout=_patient_ms(timeout))


def _patient_ms(timeout_ms: int) -> int:
    return max(timeout_ms, DEADLINE_MS) if timeout_ms else 0
