"""Probes compared with loads: the same compute buffers, with pipelining, repeated devices and layers on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.protocol.messages import BufferMemory, LoadedModel, Probed
from engine.runtime.protocol.requests import DeviceRef, Load, Probe
from tests.engine.runtime.child.raw_child import RawChild, entries, rpc_workers
from tests.support.models import write_tiny_llama

CONTEXT = ContextSettings(n_ctx=512, n_batch=128, n_ubatch=64, threads=1, load_mode="none", pipeline="on")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", n_layers=8, n_embd=128)


@pytest.fixture(scope="module")
def workers() -> Iterator[tuple[DeviceRef, ...]]:
    with rpc_workers(None, None, None) as (_, refs):
        yield refs


@pytest.fixture(scope="module")
def child() -> Iterator[RawChild]:
    with RawChild() as child:
        yield child


def bytes_by_device(parts: tuple[BufferMemory, ...]) -> dict[str, tuple[int, int, int]]:
    sizes: dict[str, tuple[int, int, int]] = {}
    for part in parts:
        weights, state, compute = sizes.get(part.device, (0, 0, 0))
        state += part.kv_cache_bytes + part.recurrent_bytes
        sizes[part.device] = (weights + part.weights_bytes, state, compute + part.compute_bytes)
    return sizes


@pytest.mark.parametrize(
    "runs",
    [
        [("W0", 9)],
        [("W0", 6)],
        [("W0", 4), ("W1", 5)],
        [("W0", 3), ("W1", 3), ("W2", 3)],
        [("W0", 3), ("W1", 3)],
        [("W0", 3), ("W1", 3), ("W0", 3)],
        [("W0", 2), ("W1", 2), ("W0", 2), ("W1", 3)],
        [("W0", 3), ("CPU", 3), ("W1", 3)],
        [("W0", 3), ("W1", 5), ("CPU", 1)],
        [("CPU", 3), ("W0", 6)],
        [("W0", 2), ("CPU", 2), ("W1", 2), ("CPU", 2), ("W0", 1)],
        [("W0", 8), ("CPU", 1)],
    ],
    ids=lambda runs: "-".join(f"{device}x{count}" for device, count in runs),
)
def test_a_dry_run_plans_what_a_load_takes(
    model: Path, workers: tuple[DeviceRef, ...], child: RawChild, runs: list[tuple[str, int]]
) -> None:
    parameters = entries(*runs)
    probed = child.ask(Probe(path=str(model), devices=workers, parameters=parameters, context=CONTEXT))
    loaded = child.ask(Load(path=str(model), devices=workers, parameters=parameters, context=CONTEXT))
    assert isinstance(probed, Probed), probed
    assert isinstance(loaded, LoadedModel), loaded
    assert probed.exact
    assert bytes_by_device(probed.parts) == bytes_by_device(loaded.parts)
