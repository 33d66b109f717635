"""Facts from the engine's log, which arrives in pieces and from several threads."""

from __future__ import annotations

import pytest

from engine.runtime.child.native.log import (
    CONT,
    DEBUG,
    ERROR,
    INFO,
    WARN,
    EngineLog,
    FailedAllocation,
    FailedCard,
    LogFacts,
    RefusedComputing,
    context_failure,
    model_failure,
)
from engine.runtime.protocol.messages import Failure

LINES = [
    (DEBUG, "load_tensors: layer   0 assigned to device CPU, is_swa = 0"),
    (DEBUG, "load_tensors: layer   1 assigned to device RPC1, is_swa = 1"),
    (DEBUG, "llama_kv_cache: layer   1: dev = RPC1"),
    (DEBUG, "llama_memory_recurrent, layer   0: dev = CPU"),
    (INFO, "load_tensors:   CPU_Mapped model buffer size =     1.50 MiB"),
    (INFO, "load_tensors: RPC0[127.0.0.1:50052] model buffer size =     2.00 MiB"),
    (INFO, "llama_context:        CPU  output buffer size =     0.25 MiB"),
    (INFO, "llama_kv_cache: RPC0[127.0.0.1:50052] KV buffer size =     4.00 MiB"),
    (INFO, "llama_kv_cache: RPC0[127.0.0.1:50052] KV buffer size =     1.00 MiB"),
    (INFO, "llama_memory_recurrent:        CPU RS buffer size =     3.00 MiB"),
    (INFO, "llama_dsv4_comp_state:      CUDA0 DSV4 csa state buffer size =     1.00 MiB"),
    (INFO, "sched_reserve:        CPU compute buffer size =     5.00 MiB"),
    (INFO, "resolve_fused_ops: Flash Attention enabled"),
    (INFO, "sched_reserve: graph (pp bs=512, tg bs=1): nodes = 254, splits = 7 / 11, input objects = 4"),
]
MIB = 1 << 20


def told(*lines: tuple[int, str]) -> LogFacts:
    log = EngineLog()
    for level, line in lines:
        log.write(level, line + "\n")
    return log.facts


def test_placement_and_sizes_are_understood() -> None:
    facts = told(*LINES)
    assert facts.layer_devices == {0: "CPU", 1: "RPC1"}
    assert facts.cache_devices == {0: "CPU", 1: "RPC1"}
    remote = "RPC0[127.0.0.1:50052]"
    assert facts.logged_bytes("model") == {"CPU_Mapped": 3 * MIB // 2, remote: 2 * MIB}
    assert facts.logged_bytes("kv") == {remote: 5 * MIB}
    assert facts.logged_bytes("rs") == {"CPU": 3 * MIB, "CUDA0": MIB}
    assert facts.logged_bytes("output") == {"CPU": MIB // 4}
    assert facts.logged_bytes("compute") == {"CPU": 5 * MIB}
    assert (facts.flash_attention, facts.graph_splits) == (True, "7 / 11")


def test_lines_come_in_pieces() -> None:
    log = EngineLog()
    log.write(INFO, "load_tensors: CPU model buffer ")
    log.write(CONT, "size = 1.00 MiB\nload_tensors: CUDA0 model buffer size = 2.00")
    log.write(CONT, " MiB\n")
    assert log.facts.logged_bytes("model") == {"CPU": MIB, "CUDA0": 2 * MIB}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (
            ["CUDA error: out of memory", "  current device: 1, in function alloc at ggml-cuda.cu:500"],
            RefusedComputing("CUDA1"),
        ),
        (
            [
                "alloc_buffer: allocating 2.00 MiB on device 0: cudaMalloc failed: out of memory",
                "ROCm error: out of memory",
                "  current device: 0, in function alloc at ggml-cuda.cu:420",
            ],
            RefusedComputing("ROCm0", 2 * MIB),
        ),
        (
            ["CUDA error: the resource allocation failed", "  current device: 2, in function f at common.cuh:9"],
            RefusedComputing("CUDA2"),
        ),
        (["CUDA error: an illegal memory access", "  current device: 1, in function f at ggml-cuda.cu:1"], None),
    ],
)
def test_memory_that_a_card_refuses_while_it_computes_is_understood(
    lines: list[str], expected: RefusedComputing | None
) -> None:
    log = EngineLog()
    for line in lines:
        log.write(ERROR, line + "\n")
    assert log.refused == expected


