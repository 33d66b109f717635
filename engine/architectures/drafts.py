"""Models that draft for another one."""

from __future__ import annotations

from engine.architectures.record import Architecture, Records

_BESIDE = "it only runs beside another model"

RECORDS: Records = {
    "dflash": Architecture(drafts="without_embedding", refused=_BESIDE),
    "eagle3": Architecture(drafts="without_embedding", ties_output=False),
    "gemma4-assistant": Architecture(drafts="always", refused=_BESIDE),
}
