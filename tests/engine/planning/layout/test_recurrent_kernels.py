"""Layers and tensors on lent cards that the remote device cannot compute: refused before the load."""

from __future__ import annotations

import pytest

from engine.base.units import GIB
from engine.base.values import replace
from engine.devices.device import BufferFacts, Device, RemoteFacts, Rig, make_host
from engine.model.gguf.model_file import ModelFile
from engine.planning.fit.strategies.catalogue import STRATEGIES, auto_layout
from engine.planning.layout.layout import Layout, Override, Run, single_device
from engine.planning.layout.recurrent_kernels import recurrent_gap
from engine.planning.plan.edit import Edit
from engine.planning.settings.context_settings import ContextSettings
from tests.support.plans import make_plan
from tests.support.truth import truth_model

CONTEXT = ContextSettings(n_ctx=256, n_batch=64, n_ubatch=64, threads=1)


def with_sizes(model: ModelFile, **sizes: int) -> ModelFile:
    """Return `model` with other numbers in its metadata."""
    changed = {f"{model.architecture}.{key.replace('__', '.')}": value for key, value in sizes.items()}
    return replace(model, metadata={**model.metadata, **changed})


def gap(name: str, backend: str, **sizes: int) -> str | None:
    model = with_sizes(truth_model(name), **sizes)
    return recurrent_gap(model, backend, range(model.n_layers))


@pytest.mark.parametrize("name", ["falcon-mamba-7b", "jamba-v0.1-52b"])
def test_mamba_1_is_for_cuda_with_the_state_of_published_models_and_not_for_vulkan(name: str) -> None:
    assert gap(name, "CUDA") is None
    assert gap(name, "HIP") is None
    assert gap(name, "Vulkan") == "SSM scan of Mamba 1 with a state size of 16 in recurrent layers"
    assert gap(name, "CUDA", ssm__state_size=32) == "SSM scan of Mamba 1 with a state size of 32 in recurrent layers"


