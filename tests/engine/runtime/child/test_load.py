"""Loads in a real child: measured values, early endings, and the next load after one."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine.base.units import MIB
from engine.model.gguf.reader import read_model
from engine.planning.layout.engine_parameters import EngineParameters
from engine.planning.settings.context_settings import ContextSettings, NumaMode
from engine.runtime.protocol.messages import (
    AllocationFailure,
    BufferMemory,
    DeviceMemoryReadings,
    Failure,
    LoadedModel,
    LoadStage,
    LogitDigest,
    Probed,
    StageProgress,
    Stopped,
)
from engine.runtime.protocol.requests import DeviceMemoryQuery, DeviceRef, Load, Logits, Probe, Stop
from tests.engine.runtime.child.raw_child import RawChild, entries, rpc_workers
from tests.support.models import write_tiny_llama

LAYERS = 8
CONTEXT = ContextSettings(n_ctx=512, n_batch=64, n_ubatch=64, threads=1)
ON_CPU = entries()
KV_WIDTH = 2 * 16  # n_head_kv * head width of the tiny model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", n_layers=LAYERS)


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """26 MiB of weights, and 4 KiB of KV for each token and layer."""
    path = tmp_path_factory.mktemp("model") / "wide.gguf"
    return write_tiny_llama(path, n_layers=4, n_embd=512, n_head=8, n_head_kv=8, n_ff=1536, n_ctx_train=1 << 17)


def request(
    model: Path, parameters: EngineParameters, devices: tuple[DeviceRef, ...] = (), context: ContextSettings = CONTEXT
) -> Load:
    return Load(path=str(model), devices=devices, parameters=parameters, context=context)


def by_device(parts: tuple[BufferMemory, ...], field: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in parts:
        if getattr(part, field):
            sizes[part.device] = sizes.get(part.device, 0) + getattr(part, field)
    return sizes


def test_parts_are_exact_and_booked_on_our_devices(model: Path) -> None:
    runs = entries(("W1", 2), ("CPU", 1), ("W0", 2), ("CPU", 1), ("W1", 1), ("W0", 1))
    blocks = read_model(model).blocks
    with rpc_workers(64 * MIB, 64 * MIB) as (_, refs), RawChild() as child:
        loaded = child.ask(request(model, runs, refs))
        assert isinstance(loaded, LoadedModel)
        probed = child.ask(Probe(path=str(model), devices=refs, parameters=runs, context=CONTEXT))
    assert loaded.layer_devices == ("CPU", "W1", "W1", "CPU", "W0", "W0", "CPU", "W1", "W0")
    assert loaded.kv_devices == tuple(enumerate(loaded.layer_devices[:-1]))
    kv_bytes = 2 * 2 * KV_WIDTH * CONTEXT.n_ctx  # K and V, two bytes each
    assert by_device(loaded.parts, "kv_cache_bytes") == {"W0": 2 * kv_bytes, "W1": 3 * kv_bytes, "CPU": 3 * kv_bytes}
    weights = by_device(loaded.parts, "weights_bytes")
    assert weights["W1"] == sum(blocks[layer].total_bytes for layer in (1, 2, 7))
    assert by_device(loaded.parts, "output_bytes") == {"CPU": 4 * loaded.n_vocab}
    assert {part.device for part in loaded.parts if part.mapped} == {"CPU"}
    assert loaded.flash_attention
    assert loaded.chat_template
    assert loaded.n_ctx == 512
    assert isinstance(probed, Probed)
    assert probed.exact
    for field in ("kv_cache_bytes", "compute_bytes", "output_bytes"):
        assert by_device(probed.parts, field) == by_device(loaded.parts, field)
    assert {**by_device(probed.parts, "weights_bytes"), "CPU": 0} == {**weights, "CPU": 0}


@pytest.mark.parametrize("mode", ["distribute", "isolate", "numactl"])
def test_threads_are_placed_on_numa_nodes_by_the_engine(model: Path, mode: NumaMode) -> None:
    # With one node the engine reads the nodes and changes nothing; a confined child may do both.
    with RawChild() as child:
        wanted = msgspec.structs.replace(CONTEXT, numa=mode)
        assert isinstance(child.ask(request(model, ON_CPU, context=wanted)), LoadedModel)
        assert isinstance(child.ask(Logits(tokens=(1, 2, 3))), LogitDigest)


def test_a_load_reports_its_stages_in_order(model: Path) -> None:
    with RawChild() as child:
        assert isinstance(child.ask(request(model, ON_CPU)), LoadedModel)
        progress = [message for message in child.heard if isinstance(message, StageProgress)]
    assert list(dict.fromkeys(message.stage for message in progress)) == ["allocate", "read", "context", "warm_up"]
    for stage in ("read", "warm_up"):
        fractions = [message.fraction for message in progress if message.stage == stage]
        # The warm-up ends early if it is slow.
        assert fractions[-1] == 1.0 or stage == "warm_up"
        assert fractions == sorted(fractions, key=lambda fraction: fraction or 0.0)


def test_without_mapping_the_cpu_weights_are_committed(model: Path) -> None:
    with RawChild() as child:
        loaded = child.ask(request(model, ON_CPU, context=ContextSettings(n_ctx=256, load_mode="none")))
    assert isinstance(loaded, LoadedModel)
    assert not any(part.mapped for part in loaded.parts)
    tensors = sum(tensor.size_bytes for tensor in read_model(model).tensors)
    assert sum(part.weights_bytes for part in loaded.parts) >= tensors


@pytest.mark.parametrize(
    ("flash", "type_v", "expected"), [("on", "f16", True), ("off", "f16", False), ("auto", "q8_0", True)]
)
def test_flash_attention_is_what_the_engine_says(wide_model: Path, flash: str, type_v: str, expected: bool) -> None:
    context = ContextSettings(n_ctx=256, flash_attn=flash, type_v=type_v)  # type: ignore[arg-type]
    with RawChild() as child:
        probed = child.ask(Probe(path=str(wide_model), devices=(), parameters=ON_CPU, context=context))
    assert isinstance(probed, Probed)
    assert probed.flash_attention is expected


@pytest.mark.parametrize(
    ("cap", "context", "stage", "placed"),
    [
        (4 * MIB, ContextSettings(n_ctx=256, threads=1), "allocate", set()),
        (60 * MIB, ContextSettings(n_ctx=65536, threads=1), "context", {"weights_bytes"}),
        (
            100 * MIB,
            ContextSettings(n_ctx=4096, n_ubatch=1024, flash_attn="off", threads=1),
            "context",
            {"weights_bytes", "kv_cache_bytes"},
        ),
    ],
    ids=["weights", "kv", "compute"],
)
def test_a_refused_allocation_names_device_bytes_and_what_was_placed(
    wide_model: Path, cap: int, context: ContextSettings, stage: LoadStage, placed: set[str]
) -> None:
    runs = entries(("W0", 1), ("W1", 4))
    with rpc_workers(None, cap) as (_, refs), RawChild() as child:
        failed = child.ask(request(wide_model, runs, refs, context))
        assert isinstance(failed, AllocationFailure), failed
        again = child.ask(request(wide_model, ON_CPU, refs, ContextSettings(n_ctx=256, threads=1)))
        assert isinstance(again, LoadedModel)
    assert (failed.stage, failed.device, failed.free_bytes) == (stage, "W1", None)
    assert failed.requested_bytes > MIB
    assert str(failed.requested_bytes) in failed.text
    fields = ("weights_bytes", "kv_cache_bytes", "compute_bytes")
    assert {field for field in fields if "W1" in by_device(failed.parts, field)} == placed


def test_a_second_load_frees_the_first(wide_model: Path) -> None:
    context = ContextSettings(n_ctx=4096, n_ubatch=64, threads=1)
    with rpc_workers(96 * MIB) as (_, refs), RawChild() as child:
        answers = [child.ask(request(wide_model, entries(("W0", 5)), refs, context)) for _ in range(2)]
    loaded = answers[1]
    assert isinstance(loaded, LoadedModel), answers
    assert sum(part.weights_bytes + part.kv_cache_bytes for part in loaded.parts if part.device == "W0") > 48 * MIB


@pytest.mark.parametrize("stage", ["allocate", "read", "context", "warm_up"])
def test_stop_ends_a_load_in_every_stage(wide_model: Path, stage: LoadStage) -> None:
    context = ContextSettings(n_ctx=4096, threads=1)
    runs = entries(("W0", 3), ("CPU", 1), ("W0", 1))
    with rpc_workers(None) as (_, refs), RawChild() as child:
        child.send(request(wide_model, runs, refs, context))
        while isinstance(message := child.message(), StageProgress):
            if message.stage == stage:
                child.send(Stop())
        if stage != "warm_up":  # the last stage may be over before the stop arrives
            assert isinstance(message, Stopped), message
        assert isinstance(message, Stopped | LoadedModel)
        loaded = child.ask(request(wide_model, runs, refs, ContextSettings(n_ctx=256, threads=1)))
        assert isinstance(loaded, LoadedModel)


def test_logits_do_not_depend_on_what_was_decoded_before(model: Path) -> None:
    with RawChild() as child:
        child.ask(request(model, ON_CPU))
        first = child.ask(Logits(tokens=(1, 5, 9)))
        other = child.ask(Logits(tokens=(1, 5, 8)))
        again = child.ask(Logits(tokens=(1, 5, 9)))
        refused = child.ask(Logits(tokens=(1, 1 << 20)))
    assert isinstance(first, LogitDigest)
    assert first == again != other
    assert isinstance(refused, Failure)
    assert refused.kind == "argument"


def test_device_memory_is_read_through_the_open_connection(model: Path) -> None:
    with rpc_workers(None) as (_, refs), RawChild() as child:
        child.ask(request(model, entries(("W0", 9)), refs))
        readings = child.ask(DeviceMemoryQuery())
    assert isinstance(readings, DeviceMemoryReadings)
    assert [reading.device for reading in readings.readings] == ["W0"]
    assert readings.readings[0].total_bytes > 0


def test_bad_files_are_named_with_the_reason(tmp_path: Path, model: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(model.read_bytes()[:4000])
    other = write_tiny_llama(tmp_path / "other.gguf", n_layers=1, architecture="nosuch")
    with RawChild() as child:
        answers = [child.ask(request(path, ON_CPU)) for path in (tmp_path / "none.gguf", broken, other)]
        assert isinstance(child.ask(request(model, ON_CPU)), LoadedModel)
    for answer, words in zip(answers, ("none.gguf: No such file", "broken.gguf:", "nosuch"), strict=True):
        assert isinstance(answer, Failure)
        assert answer.kind == "model_file"
        assert words in answer.message


def test_what_cannot_be_is_said_before_anything_is_allocated(model: Path) -> None:
    gone = DeviceRef(id="Big", backend="CUDA", name="CUDA0", pci_bus_id="00000000:01:00.0")
    quantised = ContextSettings(n_ctx=256, flash_attn="off", type_v="q8_0")
    with RawChild() as child:
        answers = [
            child.ask(request(model, entries(("Big", 9)))),
            child.ask(request(model, entries(("Big", 9)), (gone,))),
            child.ask(request(model, ON_CPU, context=quantised)),
        ]
        assert isinstance(child.ask(request(model, ON_CPU)), LoadedModel)
    failures = [answer for answer in answers if isinstance(answer, Failure)]
    assert [failure.kind for failure in failures] == ["layout", "unreachable", "layout"]
    assert all("Big" in failure.message for failure in failures[:2])


def test_a_server_without_that_device_is_unreachable(model: Path) -> None:
    with rpc_workers(None) as (_, refs), RawChild() as child:
        second = DeviceRef(id="W9", backend="RPC", endpoint=refs[0].endpoint, endpoint_device=1)
        answer = child.ask(request(model, entries(("W9", 9)), (second,)))
    assert isinstance(answer, Failure)
    assert answer.kind == "unreachable"
    assert "W9" in answer.message
