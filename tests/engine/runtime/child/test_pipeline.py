"""Pipeline parallelism on and off in real loads: both forecasts hold to the byte, and answers are equal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from engine.base.units import GIB
from engine.devices.device import CPU_ID, Device, Rig, make_host
from engine.model.gguf.reader import read_model
from engine.planning.layout.engine_parameters import engine_parameters
from engine.planning.layout.layout import Layout, Override, Run
from engine.planning.memory.estimate import DeviceMemory
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.decisions.pipeline import pipeline_choices
from engine.planning.settings.context_settings import ContextSettings, Pipeline
from engine.runtime.protocol.messages import BufferMemory, LoadedModel, LogitDigest, Probed
from engine.runtime.protocol.requests import DeviceRef, Load, Logits, Probe
from tests.engine.runtime.child.raw_child import RawChild, rpc_workers
from tests.support.models import write_tiny_llama

CONTEXT = ContextSettings(n_ctx=1024, n_batch=1024, n_ubatch=128, threads=1, threads_batch=1, load_mode="none")
TOKENS = tuple(1 + number * 7 % 90 for number in range(700))
"""Six micro batches: several are under way at once."""
BOTH: tuple[Pipeline, ...] = ("on", "off")
LAYERS = 8
WIDTH = 256
HIDDEN_STATE_BYTES = CONTEXT.n_ubatch * WIDTH * 4
"""A dry run without a pipeline may be off by one: it forgets which backend computes the norms."""
RIG = Rig(tuple(Device(f"W{n}", f"W{n}", "RPC", "gpu", 4 * GIB) for n in range(3)), make_host("host", 64 * GIB))
TWO = Layout(LAYERS, (Run("W0", 0, 3), Run("W1", 4, 7)), "W1")
THREE = Layout(LAYERS, (Run("W2", 0, 1), Run("W0", 2, 4), Run("W1", 5, 7)), "W1")
REPEATED = Layout(LAYERS, (Run("W0", 0, 1), Run("W1", 2, 3), Run("W0", 4, 7)), "W0")
WITH_HOST = Layout(LAYERS, (Run("W0", 0, 3), Run("W1", 4, 7)), CPU_ID)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", n_layers=LAYERS, n_embd=WIDTH)


@pytest.fixture(scope="module")
def workers() -> Iterator[tuple[DeviceRef, ...]]:
    with rpc_workers(None, None, None) as (_, refs):
        yield refs


@pytest.fixture(scope="module")
def child() -> Iterator[RawChild]:
    with RawChild() as child:
        yield child


def with_pipeline(pipeline: Pipeline) -> ContextSettings:
    return msgspec.structs.replace(CONTEXT, pipeline=pipeline)


def compute_bytes(parts: tuple[BufferMemory, ...]) -> dict[str, int]:
    sizes = dict.fromkeys(RIG.ids, 0)
    for part in parts:
        sizes[part.device] += part.compute_bytes
    return sizes


def forecast(path: Path, layout: Layout, context: ContextSettings) -> dict[str, DeviceMemory]:
    return dict(ModelMemory(read_model(path)).estimate(layout, context, RIG).devices)


@pytest.mark.parametrize("layout", [TWO, THREE, REPEATED, WITH_HOST], ids=["two", "three", "repeated", "with-host"])
def test_both_are_forecast_to_the_byte_and_compute_the_same(
    path: Path, workers: tuple[DeviceRef, ...], child: RawChild, layout: Layout
) -> None:
    parameters = engine_parameters(layout, LAYERS)
    digests: dict[Pipeline, str] = {}
    measured: dict[Pipeline, dict[str, int]] = {}
    for pipeline in BOTH:
        context = with_pipeline(pipeline)
        probed = child.ask(Probe(path=str(path), devices=workers, parameters=parameters, context=context))
        loaded = child.ask(Load(path=str(path), devices=workers, parameters=parameters, context=context))
        assert isinstance(probed, Probed), probed
        assert isinstance(loaded, LoadedModel), loaded
        digest = child.ask(Logits(tokens=TOKENS))
        assert isinstance(digest, LogitDigest), digest
        found = forecast(path, layout, context)
        measured[pipeline] = compute_bytes(loaded.parts)
        assert measured[pipeline] == {device: memory.compute_bytes for device, memory in found.items()}
        for device, size_bytes in compute_bytes(probed.parts).items():
            assert abs(size_bytes - measured[pipeline][device]) <= (0 if pipeline == "on" else HIDDEN_STATE_BYTES)
        assert loaded.layer_devices == (*layout.assignment(), layout.output_device)
        digests[pipeline] = digest.sha256
    assert digests["on"] == digests["off"]
    copies = {device: memory.pipeline_bytes for device, memory in forecast(path, layout, with_pipeline("on")).items()}
    for device, size_bytes in copies.items():
        assert measured["on"][device] - measured["off"][device] >= size_bytes >= 0
    assert all(copies[run.device] > 0 for run in layout.runs)
    assert sum(measured["off"].values()) < 0.6 * sum(measured["on"].values())
    assert not any(memory.pipeline_bytes for memory in forecast(path, layout, with_pipeline("off")).values())


def test_where_nobody_decided_there_is_none(path: Path, workers: tuple[DeviceRef, ...], child: RawChild) -> None:
    parameters = engine_parameters(TWO, LAYERS)
    loaded = child.ask(Load(path=str(path), devices=workers, parameters=parameters, context=CONTEXT))
    assert isinstance(loaded, LoadedModel), loaded
    found = forecast(path, TWO, with_pipeline("off"))
    assert compute_bytes(loaded.parts) == {device: memory.compute_bytes for device, memory in found.items()}


def test_what_turns_it_off_goes_beside_no_override_of_ours(
    path: Path, workers: tuple[DeviceRef, ...], child: RawChild
) -> None:
    moved = Layout(LAYERS, TWO.runs, "W1", overrides=(Override("W2", part="ffn", first=0, last=0),))
    for pipeline in BOTH:
        context = with_pipeline(pipeline)
        parameters = engine_parameters(moved, LAYERS)
        assert pipeline_choices(moved, context) == (pipeline,)
        loaded = child.ask(Load(path=str(path), devices=workers, parameters=parameters, context=context))
        assert isinstance(loaded, LoadedModel), loaded
        assert any(part.device == "W2" and part.weights_bytes for part in loaded.parts)
        found = forecast(path, moved, context)
        assert compute_bytes(loaded.parts) == {device: memory.compute_bytes for device, memory in found.items()}
