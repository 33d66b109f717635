"""Probes include the draft model, and their numbers equal the forecast."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine.base.units import GIB
from engine.base.values import replace
from engine.devices.device import CPU_ID, Rig, make_host
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import single_device
from engine.planning.memory.drafts import Draft, read_draft
from engine.planning.memory.side_files import SideFiles
from engine.planning.plan.edit import Edit
from engine.planning.settings.context_settings import ContextSettings, LoadMode
from engine.runtime.probing.probe import probe
from tests.support.models import write_tiny_llama
from tests.support.plans import make_plan

CONTEXT = ContextSettings(n_ctx=1024, n_seq_max=2, n_ubatch=256, flash_attn="on")


@pytest.mark.parametrize("load_mode", ["none", "mmap"])
def test_a_probe_of_both_models_agrees_with_the_forecast(tmp_path: Path, load_mode: LoadMode) -> None:
    context = msgspec.structs.replace(CONTEXT, load_mode=load_mode)
    model = read_model(write_tiny_llama(tmp_path / "m.gguf", n_layers=4, n_ff=256))
    draft = read_draft(write_tiny_llama(tmp_path / "small.gguf", n_layers=2, n_embd=128), model, 6)
    assert draft.model is not None
    placed = replace(draft, layout=single_device(2, CPU_ID))
    plan = make_plan(
        model, Rig((), make_host("host", 8 * GIB)), Edit(single_device(4, CPU_ID), context, SideFiles(draft=placed))
    )
    told = {row.id: row.memory for row in probe(plan).forecast}
    assert told[CPU_ID].draft_bytes > 0
    assert told == {row.id: row.memory for row in plan.forecast}


def test_a_probe_without_a_draft_model_has_the_output_rows_of_a_draft(tmp_path: Path) -> None:
    model = read_model(write_tiny_llama(tmp_path / "m.gguf", n_layers=4))
    edit = Edit(single_device(4, CPU_ID), CONTEXT, SideFiles(draft=Draft("ngram", 3)))
    plan = make_plan(model, Rig((), make_host("host", 8 * GIB)), edit)
    [row] = probe(plan).forecast
    assert row.output_bytes == 2 * (3 + 1) * model.n_vocab * 4
