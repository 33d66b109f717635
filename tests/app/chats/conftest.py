"""The bench that tests of attached images and sounds share."""

from __future__ import annotations

from tests.app.chats.bench import bench

__all__ = ["bench"]
