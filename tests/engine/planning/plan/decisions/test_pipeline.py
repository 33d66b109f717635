"""Pipeline parallelism: when the engine would start it, whether it should, and the reason."""

from __future__ import annotations

import msgspec
import pytest

from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Rig, make_host
from engine.devices.telemetry.headroom import warning_bytes
from engine.model.gguf.reader import read_model
from engine.planning.fit.strategies.catalogue import auto_layout
from engine.planning.layout.layout import Layout, Override, Run
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.decisions.decision import Decision
from engine.planning.plan.decisions.resolve import Resolved, resolve
from engine.planning.settings.context_settings import AUTO_CONTEXT, ContextSettings, Pipeline
from tests.support.models import write_header_only
from tests.support.plans import make_report

N_LAYERS = 32
ASKED = ContextSettings(n_ctx=8192)
TWO = Layout(N_LAYERS, (Run("D0", 0, 15), Run("D1", 16, 31)), "D1")
ONE = Layout(N_LAYERS, (Run("D0", 0, 31),), "D0")


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> ModelMemory:
    path = tmp_path_factory.mktemp("models") / "m.gguf"
    return ModelMemory(read_model(write_header_only(path, n_layers=N_LAYERS, n_embd=4096, n_head=32, n_ff=14336)))


def rig(*sizes_bytes: int) -> Rig:
    cards = tuple(Device(f"D{n}", "card", "CUDA", "gpu", size_bytes) for n, size_bytes in enumerate(sizes_bytes))
    return Rig(cards, make_host("host", 64 * GIB))


LARGE = rig(24 * GIB, 24 * GIB)


def decided(resolved: Resolved) -> Decision:
    (found,) = (each for each in resolved.decisions if each.setting == "pipeline")
    assert found.value == resolved.context.pipeline
    return found


def needs(resolved: Resolved) -> dict[str, int]:
    return {device_id: memory.need_bytes for device_id, memory in resolved.estimate.devices.items()}


def chosen(pipeline: Pipeline) -> ContextSettings:
    return msgspec.structs.replace(ASKED, pipeline=pipeline)


def test_there_is_one_where_there_is_room(memory: ModelMemory) -> None:
    resolved = resolve(memory, LARGE, TWO, ASKED)
    found = decided(resolved)
    assert (found.value, found.overridden) == ("on", False)
    assert found.reason.startswith("Devices compute parts of a long prompt at the same time; the copies for this take ")
    copies = {device_id: each.pipeline_bytes for device_id, each in resolved.estimate.devices.items()}
    assert copies["D0"] > MIB < copies["D1"]


def test_where_there_is_just_too_little_there_is_none(memory: ModelMemory) -> None:
    on, off = (needs(resolve(memory, LARGE, TWO, chosen(mode))) for mode in ("on", "off"))
    assert off["D0"] < on["D0"]
    for size_bytes, value in ((on["D0"], "on"), (on["D0"] - 1, "off"), (off["D0"], "off"), (off["D0"] - 1, "off")):
        resolved = resolve(memory, rig(size_bytes, 24 * GIB), TWO, ASKED)
        assert decided(resolved).value == value
        fits = needs(resolved)["D0"] <= size_bytes
        assert fits == (size_bytes >= off["D0"])
    assert "no room for the copies" in decided(resolved).reason


def test_a_longer_context_goes_first(memory: ModelMemory) -> None:
    asked = msgspec.structs.replace(ASKED, n_ctx=AUTO_CONTEXT)
    length = resolve(memory, LARGE, TWO, asked).context.n_ctx
    tight = needs(resolve(memory, LARGE, TWO, msgspec.structs.replace(chosen("off"), n_ctx=length)))
    cards = tuple(replace(device, free_bytes=tight[device.id]) for device in LARGE.devices)
    resolved = resolve(memory, Rig(cards, LARGE.host), TWO, asked)
    assert resolved.context.n_ctx == length
    assert resolved.context.pipeline == "off"


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({"n_batch": 512}, "off"),
        ({"n_ctx": 512}, "off"),
        ({"n_batch": 513}, "on"),
        ({"n_batch": 512, "n_seq_max": 2}, "on"),
    ],
)
def test_one_micro_batch_at_a_time_gains_nothing(memory: ModelMemory, changes: dict[str, int], value: str) -> None:
    found = decided(resolve(memory, LARGE, TWO, msgspec.structs.replace(ASKED, **changes)))
    assert found.value == value
    assert (found.reason == "No effect: each batch is a single micro batch of at most 512 tokens.") == (value == "off")


@pytest.mark.parametrize("pipeline", ["on", "off"])
def test_what_was_chosen_is_kept(memory: ModelMemory, pipeline: Pipeline) -> None:
    for devices in (LARGE, rig(GIB, GIB)):
        found = decided(resolve(memory, devices, TWO, chosen(pipeline)))
        assert (found.value, found.overridden) == (pipeline, True)
        assert found.reason.startswith("Set explicitly. ")


@pytest.mark.parametrize(
    ("layout", "changes", "says"),
    [
        (ONE, {}, "one device computes (D0)"),
        (Layout(N_LAYERS, (Run(CPU_ID, 0, 3), Run("D0", 4, 15), Run("D1", 16, 31)), "D1"), {}, "first layers are on"),
        (Layout(N_LAYERS, TWO.runs, "D1", overrides=(Override(CPU_ID, part="ffn"),)), {}, "with overrides"),
        (TWO, {"offload_kqv": False}, "KV cache is in host memory"),
        (Layout(N_LAYERS, ONE.runs, "D0", "tensor", (("D0", 1.0), ("D1", 1.0))), {}, "split mode tensor"),
    ],
)
def test_where_the_engine_has_none_it_is_said(
    memory: ModelMemory, layout: Layout, changes: dict[str, bool], says: str
) -> None:
    for asked, value in ((ASKED, "off"), (chosen("on"), "on")):
        resolved = resolve(memory, LARGE, layout, msgspec.structs.replace(asked, **changes))
        found = decided(resolved)
        assert found.value == value
        assert says in found.reason
        assert not any(each.pipeline_bytes for each in resolved.estimate.devices.values())


def test_copies_keep_no_layer_from_a_device(memory: ModelMemory) -> None:
    tight = needs(resolve(memory, LARGE, TWO, chosen("off")))
    # Strategies keep free what is warned about; a margin of the same size leaves no room for copies there either.
    large = rig(*(round((tight[name] + MIB) / 0.98) for name in ("D0", "D1")))
    kept = tuple(replace(device, margin_bytes=warning_bytes(device)) for device in large.devices)
    devices = replace(large, devices=kept)
    found = auto_layout("balanced", memory, devices, ASKED)
    assert CPU_ID not in found.layout.devices
    report = make_report(memory, devices, found.layout, found.context)
    assert report.fits
    assert report.context is not None
    assert report.context.pipeline == "off"
