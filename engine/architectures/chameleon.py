"""Chameleon, which reads images as tokens."""

from __future__ import annotations

from engine.architectures.record import Architecture, Records

RECORDS: Records = {"chameleon": Architecture()}
