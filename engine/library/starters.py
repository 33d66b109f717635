"""Small models with open licences that are offered to users who have no model yet."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from engine.base.language import tr
from engine.devices.device import Rig

N_OFFERED = 3
# Memory that a model needs with its context, as a multiple of its file size.
_WORKING_ROOM = 1.3


class Starter(Struct, frozen=True):
    """A small model that is offered for download.

    `address`: repository and quantisation at the hub, as "owner/name:TAG".
    `size_bytes`: rounded size of the file.
    """

    name: str
    address: str
    size_bytes: int
    purpose: str


# From the smallest to the largest.
STARTERS = (
    Starter("Qwen3 0.6B", "Qwen/Qwen3-0.6B-GGUF:Q8_0", 640_000_000, tr("Tiny: runs anywhere, to try things out")),
    Starter("Gemma 3 1B", "ggml-org/gemma-3-1b-it-GGUF:Q4_K_M", 810_000_000, tr("Small and quick, many languages")),
    Starter(
        "Qwen3 1.7B", "Qwen/Qwen3-1.7B-GGUF:Q8_0", 1_840_000_000, tr("Thinks before it answers, needs little memory")
    ),
    Starter("Gemma 3 4B", "ggml-org/gemma-3-4b-it-GGUF:Q4_K_M", 2_490_000_000, tr("Good answers, reads images")),
    Starter("Qwen3 4B", "Qwen/Qwen3-4B-GGUF:Q4_K_M", 2_500_000_000, tr("Good answers, tools and thinking")),
    Starter("Qwen3 8B", "Qwen/Qwen3-8B-GGUF:Q4_K_M", 5_030_000_000, tr("Strong for its size, tools and thinking")),
    Starter(
        "gpt-oss 20B",
        "ggml-org/gpt-oss-20b-GGUF:MXFP4",
        12_110_000_000,
        tr("Large and fast (mixture of experts); needs a GPU"),
    ),
)


def starters_for(rig: Rig, starters: Sequence[Starter] = STARTERS) -> tuple[Starter, ...]:
    """Return the three largest starter models that fit on the rig; the smallest one if none fits.

    A model fits in the free memory of the GPUs or in half of the host's free memory, whichever is larger.
    """
    room_bytes = max(
        sum(device.available_bytes - device.margin_bytes for device in rig.devices if device.kind == "gpu"),
        rig.host.available_bytes // 2,
    )
    fitting = [starter for starter in starters if starter.size_bytes * _WORKING_ROOM <= room_bytes]
    return tuple(fitting[-N_OFFERED:] or starters[:1])