@pytest.mark.parametrize("backend", ["CUDA", "Vulkan"])
def test_mamba_2_has_kernels_for_some_sizes(backend: str) -> None:
    name = "granite-4.0-h-small"
    assert gap(name, backend) is None
    assert gap(name, backend, ssm__state_size=64) == "SSM scan with a state size of 64 in recurrent layers"
    heads = truth_model(name).hyper_parameter("ssm.inner_size")
    assert isinstance(heads, int)
    assert gap(name, backend, ssm__time_step_rank=heads // 8) == "SSM scan with heads of width 8 in recurrent layers"


@pytest.mark.parametrize(
    ("name", "backend", "sizes", "expected"),
    [
        ("arwkv7-dense", "CUDA", {"wkv__head_size": 32}, "time mixing with heads of width 32 in recurrent layers"),
        ("arwkv7-dense", "CUDA", {"wkv__head_size": 64}, None),
        ("arwkv7-dense", "Vulkan", {"wkv__head_size": 32}, None),
        ("kimi-linear-48b", "CUDA", {}, None),
        ("kimi-linear-48b", "Vulkan", {"kda__head_dim": 96}, "delta net with heads of width 96 in recurrent layers"),
        ("llama-3.2-1b", "CUDA", {}, None),
        ("falcon-mamba-7b", "CPU", {}, None),
        ("falcon-mamba-7b", "", {}, None),
    ],
)
def test_kernels_of_other_recurrent_layers(
    name: str, backend: str, sizes: dict[str, int], expected: str | None
) -> None:
    assert gap(name, backend, **sizes) == expected


def test_cudas_convolution_needs_whole_blocks_of_channels() -> None:
    model = truth_model("mamba2-dense")
    (shape,) = {t.shape for t in model.tensors if t.name.endswith("ssm_conv1d.weight")}
    assert recurrent_gap(model, "CUDA", range(model.n_layers)) is None
    first = model.blocks[0]
    odd = tuple(replace(t, shape=(4, 1000)) if t.shape == shape else t for t in first.tensors)
    changed = replace(model, blocks=(replace(first, tensors=odd), *model.blocks[1:]))
    assert recurrent_gap(changed, "CUDA", [0]) == "convolution over 1000 channels in recurrent layers"
    assert recurrent_gap(changed, "CUDA", [1]) is None
    assert recurrent_gap(changed, "Vulkan", [0]) is None


def lent(backend: str, buffers: BufferFacts = BufferFacts()) -> Rig:  # noqa: B008
    card = Device(
        "attic-GPU", "attic: card", "RPC", "gpu", 80 * GIB, 80 * GIB, endpoint="192.0.2.7:50052/GPU",
        fingerprint="0" * 64, via="127.0.0.1:1", remote=RemoteFacts(backend), buffers=buffers,
    )  # fmt: skip
    return Rig((card,), make_host("host", 200 * GIB, 200 * GIB))


def test_a_layout_is_refused_only_for_layers_with_a_missing_kernel() -> None:
    model, rig = truth_model("jamba-v0.1-52b"), lent("Vulkan")
    found = make_plan(model, rig, Edit(single_device(model.n_layers, "attic-GPU"), CONTEXT)).violations
    assert [each.rule for each in found] == ["engine_fault"]
    assert found[0].message == (
        "The RPC worker of attic-GPU would crash, because its backend has no kernel for this operation: "
        "SSM scan of Mamba 1 with a state size of 16 in recurrent layers."
    )
    attention = next(n for n, block in enumerate(model.blocks) if any("attn_q" in t.name for t in block.tensors))
    runs = (Run("CPU", 0, attention - 1), Run("attic-GPU", attention, attention),
            Run("CPU", attention + 1, model.n_layers - 1))  # fmt: skip
    layout = Layout(model.n_layers, runs, "CPU")
    assert "engine_fault" not in [v.rule for v in make_plan(model, rig, Edit(layout, CONTEXT)).violations]


def test_automatic_layouts_leave_such_a_card_alone() -> None:
    model = truth_model("falcon-mamba-7b")
    for name in STRATEGIES:
        assert "attic-GPU" not in auto_layout(name, model, lent("Vulkan"), CONTEXT).layout.devices, name
    assert "attic-GPU" in auto_layout("fewest", model, lent("CUDA"), CONTEXT).layout.devices


def faults(model: ModelFile, rig: Rig, layout: Layout) -> list[tuple[str, str]]:
    found = make_plan(model, rig, Edit(layout, CONTEXT)).violations
    return [(each.message, each.remedy) for each in found if each.rule == "engine_fault"]


@pytest.mark.parametrize(
    ("name", "mixes", "expected"),
    [
        ("deepseek4-moe", True, []),
        ("deepseek4-moe", False, ["mixing of residual streams (hyper-connections)"]),
        ("glm5-next-moe", False, ["mixing of residual streams (hyper-connections)"]),
        # These have residual streams and no matrix between them.
        ("hy_v4-moe", False, []),
        ("qwen4exp-moe", False, []),
    ],
)
def test_layers_that_mix_residual_streams_need_a_kernel(name: str, mixes: bool, expected: list[str]) -> None:
    model, rig = truth_model(name), lent("Vulkan", BufferFacts(mixes_streams=mixes))
    found = faults(model, rig, single_device(model.n_layers, "attic-GPU"))
    assert found == [
        (
            f"The RPC worker of attic-GPU would crash, because its backend has no kernel for this operation: {each}.",
            "Move the layers with hyper-connections off attic-GPU.",
        )
        for each in expected
    ]
    assert faults(model, rig, single_device(model.n_layers, "CPU")) == []
    used = auto_layout("fewest", model, rig, CONTEXT).layout.devices
    assert ("attic-GPU" in used) == (not expected)


def test_a_tensor_above_the_limit_of_a_lent_card_is_refused() -> None:
    """Only tensors on the card count, the output matrix among them."""
    model = truth_model("llama-3.2-1b")
    sizes = {tensor.name: tensor.size_bytes for tensor in model.tensors}
    layer = max(size for name, size in sizes.items() if name.startswith("blk."))
    matrix = sizes.get("output.weight", sizes["token_embd.weight"])
    assert layer < matrix
    whole = single_device(model.n_layers, "attic-GPU")
    without_output = Layout(model.n_layers, (Run("attic-GPU", 0, model.n_layers - 1),), "CPU")
    fits_layers = lent("Vulkan", BufferFacts(largest_tensor_bytes=layer))
    assert faults(model, lent("Vulkan", BufferFacts(largest_tensor_bytes=matrix)), whole) == []
    assert faults(model, fits_layers, without_output) == []
    # An override counts more than the device of the layer.
    narrow = lent("Vulkan", BufferFacts(largest_tensor_bytes=layer - 1))
    assert faults(model, narrow, replace(without_output, overrides=(Override("CPU", part="all"),))) == []
    ((message, remedy),) = faults(model, fits_layers, whole)
    assert message.startswith("attic-GPU cannot compute with tensors larger than ")
    assert message.endswith(" would crash or compute wrong results.")
    assert "token_embd.weight" in remedy or "output.weight" in remedy
    ((message, remedy),) = faults(model, narrow, without_output)
    assert "blk." in message
    assert "attic-GPU" not in auto_layout("fewest", model, fits_layers, CONTEXT).layout.devices
