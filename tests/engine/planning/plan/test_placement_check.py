"""The placement that the engine reports after a load, compared with the layout."""

from __future__ import annotations

import pytest

from engine.devices.device import CPU_ID
from engine.planning.layout.layout import Layout, make_layout
from engine.planning.plan.placement_check import DeviceDifference, difference_text, placement_differences

LAYOUT = make_layout(6, ["A"] * 3 + ["B"] * 3, "B")
REAL = ("A", "A", "A", "B", "B", "B", "B")
CACHE = tuple(enumerate(REAL[:-1]))


def compare(
    layers: tuple[str, ...] = REAL,
    caches: tuple[tuple[int, str], ...] = CACHE,
    layout: Layout = LAYOUT,
    *,
    offload_kqv: bool = True,
) -> tuple[DeviceDifference, ...]:
    return placement_differences(layout, layers, caches, offload_kqv=offload_kqv)


def test_a_load_as_asked_for_has_no_differences() -> None:
    assert compare() == ()
    assert difference_text(()) == ""
    assert compare(caches=((1, "A"),)) == (), "a layer without a cache has none elsewhere"
    on_host = tuple((layer, CPU_ID) for layer in range(6))
    assert compare(caches=on_host, offload_kqv=False) == ()


def test_layers_caches_and_the_output_that_are_elsewhere_are_told_by_range() -> None:
    found = compare((CPU_ID, CPU_ID, "A", "B", "B", CPU_ID, CPU_ID), ((0, CPU_ID), (1, CPU_ID), (4, "A")))
    assert difference_text(found) == (
        "The KV cache of layers 0-1 was loaded on CPU, not on A. The KV cache of layer 4 was loaded on A, not on B. "
        "Layers 0-1: loaded on CPU, not on A. Layer 5: loaded on CPU, not on B. "
        "The output layer was loaded on CPU, not on B."
    )


def test_a_cache_that_should_be_in_host_memory_is_told() -> None:
    assert compare(offload_kqv=False)[0] == DeviceDifference("cache", 0, CPU_ID, "A")


@pytest.mark.parametrize("layers", [(), ("Meta()",) * 7])
def test_what_the_engine_did_not_tell_layer_by_layer_is_not_compared(layers: tuple[str, ...]) -> None:
    split = Layout(6, LAYOUT.runs, "B", "tensor", (("A", 1.0), ("B", 1.0)))
    assert compare(layers, (), split) == ()
    assert compare((), ()) == ()
