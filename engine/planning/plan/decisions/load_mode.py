"""Whether the model file is mapped into memory or read into memory of our own.

What the engine does with either: weights for a device are copied there and the mapping under them is let go; weights of
the CPU stay pages of the file, which the system can take back, or become memory that it cannot. Pinned memory, from
which large batches are copied faster, there is only without a mapping. A choice is always kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
    "mmap": tr("Chosen: CPU weights stay pages of the file."),
    "none": tr("Chosen: CPU weights are read into memory."),
    "mlock": tr("Chosen: CPU weights are read into memory that is never swapped out."),
    "mmap_mlock": tr("Chosen: CPU weights stay pages of the file that are kept in memory."),
    "direct_io": tr("Chosen: the file is read past the system's page cache."),
}


@dataclass(frozen=True, slots=True)
class ModeChoice:
    """A mode to try, and why."""

    mode: LoadMode
    reason: str


def load_modes(
    model: ModelFile, rig: Rig, layout: Layout, asked: LoadMode, host: HostFacts, *, has_adapters: bool
) -> tuple[ModeChoice, ...]:
    """Return the modes to try, the wanted one first; the next is for where the host has no room for the one before."""
    if asked != "auto":
        return (ModeChoice(asked, _CHOSEN[asked]),)
    mapped = ModeChoice("mmap", tr("The CPU's weights stay pages of the file, which the system can take back."))
    reason = next(_reasons_to_read(model, rig, layout, host, has_adapters=has_adapters), None)
    if reason is None:
        return (mapped,)
    crowded = tr("The host has no room for the CPU's weights, so they stay pages of the file and are read when needed.")
    return (ModeChoice("none", reason), ModeChoice("mmap", crowded))


def _reasons_to_read(
    model: ModelFile, rig: Rig, layout: Layout, host: HostFacts, *, has_adapters: bool
) -> Iterator[str]:
    """Yield what stands against mapping, most telling first."""
    ids = used_devices(layout)
    used = [device for device in rig.devices if device.id in ids]
    first: Device | None = used[0] if used else None
    on_cpu = CPU_ID in ids
    if not used:
        yield tr("Everything is on the CPU: weights are read once and stay in memory.")
    if on_cpu and any(device.backend in _METAL for device in used):
        yield tr("With Metal and the CPU sharing the layers, a mapping would hold the whole file for Metal.")
    if host.platform == "win32" and first is not None and first.backend == "CUDA":
        yield tr("On Windows a mapped file is slower to copy to a CUDA card.")
    free_bytes = rig.host.available_bytes
    if host.platform.startswith("linux") and used and model.size_bytes > free_bytes:
        yield (
            tr(
                "The file ({size}) is larger than the free memory ({free}): mapping it would push out "
                "what other programs use.",
                size=format_bytes(model.size_bytes),
                free=format_bytes(free_bytes),
            )
        )
    if first is not None and first.backend == "Vulkan":
        yield tr("Vulkan copies weights faster from memory than from a mapped file.")
    if any(not supports_mapping(device) for device in used):
        yield tr("An integrated card is among the devices, and takes no weights from a mapped file.")
    if has_adapters:
        yield tr("An adapter goes into memory of the same kind as the weights that it changes, not into a mapping.")


def decide_load_mode(asked: LoadMode, choice: ModeChoice) -> Decision:
    """Return the mode that is used."""
    return Decision("load_mode", choice.mode, choice.reason, asked != "auto")
