"""The events of a session reach the GUI thread whole and in order."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from PySide6.QtWidgets import QApplication

from app.models.engine_bridge import EngineBridge
from engine.runtime.session.driver import SessionUpdate
from engine.runtime.session.events import Failed
from engine.runtime.session.snapshot import Snapshot


class Parts:
    """A bridge whose session is played by the test. `seen`: what it has emitted, events as their sentences."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("app.models.engine_bridge.ModelSession", self._begin)
        self.bridge = EngineBridge()
        self.seen: list[str] = []
        self.bridge.snapshot.connect(lambda _snapshot: self.seen.append("snapshot"))
        self.bridge.failed.connect(lambda event: self.seen.append(event.message))

    def _begin(
        self, receiver: Callable[[SessionUpdate], None], *, flush: Callable[[], None], **_options: object
    ) -> SimpleNamespace:
        self.receive, self.flush = receiver, flush
        return SimpleNamespace()


@pytest.fixture
def parts(qapp: QApplication, monkeypatch: pytest.MonkeyPatch) -> Parts:
    return Parts(monkeypatch)


def failure(sentence: str) -> Failed:
    return Failed(kind="internal", message=sentence)


def test_a_new_state_is_not_seen_before_the_event_of_the_same_change(parts: Parts) -> None:
    parts.receive(Snapshot())
    QApplication.processEvents()
    assert parts.seen == []
    parts.receive(failure("The model was lost."))
    parts.flush()
    QApplication.processEvents()
    assert parts.seen == ["snapshot", "The model was lost."]


def test_updates_stay_in_order_if_a_receiver_runs_an_event_loop(parts: Parts) -> None:
    parts.bridge.snapshot.connect(lambda _snapshot: QApplication.processEvents())
    parts.receive(Snapshot())
    parts.receive(failure("first"))
    parts.flush()
    parts.receive(failure("second"))
    parts.flush()
    QApplication.processEvents()
    assert parts.seen == ["snapshot", "first", "second"]