def test_the_card_of_another_error_is_told_with_the_words_of_the_driver() -> None:
    log = EngineLog()
    log.write(ERROR, "CUDA error: an illegal memory access was encountered\n")
    log.write(ERROR, "  current device: 1, in function f at ggml-cuda.cu:1\n")
    assert (log.failed, log.refused) == (FailedCard("CUDA1", "an illegal memory access was encountered"), None)


def test_the_size_that_an_earlier_batch_was_refused_is_not_told_again() -> None:
    """A batch may be refused a buffer, and the model goes on; the pools log no size."""
    log = EngineLog()
    log.write(ERROR, "alloc_buffer: allocating 2.00 MiB on device 0: cudaMalloc failed: out of memory\n")
    log.begin_computation(lambda _failed: None)
    log.write(ERROR, "CUDA error: out of memory\n")
    log.write(ERROR, "  current device: 0, in function alloc at ggml-cuda.cu:420\n")
    assert log.refused == RefusedComputing("CUDA0")


def test_flash_attention_turned_off_is_told() -> None:
    assert told((WARN, "resolve_fused_ops: Flash Attention not supported, set to disabled")).flash_attention is False
    assert told((INFO, "llama_context: flash_attn            = auto")).flash_attention is None


@pytest.mark.parametrize(
    ("line", "buffer_type", "size"),
    [
        ("alloc_tensor_range: failed to allocate CUDA0 buffer of size 1234567", "CUDA0", 1234567),
        ("ggml_gallocr_reserve_n_impl: failed to allocate RPC0[10.0.0.2:1] buffer of size 99", "RPC0[10.0.0.2:1]", 99),
        ("output_reserve: failed to allocate output buffer of size 2.00 MiB", "CPU", 2 * MIB),
    ],
)
def test_refused_allocations_are_told_at_once(line: str, buffer_type: str, size: int) -> None:
    log = EngineLog()
    heard: list[FailedAllocation] = []
    log.on_failed = heard.append
    log.write(ERROR, line + "\n")
    assert [(failed.buffer_type, failed.requested_bytes) for failed in heard] == [(buffer_type, size)]
    assert log.facts.failed == heard


@pytest.mark.parametrize(
    ("lines", "kind", "words"),
    [
        (["llama_model_load: error loading model: unknown model architecture: 'x'",
          "llama_model_load_from_file_impl: failed to load model"], "model_file", "m.gguf: llama.cpp cannot load it: "
         "unknown model architecture: 'x'."),
        (["llama_model_load: error loading model: device RPC0 does not support split buffers"], "layout", "split"),
        (["llama_model_load: error loading model: LLAMA_SPLIT_MODE_TENSOR not implemented"], "layout", "TENSOR"),
        (["llama_model_load: error loading model: std::bad_alloc"], "does_not_fit", "memory ran out"),
        (["llama_model_load: error loading model: vk::Queue::submit: ErrorDeviceLost"], "unreachable",
         "A device was lost while reading m.gguf"),
        (["llama_model_load: error loading model: vk::Device::allocateMemory: ErrorOutOfDeviceMemory"], "does_not_fit",
         "A device's memory ran out while reading m.gguf"),
        ([], "model_file", "no reason"),
    ],
)  # fmt: skip
def test_why_a_model_was_not_loaded(lines: list[str], kind: str, words: str) -> None:
    failure = model_failure("/some/where/m.gguf", told(*((ERROR, line) for line in lines)))
    assert isinstance(failure, Failure)
    assert failure.kind == kind
    assert words in failure.message
    assert "/some" not in failure.message


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("llama_init_from_model: failed to initialize the context: std::bad_alloc", "does_not_fit"),
        ("llama_init_from_model: failed to initialize the context: failed to initialize CUDA1 backend", "unreachable"),
        ("llama_init_from_model: quantized V cache requires flash_attn to be enabled", "layout"),
        ("llama_init_from_model: failed to initialize the context: something new", "internal"),
    ],
)
def test_why_a_context_was_not_made(line: str, kind: str) -> None:
    failure = context_failure(4096, told((ERROR, line)))
    assert failure.kind == kind
    assert failure.message.endswith(".")
    assert "llama_init" not in failure.message
