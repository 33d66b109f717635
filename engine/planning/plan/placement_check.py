"""What was asked for and what is: the devices that llama.cpp reported after a load, compared with the layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Literal

import msgspec

from engine.base.language import tr
from engine.base.texts import capitalised
from engine.devices.device import CPU_ID
from engine.planning.layout.layout import Layout, layer_words

PlacedPart = Literal["layer", "cache", "output"]


class PlaceDifference(msgspec.Struct, frozen=True):
    """A layer, its KV cache or the output layer (`layer` is then the number of layers) that is on another device."""

    part: PlacedPart
    layer: int
    asked: str
    real: str


def placement_differences(
    layout: Layout,
    layer_devices: Sequence[str],
    kv_devices: Sequence[tuple[int, str]],
    *,
    offload_kqv: bool,
) -> tuple[PlaceDifference, ...]:
    """Return what is on another device than `layout` asks for.

    `layer_devices`: device of each layer, the output layer last; `kv_devices`: layer and device of each KV cache. In
    modes tensor and row llama.cpp reports one device for all members, so nothing is compared. Layers that it adds to
    those of the file are not either.
    """
    if layout.split_mode in ("tensor", "row"):
        return ()
    found: list[PlaceDifference] = []
    caches: Mapping[int, str] = dict(kv_devices)
    for layer, asked in enumerate(layout.assignment()):
        if layer < len(layer_devices) - 1 and layer_devices[layer] != asked:
            found.append(PlaceDifference("layer", layer, asked, layer_devices[layer]))
        home = asked if offload_kqv else CPU_ID
        if caches.get(layer, home) != home:
            found.append(PlaceDifference("cache", layer, home, caches[layer]))
    if layer_devices and layer_devices[-1] != layout.output_device:
        found.append(PlaceDifference("output", layout.n_layers, layout.output_device, layer_devices[-1]))
    return tuple(found)


def difference_words(differences: Sequence[PlaceDifference]) -> str:
    """Return sentences on what is elsewhere, a sentence for each range of layers; empty if nothing is."""
    sentences = []
    numbered = enumerate(sorted(differences, key=lambda each: (each.part, each.layer)))
    # Neighbours have a constant difference between their layer and their place in the list.
    for _, group in groupby(numbered, key=_run_key):
        each = [difference for _, difference in group]
        sentences.append(_sentence(each[0], each[-1].layer))
    return " ".join(sentences)


def _sentence(first: PlaceDifference, last: int) -> str:
    words = layer_words(first.layer, last)
    if first.part == "output":
        return tr("The output layer is on {real}, not on {asked}.", real=first.real, asked=first.asked)
    if first.part == "cache":
        return tr(
            "The KV cache of {layers} is on {real}, not on {asked}.", layers=words, real=first.real, asked=first.asked
        )
    return tr("{layers}: on {real}, not on {asked}.", layers=capitalised(words), real=first.real, asked=first.asked)


def _run_key(numbered: tuple[int, PlaceDifference]) -> tuple[str, str, str, int]:
    place, each = numbered
    return each.part, each.asked, each.real, each.layer - place
