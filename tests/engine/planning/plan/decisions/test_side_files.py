"""The device of a projector, and the memory of side files on their devices."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine.base.errors import RuleViolationError
from engine.base.processor import Processor
from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, DeviceKind, Rig, make_host
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import Layout
from engine.planning.memory.backends import backend_traits
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.memory.side_files import Projector, SideFiles, read_adapter, read_projector
from engine.planning.plan.decisions.resolve import Resolved, resolve
from engine.planning.plan.decisions.threads import HostFacts
from engine.planning.settings.context_settings import ContextSettings
from tests.support.load_specs import plan_of
from tests.support.models import write_tiny_llama
from tests.support.previews import make_layout
from tests.support.side_models import write_tiny_ear, write_tiny_lora, write_tiny_projector

N_LAYERS = 4
HOST = HostFacts("linux", Processor(8, 8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def model(folder: Path) -> ModelFile:
    return read_model(write_tiny_llama(folder / "m.gguf", n_layers=N_LAYERS))


@pytest.fixture(scope="module")
def projector(folder: Path) -> Projector:
    return read_projector(write_tiny_projector(folder / "mmproj.gguf"))


def rig_of(*devices: tuple[str, DeviceKind, int]) -> Rig:
    """Devices as (backend, kind, bytes), called D0, D1..."""
    made = (
        Device(f"D{number}", "device", backend, kind, size, endpoint="h:1" if backend == "RPC" else None)
        for number, (backend, kind, size) in enumerate(devices)
    )
    return Rig(tuple(made), make_host("host", 64 * GIB))


def decide(model: ModelFile, rig: Rig, files: SideFiles, *, on: str = CPU_ID) -> Resolved:
    layout = make_layout(N_LAYERS, [(on, N_LAYERS)])
    return resolve(ModelMemory(model), rig, layout, ContextSettings(n_ctx=256), files, HOST)


@pytest.mark.parametrize(
    ("devices", "expected", "says"),
    [
        ((), CPU_ID, "There is no graphics card"),
        ((("CUDA", "gpu", GIB), ("CUDA", "gpu", GIB)), "D0", "The first graphics card;"),
        ((("Vulkan", "igpu", GIB), ("CUDA", "gpu", GIB)), "D1", "The first graphics card;"),
        ((("Vulkan", "igpu", GIB),), "D0", "The integrated graphics card;"),
        ((("RPC", "gpu", GIB),), CPU_ID, "There is no graphics card"),
        ((("RPC", "gpu", GIB), ("HIP", "gpu", GIB)), "D1", "The first graphics card;"),
        ((("CUDA", "gpu", 300 * MIB), ("CUDA", "gpu", GIB)), "D1", "The first graphics card with room"),
        ((("CUDA", "gpu", 300 * MIB),), CPU_ID, "No graphics card has room"),
        ((("BLAS", "accel", GIB),), CPU_ID, "There is no graphics card"),
    ],
)
def test_the_device(
    model: ModelFile,
    projector: Projector,
    devices: tuple[tuple[str, DeviceKind, int], ...],
    expected: str,
    says: str,
) -> None:
    rig = rig_of(*devices)
    resolved = decide(model, rig, SideFiles(projector))
    decision = next(each for each in resolved.decisions if each.setting == "projector")
    assert (decision.value, decision.overridden) == (expected, False)
    assert decision.reason.startswith(says)
    assert resolved.projector_device == expected
    device = rig.device(expected)
    assert device is not None
    size_bytes = projector.weights_bytes(backend_traits(device).size_rule)
    before, after = (each.devices[expected] for each in (resolved.model_estimate, resolved.estimate))
    assert after.weights_bytes - before.weights_bytes == size_bytes
    assert after.overhead_bytes == (0 if expected == CPU_ID else backend_traits(device).overhead_bytes)


def test_a_chosen_device_is_kept_even_where_there_is_no_room(model: ModelFile, projector: Projector) -> None:
    rig = rig_of(("CUDA", "gpu", GIB), ("RPC", "gpu", MIB))
    chosen = Projector(projector.path, projector.tensors, "D1")
    resolved = decide(model, rig, SideFiles(chosen))
    decision = next(each for each in resolved.decisions if each.setting == "projector")
    assert (decision.value, decision.overridden) == ("D1", True)


def test_adapters_count_where_their_weights_are(folder: Path, model: ModelFile) -> None:
    adapter = read_adapter(write_tiny_lora(folder / "lora.gguf", model), model, 0.5)
    rig = rig_of(("CUDA", "gpu", GIB))
    resolved = decide(model, rig, SideFiles(None, (adapter, adapter)), on="D0")
    more = {
        device_id: memory.weights_bytes - resolved.model_estimate.devices[device_id].weights_bytes
        for device_id, memory in resolved.estimate.devices.items()
    }
    assert more == {"D0": 2 * sum(tensor.size_bytes for tensor in adapter.tensors), CPU_ID: 0}
    decision = next(each for each in resolved.decisions if each.setting == "adapters")
    assert decision.value == 2
    assert "lora.gguf (scale 0.5)" in decision.reason


def test_without_files_nothing_is_said_of_them(model: ModelFile) -> None:
    resolved = decide(model, rig_of(), SideFiles())
    assert not {"projector", "adapters"} & {each.setting for each in resolved.decisions}
    assert resolved.estimate == resolved.model_estimate


def test_what_the_engine_cannot_do_with_them_is_a_broken_rule(
    folder: Path, model: ModelFile, projector: Projector
) -> None:
    adapter = read_adapter(write_tiny_lora(folder / "lora.gguf", model), model)
    rig = rig_of(("Vulkan", "gpu", GIB), ("Vulkan", "gpu", GIB))
    whole = make_layout(N_LAYERS, [("D0", N_LAYERS)])
    cut = replace(whole, split_mode="tensor", tensor_split=(("D0", 1.0), ("D1", 1.0)))
    gone = Projector(projector.path, projector.tensors, "D9")

    def rules(layout: Layout, files: SideFiles) -> list[str]:
        context = ContextSettings(n_ctx=256)
        plan = plan_of(model, rig, layout, context, files)
        broken = [violation.rule for violation in plan.violations]
        if broken:
            with pytest.raises(RuleViolationError):
                _ = plan.parameters
        return broken

    assert rules(cut, SideFiles(None, (adapter,))) == ["split_adapter"]
    assert rules(whole, SideFiles(gone, (adapter,))) == ["projector_device"]
    assert rules(cut, SideFiles(projector)) == []


@pytest.mark.parametrize(
    ("limits", "message", "remedy"),
    [
        (
            {"image_max_tokens": 7},
            "The largest image (7 tokens) is below the projector's minimum of 8 tokens.",
            "to at least 8 tokens",
        ),
        ({"image_min_tokens": 4097}, "The smallest image (4097 tokens) is above the", "to at most 4096 tokens"),
        (
            {"image_min_tokens": 9, "image_max_tokens": 8},
            "(9 tokens) is above “Largest image” (8 tokens)",
            "Set “Smallest image” or “Largest image”",
        ),
        ({"image_max_tokens": 8}, "", ""),
        ({"image_min_tokens": 4096}, "", ""),
        ({"image_min_tokens": 5000, "image_max_tokens": 5000}, "", ""),
    ],
)
def test_limits_for_images_that_the_projector_refuses_are_a_broken_rule(
    folder: Path, model: ModelFile, limits: dict[str, int], message: str, remedy: str
) -> None:
    whole = make_layout(N_LAYERS, [(CPU_ID, N_LAYERS)])
    several = read_projector(write_tiny_projector(folder / "several.gguf", kind="qwen2vl_merger"))
    fixed = read_projector(write_tiny_projector(folder / "fixed.gguf", kind="mlp"))
    context = msgspec.structs.replace(ContextSettings(n_ctx=256), **limits)
    plan = plan_of(model, rig_of(), whole, context, SideFiles(several))
    assert [each.rule for each in plan.violations] == ["image_limit"] * bool(message)
    assert all(message in each.message and remedy in each.remedy for each in plan.violations)
    assert not plan_of(model, rig_of(), whole, context, SideFiles(fixed)).violations


def test_limits_for_images_without_a_projector_that_reads_them_have_no_effect(folder: Path, model: ModelFile) -> None:
    whole = make_layout(N_LAYERS, [(CPU_ID, N_LAYERS)])
    eyes = SideFiles(read_projector(write_tiny_projector(folder / "eyes.gguf", kind="qwen2vl_merger")))
    ears = SideFiles(read_projector(write_tiny_ear(folder / "ears.gguf")))

    def rules(files: SideFiles, **limits: int) -> list[str]:
        plan = plan_of(model, rig_of(), whole, msgspec.structs.replace(ContextSettings(n_ctx=256), **limits), files)
        assert not plan.violations
        return [each.rule for each in plan.advice]

    said = ["image_limit_unused"]
    assert rules(SideFiles(), image_max_tokens=64) == rules(ears, image_min_tokens=64) == said
    assert rules(eyes, image_max_tokens=64) == rules(SideFiles()) == rules(ears) == []
