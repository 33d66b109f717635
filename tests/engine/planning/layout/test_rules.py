"""The engine's rules: each is violated alone, names cause and remedy; an ordinary layout violates none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given

from engine.base.units import GIB
from engine.base.values import replace
from engine.devices.device import Capabilities, Device, RemoteFacts, Rig, make_host
from engine.model.gguf.model_file import Block, MetadataValue, ModelFile, TensorInfo
from engine.planning.layout.engine_parameters import engine_parameters
from engine.planning.layout.layout import Layout, Override, Violation, make_layout, single_device
from engine.planning.layout.rules import violations
from engine.planning.settings.context_settings import ContextSettings, KvType
from tests.support.engine_split import assignment_of
from tests.support.strategies import layouts

GPU = Device("CUDA0", "card", "CUDA", "gpu", GIB)
SECOND = Device("CUDA1", "card", "CUDA", "gpu", GIB)
REMOTE = Device("RPC0", "attic", "RPC", "gpu", GIB, endpoint="attic:50052")
ACCELERATOR = Device("BLAS", "blas", "BLAS", "accel", 0)
RIG = Rig((GPU, SECOND, REMOTE), make_host("host", 4 * GIB))
CONTEXT = ContextSettings()
LATENT: dict[str, MetadataValue] = {"attention.key_length_mla": 192, "attention.value_length_mla": 128}
HEADS: dict[str, MetadataValue] = {"llama.embedding_length": 4096, "llama.attention.head_count": 32}


def model(n_layers: int, metadata: dict[str, MetadataValue] | None = None) -> ModelFile:
    keys = {f"llama.{key}": value for key, value in (metadata or {}).items()}
    blocks = tuple(Block(index, (), 1, 1, 0, 0) for index in range(n_layers))
    return ModelFile((Path("m.gguf"),), 3, "llama", "Model M", HEADS | keys, (), blocks, (), 32, 80)


def broken(
    layout: Layout, file: ModelFile | None = None, rig: Rig = RIG, context: ContextSettings = CONTEXT
) -> list[Violation]:
    return list(violations(layout, file or model(layout.n_layers), rig, context))


def rules(found: list[Violation]) -> list[str]:
    return [violation.rule for violation in found]


def alternating(*devices: str, runs: int) -> Layout:
    return make_layout(runs, [devices[index % len(devices)] for index in range(runs)])


def test_a_plain_layout_breaks_no_rule() -> None:
    assert broken(make_layout(40, ["CPU"] * 8 + ["CUDA1"] * 12 + ["CPU"] * 8 + ["CUDA0"] * 12, "CPU")) == []


def test_another_layer_count_names_both() -> None:
    (violation,) = broken(single_device(40, "CPU"), model(32))
    assert violation.rule == "layer_count"
    assert "40 layers" in violation.message
    assert "Model M has 32" in violation.message


def test_devices_that_are_gone_are_named_once_wherever_they_are_used() -> None:
    layout = replace(make_layout(4, ["GONE", "CPU", "GONE", "CPU"]), overrides=(Override("AWAY", part="ffn"),))
    found = broken(layout)
    assert rules(found) == ["unknown_device", "unknown_device"]
    assert "uses GONE" in found[0].message
    assert "CUDA0, CUDA1, RPC0, CPU" in found[0].message
    assert "uses AWAY" in found[1].message


def test_fifteen_entries_are_the_most_and_accelerators_take_from_them() -> None:
    fifteen = alternating("RPC0", "CPU", runs=15)
    assert broken(fifteen) == []
    assert broken(alternating("CPU", "RPC0", runs=16)) == []
    assert rules(broken(fifteen.move_output("CPU"))) == ["too_many_entries"]
    overridden = replace(fifteen, overrides=(Override("CUDA0", part="ffn"),))
    assert rules(broken(overridden)) == ["too_many_entries"]
    accelerated = Rig((*RIG.devices, ACCELERATOR), RIG.host)
    (violation,) = broken(fifteen, rig=accelerated)
    assert violation.rule == "too_many_entries"
    assert "needs 15 entries, and at most 14" in violation.message


def test_only_the_host_and_remote_devices_may_come_twice() -> None:
    assert broken(alternating("RPC0", "CPU", "CUDA0", runs=5)) == []
    (violation,) = broken(alternating("CUDA0", "CUDA1", runs=3))
    assert violation.rule == "repeated_device"
    assert violation.message.startswith("CUDA0 has more than one group of layers")
    assert rules(broken(make_layout(2, ["CUDA0", "CUDA1"], "CUDA0"))) == ["repeated_device"]


@given(layouts(devices=RIG.ids))
def test_what_breaks_no_rule_is_placed_by_the_engine_as_asked(layout: Layout) -> None:
    if not broken(layout):
        parameters = engine_parameters(layout, layout.n_layers)
        assert assignment_of(parameters, layout.n_layers) == (*layout.assignment(), layout.output_device)


@pytest.mark.parametrize(
    ("context", "metadata", "expected"),
    [
        (ContextSettings(type_v="q8_0"), {}, []),
        (ContextSettings(type_v="q8_0", flash_attn="off"), {}, ["flash_attention"]),
        (ContextSettings(type_v="bf16", flash_attn="off"), {}, []),
        (ContextSettings(type_k="q8_0", flash_attn="off"), {}, []),
        (ContextSettings(type_k="q4_0"), {"attention.key_length": 80}, ["cache_block_size"]),
        (ContextSettings(type_v="q4_0"), {"attention.value_length": 80}, ["cache_block_size"]),
        (ContextSettings(type_v="q4_0"), {"attention.key_length": 80}, []),
        (
            ContextSettings(type_k="iq4_nl", type_v="q5_1"),
            {"embedding_length": 1280},
            ["cache_block_size", "cache_block_size"],
        ),
        (
            ContextSettings(type_k="q4_0", flash_attn="off"),
            {"attention.key_length": 80, "attention.head_count_kv": 8},
            ["cache_block_size"],
        ),
        (
            ContextSettings(type_k="q4_0", flash_attn="off"),
            {"attention.key_length": 80, "attention.head_count_kv": 1},
            ["cache_block_size"],
        ),
        (ContextSettings(type_k="q4_0"), {"attention.head_count": (1, 2)}, []),
        (ContextSettings(type_k="q4_0"), {"attention.head_count": (0, 2), "attention.key_length": 80}, []),
        (ContextSettings(type_k="q4_0"), {"attention.head_count": 0}, []),
        (ContextSettings(type_k="q4_0"), {"attention.key_length_swa": 80}, ["cache_block_size"]),
        (ContextSettings(type_k="q8_0"), LATENT, ["cache_types_differ"]),
        (ContextSettings(type_k="q8_0", type_v="q8_0"), LATENT, []),
        (ContextSettings(type_k="q8_0"), {"attention.key_length_mla": 0, "attention.value_length_mla": 0}, []),
    ],
)
def test_cache_types_have_to_suit_the_model_and_flash_attention(
    context: ContextSettings, metadata: dict[str, MetadataValue], expected: list[str]
) -> None:
    assert rules(broken(single_device(4, "CUDA0"), model(4, metadata), context=context)) == expected


def test_split_mode_tensor_is_loadable_behind_leading_cpu_layers() -> None:
    tensor = make_layout(4, ["CPU", "CUDA0", "CUDA1", "CUDA1"]).with_split_mode("tensor")
    assert broken(tensor) == []
    assert rules(broken(tensor, context=ContextSettings(flash_attn="off"))) == ["flash_attention"]
    assert rules(broken(tensor, context=ContextSettings(offload_kqv=False))) == ["split_cache_on_host"]
    quantised = ContextSettings(type_k="q8_0", type_v="q4_0")
    assert broken(tensor, context=quantised) == []
    unsupported = replace(model(4), architecture="olmo2")
    assert rules(broken(tensor, unsupported)) == ["split_architecture"]
    whole_only = replace(model(4), architecture="hrm_text")
    assert rules(broken(tensor, whole_only)) == ["leading_cpu_only"]
    assert broken(tensor.move_range(0, 0, "CUDA0"), whole_only) == []
    on_host = replace(tensor.move_range(3, 3, "CPU"), tensor_split=(("CPU", 1.0), ("CUDA0", 1.0)))
    assert rules(broken(on_host)) == ["leading_cpu_only", "split_member"]
    left_out = replace(tensor, tensor_split=(("CPU", 0.0), ("CUDA0", 1.0)))
    assert broken(left_out) == []


def test_more_members_than_the_engine_takes() -> None:
    devices = tuple(replace(GPU, id=f"CUDA{number}") for number in range(17))
    shares = tuple((device.id, 1.0) for device in devices)
    layout = Layout(4, single_device(4, "CUDA0").runs, "CUDA0", "tensor", shares)
    (violation,) = broken(layout, rig=Rig(devices, RIG.host))
    assert violation.rule == "split_member"
    assert "17 devices have a share; the engine uses at most 16 devices" in violation.message


def test_row_split_needs_split_buffers_and_all_devices_of_the_backend() -> None:
    row = make_layout(4, ["CPU", "CUDA0", "CUDA1", "CUDA1"]).with_split_mode("row")
    assert rules(broken(row)) == ["split_member", "split_member"]
    able = Rig(tuple(replace(device, capabilities=Capabilities(row_split=True)) for device in RIG.devices), RIG.host)
    assert broken(row, rig=able) == []
    assert rules(broken(replace(row, tensor_split=(("CUDA1", 1.0),)), rig=able)) == ["split_member"]
    assert rules(broken(replace(row, tensor_split=(("CUDA1", 1.0), ("CUDA0", 1.0))), rig=able)) == ["split_member"]


def block(index: int, *stems: str) -> Block:
    tensors = tuple(TensorInfo(f"blk.{index}.{stem}", (32, 32), "F16", 2048, 0, 0) for stem in stems)
    return Block(index, tensors, 1, 1, 0, 0)


FFN = ("ffn_norm.weight", "ffn_gate.weight", "ffn_up.weight", "ffn_down.weight")
EXPERTS = ("ffn_gate_inp.weight", "ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight")
ATTENTION = ("attn_norm.weight", "attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_output.weight")


@pytest.mark.parametrize(
    ("override", "name"),
    [
        (Override("CPU", part="ffn"), None),
        (Override("CPU", part="experts"), None),
        (Override("CPU", part="experts", first=0, last=0), None),
        (Override("CPU", pattern=r"ffn_down"), None),
        (Override("CPU", pattern=r"norm|ffn_gate_inp|attn_output"), None),
        (Override("CPU", part="attention", first=1, last=1), "blk.1.attn_q.weight"),
        (Override("CPU", part="all"), "blk.0.attn_q.weight"),
        (Override("CPU", pattern=r"ffn_up\."), "blk.0.ffn_up.weight"),
        (Override("CPU", pattern=r"ffn_(up|gate)_exps"), "blk.0.ffn_gate_exps.weight"),
    ],
)
def test_in_split_mode_tensor_overrides_may_not_tear_weights_apart(override: Override, name: str | None) -> None:
    file = replace(model(2), blocks=tuple(block(index, *ATTENTION, *FFN, *EXPERTS) for index in range(2)))
    tensor = make_layout(2, ["CUDA0", "CUDA1"]).with_split_mode("tensor")
    found = broken(replace(tensor, overrides=(override,)), file)
    assert rules(found) == ([] if name is None else ["split_override"])
    assert name is None or name in found[0].message
    elsewhere = replace(tensor, overrides=(replace(override, device="CUDA1"),))
    assert rules(broken(elsewhere, file))[0] == "split_override"
    assert broken(replace(tensor, overrides=(override,)).with_split_mode("layer"), file) == []


def test_a_device_whose_self_test_passed_may_come_twice() -> None:
    tested = replace(GPU, capabilities=Capabilities(repeatable=True))
    assert broken(alternating("CUDA0", "RPC0", runs=3), rig=Rig((tested, *RIG.devices[1:]), RIG.host)) == []


def test_models_that_only_draft_cannot_be_loaded_alone() -> None:
    draft = replace(model(2), architecture="eagle3")
    assert rules(broken(single_device(2, "CUDA0"), draft)) == ["draft_model"]
    whole = tuple(TensorInfo(name, (32, 32), "F16", 2048, 0, 0) for name in ("token_embd.weight", "output.weight"))
    assert broken(single_device(2, "CUDA0"), replace(draft, global_tensors=whole)) == []
    assert rules(broken(single_device(2, "CUDA0"), replace(model(2), architecture="gemma4-assistant"))) == [
        "draft_model"
    ]


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        (ContextSettings(n_seq_max=256), []),
        (ContextSettings(n_seq_max=257), ["too_many_sequences"]),
        (ContextSettings(n_seq_max=64, n_batch=63), ["sequences_over_batch"]),
        (ContextSettings(n_seq_max=64, n_batch=64, n_ubatch=16), []),
        (ContextSettings(n_seq_max=64, n_ctx=32), ["sequences_over_batch"]),
    ],
)
def test_sequences_have_to_go_into_one_batch(context: ContextSettings, expected: list[str]) -> None:
    assert rules(broken(single_device(2, "CUDA0"), context=context)) == expected


def test_layers_that_the_engine_adds_are_not_split() -> None:
    tensor = replace(single_device(2, "CUDA0"), split_mode="tensor", tensor_split=(("CUDA0", 1.0), ("CUDA1", 1.0)))
    plain = replace(model(2), architecture="nanbeige")
    looped = replace(plain, metadata={**plain.metadata, "nanbeige.num_loops": 2})
    for repeated in (looped, replace(model(2), architecture="graniteswitch")):
        assert "split_architecture" in rules(broken(tensor, repeated))
    assert "split_architecture" not in rules(broken(tensor, plain))


def test_a_bias_for_all_tokens_keeps_no_sequences_apart() -> None:
    encoder = replace(model(2), architecture="t5")
    layout = single_device(2, "CUDA0")
    assert rules(broken(layout, encoder, context=ContextSettings(n_seq_max=2))) == ["separate_sequences"]
    assert broken(layout, encoder, context=ContextSettings(n_seq_max=2, kv_unified=True)) == []
    assert broken(layout, encoder) == []


def test_every_violation_has_a_sentence_and_a_remedy() -> None:
    layout = alternating("CUDA0", "GONE", runs=20)
    found = broken(layout, model(3, {"attention.key_length": 5}), context=ContextSettings(type_k="q4_0"))
    kinds = ["layer_count", "unknown_device", "too_many_entries", "repeated_device", "cache_block_size"]
    assert rules(found) == kinds
    assert all(text.endswith(".") for violation in found for text in (violation.message, violation.remedy))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["separate_sequences"]),
        ({"flash_attn": "auto"}, []),
        ({"type_k": "f16"}, []),
        ({"n_seq_max": 1}, []),
        ({"kv_unified": True}, []),
        ({"op_offload": False}, []),
    ],
)
def test_a_card_does_not_multiply_quantised_caches_of_cpu_layers_for_several_sequences(
    changes: dict[str, Any], expected: list[str]
) -> None:
    context = ContextSettings(n_ctx=4096, n_seq_max=4, type_k="q8_0", flash_attn="off", op_offload=True)
    context = msgspec.structs.replace(context, **changes)
    behind = make_layout(4, ["CPU", "CPU", "CUDA0", "CUDA0"])
    assert rules(list(violations(behind, model(4), RIG, context))) == expected
    assert rules(list(violations(make_layout(4, ["CUDA0"] * 4), model(4), RIG, context))) == []


@pytest.mark.parametrize(
    ("heads", "norm", "type_k", "expected"),
    [
        (1, True, "f16", ["single_head"]),
        (1, False, "q8_0", ["single_head"]),
        (1, False, "f16", []),
        (2, True, "q8_0", []),
    ],
)
def test_a_single_head_is_not_split_where_whole_heads_are_computed(
    heads: int, norm: bool, type_k: KvType, expected: list[str]
) -> None:
    metadata: dict[str, MetadataValue] = {
        "attention.head_count": 4, "attention.head_count_kv": heads, "attention.key_length": 64,
    }  # fmt: skip
    found = replace(
        model(4, metadata), blocks=tuple(block(at, *(["attn_k_norm.weight"] if norm else [])) for at in range(4))
    )
    layout = replace(make_layout(4, ["CUDA0"] * 4), split_mode="tensor", tensor_split=(("CUDA0", 1.0), ("CUDA1", 1.0)))
    context = ContextSettings(n_ctx=512, type_k=type_k)
    assert rules(list(violations(layout, found, RIG, context))) == expected
    alone = replace(layout, tensor_split=(("CUDA0", 1.0),))
    assert rules(list(violations(alone, found, RIG, context))) == []


@pytest.mark.parametrize(
    ("backend", "width", "type_v", "expected"),
    [
        ("CUDA", 128, "f16", []),
        ("CUDA", 128, "iq4_nl", ["split_attention"]),
        ("CUDA", 160, "f16", ["split_attention"]),
        ("Vulkan", 160, "iq4_nl", []),
    ],
)
def test_members_need_a_kernel_for_the_attention(backend: str, width: int, type_v: KvType, expected: list[str]) -> None:
    rig = Rig(tuple(replace(device, backend=backend) for device in (GPU, SECOND)), RIG.host)
    found = model(4, {"attention.key_length": width, "attention.value_length": width})
    layout = replace(make_layout(4, ["CUDA0"] * 4), split_mode="tensor", tensor_split=(("CUDA0", 1.0), ("CUDA1", 1.0)))
    assert rules(broken(layout, found, rig, ContextSettings(type_v=type_v))) == expected
    assert rules(broken(make_layout(4, ["CUDA0"] * 4), found, rig, ContextSettings(type_v=type_v))) == []


@pytest.mark.parametrize(
    ("backend", "width", "settings", "expected"),
    [
        ("CUDA", 128, {}, []),
        ("CUDA", 128, {"type_k": "iq4_nl", "type_v": "iq4_nl"}, ["engine_fault"]),
        ("CUDA", 160, {"flash_attn": "on"}, ["engine_fault"]),
        # By itself it is turned off, and no kernel is missed.
        ("CUDA", 160, {"flash_attn": "off"}, []),
        ("CUDA", 160, {"flash_attn": "on", "offload_kqv": False}, []),
        ("Vulkan", 160, {"type_k": "iq4_nl", "type_v": "iq4_nl"}, []),
    ],
)
def test_a_lent_card_is_given_no_attention_that_would_end_its_worker(
    backend: str, width: int, settings: dict[str, Any], expected: list[str]
) -> None:
    """ggml's RPC client asks a worker about no kernel; CUDA aborts at a node without one."""
    lent = replace(GPU, id="attic-CUDA0", backend="RPC", endpoint="192.0.2.7:50052/CUDA0", remote=RemoteFacts(backend))
    found = model(4, {"attention.key_length": width, "attention.value_length": width})
    layout = make_layout(4, ["CPU", "CPU", "attic-CUDA0", "attic-CUDA0"])
    rig = Rig((lent,), RIG.host)
    assert rules(broken(layout, found, rig, ContextSettings(**settings))) == expected
    # A local card leaves such attention to the CPU.
    here = replace(lent, backend="CUDA", endpoint=None, remote=None)
    assert rules(broken(layout, found, Rig((here,), RIG.host), ContextSettings(**settings))) == []


