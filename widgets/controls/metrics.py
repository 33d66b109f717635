"""Sizes that the controls of the bar share."""

from __future__ import annotations

CONTROL_HEIGHT_PX = 30
