"""Compute buffers of a projector: a probe gives the same bytes as a load, on the CPU and other devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.planning.memory.backends import HOST_RULE
from engine.planning.memory.side_files import read_projector
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.protocol.messages import BufferMemory, LoadedModel, Probed
from engine.runtime.protocol.requests import Load, Probe, ProjectorFile
from tests.engine.runtime.child.raw_child import RawChild, entries, rpc_workers
from tests.support.models import write_tiny_llama
from tests.support.side_models import ProjectorKind, write_tiny_projector

CONTEXT = ContextSettings(n_ctx=256, n_batch=64, n_ubatch=64, threads=1)


def computing(parts: tuple[BufferMemory, ...]) -> dict[str, int]:
    return {part.device: part.compute_bytes for part in parts if part.buffer_type == "projector" and part.compute_bytes}


@pytest.mark.parametrize("kind", ["mlp", "gemma3"])
def test_a_dry_run_tells_what_a_load_takes(tmp_path: Path, kind: ProjectorKind) -> None:
    model = str(write_tiny_llama(tmp_path / "m.gguf", n_layers=4))
    path = write_tiny_projector(tmp_path / "mmproj.gguf", kind=kind, image_px=64)
    projector = read_projector(path)
    weights_bytes = projector.weights_bytes(HOST_RULE)
    files = [ProjectorFile(str(path), device, weights_bytes, projector.plain_bytes) for device in ("CPU", "W0")]
    layout = entries(("W0", 3))
    with rpc_workers(None) as (_, devices):
        # a worker has one client at a time
        with RawChild() as child:
            asked = [Probe(path=model, devices=devices, parameters=layout, context=CONTEXT, projector=f) for f in files]
            probed = list(map(child.ask, asked))
        with RawChild() as child:
            wanted = [Load(path=model, devices=devices, parameters=layout, context=CONTEXT, projector=f) for f in files]
            loaded = list(map(child.ask, wanted))
    for file, dry, real in zip(files, probed, loaded, strict=True):
        assert isinstance(dry, Probed), dry
        assert isinstance(real, LoadedModel), real
        assert computing(dry.parts) == computing(real.parts)
        assert computing(real.parts)[file.device] > 0
        assert sum(part.weights_bytes for part in real.parts if part.buffer_type == "projector") == weights_bytes
