"""Which split modes can be offered on a rig, and why the others cannot."""

from __future__ import annotations

from engine.devices.device import Rig
from engine.layout.layout import SplitMode

_TENSOR_LATER = "Tensor split is not available yet. Choose Layer: any layer on any device."
_ROW_LATER = "Row split is not available yet. Choose Layer: any layer on any device."


def split_mode_obstacles(rig: Rig) -> dict[SplitMode, str]:
    """Return, for each split mode that cannot be chosen on `rig`, a sentence on why and what to do instead."""
    unable = [device.id for device in rig.devices if not device.capabilities.row_split]
    row = _ROW_LATER
    if unable:
        row = (
            f"Row split needs split buffers, which {_join(unable)} {'has' if len(unable) == 1 else 'have'} not. "
            "Choose Layer: any layer on any device."
        )
    elif not rig.devices:
        row = "Row split needs devices besides the CPU. Choose Layer."
    tensor = _TENSOR_LATER if rig.devices else "Tensor split needs devices besides the CPU. Choose Layer."
    return {"tensor": tensor, "row": row}


def _join(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
