"""Two stacks of layers that run in turns, each several times with the same weights (HRM Text)."""

from __future__ import annotations

from dataclasses import dataclass

from engine.gguf.model_file import ModelFile
from engine.memory.hyper_parameters import MissingNumberError, number


@dataclass(frozen=True, slots=True)
class Stacks:
    """`layers` of one stack; the low stack runs `low_cycles` times before the high one does, over and over."""

    layers: int
    low_cycles: int

    def place(self, slot: int) -> tuple[bool, int]:
        """Return whether the layer at `slot` belongs to the high stack, and its place in the stack."""
        run, place = divmod(slot, self.layers)
        return run % (self.low_cycles + 1) == self.low_cycles, place

    def block(self, slot: int) -> int:
        """Return the block of the file whose weights the layer at `slot` has."""
        is_high, place = self.place(slot)
        return place + (self.layers if is_high else 0)


def read_stacks(model: ModelFile) -> Stacks:
    """Return the stacks of a model.

    Raises:
        MissingNumberError: they do not add up to the layers of the file.
    """
    layers, high_cycles, low_cycles = (
        number(model, f"hrm.{key}") for key in ("layers_per_stack", "h_cycles", "l_cycles")
    )
    if layers * high_cycles * (low_cycles + 1) != model.n_layers:
        raise MissingNumberError(f"the stacks of the file do not make {model.n_layers} layers")
    return Stacks(layers, low_cycles)
