"""Pins: layers, and the output layer, that automatic layouts leave where they are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PinnedLayers:
    """Layers `first` to `last`, both included, that stay on `device`."""

    device: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Pins:
    """What is pinned: ranges of layers, and the device of the output layer if that is."""

    layers: tuple[PinnedLayers, ...] = ()
    output: str | None = None

    def device_of(self, layer: int) -> str | None:
        """Return where a layer is pinned to, None where it is free."""
        return next((pin.device for pin in self.layers if pin.first <= layer <= pin.last), None)


NO_PINS = Pins()


@dataclass(frozen=True, slots=True)
class PinToggle:
    """Pin or unpin layers `(first, last)`, both included; None: the output layer."""

    layers: tuple[int, int] | None
