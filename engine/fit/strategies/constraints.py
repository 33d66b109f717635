"""What a strategy is given besides model, rig and settings, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from engine.devices.device import Rig
from engine.fit.strategies.watch import Watch
from engine.layout.layout import Layout
from engine.memory.model_memory import ModelMemory
from engine.memory.side_files import NO_SIDE_FILES, SideFiles
from engine.settings.context_settings import ContextSettings, KvType
from engine.speed.speeds import NO_MEASUREMENTS, Speeds


@dataclass(frozen=True, slots=True)
class Pin:
    """Layers `first` to `last`, both included, that stay on `device`."""

    device: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Constraints:
    """`order`: device ids, the preferred first (those left out follow in the rig's order); `off`: ids not to be used;
    `pins`: layers whose device is given; `output`: the device of the output layer, where it is given; `split`: use
    several devices even where one holds everything; `kv_types`: cache types that may be chosen, the preferred first
    (none: those of the settings only); `max_ctx`: the longest context wanted, in tokens; `side_files`: what is loaded
    beside the model; `speeds`: what was measured, for strategy fastest; `watch`: told of every layout that is tried.

    Margins are the rig's (`Device.margin_bytes`).
    """

    order: tuple[str, ...] = ()
    off: frozenset[str] = frozenset()
    pins: tuple[Pin, ...] = ()
    output: str | None = None
    split: bool = False
    kv_types: tuple[KvType, ...] = ()
    max_ctx: int | None = None
    side_files: SideFiles = NO_SIDE_FILES
    speeds: Speeds = NO_MEASUREMENTS
    watch: Watch | None = field(default=None, compare=False)

    def kept_by(self, layout: Layout) -> Constraints:
        """Return these without what `layout` does not keep: whoever moved pinned layers by hand has released them."""
        held = ((pin.device, range(pin.first, pin.last + 1)) for pin in self.pins)
        pins = tuple(
            Pin(device, layer, layer)
            for device, layers in held
            for layer in layers
            if layout.device_of(layer) == device
        )
        output = self.output if self.output == layout.output_device else None
        return replace(self, pins=pins, output=output)


NO_CONSTRAINTS = Constraints()


@dataclass(frozen=True, slots=True)
class AutoLayout:
    """A layout, the settings it is meant for, why it is so (a sentence or two), and whether it is forecast to fit."""

    layout: Layout
    context: ContextSettings
    explanation: str
    fits: bool = field(default=False)


Strategy = Callable[[ModelMemory, Rig, ContextSettings, Constraints], AutoLayout]
