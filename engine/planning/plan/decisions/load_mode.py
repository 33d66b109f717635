"""The decision whether llama.cpp maps the model file into memory (mmap) or reads it into allocated memory.

With mmap, weights of the CPU are pages of the file, which the system can reclaim. Weights of other devices are copied
to them, and their part of the mapping is released. Without mmap, weights of the CPU are in allocated memory, which the
system cannot reclaim. Only without mmap this memory can be pinned, which makes copies of weights to a GPU faster. A
mode that the user chose is always used.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from engine.base.language import tr
from engine.base.units import format_bytes
from engine.devices.device import CPU_ID, Device, Rig
from engine.model.gguf.model_file import ModelFile
from engine.planning.layout.engine_parameters import used_devices
from engine.planning.layout.layout import Layout
from engine.planning.memory.backends import supports_mapping
from engine.planning.plan.decisions.decision import Decision
from engine.planning.plan.decisions.threads import HostFacts
from engine.planning.settings.context_settings import LoadMode

_METAL = ("Metal", "MTL")
_CHOSEN: dict[LoadMode, str] = {
    "mmap": tr("Set explicitly: the CPU's weights are memory-mapped from the file."),
    "none": tr("Set explicitly: the CPU's weights are read into memory."),
    "mlock": tr("Set explicitly: the CPU's weights are read into memory and locked, so they are never swapped out."),
    "mmap_mlock": tr("Set explicitly: the CPU's weights are memory-mapped from the file and locked in memory."),
    "direct_io": tr("Set explicitly: the file is read directly, without the system's page cache."),
}


class ModeChoice(Struct, frozen=True):
    """A load mode to try, and the reason for it as a sentence for the user."""

    mode: LoadMode
    reason: str


def load_modes(
    model: ModelFile, rig: Rig, layout: Layout, asked: LoadMode, host: HostFacts, *, has_adapters: bool
) -> tuple[ModeChoice, ...]:
    """Return the load modes to try, in order. The second one, if any, is for a host that lacks memory for the first.

    `asked`: the user's choice. Unless it is "auto", only this mode is returned.
    `host`: platform and processor of the computer that loads the model.
    `has_adapters`: whether the load has LoRA adapters.
    """
    if asked != "auto":
        return (ModeChoice(asked, _CHOSEN[asked]),)
    mapped = ModeChoice(
        "mmap", tr("The CPU's weights are memory-mapped from the file, so the system can reclaim their memory.")
    )
    # The generator is in order of importance, and people are shown one reason.
    reason = next(_reasons_to_read(model, rig, layout, host, has_adapters=has_adapters), None)
    if reason is None:
        return (mapped,)
    crowded = tr(
        "The host has no room for the CPU's weights, so they are memory-mapped and read from the file when needed."
    )
    # A slow load from pages of the file is better than none.
    return (ModeChoice("none", reason), ModeChoice("mmap", crowded))


def _reasons_to_read(
    model: ModelFile, rig: Rig, layout: Layout, host: HostFacts, *, has_adapters: bool
) -> Iterator[str]:
    """Yield sentences on why the model file should be read instead of mapped, the most important reason first."""
    ids = used_devices(layout)
    used = [device for device in rig.devices if device.id in ids]
    first: Device | None = used[0] if used else None
    on_cpu = CPU_ID in ids
    if not used:
        yield tr("Everything is on the CPU: weights are read once and stay in memory.")
    if on_cpu and any(device.backend in _METAL for device in used):
        yield tr(
            "With layers on both Metal and the CPU, memory-mapping would map the whole file for Metal, including the "
            "layers on the CPU."
        )
    if host.platform == "win32" and first is not None and first.backend == "CUDA":
        yield tr("On Windows, copying from a memory-mapped file to a CUDA GPU is slower.")
    free_bytes = rig.host.available_bytes
    # With a device, each mapped page is read once and copied there, but stays in the page cache until it is pushed out.
    if host.platform.startswith("linux") and used and model.size_bytes > free_bytes:
        yield (
            tr(
                "The file ({size}) is larger than the free memory ({free}); memory-mapping the file would "
                "displace the memory of other programs.",
                size=format_bytes(model.size_bytes),
                free=format_bytes(free_bytes),
            )
        )
    if first is not None and first.backend == "Vulkan":
        yield tr("Vulkan copies weights faster from memory than from a mapped file.")
    if any(not supports_mapping(device) for device in used):
        yield tr("One of the devices is an integrated GPU, which cannot use memory-mapped weights.")
    if has_adapters:
        yield tr(
            "A LoRA adapter needs memory of the same kind as the weights that it changes, so these weights are "
            "not memory-mapped."
        )


def decide_load_mode(asked: LoadMode, choice: ModeChoice) -> Decision:
    """Return the decision on the load mode. `asked`: the user's choice; `choice`: the mode that the load uses."""
    return Decision("load_mode", choice.mode, choice.reason, asked != "auto")
