"""Fixtures that the hardening tests share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from PySide6.QtCore import qInstallMessageHandler


@pytest.fixture
def own_log() -> Iterator[logging.Logger]:
    """The root logger without handlers; what a test starts there ends with it."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    root.handlers.clear()
    shown = qInstallMessageHandler(None)
    yield root
    for handler in root.handlers:
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    qInstallMessageHandler(shown)
