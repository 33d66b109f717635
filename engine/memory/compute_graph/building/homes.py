"""Which memory a weight lies in: its layer's, the host's where the device has no kernel for it, or an override's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.devices.device import CPU_ID
from engine.layout.engine_parameters import TensorOverride
from engine.memory.compute_graph.building.facts import WeightFacts
from engine.memory.compute_graph.building.sketch import HomeOf
from engine.memory.compute_graph.ggml.scheduler import HOST
from engine.memory.override_homes import usable_rules


def memory_of(device: str) -> str:
    """Return the memory of a device."""
    return HOST if device == CPU_ID else device


def homes(overrides: tuple[TensorOverride, ...], left_out: Mapping[str, frozenset[str]]) -> HomeOf:
    """Return what tells the memory of a weight, given that of its layer.

    `left_out`: by device, the names of the weights that it has no kernel for; overrides do not ask for one.
    """
    if not overrides and not left_out:
        return lambda _, memory: memory
    rules = usable_rules(overrides)

    def home(facts: WeightFacts, memory: str) -> str:
        for finds, device in rules:
            if finds(facts.name):
                return memory_of(device)
        return HOST if facts.name in left_out.get(memory, ()) else memory

    return home


def homes_of_variants(
    variants: Mapping[str, Mapping[str, str]], outer: Mapping[str, str], left_out: Mapping[str, frozenset[str]]
) -> HomeOf:
    """Return the same for layers whose weights are known to be moved, given those by the memory of each layer, and
    those of what is in no layer."""

    def home(facts: WeightFacts, memory: str) -> str:
        moved = variants.get(memory, {}).get(facts.name) or outer.get(facts.name)
        return moved or (HOST if facts.name in left_out.get(memory, ()) else memory)

    return home


def in_their_blocks(home: HomeOf, memories: Sequence[str]) -> HomeOf:
    """Return the same for layers that use the weights of other blocks, which lie where those are (`memories`)."""

    def found(facts: WeightFacts, memory: str) -> str:
        if facts.name.startswith("blk."):
            memory = memories[int(facts.name.split(".", 2)[1])]
        return home(facts, memory)

    return found