@pytest.mark.parametrize(("type_name", "expected"), [("Q4_0", []), ("TQ2_0", ["engine_fault"])])
def test_a_lent_card_is_given_no_weights_that_would_end_its_worker(type_name: str, expected: list[str]) -> None:
    lent = replace(GPU, id="attic-CUDA0", backend="RPC", endpoint="192.0.2.7:50052/CUDA0", remote=RemoteFacts("CUDA"))
    blocks = tuple(
        replace(each, tensors=tuple(replace(tensor, type_name=type_name) for tensor in each.tensors))
        for each in (block(at, "attn_q.weight") for at in range(4))
    )
    found = replace(model(4, {}), blocks=blocks)
    assert rules(broken(make_layout(4, ["attic-CUDA0"] * 4), found, Rig((lent,), RIG.host))) == expected


@pytest.mark.parametrize(("share", "expected"), [(1.0, []), (3.0, []), (2.0, ["split_attention"])])
def test_heads_with_norms_of_their_own_are_divided_without_a_remainder(share: float, expected: list[str]) -> None:
    metadata: dict[str, MetadataValue] = {"attention.head_count_kv": 8}
    found = replace(model(4, metadata), blocks=tuple(block(at, "attn_q_norm.weight") for at in range(4)))
    layout = replace(
        make_layout(4, ["CUDA0"] * 4), split_mode="tensor", tensor_split=(("CUDA0", 1.0), ("CUDA1", share))
    )
    assert rules(broken(layout, found)) == expected


