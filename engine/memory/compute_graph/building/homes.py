"""Which memory a weight lies in: its layer's, the host's where the device has no kernel for it, or an override's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.devices.device import CPU_ID
from engine.memory.compute_graph.building.facts import WeightFacts
from engine.memory.compute_graph.building.sketch import HomeOf
from engine.memory.compute_graph.ggml.scheduler import HOST


def memory_of(device: str) -> str:
    """Return the memory of a device."""
    return HOST if device == CPU_ID else device


def homes(moved: Mapping[str, str], left_out: Mapping[str, frozenset[str]]) -> HomeOf:
    """Return what tells the memory of a weight, given that of its layer.

    `moved`: the memories that overrides take weights to, by name; `left_out`: by memory, the names of the weights that
    its device has no kernel for; overrides do not ask for one.
    """
    if not moved and not left_out:
        return lambda _, memory: memory

    def home(facts: WeightFacts, memory: str) -> str:
        found = moved.get(facts.name)
        return found or (HOST if facts.name in left_out.get(memory, ()) else memory)

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
