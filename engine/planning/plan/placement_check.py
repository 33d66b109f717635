"""Comparison of the devices that llama.cpp reported after a load with the devices of the layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Literal

from msgspec import Struct

from engine.base.language import tr
from engine.base.texts import capitalised
from engine.devices.device import CPU_ID
from engine.planning.layout.layout import Layout, layer_text

PlacedPart = Literal["layer", "cache", "output"]


class DeviceDifference(Struct, frozen=True):
    """A layer, KV cache or output layer whose device after the load differs from the layout.

    `layer`: index of the layer; for the output layer the number of layers.
    `asked`: device id in the layout.
    `real`: device id that llama.cpp reported.
    """

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
) -> tuple[DeviceDifference, ...]:
    """Return the layers, KV caches and output layer whose device after the load differs from `layout`.

    The result is empty in modes tensor and row, because llama.cpp reports one device for all layers. Layers that
    llama.cpp adds to the layers of the file are not compared.

    `layer_devices`: device id that llama.cpp reported for each layer, the output layer last.
    `kv_devices`: (layer, device id) of each KV cache.
    `offload_kqv`: setting of the load; if it is off, KV caches belong on the CPU.
    """
    if layout.split_mode in ("tensor", "row"):
        return ()
    found: list[DeviceDifference] = []
    caches: Mapping[int, str] = dict(kv_devices)
    for layer, asked in enumerate(layout.assignment()):
        if layer < len(layer_devices) - 1 and layer_devices[layer] != asked:
            found.append(DeviceDifference("layer", layer, asked, layer_devices[layer]))
        home = asked if offload_kqv else CPU_ID
        if caches.get(layer, home) != home:
            found.append(DeviceDifference("cache", layer, home, caches[layer]))
    if layer_devices and layer_devices[-1] != layout.output_device:
        found.append(DeviceDifference("output", layout.n_layers, layout.output_device, layer_devices[-1]))
    return tuple(found)


def difference_text(differences: Sequence[DeviceDifference]) -> str:
    """Return sentences for the user about `differences`, one for each range of layers; empty if there are none."""
    sentences = []
    numbered = enumerate(sorted(differences, key=lambda each: (each.part, each.layer)))
    # Neighbours have a constant difference between their layer and their index in the list.
    for _, group in groupby(numbered, key=_run_key):
        each = [difference for _, difference in group]
        sentences.append(_sentence(each[0], each[-1].layer))
    return " ".join(sentences)


def _sentence(first: DeviceDifference, last: int) -> str:
    words = layer_text(first.layer, last)
    if first.part == "output":
        return tr(
            "The output layer was loaded on {actual}, not on {requested}.", actual=first.real, requested=first.asked
        )
    if first.part == "cache":
        return tr(
            "The KV cache of {layers} was loaded on {actual}, not on {requested}.",
            layers=words,
            actual=first.real,
            requested=first.asked,
        )
    return tr(
        "{layers}: loaded on {actual}, not on {requested}.",
        layers=capitalised(words),
        actual=first.real,
        requested=first.asked,
    )


def _run_key(numbered: tuple[int, DeviceDifference]) -> tuple[str, str, str, int]:
    position, each = numbered
    return each.part, each.asked, each.real, each.layer - position
