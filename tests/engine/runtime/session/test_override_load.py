"""Tensor overrides in layout files: weights are on the named workers, as forecast."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.base.units import MIB
from engine.machines.rigs.lab import LabRig
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout_file import parse_layout
from engine.runtime.session.events import Loaded
from tests.support.load_specs import spec_of
from tests.support.models import write_tiny_moe
from tests.support.plans import make_report
from tests.support.session_log import SessionLog

N_LAYERS = 6
KINDS = ("weights_bytes", "mapped_bytes", "kv_cache_bytes", "recurrent_bytes", "output_bytes")
DOCUMENT = """{{"version": 1, "model": {{"layers": 6}},
  "runs": [{{"device": "RPC0", "layers": "0-2"}}, {{"device": "RPC1", "layers": "3-5"}}],
  "overrides": [{overrides}],
  "context": {{"n_ctx": 256, "n_batch": 64, "n_ubatch": 64, "threads": 1, "load_mode": "{load_mode}"}}}}"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    return read_model(write_tiny_moe(tmp_path_factory.mktemp("model") / "moe.gguf", n_layers=N_LAYERS))


@pytest.fixture(scope="module")
def lab() -> Iterator[LabRig]:
    with LabRig([64 * MIB, 64 * MIB]) as lab:
        yield lab


@pytest.mark.parametrize("load_mode", ["none", "mmap"])
@pytest.mark.parametrize(
    "overrides",
    [
        '{"part": "experts", "device": "CPU"}',
        '{"part": "experts", "layers": "1-3", "device": "CPU"}',
        '{"part": "experts", "layers": "0-1", "device": "RPC1"}, {"part": "experts", "device": "CPU"}',
        r'{"pattern": "blk\\.[24]\\.ffn_(up|down)_exps", "device": "CPU"}',
        r'{"pattern": "^output\\.weight$", "device": "RPC0"}',
        r'{"pattern": "attn_(q|k)\\.", "device": "RPC0"}, {"part": "all", "layers": "5", "device": "CPU"}',
    ],
)
def test_overridden_weights_are_where_they_were_asked_and_forecast(
    model: ModelFile, lab: LabRig, overrides: str, load_mode: str
) -> None:
    document = parse_layout(DOCUMENT.format(overrides=overrides, load_mode=load_mode), n_layers=N_LAYERS)
    forecast = make_report(model, lab.rig, document.layout, document.context).rows
    with SessionLog() as log:
        log.session.load(spec_of(model, lab.rig, document.layout, document.context))
        (loaded,) = log.wait_for_endings(1)
    assert isinstance(loaded, Loaded), loaded
    plain = parse_layout(DOCUMENT.format(overrides="", load_mode=load_mode), n_layers=N_LAYERS)
    without = make_report(model, lab.rig, plain.layout, plain.context).rows
    assert [row.weights_bytes + row.mapped_bytes for row in loaded.devices] != [
        row.weights_bytes + row.mapped_bytes for row in without
    ]
    for kind in KINDS:
        told = {row.id: getattr(row, kind) for row in loaded.devices}
        assert told == {row.id: getattr(row, kind) for row in forecast}, kind
