"""Padding of quantised rows on CUDA (`ROW_PADDING`) in weights, KV caches and results, computed by hand."""

from __future__ import annotations

import pytest

from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import BufferFacts, Device, RemoteFacts
from engine.planning.memory.backends import HOST_RULE, ROW_PADDING, RPC_TRAITS, TRAITS, SizeRule, backend_traits
from engine.planning.memory.compute_graph.devices import backends_of
from engine.planning.memory.compute_graph.ggml.graph import Graph
from engine.planning.memory.kv_cache import CacheTensor
from engine.planning.memory.tensors import padded_bytes, row_padding_bytes

CUDA = TRAITS["CUDA"]
Q8_0_BYTES = 34
"""Bytes of a block of 32 elements."""


@pytest.mark.parametrize(("n_elements", "blocks"), [(ROW_PADDING, 0), (480, 1), (544, 15), (32, 15)])
def test_weights_get_the_blocks_that_fill_the_last_row(n_elements: int, blocks: int) -> None:
    assert row_padding_bytes("Q8_0", n_elements) == blocks * Q8_0_BYTES
    assert row_padding_bytes("F16", n_elements) == 0
    size_bytes = 3 * n_elements // 32 * Q8_0_BYTES
    on_cuda = padded_bytes("Q8_0", (n_elements, 3), size_bytes, CUDA.size_rule)
    assert on_cuda == -(-(size_bytes + blocks * Q8_0_BYTES) // 128) * 128
    assert padded_bytes("Q8_0", (n_elements, 3), size_bytes, HOST_RULE) == -(-size_bytes // 32) * 32


def test_quantised_caches_are_padded_once_and_others_never() -> None:
    narrow, whole = CacheTensor("k", "q8_0", 128, 256), CacheTensor("k", "q8_0", 2 * ROW_PADDING, 256)
    plain_bytes = 256 * 4 * Q8_0_BYTES
    assert narrow.size_bytes(CUDA.size_rule) == -(-(plain_bytes + 12 * Q8_0_BYTES) // 128) * 128
    assert whole.size_bytes(CUDA.size_rule) == whole.size_bytes(HOST_RULE) == 256 * 32 * Q8_0_BYTES
    assert CacheTensor("k", "f16", 128, 256).size_bytes(CUDA.size_rule) == 256 * 128 * 2


def test_results_of_a_quantised_type_are_padded_on_cuda_only() -> None:
    (cuda,), (vulkan,) = backends_of([("CUDA0", CUDA)]), backends_of([("Vulkan0", TRAITS["Vulkan"])])
    graph = Graph()
    copy = graph.cast(graph.new_input("f32", 128, 3), "q8_0")
    assert cuda.alloc_size(copy) == copy.n_bytes + 12 * Q8_0_BYTES
    assert vulkan.alloc_size(copy) == copy.n_bytes == 3 * 4 * Q8_0_BYTES


def test_a_remote_card_pads_as_its_backend_and_is_else_a_worker() -> None:
    worker = Device("RPC0", "attic", "RPC", "gpu", 8 * GIB, endpoint="192.0.2.7:50052")
    assert backend_traits(worker) == RPC_TRAITS
    card = replace(
        worker,
        remote=RemoteFacts("CUDA"),
        buffers=BufferFacts(alignment_bytes=128, largest_tensor_bytes=1, largest_buffer_bytes=GIB, mixes_streams=False),
    )
    found = backend_traits(card)
    assert found.size_rule == SizeRule(128, pads_rows=True)
    assert (found.has_pools, found.max_buffer_bytes, found.overhead_bytes) == (True, GIB, 0)
    assert not any((found.op_offload, found.pinned_host, found.converts_kv, found.reorders, found.fuses))
    assert backend_traits(replace(worker, remote=RemoteFacts("CUDA", 300 * MIB))).overhead_bytes == 300 * MIB
    # A backend that we do not know, and a processor: as a worker that told nothing.
    for backend in ("", "CPU", "nobody's"):
        assert not backend_traits(replace(worker, remote=RemoteFacts(backend))).size_rule.pads_rows
