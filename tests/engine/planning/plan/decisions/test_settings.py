"""Decisions and reasons for context, batches, threads, cache types, flash attention and op_offload."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine.base.processor import Processor
from engine.base.units import GIB
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, DeviceKind, MeasuredChoice, Rig, make_host
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import Layout
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.decisions.attention import refused_cache_types
from engine.planning.plan.decisions.context_length import default_context
from engine.planning.plan.decisions.decision import Decision
from engine.planning.plan.decisions.resolve import resolve
from engine.planning.plan.decisions.threads import HostFacts
from engine.planning.settings.context_settings import AUTO_CONTEXT, ContextSettings
from tests.support.models import write_header_only, write_tiny_encoder, write_tiny_llama
from tests.support.previews import make_layout

N_LAYERS = 32
HOST = HostFacts("linux", Processor(16, 8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def memory(folder: Path) -> ModelMemory:
    """A model of 4 GiB: 128 KiB of f16 cache for each token, trained with 131072."""
    path = folder / "m.gguf"
    return ModelMemory(
        read_model(write_header_only(path, n_layers=N_LAYERS, n_embd=4096, n_head=32, n_ff=14336, n_ctx_train=131072))
    )


@pytest.fixture(scope="module")
def encoder(folder: Path) -> ModelMemory:
    return ModelMemory(read_model(write_tiny_encoder(folder / "bert.gguf")))


def card(gib: float, backend: str = "CUDA", kind: DeviceKind = "gpu") -> Rig:
    return Rig((Device("D0", "card", backend, kind, int(gib * GIB)),), make_host("host", 64 * GIB))


def layout(on_cpu: int = 0, *, behind: bool = False) -> Layout:
    runs = [(CPU_ID, on_cpu), ("D0", N_LAYERS - on_cpu)]
    return make_layout(N_LAYERS, [run for run in (reversed(runs) if behind else runs) if run[1]])


def decisions(
    memory: ModelMemory, rig: Rig, where: Layout, asked: ContextSettings, host: HostFacts = HOST
) -> dict[str, Decision]:
    resolved = resolve(memory, rig, where, asked, host=host)
    found = {each.setting: each for each in resolved.decisions}
    assert len(found) == len(resolved.decisions)
    for setting, decision in found.items():
        if setting == "op_offload_min_batch":
            assert decision.value == resolved.context.offload_batch
        elif setting != "flash_attn":
            assert decision.value == getattr(resolved.context, setting)
    return found


# ------------------------------------------------------------------ context


@pytest.mark.parametrize(
    ("gib", "n_ctx", "says"),
    [
        (12, 4096, "usual context length for 12 GiB"),
        (24, 32768, "usual context length for 24 GiB"),
        (80, 131072, "The whole trained context length"),
        (5, 2048, "4096 tokens would not"),
        (4.75, 1024, "2048 tokens would not"),
        (2, 256, "No context length fits"),
    ],
)
def test_context_by_memory(memory: ModelMemory, gib: float, n_ctx: int, says: str) -> None:
    found = decisions(memory, card(gib), layout(), ContextSettings(n_ctx=AUTO_CONTEXT))["n_ctx"]
    assert (found.value, found.overridden) == (n_ctx, False)
    assert says in found.reason


@pytest.mark.parametrize(
    ("gib", "each", "says"),
    [
        (80, 131072, "The whole trained context length, 131072"),
        (5, 512, "1024 tokens for each of 4 requests would not"),
        (2, 256, "No context length fits"),
    ],
)
def test_with_several_requests_the_context_of_each_is_decided(
    memory: ModelMemory, gib: float, each: int, says: str
) -> None:
    asked = ContextSettings(n_ctx=AUTO_CONTEXT, n_seq_max=4)
    found = decisions(memory, card(gib), layout(), asked)
    assert found["n_ctx"].value == 4 * each
    assert says in found["n_ctx"].reason
    assert f"a context of {each} tokens." in found["n_seq_max"].reason


def test_a_usual_context_for_each_of_several_requests_is_not_a_choice(memory: ModelMemory) -> None:
    found = decisions(memory, card(80), layout(), ContextSettings(n_ctx=4 * 8192, n_seq_max=4))["n_ctx"]
    assert not found.overridden
    longer = decisions(memory, card(80), layout(), ContextSettings(n_ctx=4 * 131072, n_seq_max=4))["n_ctx"]
    assert "longer than" not in longer.reason


def test_a_length_that_is_found_fits_and_twice_as_much_does_not(memory: ModelMemory) -> None:
    rig = card(24)
    crowded = Rig((replace(rig.devices[0], free_bytes=7 * GIB),), rig.host)
    used = resolve(memory, crowded, layout(), ContextSettings(n_ctx=AUTO_CONTEXT), host=HOST)
    assert used.estimate.devices["D0"].need_bytes <= 7 * GIB
    double = msgspec.structs.replace(used.context, n_ctx=2 * used.context.n_ctx)
    assert memory.estimate(layout(), double, crowded).devices["D0"].need_bytes > 7 * GIB


@pytest.mark.parametrize(
    ("n_ctx", "says", "overridden"),
    [
        (8192, "The default context length", False),
        (16384, "Set explicitly.", True),
        (262144, "longer than the trained length of 131072 tokens", True),
    ],
)
def test_a_chosen_context_is_kept(memory: ModelMemory, n_ctx: int, says: str, overridden: bool) -> None:
    found = decisions(memory, card(80), layout(), ContextSettings(n_ctx=n_ctx))["n_ctx"]
    assert (found.value, found.overridden) == (n_ctx, overridden)
    assert says in found.reason


def test_the_first_context_is_no_longer_than_what_was_trained(folder: Path) -> None:
    model = read_model(write_tiny_llama(folder / "short.gguf", n_ctx_train=2048))
    asked = default_context(model)
    assert (asked.n_ctx, asked.n_batch, asked.n_ubatch) == (2048, 2048, 512)
    rig = Rig((), make_host("host", 8 * GIB))
    found = decisions(ModelMemory(model), rig, make_layout(8, [(CPU_ID, 8)]), asked)["n_ctx"]
    assert not found.overridden
    assert "The trained context length, 2048 tokens" in found.reason


def test_an_embedding_model_takes_its_context_in_one_batch(encoder: ModelMemory) -> None:
    asked = default_context(encoder.model)
    assert (asked.n_ctx, asked.n_batch, asked.n_ubatch) == (64, 64, 64)
    rig, where = Rig((), make_host("host", 8 * GIB)), make_layout(1, [(CPU_ID, 1)])
    found = decisions(encoder, rig, where, asked)
    assert "in one batch" in found["n_ubatch"].reason
    assert not found["n_ubatch"].overridden
    short = decisions(encoder, rig, where, msgspec.structs.replace(asked, n_ubatch=16))["n_ubatch"]
    assert (short.value, short.overridden) == (16, True)
    assert "only 16 tokens, although the context has 64" in short.reason


def test_sequences_are_told_of_when_there_are_several(memory: ModelMemory) -> None:
    asked = ContextSettings(n_ctx=8192, n_seq_max=4)
    assert "a context of 2048 tokens." in decisions(memory, card(80), layout(), asked)["n_seq_max"].reason
    assert "n_seq_max" not in decisions(memory, card(80), layout(), ContextSettings())


# ------------------------------------------------------------------ threads


@pytest.mark.parametrize(
    ("processor", "asked", "threads", "threads_batch", "says"),
    [
        (Processor(8, 8), {}, 8, 8, "One thread on each of 8 cores"),
        (Processor(1, 1), {}, 1, 1, "One thread on each of 1 core "),
        (Processor(14, 6), {}, 6, 6, "per performance core (6 cores)"),
        (Processor(16, 8, 2), {}, 2, 2, "only 2 cores (CPU quota of its cgroup)"),
        (Processor(16, 8, 12), {}, 8, 8, "per performance core (8 cores)"),
        (Processor(8, 8), {"threads": 3}, 3, 3, "Set explicitly."),
        (Processor(8, 8), {"threads": 3, "threads_batch": 8}, 3, 8, "Set explicitly."),
        (Processor(8, 8), {"threads_batch": 4}, 8, 4, "One thread on each of 8 cores"),
        (Processor(8, 8), {"threads": 64}, 64, 64, "more threads than cores (8)"),
    ],
)
def test_threads(
    memory: ModelMemory, processor: Processor, asked: dict[str, int], threads: int, threads_batch: int, says: str
) -> None:
    settings = msgspec.structs.replace(ContextSettings(), **asked)
    found = decisions(memory, card(80), layout(), settings, HostFacts("linux", processor))
    assert (found["threads"].value, found["threads_batch"].value) == (threads, threads_batch)
    assert (found["threads"].overridden, found["threads_batch"].overridden) == (
        "threads" in asked, "threads_batch" in asked,
    )  # fmt: skip
    assert says in found["threads"].reason


def test_measured_threads(memory: ModelMemory) -> None:
    choices = (
        MeasuredChoice("threads", 8, 16, 1.25, 1.2, 1.3, "here"),
        MeasuredChoice("threads_batch", 16, 16, 1.0, 1.0, 1.0, "here"),
    )
    rig = card(80)
    rig = replace(rig, host=replace(rig.host, choices=choices))
    host = HostFacts("linux", Processor(16, 16))
    found = decisions(memory, rig, layout(), ContextSettings(), host)
    assert (found["threads"].value, found["threads_batch"].value) == (8, 16)
    assert found["threads"].reason == (
        "8 threads on 16 cores, as measured: 1.25 times as fast as with 16 (95 % interval: 1.20 to 1.30)."
    )
    assert found["threads_batch"].reason == "16 threads on 16 cores, as measured: no other value was clearly faster."
    assert not found["threads"].overridden
    chosen = decisions(memory, rig, layout(), ContextSettings(threads=3), host)
    assert (chosen["threads"].value, chosen["threads_batch"].value) == (3, 3)
    assert chosen["threads"].reason == "Set explicitly."
    prompts = decisions(memory, rig, layout(), ContextSettings(threads_batch=4), host)
    assert (prompts["threads"].value, prompts["threads_batch"].value) == (8, 4)


# ------------------------------------------------------------------ caches and flash attention


@pytest.mark.parametrize(
    ("asked", "value", "says", "overridden"),
    [
        ({}, "on", "All devices", False),
        ({"type_v": "q8_0"}, "on", "Needed by the q8_0 V cache", False),
        ({"flash_attn": "off"}, "off", "Set explicitly", True),
        ({"flash_attn": "on"}, "on", "Set explicitly", True),
    ],
)
def test_flash_attention(memory: ModelMemory, asked: dict[str, str], value: str, says: str, overridden: bool) -> None:
    found = decisions(memory, card(80), layout(), msgspec.structs.replace(ContextSettings(), **asked))["flash_attn"]
    assert (found.value, found.overridden) == (value, overridden)
    assert says in found.reason


def test_flash_attention_where_the_engine_has_none(folder: Path) -> None:
    model = read_model(write_tiny_llama(folder / "grok.gguf", architecture="grok"))
    rig = Rig((), make_host("host", 8 * GIB))
    found = decisions(ModelMemory(model), rig, make_layout(8, [(CPU_ID, 8)]), ContextSettings(n_ctx=256))
    assert found["flash_attn"].value == "off"
    assert "grok" in found["flash_attn"].reason


def test_flash_attention_that_a_device_has_no_kernel_for(folder: Path) -> None:
    path = folder / "heads of 160.gguf"
    memory = ModelMemory(read_model(write_header_only(path, n_layers=N_LAYERS, n_embd=5120, n_head=32, n_ff=5120)))
    found = decisions(memory, card(80), layout(), ContextSettings())["flash_attn"]
    assert (found.value, found.overridden) == ("off", False)
    assert "D0" in found.reason
    on_cpu = decisions(memory, card(80), layout(N_LAYERS), ContextSettings())["flash_attn"]
    assert on_cpu.value == "on"


def test_cache_types_say_what_they_save_and_which_are_refused(folder: Path, memory: ModelMemory) -> None:
    asked = ContextSettings(type_k="q8_0", type_v="f32")
    found = decisions(memory, card(80), layout(), asked)
    assert "47% less memory than f16" in found["type_k"].reason
    assert "100% more memory than f16" in found["type_v"].reason
    assert refused_cache_types(memory.model, ContextSettings()) == {"type_k": {}, "type_v": {}}
    without = refused_cache_types(memory.model, ContextSettings(flash_attn="off"))
    assert set(without["type_v"]) == {"q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"}
    narrow = read_model(write_tiny_llama(folder / "narrow.gguf", n_embd=64, n_head=4))  # heads of 16
    assert set(refused_cache_types(narrow, ContextSettings())["type_k"]) == set(without["type_v"])
    rig = Rig((), make_host("host", 8 * GIB))
    refused = decisions(ModelMemory(narrow), rig, make_layout(8, [(CPU_ID, 8)]), asked)["type_k"]
    assert "16 wide" in refused.reason


# ------------------------------------------------------------------ op_offload


@pytest.mark.parametrize(
    ("backend", "on_cpu", "behind", "asked", "value", "says"),
    [
        ("CUDA", 8, False, {}, True, "D0 computes the CPU's layers for prompts of at least 32 tokens"),
        ("Vulkan", 8, False, {}, True, "D0 computes the CPU's layers"),
        ("CUDA", 0, False, {}, True, "no layer's weights are in host memory"),
        ("CUDA", 8, True, {}, True, "placed after a GPU cannot use op offload"),
        ("RPC", 8, False, {}, True, "no device of the layout can compute"),
        ("CUDA", 8, False, {"n_ubatch": 16}, True, "below the threshold of 32"),
        ("CUDA", 8, False, {"op_offload_min_batch": 1024}, True, "below the threshold of 1024"),
        ("CUDA", 8, False, {"op_offload": False}, False, "Set explicitly"),
        ("CUDA", 8, False, {"op_offload": "auto"}, True, "D0 computes the CPU's layers"),
    ],
)
def test_op_offload(
    memory: ModelMemory, backend: str, on_cpu: int, behind: bool, asked: dict[str, object], value: bool, says: str
) -> None:
    settings = msgspec.structs.replace(ContextSettings(n_ctx=4096), **asked)
    found = decisions(memory, card(80, backend), layout(on_cpu, behind=behind), settings)
    assert found["op_offload"].value is value
    assert found["op_offload"].overridden is (asked.get("op_offload") is False)
    assert says in found["op_offload"].reason
    assert found["op_offload_min_batch"].overridden is ("op_offload_min_batch" in asked)


def test_op_offload_is_left_out_where_its_copies_do_not_fit(memory: ModelMemory) -> None:
    where, settings = layout(8), ContextSettings(n_ctx=4096, n_ubatch=32, op_offload="auto")
    needs = [
        memory.estimate(where, msgspec.structs.replace(settings, op_offload=mode), card(80)).devices["D0"].need_bytes
        for mode in (True, False)
    ]
    assert needs[0] > needs[1]
    between = sum(needs) // 2
    found = decisions(memory, card(between / GIB), where, settings)["op_offload"]
    assert found.value is False
    assert "no room for copies" in found.reason
    forced = msgspec.structs.replace(settings, op_offload=True)
    assert decisions(memory, card(between / GIB), where, forced)["op_offload"].value is True