@pytest.mark.parametrize(
    ("architecture", "n_heads", "shares", "shared", "expected"),
    [
        ("gemma4", (2,) * 4, (1.0, 1.0), 2, []),
        ("gemma4", (2,) * 4, (1.0, 3.0), 2, ["split_attention"]),
        ("gemma4", (2,) * 4, (1.0, 3.0), 0, []),
        ("gemma4", (4, 8, 4, 8), (1.0, 3.0), 2, []),
        ("gemma4", 8, (1.0, 2.0), 2, ["split_attention"]),
        ("llama", 8, (1.0, 2.0), 2, []),
    ],
)
def test_layers_that_read_the_cache_of_others_need_whole_heads(
    architecture: str, n_heads: int | tuple[int, ...], shares: tuple[float, float], shared: int, expected: list[str]
) -> None:
    numbers = {"head_count": 8, "head_count_kv": n_heads, "shared_kv_layers": shared}
    metadata: dict[str, MetadataValue] = {f"{architecture}.attention.{name}": value for name, value in numbers.items()}
    found = replace(model(4), architecture=architecture, metadata=metadata)
    split = tuple(zip(("CUDA0", "CUDA1"), shares, strict=True))
    layout = replace(make_layout(4, ["CUDA0"] * 4), split_mode="tensor", tensor_split=split)
    assert rules(broken(layout, found)) == expected


def test_a_delta_net_in_one_weight_is_not_split() -> None:
    found = replace(model(4), blocks=tuple(block(at, "ssm_in.weight", "ssm_ba.weight") for at in range(4)))
    layout = replace(make_layout(4, ["CUDA0"] * 4), split_mode="tensor", tensor_split=(("CUDA0", 1.0), ("CUDA1", 1.0)))
    assert rules(broken(layout, found)) == ["split_attention"]
    apart = replace(found, blocks=tuple(block(at, "attn_qkv.weight", "ssm_ba.weight") for at in range(4)))
    assert rules(broken(layout, apart)) == []
